"""Slots of one size: who is in them, which are free, and in what order copies may touch them.

Bookkeeping only: it keeps states, counts and the policy's candidates in step. Which slot is taken,
evicted or moved is decided in `moves`; regions and budgets are `arena`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from kvstore.core.states import SLOT_MOVES, SlotState
from kvstore.model.hits import ABSENT, PENDING
from kvstore.model.values import Place, Region
from kvstore.policy.base import EvictionPolicy

if TYPE_CHECKING:
    from kvstore.core.effects import Copy
    from kvstore.core.leases import ReadLease, WriteGroup, WriteLease
    from kvstore.core.spaces import Space

FREE, FILLING, READY, DOOMED = SlotState


class Fill:
    """What is on its way into a FILLING slot: by a write group, or by one copy (group None).

    reserved, done: bit masks of parts. waiters: read leases that wait, with the index of the key.
    """

    __slots__ = ("done", "group", "leases", "reserved", "waiters")

    def __init__(self, group: WriteGroup | None) -> None:
        self.group = group
        self.reserved = 0
        self.done = 0
        self.leases: list[WriteLease] = []
        self.waiters: list[tuple[ReadLease, int]] = []


class Slot:
    """One slot. Preallocated with its region; changed by `Pool` and by the lease code alone.

    code: the presence code of lookups. holds: see `states`; saves: those of them that only read the
    slot to save it, under which it may still be evicted. marked: releasing the last hold needs
    more than counting (DOOMED, or shelved by the policy). leaving: copies that still read
    the former content; queued: fills that wait for them. rising: the slot that a promotion
    fills. saved: an archive has the block. aged_ns: its last use when an archive had aged it out,
    or was told of it; -1: none. command: the last command that used the block. above: the slot of
    the block before it, if that was here when it came, under this generation; children: how many
    such blocks hang on it. uses, grade: the policy's. prompt_tokens: length of the last prompt that
    had it.
    """

    __slots__ = (
        "above",
        "above_generation",
        "aged_ns",
        "children",
        "code",
        "command",
        "depth",
        "fill",
        "generation",
        "grade",
        "hits",
        "holds",
        "key",
        "leaving",
        "marked",
        "number",
        "parent",
        "pins",
        "pool",
        "prompt_tokens",
        "queued",
        "region",
        "rising",
        "saved",
        "saves",
        "space",
        "state",
        "touched_ns",
        "uses",
    )

    def __init__(self, pool: Pool, region: RegionBook, number: int) -> None:
        self.pool = pool
        self.region = region
        self.number = number
        self.state = FREE
        self.code = ABSENT
        self.generation = 0
        self.holds = 0
        self.saves = 0
        self.pins = 0
        self.marked = False
        self.space: Space | None = None
        self.key = b""
        self.parent = b""
        self.depth = 0
        self.hits = 0
        self.touched_ns = 0
        self.saved = False
        self.aged_ns = -1
        self.fill: Fill | None = None
        self.leaving = 0
        self.queued: list[Copy] = []
        self.rising: Slot | None = None
        self.command = 0
        self.above: Slot | None = None
        self.above_generation = 0
        self.children = 0
        self.uses = 0
        self.grade = 0
        self.prompt_tokens = 0

    def in_use(self) -> bool:
        """Whether somebody needs the slot as it is, so that it cannot be evicted."""
        return self.holds > self.saves or self.state in (FILLING, DOOMED)

    def inherit(self, other: Slot) -> None:
        """The block came from another slot: what is known of its use comes along."""
        self.hits, self.uses, self.grade = other.hits, other.uses, other.grade
        self.touched_ns = other.touched_ns
        self.prompt_tokens, self.aged_ns = other.prompt_tokens, other.aged_ns

    def worth_saving(self) -> bool:
        """Whether no archive has it, and none had it and aged it out since it was used last."""
        return not self.saved and self.touched_ns > self.aged_ns

    def place(self, offset: int = 0) -> Place:
        """Where the slot's bytes are."""
        return Place(self.pool.tier, self.region.info.id, self.number, self.generation, offset)


