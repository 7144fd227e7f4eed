"""`kvstore verify`: checks the folder of a disk tier that no daemon uses. Needs no daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kvstore.cli import show
from kvstore.cli.connect import NotSo

if TYPE_CHECKING:
    from kvstore.tiers.disk.report import Report

SHOWN_MAX = 50


@click.command(short_help="Check a disk tier's folder, offline.")
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--capacity", "capacity_text", metavar="SIZE", help="What it may take: disk.capacity_bytes."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, capacity_text: str | None, as_json: bool) -> None:
    """Check every block in the folder PATH (disk.path) against its row, byte for byte.

    Changes nothing. Refuses a folder that a daemon uses. Exit code 1 if anything is damaged; a
    daemon drops what is damaged by itself when it meets it.
    """
    # The index's library is loaded for this command alone.
    from kvstore.tiers.disk.verify import NotChecked, verify

    capacity_bytes = 0 if capacity_text is None else _bytes(capacity_text)
    try:
        with _Progress(quiet=as_json) as advance:
            report = verify(path, progress=advance, capacity_bytes=capacity_bytes)
    except NotChecked as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        show.as_json(report.to_dict())
    else:
        _print(report)
    if not report.ok:
        total = sum(report.damage_counts.values())
        raise NotSo(f"{total:,} damaged in {path}")


class _Progress:
    """A bar on standard error, of bytes read; nothing where that is no terminal, or if quiet."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
            transient=True,
        )

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        task = self._progress.add_task("reading", total=None)

        def advance(done: int, total: int) -> None:
            self._progress.update(task, completed=done, total=total)

        return advance

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _bytes(text: str) -> int:
    from kvstore.config import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--capacity") from error


def _print(report: Report) -> None:
    books = report.accounting
    facts: dict[str, object] = {
        "folder": f"{report.folder} ({report.folder_id or 'no id'})",
        "blocks": f"{report.right:,} of {report.rows:,} right, in {report.spaces:,} spaces",
        "segments": f"{report.segments:,} with {report.slots:,} slots",
        "unreachable": f"{report.parents_missing:,} blocks whose parent is not here",
        "not named": f"{report.unnamed_records:,} whole records, {report.unnamed_slots:,} cut, "
        f"{report.unknown_segments:,} segments (left by evictions and crashes)",
        "bytes": f"{show.size(books.total_bytes)}: segments {show.size(books.segment_bytes)}, "
        f"index {show.size(books.index_bytes)}, set aside {show.size(books.aside_bytes)}, "
        f"unnamed segments {show.size(books.unknown_segment_bytes)}, "
        f"other {show.size(books.other_bytes)}",
        "payload": f"{show.size(books.payload_bytes)} in slots of {show.size(books.record_bytes)}",
    }
    if books.capacity_bytes:
        used = show.share(books.total_bytes, books.capacity_bytes)
        facts["capacity"] = f"{show.size(books.capacity_bytes)}, {used} used"
    show.pairs(facts)
    for note in report.notes:
        click.echo(f"note: {note}")
    if report.ok:
        click.echo("nothing is damaged")
        return
    click.echo()
    rows = [(damage.kind.value, damage.where, damage.what) for damage in report.damages]
    show.columns(("damage", "where", "what"), rows[:SHOWN_MAX], left=3)
    if (more := sum(report.damage_counts.values()) - SHOWN_MAX) > 0:
        click.echo(f"and {more:,} more")
    click.echo()
    show.columns(
        ("damage", "count"),
        [(kind.value, f"{count:,}") for kind, count in report.damage_counts.items()],
    )
