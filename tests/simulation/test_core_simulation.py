"""The core under random clients, faults and operators; a failure prints the seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvstore.core.core import Core
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.policy.hit_density import HitDensity
from kvstore.testing.simulation import Simulation
from kvstore.testing.workload import Engine, Setting, Write, settings
from tests.simulation.planted import PLANTED

FAST_SEEDS = range(100)
FAST_STEPS = 250
SLOW_SEEDS = range(1_000, 1_050)
SLOW_STEPS = 2_000
PAUSING_SEEDS = range(2_000, 2_020)
SMALL_SEEDS = range(4_000, 4_030)
PLANTED_SEEDS = range(60)

NOTICED = (AssertionError, LookupError)
"""How a defect shows: a check fails, or a book lacks what another names."""


def simulate(seed: int, steps: int, core_type: type[Core] = Core) -> Simulation:
    """One seed to the end, recovery included."""
    print(f"seed {seed}")
    simulation = Simulation(seed, core_type)
    simulation.run(steps)
    simulation.recover()
    return simulation


class HitDensityCore(Core):
    """With the other policy, which meets blocks in another order."""

    def __init__(
        self, tiers: Sequence[TierSpec], tenants: Sequence[TenantSpec], limits: CoreLimits
    ) -> None:
        super().__init__(tiers, tenants, limits, HitDensity)


POLICIES = (Core, HitDensityCore)
"""By turns, from seed to seed."""


@pytest.mark.parametrize("seed", FAST_SEEDS)
def test_seed(seed: int) -> None:
    simulate(seed, FAST_STEPS, POLICIES[seed % 2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_long_seed(seed: int) -> None:
    simulate(seed, SLOW_STEPS, POLICIES[seed % 2])


class Pausing(Simulation):
    """Memory is short now and then, so that pools may not grow."""

    paused = False
    made_bytes = 0

    def _pass_time(self) -> None:
        super()._pass_time()
        self._pause(self.random.random() < 0.5)

    def _pause(self, paused: bool) -> None:
        self.paused = paused
        for arena in self.core.books.pools:
            self.core.pause_growth(arena.tier, paused, self.now_ns)
        self._look()

    def _progress(self) -> None:
        super()._progress()
        before = self.made_bytes
        self._look()
        assert not self.paused or self.made_bytes <= before, "a pool grew"

    def _look(self) -> None:
        self.made_bytes = sum(arena.used_bytes for arena in self.core.books.pools)

    def recover(self) -> None:
        self._pause(False)
        super().recover()


@pytest.mark.parametrize("seed", PAUSING_SEEDS)
def test_seed_with_pauses_of_growth(seed: int) -> None:
    print(f"seed {seed}")
    simulation = Pausing(seed, POLICIES[seed % 2])
    simulation.run(FAST_STEPS)
    simulation.recover()


class Small(Simulation):
    """Prompts are longer than memory, which lies over an archive."""

    gave_way = 0

    def _make_setting(self) -> Setting:
        some = settings(self.random)
        host = TierSpec("host", TierKind.POOL, self.random.choice([56, 72]) << 10, ingest=True)
        tiers = (host, TierSpec("disk", TierKind.ARCHIVE, 1 << 20))
        limits = replace(
            some.limits, staging_bytes=24 << 10, staging_share=0.5, save_ahead_share=0.5
        )
        return Setting(tiers, some.tenants[:1], limits)

    def reserve(
        self, engine: Engine, session: int, part: int, chain: list[bytes], first: int, write: Write
    ) -> Reason:
        space = self.core.books.spaces.get(engine.space_id)
        assert space is not None
        there = [slot for key in chain if (slot := space.index.get(key)) and slot.fill is None]
        before = {slot.key for slot in there}
        saved = {slot.key for slot in there if slot.saved and not slot.in_use()}
        reclaimed = self.core.books.counters["regions_reclaimed"]
        reason = super().reserve(engine, session, part, chain, first, write)
        if self.core.books.counters["regions_reclaimed"] > reclaimed:
            return reason  # a region goes with all that is in it
        gone = before - set(space.index)
        assert gone <= saved, "only what is saved and in nobody's use gives way to its own prompt"
        self.gave_way += len(gone)
        return reason


def test_seeds_with_prompts_that_are_longer_than_memory() -> None:
    gave_way = 0
    for seed in SMALL_SEEDS:
        print(f"seed {seed}")
        simulation = Small(seed, POLICIES[seed % 2])
        simulation.run(FAST_STEPS)
        simulation.recover()
        gave_way += simulation.gave_way
    assert gave_way >= len(SMALL_SEEDS) // 2


def test_a_seed_is_the_same_every_time() -> None:
    one, two = simulate(3, FAST_STEPS), simulate(3, FAST_STEPS)
    assert one.core.stats() == two.core.stats()
    assert one.blocks_read == two.blocks_read > 0


def test_the_seeds_go_everywhere() -> None:
    """A simulation that never evicts or never fails shows nothing."""
    totals = Counter[str]()
    for seed in range(40):
        simulation = simulate(seed, FAST_STEPS)
        totals.update(simulation.core.stats().counters)
        totals["blocks_read"] += simulation.blocks_read
        totals["evictions"] += sum(pool.evictions for pool in simulation.core.stats().pools)
    seen = {name for name, count in totals.items() if count}
    assert seen >= {
        "blocks_read",
        "evictions",
        "regions_reclaimed",
        "copies_commit",
        "copies_demote",
        "copies_promote",
        "copies_save",
        "copies_load",
        "copies_failed",
        "saves_failed",
        "loads_failed",
        "dropped_unsaved",
        "reservations_expired",
        "staging_exchanged",
        "leases_expired",
        "promoted",
    }
    assert totals["blocks_read"] > 1_000


@pytest.mark.parametrize("core_type", PLANTED)
def test_a_planted_bug_is_noticed(core_type: type[Core]) -> None:
    for seed in PLANTED_SEEDS:
        try:
            simulate(seed, FAST_STEPS, core_type)
        except NOTICED:
            return
    pytest.fail(f"{core_type.__name__} was not noticed by any of {len(PLANTED_SEEDS)} seeds")
