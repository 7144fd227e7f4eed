"""The line above which a block is worth a write, by what is left of a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.reasons import Reason
from kvstore.policy.admission import AHEAD_S, CALM_SHARE, TIGHT_SHARE, chance_wanted
from kvstore.policy.hit_density import EVIDENCE_MIN, HitDensity
from kvstore.policy.lru import Lru
from tests.policy_kit import Block

DAY_S = 24 * 3_600
amounts = st.floats(0, 1e15)


def test_without_a_budget_and_while_it_is_ample_policies_decide_alone() -> None:
    assert chance_wanted(1e15, 1e9, 0) == 0
    assert chance_wanted(0, 0, 100) == 0
    assert chance_wanted(CALM_SHARE * 100, 0, 100) == 0


def test_the_line_rises_to_certainty_before_the_budget_is_used_up() -> None:
    lines = [chance_wanted(used, 0, 100) for used in (75, 80, 90, 100, 110, 200)]
    assert lines == sorted(lines)
    assert 0 < lines[1] < 1
    assert lines[-2:] == [1, 1]
    even = 0.98
    assert chance_wanted(even, even / DAY_S, 1) == pytest.approx(1, abs=0.02), "even writes"


def test_a_budget_that_is_spent_too_fast_is_short_from_the_start() -> None:
    """Ten days' worth a day: that is seen long before the day's budget is used up."""
    rate = 10 * 100 / DAY_S
    assert chance_wanted(0, rate, 100) == 1
    assert chance_wanted(0, rate / 20, 100) == 0


@given(amounts, amounts, amounts, amounts)
def test_more_writes_never_lower_it_and_a_larger_budget_never_raises_it(
    day: float, rate: float, budget: float, more: float
) -> None:
    line = chance_wanted(day, rate, budget)
    assert 0 <= line <= 1
    assert chance_wanted(day + more, rate, budget) >= line
    assert chance_wanted(day, rate + more, budget) >= line
    if budget:
        assert chance_wanted(day, rate, budget + more) <= line
        assert (line == 1) == (
            (day + AHEAD_S * rate) / budget - CALM_SHARE >= TIGHT_SHARE - CALM_SHARE
        )


def test_lru_writes_what_was_asked_for_as_long_as_it_can() -> None:
    lru: Lru[Block] = Lru()
    asked, new = Block(b"1", hits=1), Block(b"2")
    for at_least, admitted in ((0.0, (True, True)), (0.4, (True, False)), (1.0, (False, False))):
        assert (lru.admit(asked, at_least), lru.admit(new, at_least)) == admitted


def test_hit_density_admits_by_the_higher_line() -> None:
    """Half of all blocks are asked for again: that is enough for 0.2, and for no more than 0.5."""
    policy: HitDensity[Block] = HitDensity(reach=10)
    block = Block(bytes(32), prompt_tokens=1_000)
    policy.insert([block], 0)
    assert policy.admit(block)
    assert not policy.admit(block, 0.5), "of what is not known nothing is written that is dear"
    now_ns = 0
    for number in range(4 * EVIDENCE_MIN):
        now_ns += 10**9
        one = Block(number.to_bytes(8, "little") * 4, prompt_tokens=1_000, touched_ns=now_ns)
        policy.insert([one], now_ns)
        if number % 2:
            now_ns += 10**9
            policy.use([one], now_ns)
        policy.departed(one, Reason.MISS_EVICTED, now_ns)
        policy.remove(one)
    fresh = Block(b"f" * 32, prompt_tokens=1_000, touched_ns=now_ns)
    policy.insert([fresh], now_ns)
    assert [policy.admit(fresh, line) for line in (0.0, 0.3, 0.7, 1.0)] == [
        True,
        True,
        False,
        False,
    ]
