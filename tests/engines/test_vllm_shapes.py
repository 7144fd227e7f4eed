"""vLLM with two ranks, and with a model whose cache has several groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.engines.conftest import write_model
from tests.engines.kit import (
    BLOCK_TOKENS,
    START_S,
    STORED_TOKENS,
    Engine,
    check_ended_well,
    operator,
    prompts,
    stored_blocks,
    until_has,
)

pytestmark = pytest.mark.timeout(900)

ASKED = prompts(2, seed=51)
OTHERS = prompts(4, seed=52)
BLOCKS = STORED_TOKENS // BLOCK_TOKENS
ROW_BYTES = 128 << 10


@pytest.fixture(scope="module")
def store(daemon: Daemon) -> Daemon:
    return daemon.start(START_S)


def test_two_ranks_store_and_restore_whole_rows(
    model: Path, engines: Callable[..., Engine], store: Daemon
) -> None:
    """By vLLM's executor of several processes. What was asked first has left vLLM's own caches when
    it is asked again: the host tier has room for the prompts that came after it, and no more.
    """
    engine = engines(
        model,
        target=store.data_socket,
        extra={"cpu_bytes_to_use": len(OTHERS) * BLOCKS * ROW_BYTES},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        disable_log_stats=False,
    )
    cold = engine.generate(ASKED)
    assert cold["cached"] == [0, 0]
    until_has(engine, store, *ASKED)
    for prompt in OTHERS:
        engine.generate([prompt])
    until_has(engine, store, *OTHERS)
    engine.reset(connector=False)
    warm = engine.generate(ASKED)
    assert warm["cached"] == [STORED_TOKENS] * 2
    assert warm["tokens"] == cold["tokens"]
    assert engine.metrics("vllm:kvstore_")["vllm:kvstore_tier_chunks load_loaded"] == 2 * BLOCKS
    (space,) = operator(store, "spaces")["spaces"]
    assert "tp=2" in space["fingerprint"]["encoding"]["layout_version"]
    assert space["bytes"] == space["blocks"] * ROW_BYTES, "a row has the heads of both ranks"
    check_ended_well(engine)


def test_a_model_with_sliding_windows_is_left_alone(
    engines: Callable[..., Engine], store: Daemon, tmp_path: Path
) -> None:
    """Its groups need different blocks of one prompt; the store says that it does not serve it."""
    folder = tmp_path / "window"
    write_model(folder, 3, "window")
    before = stored_blocks(store)
    engine = engines(folder, target=store.data_socket)
    cold = engine.generate(ASKED)
    engine.reset(connector=True)
    again = engine.generate(ASKED)
    assert cold["cached"] == again["cached"] == [0, 0]
    assert again["tokens"] == cold["tokens"]
    assert "kvstore is off" in engine.log()
    assert "the model has 2 cache groups" in engine.log()
    assert stored_blocks(store) == before
    assert engine.stop() == 0
