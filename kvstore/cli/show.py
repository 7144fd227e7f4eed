"""How the tool prints: columns, sizes, times, JSON. For a person by default, for scripts by --json.

Columns are never cut or wrapped, so that the output can be piped; colour is left to the terminal
commands (`top`, `bench`). Pure but for `click.echo`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from kvstore.model.reasons import Reason

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def as_json(value: Any) -> None:
    """One JSON document."""
    click.echo(json.dumps(value, indent=2, sort_keys=False))


def columns(headers: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> None:
    """A table: the first `left` columns to the left, the others (numbers) to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    table = [list(headers), *cells]
    widths = [max(len(row[at]) for row in table) for at in range(len(headers))]
    for row in table:
        parts = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(parts).rstrip())


def pairs(values: Mapping[str, object]) -> None:
    """Name and value, one pair a line."""
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        click.echo(f"{name.ljust(width)}  {value}")


def size(length_bytes: float) -> str:
    """Bytes in binary units with up to three digits: "1.5 GiB"."""
    at = 0
    while abs(length_bytes) >= 1024 and at < len(_UNITS) - 1:
        length_bytes /= 1024
        at += 1
    if at == 0 or length_bytes >= 100:
        return f"{length_bytes:.0f} {_UNITS[at]}"
    return f"{length_bytes:.3g} {_UNITS[at]}"


def seconds(elapsed_s: float) -> str:
    """A span of time: "12 s", "3 h 5 min", "2 d 4 h"."""
    whole = int(elapsed_s)
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return f"{elapsed_s:.3g} s"


def milliseconds(elapsed_ms: float) -> str:
    """A duration with its unit: "0.021 ms", "12.3 ms", "1.2 s"."""
    if elapsed_ms >= 1_000:
        return f"{elapsed_ms / 1e3:.4g} s"
    return f"{elapsed_ms:.3g} ms"


def tokens(count: float) -> str:
    """A number of tokens, rounded to whole thousands where it is that large."""
    if count == float("inf"):
        return "never"
    if count == 0:
        return "always"
    return f"{count / 1e3:,.0f}k" if count >= 1_000 else f"{count:.0f}"


def share(part: float, whole: float) -> str:
    """A percentage, or "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def reason_fields(reason: Reason) -> dict[str, str]:
    """A reason for JSON: its name, where it comes from, what to do."""
    return {"reason": reason.name, "origin": reason.origin.value, "what": reason.text}
