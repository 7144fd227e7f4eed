"""A machine without hardware: runs the core's effects on memory that is really there.

Regions, staging and archives hold bytes; copies end in any order, late, failed or corrupt, as a
seeded `random.Random` says. It promises to notice what no check of the core's books can see: a copy
that starts while another still reads or writes the same bytes, a generation that is not raised
before its content, a region that is closed or used while something touches it. AssertionError says
which. For simulations and tests; one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvstore.core.core import Core
from kvstore.core.effects import (
    Assign,
    AssignStaging,
    Copy,
    Effect,
    Forget,
    Persist,
    Ready,
    Unassign,
    UnassignStaging,
    Wanted,
)
from kvstore.model.reasons import Reason
from kvstore.model.values import STAGING, Place, Region

POISON = 0xEE
"""What is in memory that nobody has written, or where a copy failed half way."""


@dataclass
class Faults:
    """How likely things go wrong, 0 to 1."""

    copy_fails: float = 0.0
    load_corrupt: float = 0.0
    archive_ages: float = 0.0


NO_FAULTS = Faults()


@dataclass
class _Memory:
    """One region: its bytes, and for an arena region the generation of each slot."""

    region: Region | None
    data: bytearray
    generations: list[int] = field(default_factory=list)

    def span(self, place: Place, length: int) -> slice:
        """Where `length` bytes at a place are."""
        slot_bytes = 0 if self.region is None else self.region.slot_bytes
        start = place.slot * slot_bytes + place.offset
        assert start + length <= len(self.data), "a copy stays inside its region"
        return slice(start, start + length)


class Machine:
    """Pools, archives, mover and ledger of one simulated daemon."""

    def __init__(self, core: Core, random: Random, faults: Faults = NO_FAULTS) -> None:
        self.core = core
        self.random = random
        self.faults = faults
        self.copies: list[Copy] = []
        self.closing: list[int] = []
        self.unpersisted: list[Persist] = []
        self.rows: dict[tuple[str, bytes], bytes] = {}
        self.archives: dict[int, dict[tuple[int, bytes], bytes]] = {}
        self.ready: set[int] = set()
        self._memory: dict[int, _Memory] = {}
        self._reading: dict[tuple[int, int], int] = {}
        self._writing: dict[tuple[int, int], list[Copy]] = {}
        self._names: dict[tuple[int, int], tuple[int, int, bytes]] = {}

    # ------------------------------------------------------------------ effects

    def run_effects(self) -> None:
        """Takes what the core wants done: memory at once, copies and rows later."""
        for effect in self.core.effects():
            self._apply(effect)

    def _apply(self, effect: Effect) -> None:
        if isinstance(effect, Copy):
            self._start(effect)
        elif isinstance(effect, Assign):
            region = effect.region
            data = bytearray([POISON]) * (region.slots * region.slot_bytes)
            self._memory[region.id] = _Memory(region, data, [0] * region.slots)
        elif isinstance(effect, AssignStaging):
            data = bytearray([POISON]) * effect.total_bytes
            self._memory[effect.region_id] = _Memory(None, data)
        elif isinstance(effect, Unassign | UnassignStaging):
            busy = any(
                effect.region_id in (copy.source.region, copy.target.region) for copy in self.copies
            )
            assert not busy, "a region closes while a copy touches it"
            self.closing.append(effect.region_id)
        elif isinstance(effect, Forget):
            self._forget(effect)
        elif isinstance(effect, Wanted):
            assert effect.keys
        elif isinstance(effect, Persist):
            self.unpersisted.append(effect)
        else:
            assert isinstance(effect, Ready)
            self.ready.add(effect.lease_id)

    def _forget(self, effect: Forget) -> None:
        names = self.archives.setdefault(effect.tier, {})
        if effect.key:
            assert not any(
                copy.why == "save" and (copy.space_id, copy.key) == (effect.space_id, effect.key)
                for copy in self.copies
            ), "a name is forgotten while it is being saved"
            names.pop((effect.space_id, effect.key), None)
        else:
            for name in [name for name in names if name[0] == effect.space_id]:
                del names[name]

    # ------------------------------------------------------------------ copies

    def _start(self, copy: Copy) -> None:
        """Checks that the copy depends on no other that is out, and begins it."""
        source, target = copy.source, copy.target
        if self._in_pool(source):
            slot = (source.region, source.slot)
            assert not self._writing.get(slot), "a copy reads what is still being written"
            assert self._generation(source) == source.generation, "a copy reads an old name"
            self._reading[slot] = self._reading.get(slot, 0) + 1
        if self._in_pool(target):
            slot = (target.region, target.slot)
            assert not self._reading.get(slot), "a copy overwrites what another still reads"
            writers = self._writing.setdefault(slot, [])
            for other in writers:
                assert (
                    other.target.offset >= target.offset + copy.length
                    or target.offset >= other.target.offset + other.length
                ), "two copies write the same bytes"
            generations = self._memory[target.region].generations
            assert generations[target.slot] <= target.generation, "generations only grow"
            name = (target.generation, copy.space_id, copy.key)
            if generations[target.slot] == target.generation:
                # The parts of one block share a generation, two blocks never do.
                assert self._names.get(slot) == name, "new content under an old generation"
            generations[target.slot] = target.generation
            self._names[slot] = name
            memory = self._memory[target.region]
            span = memory.span(target, copy.length)
            half = (span.stop - span.start) // 2
            memory.data[span.start : span.start + half] = bytes([POISON]) * half
            writers.append(copy)
        self.copies.append(copy)

    def _in_pool(self, place: Place) -> bool:
        return place.tier != STAGING and place.region != 0

    def _generation(self, place: Place) -> int:
        return self._memory[place.region].generations[place.slot]

    def generation(self, place: Place) -> int:
        """The generation in the region's header now."""
        return self._generation(place)

    def read(self, place: Place, length: int) -> bytes:
        """Bytes at a place in a pool or in staging."""
        memory = self._memory[place.region]
        return bytes(memory.data[memory.span(place, length)])

    def write_staging(self, region_id: int, offset: int, data: bytes) -> None:
        """A client writes into its staging; its map outlives the region's closing."""
        memory = self._memory.get(region_id)
        if memory is not None:
            memory.data[offset : offset + len(data)] = data

    def finish_copy(self, now_ns: int) -> bool:
        """Ends one copy, any of those that are out. False: there is none."""
        if not self.copies:
            return False
        index = self.random.randrange(len(self.copies))
        copy = self.copies[index]
        self.copies[index] = self.copies[-1]
        self.copies.pop()
        reason = self._perform(copy)
        self._stop(copy)
        self.core.done(copy.copy_id, reason is Reason.OK, reason, None, 1_000, now_ns)
        self.run_effects()
        return True

    def _perform(self, copy: Copy) -> Reason:
        if self.random.random() < self.faults.copy_fails:
            return Reason.COPY_FAILED
        name = (copy.space_id, copy.key)
        if copy.why == "load":
            if self.random.random() < self.faults.load_corrupt:
                return Reason.MISS_CORRUPT
            saved = self.archives.get(copy.source.tier, {}).get(name)
            if saved is None:
                return Reason.MISS_EVICTED
            data = saved
        else:
            data = self.read(copy.source, copy.length)
        if copy.why == "save":
            self.archives.setdefault(copy.target.tier, {})[name] = data
            return Reason.OK
        memory = self._memory[copy.target.region]
        memory.data[memory.span(copy.target, copy.length)] = data
        return Reason.OK

    def _stop(self, copy: Copy) -> None:
        if self._in_pool(copy.source):
            self._reading[copy.source.region, copy.source.slot] -= 1
        if self._in_pool(copy.target):
            self._writing[copy.target.region, copy.target.slot].remove(copy)

    # ------------------------------------------------------------------ the rest of the world

    def finish_region(self, now_ns: int) -> bool:
        """The last process lets go of one closed region. False: none is closing."""
        if not self.closing:
            return False
        region_id = self.closing.pop(self.random.randrange(len(self.closing)))
        self._memory.pop(region_id)
        self.core.region_gone(region_id, now_ns)
        self.run_effects()
        return True

    def finish_row(self, now_ns: int) -> bool:
        """One durable row is written, in order. False: none is waiting."""
        if not self.unpersisted:
            return False
        row = self.unpersisted.pop(0)
        if row.value is None:
            self.rows.pop((row.table, row.key), None)
        else:
            self.rows[row.table, row.key] = row.value
        self.core.persisted(row.ticket, now_ns)
        self.run_effects()
        return True

    def age_archive(self, tell: bool) -> None:
        """An archive forgets a name by itself; it may tell the core, or not yet."""
        for tier, names in self.archives.items():
            if names and self.random.random() < self.faults.archive_ages:
                space_id, key = self.random.choice(list(names))
                del names[space_id, key]
                if tell:
                    self.core.archive_dropped(tier, space_id, [key])

    def below(self, space_id: int, keys: list[bytes]) -> dict[bytes, int]:
        """Which archive holds which of the keys: the fact that the shell gathers for `acquire`."""
        found: dict[bytes, int] = {}
        for tier, names in sorted(self.archives.items()):
            for key in keys:
                if key not in found and (space_id, key) in names:
                    found[key] = tier
        return found

    def settle(self, now_ns: int) -> None:
        """Everything that is under way ends."""
        self.run_effects()
        while self.finish_copy(now_ns) or self.finish_region(now_ns) or self.finish_row(now_ns):
            pass
