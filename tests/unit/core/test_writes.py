"""Reservations: nothing before the commit, all after it, nothing left of what was given up."""

from __future__ import annotations

import pytest

from kvstore.core.effects import AssignStaging, Copy, Ready, UnassignStaging
from kvstore.model.reasons import Reason
from kvstore.model.values import STAGING, Before, CoreLimits
from tests.unit.core.harness import BLOCK, KIB, SECOND, Bench, keys


@pytest.fixture
def bench() -> Bench:
    return Bench(sessions=2)


def test_nothing_is_visible_before_all_copies_are_done(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(3))
    assert bench.have(session, space, keys(3)) == [False] * 3
    bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    copies = bench.out("commit")
    assert len(copies) == 3
    for copy in copies[:2]:
        bench.finish(copy)
        assert bench.core.lookup(session, space, keys(3)) == b"\xff" * 3
    bench.finish(copies[2])
    assert bench.have(session, space, keys(3)) == [True] * 3
    assert bench.run() == [Ready(reserved.lease_id)]
    assert bench.core.settle_commit(reserved.lease_id, 0) == (3, 0, 0, Reason.OK)
    assert bench.core.stats().write_leases == 0


def test_staging_is_assigned_on_first_use_and_closed_with_the_session(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    assert bench.run() == []
    reserved = bench.reserve(session, space, keys(2))
    first = bench.run()[0]
    assert first == AssignStaging(reserved.staging_region, session, bench.core.limits.staging_bytes)
    assert bench.core.staging_of(session) == reserved.staging_region
    bench.hold_regions = True
    bench.core.end_session(session, bench.now_ns)
    assert UnassignStaging(reserved.staging_region) in bench.run()
    assert bench.core.stats().pools[0].closing_bytes == bench.core.limits.staging_bytes
    bench.let_go()
    assert bench.core.stats().pools[0].closing_bytes == 0


def test_copies_go_from_staging_to_the_part_of_a_new_generation(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(2))
    bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    copies = bench.out("commit")
    assert [copy.source.tier for copy in copies] == [STAGING] * 2
    assert [copy.source.offset for copy in copies] == reserved.offsets
    assert [copy.key for copy in copies] == keys(2)
    assert [copy.target.generation for copy in copies] == [1, 1]
    assert {copy.length for copy in copies} == {BLOCK}


def test_a_reused_slot_gets_a_new_generation_before_it_is_filled() -> None:
    bench = Bench(slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4, "old"))
    assert bench.put(session, space, keys(4, "new")) == 4
    targets = [e.target for e in bench.seen if isinstance(e, Copy)]
    assert [place.generation for place in targets] == [1] * 4 + [2] * 4


def test_the_first_writer_wins(bench: Bench) -> None:
    one, two = bench.session(group=b"one"), bench.session(group=b"two")
    space = bench.space(one)
    first = bench.reserve(one, space, keys(3))
    second = bench.reserve(two, space, keys(4))
    assert (second.wanted, second.reserved) == ([3], 3)
    bench.commit(one, first.lease_id)
    third = bench.reserve(two, space, keys(3))
    assert (third.lease_id, third.present, third.reason) == (0, 3, Reason.OK)


