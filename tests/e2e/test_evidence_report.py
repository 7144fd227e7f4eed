"""From a daemon's traffic to a verdict: half of the requests held out, each reported, the records
read, the criteria fixed before. What an engine computes is work of this process; what is slow is
slow in truth.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvstore.cli import main
from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig, PrefillCost
from tests.client_kit import model, rows, tokens
from tests.daemon import Daemon
from tests.integration.polling import within

pytestmark = [pytest.mark.process, pytest.mark.slow]

Daemons = Callable[..., Daemon]
CONFIG = ClientConfig(deadline_ms=20_000)
SMALL = model("small")
"""Blocks of 4 KiB, 16 a prompt: loaded in no time."""
LARGE = model("large", layers=32, heads=8, head_size=128)
"""Blocks of 512 KiB, 16 a prompt."""
BLOCKS = 16
COST = PrefillCost(10_000.0, 0.0)
"""10 ms a token: wrong where the engine computes faster than that. With the cost that its own
reports give, the plan would decline a load that loses."""
CRITERIA = """
name = "an evening"
[sample]
requests_min = 20
resamples = 500
seed = 3
[prices]
engine_hour = 2.0
cpu_core_hour = 0.05
ram_gib_hour = 0.005
[[criterion]]
metric = "first_token_ms.p50"
keep_at_most = -0.10
roll_back_above = 0.05
[[bound]]
metric = "audit_mismatches"
at_most = 0
"""


def busy(times: int) -> None:
    """Computes something for as long as it takes: about a millisecond a time."""
    square = np.full((192, 192), 0.5)
    for _ in range(times):
        square = square @ square
        square /= square.max()


class Evening:
    """A daemon that records, an engine that asks it, and the operator's tool."""

    def __init__(self, daemons: Daemons, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.trace = folder / "trace.jsonl"
        self.criteria = folder / "criteria.toml"
        self.criteria.write_text(CRITERIA)
        self.tool("--criteria", self.criteria, "--fix", code=0)
        defaults = {"host__capacity_bytes": "320MiB", "trace__file": str(self.trace)}
        self.daemon = daemons(**{**defaults, "serve__share": 0.5, **settings})

    def tool(self, *arguments: str | Path, code: int) -> Result:
        daemon = getattr(self, "daemon", None)
        socket = self.folder / "none.sock" if daemon is None else daemon.admin_socket
        given = ["report", *map(str, arguments), "--admin-socket", str(socket)]
        result = CliRunner().invoke(main, given)
        assert result.exit_code == code, result.output
        return result

    def run(self, fingerprint: Any, requests: int, compute: int) -> None:
        """Each prompt was seen before; its time to the first token is what the engine waits."""
        with Client(self.daemon.data_socket, config=CONFIG) as client:
            space = client.space(fingerprint)
            out = np.zeros((BLOCKS, space.block_bytes), np.uint8)
            data = rows(BLOCKS, space.block_bytes)
            busy(2)
            for number in range(requests):
                prompt = tokens(BLOCKS, seed=number)
                assert space.push(prompt, data).stored == BLOCKS
                self._serve(space, prompt, out, data, compute, f"r-{number}")
            assert within(20, lambda: self._reported() == requests)

    def _serve(
        self, space: Any, prompt: Any, out: Any, data: Any, compute: int, request_id: str
    ) -> None:
        began_s = time.perf_counter()
        hit = space.lookup(prompt, prefill=COST, request_id=request_id)
        fetched = space.fetch(hit, out, request_id=request_id) if hit.keys_to_load else None
        loaded_s = time.perf_counter()
        if fetched is None or fetched.blocks < BLOCKS:
            assert hit.plan.reason in (Reason.DECLINED_HOLDOUT, Reason.DECLINED_SHADOW)
            busy(compute)
            assert space.push(prompt, data).present == BLOCKS, "pushes go on"
        ended_s = time.perf_counter()
        assert space.report(
            hit,
            fetched,
            first_token_ms=(ended_s - began_s) * 1e3,
            prefill_ms=(ended_s - loaded_s) * 1e3 if compute else 0.0,
            request_id=request_id,
        )

    def _reported(self) -> int:
        return sum('"verb":"report"' in line for line in self.trace.read_text().splitlines())

    def report(self, code: int) -> dict[str, Any]:
        records = self.folder / "records.jsonl"
        shutil.copy(self.trace, records)
        where = self.folder / "made"
        given = ("--criteria", self.criteria, "--records", records, "--write", where)
        self.tool(*given, code=code)
        made: dict[str, Any] = json.loads((self.folder / "made.json").read_text())
        return made


def test_what_is_plainly_better_is_kept_and_then_watched(daemons: Daemons, tmp_path: Path) -> None:
    evening = Evening(daemons, tmp_path)
    evening.run(SMALL, requests=120, compute=20)
    made = evening.report(code=0)
    assert made["verdict"]["word"] == "keep", made["verdict"]
    assert made["samples"]["arms"].keys() == {"applied", "held_out"}
    assert made["samples"]["applied"]["reported"] == 1.0
    (start,) = made["daemons"]
    assert start["config_digest"].startswith("sha256:")
    assert made["resources"]["known"]
    assert made["resources"]["ram_bytes"] > 1 << 20
    assert {one["which"] for one in made["strata"] if one["by"] == "tier"} == {"host"}
    assert made["withheld"]["tokens"] > 0
    check = ("--check", tmp_path / "made.json", "--criteria", evening.criteria)
    assert "nothing has changed" in evening.tool(*check, code=0).output
    evening.daemon.stop()
    evening.daemon.settings["serve.share"] = 1.0
    evening.daemon.restart()
    changed = evening.tool(*check, code=1).output
    assert "setting serve.share was 0.5, is 1.0" in changed


def test_loads_that_are_slower_than_computing_roll_back(daemons: Daemons, tmp_path: Path) -> None:
    """Large blocks and next to nothing to compute. The plan is told a wrong cost, and the guard
    that would notice is told nothing: then the comparison is what is left.
    """
    evening = Evening(daemons, tmp_path, guards__load_stop_ratio=0)
    evening.run(LARGE, requests=200, compute=0)
    made = evening.report(code=1)
    assert made["verdict"]["word"] == "roll back", made["verdict"]
    assert any("first_token_ms.p50" in one for one in made["worse"])
    assert made["rollback"]["setting"] == "serve.share"


def test_a_few_requests_decide_nothing(daemons: Daemons, tmp_path: Path) -> None:
    evening = Evening(daemons, tmp_path)
    evening.run(SMALL, requests=16, compute=20)
    made = evening.report(code=1)
    assert made["verdict"]["word"] == "inconclusive", made["verdict"]


def test_shadow_first_then_served(daemons: Daemons, tmp_path: Path) -> None:
    """The baseline of a deployment that has held out nothing: the same traffic, shadowed."""
    evening = Evening(daemons, tmp_path, serve__share=0.0)
    evening.run(SMALL, requests=25, compute=20)
    evening.daemon.stop()
    shadowed = tmp_path / "shadow.jsonl"
    evening.trace.rename(shadowed)
    assert '"arm":"shadow"' in shadowed.read_text()
    evening.daemon.settings["serve.share"] = 1.0
    evening.daemon.restart()
    evening.run(SMALL, requests=25, compute=20)
    given = ("--criteria", evening.criteria, "--records", shadowed)
    result = evening.tool(*given, "--records", evening.trace, "--json", code=0)
    made = json.loads(result.stdout)
    assert made["verdict"]["word"] == "keep"
    assert made["samples"]["arms"] == {"shadow": 25, "applied": 25}
    assert any("different times" in one for one in made["limits"])
    assert any("different settings" in one for one in made["limits"])


def test_the_records_of_the_running_daemon_are_the_default(
    daemons: Daemons, tmp_path: Path
) -> None:
    evening = Evening(daemons, tmp_path)
    evening.run(SMALL, requests=4, compute=1)
    result = evening.tool("--criteria", evening.criteria, code=1)
    assert str(evening.trace) in result.output
