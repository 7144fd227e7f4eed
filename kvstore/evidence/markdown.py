"""A report for people, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["as_markdown"]


def as_markdown(report: Mapping[str, Any]) -> str:
    """The report of `make_report` as text."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    verdict, criteria = report["verdict"], report["criteria"]
    yield f"# {report['name']}: {verdict['word']}"
    yield ""
    yield from _bullets(verdict["reasons"])
    yield ""
    yield f"Made {report['made_at']} with {_pairs(report['made_with'])}, seed {report['seed']}."
    yield f"Criteria {criteria['digest']}, fixed {criteria['fixed_at'] or 'never'}."
    yield ""
    yield from _table(("criterion", "state", "why"), [tuple(j.values()) for j in verdict["judged"]])
    yield from _samples(report)
    yield from _changes("All requests", report["changes"])
    strata = report["strata"]
    for by in dict.fromkeys(one["by"] for one in strata):
        rows = [one for one in strata if one["by"] == by]
        yield from _changes(f"By {by}", rows)
    for title, name in (("Improved", "improved"), ("Worse", "worse")):
        yield f"## {title}"
        yield ""
        yield from _bullets(report[name] or ["nothing whose whole interval shows it"])
        yield ""
    yield from _store(report)
    yield "## Known limits"
    yield ""
    yield from _bullets(report["limits"])
    yield ""
    back, later = report["rollback"], report["next_review"]
    yield "## Afterwards"
    yield ""
    yield f"- To roll back: `{back['setting']} = {back['value']}`; {back['effect']}."
    yield f"- Look again by {later['at_the_latest']}, or when {'; when '.join(later['or_when'])}."
    yield f"- `{later['told_by']}` tells what has changed since."


def _samples(report: Mapping[str, Any]) -> Iterator[str]:
    samples, balance = report["samples"], report["balance"]
    yield "## Data"
    yield ""
    rows = [
        (
            side,
            one["requests"],
            one["lookups"],
            "-" if one["reported"] is None else f"{one['reported']:.0%}",
            one["failed"],
            f"{one['from']} to {one['to']}" if one["from"] else "-",
        )
        for side, one in ((side, samples[side]) for side in ("baseline", "applied"))
    ]
    yield from _table(("side", "requests", "look-ups", "reported", "failed", "when"), rows)
    yield (
        f"Prompts have {_number(balance['baseline'])} and {_number(balance['applied'])} tokens in "
        f"the mean ({balance['interval']})."
    )
    yield ""
    files = [
        (one["path"], one["digest"][:19], one["from"] or "-", one["to"] or "-", one["lines"])
        for one in report["sources"]
    ]
    yield from _table(("file", "digest", "from", "to", "lines"), files)


def _changes(title: str, changes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    rows = [
        (
            *((one["which"],) if "which" in one else ()),
            one["metric"],
            _number(one["baseline"]),
            _number(one["applied"]),
            one["shown"],
            one["interval"],
            f"{one['baseline_requests']} / {one['applied_requests']}",
        )
        for one in changes
    ]
    first = ("which",) if changes and "which" in changes[0] else ()
    yield from _table(
        (*first, "metric", "baseline", "applied", "change", "interval", "requests"), rows
    )


def _store(report: Mapping[str, Any]) -> Iterator[str]:
    yield "## The store itself"
    yield ""
    resources = report["resources"]
    rows = [(name, _number(value)) for name, value in resources.items() if name != "known"]
    yield from _table(("figure", "value"), rows)
    holds = report["holds"]
    yield f"Reviews by state: {_pairs(holds['reviews']) or 'none'}."
    withheld = report["withheld"]
    yield (
        f"Withheld look-ups would have loaded {withheld['tokens']} tokens and saved "
        f"{withheld['saved_ms']:.0f} ms, by the plan."
    )
    yield ""
    daemons = [
        (one["instance"], one["kvstore"], one["python"], one["system"], one["config_digest"][:19])
        for one in report["daemons"]
    ]
    yield from _table(("daemon", "kvstore", "python", "system", "settings"), daemons)


def _table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _bullets(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"- {line}"


def _pairs(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
