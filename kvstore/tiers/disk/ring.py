"""Which slot next: segments of equal slots, a clock hand over each class, capacity in bytes.

A class is (tenant digest, record bytes). Promises: a slot is handed out only if no durable row
names it; a slot that is pinned, being written or on its way out is nobody's victim; a block goes
before its parent does, so that what is on disk stays closed under parent (only whole segments and
forgotten names break that); segments, index and what was set aside never sum to more than the
capacity, unless that was lowered, and then `place` works it off first.

Order of reuse, which the caller keeps:
    placement = ring.place(tenant, record_bytes, count)
    make the files of placement.new_segments; write to placement.slots; fdatasync
    index.commit(add=rows, add_segments=..., remove=victims, remove_segments=retired)
    ring.settle(...) the written slots; ring.release(victims); ring.unlinked(retired) once their
    files are gone
`place` keeps victims ahead of need, so that their removal travels with the commit of the batch
before. If `slots` are fewer than asked for and there are victims, retired segments or something to
drop, the caller commits the removals alone, releases, and asks again.

Who goes. Each class has a hand. A block that was hit since the hand last came by is spared for one
round; of the others those without children on disk go, and after a block its parent, if nobody hit
that one either, so that a prompt that nobody asks for goes from its end to its head at once. While
room is scarce a class below its share (its tenant's quota, or an equal one) gets a
whole segment, the coldest of the class most over its own; so does any class from one that had no
hit while as many bytes were written as the folder holds, if that is of its own tenant or of one
that neither hit nor wrote anything in that time.

Pure: no clock, no I/O, no thread. Not thread-safe: the caller holds the lock that guards the
catalog, for microseconds to a few milliseconds and never across the device. `row` is the catalog's
row number, which the ring only carries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.format import Segment
from kvstore.tiers.disk.hashtable import zeros
from kvstore.tiers.disk.room import SEGMENT_BYTES_MAX, Room, segment_slots
from kvstore.tiers.disk.slots import LIVE, TOUCHED, Slot, SlotClass

__all__ = [
    "SEGMENT_BYTES_MAX",
    "Placement",
    "Ring",
    "RingUsage",
    "Slot",
    "Victim",
    "segment_slots",
]

_STOCK_SHARE = 16
"""At most this part of a class's slots is kept free."""
_AHEAD_WINDOWS_MAX = 128
"""How far the hand goes for victims that are not needed yet: about a millisecond."""
_LONG_AGO = -(1 << 64)
NO_SEGMENT = (1 << 32) - 1
"""The segment of a slot that is none."""

