"""Blocks of several parts: one write group fills them all, or nobody ever reads the block."""

from __future__ import annotations

import pytest

from kvstore.core.effects import Copy
from kvstore.model.reasons import Reason
from tests.unit.core.harness import BLOCK, SECOND, Bench, keys


class Ranks(Bench):
    """Two ranks of one engine, each writes half of every block."""

    def __init__(self, sessions: int = 2) -> None:
        super().__init__(sessions=sessions)
        self.ranks = [self.session(), self.session()]
        self.id = self.space(self.ranks[0], ranks=2)

    def reserve_both(self, chain: list[bytes], attempt: int) -> list[int]:
        return [
            self.reserve(session, self.id, chain, part=part, attempt=attempt).lease_id
            for part, session in enumerate(self.ranks)
        ]

    def visible(self, chain: list[bytes]) -> list[bool]:
        return self.have(self.ranks[0], self.id, chain)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_a_block_is_ready_when_all_parts_of_one_write_group_are(ranks: Ranks) -> None:
    one, two = ranks.reserve_both(keys(3), attempt=1)
    assert ranks.commit(ranks.ranks[0], one) == (0, 3, 0, Reason.OK)
    assert ranks.visible(keys(3)) == [False] * 3
    assert ranks.commit(ranks.ranks[1], two) == (3, 0, 0, Reason.OK)
    assert ranks.visible(keys(3)) == [True] * 3
    assert ranks.core.stats().write_leases == 0


def test_each_part_has_its_range_of_the_slot(ranks: Ranks) -> None:
    for session, lease in zip(ranks.ranks, ranks.reserve_both(keys(1), 1), strict=True):
        ranks.commit(session, lease)
    copies = [effect for effect in ranks.seen if isinstance(effect, Copy)]
    assert [copy.target.offset for copy in copies] == [0, BLOCK // 2]
    assert [copy.length for copy in copies] == [BLOCK // 2] * 2
    assert len({copy.target._replace(offset=0) for copy in copies}) == 1, "one slot and generation"


def test_all_blocks_of_the_last_part_appear_at_once(ranks: Ranks) -> None:
    one, two = ranks.reserve_both(keys(3), attempt=1)
    ranks.commit(ranks.ranks[0], one)
    ranks.hold_copies = True
    ranks.core.commit(ranks.ranks[1], two, False, ranks.now_ns)
    *most, last = ranks.out("commit")
    for copy in most:
        ranks.finish(copy)
        assert ranks.visible(keys(3)) == [False] * 3
    ranks.finish(last)
    assert ranks.visible(keys(3)) == [True] * 3


def test_parts_of_two_write_groups_never_mix(ranks: Ranks) -> None:
    first = ranks.reserve(ranks.ranks[0], ranks.id, keys(2), part=0, attempt=1)
    second = ranks.reserve(ranks.ranks[1], ranks.id, keys(2), part=1, attempt=2)
    assert (second.wanted, second.reserved) == ([], 2)
    ranks.core.release(ranks.ranks[0], [first.lease_id], ranks.now_ns)
    one = ranks.reserve(ranks.ranks[1], ranks.id, keys(2), part=1, attempt=2)
    ranks.commit(ranks.ranks[1], one.lease_id)
    assert ranks.visible(keys(2)) == [False] * 2
    other = ranks.reserve(ranks.ranks[0], ranks.id, keys(2), part=0, attempt=1)
    assert other.wanted == []


def test_another_engine_cannot_join_by_its_attempt_number(ranks: Ranks) -> None:
    ranks.reserve(ranks.ranks[0], ranks.id, keys(2), part=0, attempt=7)
    stranger = ranks.session(group=b"other engine")
    joined = ranks.reserve(stranger, ranks.id, keys(2), part=1, attempt=7)
    assert (joined.wanted, joined.reserved) == ([], 2)


def test_a_part_has_one_writer(ranks: Ranks) -> None:
    ranks.reserve(ranks.ranks[0], ranks.id, keys(2), part=0, attempt=1)
    again = ranks.reserve(ranks.ranks[0], ranks.id, keys(2), part=0, attempt=1)
    assert (again.wanted, again.reserved) == ([], 2)


@pytest.mark.parametrize("how", ["death", "abort", "expiry"])
def test_what_one_rank_loses_the_whole_write_group_loses(ranks: Ranks, how: str) -> None:
    one = ranks.reserve(ranks.ranks[0], ranks.id, keys(3), part=0, attempt=1, ttl_ns=9 * SECOND)
    two = ranks.reserve(ranks.ranks[1], ranks.id, keys(3), part=1, attempt=1, ttl_ns=SECOND)
    assert ranks.commit(ranks.ranks[0], one.lease_id).waiting == 3
    if how == "death":
        ranks.core.end_session(ranks.ranks[1], ranks.now_ns)
    elif how == "abort":
        ranks.core.release(ranks.ranks[1], [two.lease_id], ranks.now_ns)
    else:
        ranks.pass_time(2 * SECOND)
    ranks.run()
    assert ranks.core.lookup(ranks.ranks[0], ranks.id, keys(3)) == bytes(3)
    assert ranks.core.stats().pools[0].free_slots == 4


def test_a_rank_that_lost_is_told(ranks: Ranks) -> None:
    one, two = ranks.reserve_both(keys(2), attempt=1)
    ranks.core.release(ranks.ranks[1], [two], ranks.now_ns)
    result = ranks.commit(ranks.ranks[0], one)
    assert result == (0, 0, 2, Reason.WRITE_GROUP_FAILED)


def test_death_of_a_rank_after_its_commit_aborts_what_others_have_not_written() -> None:
    ranks = Ranks(sessions=3)
    one, two = ranks.reserve_both(keys(2), attempt=1)
    ranks.commit(ranks.ranks[0], one)
    ranks.core.end_session(ranks.ranks[0], ranks.now_ns)
    assert ranks.commit(ranks.ranks[1], two).failed == 2


def test_blocks_that_were_ready_survive_the_death_of_a_rank(ranks: Ranks) -> None:
    for session, lease in zip(ranks.ranks, ranks.reserve_both(keys(2), 1), strict=True):
        ranks.commit(session, lease)
    ranks.reserve_both(keys(2, "unfinished"), attempt=2)
    ranks.core.end_session(ranks.ranks[1], ranks.now_ns)
    ranks.run()
    assert ranks.visible(keys(2)) == [True] * 2
    assert not any(ranks.core.lookup(ranks.ranks[0], ranks.id, keys(2, "unfinished")))


def test_a_commit_that_waits_for_others_does_not_wait_for_ever(ranks: Ranks) -> None:
    one = ranks.reserve(ranks.ranks[0], ranks.id, keys(2), part=0, attempt=1, ttl_ns=SECOND)
    ranks.commit(ranks.ranks[0], one.lease_id)
    ranks.pass_time(2 * SECOND)
    assert ranks.core.lookup(ranks.ranks[0], ranks.id, keys(2)) == bytes(2)
    assert ranks.core.stats().write_leases == 0


def test_an_abort_loses_one_reservation_where_blocks_have_one_part() -> None:
    bench = Bench()
    session = bench.session()
    space = bench.space(session)
    lost = bench.reserve(session, space, keys(2, "lost"), attempt=0)
    kept = bench.reserve(session, space, keys(2, "kept"), attempt=0)
    bench.core.release(session, [lost.lease_id], bench.now_ns)
    assert bench.commit(session, kept.lease_id).visible == 2
