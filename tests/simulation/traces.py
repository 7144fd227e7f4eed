"""Recorded traces that lie beside the repository; what needs them is skipped where they are not."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvstore.simulate.trace import Request, read_trace, with_even_blocks

FOLDER = Path(__file__).parents[2].parent / "shared" / "traces"

needs_traces = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no recorded traces in ../shared/traces beside the repository"
)


@cache
def requests(name: str) -> list[Request]:
    """The requests of a trace."""
    return read_trace(FOLDER / f"{name}.jsonl.gz")


@cache
def ragpulse() -> list[Request]:
    """RAGPulse as the published curves count it."""
    return with_even_blocks(requests("ragpulse"))


def published() -> dict[str, Any]:
    """RAGPulse's published curve: rows of (capacity, FIFO, LRU, optimum), in tokens."""
    with gzip.open(FOLDER / "published_hit_curves.json.gz", "rt") as file:
        curve: dict[str, Any] = json.load(file)["ragpulse"]
    return curve


def reference() -> dict[str, dict[str, dict[str, int]]]:
    """Hit tokens by trace, capacity and policy, of another simulator."""
    hits: dict[str, dict[str, dict[str, int]]]
    hits = json.loads((FOLDER / "reference_hit_tokens.json").read_text())["hits"]
    return hits
