"""`kvstore report` on made records: what is kept, rolled back or left open, and what is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.evidence.compare import change_of
from kvstore.evidence.criteria import CriteriaError, digest_path, fix, read_criteria
from kvstore.evidence.masking import tenant_digest
from kvstore.evidence.records import bucket_of, read_records
from tests.unit.evidence.bench import CRITERIA, NOW_S, SEED, Bench, lines, recorded

# ---------------------------------------------------------------- verdicts


def test_plainly_better_is_kept(bench: Bench) -> None:
    made = bench.report(lines(60), code=0)
    assert made["verdict"]["word"] == "keep"
    assert {one["state"] for one in made["verdict"]["judged"]} == {"met"}
    change = made["changes"][0]
    assert change["metric"] == "first_token_ms.mean"
    assert change["low"] < change["change"] < change["high"] < -0.35
    assert change["change"] == pytest.approx(-0.4, abs=0.02)
    assert any(one.startswith("computed_tokens.mean: -51.2%") for one in made["improved"])
    assert any(one.startswith("load_ms.mean: +5 [+5 to +5]") for one in made["worse"])
    assert any(one.startswith("loaded_bytes.mean: +1.049e+06") for one in made["worse"])


def test_slower_than_recomputing_rolls_back(bench: Bench) -> None:
    made = bench.report(lines(130), code=1)
    assert made["verdict"]["word"] == "roll back"
    assert any("first_token_ms.mean" in one for one in made["worse"])
    assert (made["rollback"]["setting"], made["rollback"]["value"]) == ("serve.share", 0)


def test_a_small_sample_is_inconclusive_however_good(bench: Bench) -> None:
    made = bench.report(lines(20, each=20), code=1)
    assert made["verdict"]["word"] == "inconclusive"
    assert "20 and 20 requests" in made["verdict"]["reasons"][0]


def test_a_small_gain_is_inconclusive(bench: Bench) -> None:
    assert bench.report(lines(97), code=1)["verdict"]["word"] == "inconclusive"


def test_more_failures_roll_back_whatever_the_speed(bench: Bench) -> None:
    made = bench.report(lines(50, failed=60), code=1)
    assert made["verdict"]["word"] == "roll back"
    (failed,) = (one for one in made["changes"] if one["metric"] == "failed.mean")
    assert failed["change"] == pytest.approx(0.2)


FAILED_CRITERION = """
[[criterion]]
metric = "failed.mean"
keep_at_most = 0.02
roll_back_above = 0.05
"""


def test_more_failures_are_not_kept_though_no_criterion_is_about_them(bench: Bench) -> None:
    bench.criteria.write_text(CRITERIA.replace(FAILED_CRITERION, ""))
    made = bench.report(lines(50, failed=60), code=1)
    assert made["verdict"]["word"] == "inconclusive"
    assert {one["state"] for one in made["verdict"]["judged"]} == {"met"}
    (reason,) = made["verdict"]["reasons"]
    assert reason.startswith("failed.mean: +0.1")
    assert bench.report(lines(50), code=0)["verdict"]["word"] == "keep", "none fails"


def test_failures_within_a_criterion_about_them_are_kept(bench: Bench) -> None:
    allowing = FAILED_CRITERION.replace("0.02", "0.5").replace("0.05", "0.6")
    bench.criteria.write_text(CRITERIA.replace(FAILED_CRITERION, allowing))
    assert bench.report(lines(50, failed=60), code=0)["verdict"]["word"] == "keep"


def test_a_mismatch_rolls_back_whatever_the_sample(bench: Bench) -> None:
    made = bench.report(lines(50, each=10, mismatches=1), code=1)
    assert made["verdict"]["word"] == "roll back"
    assert made["holds"] == {
        "audit_mismatches": 1,
        "by_instance": {"i1": 1},
        "reviews": {"held": 1},
    }


def test_sides_of_other_traffic_are_inconclusive(bench: Bench) -> None:
    made = bench.report(lines(50, prompt_tokens=(1_000, 4_000)), code=1)
    assert made["verdict"]["word"] == "inconclusive"
    assert "other traffic" in made["verdict"]["reasons"][0]


def test_too_few_reports_of_what_was_looked_up_are_inconclusive(bench: Bench) -> None:
    made = bench.report(lines(50, each=400, reported=4), code=1)
    assert made["verdict"]["word"] == "inconclusive"
    assert "25% of the baseline look-ups were reported" in made["verdict"]["reasons"][0]


def test_a_prompt_counts_as_one_look_up_and_a_refused_one_as_none(bench: Bench) -> None:
    held_out = {"arm": "held_out"}
    marks = [held_out, held_out | {"part": True}, None, {"arm": "applied", "part": True}]
    rows = [{"timestamp": 1, "verb": "lookup", "evidence": one} for one in marks]
    bench.write([*rows, *({**rows[2], "outcome": one} for one in ("refused", "failed", "miss"))])
    assert read_records([bench.records]).lookups == {False: 1, True: 2}


# ---------------------------------------------------------------- criteria


def test_without_criteria_there_is_no_verdict(bench: Bench) -> None:
    bench.write(lines(50))
    assert "no verdict" in bench.run("--records", bench.records, code=1).output
    absent = bench.folder / "absent.toml"
    result = bench.run("--criteria", absent, "--records", bench.records, code=1)
    assert "no verdict" in result.output


def test_criteria_that_were_not_fixed_give_no_verdict(bench: Bench) -> None:
    made = bench.report(lines(50), code=1, fixed=False)
    assert made["verdict"]["word"] == "no verdict"
    assert made["changes"], "what was seen is told all the same"


def test_criteria_that_were_changed_give_no_verdict(bench: Bench) -> None:
    bench.run("--criteria", bench.criteria, "--fix", code=0)
    bench.criteria.write_text(CRITERIA.replace("-0.05", "-0.01"))
    made = bench.report(lines(50), code=1, fixed=False)
    assert "changed after they were fixed" in made["criteria"]["problem"]


def test_criteria_fixed_after_the_records_began_give_no_verdict(bench: Bench) -> None:
    fix(bench.criteria, NOW_S + 10, "0")
    made = bench.report(lines(50), code=1, fixed=False)
    assert "after the records began" in made["criteria"]["problem"]


def test_fixing_again_changes_nothing_while_the_content_is_the_same(bench: Bench) -> None:
    first = fix(bench.criteria, 1_000.0, "0")
    assert fix(bench.criteria, 2_000.0, "0") == first
    bench.criteria.write_text(CRITERIA.replace("-0.05", "-0.01"))
    assert fix(bench.criteria, 2_000.0, "0").fixed_at_s == 2_000.0
    digest_path(bench.criteria).write_text("{")
    assert fix(bench.criteria, 3_000.0, "0").fixed_at_s == 3_000.0


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("first_token_ms.mean", "first_token_ms.median", "is none of"),
        ("first_token_ms.mean", "speed.mean", "is none of"),
        ("first_token_ms.mean", "first_token_ms.worst", "no interval"),
        ("failed.mean", "failed.p99", "failed.mean"),
        ("audit_mismatches", "mood", "is none of"),
        ("roll_back_above = 0.02", "roll_back_above = -0.5", "below keep_at_most"),
        ("requests_min = 50", "requests_min = 1", ">= 2"),
        ("requests_min = 50", "requests = 50", "unknown field"),
        ("name =", "nom =", "unknown field"),
        ("\nat_most = 0\n", "\nat_most = inf\n", "bound 1 at_most is inf"),
        ("roll_back_above = 0.02", "roll_back_above = nan", "roll_back_above is nan"),
        ("keep_at_most = 0.02", "keep_at_most = -inf", "criterion 2 keep_at_most is -inf"),
        ("engine_hour = 3.0", "engine_hour = nan", "engine_hour"),
        ("[sample]", "[sample", "criteria.toml"),
    ],
)
def test_criteria_that_mean_nothing_are_refused(
    bench: Bench, before: str, after: str, said: str
) -> None:
    bench.criteria.write_text(CRITERIA.replace(before, after))
    with pytest.raises(CriteriaError, match=said):
        read_criteria(bench.criteria)


# ---------------------------------------------------------------- what a report says


def test_all_that_a_reader_needs_is_there(bench: Bench) -> None:
    made = bench.report(lines(60), code=0)
    assert {(one["by"], one["which"]) for one in made["strata"]} == {
        ("tenant", "default"), ("tenant", tenant_digest("orchid")),
        ("prompt", "1k-4k"), ("tier", "host"), ("tier", "disk"),
    }  # fmt: skip
    assert "orchid" not in json.dumps(made).replace(str(bench.folder), "")
    (source,) = made["sources"]
    assert source["digest"].startswith("sha256:")
    assert source["from"] < source["to"]
    assert made["seed"] == 7
    samples = made["samples"]
    assert (samples["baseline"]["requests"], samples["applied"]["requests"]) == (300, 300)
    assert samples["applied"]["first_token_ms"]["worst"] > 60
    resources = made["resources"]
    assert resources["cpu_cores"] == pytest.approx(0.1)
    assert resources["ram_bytes"] == 1 << 30
    assert resources["ssd_bytes_per_request"] == pytest.approx(2e6)
    hours = 600 / 3600
    cost = hours * 0.1 * 0.05 + hours * 0.01 + 600e6 / (1 << 40) * 0.5
    assert resources["store_cost_per_1000_requests"] == pytest.approx(cost / 300 * 1_000)
    (engine,) = (one for one in made["changes"] if one["metric"] == "cost.mean")
    assert engine["baseline"] == pytest.approx(0.09 / 3_600 * 3.0)
    assert engine["applied"] == pytest.approx(0.054 / 3_600 * 3.0 + cost / 300)
    assert made["limits"]
    assert made["next_review"]["at_the_latest"] > made["made_at"]
    text = (bench.folder / "made.md").read_text()
    for part in ("## Data", "## By tenant", "## By prompt", "## By tier", "## Improved", "## Worse",
                 "## Known limits", "To roll back", "Look again by", "sha256:"):  # fmt: skip
        assert part in text


TENANTS = """
[tenants.default]
quota_bytes = "1GiB"
[tenants.orchid]
socket = "orchid-data.sock"
quota_bytes = "2GiB"
"""


def test_no_tenant_is_named_and_nobody_else_reads_the_files(bench: Bench) -> None:
    settings, rows = recorded(bench, lines(60), TENANTS)
    (bench.folder / "made.json").touch(0o644)
    made = bench.report(rows, code=0)
    config = made["daemons"][0]["config"]
    for name in ("made.json", "made.md"):
        path = bench.folder / name
        assert "orchid" not in path.read_text().replace(str(bench.folder), "")
        assert path.stat().st_mode & 0o777 == 0o600
    assert f"[tenants.{tenant_digest('orchid')}]" in config
    assert "[tenants.default]" in config
    check = ("--check", bench.folder / "made.json", "--criteria", bench.criteria)
    bench.run(*check, "--config", settings, code=0)
    settings.write_text(TENANTS.replace("2GiB", "3GiB").replace("-data", "-more"))
    text = bench.run(*check, "--config", settings, code=1).output
    assert "orchid" not in text
    where = f"setting tenants.{tenant_digest('orchid')}."
    assert f"{where}socket was" in text
    assert f'{where}quota_bytes was "2GiB", is "3GiB"' in text
    assert text.count(where) == 2


@pytest.mark.parametrize("rows", [1, 0])
def test_what_a_daemon_used_is_unknown_where_it_said_so_only_once(bench: Bench, rows: int) -> None:
    """It is not 0: a bound that nothing is known of is neither met nor broken."""
    bounds = (
        '[[bound]]\nmetric = "cpu_cores"\nat_most = 4\n'
        '[[bound]]\nmetric = "store_cost_per_1000_requests"\nat_most = 1\n'
    )
    bench.criteria.write_text(CRITERIA + bounds)
    made = bench.report(lines(60)[: -2 + rows], code=1)
    assert made["verdict"]["word"] == "inconclusive"
    states = {one["what"]: one["state"] for one in made["verdict"]["judged"]}
    assert (states["cpu_cores"], states["store_cost_per_1000_requests"]) == ("undecided",) * 2
    assert states["audit_mismatches"] == ("met" if rows else "undecided")
    assert "cpu_cores" not in made["resources"]
    assert any("recorded its own use" in one for one in made["limits"])


def test_the_same_records_give_the_same_numbers(bench: Bench) -> None:
    first, again = (bench.report(lines(60), code=0) for _ in range(2))
    for one in (first, again):
        one.pop("made_at")
        one["next_review"].pop("at_the_latest")
    assert first == again


def test_sides_that_ran_one_after_the_other_are_told(bench: Bench) -> None:
    rows = lines(60)
    for row in rows:
        evidence = row["evidence"]
        if evidence.get("arm") == "held_out":
            row["timestamp"] -= 10_000_000
            evidence["arm"] = "shadow"
    made = bench.report(rows, code=0)
    assert any("different times" in one for one in made["limits"])
    assert made["samples"]["arms"] == {"shadow": 300, "applied": 300}


def test_damaged_lines_are_counted_and_nothing_is_counted_twice(
    bench: Bench, tmp_path: Path
) -> None:
    bench.write(lines(60))
    text = bench.records.read_text() + '{"verb": "report", "timest\n[1]\n'
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    records = read_records([packed])
    assert (records.sources[0].damaged, len(records.requests)) == (2, 600)
    with pytest.raises(ValueError, match="counts once"):
        read_records([packed, packed])
    with pytest.raises(ValueError, match="counts once"):
        read_records([bench.records, packed])
    assert read_records([packed]).sources[0].size_bytes == len(text.encode())


def test_buckets_follow_each_other() -> None:
    at = [bucket_of(n) for n in (0, 1_023, 1_024, 4_096, 65_535, 65_536, 10**9)]
    assert at == ["< 1k", "< 1k", "1k-4k", "4k-16k", "16k-64k", ">= 64k", ">= 64k"]


# ---------------------------------------------------------------- intervals


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 200 samples whose true change is known, about nineteen of twenty intervals hold it."""
    chance = np.random.default_rng(SEED)
    held = 0
    for number in range(200):
        change = change_of(
            f"m{number}", chance.exponential(100, 150), chance.exponential(80, 150),
            statistic="mean", absolute=False, confidence=0.95, resamples=300, seed=1,
        )  # fmt: skip
        assert change.low is not None
        assert change.high is not None
        held += change.low <= -0.2 <= change.high
    # Binomial(200, 0.95): 190, standard deviation 3.1; the percentile interval is a little narrow.
    assert 178 <= held <= 199


def compare(one: list[float], other: list[float], statistic: str = "mean") -> Any:
    return change_of(
        "m", np.array(one), np.array(other),
        statistic=statistic, absolute=False, confidence=0.9, resamples=200, seed=1,
    )  # fmt: skip


def test_where_there_is_no_interval_it_is_said_why() -> None:
    assert compare([], [1.0]).why == "no requests on one side"
    assert compare([1.0], [2.0, 3.0]).why == "one request on one side"
    assert compare([0.0, 0.0], [1.0, 1.0]).why == "the baseline is 0"
    assert "99th" in compare([1.0] * 499, [1.0] * 600, "p99").why
    assert compare([1.0] * 500, [2.0] * 500, "p99").low == 1.0
    worst = compare([1.0, 5.0], [2.0, 3.0], "worst")
    assert (worst.baseline, worst.applied, worst.low) == (5.0, 3.0, None)
