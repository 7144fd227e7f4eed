"""Sessions: what a dead one held is free at once, and nobody sees what is another's."""

from __future__ import annotations

import pytest

from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import CoreLimits
from kvstore.testing.workload import fingerprint
from tests.unit.store.stand import BLOCK, MS, SECOND, STAGING_BLOCKS, TTL_NS, Stand, keys

CHAIN = keys(4)


def test_everything_that_a_dead_session_held_is_free_at_once(stand: Stand) -> None:
    dead, alive = stand.attach(b"dead"), stand.attach(b"alive")
    space = stand.open(dead)
    stand.open(alive)
    stand.put(alive, space, CHAIN[:2])
    for view in (False, True):
        assert stand.run(stand.acquire(dead, space, CHAIN[:2], view=view)).leased == 2
    reserved = stand.reserve(dead, space, CHAIN)
    assert reserved.wanted == [2, 3]
    assert stand.reserve(alive, space, CHAIN).reserved == 2
    assert stand.held == (1, 1, 1)
    staging = stand.store.staging_fd(dead.id)
    assert staging is not None
    assert staging[1] == STAGING_BLOCKS * BLOCK
    used = stand.core.stats().pools[0].used_bytes
    stand.store.end_session(dead.id)
    stand.settle()
    assert stand.held == (0, 0, 0)
    assert stand.store.staging_fd(dead.id) is None
    assert stand.core.stats().pools[0].used_bytes == used - STAGING_BLOCKS * BLOCK
    assert stand.store.session_by_secret(dead.secret, "a") is None
    assert dead.ended.is_set()
    assert stand.reserve(alive, space, CHAIN).wanted == [2, 3]
    stand.store.end_session(dead.id)  # again: nothing
    assert stand.store.session_count == 1


def test_a_copy_lease_ends_with_its_time_and_a_view_does_not(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN)
    copy = stand.run(stand.acquire(session, space, CHAIN, ttl_ns=2 * SECOND))
    view = stand.run(stand.acquire(session, space, CHAIN, view=True))
    stand.pass_time(2 * SECOND - 1)
    assert stand.held == (1, 1, 0)
    stand.pass_time(1)
    assert stand.held == (0, 1, 0)
    assert stand.store.release(session, [copy.lease_id]) == (0, 1)
    stand.pass_time(1_000 * SECOND)
    assert stand.store.release(session, [view.lease_id, view.lease_id]) == (1, 1)
    assert stand.held == (0, 0, 0)


def test_the_late_commit_of_an_expired_reservation_is_refused(stand: Stand) -> None:
    slow, quick = stand.attach(b"slow"), stand.attach(b"quick")
    space = stand.open(slow)
    stand.open(quick)
    reserved = stand.reserve(slow, space, CHAIN, ttl_ns=3 * SECOND)
    stand.pass_time(3 * SECOND)
    # The keys are free for another writer, the staging is not: the slow one may still write there.
    assert stand.put(quick, space, CHAIN).visible == 4
    again = stand.reserve(slow, space, keys(2, "other"))
    assert not set(again.offsets) & set(reserved.offsets)
    stand.fill(reserved, keys(4, "wrong"))
    with pytest.raises(KVStoreError) as refused:
        stand.run(stand.commit(slow, reserved.lease_id))
    assert refused.value.reason is Reason.LEASE_EXPIRED
    leased = stand.run(stand.acquire(quick, space, CHAIN))
    stand.assert_right(leased, CHAIN)
    with pytest.raises(KVStoreError) as unknown:
        stand.run(stand.commit(slow, reserved.lease_id))
    assert unknown.value.reason is Reason.LEASE_UNKNOWN


def test_a_reservation_that_ended_may_be_filled_no_longer(stand: Stand) -> None:
    session, other = stand.attach(), stand.attach(b"other")
    space = stand.open(session)
    first = stand.reserve(session, space, CHAIN)
    assert stand.core.is_reserved(session.id, first.lease_id)
    assert not stand.core.is_reserved(other.id, first.lease_id)
    stand.store.release(session, [first.lease_id])
    assert not stand.core.is_reserved(session.id, first.lease_id)
    second = stand.reserve(session, space, CHAIN, ttl_ns=SECOND)
    assert second.offsets == first.offsets, "the same ranges, for another reservation"
    stand.pass_time(SECOND)
    assert not stand.core.is_reserved(session.id, second.lease_id)
    stand.store.release(session, [second.lease_id])
    third = stand.reserve(session, space, CHAIN)
    stand.fill(third, CHAIN)
    stand.run(stand.commit(session, third.lease_id))
    assert not stand.core.is_reserved(session.id, third.lease_id)


