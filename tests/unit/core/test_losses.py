"""A pool that readers do not reach, and one whose memory is gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.core import Core
from kvstore.core.effects import Unassign
from kvstore.core.names import Names
from kvstore.core.pools import Slot
from kvstore.model.reasons import Reason
from kvstore.model.values import LeaseMode
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.hit_density import HitDensity
from kvstore.policy.lru import Lru
from tests.unit.core.harness import Bench, keys

HOST, DEVICE_BELOW, BROUGHT_UP = 0, 1, "promote"


def below(device_slots: int = 8) -> tuple[Bench, int, int]:
    """A host pool of 4 blocks full of the prompt "new"; "old" has made room, in the pool below."""
    bench = Bench(slots=4, device_slots=device_slots, device_below=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4, "old"))
    bench.put(session, space, keys(4, "new"))
    assert bench.core.lookup(session, space, keys(4, "old")) == bytes([2]) * 4
    return bench, session, space


@pytest.mark.parametrize("waits", [{"wait": True}, {"below": {}}])
def test_who_waits_gets_a_block_brought_up_from_where_he_does_not_reach(
    waits: dict[str, object],
) -> None:
    bench, session, space = below()
    lease = bench.acquire(session, space, keys(4, "old"), reach=frozenset({HOST}), **waits)  # type: ignore[arg-type]
    assert not lease.ready
    bench.run()
    settled = bench.core.settle(lease.lease_id, bench.now_ns)
    assert [place.tier for place in settled.places if place] == [HOST] * 4
    swapped = bench.core.lookup(session, space, keys(4, "new"))
    assert swapped.count(2) >= 3, "as many as may be on their way at a time"
    assert bench.core.stats().counters[f"copies_{BROUGHT_UP}"] == 4


def test_who_does_not_wait_is_told_that_it_is_on_its_way() -> None:
    bench, session, space = below()
    lease = bench.acquire(session, space, keys(4, "old"), reach=frozenset({HOST}))
    assert (lease.lease_id, lease.reason) == (0, Reason.MISS_IN_PROGRESS)
    assert bench.core.lookup(session, space, keys(4, "old")) == bytes([2]) * 4


def test_all_or_nothing_counts_what_can_be_brought() -> None:
    bench, session, space = below()
    chain = keys(4, "old")
    lease = bench.acquire(
        session, space, chain, reach=frozenset({HOST}), below={}, all_or_nothing=True
    )
    bench.run()
    assert bench.core.settle(lease.lease_id, bench.now_ns).leased == 4


def test_a_block_that_is_brought_is_not_evicted_by_what_makes_room_for_it() -> None:
    """The pool below is full as well: what gives way to it goes there."""
    bench, session, space = below(device_slots=4)
    lease = bench.acquire(session, space, keys(4, "old"), reach=frozenset({HOST}), below={})
    bench.run()
    settled = bench.core.settle(lease.lease_id, bench.now_ns)
    for place, key in zip(settled.places, keys(4, "old"), strict=True):
        assert place is None or place.tier == HOST
        assert (place is None) == (bench.core.lookup(session, space, [key]) != bytes([1]))
    assert settled.leased


def test_a_block_that_is_brought_was_asked_for() -> None:
    """What is learnt of it is what is learnt of a block that is in reach."""
    bench = Bench(slots=4, device_slots=8, device_below=True, policy=HitDensity)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4, "old"))
    bench.put(session, space, keys(4, "new"))
    opened = bench.core.books.spaces.get(space)
    assert opened is not None
    index = opened.index
    before = [(slot.uses, slot.prompt_tokens, slot.touched_ns) for slot in index.values()]
    assert len(before) == 8
    assert {uses for uses, _, _ in before} == {1}
    bench.acquire(
        session, space, keys(4, "old"), reach=frozenset({HOST}), below={}, prompt_tokens=9_000
    )
    asked_ns = bench.now_ns
    bench.run()
    old = [index[key] for key in keys(4, "old")]
    assert [slot.pool.tier for slot in old] == [HOST] * 4
    assert [(slot.uses, slot.prompt_tokens) for slot in old] == [(2, 9_000)] * 4
    assert all(slot.touched_ns >= asked_ns for slot in old)
    curve = old[0].pool.policy._curves[old[0].grade]  # type: ignore[attr-defined]
    assert curve.accesses == 4


@pytest.mark.parametrize("policy", [HitDensity, Lru])
def test_no_block_that_is_to_be_brought_makes_room_for_another(
    policy: Callable[[], EvictionPolicy[Slot]],
) -> None:
    bench = Bench(slots=4, device_slots=4, device_below=True, policy=policy)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4, "old"))
    bench.put(session, space, keys(4, "new"))
    assert bench.core.lookup(session, space, keys(4, "old")) == bytes([2]) * 4
    lease = bench.acquire(session, space, keys(4, "old"), reach=frozenset({HOST}), below={})
    bench.run()
    assert bench.core.settle(lease.lease_id, bench.now_ns).leased == 4


def test_what_cannot_be_brought_is_a_miss() -> None:
    bench, session, space = below()
    held = bench.acquire(session, space, keys(4, "new"))
    assert held.lease_id
    lease = bench.acquire(session, space, keys(1, "old"), reach=frozenset({HOST}), below={})
    assert (lease.lease_id, lease.reason) == (0, Reason.NO_SPACE)


def above() -> tuple[Bench, int, int]:
    """A device above the host, full of "prompt"."""
    bench = Bench(slots=8, device_slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    for _ in range(2):
        bench.use(session, space, keys(4))
        bench.run()
    assert bench.core.lookup(session, space, keys(4)) == bytes([1]) * 4
    return bench, session, space


def test_a_pool_that_is_lost_forgets_its_blocks_and_makes_no_region_again() -> None:
    bench, session, space = above()
    assert bench.core.lose(0, bench.now_ns)
    effects = bench.run()
    assert len([one for one in effects if isinstance(one, Unassign)]) == 1
    assert bench.core.lookup(session, space, keys(4)) == bytes(4)
    assert bench.core.why_absent(session, space, keys(1)[0]).reason is Reason.MISS_EVICTED
    assert bench.put(session, space, keys(4)) == 4
    for _ in range(3):
        bench.use(session, space, keys(4))
        bench.run()
    assert bench.core.lookup(session, space, keys(4)) == bytes([2]) * 4
    pool = bench.core.stats().pools[0]
    assert (pool.blocks, pool.used_bytes, pool.regions) == (0, 0, 0)
    assert bench.core.lose(0, bench.now_ns)


def test_a_region_of_a_lost_pool_closes_when_its_last_reader_has_gone() -> None:
    bench, session, space = above()
    held = bench.acquire(session, space, keys(1), mode=LeaseMode.VIEW).lease_id
    assert not bench.core.lose(0, bench.now_ns)
    assert not [one for one in bench.run() if isinstance(one, Unassign)]
    assert bench.core.lookup(session, space, keys(1)) == bytes(1), "no new reader gets it"
    bench.core.release(session, [held], bench.now_ns)
    assert bench.core.lose(0, bench.now_ns)
    assert [one for one in bench.run() if isinstance(one, Unassign)]


def test_what_was_rising_into_a_lost_pool_stays_where_it_is() -> None:
    bench = Bench(slots=8, device_slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    bench.hold_copies = True
    for _ in range(2):
        bench.use(session, space, keys(4))
    bench.run()
    assert bench.out("promote")
    bench.core.lose(0, bench.now_ns)
    bench.core.check()
    assert bench.core.lookup(session, space, keys(4)) == bytes([2]) * 4
    for copy in bench.out("promote"):
        bench.finish(copy, Reason.IO_ERROR)
    bench.run()
    assert bench.core.lose(0, bench.now_ns)
    bench.run()
    assert bench.core.lookup(session, space, keys(4)) == bytes([2]) * 4


def test_what_was_on_its_way_down_out_of_a_lost_pool_is_a_miss_if_its_copy_fails() -> None:
    bench, session, space = above()
    bench.hold_copies = True
    lease = bench.acquire(session, space, keys(1), reach=frozenset({1}), wait=True)
    bench.run()
    bench.core.lose(0, bench.now_ns)
    for copy in bench.out("demote"):
        bench.finish(copy, Reason.IO_ERROR)
    bench.run()
    assert bench.core.settle(lease.lease_id, bench.now_ns).leased == 0
    assert bench.core.lose(0, bench.now_ns)
    bench.run()
    assert bench.core.lookup(session, space, keys(4)) == bytes(4)


def test_a_lost_pool_is_forgotten_a_bit_at_a_time_and_nothing_goes_there_meanwhile() -> None:
    """Neither what makes room above it, nor what would rise into it."""
    bench = Bench(slots=4, device_slots=8, device_below=True, disk=True)
    session = bench.session()
    space = bench.space(session)
    for name in ("one", "two", "three"):
        bench.put(session, space, keys(4, name))
    pools = bench.core.stats().pools
    assert [pool.blocks for pool in pools] == [4, 8]
    assert not bench.core.lose(DEVICE_BELOW, bench.now_ns, blocks_max=1)
    bench.run()
    device = bench.core.stats().pools[DEVICE_BELOW]
    assert (device.blocks, device.regions) == (4, 1), "whole regions"
    bench.put(session, space, keys(4, "four"))
    bench.run()
    assert bench.core.lookup(session, space, keys(4, "four")) == bytes([1]) * 4
    assert bench.core.stats().counters["copies_save"] == 4, "what gave way went past it"
    assert bench.core.lookup(session, space, keys(4, "three")) == bytes(4)
    assert bench.core.stats().pools[DEVICE_BELOW].blocks == 4
    assert bench.core.lose(DEVICE_BELOW, bench.now_ns, blocks_max=1)
    bench.run()
    device = bench.core.stats().pools[DEVICE_BELOW]
    assert (device.blocks, device.regions, device.used_bytes) == (0, 0, 0)


def test_what_rises_does_not_rise_into_a_pool_that_is_being_forgotten() -> None:
    bench, session, space = above()
    held = bench.acquire(session, space, keys(1), mode=LeaseMode.VIEW).lease_id
    assert not bench.core.lose(0, bench.now_ns)
    bench.run()
    assert bench.put(session, space, keys(4)) == 4
    for _ in range(3):
        bench.use(session, space, keys(4))
        bench.run()
    assert bench.core.lookup(session, space, keys(4)) == bytes([2]) * 4
    bench.core.release(session, [held], bench.now_ns)
    assert bench.core.lose(0, bench.now_ns)


def test_a_loss_goes_through_the_core_s_own_parts() -> None:
    """So that whatever the simulation plants there shows."""
    dropped: list[bytes] = []

    class Watched(Names):
        def drop(self, slot: Slot, why: Reason, now_ns: int) -> None:
            dropped.append(slot.key)
            super().drop(slot, why, now_ns)

    class WatchedCore(Core):
        names_type = Watched

    bench = Bench(slots=8, device_slots=4, core_type=WatchedCore)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    for _ in range(2):
        bench.use(session, space, keys(4))
        bench.run()
    dropped.clear()
    bench.core.lose(0, bench.now_ns)
    assert sorted(dropped) == sorted(keys(4))