class RegionBook:
    """One region of a pool: its slots, and what decides whether it can be given up.

    touched_ns: of the youngest touch of any of its slots. leaving: copies that read what its slots
    held before. unused: no slot held anything yet. blocker: a slot that was seen held, so that the
    next look begins there.
    """

    __slots__ = ("blocker", "closing", "info", "leaving", "pool", "slots", "touched_ns", "unused")

    def __init__(self, info: Region, pool: Pool, now_ns: int) -> None:
        self.info = info
        self.pool = pool
        self.touched_ns = now_ns
        self.leaving = 0
        self.closing = False
        self.unused = True
        self.blocker: Slot | None = None
        self.slots = [Slot(pool, self, number) for number in range(info.slots)]

    def held(self) -> bool:
        """Whether a slot is in use. Cheap while the same slot is."""
        blocker = self.blocker
        if blocker is not None and blocker.in_use():
            return True
        for slot in self.slots:
            if slot.in_use():
                self.blocker = slot
                return True
        self.blocker = None
        return False

    def empty(self) -> bool:
        """Whether no slot holds anything."""
        return all(slot.state is FREE for slot in self.slots)


class Pool:
    """The slots of one size that a tenant has in one tier."""

    def __init__(
        self,
        tier: int,
        tenant: str,
        slot_bytes: int,
        policy: EvictionPolicy[Slot],
    ) -> None:
        self.tier = tier
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.policy = policy
        self.regions: dict[int, RegionBook] = {}
        self.free: deque[Slot] = deque()
        self.blocks = 0
        self.block_bytes = 0
        self.pinned_bytes = 0
        self.pressed_at = 0
        self.inner: dict[Slot, None] = {}
        """READY, shelved because others hang on them, in their order. Some may be so no more."""
        self.spared: dict[Slot, int] = {}
        """Shelved because a command used them; to their generations."""
        self.spared_at = 0
        self._spared_ns = inf
        self._touched_ns = 0

    # ------------------------------------------------------------------ regions

    def add(self, region: RegionBook) -> None:
        """Its slots can be taken from now on."""
        self.regions[region.info.id] = region
        self.free.extend(region.slots)

    def retire(self, region: RegionBook) -> None:
        """No slot of it is taken any more; those in use still have to be given back."""
        region.closing = True
        del self.regions[region.info.id]
        self.free = deque(slot for slot in self.free if slot.region is not region)

    # ------------------------------------------------------------------ states of slots

    def _set(self, slot: Slot, state: SlotState) -> None:
        assert (slot.state, state) in SLOT_MOVES, (slot.state, state)
        if slot.state is READY:
            self.blocks -= 1
            self.block_bytes -= self._block_bytes(slot)
        slot.state = state
        if state is READY:
            slot.code = 1 + self.tier
            self.blocks += 1
            self.block_bytes += self._block_bytes(slot)
        else:
            slot.code = PENDING if state is FILLING else ABSENT

    @staticmethod
    def _block_bytes(slot: Slot) -> int:
        assert slot.space is not None
        return slot.space.layout.block_bytes

    def begin(
        self, slot: Slot, space: Space, key: bytes, parent: bytes, depth: int, fill: Fill
    ) -> None:
        """FREE -> FILLING under a name and a new generation."""
        assert (slot.holds, slot.fill, slot.queued) == (0, None, []), "slot is in use"
        slot.generation += 1
        slot.region.unused = False
        slot.space, slot.key, slot.parent, slot.depth = space, key, parent, depth
        slot.hits = 0
        slot.saved = False
        slot.aged_ns = -1
        slot.fill = fill
        slot.uses = slot.prompt_tokens = slot.children = 0
        self._hang(slot, space.index.get(parent) if parent else None)
        self._set(slot, FILLING)

    def _hang(self, slot: Slot, above: Slot | None) -> None:
        """Notes on which block a new one hangs. Clients name parents, so only one that is less deep
        counts: blocks cannot hang on each other.
        """
        if above is None or above.pool is not self or above.depth >= slot.depth:
            slot.above = None
            return
        slot.above, slot.above_generation = above, above.generation
        above.children += 1

    def _unhang(self, slot: Slot) -> None:
        """The block goes; the one that it hung on may be a candidate again."""
        above, slot.above = slot.above, None
        if above is None or above.generation != slot.above_generation:
            return
        above.children -= 1
        if not above.children and above.state is READY and not above.marked:
            self.inner.pop(above, None)
            self.policy.unshelve(above)

    def publish(self, slots: Sequence[Slot], now_ns: int, *, moved: bool = False) -> None:
        """FILLING -> READY, all at once; given from tail to head. `moved`: they came from another
        pool, and were used when they were there.
        """
        if moved:
            self._keep_touched(slots)
        else:
            self._mark_touched(slots, now_ns)
        for slot in slots:
            slot.fill = None
            self._set(slot, READY)
        self.policy.insert(slots, now_ns)

    def leave(self, slot: Slot) -> None:
        """FILLING | READY -> DOOMED or, if nobody holds it, FREE. Its name is gone already."""
        self.policy.remove(slot)
        self._unhang(slot)
        self.inner.pop(slot, None)
        slot.fill = None
        if slot.holds:
            self._set(slot, DOOMED)
            slot.marked = True
        else:
            self._free(slot)

    def unheld(self, slot: Slot) -> None:
        """The last hold of a marked slot is gone."""
        slot.marked = False
        if slot.state is DOOMED:
            self._free(slot)
        elif slot.state is READY:
            self.policy.unshelve(slot)

    def _free(self, slot: Slot) -> None:
        self._set(slot, FREE)
        slot.space = None
        slot.key = slot.parent = b""
        slot.rising = None
        slot.marked = False
        if not slot.region.closing:
            self.free.append(slot)

    # ------------------------------------------------------------------ use and choice

    def touch(self, slots: Sequence[Slot], now_ns: int) -> None:
        """READY slots were used; given from tail to head."""
        self._mark_touched(slots, now_ns)
        self.policy.touch(slots, now_ns)

    def use(self, slots: Sequence[Slot], now_ns: int) -> None:
        """READY slots were asked for by a reader; given from tail to head."""
        self.policy.use(slots, now_ns)
        self._mark_touched(slots, now_ns)

    def _mark_touched(self, slots: Sequence[Slot], now_ns: int) -> None:
        """Slots are touched a nanosecond apart, so that a prompt's tail is colder than its head for
        regions too.
        """
        now_ns = max(now_ns, self._touched_ns)
        for slot in slots:
            now_ns += 1
            slot.touched_ns = now_ns
            slot.region.touched_ns = now_ns
        self._touched_ns = now_ns

    def _keep_touched(self, slots: Sequence[Slot]) -> None:
        """Slots keep the time of the last use that their blocks had elsewhere."""
        for slot in slots:
            slot.region.touched_ns = max(slot.region.touched_ns, slot.touched_ns)
            self._touched_ns = max(self._touched_ns, slot.touched_ns)

    def victim(self, spared: float = inf, *, pass_saves: int = 0) -> Slot | None:
        """The coldest slot that is not in use, on which no other hangs, and that no command from
        number `spared` on has used, nor anybody after those. What is met on the way is shelved:
        what is in use until it is not, what others hang on until they go, what is spared until
        `end_sparing`. So many that are being saved are passed by for one that is not.
        """
        passed: list[Slot] = []
        found: Slot | None = None
        policy = self.policy
        while (slot := policy.coldest()) is not None:
            free = slot.holds == slot.saves
            if not free:
                slot.marked = True
            elif slot.children:
                slot.marked = False
                self.inner[slot] = None
            elif slot.command >= spared:
                self._spare(slot)
            elif slot.touched_ns > self._spared_ns:
                break
            elif not slot.saves or len(passed) >= pass_saves:
                found = slot
                break
            else:
                passed.append(slot)
                slot.marked = True
            policy.shelve(slot)
        if found is None:
            for slot in reversed(passed):
                slot.marked = False
                policy.unshelve(slot)
                found = slot
        return found or self._inner_victim(spared)

    def _inner_victim(self, spared: float) -> Slot | None:
        """Nothing is left but what others hang on that may not go: the first met of those that may.
        Else a reader of one block would keep all that come before it.
        """
        found, past = None, []
        for slot in self.inner:
            if slot.marked or slot in self.policy:
                past.append(slot)
                continue
            older = slot.command < spared and slot.touched_ns <= self._spared_ns
            if older and slot.holds == slot.saves:
                found = slot
                break
        for slot in past:
            del self.inner[slot]
        return found

    def _spare(self, slot: Slot) -> None:
        self.spared[slot] = slot.generation
        self._spared_ns = min(self._spared_ns, slot.touched_ns)

    def end_sparing(self, now_ns: int) -> None:
        """What was spared are candidates again, as warm as can be: it was used just now."""
        spared, self.spared = self.spared, {}
        self._spared_ns = inf
        for slot, generation in spared.items():
            stays = slot.generation == generation and slot.state is READY
            if stays and not slot.marked and slot not in self.policy:
                self.policy.touch((slot,), now_ns)


def release_holds(slots: Iterable[Slot | None]) -> None:
    """One hold of each slot ends."""
    for slot in slots:
        if slot is not None:
            slot.holds -= 1
            if slot.marked and not slot.holds:
                slot.pool.unheld(slot)