def test_a_failed_copy_publishes_the_others_and_says_so(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.mover.fails = {CHAIN[1]}
    done = stand.put(session, space, CHAIN)
    assert (done.visible, done.failed, done.reason) == (3, 1, Reason.COPY_FAILED)
    assert stand.codes(session, space, CHAIN) == b"\x01\x00\x01\x01"
    stand.mover.fails = set()
    assert stand.put(session, space, CHAIN).visible == 1


def test_durable_without_a_durable_tier_is_refused_and_the_lease_stays(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    stand.fill(reserved, CHAIN)
    with pytest.raises(KVStoreError) as refused:
        stand.run(stand.commit(session, reserved.lease_id, durable=True))
    assert refused.value.reason is Reason.NO_DURABLE_TIER
    assert stand.run(stand.commit(session, reserved.lease_id)).visible == 4


def test_another_session_cannot_commit(stand: Stand) -> None:
    session, peer = stand.attach(), stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    for lease_id in (reserved.lease_id, 0, 99, 2**64 - 1):
        with pytest.raises(KVStoreError) as refused:
            stand.run(stand.commit(peer, lease_id))
        assert refused.value.reason is Reason.LEASE_UNKNOWN


def test_other_tenants_and_groups_see_what_was_never_there() -> None:
    with Stand(tenants=("a", "b")) as stand:
        one, other = stand.attach(), stand.attach(b"other")
        stranger = stand.attach(tenant="b")
        space, held = stand.open(one), stand.open(one, fingerprint(revision=None))
        stand.put(one, space, CHAIN)
        stand.put(one, held, CHAIN)
        leased = stand.run(stand.acquire(one, space, CHAIN))
        region = leased.regions[0].id
        answers = set()
        for session, space_id in (
            (stranger, space),
            (stranger, held),
            (other, held),
            (other, 77),
            (other, 0),
            (stranger, 2**64 - 1),
        ):
            with pytest.raises(BadRequest) as refused:
                stand.store.space_of(session, space_id)
            answers.add(str(refused.value))
            assert stand.codes(session, space_id, CHAIN) == bytes(4)
            nothing = stand.run(stand.acquire(session, space_id, CHAIN, wait_ns=SECOND))
            assert (nothing.lease_id, nothing.reason) == (0, Reason.SPACE_UNKNOWN)
            assert stand.reserve(session, space_id, CHAIN).reason is Reason.SPACE_UNKNOWN
        assert len(answers) == 1
        assert stand.store.release(stranger, [leased.lease_id]) == (0, 1)
        assert stand.store.release(other, [leased.lease_id]) == (0, 1)
        assert stand.store.leased_bytes(stranger, leased.lease_id, 4) == 0
        assert stand.store.leased_bytes(one, leased.lease_id, 99) == 4 * BLOCK
        assert stand.store.region_fd(region, "a") is not None
        assert stand.store.region_fd(region, "b") is None
        assert stand.store.region_fd(12_345, "b") is None
        assert stand.store.session_by_secret(one.secret, "b") is None
        assert stand.store.session_by_secret(b"", "a") is None


def test_a_closed_space_says_that_it_was_closed(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN)
    now_ns = stand.clock.monotonic_ns()
    stand.decide(lambda: stand.core.invalidate(space_id=space, now_ns=now_ns))
    with pytest.raises(KVStoreError) as refused:
        stand.store.space_of(session, space)
    assert refused.value.reason is Reason.SPACE_CLOSED
    assert stand.codes(session, space, CHAIN) == bytes(4)
    assert stand.run(stand.acquire(session, space, CHAIN)).reason is Reason.SPACE_CLOSED
    assert stand.open(session) != space


def test_sessions_are_bounded() -> None:
    with Stand(limits=CoreLimits(sessions_max=2, staging_bytes=STAGING_BLOCKS * BLOCK)) as stand:
        first, second = stand.attach(), stand.attach()
        assert first.secret != second.secret
        with pytest.raises(KVStoreError) as refused:
            stand.attach()
        assert refused.value.reason is Reason.LIMIT_SESSIONS
        assert refused.value.setting == "limits.sessions_max"
        stand.store.end_session(first.id)
        stand.attach()
        with pytest.raises(BadRequest):
            stand.store.attach("nobody", b"engine", "", "")
        with pytest.raises(BadRequest):
            stand.store.attach("a", b"", "", "")


def test_a_held_space_dies_with_the_last_session_of_its_group(stand: Stand) -> None:
    first, second = stand.attach(), stand.attach()
    held = stand.open(first, fingerprint(revision=None))
    stand.put(first, held, CHAIN)
    stand.store.end_session(first.id)
    assert stand.codes(second, held, CHAIN) == b"\x01" * 4
    stand.store.end_session(second.id)
    again = stand.attach()
    assert stand.open(again, fingerprint(revision=None)) != held
    assert stand.core.stats().pools[0].blocks == 0


def test_a_clients_measurement_moves_the_estimate(stand: Stand) -> None:
    link = stand.store.links[0]
    before = link.bytes_per_second
    for _ in range(50):
        stand.store.note_load(64 << 20, 64 * MS, 0)
    assert link.bytes_per_second < before
    slow = link.bytes_per_second
    stand.store.note_load(0, 5, 0)
    stand.store.note_load(5, 0, 0)
    assert link.bytes_per_second == slow


def test_leases_of_a_drained_store_still_expire(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.put(session, space, CHAIN)
    assert stand.run(stand.acquire(session, space, CHAIN)).lease_id
    stand.store.drain()
    assert stand.unfinished()
    stand.pass_time(TTL_NS)
    assert not stand.unfinished()
    assert stand.store.stats().state == "draining"
