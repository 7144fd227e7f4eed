"""Which slot next: segments of equal slots, a clock hand over each class, capacity in bytes.

A class is (tenant digest, record bytes). Promises: a slot is handed out only if no durable row
names it; a slot that is pinned, being written or on its way out is nobody's victim; a block goes
before its parent does, so that what is on disk stays closed under parent (only whole segments and
forgotten names break that); segments, index and what was set aside never sum to more than the
capacity, unless a restart lowered it, and then `place` works it off first.

Order of reuse, which the caller keeps:
    placement = ring.place(tenant, record_bytes, count)
    make the files of placement.new_segments; write to placement.slots; fdatasync
    index.commit(add=rows, add_segments=..., remove=victims, remove_segments=retired)
    ring.settle(...) each written slot; ring.release(victims); ring.unlinked(retired) once their
    files are gone
`place` keeps victims ahead of need, so that their removal travels with the commit of the batch
before. If `slots` are fewer than asked for and there are victims or retired segments, the caller
commits the removals alone, releases, and asks again.

Pure: no clock, no I/O, no thread. Not thread-safe: the caller holds the lock that guards the
catalog, for microseconds to a few milliseconds and never across the device. Slots are (segment,
slot); `row` is the catalog's row number, which the ring only carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.format import Segment

NO_ROW = -1
SEGMENT_BYTES_MAX = 256 << 20


class Slot(NamedTuple):
    """A place for one record."""

    segment: int
    slot: int


class Victim(NamedTuple):
    """A slot whose row has to go; row: what `settle` was told."""

    segment: int
    slot: int
    row: int


class Placement(NamedTuple):
    """What `place` decided.

    slots: to write to now, in order; fewer than asked for if there are none. victims: blocks to
    take out of catalog and index, then `release`. new_segments: files to make before their slots
    are written, and to add to the index with the first commit that names them. retired_segments:
    to take out of the index with all their rows, then to unlink, then `unlinked`; their blocks
    are among `victims`, but those need no `release`. drop_aside: what was set aside has to be
    deleted first (then set `ring.aside_bytes`).
    """

    slots: list[Slot]
    victims: list[Victim]
    new_segments: list[Segment]
    retired_segments: list[Segment]
    drop_aside: bool


class RingUsage(NamedTuple):
    """segment_bytes: files on disk. slots: of all segments; live_slots: hold a committed block;
    free_slots: could be written now. live_bytes: record bytes of live slots.
    """

    capacity_bytes: int
    segment_bytes: int
    index_bytes: int
    aside_bytes: int
    segments: int
    slots: int
    live_slots: int
    free_slots: int
    live_bytes: int


class Ring:
    """All segments of a folder."""

    aside_bytes: int

    def __init__(
        self,
        capacity_bytes: int,
        index_bytes: Callable[[int], int],
        *,
        aside_bytes: int = 0,
        next_segment: int = 0,
        stock_slots: int = 256,
    ) -> None:
        """index_bytes: slots to bytes of the index's allowance. next_segment: lowest id never used.
        stock_slots: free slots kept ahead for each class, at most half a segment's.
        """
        raise NotImplementedError

    # ---- start

    def restore_segment(self, segment: Segment) -> None:
        """A segment of the index, all slots free. ValueError if the id is known."""
        raise NotImplementedError

    def restore(
        self,
        segments: NDArray[np.uint32],
        slots: NDArray[np.uint32],
        rows: NDArray[np.int64],
        depths: NDArray[np.uint32],
        generations: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """Loaded rows, one each. False where the slot does not exist or is taken: not restored."""
        raise NotImplementedError

    def link(self, slots: Sequence[Slot], parents: Sequence[Slot]) -> None:
        """Says whose block is whose parent, for blocks that were restored before their parents."""
        raise NotImplementedError

    # ---- writing

    def place(self, tenant: bytes, record_bytes: int, count: int) -> Placement:
        """Slots for `count` records of `record_bytes`. ValueError if one alone exceeds the
        capacity."""
        raise NotImplementedError

    def settle(self, slot: Slot, row: int, depth: int, parent: Slot | None) -> None:
        """The slot's row is committed. parent: where the parent's record is, if it is on disk."""
        raise NotImplementedError

    def abandon(self, slots: Sequence[Slot]) -> None:
        """Slots of a placement that were not written or not committed: free again. Their old rows
        were gone before."""
        raise NotImplementedError

    def release(self, slots: Sequence[Slot] | Sequence[Victim]) -> None:
        """Their rows are durably gone: free. For victims of `place` and of `evict`."""
        raise NotImplementedError

    def unlinked(self, segment: int) -> None:
        """The file of a retired segment, or of a new one that could not be made, is gone."""
        raise NotImplementedError

    def evict(self, slots: Sequence[Slot]) -> list[Victim]:
        """Takes out blocks by name (forgotten, corrupt): victims to remove from the index, then
        `release`. Ones that are not live are left out. A pinned one goes too: what is read from it
        is verified anyway."""
        raise NotImplementedError

    def reclaim(self) -> Placement:
        """Segments to retire until all fits into the capacity: after a start with a lower one, or
        to give back space on a full file system (lower `capacity_bytes` first)."""
        raise NotImplementedError

    # ---- reading

    def touch(self, segments: NDArray[np.uint32], slots: NDArray[np.uint32]) -> None:
        """These were hit: they get a second chance."""
        raise NotImplementedError

    def pin(self, slot: Slot) -> None:
        """Nobody's victim until as many `unpin`. KeyError if it is not live."""
        raise NotImplementedError

    def unpin(self, slot: Slot) -> None:
        raise NotImplementedError

    # ---- figures

    def usage(self) -> RingUsage:
        raise NotImplementedError

    def check(self) -> None:
        """AssertionError if the books are wrong. O(slots)."""
        raise NotImplementedError


def segment_slots(capacity_bytes: int, record_bytes: int) -> int:
    """Slots of a new segment: as many records as fit into min(256 MiB, capacity / 32), at least
    one.
    """
    raise NotImplementedError
