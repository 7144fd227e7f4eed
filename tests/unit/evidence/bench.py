"""Made records, fixed criteria, and the operator's tool on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from kvstore.cli import main
from kvstore.config import load, render_toml
from kvstore.config.digest import settings_digest

SEED = 20_261_130
NOW_S = 4_000_000_000.0
"""After `fix`, whenever the tests run."""
CRITERIA = """
name = "half the traffic"

[sample]
requests_min = 50
resamples = 400
seed = 7

[prices]
engine_hour = 3.0
cpu_core_hour = 0.05
ram_gib_hour = 0.01
ssd_tib_written = 0.5

[[criterion]]
metric = "first_token_ms.mean"
keep_at_most = -0.05
roll_back_above = 0.02

[[criterion]]
metric = "failed.mean"
keep_at_most = 0.02
roll_back_above = 0.05

[[bound]]
metric = "audit_mismatches"
at_most = 0
"""

Row = dict[str, Any]


def lines(
    applied_ms: float,
    *,
    baseline_ms: float = 100.0,
    each: int = 300,
    failed: int = 0,
    prompt_tokens: tuple[int, int] = (2_000, 2_000),
    mismatches: int = 0,
    reported: int = 1,
) -> list[Row]:
    """Records of as many requests on each side, their times spread by a tenth."""
    chance = np.random.default_rng(SEED)
    found: list[Row] = [start()]
    for number in range(2 * each):
        applied = number % 2 == 0
        mean = applied_ms if applied else baseline_ms
        at_ms = round((NOW_S + number) * 1e3)
        arm = "applied" if applied else "held_out"
        found.append({"timestamp": at_ms, "verb": "lookup", "evidence": {"arm": arm}})
        if number // 2 % reported:
            continue
        found.append(
            {
                "timestamp": at_ms,
                "verb": "report",
                "tenant": "default" if number % 4 < 2 else "orchid",
                "input_length": prompt_tokens[not applied],
                "evidence": {
                    "arm": arm,
                    "request": {
                        "tier": "host" if number % 3 else "disk",
                        "found_tokens": 1_024,
                        "loaded_tokens": 1_024 if applied else 0,
                        "loaded_bytes": 1 << 20 if applied else 0,
                        "load_us": 5_000 if applied else 0,
                        "computed_tokens": 976 if applied else 2_000,
                        "prefill_us": round(mean * 900),
                        "first_token_us": round(mean * 1e3 * chance.normal(1, 0.1)),
                        "failed": applied and number < 2 * failed,
                    },
                },
            }
        )
    found += [usage(0, mismatches), usage(2 * each, mismatches)]
    return found


def start(**more: Any) -> Row:
    facts = {
        "instance": "i1",
        "kvstore": "0.0",
        "python": "3.11",
        "system": "Linux",
        "config_digest": "sha256:1",
        "config": "",
        **more,
    }
    return {"timestamp": round(NOW_S * 1e3), "verb": "start", "evidence": {"start": facts}}


def usage(after_s: float, mismatches: int = 0) -> Row:
    facts = {
        "instance": "i1",
        "cpu_s": after_s / 10,
        "rss_bytes": 1 << 30,
        "ssd_written_bytes": round(after_s * 1e6),
        "audit_mismatches": mismatches,
        "reviews": {"held": 1} if mismatches else {},
    }
    at_ms = round((NOW_S + after_s) * 1e3)
    return {"timestamp": at_ms, "verb": "usage", "evidence": {"usage": facts}}


class Bench:
    """A folder with fixed criteria."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.criteria = folder / "criteria.toml"
        self.criteria.write_text(CRITERIA)
        self.records = folder / "trace.jsonl"

    def run(self, *arguments: str | Path, code: int) -> Result:
        given = ["report", *map(str, arguments), "--runtime-dir", str(self.folder / "nowhere")]
        result = CliRunner().invoke(main, given, catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    def write(self, rows: list[Row]) -> None:
        self.records.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def report(self, rows: list[Row], code: int, *, fixed: bool = True) -> Row:
        if fixed:
            self.run("--criteria", self.criteria, "--fix", code=0)
        self.write(rows)
        where = self.folder / "made"
        given = ("--criteria", self.criteria, "--records", self.records, "--write", where)
        self.run(*given, code=code)
        made: Row = json.loads((self.folder / "made.json").read_text())
        assert (
            f"# half the traffic: {made['verdict']['word']}"
            in (self.folder / "made.md").read_text()
        )
        return made


def recorded(bench: Bench, rows: list[Row], text: str = "[serve]\nshare = 0.5\n") -> Any:
    """The daemon's file of settings, and the rows with a start that recorded them."""
    settings = bench.folder / "kvstored.toml"
    settings.write_text(text)
    toml = render_toml(load(str(settings)))
    return settings, [start(config=toml, config_digest=settings_digest(toml)), *rows[1:]]
