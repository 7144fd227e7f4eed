"""Staging for everybody where there is not enough of it: by turns."""

from __future__ import annotations

from kvstore.model.values import CoreLimits
from tests.unit.core.harness import BLOCK, MS, SECOND, Bench, keys


def crowd(writers: int) -> tuple[Bench, list[int], int]:
    """Sessions of which four can have staging at a time."""
    limits = CoreLimits(staging_bytes=2 * BLOCK, staging_share=0.2)
    bench = Bench(capacity_bytes=40 * BLOCK, limits=limits)
    sessions = [bench.session(group=b"%d" % index) for index in range(writers)]
    space = bench.space(sessions[0], block_tokens=32)
    bench.checks = False  # of every step: `pass_turn` checks now and then
    return bench, sessions, space


def pass_turn(bench: Bench) -> None:
    bench.pass_time(20 * MS)
    bench.core.check()


def test_whoever_waits_for_staging_gets_a_turn_however_busy_the_others_are() -> None:
    bench, sessions, space = crowd(9)
    stored = dict.fromkeys(sessions, 0)
    last_ns = dict.fromkeys(sessions, bench.now_ns)
    for turn in range(500):
        for session in sessions:
            if bench.put(session, space, keys(1, f"{session}/{turn}")):
                stored[session] += 1
                last_ns[session] = bench.now_ns
            assert bench.now_ns - last_ns[session] <= 4 * SECOND, f"{session} is kept waiting"
        pass_turn(bench)
    assert min(stored.values()) > 0.5 * max(stored.values()), "each has its part of the time"
    assert not bench.core.books.staging_closing


def test_a_writer_that_always_has_ranges_out_ends_its_turn() -> None:
    bench, sessions, space = crowd(5)
    late = sessions.pop()
    out = {session: bench.reserve(session, space, keys(1, f"{session}")) for session in sessions}
    assert bench.put(late, space, keys(1, "late")) == 0
    for turn in range(150):
        for session in sessions:
            # The next one is reserved before the last is committed.
            after = bench.reserve(session, space, keys(1, f"{session}/{turn}"))
            if (before := out.pop(session, None)) is not None and before.lease_id:
                bench.commit(session, before.lease_id)
            if after.lease_id:
                out[session] = after
            bench.run()
        pass_turn(bench)
        if bench.put(late, space, keys(1, f"late/{turn}")):
            break
    assert turn < 100, "within two seconds"


def test_staging_that_was_waited_for_is_kept_for_who_asks_seldom() -> None:
    bench, sessions, space = crowd(9)
    *busy, seldom = sessions
    stored = 0
    for turn in range(700):
        for session in busy:
            bench.put(session, space, keys(1, f"{session}/{turn}"))
        pass_turn(bench)
        if turn % 150 == 0:
            stored += bench.put(seldom, space, keys(1, f"seldom/{turn}"))
    assert stored >= 2, "it asks every three seconds"


def test_who_holds_closed_staging_for_ever_does_not_keep_others_from_their_turn() -> None:
    bench, sessions, space = crowd(5)
    late, frozen = sessions.pop(), sessions[0]
    for session in sessions:
        assert bench.put(session, space, keys(1, f"{session}")) == 1
    assert bench.put(late, space, keys(1, "late")) == 0
    mapped = bench.core.staging_of(frozen)
    bench.hold_regions = True
    for turn in range(250):
        for session in sessions[1:]:
            bench.put(session, space, keys(1, f"{session}/{turn}"))
        pass_turn(bench)
        for region in [one for one in bench.closing if one != mapped]:
            bench.closing.remove(region)
            bench.core.region_gone(region, bench.now_ns)
        bench.run()
        if bench.put(late, space, keys(1, f"late/{turn}")):
            break
    assert turn < 200, "within four seconds"
