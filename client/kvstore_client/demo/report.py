"""The demo's tables, drawn on a terminal or into a file."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore_client.demo.evidence import Transcript

__all__ = ["console", "show_claims", "show_rejections", "show_turns"]

PLAIN_WIDTH: Final = 118


def console() -> Console:
    """On a terminal as wide as it is; in a file wide enough for the tables."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show_turns(screen: Console, title: str, transcript: Transcript) -> None:
    """One row a turn, and what was said."""
    table = Table(title=title, title_justify="left")
    numbers = ("turn", "prompt\ntokens", "from\nstore", "MiB\nmoved")
    times = ("ideal\nms", "fetch\nms", "load\nms")
    for name in numbers + times:
        table.add_column(name, justify="right", min_width=6, no_wrap=True)
    table.add_column("first token\nms, stored", justify="right", min_width=11)
    table.add_column("first token\nms, computed", justify="right", min_width=12)
    for turn in transcript.turns:
        moved = turn.restored_bytes > 0
        table.add_row(
            str(turn.number),
            f"{turn.prompt_tokens:,}",
            f"{turn.restored_tokens:,}",
            f"{turn.restored_bytes / 2**20:.1f}" if moved else "-",
            f"{turn.ideal_ms:.1f}" if moved else "-",
            f"{turn.fetch_ms:.1f}" if moved else "-",
            f"{turn.load_ms:.1f}" if moved else "-",
            f"{turn.first_token_ms:,.0f}" if moved else "-",
            f"{turn.fresh_first_token_ms:,.0f}",
        )
    screen.print(table)
    for turn in transcript.turns:
        screen.print(f"  {turn.number}. {escape(turn.question)} [dim]{escape(turn.answer)}[/dim]")
    screen.print()


def show_rejections(screen: Console, transcript: Transcript) -> None:
    """What was offered and which field kept it out."""
    table = Table(title="The same blocks, offered to what is not the same model", show_lines=True)
    table.title_justify = "left"
    for name in ("offer", "from the\nstore", "answer", "fields that differ"):
        table.add_column(name, overflow="fold")
    for rejection in transcript.rejections:
        differences = "\n".join(_short(each) for each in rejection.differences) or "none named"
        table.add_row(
            rejection.offer,
            f"{rejection.restored_tokens} tokens",
            rejection.reason,
            escape(differences),
        )
    screen.print(table)


def show_claims(screen: Console, transcripts: list[Transcript]) -> int:
    """Every claim, true or false; returns how many were false."""
    claims = [claim for transcript in transcripts for claim in transcript.claims]
    for claim in claims:
        mark = "[green]yes[/green]" if claim.true else "[bold red]NO [/bold red]"
        detail = f" [dim]({escape(claim.detail)})[/dim]" if claim.detail else ""
        screen.print(f"{mark} {escape(claim.text)}{detail}")
    return sum(not claim.true for claim in claims)


def _short(difference: str) -> str:
    """Long digests are cut to what a person compares."""
    words = [
        word if len(word) <= 40 else f"{word[:22]}...{word[-6:]}" for word in difference.split(" ")
    ]
    return " ".join(words)
