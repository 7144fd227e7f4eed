"""Pins: held by the operator until unpinned or invalidated, and bounded."""

from __future__ import annotations

from kvstore.model.reasons import Reason
from kvstore.model.values import CoreLimits
from tests.unit.core.harness import BLOCK, Bench, keys


def pinned_bench() -> tuple[Bench, int, int]:
    bench = Bench(slots=8)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(3))
    return bench, session, space


def test_pinned_blocks_are_no_victims_and_outlive_sessions() -> None:
    bench, session, space = pinned_bench()
    pin = bench.core.pin(space, keys(3), bench.now_ns)
    assert (pin.pinned, pin.reason) == (3, Reason.OK)
    bench.core.end_session(session, bench.now_ns)
    bench.run()
    session = bench.session()
    bench.put(session, space, keys(12, "new"))
    assert bench.have(session, space, keys(3)) == [True] * 3
    assert bench.core.stats().pins == 1
    assert bench.core.release(session, [pin.pin_id], bench.now_ns) == (0, 1)
    assert bench.core.unpin(pin.pin_id, bench.now_ns)
    assert not bench.core.unpin(pin.pin_id, bench.now_ns)
    bench.put(session, space, keys(8, "newer"))
    assert bench.have(session, space, keys(3)) == [False] * 3


def test_a_pin_holds_the_leading_blocks_that_are_there() -> None:
    bench, session, space = pinned_bench()
    pin = bench.core.pin(space, keys(5), bench.now_ns)
    assert (pin.pinned, pin.reason) == (3, Reason.MISS_NEVER_STORED)
    bench.reserve(session, space, keys(1, "writing"))
    pin = bench.core.pin(space, keys(1, "writing"), bench.now_ns)
    assert (pin.pin_id, pin.reason) == (0, Reason.MISS_IN_PROGRESS)


def test_pinned_bytes_keep_to_their_share() -> None:
    limits = CoreLimits(pinned_share=0.5, staging_bytes=BLOCK, staging_share=0.9)
    bench = Bench(slots=8, limits=limits)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(8))
    pin = bench.core.pin(space, keys(8), bench.now_ns)
    assert (pin.pinned, pin.reason) == (5, Reason.PIN_LIMIT)
    again = bench.core.pin(space, keys(5), bench.now_ns)
    assert again.pinned == 5, "what is pinned already costs nothing"
    bench.core.unpin(pin.pin_id, bench.now_ns)
    assert bench.core.stats().pools[0].pinned_bytes == 5 * BLOCK
    bench.core.unpin(again.pin_id, bench.now_ns)
    assert bench.core.stats().pools[0].pinned_bytes == 0


def test_an_invalidated_block_is_free_although_it_was_pinned() -> None:
    bench, session, space = pinned_bench()
    pin = bench.core.pin(space, keys(3), bench.now_ns)
    bench.core.invalidate(space_id=space, keys=keys(3), now_ns=bench.now_ns)
    bench.run()
    assert bench.core.stats().pools[0].free_slots == 4
    assert bench.core.stats().pools[0].pinned_bytes == 0
    assert bench.core.unpin(pin.pin_id, bench.now_ns)
    assert bench.put(session, space, keys(8, "new")) == 8


def below() -> tuple[Bench, int, int]:
    """A host pool full of "new", and "old" in the pool below, which readers do not reach."""
    bench = Bench(slots=6, device_slots=8, device_below=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(3, "old"))
    bench.put(session, space, keys(6, "new"))
    assert bench.core.lookup(session, space, keys(3, "old")) == bytes([2]) * 3
    return bench, session, space


def test_a_pinned_block_is_where_every_reader_reaches_it() -> None:
    bench, session, space = below()
    old = keys(3, "old")
    pin = bench.core.pin(space, [*old, old[0]], bench.now_ns)
    assert (pin.pinned, pin.reason) == (4, Reason.OK)
    bench.core.check()
    bench.run()
    lease = bench.acquire(session, space, old, reach=frozenset({0}))
    assert bench.core.settle(lease.lease_id, bench.now_ns).leased == 3
    bench.core.release(session, [lease.lease_id], bench.now_ns)
    bench.put(session, space, keys(6, "newer"))
    assert bench.core.lookup(session, space, old) == bytes([1]) * 3
    assert [pool.pinned_bytes for pool in bench.core.stats().pools] == [3 * BLOCK, 0]
    assert bench.core.unpin(pin.pin_id, bench.now_ns)
    bench.run()
    assert [pool.pinned_bytes for pool in bench.core.stats().pools] == [0, 0]


def test_what_makes_room_for_a_pinned_block_is_none_of_the_same_pin() -> None:
    bench, _, space = below()
    both = [*keys(1, "old"), *keys(6, "new")]
    pin = bench.core.pin(space, both, bench.now_ns)
    assert (pin.pinned, pin.reason) == (0, Reason.NO_SPACE)
    bench.core.unpin(bench.core.pin(space, keys(1, "old"), bench.now_ns).pin_id, bench.now_ns)
    bench.run()


def test_a_pin_ends_with_a_block_that_did_not_arrive() -> None:
    bench, session, space = below()
    bench.hold_copies = True
    pin = bench.core.pin(space, keys(1, "old"), bench.now_ns)
    bench.run()
    bench.finish_all("demote")
    (copy,) = bench.out("promote")
    bench.finish(copy, Reason.IO_ERROR)
    bench.hold_copies = False
    bench.settle_all()
    assert bench.core.lookup(session, space, keys(1, "old")) == bytes(1)
    assert [pool.pinned_bytes for pool in bench.core.stats().pools] == [0, 0]
    assert bench.core.unpin(pin.pin_id, bench.now_ns)
