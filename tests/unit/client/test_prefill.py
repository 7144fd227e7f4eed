"""The fit of prefill costs: exact on exact data, robust against outliers, modest with little."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.model.cost import PrefillCost
from kvstore_client.prefill import SAMPLES_MIN, PrefillFit

TRUTH = PrefillCost(35.0, 0.002)


def fit(
    lengths: list[int], truth: PrefillCost = TRUTH, *, seed: PrefillCost | None = None
) -> PrefillFit:
    one = PrefillFit(seed)
    for length in lengths:
        one.observe(length, 0, truth.prefill_us(length))
    return one


def test_exact_data_gives_back_what_made_it() -> None:
    cost = fit([1 << shift for shift in range(9, 18)]).cost()
    assert cost is not None
    assert cost == pytest.approx(TRUTH, rel=1e-6)


def test_cached_prefixes_are_taken_into_account() -> None:
    one = PrefillFit()
    rng = np.random.default_rng(5)
    for _ in range(40):
        n = int(rng.integers(2_000, 60_000))
        p = int(rng.integers(0, n))
        one.observe(n, p, TRUTH.prefill_us(n, p))
    assert one.cost() == pytest.approx(TRUTH, rel=1e-6)


def test_outliers_and_noise_move_it_little() -> None:
    seed = 11
    rng = np.random.default_rng(seed)
    one = PrefillFit()
    for number in range(200):
        n = int(rng.integers(500, 100_000))
        noise = 1 + 0.03 * rng.standard_normal()
        if number % 10 == 0:
            noise = 8.0  # a queue, a compilation
        one.observe(n, 0, TRUTH.prefill_us(n) * noise)
    cost = one.cost()
    assert cost is not None
    for n in (1_000, 10_000, 100_000):
        assert cost.prefill_us(n) == pytest.approx(TRUTH.prefill_us(n), rel=0.06), (seed, n)


def test_too_few_samples_are_not_believed() -> None:
    lengths = [1_000 * (number + 1) for number in range(SAMPLES_MIN - 1)]
    assert fit(lengths).cost() is None
    assert fit(lengths, seed=PrefillCost(1.0, 0.0)).cost() == (1.0, 0.0)
    assert fit([*lengths, 50_000], seed=PrefillCost(1.0, 0.0)).cost() == pytest.approx(TRUTH)


def test_prompts_of_one_length_are_put_down_to_a_or_shared_as_in_the_seed() -> None:
    alike = [8_000 + number for number in range(20)]
    plain = fit(alike).cost()
    assert plain is not None
    assert plain.b_us_per_token2 == 0
    assert plain.prefill_us(8_000) == pytest.approx(TRUTH.prefill_us(8_000), rel=0.01)
    # Twice as slow as the seed says: both are doubled, so that other lengths come out right too.
    doubled = PrefillCost(2 * TRUTH.a_us_per_token, 2 * TRUTH.b_us_per_token2)
    seeded = fit(alike, doubled, seed=TRUTH).cost()
    assert seeded is not None
    assert seeded.prefill_us(100_000) == pytest.approx(doubled.prefill_us(100_000), rel=0.01)


@pytest.mark.parametrize("truth", [PrefillCost(40.0, 0.0), PrefillCost(0.0, 0.01)])
def test_neither_is_ever_negative(truth: PrefillCost) -> None:
    rng = np.random.default_rng(3)
    one = PrefillFit()
    for _ in range(60):
        n = int(rng.integers(100, 50_000))
        one.observe(n, 0, truth.prefill_us(n) * (1 + 0.02 * rng.standard_normal()))
    cost = one.cost()
    assert cost is not None
    assert cost.valid()
    assert cost.prefill_us(30_000) == pytest.approx(truth.prefill_us(30_000), rel=0.05)


def test_what_cannot_be_a_prefill_is_ignored() -> None:
    one = PrefillFit()
    for prompt, cached, elapsed_us in (
        (0, 0, 1.0),
        (10, 10, 1.0),
        (10, 11, 1.0),
        (10, -1, 1.0),
        (10, 0, 0.0),
        (10, 0, -5.0),
        (10, 0, float("nan")),
        (10, 0, float("inf")),
        (10, 0, 5e-324),
        (10, 0, 1e300),
        (10**200, 0, 1.0),
        (10.5, 0, 1.0),
        ("10", 0, 1.0),
        (10, None, 1.0),
        (10, 0, "1.0"),
    ):
        for _ in range(SAMPLES_MIN):
            one.observe(prompt, cached, elapsed_us)  # type: ignore[arg-type]
    assert one.samples == 0
    assert one.cost() is None


def test_old_samples_are_forgotten() -> None:
    one = PrefillFit(samples_kept=32)
    for _ in range(3):
        for length in range(1_000, 33_000, 1_000):
            one.observe(length, 0, 10 * TRUTH.prefill_us(length))
    for length in range(1_000, 33_000, 1_000):
        one.observe(length, 0, TRUTH.prefill_us(length))
    assert one.samples == 32
    assert one.cost() == pytest.approx(TRUTH, rel=1e-6)
