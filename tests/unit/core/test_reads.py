"""Read leases: what is held stays, what is waited for is told, what is given up is free."""

from __future__ import annotations

import pytest

from kvstore.core.effects import Copy, Forget, Ready
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreLimits, LeaseMode
from tests.unit.core.harness import BLOCK, SECOND, STEP_NS, Bench, keys


@pytest.fixture
def bench() -> Bench:
    return Bench(slots=8, sessions=2)


def test_lookup_tells_absent_pending_and_tier_and_changes_nothing(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.reserve(session, space, keys(2))
    before = bench.core.stats()
    assert bench.core.lookup(session, space, keys(3)) == bytes([1 + bench.host, 255, 0])
    assert bench.core.stats() == before


def test_places_name_what_was_committed(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(2))
    targets = {e.key: e.target for e in bench.seen if isinstance(e, Copy)}
    acquired = bench.acquire(session, space, keys(3))
    assert (acquired.ready, acquired.reason) == (True, Reason.MISS_NEVER_STORED)
    settled = bench.core.settle(acquired.lease_id, bench.now_ns)
    assert settled.places == [targets[keys(2)[0]], targets[keys(2)[1]], None]
    assert settled.reasons == {2: Reason.MISS_NEVER_STORED}
    assert settled.leased == 2


def test_leased_slots_are_never_victims(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(8))
    lease = bench.acquire(session, space, keys(5)).lease_id
    assert bench.put(session, space, keys(8, "new")) == 3
    pinned = bench.acquire(session, space, keys(3, "new")).lease_id
    assert bench.reserve(session, space, keys(8, "newer")).reason is Reason.NO_SPACE
    bench.core.release(session, [pinned], bench.now_ns)
    assert bench.have(session, space, keys(8)) == [True] * 5 + [False] * 3
    bench.core.release(session, [lease], bench.now_ns)
    assert bench.put(session, space, keys(8, "newer")) == 8


def test_nothing_there_is_no_lease(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    assert bench.acquire(session, space, keys(2)) == (0, False, Reason.MISS_NEVER_STORED)
    assert bench.core.stats().read_leases == 0


def test_a_lease_is_used_and_ended_by_its_group_and_nobody_else(bench: Bench) -> None:
    scheduler, rank = bench.session(), bench.session()
    stranger = bench.session(group=b"stranger")
    space = bench.space(scheduler)
    bench.put(scheduler, space, keys(2))
    lease = bench.acquire(scheduler, space, keys(2)).lease_id
    assert bench.core.release(stranger, [lease, 999], bench.now_ns) == (0, 2)
    assert bench.core.release(rank, [lease], bench.now_ns) == (1, 0)
    assert bench.core.release(rank, [lease], bench.now_ns) == (0, 1)


def test_copy_leases_expire_and_views_do_not(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(8))
    bench.acquire(session, space, keys(2), ttl_ns=SECOND)
    view = bench.acquire(session, space, keys(8)[2:4], mode=LeaseMode.VIEW, ttl_ns=SECOND)
    assert bench.core.tick(bench.now_ns) == bench.now_ns - STEP_NS + SECOND
    assert bench.pass_time(3600 * SECOND) is None
    stats = bench.core.stats()
    assert (stats.read_leases, stats.view_leases) == (0, 1)
    assert bench.core.settle(view.lease_id, bench.now_ns).leased == 2
    assert bench.put(session, space, keys(8, "new")) == 6


def test_the_end_of_a_session_ends_its_leases(bench: Bench) -> None:
    session, other = bench.session(), bench.session(group=b"other")
    space = bench.space(session)
    bench.put(session, space, keys(4))
    bench.acquire(session, space, keys(4), mode=LeaseMode.VIEW)
    bench.core.end_session(session, bench.now_ns)
    bench.core.end_session(session, bench.now_ns)
    bench.run()
    assert bench.core.stats().view_leases == 0
    assert bench.use(other, space, keys(4)) == 4


def test_views_are_capped_in_bytes() -> None:
    limits = CoreLimits(
        staging_bytes=4 * BLOCK, staging_share=0.9, view_bytes_per_session_max=3 * BLOCK
    )
    bench = Bench(slots=8, limits=limits)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(5))
    view = bench.acquire(session, space, keys(5), mode=LeaseMode.VIEW)
    assert view.reason is Reason.VIEW_LIMIT
    assert bench.core.settle(view.lease_id, bench.now_ns).leased == 3
    more = bench.acquire(session, space, keys(5), mode=LeaseMode.VIEW)
    assert (more.lease_id, more.reason) == (0, Reason.VIEW_LIMIT)
    bench.core.release(session, [view.lease_id], bench.now_ns)
    whole = bench.acquire(session, space, keys(4), mode=LeaseMode.VIEW, all_or_nothing=True)
    assert (whole.lease_id, whole.reason) == (0, Reason.VIEW_LIMIT)
    assert bench.acquire(session, space, keys(3), mode=LeaseMode.VIEW).lease_id


def test_all_or_nothing(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    partly = bench.acquire(session, space, keys(5), all_or_nothing=True)
    assert partly == (0, False, Reason.MISS_NEVER_STORED)
    whole = bench.acquire(session, space, keys(4), all_or_nothing=True)
    assert bench.core.settle(whole.lease_id, bench.now_ns).leased == 4
    bench.core.release(session, [whole.lease_id], bench.now_ns)
    assert bench.put(session, space, keys(8, "new")) == 8, "a refusal holds nothing"


def test_waiting_joins_a_block_that_is_being_written() -> None:
    bench = Bench(slots=32)
    writer, reader = bench.session(), bench.session(group=b"decode")
    space = bench.space(writer)
    reserved = bench.reserve(writer, space, keys(3))
    assert bench.acquire(reader, space, keys(3)) == (0, False, Reason.MISS_IN_PROGRESS)
    waiting = bench.acquire(reader, space, keys(3), wait=True)
    assert (waiting.ready, waiting.reason) == (False, Reason.OK)
    bench.commit(writer, reserved.lease_id)
    assert waiting.lease_id in bench.ready
    assert bench.core.settle(waiting.lease_id, bench.now_ns).leased == 3


def test_a_waiter_is_told_when_the_writer_gives_up() -> None:
    bench = Bench(slots=32)
    writer, reader = bench.session(), bench.session(group=b"decode")
    space = bench.space(writer)
    bench.put(writer, space, keys(1))
    reserved = bench.reserve(writer, space, keys(3))
    waiting = bench.acquire(reader, space, keys(3), wait=True)
    bench.core.release(writer, [reserved.lease_id], bench.now_ns)
    assert bench.run() == [Ready(waiting.lease_id)]
    settled = bench.core.settle(waiting.lease_id, bench.now_ns)
    assert (settled.leased, settled.reasons) == (1, {1: Reason.ABORTED, 2: Reason.ABORTED})


def test_all_or_nothing_that_waited_in_vain_holds_nothing(bench: Bench) -> None:
    writer, reader = bench.session(), bench.session(group=b"decode")
    space = bench.space(writer)
    bench.put(writer, space, keys(2))
    reserved = bench.reserve(writer, space, keys(3))
    waiting = bench.acquire(reader, space, keys(3), wait=True, all_or_nothing=True)
    bench.core.release(writer, [reserved.lease_id], bench.now_ns)
    settled = bench.core.settle(waiting.lease_id, bench.now_ns)
    assert (settled.leased, settled.places) == (0, [None] * 3)
    assert bench.core.stats().read_leases == 0


def test_a_deadline_settles_for_what_is_there(bench: Bench) -> None:
    writer, reader = bench.session(), bench.session(group=b"decode")
    space = bench.space(writer)
    bench.put(writer, space, keys(1))
    reserved = bench.reserve(writer, space, keys(3))
    waiting = bench.acquire(reader, space, keys(3), wait=True)
    settled = bench.core.settle(waiting.lease_id, bench.now_ns)
    assert settled.leased == 1
    assert settled.reasons[1] is Reason.MISS_IN_PROGRESS
    bench.commit(writer, reserved.lease_id)
    assert waiting.lease_id not in bench.ready, "nobody is told what he gave up"
    assert bench.core.settle(waiting.lease_id, bench.now_ns).leased == 1


def test_settling_what_is_gone_is_an_answer(bench: Bench) -> None:
    assert bench.core.settle(77, 0) == ([], {0: Reason.LEASE_EXPIRED}, 0)
    assert bench.core.settle_commit(77, 0).reason is Reason.LEASE_UNKNOWN


def test_a_key_twice_is_held_twice(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    lease = bench.acquire(session, space, keys(1) * 2).lease_id
    assert bench.core.settle(lease, bench.now_ns).leased == 2
    bench.run()
    bench.core.release(session, [lease], bench.now_ns)
    bench.run()


def test_bounds_are_answers(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    too_many = keys(1) * (bench.core.limits.keys_per_call_max + 1)
    assert bench.acquire(session, space, too_many).reason is Reason.TOO_MANY_KEYS
    assert bench.acquire(999, space, keys(1)).reason is Reason.SESSION_UNKNOWN
    assert bench.acquire(session, 999, keys(1)).reason is Reason.SPACE_UNKNOWN
    bench.core.invalidate(space_id=space, now_ns=bench.now_ns)
    assert bench.acquire(session, space, keys(1)).reason is Reason.SPACE_CLOSED
    limits = CoreLimits(leases_per_session_max=1, staging_bytes=BLOCK, staging_share=0.9)
    small = Bench(limits=limits)
    session = small.session()
    space = small.space(session)
    small.put(session, space, keys(1))
    assert small.acquire(session, space, keys(1)).lease_id
    assert small.acquire(session, space, keys(1)).reason is Reason.LIMIT_LEASES


# ---------------------------------------------------------------- loads from an archive


class Archived(Bench):
    """A host of 4 slots above a disk that holds `old`."""

    def __init__(self) -> None:
        super().__init__(slots=4, disk=True)
        self.writer = self.session()
        self.id = self.space(self.writer)
        self.old = keys(3, "old")
        self.put(self.writer, self.id, self.old)
        self.put(self.writer, self.id, keys(4, "new"))
        self.run()
        assert {key for _, key in self.archived} >= set(self.old)
        self.below = dict.fromkeys(self.old, self.disk)
        self.hold_copies = True

    def loads(self) -> list[Copy]:
        """The loads that are out once their slots' victims are saved."""
        self.run()
        self.finish_all("save")
        return self.out("load")


def test_a_block_below_is_loaded_and_waited_for() -> None:
    bench = Archived()
    assert not bench.acquire(bench.writer, bench.id, bench.old, wait=True).lease_id
    assert bench.out("load") == [], "nothing is loaded for one who does not say where it is"
    waiting = bench.acquire(bench.writer, bench.id, bench.old, below=bench.below)
    assert not waiting.ready
    loads = bench.loads()
    assert {copy.key for copy in loads} == set(bench.old)
    assert {(copy.source.tier, copy.source.region) for copy in loads} == {(bench.disk, 0)}
    bench.finish_all()
    bench.run()
    assert waiting.lease_id in bench.ready
    assert bench.core.settle(waiting.lease_id, bench.now_ns).leased == 3


def test_several_who_want_a_block_share_one_load() -> None:
    bench = Archived()
    leases = [
        bench.acquire(bench.writer, bench.id, bench.old, below=below).lease_id
        for below in (bench.below, bench.below, {})
    ]
    assert not bench.acquire(bench.writer, bench.id, bench.old).lease_id, "he does not load"
    assert len(bench.loads()) == 3
    bench.finish_all()
    bench.run()
    assert set(leases) <= set(bench.ready)


def test_who_loads_does_not_wait_for_writers() -> None:
    bench = Archived()
    wanted = [*bench.old[:2], *keys(1, "unwritten")]
    assert bench.reserve(bench.writer, bench.id, wanted, first=2).lease_id
    loading = bench.acquire(bench.writer, bench.id, wanted, below=bench.below)
    assert loading.reason is Reason.MISS_IN_PROGRESS
    assert len(bench.loads()) == 2
    bench.finish_all()
    bench.run()
    assert loading.lease_id in bench.ready
    assert bench.core.settle(loading.lease_id, bench.now_ns).leased == 2


def test_a_loaded_block_knows_its_parent_so_that_it_can_be_saved_behind_it() -> None:
    bench = Archived()
    bench.acquire(bench.writer, bench.id, bench.old, below=bench.below)
    bench.loads()
    bench.finish_all()
    bench.run()
    space = bench.core.books.spaces.get(bench.id)
    assert space is not None
    slots = [space.index[key] for key in bench.old]
    assert [slot.parent for slot in slots] == [b"", *bench.old[:2]]
    assert [slot.depth for slot in slots] == [0, 1, 2]


def test_a_loaded_block_counts_for_the_length_of_the_prompt_that_wanted_it() -> None:
    bench = Archived()
    wanted = [*bench.old, *keys(5, "longer")]
    bench.acquire(bench.writer, bench.id, wanted, below=bench.below)
    bench.loads()
    bench.finish_all()
    bench.run()
    space = bench.core.books.spaces.get(bench.id)
    assert space is not None
    each = space.fingerprint.encoding.block_tokens
    assert [space.index[key].prompt_tokens for key in bench.old] == [8 * each] * 3


def test_a_corrupt_block_is_dropped_forgotten_and_explained() -> None:
    bench = Archived()
    waiting = bench.acquire(bench.writer, bench.id, bench.old, below=bench.below, wait=True)
    bad, *good = sorted(bench.loads(), key=lambda copy: bench.old.index(copy.key))
    bench.finish(bad, Reason.MISS_CORRUPT)
    for copy in good:
        bench.finish(copy)
    assert Forget(bench.disk, bench.id, bad.key) in bench.run()
    settled = bench.core.settle(waiting.lease_id, bench.now_ns)
    assert settled.places[0] is None
    assert settled.reasons == {0: Reason.MISS_CORRUPT}
    assert bench.core.why_absent(bench.writer, bench.id, bad.key).reason is Reason.MISS_CORRUPT
    assert bench.core.explain("a", bench.id, bad.key, bench.now_ns).reason is Reason.MISS_CORRUPT


def test_a_load_that_fails_otherwise_leaves_the_archive_alone() -> None:
    bench = Archived()
    bench.acquire(bench.writer, bench.id, bench.old[:1], below=bench.below, wait=True)
    bench.finish(bench.loads()[0], Reason.IO_ERROR)
    assert not [effect for effect in bench.run() if isinstance(effect, Forget)]


def test_a_load_that_nobody_waits_for_any_more_leaves_nothing_behind() -> None:
    bench = Archived()
    waiting = bench.acquire(bench.writer, bench.id, bench.old, below=bench.below, wait=True)
    bench.core.settle(waiting.lease_id, bench.now_ns)
    assert bench.core.stats().read_leases == 0
    bench.settle_all()
    assert bench.core.stats().copies_in_flight == 0
    again = bench.acquire(bench.writer, bench.id, bench.old)
    assert again.ready, "the same blocks can be asked for again"


def test_loads_are_bounded() -> None:
    limits = CoreLimits(staging_bytes=BLOCK, staging_share=0.9, copies_in_flight_max=2)
    bench = Bench(slots=8, disk=True, limits=limits)
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    below = dict.fromkeys(keys(4), bench.disk)
    waiting = bench.acquire(session, space, keys(4), below=below, wait=True)
    assert len(bench.out("load")) == 2
    settled = bench.core.settle(waiting.lease_id, bench.now_ns)
    assert settled.reasons[2] is Reason.LIMIT_QUEUE


def test_loads_may_have_a_bound_of_their_own() -> None:
    limits = CoreLimits(
        staging_bytes=BLOCK,
        staging_share=0.9,
        copies_in_flight_max=2,
        loads_in_flight_max=3,
    )
    bench = Bench(slots=8, disk=True, limits=limits)
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    bench.acquire(session, space, keys(5), below=dict.fromkeys(keys(5), bench.disk))
    assert len(bench.out("load")) == 3


def test_a_name_that_is_to_be_forgotten_is_not_loaded_by_a_stale_fact() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.hold_copies = True
    other = bench.reserve(session, space, keys(4, "new"))
    saving = bench.out("save")
    while not saving:
        bench.core.commit(session, other.lease_id, False, bench.now_ns)
        bench.finish_all("commit")
        bench.core.settle_commit(other.lease_id, bench.now_ns)
        other = bench.reserve(session, space, keys(4, "new"))
        saving = bench.out("save")
    assert [copy.key for copy in saving] == keys(1)
    bench.core.invalidate(space_id=space, keys=keys(1), now_ns=bench.now_ns)
    stale = {keys(1)[0]: bench.disk}
    acquired = bench.acquire(session, space, keys(1), below=stale, wait=True)
    assert (acquired.lease_id, acquired.reason) == (0, Reason.MISS_INVALIDATED)


def test_a_session_that_ended_is_told_so(bench: Bench) -> None:
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.core.end_session(session, bench.now_ns)
    core = bench.core
    assert core.lookup(session, space, keys(2)) == bytes(2)
    assert core.why_absent(session, space, keys(1)[0]).reason is Reason.SESSION_UNKNOWN
    assert core.space_of(session, space) is Reason.SESSION_UNKNOWN
    assert core.commit(session, 1, False, 0).reason is Reason.SESSION_UNKNOWN
    assert core.release(session, [1, 2], 0) == (0, 2)
    assert core.staging_of(session) is None


def test_leased_bytes_are_told_to_the_group_that_holds_them(bench: Bench) -> None:
    session, peer = bench.session(), bench.session()
    stranger = bench.session(group=b"stranger")
    space = bench.space(session)
    bench.put(session, space, keys(3))
    lease = bench.acquire(session, space, keys(3)).lease_id
    told = [bench.core.leased_bytes(peer, lease, blocks) for blocks in (0, 2, 99)]
    assert told == [0, 2 * BLOCK, 3 * BLOCK]
    assert bench.core.leased_bytes(stranger, lease, 2) == 0
    assert bench.core.leased_bytes(session, 999, 2) == 0


def test_blocks_know_the_length_of_the_prompt_that_asked_for_them() -> None:
    """As its reader says, else that of what he asked for; never less than that."""
    bench = Bench(disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(3))
    index = bench.core.books.spaces.get(space).index  # type: ignore[union-attr]
    for told, wanted in ((0, 32), (5_000, 5_000), (7, 32)):
        bench.acquire(session, space, keys(2), prompt_tokens=told)
        assert [index[key].prompt_tokens for key in keys(3)] == [wanted, wanted, 48]
    below = dict.fromkeys(keys(2, "saved"), bench.disk)
    bench.acquire(session, space, keys(2, "saved"), below=below, prompt_tokens=900)
    assert [index[key].prompt_tokens for key in keys(2, "saved")] == [900, 900]
