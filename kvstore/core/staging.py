"""Staging: the memory that one session writes its blocks into, and who uses which range of it.

First fit over a sorted list of holes; at most a few hundred ranges are out at a time. A range comes
back when its bytes were copied, or when its writer is known to have stopped writing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

EXTENT_ALIGN_BYTES = 64
"""Ranges begin on cache lines."""


class Extent(NamedTuple):
    """A range of a staging region, bytes."""

    offset: int
    length: int


class Extents:
    """Free and used ranges of `total_bytes`."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._holes: list[Extent] = [Extent(0, total_bytes)]

    def take(self, part_bytes: int, parts: int) -> tuple[list[int], list[Extent]]:
        """Offsets for up to `parts` parts, and the ranges they lie in, lowest first.

        Fewer offsets if there is no room for all. Every part begins on a cache line.
        """
        stride = -(-part_bytes // EXTENT_ALIGN_BYTES) * EXTENT_ALIGN_BYTES
        offsets: list[int] = []
        taken: list[Extent] = []
        holes: list[Extent] = []
        for hole in self._holes:
            fit = min(hole.length // stride, parts - len(offsets))
            end = hole.offset + fit * stride
            if fit > 0:
                offsets += range(hole.offset, end, stride)
                taken.append(Extent(hole.offset, fit * stride))
                self.used_bytes += fit * stride
            if hole.length > fit * stride:
                holes.append(Extent(end, hole.length - fit * stride))
        self._holes = holes
        return offsets, taken

    def give(self, extent: Extent) -> None:
        """A range is free again; neighbours grow together."""
        holes = self._holes
        at = bisect_left(holes, extent)
        offset, end = extent.offset, extent.offset + extent.length
        first, last = at, at
        if at and holes[at - 1].offset + holes[at - 1].length == offset:
            first, offset = at - 1, holes[at - 1].offset
        if at < len(holes) and holes[at].offset == end:
            last, end = at + 1, end + holes[at].length
        holes[first:last] = [Extent(offset, end - offset)]
        self.used_bytes -= extent.length

    def holes(self) -> Iterator[Extent]:
        """The free ranges, lowest first."""
        return iter(self._holes)


class Staging:
    """A session's staging region.

    copies: that read it now. idle_ns: since when no range of it is out. fresh: its session has not
    asked for any yet; turn_ns: since when it has its turn. stuck: a writer hangs in it, and it goes
    as soon as no other one writes.
    """

    __slots__ = ("closed", "copies", "extents", "fresh", "idle_ns", "region_id", "stuck", "turn_ns")

    def __init__(self, region_id: int, total_bytes: int, now_ns: int) -> None:
        self.region_id = region_id
        self.extents = Extents(total_bytes)
        self.copies = 0
        self.closed = False
        self.stuck = False
        self.fresh = True
        self.turn_ns = now_ns
        self.idle_ns = now_ns

    def begin_turn(self, now_ns: int) -> None:
        """Its session asks; a turn begins the first time."""
        if self.fresh:
            self.fresh = False
            self.turn_ns = self.idle_ns = now_ns

    @property
    def unused(self) -> bool:
        """Whether nobody writes or reads any of it now."""
        return not self.extents.used_bytes and not self.copies

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole region."""
        return self.extents.total_bytes
