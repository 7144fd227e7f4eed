"""Spaces: what a fingerprint is bound to, who sees it, and how it ends for good."""

from __future__ import annotations

import pytest

from kvstore.core.core import Core
from kvstore.core.effects import Forget, Persist
from kvstore.model.fingerprint import Fingerprint, Verdict
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.testing.workload import fingerprint
from tests.unit.core.harness import BLOCK, SECOND, Bench, keys

TWO = (TenantSpec("a"), TenantSpec("b"))


# ---------------------------------------------------------------- open


def test_equal_fingerprints_share_a_space_and_others_do_not() -> None:
    bench = Bench()
    one, two = bench.session(group=b"one"), bench.session(group=b"two")
    opening = bench.open(one)
    assert (opening.verdict, opening.reason) == (Verdict.MATCH, Reason.OK)
    assert opening.digest == fingerprint().digest
    assert opening.layout is not None
    assert opening.layout.block_bytes == BLOCK
    assert bench.open(two).space_id == opening.space_id
    assert bench.open(two, fingerprint(revision="r2")).space_id != opening.space_id


def test_a_new_space_is_told_from_its_nearest_neighbour() -> None:
    bench = Bench()
    session = bench.session()
    bench.open(session, fingerprint(model="other", revision="r7", block_tokens=48))
    bench.open(session, fingerprint(revision="r1"))
    (difference,) = bench.open(session, fingerprint(revision="r2")).differences
    assert difference.field == "identity.weights_revision"
    assert (difference.stored, difference.offered) == ("r1", "r2")


def test_explaining_an_offer_opens_nothing() -> None:
    bench = Bench()
    session = bench.session()
    offer = bench.core.explain_offer("a", b"engine", fingerprint())
    assert (offer.space_id, offer.verdict) == (0, Verdict.MATCH)
    assert bench.core.spaces() == []
    space = bench.space(session)
    assert bench.core.explain_offer("a", b"engine", fingerprint()).space_id == space


def test_only_spaces_that_hold_a_key_are_compared_for_it() -> None:
    compared = []

    class Counted(Fingerprint):
        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return super().__eq__(other)

        __hash__ = Fingerprint.__hash__

    bench = Bench()
    session = bench.session()
    first, second, _ = (bench.space(session, revision=f"r{n}") for n in range(3))
    bench.put(session, second, keys(1))
    for space in bench.core.books.spaces:
        f = space.fingerprint
        space.fingerprint = Counted(f.identity, f.geometry, f.encoding, f.placement)
    found = bench.core.explain("a", first, keys(1)[0], bench.now_ns)
    assert (found.reason, found.detail) == (Reason.MISS_INCOMPATIBLE, f"held by space {second}")
    assert [f.identity.weights_revision for f in compared] == ["r1"], "of three spaces"


def test_a_layout_that_does_not_work_is_refused_with_its_field() -> None:
    bench = Bench()
    refused = bench.open(bench.session(), fingerprint(ranks=3))
    assert (refused.space_id, refused.verdict) == (0, Verdict.INCOMPATIBLE)
    assert refused.reason is Reason.NOT_SUPPORTED
    assert "placement.tensor_parallel" in refused.detail


def test_another_tenants_space_looks_like_one_that_never_was() -> None:
    bench = Bench(sessions=2, tenants=TWO)
    mine, theirs = bench.session("a"), bench.session("b")
    space = bench.space(mine)
    bench.put(mine, space, keys(3))
    for never in (space, space + 99):
        assert bench.core.lookup(theirs, never, keys(3)) == bytes(3)
        assert bench.acquire(theirs, never, keys(3)) == (0, False, Reason.SPACE_UNKNOWN)
        assert bench.reserve(theirs, never, keys(3)).reason is Reason.SPACE_UNKNOWN
        assert bench.core.why_absent(theirs, never, keys(1)[0]).reason is Reason.SPACE_UNKNOWN
        explained = bench.core.explain("b", never, keys(1)[0], bench.now_ns)
        assert explained.reason is Reason.MISS_NEVER_STORED
        assert bench.core.pin(never, keys(1), bench.now_ns, "b").reason is Reason.SPACE_UNKNOWN
        assert bench.core.invalidate(tenant="b", space_id=never, now_ns=0) == (0, 0, 0)
    own = bench.space(theirs)
    assert own != space, "equal fingerprints of two tenants are two spaces"
    assert bench.have(theirs, own, keys(3)) == [False] * 3


