"""`kvstore simulate`: a small trace, in the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two prompts by turns; both fit into 8 blocks, one into 4."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1_000 * n,
            "input_length": 2_048,
            "hash_ids": [n % 2 * 9 + i for i in range(4)],
        }
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_rates_are_fractions(trace: Path) -> None:
    rows = json.loads(run(str(trace), "--capacity", "8", "--capacity", "4", "--json"))
    found = {(row["policy"], row["capacity_blocks"]): row for row in rows}
    assert found["lru", 8]["prefix_token_hit_rate"] == pytest.approx(18 / 20)
    assert found["hit_density", 8]["prefix_token_hit_rate"] == pytest.approx(18 / 20)
    assert found["lru", 8]["optimum_prefix_token_hit_rate"] == pytest.approx(18 / 20)
    assert found["lru", 4]["prefix_token_hit_rate"] == 0
    assert found["lru", 4]["optimum_prefix_token_hit_rate"] > 0.3


def test_a_disk_serves_what_memory_lost(trace: Path) -> None:
    (row,) = json.loads(run(str(trace), "--capacity", "4,64", "--policy", "lru", "--json"))
    assert row["disk_hit_rate"] == row["prefix_token_hit_rate"] == pytest.approx(18 / 20)
    assert row["disk_block_writes"] == row["computed_blocks"] == 8


def test_a_table_for_people(trace: Path) -> None:
    output = run(str(trace), "--capacity", "8", "--policy", "lru", "--count-from", "2")
    # Older versions of click mix what goes to stderr, as progress does, into the output.
    lines = [line for line in output.splitlines() if line.strip()]
    assert lines[0].split()[:4] == ["trace", "policy", "blocks", "hits"]
    assert lines[1].split()[:4] == ["trace.jsonl", "lru", "8", "100.0%"]


def test_time_against_no_cache(trace: Path) -> None:
    asked = (str(trace), "--capacity", "4,64", "--policy", "lru")
    engine = ("--engine", "llama-3.1-8b 1xh100", "--memory-link", "50", "--disk-link", "3GB/s")
    (row,) = json.loads(run(*asked, *engine, "--json"))
    time = row["time"]
    assert (time["kv_bytes_per_token"], time["disk_bytes_per_second"]) == (131_072, 3e9)
    assert time["mean_ms_without_cache"] == pytest.approx(2_048 * (20.76 + 3.926e-4 * 2_048) / 1e3)
    # All hits are on a disk that takes 44 us a token; computing one takes at most 22.
    assert time["ways"]["always"]["slower_requests"] == 18
    assert time["ways"]["gate"]["against_no_cache"] == 1
    assert time["ways"]["gate"]["declined_tokens"] == 18 * 2_048
    assert time["ways"]["split"]["against_no_cache"] < 1
    (plain,) = json.loads(run(*asked, "--json"))
    assert "time" not in plain
    assert run(*asked, *engine).splitlines()[-1].split()[-1] == "100.0%"


def test_an_engine_that_nobody_knows_names_those_that_are_near(trace: Path) -> None:
    arguments = ["simulate", str(trace), "--capacity", "4", "--engine", "Llama-3.1-8B 1xH1000"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "Llama-3.1-8B 1xH100" in result.output


def test_a_plot(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    picture = tmp_path / "hits.png"
    run(str(trace), "--capacity", "4", "--capacity", "8", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("size", ["0", "x", "1,2,3", "-4"])
def test_a_wrong_size_is_refused(trace: Path, size: str) -> None:
    result = CliRunner().invoke(main, ["simulate", str(trace), f"--capacity={size}"])
    assert result.exit_code == 2


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"hash_ids": 3}\n')
    result = CliRunner().invoke(main, ["simulate", str(tmp_path / "bad.jsonl"), "--capacity=4"])
    assert result.exit_code == 1
    assert "bad.jsonl, line 1" in result.output
