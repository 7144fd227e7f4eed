"""A daemon and the simulation give the same hits, block for block, and so does the daemon's log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.policy.choice import NAMES
from kvstore.simulate.replay import DISK
from kvstore.simulate.trace import Request
from tests.simulation.same_hits import (
    Run,
    Size,
    differences,
    from_zero,
    run_daemon,
    simulate,
    translated,
)
from tests.simulation.test_replay import chats
from tests.simulation.traces import needs_traces, requests

pytestmark = pytest.mark.process

REQUESTS = 1_000
"""Of the 2,000 that `python -m tests.simulation.same_hits` compares."""


def compare(trace: Sequence[Request], run: Run, policy: str, size: Size) -> None:
    """The same hits from the simulation, and from the log that the daemon wrote."""
    told = list(differences(trace, run.hits, simulate(trace, policy, size).hits))
    assert not told, told[:10]
    log = translated(run.log, trace)
    assert [one.at_ns // 10**6 for one in log] == [one.at_ns // 10**6 for one in trace]
    told = list(differences(trace, run.hits, simulate(log, policy, size).hits))
    assert not told, told[:10]


@pytest.mark.parametrize("policy", NAMES)
def test_memory_alone(tmp_path: Path, policy: str) -> None:
    trace, size = chats(seed=5, count=120), Size(256 << 10)
    run = run_daemon(tmp_path, trace, policy, size)
    compare(trace, run, policy, size)
    assert 0 < sum(map(len, run.hits)) < sum(len(one.ids) for one in trace)
    # It is seen where something is another.
    other = next(name for name in NAMES if name != policy)
    for wrong in ((other, size), (policy, Size(224 << 10))):
        assert list(differences(trace, run.hits, simulate(trace, *wrong).hits))


@needs_traces
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", NAMES)
def test_conversations(tmp_path: Path, policy: str) -> None:
    trace, size = from_zero(requests("mooncake_conversation")[:REQUESTS]), Size(12 << 20)
    run = run_daemon(tmp_path, trace, policy, size)
    compare(trace, run, policy, size)
    assert sum(map(len, run.hits)) > REQUESTS


@needs_traces
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_agents_whose_prompts_do_not_fit_into_memory(tmp_path: Path) -> None:
    trace, size = from_zero(requests("claude_code_a")[:180]), Size(4 << 20, 40 << 20)
    run = run_daemon(tmp_path, trace, "hit_density", size)
    compare(trace, run, "hit_density", size)
    assert sum(tiers.count(DISK) for tiers in run.hits) > 1_000


@pytest.mark.parametrize("policy", NAMES)
def test_memory_and_disk(tmp_path: Path, policy: str) -> None:
    trace, size = chats(seed=5, count=90), Size(256 << 10, 6 << 20)
    run = run_daemon(tmp_path, trace, policy, size)
    compare(trace, run, policy, size)
    assert sum(tiers.count(DISK) for tiers in run.hits) > 20
    assert run.saves == simulate(trace, policy, size).saves > 100
    assert list(differences(trace, run.hits, simulate(trace, policy, Size(256 << 10)).hits))
