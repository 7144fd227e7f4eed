"""Two ranks, each in a process of its own, and the scheduler in a third: one row holds the bytes of
both, and one process stores it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.engines.kit import STORED_TOKENS, Engine, check_ended_well, operator, prompts

pytestmark = pytest.mark.timeout(900)

ASKED = prompts(2, seed=31)


def test_rows_of_two_ranks_are_restored_by_two_others(
    model: Path, engines: Callable[..., Engine], daemon: Daemon
) -> None:
    daemon.start()
    arguments = {
        "target": daemon.data_socket,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "environ": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    }
    first = engines(model, **arguments)
    computed = first.generate(ASKED)
    assert computed["cached"] == [0, 0]
    first.generate(prompts(1, seed=32))  # a step more, so that the last store has begun
    check_ended_well(first)
    second = engines(model, **arguments)
    restored = second.generate(ASKED)
    assert restored["cached"] == [STORED_TOKENS] * 2
    assert restored["tokens"] == computed["tokens"]
    check_ended_well(second)
    (space,) = operator(daemon, "spaces")["spaces"]
    assert " tp=2 pp=1 copies=2 " in space["fingerprint"]["encoding"]["layout_version"]
    assert space["fingerprint"]["geometry"]["kv_heads"] == 2