Pairs: TypeAlias = "Sequence[Slot] | NDArray[np.uint32]"


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
    to take out of the index with all their rows, then to unlink, then `unlinked`; their blocks are
    among `victims`, but those need no `release`. drop_aside: what was set aside has to be deleted
    first (then set `ring.aside_bytes`). All empty: there is no room for such a record now.
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
    """All segments of a folder; see the module's docstring."""

    def __init__(
        self,
        capacity_bytes: int,
        index_bytes: Callable[[int], int],
        *,
        aside_bytes: int = 0,
        next_segment: int = 0,
        strange_segments: Collection[int] = (),
        stock_slots: int = 256,
        quota_bytes: Mapping[bytes, int] = MappingProxyType({}),
    ) -> None:
        """index_bytes: slots to bytes of the index's allowance. quota_bytes: by tenant digest;
        others share equally what these leave. next_segment: lowest id never used,
        but for strange_segments, which have a file that is not ours, and are passed over.
        stock_slots: free slots kept ahead for each class, at most; no more than are usually asked
        for at once, or a sixteenth of the class's.
        """
        self._room = Room(capacity_bytes, aside_bytes, index_bytes, quota_bytes)
        self.aside_stays = False
        """What was set aside cannot be removed: it takes its room, and blocks go. May be set."""
        self._next_segment = next_segment
        self._strange_segments = frozenset(strange_segments)
        self._stock_slots = stock_slots
        self._owners: dict[int, SlotClass] = {}
        self._pins: dict[Slot, int] = {}
        self._depths: dict[SlotClass, NDArray[np.uint32]] = {}

    @property
    def capacity_bytes(self) -> int:
        """May be set at any time; segments keep the size that they have."""
        return self._room.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity_bytes: int) -> None:
        self._room.capacity_bytes = capacity_bytes

    @property
    def aside_bytes(self) -> int:
        """Of what was set aside; may be set."""
        return self._room.aside_bytes

    @aside_bytes.setter
    def aside_bytes(self, aside_bytes: int) -> None:
        self._room.aside_bytes = aside_bytes

    # ---- start

    def restore_segment(self, segment: Segment) -> None:
        """A segment of the index, all slots free. ValueError if the id is known."""
        if segment.segment in self._owners or segment.segment in self._room.retired:
            raise ValueError(f"segment {segment.segment} is known")
        self._next_segment = max(self._next_segment, segment.segment + 1)
        self._add(segment, self._class(segment.tenant_digest, segment.slot_bytes), _LONG_AGO)

    def restore(
        self,
        segments: NDArray[np.uint32],
        slots: NDArray[np.uint32],
        rows: NDArray[np.int64],
        depths: NDArray[np.uint32],
        generations: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """Loaded rows, one each. False where the slot does not exist or is taken: not restored.

        The higher the generations of a segment's rows, the warmer it counts.
        """
        restored = np.zeros(len(segments), np.bool_)
        ids = np.unique(segments)
        owners = [self._owners.get(segment) for segment in ids.tolist()]
        for owner in {id(one): one for one in owners if one is not None}.values():
            its = ids[[one is owner for one in owners]]
            here = np.flatnonzero(np.isin(segments, its))
            numbers = owner.numbers(segments[here], slots[here])
            filled = owner.fill_many(numbers, rows[here])
            self._depths_of(owner)[numbers[filled]] = depths[here[filled]]
            restored[here[filled]] = True
            for segment in its.tolist():
                # Generations order the past; all that happens from now on comes after it.
                newest = int(generations[segments == segment].max()) + _LONG_AGO
                extent = owner.extents[segment]
                extent.used_tick = max(extent.used_tick, newest)
        return restored

    def link(self, slots: Pairs, parents: Pairs) -> None:
        """Says whose block is whose parent, for restored blocks, before anything is placed. Slots
        or an array u32 [n, 2] of them. What cannot be (another class, a parent not above its child,
        a slot that is not live) is left out.
        """
        below, above = _pairs(slots), _pairs(parents)
        for owner in list(self._room.classes.values()):
            children = owner.numbers(below[:, 0], below[:, 1])
            over = owner.numbers(above[:, 0], above[:, 1])
            depths = self._depths.get(owner)
            both = (children >= 0) & (over >= 0)
            if depths is None or not both.any():
                continue
            children, over = children[both], over[both]
            fits = (owner.states[children] == LIVE) & (owner.states[over] == LIVE)
            fits &= owner.unlinked(children) & (depths[over] < depths[children])
            first = np.zeros(len(children), np.bool_)
            first[np.unique(children, return_index=True)[1]] = True
            owner.link(children[fits & first], over[fits & first])

    # ---- writing

    def place(self, tenant: bytes, record_bytes: int, count: int) -> Placement:
        """Slots for `count` records of `record_bytes`; see `Placement`."""
        self._depths.clear()
        owner = self._class(tenant, record_bytes)
        owner.demand = max(count, owner.demand * 7 // 8)
        placement = self.reclaim()
        placement.slots.extend(owner.take(count))
        while len(placement.slots) < count and (segment := self._new_segment(owner)) is not None:
            placement.new_segments.append(segment)
            placement.slots.extend(owner.take(count - len(placement.slots)))
        missing = count - len(placement.slots)
        stock = min(self._stock_slots, owner.demand, owner.slots // _STOCK_SHARE)
        ahead = stock - owner.free
        if missing + ahead > 0 and not self._room.room_slots(owner):
            if self.aside_bytes and not self.aside_stays:
                placement = placement._replace(drop_aside=True)
            else:
                self._make_room(owner, missing, missing + ahead, placement)
        if not owner.extents:
            self._room.classes.pop((tenant, record_bytes), None)
        return placement

    def is_short(self) -> bool:
        """Whether a class has fewer free slots than are usually asked for at once, and there is
        room for more.
        """
        classes = self._room.classes.values()
        return any(self._is_short(owner) and self._room.room_slots(owner) for owner in classes)

    def stock(self) -> list[Segment]:
        """New segments for classes that are short, to make as those of `place`."""
        short = [owner for owner in self._room.classes.values() if self._is_short(owner)]
        made = [self._new_segment(owner) for owner in short]
        return [segment for segment in made if segment is not None]

    def settle(
        self, slots: Pairs, rows: NDArray[np.int64], depths: NDArray[np.int64], parents: Pairs
    ) -> None:
        """The rows of slots of one class are committed. parents: where the records of their parents
        are, in NO_SEGMENT for those that are not on disk; a block of depth 0 has none. ValueError,
        and none is settled, if a slot is not being written.
        """
        chosen, above = _pairs(slots), _pairs(parents)
        if not len(chosen):
            return
        owner = self._owners.get(int(chosen[0, 0]))
        numbers = np.full(1, -1) if owner is None else owner.numbers(chosen[:, 0], chosen[:, 1])
        repeated = len(np.unique(numbers)) < len(numbers)
        if owner is None or repeated or (numbers < 0).any() or not owner.writes(numbers):
            raise ValueError(f"a slot of {chosen.tolist()} is not being written")
        # What was filled before is none of its descendants: links make no circle.
        over = np.where(depths > 0, owner.numbers(above[:, 0], above[:, 1]), -1)
        ticks = self._room.written_bytes + owner.record_bytes * np.arange(1, len(numbers) + 1)
        self._room.written_bytes = int(ticks[-1])
        owner.fill(numbers, rows, over, ticks)

    def abandon(self, slots: Iterable[Slot]) -> None:
        """Slots of a placement that were not written or not committed: free again, since their old
        rows were gone before. After a commit that failed, first commit their removal.
        """
        self.release(slots)

    def release(self, slots: Iterable[Slot] | Iterable[Victim]) -> None:
        """Their rows are durably gone: free. For victims of `place` and of `evict`. Slots of
        segments that went are left out.
        """
        for slot in slots:
            owner = self._owners.get(slot.segment)
            if owner is not None and (number := owner.number(Slot(slot.segment, slot.slot))) >= 0:
                owner.vacate(number)

    def unlinked(self, segment: int) -> None:
        """The file of a retired segment, or of a new one that could not be made, is gone.
        ValueError for another one.
        """
        if self._room.retired.pop(segment, None) is not None:
            return
        owner = self._owners.get(segment)
        if owner is None or owner.extents[segment].live:
            raise ValueError(f"segment {segment} was not retired")
        self._remove(owner, segment)

    def evict(self, slots: Iterable[Slot]) -> list[Victim]:
        """Takes out blocks by name (forgotten, corrupt): victims to remove from the index, then
        `release`. Ones that are not live are left out. A pinned one goes too: what is read from it
        is verified anyway.
        """
        victims = []
        for slot in slots:
            owner = self._live_owner(slot)
            if owner is not None:
                row, _ = owner.leave(owner.number(slot))
                victims.append(Victim(*slot, row))
        return victims

    def reclaim(self) -> Placement:
        """Segments to retire until all fits into the capacity, after it was lowered; what was set
        aside goes first.
        """
        placement = Placement([], [], [], [], False)
        room = self._room
        while room.total_bytes() - room.retired_bytes > room.capacity_bytes:
            if self.aside_bytes and not self.aside_stays:
                return placement._replace(drop_aside=True)
            donors = sorted(room.classes.values(), key=room.over_share_bytes, reverse=True)
            if not any(self._retire(donor, placement) for donor in donors):
                break
        return placement

    # ---- reading

    def touch(self, segments: NDArray[np.uint32], slots: NDArray[np.uint32]) -> None:
        """These were hit: they get a second chance. Ones that are not there are left out."""
        for segment in np.unique(segments).tolist():
            owner = self._owners.get(segment)
            if owner is not None:
                here = segments == segment
                numbers = owner.numbers(segments[here], slots[here])
                owner.marks[numbers[numbers >= 0]] = TOUCHED
                owner.extents[segment].used_tick = self._room.written_bytes

    def pin(self, slot: Slot) -> None:
        """Nobody's victim until as many `unpin`. KeyError if it is not live."""
        if self._live_owner(slot) is None:
            raise KeyError(slot)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: Slot) -> None:
        """KeyError if it is not pinned."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]

    # ---- figures

    def usage(self) -> RingUsage:
        """O(classes)."""
        classes = self._room.classes.values()
        return RingUsage(
            self.capacity_bytes,
            self._room.segment_bytes,
            self._room.allowance(self._room.slots),
            self.aside_bytes,
            len(self._owners) + len(self._room.retired),
            self._room.slots,
            sum(owner.live for owner in classes),
            sum(owner.free for owner in classes),
            sum(owner.live * owner.record_bytes for owner in classes),
        )

    def check(self) -> None:
        """AssertionError if the books are wrong. O(slots)."""
        room = self._room
        for owner in room.classes.values():
            owner.check()
            assert all(self._owners[segment] is owner for segment in owner.extents)
        assert len(self._owners) == sum(len(owner.extents) for owner in room.classes.values())
        assert not self._owners.keys() & room.retired.keys(), "retired segments are nobody's"
        assert all(count > 0 for count in self._pins.values())

    # ---- room

    def _make_room(self, owner: SlotClass, missing: int, wanted: int, placement: Placement) -> None:
        """Takes whole segments of others, or else victims of the class itself, for `wanted` slots,
        of which `missing` cannot wait.
        """
        room = self._room
        usual = segment_slots(room.sized_for_bytes, owner.record_bytes)
        size = usual * owner.record_bytes
        while room.total_bytes(usual, size) - room.retired_bytes > room.capacity_bytes:
            if not any(self._retire(donor, placement) for donor in room.donors(owner, size)):
                break
        if placement.retired_segments:
            return
        rounds = 2 * owner.windows() + 1 if missing > 0 else _AHEAD_WINDOWS_MAX
        victims = owner.next_victims(wanted - owner.leaving, rounds, self._pins)
        placement.victims.extend(Victim(*slot, row) for slot, row in victims)

    def _retire(self, donor: SlotClass, placement: Placement) -> bool:
        """Retires the donor's coldest segment that nothing is read from or written to."""
        pinned = {slot.segment for slot in self._pins}
        idle = [
            extent
            for segment, extent in donor.extents.items()
            if not extent.writing and segment not in pinned
        ]
        if not idle:
            return False
        coldest = min(idle, key=lambda extent: (extent.used_tick, extent.segment.segment)).segment
        victims = self._remove(donor, coldest.segment)
        placement.victims.extend(Victim(*slot, row) for slot, row in victims)
        placement.retired_segments.append(coldest)
        self._room.retired[coldest.segment] = coldest
        return True

    # ---- parts

    def _is_short(self, owner: SlotClass) -> bool:
        return owner.free < min(owner.demand, self._stock_slots)

    def _new_segment(self, owner: SlotClass) -> Segment | None:
        """A segment more, if it fits into the capacity."""
        slots = self._room.room_slots(owner)
        if not slots:
            return None
        while self._next_segment in self._strange_segments:
            self._next_segment += 1
        segment = Segment(self._next_segment, owner.record_bytes, slots, owner.tenant)
        self._next_segment += 1
        self._add(segment, owner, self._room.written_bytes)
        return segment

    def _class(self, tenant: bytes, record_bytes: int) -> SlotClass:
        key = tenant, record_bytes
        if key not in self._room.classes:
            self._room.classes[key] = SlotClass(tenant, record_bytes)
        return self._room.classes[key]

    def _add(self, segment: Segment, owner: SlotClass, used_tick: int) -> None:
        owner.add(segment, used_tick)
        self._owners[segment.segment] = owner

    def _remove(self, owner: SlotClass, segment: int) -> list[tuple[Slot, int]]:
        removed = owner.remove(segment)
        del self._owners[segment]
        if not owner.extents:
            del self._room.classes[owner.tenant, owner.record_bytes]
        return removed

    def _live_owner(self, slot: Slot) -> SlotClass | None:
        owner = self._owners.get(slot.segment)
        number = -1 if owner is None else owner.number(slot)
        return owner if owner is not None and number >= 0 and owner.states[number] == LIVE else None

    def _depths_of(self, owner: SlotClass) -> NDArray[np.uint32]:
        """Depths of restored blocks by number, kept until something is placed."""
        depths = self._depths.get(owner)
        if depths is None or len(depths) < len(owner.states):
            longer: NDArray[np.uint32] = zeros(len(owner.states), np.uint32)
            if depths is not None:
                longer[: len(depths)] = depths
            depths = self._depths[owner] = longer
        return depths


def _pairs(slots: Pairs) -> NDArray[np.uint32]:
    return np.asarray(slots, np.uint32).reshape(-1, 2)