def test_spaces_are_bounded_and_unused_ones_make_room() -> None:
    bench = Bench(limits=CoreLimits(spaces_max=2, staging_bytes=BLOCK, staging_share=0.9))
    session = bench.session()
    used = bench.space(session, revision="r1")
    bench.put(session, used, keys(1))
    unused = bench.space(session, revision="r2")
    third = bench.space(session, revision="r3")
    assert {row.space_id for row in bench.core.spaces()} == {used, third}
    assert bench.core.lookup(session, unused, keys(1)) == bytes(1)
    bench.put(session, third, keys(1))
    refused = bench.open(session, fingerprint(revision="r4"))
    assert (refused.space_id, refused.reason) == (0, Reason.LIMIT_QUEUE)


def test_sessions_are_bounded_and_checked() -> None:
    bench = Bench(limits=CoreLimits(sessions_max=1))
    bench.session()
    with pytest.raises(KVStoreError, match="sessions_max"):
        bench.session()
    with pytest.raises(BadRequest, match="no tenant"):
        Bench().session("nobody")
    with pytest.raises(BadRequest, match="64 bytes"):
        Bench().session(group=b"")
    with pytest.raises(BadRequest, match="attach"):
        bench.core.open(99, fingerprint(), 0)


@pytest.mark.parametrize(
    ("tiers", "tenants"),
    [
        ([TierSpec("host", TierKind.POOL, BLOCK)], [TenantSpec("a")]),
        ([TierSpec("disk", TierKind.ARCHIVE, BLOCK, ingest=True)], [TenantSpec("a")]),
        ([TierSpec("host", TierKind.POOL, 0, ingest=True)], [TenantSpec("a")]),
        ([TierSpec("host", TierKind.POOL, BLOCK, ingest=True)], []),
        ([TierSpec("host", TierKind.POOL, BLOCK, ingest=True)], [TenantSpec("a")] * 2),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tiers: list[TierSpec], tenants: list[TenantSpec]
) -> None:
    with pytest.raises(BadRequest):
        Core(tiers, tenants)


# ---------------------------------------------------------------- why not


def test_every_miss_is_explained() -> None:
    bench = Bench(slots=8)
    session = bench.session()
    space = bench.space(session)
    other = bench.space(session, revision="r0")
    stored, evicted, invalidated, elsewhere, writing = (
        keys(1, name) for name in ("stored", "evicted", "invalidated", "elsewhere", "writing")
    )
    bench.put(session, space, evicted)
    bench.put(session, space, keys(7, "others"))
    bench.put(session, space, stored)
    bench.put(session, other, elsewhere)
    bench.put(session, space, invalidated)
    bench.core.invalidate(space_id=space, keys=invalidated, now_ns=bench.now_ns)
    bench.reserve(session, space, writing)

    def why(names: list[bytes]) -> Reason:
        return bench.core.why_absent(session, space, names[0]).reason

    assert why(stored) is Reason.HIT
    assert why(evicted) is Reason.MISS_EVICTED
    assert why(invalidated) is Reason.MISS_INVALIDATED
    assert why(writing) is Reason.MISS_IN_PROGRESS
    assert why(keys(1, "never")) is Reason.MISS_NEVER_STORED
    absence = bench.core.why_absent(session, space, elsewhere[0])
    assert absence.reason is Reason.MISS_INCOMPATIBLE
    assert [d.field for d in absence.differences] == ["identity.weights_revision"]
    assert absence.digest == fingerprint(revision="r0").digest


def test_an_explanation_names_tier_generation_leases_and_age() -> None:
    bench = Bench()
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.acquire(session, space, keys(1))
    bench.now_ns += 5 * SECOND
    explained = bench.core.explain("a", space, keys(1)[0], bench.now_ns)
    assert (explained.reason, explained.tier) == (Reason.HIT, bench.host)
    assert (explained.generation, explained.leases) == (1, 1)
    assert explained.age_ns == pytest.approx(5 * SECOND, abs=1_000)


def test_what_is_remembered_of_names_that_left_is_bounded() -> None:
    limits = CoreLimits(ghost_keys_max=10, staging_bytes=BLOCK, staging_share=0.9)
    bench = Bench(slots=4, limits=limits)
    session = bench.session()
    space = bench.space(session)
    for index in range(50):
        bench.put(session, space, keys(1, str(index)))
    assert len(bench.core.books.ghosts) == 10
    first, late = keys(1, "0")[0], keys(1, "45")[0]
    assert bench.core.why_absent(session, space, first).reason is Reason.MISS_NEVER_STORED
    assert bench.core.why_absent(session, space, late).reason is Reason.MISS_EVICTED


# ---------------------------------------------------------------- invalidation, epochs


@pytest.mark.parametrize(
    "selector",
    [{"tenant": "a"}, {"model_name": "model"}, {"everything": True}, {"space_id": 1}],
)
def test_a_closed_space_never_comes_back(selector: dict[str, object]) -> None:
    bench = Bench()
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(3))
    dropped = bench.core.invalidate(now_ns=bench.now_ns, **selector)  # type: ignore[arg-type]
    assert (dropped.blocks, dropped.spaces) == (3, 1)
    bench.run()
    assert bench.core.lookup(session, space, keys(3)) == bytes(3)
    assert bench.acquire(session, space, keys(3)).reason is Reason.SPACE_CLOSED
    assert bench.core.why_absent(session, space, keys(1)[0]).reason is Reason.MISS_INVALIDATED
    again = bench.space(session)
    assert again != space
    assert bench.have(session, again, keys(3)) == [False] * 3


