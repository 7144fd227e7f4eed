"""Doubted blocks: a complete fingerprint that a guard or an audit holds is nobody's until a person
decides, on every tier, in other sessions and after a restart.
"""

from __future__ import annotations

import json

import pytest

from kvstore.core.states import SpaceState
from kvstore.model.fingerprint import Verdict
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreLimits, KeyExplanation, Reviewed, TenantSpec
from kvstore.testing.workload import fingerprint
from tests.unit.core.harness import BLOCK, SECOND, Bench, keys

CAUSES = [Reason.MISS_CORRUPT, Reason.HELD_BY_AUDIT]
TOLD = {
    Reason.MISS_CORRUPT: Reason.HELD_FOR_REVIEW,
    Reason.HELD_BY_AUDIT: Reason.HELD_BY_AUDIT,
}
PROMPT = keys(4)


class Stage:
    """Four blocks of a prompt, saved to disk, whose space is held."""

    def __init__(self, cause: Reason = Reason.MISS_CORRUPT, ttl_ns: int = 3_600 * SECOND) -> None:
        limits = CoreLimits(review_ttl_ns=ttl_ns, staging_bytes=BLOCK, staging_share=0.9)
        self.bench = Bench(disk=True, limits=limits, tenants=[TenantSpec("a"), TenantSpec("b")])
        self.session = self.bench.session()
        self.space = self.bench.space(self.session)
        assert self.bench.put(self.session, self.space, PROMPT) == 4
        self.bench.core.save_ahead(True, self.bench.now_ns)
        self.bench.settle_all()
        assert len(self.bench.archived) == 4
        self.held = self.hold(cause)

    def hold(self, cause: Reason) -> int:
        core, now_ns = self.bench.core, self.bench.now_ns
        held = core.hold(self.space, cause, "4 of 8 loads", now_ns=now_ns, wall_s=2.5)
        self.bench.run()
        return held

    @property
    def review_id(self) -> int:
        (row,) = self.bench.core.reviews()
        return row.review_id

    def decide(self, approve: bool) -> Reviewed:
        core, now_ns = self.bench.core, self.bench.now_ns
        done = core.review(self.held, approve, "", "ann", "looked", now_ns, 3.5)
        self.bench.run()
        return done

    def explained(self) -> KeyExplanation:
        return self.bench.core.explain("a", self.space, PROMPT[0], self.bench.now_ns)


@pytest.mark.parametrize("cause", CAUSES)
def test_what_is_held_is_neither_found_nor_read_nor_written_nor_pinned(cause: Reason) -> None:
    stage = Stage(cause)
    bench, space = stage.bench, stage.space
    assert stage.held == stage.review_id
    for session in (stage.session, bench.session(group=b"other")):
        assert not any(bench.have(session, space, PROMPT))
        below = dict.fromkeys(PROMPT, bench.disk)
        assert bench.acquire(session, space, PROMPT, below=below).reason is Reason.SPACE_CLOSED
        assert bench.reserve(session, space, keys(2, "new")).reason is Reason.SPACE_CLOSED
        opening = bench.open(session)
        assert (opening.verdict, opening.space_id) == (Verdict.INCOMPATIBLE, 0)
        assert opening.reason is TOLD[cause]
        assert opening.review_id == stage.review_id
        assert "4 of 8 loads" in opening.detail
        absence = bench.core.why_absent(session, space, PROMPT[0])
        assert absence.reason is Reason.HELD_FOR_REVIEW
    assert bench.core.pin(space, PROMPT, bench.now_ns).reason is Reason.SPACE_UNKNOWN
    assert stage.explained().reason is Reason.HELD_FOR_REVIEW
    bench.run()


def test_of_what_is_held_nothing_is_dropped_and_approval_gives_it_back() -> None:
    stage = Stage()
    assert len(stage.bench.archived) == 4
    assert stage.bench.core.stats().spaces_held == 1
    assert stage.bench.core.stats().spaces_open == 0
    reviewed = stage.decide(approve=True)
    assert (reviewed.reason, reviewed.space_id) == (Reason.OK, stage.space)
    assert stage.bench.space(stage.session) == stage.space
    assert all(stage.bench.have(stage.session, stage.space, PROMPT))
    assert stage.bench.core.stats().spaces_held == 0
    assert stage.explained().reason is Reason.HIT


