"""Prefill cost and break-even formulas against published and measured figures."""

from __future__ import annotations

import math

import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.reasons import Reason
from kvstore.policy.cost import (
    always_faster_bytes_per_second,
    break_even_position_tokens,
    break_even_prefix_tokens,
)
from kvstore.policy.links import Link
from kvstore.policy.plan import plan

# The tables were made from fits with more digits than those kept here, hence half a unit and a bit.
# name, a, b, KV bytes a token in bf16, B* in GB/s, thousands of tokens from which loading a prefix
# wins at 1, 3, 6.5 and 12.5 GB/s (0: always)
BREAK_EVEN = [
    ("Llama-3.1-8B, H100", 20.76, 3.926e-4, 131_072, 6.3, (281, 58, 0, 0)),
    ("Llama-3.1-8B, A100", 58.16, 1.444e-3, 131_072, 2.3, (51, 0, 0, 0)),
    ("Qwen3-8B, H100", 20.96, 4.332e-4, 147_456, 7.0, (292, 65, 4, 0)),
    ("Qwen3-32B, 2xH100", 52.0, 7.725e-4, 262_144, 5.0, (272, 46, 0, 0)),
    ("Llama-3.1-70B, 4xH100", 63.65, 4.723e-4, 327_680, 5.1, (559, 97, 0, 0)),
    ("Llama-3.1-70B, 8xH100", 40.82, 2.154e-4, 327_680, 8.0, (1332, 318, 45, 0)),
    ("Llama-3.1-70B, 4xA100", 158.71, 1.721e-3, 327_680, 2.1, (98, 0, 0, 0)),
]


@pytest.mark.parametrize("row", BREAK_EVEN, ids=lambda row: row[0])
def test_break_even_table(row: tuple[str, float, float, int, float, tuple[int, ...]]) -> None:
    _, a, b, bytes_per_token, always, thousands = row
    cost = PrefillCost(a, b)
    assert round(always_faster_bytes_per_second(bytes_per_token, cost) / 1e9, 1) == always
    for rate, expected in zip((1e9, 3e9, 6.5e9, 12.5e9), thousands, strict=True):
        tokens = break_even_prefix_tokens(bytes_per_token, rate, cost)
        assert tokens / 1e3 == pytest.approx(expected, abs=0.55)


@pytest.mark.parametrize("row", BREAK_EVEN, ids=lambda row: row[0])
def test_the_planner_turns_where_the_formula_says(
    row: tuple[str, float, float, int, float, tuple[int, ...]],
) -> None:
    _, a, b, bytes_per_token, _, _ = row
    cost, block_tokens = PrefillCost(a, b), 16
    for rate in (1e9, 3e9, 6.5e9, 12.5e9):
        turn = break_even_prefix_tokens(bytes_per_token, rate, cost)
        link = Link("path", bytes_per_second=rate)

        def reason(tokens: float, link: Link = link, size: int = bytes_per_token) -> Reason:
            blocks = max(1, int(tokens) // block_tokens)
            advice = plan([(0, blocks)], block_tokens, block_tokens * size, [link], cost)
            return advice.reason

        assert reason(turn + 2 * block_tokens) is Reason.OK
        if turn > 0:
            assert reason(turn - block_tokens) is Reason.DECLINED_RECOMPUTE_FASTER


# model, tokens/s at 8k, 32k, 128k
@pytest.mark.parametrize(
    ("a", "b", "tokens_per_second", "doubling_thousands"),
    [
        (20.76, 3.926e-4, (41_000, 30_300, 13_700), 26),
        (52.0, 7.725e-4, (17_200, 13_100, 6_440), 34),
        (63.65, 4.72e-4, (14_200, 12_900, 7_850), 67),
    ],
)
def test_prefill_rates_of_the_fits(
    a: float, b: float, tokens_per_second: tuple[int, ...], doubling_thousands: int
) -> None:
    cost = PrefillCost(a, b)
    for tokens, rate in zip((8_192, 32_768, 131_072), tokens_per_second, strict=True):
        assert tokens / cost.prefill_us(tokens) * 1e6 == pytest.approx(rate, rel=0.06)
    assert round(cost.doubling_tokens() / 1e3) == doubling_thousands


def test_prefill_is_additive_over_the_cut() -> None:
    cost = PrefillCost(20.0, 4e-4)
    whole = cost.prefill_us(10_000)
    assert cost.prefill_us(4_000) + cost.prefill_us(10_000, 4_000) == pytest.approx(whole)
    assert cost.prefill_us(4_000, 4_000) == cost.prefill_us(0) == 0.0
    assert cost.prefill_us(3_000, 4_000) == 0.0
    assert cost.prefill_us(10_001, 10_000) == pytest.approx(cost.next_token_us(10_000), rel=1e-3)


def test_break_even_without_the_quadratic_or_linear_term() -> None:
    flat = PrefillCost(20.0, 0.0)
    assert break_even_prefix_tokens(131_072, 1e9, flat) == math.inf
    assert break_even_prefix_tokens(131_072, 1e10, flat) == 0
    assert flat.doubling_tokens() == math.inf
    square = PrefillCost(0.0, 1e-3)
    assert always_faster_bytes_per_second(131_072, square) == math.inf
    prefix = break_even_prefix_tokens(131_072, 1e9, square)
    assert break_even_position_tokens(131_072, 1e9, square) == pytest.approx(prefix / 2)
    with pytest.raises(ValueError, match="bytes_per_second"):
        break_even_prefix_tokens(1, 0, square)


@pytest.mark.parametrize(
    ("cost", "valid"),
    [
        (PrefillCost(20.0, 0.0), True),
        (PrefillCost(0.0, 1e-9), True),
        (PrefillCost(0.0, 0.0), False),
        (PrefillCost(-1.0, 1.0), False),
        (PrefillCost(math.nan, 1.0), False),
        (PrefillCost(1.0, math.inf), False),
    ],
)
def test_a_strangers_cost_is_checked(cost: PrefillCost, valid: bool) -> None:
    assert cost.valid() is valid
