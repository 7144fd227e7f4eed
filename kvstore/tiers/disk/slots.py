"""One size class of the ring: its slots in packed columns, who is whose parent, and a clock hand.

A slot is FREE, WRITING, LIVE or LEAVING (its row has to go first). All slots of the class have one
numbering: a segment's are neighbours. 18 bytes a slot. A live slot has a mark for the hand, a count
of the blocks whose parent it is, and a link to its own parent: its number, and how many blocks that
slot had held, so that a link to a block that went is known to be stale without being looked for.

Bookkeeping for the ring, which says who goes and why; pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.format import Segment
from kvstore.tiers.disk.hashtable import zeros

Numbers = NDArray[np.int64]

NONE, FREE, WRITING, LIVE, LEAVING = range(5)
"""NONE: of a segment that went; its numbers are used again for one of that size."""

COLD, SPARED, TOUCHED, QUEUED = range(4)
"""Not hit; hit, and passed by the hand since; hit; cold, and among the hand's next victims."""

WINDOW_SLOTS = 1_024
"""That the hand looks at together. Within one, what comes first goes first."""

_NO_PARENT = (1 << 32) - 1
_STAMPS = 1 << 16
_GROWTH = 1.5


class Slot(NamedTuple):
    """A place for one record."""

    segment: int
    slot: int


class Extent:
    """A segment's part of the numbering. used_tick: of the ring, when a slot was last hit or
    filled.
    """

    __slots__ = ("base", "free", "live", "segment", "used_tick", "writing")

    def __init__(self, segment: Segment, base: int, used_tick: int) -> None:
        self.segment = segment
        self.base = base
        self.used_tick = used_tick
        self.free, self.writing, self.live = segment.slots, 0, 0

    @property
    def end(self) -> int:
        return self.base + self.segment.slots