def test_a_second_doubt_makes_a_review_of_its_own() -> None:
    stage = Stage()
    first = stage.review_id
    stage.decide(approve=True)
    assert stage.hold(Reason.HELD_BY_AUDIT)
    assert stage.review_id > first
    assert stage.bench.open(stage.session).reason is Reason.HELD_BY_AUDIT


def test_what_is_held_already_is_not_held_twice() -> None:
    stage = Stage()
    assert not stage.hold(Reason.HELD_BY_AUDIT)
    assert len(stage.bench.core.reviews()) == 1
    assert not stage.bench.core.hold(99, Reason.MISS_CORRUPT, "", now_ns=0, wall_s=0.0)


def test_rejection_drops_the_blocks_on_all_tiers_and_refuses_later_offers() -> None:
    stage = Stage(Reason.HELD_BY_AUDIT)
    assert stage.decide(approve=False).reason is Reason.OK
    assert not stage.bench.archived
    assert stage.bench.core.spaces() == []
    opening = stage.bench.open(stage.session)
    assert opening.reason is Reason.REJECTED_BY_REVIEW
    assert "ann" in opening.detail
    assert stage.bench.open(stage.session, fingerprint(revision="r2")).space_id


def test_rejection_of_damaged_blocks_lets_their_model_begin_anew() -> None:
    stage = Stage(Reason.MISS_CORRUPT)
    reviewed = stage.decide(approve=False)
    assert (reviewed.reason, reviewed.space_id) == (Reason.OK, 0)
    assert stage.bench.core.spaces() == []
    assert not stage.bench.archived
    assert not [row for row in stage.bench.rows if row[0] == "review"]
    (row,) = stage.bench.core.reviews(include_decided=True)
    assert (row.state, row.decided_by, row.decided_why) == ("rejected", "ann", "looked")
    for bench in (stage.bench, restarted(stage)):
        session = bench.session()
        space = bench.space(session)
        assert space not in (0, stage.space)
        assert bench.put(session, space, PROMPT) == 4
    again = stage.decide(approve=True)
    assert (again.reason, again.detail) == (Reason.BAD_REQUEST, "review 1 is rejected")


def test_rejection_of_damaged_blocks_ends_a_review_without_spaces() -> None:
    """As after a restart: the row of the space was gone already."""
    stage = Stage(Reason.MISS_CORRUPT)
    for name in [name for name in stage.bench.rows if name[0] == "space"]:
        del stage.bench.rows[name]
    bench = restarted(stage)
    bench.rows.update(stage.bench.rows)
    (row,) = bench.core.reviews()
    bench.core.review(row.review_id, False, "", "ann", "looked", bench.now_ns, 3.5)
    bench.run()
    assert not [row for row in bench.rows if row[0] == "review"]
    assert bench.space(bench.session())


def test_a_rejected_doubt_may_be_approved_after_all() -> None:
    stage = Stage(Reason.HELD_BY_AUDIT)
    stage.decide(approve=False)
    assert stage.decide(approve=False).reason is Reason.BAD_REQUEST
    bench = restarted(stage)
    (row,) = bench.core.reviews(include_decided=True)
    assert row.state == "rejected"
    assert stage.decide(approve=True).reason is Reason.OK
    assert bench.core.review(row.review_id, True, "", "b", "", bench.now_ns, 4.5).ticket
    bench.run()
    for each in (stage.bench, bench, restarted(stage)):
        session = each.session()
        space = each.space(session)
        assert space not in (0, stage.space), "its blocks are gone"
        assert each.put(session, space, PROMPT) == 4
    assert stage.decide(approve=True).reason is Reason.BAD_REQUEST, "once"


def test_a_rejection_of_damage_by_an_earlier_version_refuses_nobody() -> None:
    stage = Stage(Reason.HELD_BY_AUDIT)
    stage.decide(approve=False)
    (name,) = [name for name in stage.bench.rows if name[0] == "review"]
    row = json.loads(stage.bench.rows[name])
    row["cause"] = int(Reason.MISS_CORRUPT)
    stage.bench.rows[name] = json.dumps(row).encode()
    bench = restarted(stage)
    assert bench.space(bench.session())