def test_only_offered_blocks_are_wanted(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    reserved = bench.reserve(session, space, keys(5), first=3)
    assert reserved.wanted == [3, 4]


def test_more_than_staging_holds_is_taken_in_windows_from_the_head(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    first = bench.reserve(session, space, keys(6))
    assert (first.wanted, first.reason) == ([0, 1, 2, 3], Reason.STAGING_BUSY)
    assert bench.reserve(session, space, keys(6)).reason is Reason.STAGING_BUSY
    bench.commit(session, first.lease_id)
    second = bench.reserve(session, space, keys(6))
    assert (second.wanted, second.reason) == ([4, 5], Reason.OK)


def test_a_prompt_does_not_push_out_its_own_head() -> None:
    bench = Bench(slots=6)
    session = bench.session()
    space = bench.space(session)
    chain = keys(9)
    assert bench.put(session, space, chain[:5]) == 5
    assert bench.put(session, space, chain) == 1
    assert bench.reserve(session, space, chain).reason is Reason.NO_SPACE
    assert bench.have(session, space, chain) == [True] * 6 + [False] * 3


def test_an_abort_frees_keys_slots_and_staging(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    for _ in range(50):
        reserved = bench.reserve(session, space, keys(4))
        assert len(reserved.wanted) == 4
        assert bench.core.release(session, [reserved.lease_id], bench.now_ns) == (1, 0)
        bench.run()
    assert bench.core.stats().pools[0].free_slots == 4
    assert bench.core.why_absent(session, space, keys(1)[0]).reason is Reason.MISS_NEVER_STORED


def test_an_expired_reservation_frees_its_keys_at_once_its_staging_when_the_writer_stopped(
    bench: Bench,
) -> None:
    slow, other = bench.session(group=b"slow"), bench.session(group=b"other")
    space = bench.space(slow)
    late = bench.reserve(slow, space, keys(4), ttl_ns=SECOND)
    bench.pass_time(2 * SECOND)
    assert len(bench.reserve(other, space, keys(4)).wanted) == 4
    assert bench.reserve(slow, space, keys(2, "more")).reason is Reason.STAGING_BUSY
    committed = bench.core.commit(slow, late.lease_id, False, bench.now_ns)
    assert (committed.ready, committed.reason) == (False, Reason.LEASE_EXPIRED)
    assert len(bench.reserve(slow, space, keys(2, "more")).wanted) == 2


def test_a_writer_who_hangs_loses_his_staging_and_nobody_elses_bytes(bench: Bench) -> None:
    session, reader = bench.session(), bench.session(group=b"reader")
    space = bench.space(session)
    bench.hold_regions = True
    hung = bench.reserve(session, space, keys(1, "hung"), ttl_ns=SECOND)
    bench.run()
    bench.pass_time(2 * SECOND)
    live = bench.reserve(session, space, keys(1, "live"), ttl_ns=60 * SECOND)
    assert live.staging_region == hung.staging_region
    bench.pass_time(20 * SECOND)
    # Somebody still writes there: it stays until he is done, and nobody new comes.
    assert bench.core.staging_of(session) == hung.staging_region
    assert bench.reserve(session, space, keys(1, "next")).reason is Reason.STAGING_BUSY
    assert bench.commit(session, live.lease_id).visible == 1
    assert bench.closing == []
    bench.pass_time(SECOND)
    assert bench.closing == [hung.staging_region]
    stats = bench.core.stats()
    assert (stats.write_leases, stats.pools[0].staging_bytes) == (0, 0)
    # What he writes now goes where nobody reads; his commit is unknown.
    fresh = bench.reserve(session, space, keys(1, "hung"))
    bench.run()
    assert fresh.lease_id
    assert fresh.staging_region != hung.staging_region
    late = bench.core.commit(session, hung.lease_id, False, bench.now_ns)
    assert late.reason is Reason.LEASE_UNKNOWN
    assert bench.commit(session, fresh.lease_id).visible == 1
    assert bench.have(reader, space, [*keys(1, "hung"), *keys(1, "live")]) == [True, True]
    bench.let_go()


def test_staging_of_an_expired_reservation_ends_with_its_session(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.reserve(session, space, keys(4), ttl_ns=SECOND)
    bench.pass_time(2 * SECOND)
    bench.core.end_session(session, bench.now_ns)
    bench.run()
    stats = bench.core.stats()
    assert (stats.write_leases, stats.pools[0].staging_bytes) == (0, 0)


def test_a_commit_that_is_asked_for_twice_happens_once(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(2))
    for _ in range(3):
        bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    assert len(bench.out("commit")) == 2
    bench.finish_all()
    bench.run()
    assert bench.ready == [reserved.lease_id]


def test_another_session_cannot_commit(bench: Bench) -> None:
    session, stranger = bench.session(), bench.session(group=b"stranger")
    space = bench.space(session)
    reserved = bench.reserve(session, space, keys(1))
    committed = bench.core.commit(stranger, reserved.lease_id, False, bench.now_ns)
    assert committed.reason is Reason.LEASE_UNKNOWN


def test_a_given_commit_outlives_its_session(bench: Bench) -> None:
    session, reader = bench.session(), bench.session(group=b"reader")
    space = bench.space(session)
    bench.hold_copies = bench.hold_regions = True
    reserved = bench.reserve(session, space, keys(2))
    bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    bench.core.end_session(session, bench.now_ns)
    bench.run()
    assert bench.closing == [], "staging is closed when no copy reads it any more"
    bench.finish_all()
    bench.run()
    assert bench.have(reader, space, keys(2)) == [True, True]
    assert bench.closing == [reserved.staging_region]
    assert bench.core.stats().write_leases == 0


def test_the_end_of_a_session_drops_what_it_did_not_commit(bench: Bench) -> None:
    session, reader = bench.session(), bench.session(group=b"reader")
    space = bench.space(session)
    bench.reserve(session, space, keys(3))
    bench.core.end_session(session, bench.now_ns)
    bench.run()
    assert bench.core.lookup(reader, space, keys(3)) == bytes(3)
    assert bench.core.stats().pools[0].free_slots == 4


def test_a_failed_copy_loses_its_block_alone(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(3))
    bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    failing = bench.out("commit")[1]
    bench.finish(failing, Reason.COPY_FAILED)
    bench.finish_all()
    result = bench.core.settle_commit(reserved.lease_id, bench.now_ns)
    assert result == (2, 0, 1, Reason.COPY_FAILED)
    assert bench.have(session, space, keys(3)) == [True, False, True]


@pytest.mark.parametrize("what", ["keys", "space", "epoch"])
def test_what_was_reserved_before_an_invalidation_is_never_visible(bench: Bench, what: str) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    before = bench.reserve(session, space, keys(2))
    during = bench.reserve(session, space, keys(2, "during"))
    bench.core.commit(session, during.lease_id, False, bench.now_ns)
    assert len(bench.out("commit")) == 2
    if what == "keys":
        both = keys(2) + keys(2, "during")
        bench.core.invalidate(space_id=space, keys=both, now_ns=bench.now_ns)
    elif what == "space":
        bench.core.invalidate(space_id=space, now_ns=bench.now_ns)
    else:
        bench.core.set_epoch("model", 1, "new weights", bench.now_ns)
    committed = bench.core.commit(session, before.lease_id, False, bench.now_ns)
    assert committed.ready, "there is nothing left to copy"
    bench.run()
    bench.finish_all()
    bench.run()
    for lease in (before, during):
        result = bench.core.settle_commit(lease.lease_id, bench.now_ns)
        assert (result.visible, result.failed) == (0, 2)
    assert not any(bench.core.lookup(session, space, keys(2) + keys(2, "during")))
    assert bench.core.stats().pools[0].blocks == 0


def test_a_slot_is_not_free_while_a_copy_still_writes_it(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(2))
    bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    bench.run()
    bench.core.invalidate(space_id=space, keys=keys(2), now_ns=bench.now_ns)
    assert bench.core.stats().pools[0].free_slots == 2
    bench.finish_all()
    assert bench.core.stats().pools[0].free_slots == 4


def test_draining_takes_no_reservation_but_goes_on_reading(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(2))
    pending = bench.reserve(session, space, keys(2, "pending"))
    bench.core.drain(bench.now_ns)
    assert bench.reserve(session, space, keys(1, "more")).reason is Reason.DRAINING
    assert bench.use(session, space, keys(2)) == 2
    assert bench.commit(session, pending.lease_id).visible == 2


def test_bounds_are_answers(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    core = bench.core
    assert bench.reserve(session, space, keys(1), part=1).reason is Reason.BAD_PART
    assert bench.reserve(session, space + 99, keys(1)).reason is Reason.SPACE_UNKNOWN
    assert bench.reserve(session + 99, space, keys(1)).reason is Reason.SESSION_UNKNOWN
    too_many = [keys(1)[0]] * (core.limits.keys_per_call_max + 1)
    assert bench.reserve(session, space, too_many).reason is Reason.TOO_MANY_KEYS
    tiny = Bench(limits=CoreLimits(part_bytes_max=BLOCK - 1))
    session = tiny.session()
    assert tiny.reserve(session, tiny.space(session), keys(1)).reason is Reason.PART_TOO_LARGE
    small = Bench(limits=CoreLimits(leases_per_session_max=1, staging_bytes=64 * KIB))
    session = small.session()
    space = small.space(session)
    assert small.reserve(session, space, keys(1)).lease_id
    assert small.reserve(session, space, keys(1, "b")).reason is Reason.LIMIT_LEASES


def test_a_key_twice_in_a_chain_is_stored_once(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    one = keys(1)[0]
    reserved = bench.reserve(session, space, [one, one])
    assert reserved.wanted == [0]
    assert bench.commit(session, reserved.lease_id).visible == 1


def test_settling_what_was_not_committed_is_an_answer(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    reserved = bench.reserve(session, space, keys(2))
    result = bench.core.settle_commit(reserved.lease_id, bench.now_ns)
    assert result == (0, 0, 2, Reason.LEASE_EXPIRED)
    assert bench.commit(session, reserved.lease_id).visible == 2


def test_a_durable_commit_is_told_although_its_reservation_ran_out_meanwhile() -> None:
    bench = Bench(slots=16, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(2), ttl_ns=SECOND)
    bench.core.commit(session, reserved.lease_id, True, bench.now_ns)
    bench.run()
    bench.finish_all("commit")
    bench.pass_time(2 * SECOND)
    assert bench.ready == []
    bench.settle_all()
    assert bench.ready == [reserved.lease_id]
    # Nor does what was told get lost before it is asked for.
    bench.pass_time(2 * SECOND)
    assert bench.core.settle_commit(reserved.lease_id, bench.now_ns) == (2, 0, 0, Reason.OK)
    assert bench.core.stats().write_leases == 0


def test_who_asks_anew_for_a_commit_is_told_too() -> None:
    bench = Bench(slots=16, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(2))
    bench.core.commit(session, reserved.lease_id, True, bench.now_ns)
    bench.run()
    bench.finish_all("commit")
    # The first call's time is over; two others ask for the same.
    assert bench.core.settle_commit(reserved.lease_id, bench.now_ns) == (2, 0, 0, Reason.OK)
    for _ in range(2):
        again = bench.core.commit(session, reserved.lease_id, True, bench.now_ns)
        assert (again.ready, again.reason) == (False, Reason.OK)
    bench.settle_all()
    assert bench.ready == [reserved.lease_id]
    for _ in range(2):
        assert bench.core.settle_commit(reserved.lease_id, bench.now_ns) == (2, 0, 0, Reason.OK)
    assert bench.core.stats().write_leases == 0


# ---------------------------------------------------------------- prompts of several calls


def put_in_stretches(
    bench: Bench, session: int, space: int, chain: list[bytes], since: bool
) -> int:
    """Two blocks a call, as of a prompt that is longer than a call; how many were stored."""
    stored, mark = 0, 0
    for start in range(0, len(chain), 2):
        before = Before(chain[start - 1] if start else b"", start, mark)
        reserved = bench.reserve(session, space, chain[start : start + 2], before=before)
        mark = mark or (reserved.mark if since else 0)
        bench.run()
        if not reserved.lease_id:
            assert reserved.reason is Reason.NO_SPACE
            break
        stored += bench.commit(session, reserved.lease_id).visible
    return stored


def test_a_long_prompt_does_not_push_out_its_own_head() -> None:
    bench = Bench(32)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(30, "other"))
    assert put_in_stretches(bench, session, space, keys(50), since=True) == 32
    assert bench.have(session, space, keys(50)) == [True] * 32 + [False] * 18
    assert bench.have(session, space, keys(30, "other")) == [False] * 30, "others make room"
    # Without the mark each call stands for itself.
    assert put_in_stretches(bench, session, space, keys(50, "long"), since=False) == 50
    there = bench.have(session, space, keys(50, "long"))
    assert there[0], "the head stays"
    assert not all(there), "its own blocks make room"


def test_a_later_stretch_is_linked_to_the_one_before() -> None:
    bench = Bench(32, disk=True)
    session = bench.session()
    space = bench.space(session)
    chain = keys(6)
    assert put_in_stretches(bench, session, space, chain, since=True) == 6
    bench.put(session, space, keys(32, "other"))
    bench.settle_all()
    saves = [copy for copy in bench.seen if isinstance(copy, Copy) and copy.why == "save"]
    linked = {copy.key: (copy.parent, copy.depth) for copy in saves if copy.key in chain}
    assert linked
    for index, key in enumerate(chain):
        if key in linked:
            assert linked[key] == (chain[index - 1] if index else b"", index)


def test_a_mark_of_another_time_spares_no_more_than_the_command_itself() -> None:
    bench = Bench(32)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(32, "other"))
    before = Before(since=2**63)
    reserved = bench.reserve(session, space, keys(2), before=before)
    assert len(reserved.wanted) == 2


# ---------------------------------------------------------------- given up too late


def test_an_abort_that_meets_a_commit_comes_too_late(bench: Bench) -> None:
    """One of the two counts: the commit's answer says what became of the blocks."""
    session, peer = bench.session(), bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(3))
    assert bench.core.commit(session, reserved.lease_id, False, bench.now_ns).reason is Reason.OK
    for who in (session, peer):
        assert bench.core.release(who, [reserved.lease_id], bench.now_ns) == (0, 1)
    bench.run()
    assert bench.ready == []
    bench.finish_all()
    bench.run()
    assert bench.ready == [reserved.lease_id]
    assert bench.core.settle_commit(reserved.lease_id, 0) == (3, 0, 0, Reason.OK)
    assert bench.have(session, space, keys(3)) == [True] * 3
    assert bench.core.stats().write_leases == 0


def test_the_wait_for_a_lease_ends_with_the_lease(bench: Bench) -> None:
    session, peer = bench.session(), bench.session()
    space = bench.space(session)
    bench.reserve(session, space, keys(2))
    acquired = bench.acquire(peer, space, keys(2), wait=True)
    assert not acquired.ready
    bench.run()
    assert bench.core.release(peer, [acquired.lease_id], bench.now_ns) == (1, 0)
    bench.run()
    assert bench.ready == [acquired.lease_id]
