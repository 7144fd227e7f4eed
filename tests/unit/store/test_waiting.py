"""Bounds on waiting: answered when what is waited for comes, ends, or the time is over."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.model.reasons import KVStoreError, Reason
from tests.unit.store.stand import MS, SECOND, TTL_NS, Stand, keys

CHAIN = keys(6)


def test_an_acquire_is_answered_when_the_commit_lands(stand: Stand) -> None:
    writer, reader = stand.attach(b"writer"), stand.attach(b"reader")
    space = stand.open(writer)
    stand.open(reader)
    stand.put(writer, space, CHAIN[:2])
    reserved = stand.reserve(writer, space, CHAIN)
    assert reserved.wanted == [2, 3, 4, 5]
    stand.fill(reserved, CHAIN)
    waiting = stand.begin(stand.acquire(reader, space, CHAIN, wait_ns=60 * SECOND))
    assert not waiting.done()
    start_ns = stand.clock.monotonic_ns()
    stand.mover.held = True
    commit = stand.begin(stand.commit(writer, reserved.lease_id))
    stand.mover.step(3)
    stand.settle()
    assert not waiting.done()
    assert stand.codes(reader, space, CHAIN) == b"\x01\x01\xff\xff\xff\xff"
    stand.mover.step()
    stand.settle()
    leased, done = waiting.result(), commit.result()
    assert done.visible == 4
    assert leased.leased == 6
    assert leased.reason is Reason.OK
    stand.assert_right(leased, CHAIN)
    assert stand.clock.monotonic_ns() == start_ns


def test_an_acquire_waits_until_its_deadline_and_takes_what_is_there(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN[:2])
    assert stand.reserve(session, space, CHAIN, ttl_ns=600 * SECOND).lease_id
    start_ns = stand.clock.monotonic_ns()
    leased = stand.run(stand.acquire(session, space, CHAIN, wait_ns=7 * SECOND, ttl_ns=SECOND))
    assert stand.clock.monotonic_ns() - start_ns == pytest.approx(7 * SECOND, abs=MS)
    assert leased.leased == 2
    assert leased.reason is Reason.MISS_IN_PROGRESS
    stand.assert_right(leased._replace(places=leased.places[:2]), CHAIN[:2])
    assert leased.places[2:] == [None] * 4
    # The lease lives for its ttl from the answer on.
    stand.pass_time(SECOND - 10 * MS)
    assert stand.held[0] == 1
    stand.pass_time(20 * MS)
    assert stand.held[0] == 0


@pytest.mark.parametrize("wait_ns", [0, 1, 60 * SECOND])
@pytest.mark.parametrize("load_ns", [0, 20 * SECOND])
def test_a_lease_lives_for_its_time_from_the_answer_on(
    stand: Stand, wait_ns: int, load_ns: int
) -> None:
    """However long it might have waited."""
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN)
    work = stand.acquire(session, space, CHAIN, wait_ns=wait_ns, load_ns=load_ns, ttl_ns=SECOND)
    assert stand.run(work).leased == 6
    stand.pass_time(SECOND - 1)
    assert stand.held[0] == 1
    stand.pass_time(1)
    assert stand.held[0] == 0


def test_a_lease_that_waited_lives_for_its_time_from_the_answer_on(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    work = stand.acquire(session, space, CHAIN, wait_ns=600 * SECOND, ttl_ns=SECOND)
    waiting = stand.begin(work)
    stand.pass_time(10 * SECOND)
    done = stand.run(stand.commit(session, reserved.lease_id))
    assert (done.visible, done.reason) == (6, Reason.OK)
    stand.settle()
    assert waiting.result().leased == 6
    stand.pass_time(SECOND - 1)
    assert stand.held[0] == 1
    stand.pass_time(1)
    assert stand.held[0] == 0


def test_without_a_wait_nothing_is_waited_for(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    assert stand.reserve(session, space, CHAIN).lease_id
    start_ns = stand.clock.monotonic_ns()
    leased = stand.run(stand.acquire(session, space, CHAIN))
    assert (leased.lease_id, leased.reason) == (0, Reason.MISS_IN_PROGRESS)
    assert leased.places == (None,) * 6
    assert stand.clock.monotonic_ns() == start_ns


def test_an_abort_answers_who_waits_for_it(stand: Stand) -> None:
    writer, reader = stand.attach(b"writer"), stand.attach(b"reader")
    space = stand.open(writer)
    stand.open(reader)
    reserved = stand.reserve(writer, space, CHAIN)
    waiting = stand.begin(stand.acquire(reader, space, CHAIN, wait_ns=60 * SECOND))
    assert stand.store.release(writer, [reserved.lease_id]) == (1, 0)
    stand.settle()
    assert waiting.result().lease_id == 0
    assert stand.held == (0, 0, 0)


def test_an_expired_reservation_answers_who_waits_for_it(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    assert stand.reserve(session, space, CHAIN, ttl_ns=5 * SECOND).lease_id
    waiting = stand.begin(stand.acquire(session, space, CHAIN, wait_ns=60 * SECOND))
    stand.pass_time(5 * SECOND - 1)
    assert not waiting.done()
    stand.pass_time(1)
    assert waiting.result().lease_id == 0


def test_a_call_of_a_session_that_ends_is_answered_at_once(stand: Stand) -> None:
    writer, reader = stand.attach(b"writer"), stand.attach(b"reader")
    space = stand.open(writer)
    stand.open(reader)
    stand.put(writer, space, CHAIN[:2])
    assert stand.reserve(writer, space, CHAIN).lease_id
    waiting = stand.begin(stand.acquire(reader, space, CHAIN, wait_ns=60 * SECOND))
    other = stand.begin(stand.acquire(writer, space, CHAIN, wait_ns=60 * SECOND))
    stand.store.end_session(reader.id)
    stand.settle()
    assert waiting.result().reason is Reason.SESSION_UNKNOWN
    assert waiting.result().lease_id == 0
    assert not other.done()
    stand.store.end_session(writer.id)
    stand.settle()
    assert other.result().reason is Reason.SESSION_UNKNOWN
    assert stand.held == (0, 0, 0)


def test_a_lease_that_a_peer_releases_is_waited_for_no_longer(stand: Stand) -> None:
    scheduler, rank = stand.attach(), stand.attach()
    space = stand.open(scheduler)
    stand.put(scheduler, space, CHAIN[:1])
    assert stand.reserve(scheduler, space, CHAIN).lease_id
    waiting = stand.begin(stand.acquire(scheduler, space, CHAIN, wait_ns=60 * SECOND))
    lease_id = max(lease.id for lease in stand.core.books.leases)
    assert stand.store.release(rank, [lease_id]) == (1, 0)
    stand.settle()
    assert waiting.result().lease_id == 0
    assert stand.held[0] == 0


def test_a_cancelled_acquire_holds_nothing(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN[:2])
    assert stand.reserve(session, space, CHAIN).lease_id
    for view in (False, True):
        work = stand.acquire(session, space, CHAIN, view=view, wait_ns=60 * SECOND)
        waiting = stand.begin(work)
        assert stand.held[view] == 1
        waiting.cancel()
        stand.settle()
        assert waiting.cancelled()
        assert stand.held[view] == 0


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_dropped_during_the_wait_is_not_handed_out(stand: Stand, whole: bool) -> None:
    """The lease held the block before it was invalidated; its answer comes after."""
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN[:2])
    reserved = stand.reserve(session, space, CHAIN[:4])
    stand.fill(reserved, CHAIN)
    work = stand.acquire(session, space, CHAIN[:4], wait_ns=60 * SECOND, all_or_nothing=whole)
    waiting = stand.begin(work)
    stand.core.invalidate(space_id=space, keys=CHAIN[:1], now_ns=stand.clock.monotonic_ns())
    assert stand.run(stand.commit(session, reserved.lease_id)).visible == 2
    stand.settle()
    leased = waiting.result()
    assert leased.reason is Reason.MISS_INVALIDATED
    if whole:
        assert (leased.lease_id, leased.leased) == (0, 0)
        assert stand.held[0] == 0
    else:
        assert leased.leased == 3
        assert leased.places[0] is None
        stand.assert_right(leased._replace(places=leased.places[1:]), CHAIN[1:4])


def test_a_space_that_is_closed_during_the_wait_gives_nothing(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN[:2])
    assert stand.reserve(session, space, CHAIN).lease_id
    waiting = stand.begin(stand.acquire(session, space, CHAIN, wait_ns=60 * SECOND))
    stand.decide(lambda: stand.core.set_epoch("model", 1, "", stand.clock.monotonic_ns()))
    leased = waiting.result()
    assert (leased.lease_id, leased.leased) == (0, 0)
    assert leased.reason is Reason.SPACE_CLOSED
    assert stand.held[0] == 0


def test_a_commit_that_takes_too_long_says_so_and_goes_on(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    stand.fill(reserved, CHAIN)
    stand.mover.held = True
    start_ns = stand.clock.monotonic_ns()
    done = stand.run(stand.commit(session, reserved.lease_id, wait_ns=2 * SECOND))
    assert stand.clock.monotonic_ns() - start_ns == pytest.approx(2 * SECOND, abs=MS)
    assert done.reason is Reason.DEADLINE_EXCEEDED
    assert (done.visible, done.waiting, done.failed) == (0, 6, 0)
    stand.mover.step()
    assert stand.codes(session, space, CHAIN) == b"\x01" * 6
    assert stand.held == (0, 0, 0)


def test_a_cancelled_commit_publishes_and_ends_its_lease(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    stand.fill(reserved, CHAIN)
    stand.mover.held = True
    commit = stand.begin(stand.commit(session, reserved.lease_id))
    stand.mover.step(2)
    commit.cancel()
    stand.settle()
    assert commit.cancelled()
    assert stand.codes(session, space, CHAIN) == b"\xff" * 6
    stand.mover.step()
    assert stand.held == (0, 0, 0)
    leased = stand.run(stand.acquire(session, space, CHAIN))
    stand.assert_right(leased, CHAIN)


def test_a_commit_of_a_session_that_ends_is_answered_and_goes_on(stand: Stand) -> None:
    session, other = stand.attach(b"one"), stand.attach(b"two")
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    stand.fill(reserved, CHAIN)
    stand.mover.held = True
    commit = stand.begin(stand.commit(session, reserved.lease_id))
    stand.store.end_session(session.id)
    stand.settle()
    with pytest.raises(KVStoreError) as refused:
        commit.result()
    assert refused.value.reason is Reason.SESSION_UNKNOWN
    stand.mover.step()
    assert stand.codes(other, stand.open(other), CHAIN) == b"\x01" * 6
    assert stand.held == (0, 0, 0)


def test_two_calls_may_commit_one_lease(stand: Stand) -> None:
    """A client that asks again while its first call is under way: both are answered in time."""
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    stand.fill(reserved, CHAIN)
    stand.mover.held = True
    first = stand.begin(stand.commit(session, reserved.lease_id))
    second = stand.begin(stand.commit(session, reserved.lease_id))
    start_ns = stand.clock.monotonic_ns()
    stand.mover.step()
    stand.settle()
    assert first.result().visible == 6
    assert second.result().reason in (Reason.OK, Reason.LEASE_UNKNOWN)
    assert stand.clock.monotonic_ns() == start_ns
    assert stand.codes(session, space, CHAIN) == b"\x01" * 6


def test_many_waiters_of_one_block_are_all_answered(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN[:1])
    stand.fill(reserved, CHAIN)
    waiting = [
        stand.begin(stand.acquire(session, space, CHAIN[:1], wait_ns=60 * SECOND))
        for _ in range(50)
    ]
    cancelled = waiting[::5]
    for task in cancelled:
        task.cancel()
    stand.settle()
    stand.run(stand.commit(session, reserved.lease_id))
    stand.settle()
    answers = [task.result() for task in waiting if task not in cancelled]
    assert [answer.leased for answer in answers] == [1] * 40
    assert stand.held[0] == 40


def test_deadlines_of_any_size_are_kept(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    assert stand.reserve(session, space, CHAIN, ttl_ns=10**6 * SECOND).lease_id
    for wait_ns in (1, MS, 3_600 * SECOND):
        start_ns = stand.clock.monotonic_ns()
        leased = stand.run(stand.acquire(session, space, CHAIN, wait_ns=wait_ns))
        assert leased.reason is Reason.MISS_IN_PROGRESS
        elapsed_ns = stand.clock.monotonic_ns() - start_ns
        assert elapsed_ns == pytest.approx(wait_ns, abs=MS)
    assert not stand.busy()


def test_the_drain_waits_for_whoever_waits(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    assert stand.unfinished()
    stand.fill(reserved, CHAIN)
    stand.store.drain()
    assert stand.store.draining
    assert stand.reserve(session, space, keys(2, "other")).reason is Reason.DRAINING
    with pytest.raises(KVStoreError) as refused:
        stand.attach()
    assert refused.value.reason is Reason.DRAINING
    assert stand.run(stand.commit(session, reserved.lease_id)).visible == 6
    assert not stand.unfinished()
    leased = stand.run(stand.acquire(session, space, CHAIN))
    assert leased.leased == 6
    assert stand.unfinished()
    stand.pass_time(TTL_NS)
    assert not stand.unfinished()


def test_a_defect_in_one_call_harms_no_other_waiter(stand: Stand) -> None:
    async def fails() -> None:
        raise ValueError("a defect")

    session = stand.attach()
    space = stand.open(session)
    assert stand.reserve(session, space, CHAIN, ttl_ns=5 * SECOND).lease_id
    waiting = stand.begin(stand.acquire(session, space, CHAIN, wait_ns=60 * SECOND))
    with pytest.raises(ValueError, match="a defect"):
        stand.run(fails())
    assert not waiting.done()
    stand.pass_time(5 * SECOND)
    assert waiting.done()
    assert not [task for task in asyncio.all_tasks(stand.loop) if not task.done()]