def test_invalidation_ends_the_doubt_with_the_blocks() -> None:
    stage = Stage()
    stage.bench.core.invalidate(space_id=stage.space, now_ns=stage.bench.now_ns)
    stage.bench.run()
    assert stage.bench.core.reviews() == []
    assert not stage.bench.archived
    assert not [row for row in stage.bench.rows if row[0] == "review"]
    space = stage.bench.space(stage.session)
    assert space not in (0, stage.space)
    assert stage.bench.put(stage.session, space, PROMPT) == 4


def test_what_nobody_decides_is_dropped_in_time() -> None:
    stage = Stage(ttl_ns=60 * SECOND)
    stage.bench.pass_time(59 * SECOND)
    assert stage.bench.core.reviews()
    stage.bench.pass_time(2 * SECOND)
    assert stage.bench.core.reviews() == []
    assert not stage.bench.archived
    assert not [row for row in stage.bench.rows if row[0] == "review"]
    assert stage.bench.space(stage.session) != stage.space


def restarted(stage: Stage, ttl_ns: int = 3_600 * SECOND) -> Bench:
    limits = CoreLimits(review_ttl_ns=ttl_ns, staging_bytes=BLOCK, staging_share=0.9)
    bench = Bench(disk=True, limits=limits, tenants=[TenantSpec("a"), TenantSpec("b")])
    bench.now_ns = 90_000 * SECOND  # of another boot
    bench.core.restore([(*name, value) for name, value in stage.bench.rows.items()])
    bench.run()
    return bench


@pytest.mark.parametrize("cause", CAUSES)
def test_a_restart_does_not_end_a_doubt(cause: Reason) -> None:
    stage = Stage(cause)
    bench = restarted(stage)
    bench.pass_time(SECOND)
    session = bench.session()
    assert bench.open(session).reason is TOLD[cause]
    (row,) = bench.core.reviews()
    assert row.doubt == "4 of 8 loads"
    assert [space.state for space in bench.core.spaces()] == ["held"]
    bench.core.review(row.review_id, True, "", "ann", "looked", bench.now_ns, 3.5)
    bench.run()
    assert bench.space(session) == stage.space, "the blocks on disk are its again"


def test_a_decision_holds_after_a_restart() -> None:
    rejected, approved = Stage(Reason.HELD_BY_AUDIT), Stage()
    rejected.decide(approve=False)
    approved.decide(approve=True)
    bench = restarted(rejected)
    assert bench.open(bench.session()).reason is Reason.REJECTED_BY_REVIEW
    bench = restarted(approved)
    assert bench.space(bench.session()) == approved.space


def test_another_tenant_and_another_fingerprint_are_not_concerned() -> None:
    stage = Stage()
    other = stage.bench.session("b", b"x")
    space = stage.bench.space(other)
    assert stage.bench.put(other, space, PROMPT) == 4
    newer = stage.bench.space(stage.session, revision="r2")
    assert stage.bench.put(stage.session, newer, PROMPT) == 4


def test_a_held_space_is_not_named_as_the_nearest() -> None:
    stage = Stage()
    newer = stage.bench.space(stage.session, revision="r2")
    assert stage.bench.core.why_absent(stage.session, newer, PROMPT[0]).reason is (
        Reason.MISS_NEVER_STORED
    )


def test_blocks_of_a_held_space_are_not_saved_but_evicted() -> None:
    bench = Bench(slots=8, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, PROMPT)
    bench.core.hold(space, Reason.MISS_CORRUPT, "", now_ns=bench.now_ns, wall_s=0.0)
    bench.run()
    other = bench.space(session, revision="r2")
    assert bench.put(session, other, keys(8, "more")) == 8
    bench.settle_all()
    assert not [name for name in bench.archived if name[0] == space]
    assert [row.state for row in bench.core.spaces()] == [
        SpaceState.HELD.value,
        SpaceState.OPEN.value,
    ]


def test_a_write_that_was_under_way_publishes_nothing_into_a_held_space() -> None:
    bench = Bench(disk=True)
    session = bench.session()
    space = bench.space(session)
    reserved = bench.reserve(session, space, PROMPT)
    bench.core.hold(space, Reason.MISS_CORRUPT, "", now_ns=bench.now_ns, wall_s=0.0)
    bench.run()
    result = bench.commit(session, reserved.lease_id)
    assert (result.visible, result.reason) == (0, Reason.WRITE_GROUP_FAILED)
    assert sum(row.blocks for row in bench.core.spaces()) == 0