class SlotClass:
    """Segments of one (tenant, record bytes).

    bytes: of the segments' files. slots, free, writing, live: how many. demand: slots that are
    usually asked for at once.
    """

    _COLUMNS = (
        ("states", np.uint8),
        ("marks", np.uint8),
        ("rows", np.uint32),
        ("children", np.uint32),
        ("stamps", np.uint16),
        ("parents", np.uint32),
        ("parent_stamps", np.uint16),
    )
    __slots__ = (
        *(name for name, _ in _COLUMNS),
        "_bases",
        "_by_base",
        "_end",
        "_hand",
        "_holes",
        "_queue",
        "bytes",
        "demand",
        "extents",
        "free",
        "live",
        "record_bytes",
        "slots",
        "tenant",
        "writing",
    )
    states: NDArray[np.uint8]
    marks: NDArray[np.uint8]
    rows: NDArray[np.uint32]
    children: NDArray[np.uint32]
    stamps: NDArray[np.uint16]
    parents: NDArray[np.uint32]
    parent_stamps: NDArray[np.uint16]

    def __init__(self, tenant: bytes, record_bytes: int) -> None:
        self.tenant = tenant
        self.record_bytes = record_bytes
        self.demand = 0
        self.bytes = self.slots = self.free = self.writing = self.live = 0
        self.extents: dict[int, Extent] = {}
        self._by_base: list[Extent] = []
        self._bases: list[int] = []
        self._holes: dict[int, list[int]] = {}
        self._end = 0
        self._hand = 0
        self._queue: list[int] = []
        for name, dtype in self._COLUMNS:
            setattr(self, name, zeros(0, dtype))

    # ---------------------------------------------------------------- segments

    @property
    def leaving(self) -> int:
        """Slots that will be free once their rows are gone."""
        return self.slots - self.free - self.writing - self.live

    def add(self, segment: Segment, used_tick: int) -> None:
        """A segment with all slots free."""
        if holes := self._holes.get(segment.slots):
            base = holes.pop()
        else:
            base, self._end = self._end, self._end + segment.slots
            if self._end > len(self.states):
                self._grow(max(self._end, int(len(self.states) * _GROWTH)))
        extent = self.extents[segment.segment] = Extent(segment, base, used_tick)
        at = bisect_right(self._bases, base)
        self._bases.insert(at, base)
        self._by_base.insert(at, extent)
        self.states[base : extent.end] = FREE
        self.bytes += segment.file_bytes
        self.slots += segment.slots
        self.free += segment.slots

    def remove(self, segment: int) -> list[tuple[Slot, int]]:
        """A segment goes: its live slots and their row numbers, in order."""
        extent = self.extents.pop(segment)
        live = np.flatnonzero(self.states[extent.base : extent.end] == LIVE) + extent.base
        self._orphan(live)
        rows = self.rows[live].tolist()
        at = self._bases.index(extent.base)
        del self._bases[at], self._by_base[at]
        self._holes.setdefault(extent.segment.slots, []).append(extent.base)
        self.states[extent.base : extent.end] = NONE
        self.bytes -= extent.segment.file_bytes
        self.slots -= extent.segment.slots
        self._count(extent, -extent.free, -extent.writing, -extent.live)
        return [
            (Slot(segment, number - extent.base), row)
            for number, row in zip(live.tolist(), rows, strict=True)
        ]

    def number(self, slot: Slot) -> int:
        """Of a slot that exists; -1 of one that does not."""
        extent = self.extents.get(slot.segment)
        if extent is None or not 0 <= slot.slot < extent.segment.slots:
            return -1
        return extent.base + slot.slot

    def numbers(self, segments: NDArray[np.uint32], slots: NDArray[np.uint32]) -> Numbers:
        """i64 [n]: the same for many."""
        ids, inverse = np.unique(segments, return_inverse=True)
        known = [self.extents.get(segment) for segment in ids.tolist()]
        bases = np.array([-1 if one is None else one.base for one in known], np.int64)
        counts = np.array([0 if one is None else one.segment.slots for one in known], np.int64)
        inverse = inverse.reshape(-1)
        return np.where(slots < counts[inverse], bases[inverse] + slots, -1)

    def slot(self, number: int) -> Slot:
        """The slot of a number."""
        extent = self._extent(number)
        return Slot(extent.segment.segment, number - extent.base)

    # ---------------------------------------------------------------- states

    def take(self, count: int) -> list[Slot]:
        """Up to `count` free slots, now WRITING."""
        taken: list[Slot] = []
        for segment, extent in self.extents.items():
            if len(taken) >= count:
                break
            if extent.free:
                free = np.flatnonzero(self.states[extent.base : extent.end] == FREE)
                free = free[: count - len(taken)]
                self.states[free + extent.base] = WRITING
                self._count(extent, -len(free), len(free), 0)
                taken += [Slot(segment, slot) for slot in free.tolist()]
        return taken

    def fill(self, numbers: Numbers, rows: Numbers, parents: Numbers, ticks: Numbers) -> None:
        """WRITING to LIVE, one after the other, all different. parents: numbers that may or may not
        be those of live ones, or of ones that were filled before; -1 for none.
        """
        linked = self._parents_before(numbers, parents)
        self.states[numbers] = LIVE
        self.marks[numbers] = COLD
        self.rows[numbers] = rows
        self.children[numbers] = 0
        self.stamps[numbers] += 1
        self.parents[numbers] = _NO_PARENT
        self.link(numbers[linked], parents[linked])
        for extent, here in self._by_extent(numbers):
            self._count(extent, 0, -len(here), len(here))
            extent.used_tick = int(ticks[here[-1]])

    def writes(self, numbers: Numbers) -> bool:
        """Whether all are WRITING."""
        return bool((self.states[numbers] == WRITING).all())

    def _parents_before(self, numbers: Numbers, parents: Numbers) -> NDArray[np.bool_]:
        """Which parents are live by the time that their child is filled."""
        order = np.argsort(numbers)
        at = np.searchsorted(numbers, parents, sorter=order)
        at = order[np.minimum(at, len(numbers) - 1)]
        among = numbers[at] == parents
        before: NDArray[np.bool_] = (parents >= 0) & (self.states[parents] == LIVE)
        before |= among & (at < np.arange(len(numbers)))
        return before

    def _by_extent(self, numbers: Numbers) -> list[tuple[Extent, NDArray[np.intp]]]:
        """Each extent that has some of the numbers, and which ones."""
        at = np.searchsorted(self._bases, numbers, "right") - 1
        return [(self._by_base[one], np.flatnonzero(at == one)) for one in np.unique(at).tolist()]

    def fill_many(self, numbers: Numbers, rows: Numbers) -> NDArray[np.bool_]:
        """FREE to LIVE, without parents; False for numbers that are -1, not free, or a repeat."""
        filled = np.zeros(len(numbers), np.bool_)
        filled[np.unique(numbers, return_index=True)[1]] = True
        filled &= numbers >= 0
        filled[filled] = self.states[numbers[filled]] == FREE
        chosen = numbers[filled]
        self.states[chosen] = LIVE
        self.rows[chosen] = rows[filled]
        self.stamps[chosen] += 1
        self.parents[chosen] = _NO_PARENT
        counts = np.bincount(np.searchsorted(self._bases, chosen, "right") - 1)
        for extent, count in zip(self._by_base, counts.tolist(), strict=False):
            self._count(extent, -count, 0, count)
        return filled

    def leave(self, number: int) -> tuple[int, int]:
        """LIVE to LEAVING: the row number it had, and the number of its parent (-1: none), which
        has a child less.
        """
        parent = self.parent(number)
        if parent >= 0:
            self.children[parent] -= 1
        self.states[number] = LEAVING
        self._count(self._extent(number), 0, 0, -1)
        return int(self.rows[number]), parent

    def vacate(self, number: int) -> None:
        """WRITING or LEAVING to FREE; nothing if it is neither."""
        state = self.states[number]
        if state in (WRITING, LEAVING):
            self._count(self._extent(number), 1, -int(state == WRITING), 0)
            self.states[number] = FREE

    # ---------------------------------------------------------------- parents

    def parent(self, number: int) -> int:
        """The number of the live parent; -1 if none is on disk."""
        parent = int(self.parents[number])
        if parent == _NO_PARENT or self.states[parent] != LIVE:
            return -1
        return parent if self.stamps[parent] == self.parent_stamps[number] else -1

    def link(self, children: Numbers, parents: Numbers) -> None:
        """Live ones without a parent yet, all different; live parents."""
        self.parents[children] = parents
        self.parent_stamps[children] = self.stamps[parents]
        np.add.at(self.children, parents, 1)

    def unlinked(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Which have no parent."""
        unlinked: NDArray[np.bool_] = self.parents[numbers] == _NO_PARENT
        return unlinked

    def _orphan(self, numbers: Numbers) -> None:
        """Parents of live slots have these children no longer."""
        numbers = numbers[~self.unlinked(numbers)]
        parents = self.parents[numbers]
        linked = self.states[parents] == LIVE
        linked &= self.stamps[parents] == self.parent_stamps[numbers]
        np.subtract.at(self.children, parents[linked], 1)

    # ---------------------------------------------------------------- hand

    def next_victims(
        self, count: int, windows_max: int, pinned: Container[Slot]
    ) -> list[tuple[Slot, int]]:
        """Up to `count` victims, now LEAVING, and their row numbers. The hand enters no more than
        `windows_max` windows.
        """
        victims: list[tuple[Slot, int]] = []
        while len(victims) < count:
            if not self._queue:
                if windows_max <= 0 or not self._end:
                    break
                windows_max -= 1
                self._enter_window()
                continue
            number = self._queue.pop()
            if (
                self.marks[number] != QUEUED
                or self.states[number] != LIVE
                or self.children[number]
                or (slot := self.slot(number)) in pinned
            ):
                continue
            row, parent = self.leave(number)
            victims.append((slot, row))
            if parent >= 0 and not self.children[parent] and self.marks[parent] in (COLD, QUEUED):
                self.marks[parent] = QUEUED
                self._queue.append(parent)
        return victims

    def windows(self) -> int:
        """How many windows a whole round has."""
        return -(-self._end // WINDOW_SLOTS)

    def _enter_window(self) -> None:
        """Who was hit since the hand last came is spared, the other live ones are queued."""
        start = self._hand if self._hand < self._end else 0
        self._hand = min(start + WINDOW_SLOTS, self._end)
        live = self.states[start : self._hand] == LIVE
        marks = self.marks[start : self._hand]
        touched = live & (marks == TOUCHED)
        queued = live & ~touched
        marks[touched] = SPARED
        marks[queued] = QUEUED
        # Popped from the end: the first one is looked at first.
        self._queue += (np.flatnonzero(queued)[::-1] + start).tolist()

    # ---------------------------------------------------------------- parts

    def check(self) -> None:
        """AssertionError if the books are wrong. O(slots)."""
        for extent in self.extents.values():
            counts = np.bincount(self.states[extent.base : extent.end], minlength=5).tolist()
            assert counts[NONE] == 0, "a segment's slots are slots"
            assert counts[FREE:LEAVING] == [extent.free, extent.writing, extent.live], "counts"
            assert extent.segment.slot_bytes == self.record_bytes
        children = np.zeros(len(self.states), np.uint32)
        for number in np.flatnonzero(self.states == LIVE).tolist():
            if (parent := self.parent(number)) >= 0:
                children[parent] += 1
        live = self.states == LIVE
        assert (children[live] == self.children[live]).all(), "children"
        assert np.count_nonzero(self.states != NONE) == self.slots
        totals = np.bincount(self.states, minlength=5)[FREE:LEAVING].tolist()
        assert totals == [self.free, self.writing, self.live], "totals"
        assert self.bytes == self.slots * self.record_bytes

    def _count(self, extent: Extent, free: int, writing: int, live: int) -> None:
        extent.free += free
        extent.writing += writing
        extent.live += live
        self.free += free
        self.writing += writing
        self.live += live

    def _extent(self, number: int) -> Extent:
        return self._by_base[bisect_right(self._bases, number) - 1]

    def _grow(self, size: int) -> None:
        for name, dtype in self._COLUMNS:
            older = getattr(self, name)
            column = zeros(size, dtype)
            column[: len(older)] = older
            setattr(self, name, column)
