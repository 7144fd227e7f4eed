"""Prefill costs to begin with: those of the measured table, by names that people write."""

from __future__ import annotations

import json

import pytest

from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.seeds import SEEDS, seed_named
from tests.simulation.traces import FOLDER, needs_traces


@needs_traces
def test_they_are_those_of_the_measured_table() -> None:
    table = json.loads((FOLDER / "cost_seed.json").read_text())
    ours = {seed.name: (*seed.cost, seed.max_error_percent) for seed in SEEDS}
    theirs = {
        f"{fit['model']} {fit['tp']}x{fit['gpu'].split()[0]}": (
            fit["a_us_per_token"],
            fit["b_us_per_token2"],
            fit["max_fit_error_pct"],
        )
        for fit in table["fits"]
    }
    assert ours == theirs


@needs_traces
def test_each_fits_its_points_within_what_it_says() -> None:
    table = json.loads((FOLDER / "cost_seed.json").read_text())
    seen = 0
    for seed in SEEDS:
        for point in table["points"]:
            gpus = f"{point['tp']}x{point['system'].split('_')[0].upper()}"
            if (point["model"].removeprefix("Meta-"), gpus) != (seed.model, seed.gpus):
                continue
            tokens, measured_us = point["prompt_tokens"], point["prefill_ms"] * 1e3
            error = abs(seed.cost.prefill_us(tokens) / measured_us - 1) * 100
            assert error <= seed.max_error_percent + 0.06, (seed.name, tokens)
            seen += 1
    assert seen >= 3 * len(SEEDS)


def test_names_are_read_as_people_write_them() -> None:
    assert seed_named("llama-3.1-8b, 1xh100") is SEEDS[0]
    with pytest.raises(BadRequest, match=r"Llama-3\.1-8B 1xH100") as caught:
        seed_named("Llama-3.1-8B 1xH1000")
    assert (caught.value.reason, caught.value.setting) == (Reason.BAD_NAME, "prefill")
