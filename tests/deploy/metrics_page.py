"""Reads deploy/docs/metrics.md: what it says of each metric and of each label."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.deploy.queries import ROOT

PAGE = ROOT / "deploy/docs/metrics.md"


class Listed(NamedTuple):
    """A row of a table of metrics."""

    name: str
    type: str
    unit: str
    labels: frozenset[str]
    meaning: str


class Label(NamedTuple):
    """A row of the table of labels. at_most: a number, or in words. values: those named."""

    name: str
    at_most: str
    values: frozenset[str]


def metrics(page: Path = PAGE) -> dict[str, Listed]:
    """By name."""
    rows = [row for row in _rows(page) if len(row) == 5 and row[0].startswith("`")]
    found = [Listed(_word(r[0]), r[1], r[2], frozenset(_words(r[3])), r[4]) for r in rows]
    assert len(found) == len({one.name for one in found}), "a metric is listed twice"
    return {one.name: one for one in found}


def labels(page: Path = PAGE) -> dict[str, Label]:
    """By name."""
    rows = [row for row in _rows(page) if len(row) == 3 and row[0].startswith("`")]
    return {_word(r[0]): Label(_word(r[0]), r[1], frozenset(_words(r[2]))) for r in rows}


def _rows(page: Path) -> Iterator[list[str]]:
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _word(cell: str) -> str:
    (word,) = _words(cell)
    return word