def test_invalidation_spares_what_is_not_selected() -> None:
    bench = Bench()
    session = bench.session()
    one, other = bench.space(session), bench.space(session, model="other")
    bench.put(session, one, keys(2))
    bench.put(session, other, keys(2))
    bench.core.invalidate(model_name="model", now_ns=bench.now_ns)
    assert bench.have(session, other, keys(2)) == [True, True]


def test_invalidation_needs_a_selector() -> None:
    with pytest.raises(BadRequest):
        Bench().core.invalidate(now_ns=0)
    with pytest.raises(BadRequest):
        Bench().core.invalidate(keys=keys(1), everything=True, now_ns=0)


def test_a_reader_keeps_his_bytes_and_the_slot_is_freed_after_him() -> None:
    bench = Bench(slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    lease = bench.acquire(session, space, keys(4)).lease_id
    before = bench.core.settle(lease, bench.now_ns).places
    bench.core.invalidate(space_id=space, keys=keys(4), now_ns=bench.now_ns)
    bench.run()
    assert bench.reserve(session, space, keys(1, "new")).reason is Reason.NO_SPACE
    assert bench.core.settle(lease, bench.now_ns).places == before
    bench.core.release(session, [lease], bench.now_ns)
    assert bench.core.stats().pools[0].free_slots == 4


def test_raising_an_epoch_closes_what_is_older_for_good() -> None:
    bench = Bench(tenants=TWO, sessions=2)
    one, two = bench.session("a"), bench.session("b")
    old = bench.space(one)
    bench.space(two)
    newer = bench.space(one, epoch=3)
    other = bench.space(one, model="other")
    bench.put(one, old, keys(2))
    raised = bench.core.set_epoch("model", 2, "new weights", bench.now_ns)
    assert (raised.epoch, raised.closed_spaces, raised.dropped_blocks) == (2, 2, 2)
    assert bench.core.why_absent(one, old, keys(1)[0]).reason is Reason.MISS_EPOCH_STALE
    assert {row.space_id for row in bench.core.spaces()} == {newer, other}
    refused = bench.open(one)
    assert (refused.verdict, refused.reason) == (Verdict.INCOMPATIBLE, Reason.MISS_EPOCH_STALE)
    (difference,) = refused.differences
    assert (difference.field, difference.stored, difference.offered) == (
        "identity.weight_epoch",
        2,
        0,
    )


def test_an_epoch_never_falls() -> None:
    bench = Bench()
    bench.core.set_epoch("model", 5, "", 0)
    assert bench.core.set_epoch("model", 3, "", 0) == (5, 0, 0, 0)
    assert bench.core.epoch_floors() == {"model": 5}


# ---------------------------------------------------------------- held fingerprints


class Held(Bench):
    """Two groups that both offer a fingerprint without a revision."""

    def __init__(self, disk: bool = False, limits: CoreLimits | None = None) -> None:
        super().__init__(sessions=3, disk=disk, limits=limits)
        self.offered = fingerprint(revision=None)
        self.one, self.two = self.session(group=b"one"), self.session(group=b"two")
        self.first = self.open(self.one, self.offered)
        self.put(self.one, self.first.space_id, keys(2))

    def decide(self, approve: bool, revision: str = "r1") -> object:
        return self.core.review(
            self.first.review_id, approve, revision, "ann", "looked", self.now_ns, 1.5
        )


def test_a_held_space_is_read_by_its_group_alone() -> None:
    bench = Held()
    assert bench.first.verdict is Verdict.HELD
    assert bench.first.missing == ("identity.weights_revision",)
    second = bench.open(bench.two, bench.offered)
    assert second.space_id != bench.first.space_id
    assert second.review_id == bench.first.review_id
    peer = bench.session(group=b"one")
    assert bench.have(peer, bench.first.space_id, keys(2)) == [True, True]
    assert bench.core.lookup(bench.two, bench.first.space_id, keys(2)) == bytes(2)
    assert bench.acquire(bench.two, bench.first.space_id, keys(2)).lease_id == 0
    assert bench.have(bench.two, second.space_id, keys(2)) == [False, False]


def test_held_blocks_die_with_their_group() -> None:
    bench = Held()
    peer = bench.session(group=b"one")
    bench.core.end_session(bench.one, bench.now_ns)
    assert bench.have(peer, bench.first.space_id, keys(2)) == [True, True]
    bench.core.end_session(peer, bench.now_ns)
    bench.run()
    assert bench.core.spaces() == []
    assert bench.core.stats().pools[0].blocks == 0
    (row,) = bench.core.reviews(include_decided=True)
    assert row.state == "ended"
    assert bench.core.reviews() == []


def test_approving_opens_the_space_under_the_complete_fingerprint() -> None:
    bench = Held()
    bench.open(bench.two, bench.offered)
    reviewed = bench.core.review(
        bench.first.review_id, True, "r1", "ann", "looked", bench.now_ns, 1.5
    )
    assert (reviewed.reason, reviewed.space_id) == (Reason.OK, bench.first.space_id)
    bench.run()
    third = bench.session(group=b"three")
    for offer in (bench.offered, fingerprint(revision="r1")):
        opening = bench.open(third, offer)
        assert (opening.space_id, opening.verdict) == (bench.first.space_id, Verdict.MATCH)
        assert opening.digest == fingerprint(revision="r1").digest
    assert bench.have(third, bench.first.space_id, keys(2)) == [True, True]
    (row,) = bench.core.reviews(include_decided=True)
    assert (row.state, row.decided_by, row.revision) == ("approved", "ann", "r1")


def test_approving_what_exists_already_drops_the_held_blocks() -> None:
    bench = Held()
    known = bench.space(bench.two, revision="r1")
    reviewed = bench.core.review(bench.first.review_id, True, "r1", "ann", "", bench.now_ns, 0.0)
    assert reviewed.space_id == known
    bench.run()
    refused = bench.acquire(bench.one, bench.first.space_id, keys(2))
    assert refused.reason is Reason.SPACE_CLOSED
    assert bench.open(bench.one, bench.offered).space_id == known


def test_rejecting_drops_the_blocks_and_refuses_later_offers() -> None:
    bench = Held()
    bench.decide(approve=False)
    bench.run()
    assert bench.core.lookup(bench.one, bench.first.space_id, keys(2)) == bytes(2)
    refused = bench.open(bench.two, bench.offered)
    assert (refused.space_id, refused.reason) == (0, Reason.REJECTED_BY_REVIEW)
    assert "ann" in refused.detail
    assert bench.open(bench.two, fingerprint(revision="r1")).verdict is Verdict.MATCH


def test_a_decision_falls_once() -> None:
    bench = Held()
    bench.decide(approve=True)
    reviewed = bench.core.review(bench.first.review_id, False, "", "bob", "", bench.now_ns, 0.0)
    assert reviewed.reason is Reason.BAD_REQUEST
    assert "approved" in reviewed.detail
    assert bench.core.review(99, True, "r1", "", "", 0, 0.0).reason is Reason.BAD_REQUEST


def test_approval_vouches_for_the_revision_and_nothing_else() -> None:
    data = fingerprint(revision=None).to_dict()
    del data["identity"]["config_digest"]
    bench = Bench()
    opening = bench.open(bench.session(), Fingerprint.from_dict(data))
    reviewed = bench.core.review(opening.review_id, True, "r1", "ann", "", 0, 0.0)
    assert reviewed.reason is Reason.HELD_FOR_REVIEW
    assert "identity.config_digest" in reviewed.detail
    assert [row.state for row in bench.core.reviews()] == ["held"]


def test_what_nobody_decides_is_dropped_in_time() -> None:
    limits = CoreLimits(review_ttl_ns=60 * SECOND, staging_bytes=BLOCK, staging_share=0.9)
    bench = Held(limits=limits)
    due = bench.core.tick(bench.now_ns)
    assert due is not None
    assert bench.now_ns < due <= bench.now_ns + 60 * SECOND
    bench.pass_time(61 * SECOND)
    assert bench.core.spaces() == []
    assert [row.state for row in bench.core.reviews(include_decided=True)] == ["expired"]
    again = bench.open(bench.one, bench.offered)
    assert again.verdict is Verdict.HELD
    assert again.review_id != bench.first.review_id


def test_held_blocks_are_not_saved_to_an_archive() -> None:
    bench = Held(disk=True)
    reserved = bench.reserve(bench.one, bench.first.space_id, keys(1, "durable"))
    committed = bench.core.commit(bench.one, reserved.lease_id, True, bench.now_ns)
    assert committed.reason is Reason.HELD_FOR_REVIEW
    bench.commit(bench.one, reserved.lease_id)
    for index in range(40):
        bench.put(bench.one, bench.first.space_id, keys(1, str(index)))
    assert bench.archived == set()


# ---------------------------------------------------------------- what outlives the daemon


def rows(bench: Bench) -> list[tuple[str, bytes, bytes]]:
    """The durable rows that a restart finds."""
    bench.run()
    return [(table, key, value) for (table, key), value in bench.rows.items()]


def test_decisions_outlive_the_daemon() -> None:
    before = Held()
    before.decide(approve=True)
    before.core.set_epoch("other", 4, "new weights", before.now_ns)
    rejected = before.open(before.two, fingerprint(revision=None, block_tokens=48))
    before.core.review(rejected.review_id, False, "", "bob", "no", before.now_ns, 0.0)
    after = Bench()
    after.core.restore(rows(before))
    session = after.session()
    assert after.open(session, fingerprint(revision=None)).digest == fingerprint().digest
    refused = after.open(session, fingerprint(revision=None, block_tokens=48))
    assert refused.reason is Reason.REJECTED_BY_REVIEW
    assert after.open(session, fingerprint(model="other", epoch=3)).space_id == 0
    assert after.core.epoch_floors() == {"other": 4}


def test_a_ticket_is_for_all_rows_of_a_decision() -> None:
    bench = Bench(disk=True)
    session = bench.session()
    bench.space(session)
    bench.space(session, revision="r2")
    bench.run()
    bench.hold_rows = True
    raised = bench.core.set_epoch("model", 1, "", bench.now_ns)
    effects = [effect for effect in bench.run() if isinstance(effect, Persist)]
    assert [effect.table for effect in effects] == ["epoch", "space", "space"]
    assert {effect.ticket for effect in effects} == {raised.ticket}
    assert [effect.value is None for effect in effects] == [False, True, True]


def test_spaces_keep_their_ids_where_an_archive_keeps_their_blocks() -> None:
    before = Bench(disk=True)
    session = before.session()
    kept, closed = before.space(session), before.space(session, revision="r2")
    before.core.invalidate(space_id=closed, now_ns=before.now_ns)
    after = Bench(disk=True)
    after.core.restore(rows(before))
    session = after.session()
    assert after.space(session) == kept
    assert after.space(session, revision="r2") > closed, "ids are never used twice"


def test_a_space_whose_layout_is_refused_by_now_stops_no_start() -> None:
    before = Bench(disk=True)
    session = before.session()
    kept, refused = before.space(session), before.space(session, revision="r2")
    stored = rows(before)
    other = [
        (table, key, value.replace(b'"tensor_parallel": 1', b'"tensor_parallel": 3'))
        if key == b"%d" % refused
        else (table, key, value)
        for table, key, value in stored
    ]
    assert other != stored
    after = Bench(disk=True)
    after.core.restore(other)
    session = after.session()
    assert after.space(session) == kept
    assert after.space(session, revision="r2") > refused


def test_an_epoch_closes_spaces_of_earlier_runs_too() -> None:
    before = Bench(disk=True)
    before.space(before.session())
    stored = rows(before)
    raised = Bench(disk=True)
    raised.core.restore(stored)
    raised.core.set_epoch("model", 1, "", 0)
    after = Bench(disk=True)
    after.core.restore([*stored, *rows(raised)])
    assert after.core.spaces() == []


def test_without_an_archive_spaces_need_no_rows() -> None:
    bench = Bench()
    bench.space(bench.session())
    assert rows(bench) == []
    assert bench.core.invalidate(everything=True, now_ns=0).ticket == 0


def test_a_closed_space_is_forgotten_by_every_archive() -> None:
    bench = Bench(disk=True)
    session = bench.session()
    space = bench.space(session)
    dropped = bench.core.invalidate(space_id=space, now_ns=bench.now_ns)
    assert dropped.ticket
    assert Forget(bench.disk, space, b"") in bench.run()


def test_a_write_that_fails_does_not_hide_why_the_block_was_lost() -> None:
    bench = Bench(slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.put(session, space, keys(4, "others"))
    reserved = bench.reserve(session, space, keys(1))
    bench.core.release(session, [reserved.lease_id], bench.now_ns)
    assert bench.core.why_absent(session, space, keys(1)[0]).reason is Reason.MISS_EVICTED
    expired = bench.reserve(session, space, keys(1, "slow"), ttl_ns=SECOND)
    assert expired.lease_id
    bench.pass_time(2 * SECOND)
    explained = bench.core.explain("a", space, keys(1, "slow")[0], bench.now_ns)
    assert explained.reason is Reason.LEASE_EXPIRED
