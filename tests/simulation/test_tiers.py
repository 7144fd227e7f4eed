"""Three pools over an archive: nothing is lost or mixed up on the way, and what rises deserves it.

The pools stand for a device, host memory and a disk; the core knows only their order. A failure
prints the seed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import pytest

from kvstore.core.core import Core
from kvstore.core.pools import Slot
from kvstore.core.spaces import Space
from kvstore.model.values import CoreLimits, LeaseMode, TenantSpec, TierKind, TierSpec
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.hit_density import HitDensity
from kvstore.policy.lru import Lru
from kvstore.testing.machine import Machine
from kvstore.testing.simulation import Simulation
from kvstore.testing.workload import PROMPTS, Setting, fingerprint, prompt_keys, settings
from tests.simulation.test_core_simulation import POLICIES
from tests.unit.core.harness import BLOCK, pool_bytes

DEVICE, HOST, NEAR, ARCHIVE = range(4)
SEEDS = range(3_000, 3_030)
STEPS = 250
LOADS = 6
"""As often a reader asks: where two copies may be out at a time, he gets two blocks more."""
SECOND = 10**9


# ---------------------------------------------------------------- random clients and faults


class Deep(Simulation):
    """A simulated daemon with three pools and an archive."""

    def _make_setting(self) -> Setting:
        some = settings(self.random)
        kib = 1 << 10
        tiers = (
            TierSpec("device", TierKind.POOL, self.random.choice([24, 48, 80]) * kib),
            TierSpec("host", TierKind.POOL, self.random.choice([130, 200]) * kib, ingest=True),
            TierSpec("near", TierKind.POOL, self.random.choice([60, 200]) * kib),
            TierSpec("archive", TierKind.ARCHIVE, 1 << 20),
        )
        return Setting(tiers, some.tenants, some.limits)


def deep(seed: int) -> Deep:
    print(f"seed {seed}")
    simulation = Deep(seed, POLICIES[seed % 2])
    simulation.run(STEPS)
    return simulation


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_with_three_pools_over_an_archive(seed: int) -> None:
    deep(seed).recover()


@pytest.mark.parametrize("seed", [3_002, 3_003])
def test_a_restart_finds_what_the_archive_has(seed: int) -> None:
    """All of it can be loaded and read, and rises again from there."""
    print(f"seed {seed}")
    before = Deep(seed, POLICIES[seed % 2])
    before.machine.faults.archive_ages = 0.0
    before.run(STEPS)
    before.recover()
    before.core.save_ahead(True, before.now_ns)
    before.machine.settle(before.now_ns)
    core = POLICIES[seed % 2](before.setting.tiers, before.setting.tenants, before.setting.limits)
    core.restore([(table, key, value) for (table, key), value in before.machine.rows.items()])
    machine = Machine(core, Random(seed))
    machine.archives = before.machine.archives
    machine.settle(before.now_ns)
    names = machine.archives[ARCHIVE]
    spaces = {row.space_id: row for row in core.spaces()}
    wanted = {name for name in names if name[0] in spaces}
    read: set[tuple[int, bytes]] = set()
    for space_id, row in spaces.items():
        session = core.begin_session(row.tenant, b"again", before.now_ns)
        assert core.open(session, row.fingerprint, before.now_ns).space_id == space_id
        for prompt in range(PROMPTS):
            keys = [key for key in prompt_keys(prompt) if (space_id, key) in names]
            for _ in range(LOADS):
                for key, data in _read(core, machine, session, space_id, keys, before.now_ns):
                    assert data == names[space_id, key], "what was saved is what is read"
                    read.add((space_id, key))
        core.end_session(session, before.now_ns)
    assert read == wanted
    assert len(read) > 10
    assert core.stats().counters["promoted"] > 0, "what was loaded rises"


def _read(
    core: Core, machine: Machine, session: int, space_id: int, keys: list[bytes], now_ns: int
) -> list[tuple[bytes, bytes]]:
    """The blocks of `keys` with their bytes, as far as a reader gets them."""
    lease = core.acquire(
        session,
        space_id,
        keys,
        mode=LeaseMode.COPY,
        until_ns=now_ns + 10 * SECOND,
        wait=False,
        below=machine.below(space_id, keys),
        now_ns=now_ns,
    )
    machine.settle(now_ns)
    if not lease.lease_id:
        return []
    space = core.space_of(session, space_id)
    assert isinstance(space, Space)
    places = core.settle(lease.lease_id, now_ns).places
    found = [
        (key, machine.read(place, space.layout.block_bytes))
        for key, place in zip(keys, places, strict=True)
        if place is not None
    ]
    core.release(session, [lease.lease_id], now_ns)
    machine.settle(now_ns)
    core.check()
    return found


def test_the_deep_seeds_go_everywhere() -> None:
    totals = Counter[str]()
    for seed in SEEDS[:12]:
        simulation = deep(seed)
        stats = simulation.core.stats()
        totals.update(stats.counters)
        for pool in stats.pools:
            totals[f"evictions {pool.tier}"] += pool.evictions
    seen = {name for name, count in totals.items() if count}
    assert seen >= {
        "copies_demote",
        "copies_promote",
        "copies_save",
        "copies_load",
        "promoted",
        f"evictions {DEVICE}",
        f"evictions {HOST}",
        f"evictions {NEAR}",
    }


# ---------------------------------------------------------------- what rises deserves it


class Size(NamedTuple):
    """Blocks of each pool."""

    device: int = 32
    host: int = 160
    near: int = 320


ROOMY = Size()


class Stack:
    """A core of three pools and an archive; every copy ends at once. hits: blocks by tier."""

    def __init__(self, policy: Callable[[], EvictionPolicy[Slot]], size: Size = ROOMY) -> None:
        staging = 8 * BLOCK
        tiers = [
            TierSpec("device", TierKind.POOL, pool_bytes(size.device)),
            TierSpec("host", TierKind.POOL, pool_bytes(size.host) + staging, ingest=True),
            TierSpec("near", TierKind.POOL, pool_bytes(size.near)),
            TierSpec("archive", TierKind.ARCHIVE, 2**30),
        ]
        limits = CoreLimits(staging_bytes=staging, staging_share=0.9, copies_in_flight_max=2**20)
        self.core = Core(tiers, [TenantSpec("a")], limits, policy)
        self.machine = Machine(self.core, Random(0))
        self.now_ns = SECOND
        self.session = self.core.begin_session("a", b"engine", 0)
        self.space = self.core.open(self.session, fingerprint(), 0).space_id
        self.machine.settle(0)
        self.hits = [0, 0, 0, 0]
        self.asked = 0
        self._attempt = 0

    def serve(self, keys: Sequence[bytes], reach: frozenset[int] | None = None) -> list[int]:
        """A prompt comes: its leading hit is read, the rest stored; the tiers of the hit."""
        core, session = self.core, self.session
        codes = core.lookup(session, self.space, keys)
        below = self.machine.below(
            self.space, [k for k, c in zip(keys, codes, strict=True) if not c]
        )
        lease = core.acquire(
            session,
            self.space,
            keys,
            mode=LeaseMode.COPY,
            until_ns=self.now_ns + 100 * SECOND,
            wait=reach is not None,
            below=below,
            reach=reach,
            now_ns=self.now_ns,
        )
        self.machine.settle(self.now_ns)
        tiers: list[int] = []
        if lease.lease_id:
            settled = core.settle(lease.lease_id, self.now_ns)
            for key, place in zip(keys, settled.places, strict=True):
                if place is None:
                    break
                tiers.append(ARCHIVE if key in below else place.tier)
            core.release(session, [lease.lease_id], self.now_ns)
            self.machine.settle(self.now_ns)
        self.asked += len(keys)
        for tier in tiers:
            self.hits[tier] += 1
        self._put(keys)
        return tiers

    def _put(self, keys: Sequence[bytes]) -> None:
        while True:
            self._attempt += 1
            reserved = self.core.reserve(
                self.session, self.space, list(keys), 0, 0, self._attempt,
                self.now_ns + SECOND, self.now_ns,
            )  # fmt: skip
            self.machine.settle(self.now_ns)
            if not reserved.lease_id:
                return
            self.core.commit(self.session, reserved.lease_id, False, self.now_ns)
            self.machine.settle(self.now_ns)
            self.core.settle_commit(reserved.lease_id, self.now_ns)

    def tiers_of(self, keys: Sequence[bytes]) -> list[int]:
        return [code - 1 for code in self.core.lookup(self.session, self.space, keys)]


class _AlwaysDensity(HitDensity[Slot]):
    def promote(self, entry: Slot, over: Slot | None, now_ns: int) -> bool:
        return True

    def beside(self) -> HitDensity[Slot]:
        return _family(self, _AlwaysDensity())


class _NeverDensity(HitDensity[Slot]):
    def promote(self, entry: Slot, over: Slot | None, now_ns: int) -> bool:
        return False

    def beside(self) -> HitDensity[Slot]:
        return _family(self, _NeverDensity())


def _family(first: HitDensity[Slot], other: HitDensity[Slot]) -> HitDensity[Slot]:
    other._curves, other._history, other._family = first._curves, first._history, first._family
    first._family.append(other)
    return other


class _AlwaysLru(Lru[Slot]):
    def promote(self, entry: Slot, over: Slot | None, now_ns: int) -> bool:
        return True

    def beside(self) -> Lru[Slot]:
        return _AlwaysLru()


class _NeverLru(Lru[Slot]):
    def promote(self, entry: Slot, over: Slot | None, now_ns: int) -> bool:
        return False

    def beside(self) -> Lru[Slot]:
        return _NeverLru()


def named(name: str, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(blocks)]


def skewed(stack: Stack, seed: int, requests: int) -> None:
    """A few prompts are asked for all the time; many come, are asked for once again, and never
    more.
    """
    random = Random(seed)
    hot = [named(f"hot {number}", 4) for number in range(40)]
    weights = [1 / (1 + number) for number in range(len(hot))]
    again: dict[int, list[bytes]] = {}
    for number in range(requests):
        stack.now_ns += random.randrange(SECOND)
        if number in again:
            keys = again.pop(number)
        elif random.random() < 0.5:
            (keys,) = random.choices(hot, weights)
        else:
            keys = again[number + 20] = named(f"chat {number}", 4)
        stack.serve(keys)
        if number == requests // 2:
            stack.hits, stack.asked = [0, 0, 0, 0], 0


class Served(NamedTuple):
    """tiers: of all blocks that were asked for, the share that each tier had. rises: copies up."""

    tiers: list[float]
    rises: int


def served(policy: Callable[[], EvictionPolicy[Slot]], seed: int) -> Served:
    stack = Stack(policy)
    skewed(stack, seed, 1_500)
    stack.core.check()
    tiers = [hits / stack.asked for hits in stack.hits]
    rises = stack.core.stats().counters.get("copies_promote", 0)
    print(f"seed {seed}, {policy.__name__}: {[round(one, 3) for one in tiers]}, {rises} rises")
    return Served(tiers, rises)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_rises_by_predicted_reuse_beats_all_and_nothing(seed: int) -> None:
    """In the fastest pool more is hit than if everything rose, for less than half its copies."""
    chosen, everything = served(HitDensity, seed), served(_AlwaysDensity, seed)
    nothing = served(_NeverDensity, seed)
    assert nothing.tiers[DEVICE] == 0
    assert chosen.tiers[DEVICE] > everything.tiers[DEVICE] > 0.1
    assert chosen.rises < everything.rises / 2
    assert sum(chosen.tiers) > sum(nothing.tiers) - 0.02, "not at the cost of what is hit at all"


def test_with_lru_what_was_just_asked_for_rises() -> None:
    stack = Stack(Lru)
    one, two = named("one", 4), named("two", 4)
    stack.serve(one)
    stack.serve(two)
    assert stack.serve(one) == [HOST] * 4
    assert stack.tiers_of(one + two) == [DEVICE] * 4 + [HOST] * 4
    assert stack.serve(one) == [DEVICE] * 4


@pytest.mark.parametrize("policy", [Lru, HitDensity])
def test_what_has_to_go_from_a_pool_goes_one_down(
    policy: Callable[[], EvictionPolicy[Slot]],
) -> None:
    """Nothing is lost on the way, and everything is found where it is."""
    stack = Stack(policy, Size(device=8, host=24, near=16))
    prompts = [named(f"prompt {number}", 4) for number in range(20)]
    for prompt in prompts:
        stack.now_ns += SECOND
        stack.serve(prompt)
        stack.serve(prompt)
        stack.core.check()
    where = Counter(tier for prompt in prompts for tier in stack.tiers_of(prompt))
    # A promotion's source is free until the next block comes.
    assert (where[DEVICE], where[NEAR]) == (8, 16)
    assert where[HOST] in range(20, 25)
    for prompt in prompts:
        stack.now_ns += SECOND
        assert len(stack.serve(prompt)) == 4
    assert stack.hits[ARCHIVE] > 0


@pytest.mark.parametrize("policy", [Lru, HitDensity])
def test_a_reader_of_one_tier_gets_everything_there_and_lifts_nothing_beyond(
    policy: Callable[[], EvictionPolicy[Slot]],
) -> None:
    stack = Stack(policy)
    keys = named("prompt", 4)
    stack.serve(keys)
    stack.serve(keys)
    assert stack.tiers_of(keys) == [DEVICE] * 4
    host = frozenset({HOST})
    assert stack.serve(keys, host) == [HOST] * 4, "it is brought into his reach"
    for _ in range(5):
        assert stack.serve(keys, host) == [HOST] * 4
    assert stack.tiers_of(keys) == [HOST] * 4
    assert stack.serve(keys) == [HOST] * 4
    assert stack.tiers_of(keys) == [DEVICE] * 4, "one who reaches it has it rise again"


def test_what_is_loaded_from_an_archive_may_rise_at_once() -> None:
    stack = Stack(Lru, Size(device=8, host=8, near=4))
    prompts = [named(f"prompt {number}", 4) for number in range(12)]
    for prompt in prompts:
        stack.serve(prompt)
    gone = next(p for p in prompts if stack.tiers_of(p) == [-1] * 4)
    assert stack.serve(gone) == [ARCHIVE] * 4
    assert stack.tiers_of(gone) == [DEVICE] * 4
