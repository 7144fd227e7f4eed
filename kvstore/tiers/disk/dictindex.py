"""An `Index` in memory, with a log of what was committed and faults on demand.

For tests and the simulator: it promises what `LmdbIndex` promises, survives as long as the object,
and lets a test look at every commit, make the n-th one fail, or go back to what was durable at any
of them. No I/O, no clock.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.tiers.disk.format import Segment
from kvstore.tiers.disk.index import IndexRow


class Commit(NamedTuple):
    """One transaction as it was asked for."""

    remove: tuple[tuple[int, int], ...]
    add: tuple[IndexRow, ...]
    remove_segments: tuple[int, ...]
    add_segments: tuple[Segment, ...]
    meta: tuple[tuple[str, bytes | None], ...]


class DictIndex:
    """`log`: commits that took hold, in order. `fail`: number of a coming commit (1 is the next)
    to the error that it raises; with `fail_after` it takes hold first, as a power cut before the
    reply would have it.
    """

    def __init__(self) -> None:
        raise NotImplementedError

    def at(self, commits: int) -> DictIndex:
        """What an index opened after the first `commits` of the log would be."""
        raise NotImplementedError
