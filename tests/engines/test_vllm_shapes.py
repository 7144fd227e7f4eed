"""vLLM with two ranks, and with a model whose cache has several groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.engines.conftest import write_model
from tests.engines.kit import (
    BLOCK_TOKENS,
    START_S,
    STORED_S,
    STORED_TOKENS,
    Engine,
    check_ended_well,
    has,
    operator,
    prompts,
    until_has,
)
from tests.engines.models import WINDOW_TOKENS

pytestmark = pytest.mark.timeout(900)

ASKED = prompts(2, seed=51)
OTHERS = prompts(4, seed=52)
BLOCKS = STORED_TOKENS // BLOCK_TOKENS
ROW_BYTES = 128 << 10
(LONG,) = prompts(1, seed=53, length=1_500)
LONG_STORED_TOKENS = len(LONG) // BLOCK_TOKENS * BLOCK_TOKENS
WINDOW_BLOCKS = WINDOW_TOKENS // BLOCK_TOKENS
IN_PIECES = {"max_num_batched_tokens": 256, "disable_log_stats": False}
"""Of a prompt several windows long, as real ones are: windows slide while it is computed."""


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


def test_windows_are_restored_with_the_rest_of_their_prompt(
    engines: Callable[..., Engine], store: Daemon, tmp_path: Path
) -> None:
    """Every second layer needs the last blocks alone, and of those vLLM stores no more: a prompt
    that goes on where a stored one ended is restored, one that parts from it before is computed.
    """
    folder = tmp_path / "window"
    write_model(folder, 3, "window")
    computing = engines(folder, target=store.data_socket, **IN_PIECES)
    parts = ASKED[0][: 6 * BLOCK_TOKENS] + OTHERS[0][: 3 * BLOCK_TOKENS]
    goes_on = LONG[:LONG_STORED_TOKENS] + OTHERS[1]
    asked = [*ASKED, LONG]
    computed = tokens_computed(computing, [*asked, goes_on, parts])
    cold = computing.generate(asked)
    assert cold["cached"] == [0, 0, 0]
    assert cold["tokens"] == computed[:3]
    for prompt in asked:
        until_tail_is_stored(computing, store, prompt, groups=2)
    assert any(not has(store, computing.keys(LONG, group=group)[:1]) for group in (0, 1)), (
        "vLLM has not left out the start of the window's prompt"
    )
    computing.reset(connector=False)
    warm = computing.generate(asked)
    assert warm["cached"] == [STORED_TOKENS, STORED_TOKENS, LONG_STORED_TOKENS]
    assert warm["tokens"] == computed[:3]
    check_ended_well(computing)

    restoring = engines(folder, target=store.data_socket, **IN_PIECES)
    warm = restoring.generate(asked)
    assert warm["cached"] == [STORED_TOKENS, STORED_TOKENS, LONG_STORED_TOKENS]
    assert warm["tokens"] == computed[:3]
    counted = restoring.metrics("vllm:kvstore_")
    blocks = 2 * BLOCKS + LONG_STORED_TOKENS // BLOCK_TOKENS
    assert counted["vllm:kvstore_tier_chunks load_loaded"] == blocks + 3 * WINDOW_BLOCKS
    assert "vllm:kvstore_tier_chunks load_failed" not in counted
    others = restoring.generate([goes_on, parts])
    assert others["cached"] == [LONG_STORED_TOKENS, 0]
    assert others["tokens"] == computed[3:]
    check_ended_well(restoring)

    narrower = engines(
        folder, target=store.data_socket, hf_overrides={"sliding_window": 64}, **IN_PIECES
    )
    assert narrower.generate(ASKED)["cached"] == [0, 0]
    assert "geometry.cache_group" in narrower.log()
    check_ended_well(narrower)


@pytest.mark.parametrize(("kind", "groups", "chunk"), [("ragged", 3, 2), ("windows", 1, 1)])
def test_groups_of_other_shapes_are_restored(
    engines: Callable[..., Engine],
    store: Daemon,
    tmp_path: Path,
    kind: str,
    groups: int,
    chunk: int,
) -> None:
    """Rows of which a group fills only some, chunks of two blocks; and no layer that sees all."""
    folder = tmp_path / kind
    write_model(folder, 4, kind)
    shape = {"extra": {"blocks_per_chunk": chunk}, **IN_PIECES}
    computing = engines(folder, target=store.data_socket, **shape)
    cold = computing.generate([*ASKED, LONG])
    assert cold["cached"] == [0, 0, 0]
    for prompt in (*ASKED, LONG):
        until_tail_is_stored(computing, store, prompt, groups=groups, chunk=chunk)
    check_ended_well(computing)
    restoring = engines(folder, target=store.data_socket, **shape)
    warm = restoring.generate([*ASKED, LONG])
    chunk_tokens = BLOCK_TOKENS * chunk
    whole = [len(prompt) // chunk_tokens * chunk_tokens for prompt in (*ASKED, LONG)]
    assert warm["cached"] == whole
    assert warm["tokens"] == cold["tokens"]
    counted = restoring.metrics("vllm:kvstore_")
    assert counted["vllm:kvstore_tier_chunks load_loaded"] > 0
    assert "vllm:kvstore_tier_chunks load_failed" not in counted
    check_ended_well(restoring)


def tokens_computed(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    """What this engine answers if it has seen none of a prompt before: a salt for each."""
    made = []
    for number, prompt in enumerate(asked):
        done = engine.generate([prompt], salt=f"computed {number}")
        assert done["cached"] == [0]
        made += done["tokens"]
    return made


def until_tail_is_stored(
    engine: Engine, daemon: Daemon, prompt: list[int], *, groups: int, chunk: int = 1
) -> None:
    """Until each cache group's last chunks are, as many as a window has."""
    end = time.monotonic() + STORED_S
    window = -(-WINDOW_BLOCKS // chunk)
    for group in range(groups):
        keys = engine.keys(prompt, group=group)[chunk - 1 :: chunk][-window:]
        while not has(daemon, keys):
            assert time.monotonic() < end, f"not stored:\n{engine.log()[-3000:]}"
            engine.generate(prompts(1, seed=0, length=BLOCK_TOKENS // 4), max_tokens=4)
