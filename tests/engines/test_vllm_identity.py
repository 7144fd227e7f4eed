"""Who shares with whom under vLLM: same bytes or nothing, and the operator is told why.

Each engine here has the same prompts and the same store as the first one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon
from tests.engines.conftest import write_model
from tests.engines.kit import (
    BLOCK_TOKENS,
    PATIENT,
    START_S,
    STORED_TOKENS,
    Engine,
    check_ended_well,
    kvstore_tier,
    operator,
    prompts,
    stored_blocks,
    until_has,
)
from tests.rawclient import RawAdmin

pytestmark = pytest.mark.timeout(900)

ASKED = prompts(2, seed=21)


class Stored:
    """What the first engine has stored, and under which fingerprint."""

    def __init__(self, engine: Engine, daemon: Daemon) -> None:
        done = engine.generate(ASKED)
        self.tokens, self.request_ids = done["tokens"], done["ids"]
        self.keys = engine.keys(ASKED[0])
        self.salted = engine.keys(ASKED[0], "s")
        (only_mine,) = prompts(1, seed=22)
        engine.generate([only_mine])
        self.only_mine = engine.keys(only_mine)[0]
        until_has(engine, daemon, *ASKED, only_mine)
        self.engine_id = engine.engine_id
        self.metrics = engine.metrics("vllm:kvstore_")
        (space,) = operator(daemon, "spaces")["spaces"]
        self.space_id: int = space["space_id"]
        self.fingerprint: dict[str, Any] = space["fingerprint"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of vLLM's own tier."""
    return tmp_path_factory.mktemp("fs")


def file_tier(files: Path) -> dict[str, Any]:
    """vLLM's own tier of files: what it does is shown beside what the store does."""
    return {"type": "fs", "root_dir": str(files)}


@pytest.fixture(scope="module")
def stored(
    model: Path, engines: Callable[..., Engine], daemon: Daemon, files: Path
) -> Iterator[tuple[Stored, Daemon]]:
    """Into both tiers."""
    daemon.start(START_S)
    tiers = [kvstore_tier(daemon.data_socket, **PATIENT), file_tier(files)]
    engine = engines(model, target=None, extra={"secondary_tiers": tiers}, disable_log_stats=False)
    made = Stored(engine, daemon)
    yield made, daemon
    check_ended_well(engine)


def explained(daemon: Daemon, space_id: int, key: str) -> tuple[str, list[str]]:
    """(reason, fields that differ) of a key in a space."""
    (told,) = operator(daemon, "explain", "--space", str(space_id), key)["keys"]
    return told["reason"], [difference["field"] for difference in told["differences"]]


def newest_space(daemon: Daemon) -> dict[str, Any]:
    spaces = operator(daemon, "spaces")["spaces"]
    return max(spaces, key=lambda space: int(space["space_id"]))


def test_what_is_stored_is_there_under_the_key_of_vllms_hash(
    stored: tuple[Stored, Daemon],
) -> None:
    first, daemon = stored
    assert len(first.keys) == STORED_TOKENS // BLOCK_TOKENS
    for key in first.keys:
        assert explained(daemon, first.space_id, key) == ("HIT", [])


def test_outcomes_are_among_vllms_own_metrics(stored: tuple[Stored, Daemon]) -> None:
    first, _ = stored
    blocks = len(ASKED) * STORED_TOKENS // BLOCK_TOKENS
    assert first.metrics["vllm:kvstore_tier_chunks store_stored"] >= blocks
    assert first.metrics["vllm:kvstore_tier_chunks lookup_miss"] >= blocks


def test_under_another_salt_nothing_was_ever_stored(stored: tuple[Stored, Daemon]) -> None:
    first, daemon = stored
    assert not set(first.salted) & set(first.keys)
    assert explained(daemon, first.space_id, first.salted[0])[0] == "MISS_NEVER_STORED"


def test_the_daemons_trace_names_engine_and_request(stored: tuple[Stored, Daemon]) -> None:
    first, daemon = stored
    with RawAdmin(daemon.admin_socket) as admin:
        records = [json.loads(line) for line in admin.call("Trace", last=1_000).records]
    mine = [record for record in records if record["engine_id"] == first.engine_id]
    for verb in ("lookup", "reserve", "commit"):
        traced = {record["request_id"] for record in mine if record["verb"] == verb}
        for request_id in first.request_ids:
            # vLLM adds what makes it unique.
            assert any(name.startswith(f"{request_id}-") for name in traced), (verb, traced)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"dtype": "bfloat16"}, "encoding.kv_dtype"), ({"block_size": 64}, "encoding.block_tokens")],
    ids=["dtype", "block size"],
)
def test_another_engine_restores_nothing(
    stored: tuple[Stored, Daemon],
    model: Path,
    engines: Callable[..., Engine],
    arguments: dict[str, Any],
    field: str,
) -> None:
    first, daemon = stored
    engine = engines(model, target=daemon.data_socket, **arguments)
    assert engine.generate(ASKED)["cached"] == [0, 0]
    space = newest_space(daemon)
    assert space["space_id"] != first.space_id
    reason, fields = explained(daemon, space["space_id"], unseen_key(first, daemon))
    assert reason == "MISS_INCOMPATIBLE"
    assert field in fields
    check_ended_well(engine)


def unseen_key(first: Stored, daemon: Daemon) -> str:
    """Of the prompt that only the first engine was asked."""
    assert explained(daemon, first.space_id, first.only_mine)[0] == "HIT"
    return first.only_mine


def test_other_weights_under_the_same_path_restore_nothing(
    stored: tuple[Stored, Daemon],
    model: Path,
    engines: Callable[..., Engine],
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM's own tier takes the path for the model, and serves the KV of the weights before."""
    first, daemon = stored
    kept = tmp_path / "kept"
    shutil.move(model, kept)
    try:
        write_model(model, 2)
        engine = engines(model, target=daemon.data_socket)
        stale = engines(model, target=None, extra={"secondary_tiers": [file_tier(files)]})
        done, served = engine.generate(ASKED), stale.generate(ASKED)
        space = newest_space(daemon)
        told = explained(daemon, space["space_id"], unseen_key(first, daemon))
        check_ended_well(engine)
        assert stale.stop() == 0
    finally:
        shutil.rmtree(model)
        shutil.move(kept, model)
    wrong = sum(a != b for a, b in zip(served["tokens"], done["tokens"], strict=True))
    with capsys.disabled():
        print(
            f"\nweights swapped under one path, {len(ASKED)} prompts of {len(ASKED[0])} tokens:\n"
            f"  kvstore         restored {done['cached']}, explain: {told[0]} {told[1]}\n"
            f"  vLLM's own (fs) restored {served['cached']}, wrong answers: {wrong}"
        )
    assert done["cached"] == [0, 0]
    assert done["tokens"] != first.tokens, "the weights are no others"
    assert told == ("MISS_INCOMPATIBLE", ["identity.weights_revision"])
    assert (served["cached"], wrong) == ([STORED_TOKENS] * 2, 2), "fs tells weights apart by now"


def test_weights_that_changed_while_the_engine_started_are_not_believed(
    stored: tuple[Stored, Daemon], model: Path, engines: Callable[..., Engine]
) -> None:
    """The file is touched when the process has begun: it may have read what was there before. What
    is stored is held; a person rejects it, and the engine goes on.
    """
    first, daemon = stored
    engine = engines(model, target=daemon.data_socket)
    file, begun_ns = model / "model.safetensors", time.time_ns()
    # Both clocks go by ticks, of 10 ms the process's and of less the inode's.
    while file.stat().st_ctime_ns < begun_ns + 20_000_000:
        file.chmod(0o600)
    assert engine.generate(ASKED)["cached"] == [0, 0]
    space = newest_space(daemon)
    assert space["state"] == "held"
    assert "weights_revision" not in space["fingerprint"]["identity"]
    assert "changed after the engine had begun" in engine.log()
    operator(daemon, "review", "reject", str(space["review_id"]), "--reason", "not believed")
    engine.reset(connector=False)
    for asked in (ASKED, prompts(2, seed=24)):
        done = engine.generate(asked)
        assert done["finish"] == ["length"] * 2
        assert asked is not ASKED or done["tokens"] == first.tokens
    assert "REJECTED" in engine.log()
    assert newest_space(daemon)["space_id"] != space["space_id"]
    check_ended_well(engine)


def test_the_control_corrupted_bytes_make_other_tokens(
    stored: tuple[Stored, Daemon], model: Path, engines: Callable[..., Engine]
) -> None:
    """So what is restored is what the model reads, and a test that compares tokens can fail."""
    first, daemon = stored
    engine = engines(
        model,
        target=daemon.data_socket,
        tier={"type": "CorruptingTier", "module_path": "tests.engines.corrupting"},
    )
    done = engine.generate(ASKED)
    assert done["cached"] == [STORED_TOKENS] * 2
    assert all(mine != right for mine, right in zip(done["tokens"], first.tokens, strict=True))
    check_ended_well(engine)


def test_an_engine_with_adapters_neither_stores_nor_restores(
    stored: tuple[Stored, Daemon], model: Path, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """A key tells an adapter's name and path, not what is in it: so the store is off, and says so.
    Then new content under the old name and path.
    """
    first, daemon = stored
    adapter = tmp_path / "adapter"
    write_model(adapter, 5, "adapter")
    before = stored_blocks(daemon)
    engine = engines(model, target=daemon.data_socket, enable_lora=True, max_lora_rank=8)
    done = engine.generate(ASKED)
    assert (done["cached"], done["tokens"]) == ([0, 0], first.tokens)
    adapted = engine.generate(ASKED, adapter=["mine", 1, str(adapter)])
    assert adapted["cached"] == [0, 0]
    write_model(adapter, 6, "adapter")
    engine.reset(connector=True)
    renewed = engine.generate(ASKED, adapter=["mine", 2, str(adapter)])
    assert renewed["cached"] == [0, 0]
    for at in range(2):
        made = {str(each["tokens"][at]) for each in (done, adapted, renewed)}
        assert len(made) == 3, "the adapters do not change what is computed"
    assert stored_blocks(daemon) == before
    assert "kvstore is off" in engine.log()
    assert "LoRA is enabled" in engine.log()
    assert engine.stop() == 0


def test_the_fingerprint_is_one_that_the_operators_tool_reads(
    stored: tuple[Stored, Daemon], tmp_path: Path
) -> None:
    first, daemon = stored
    file = tmp_path / "fingerprint.json"
    file.write_text(json.dumps(first.fingerprint))
    told = operator(daemon, "explain", "--fingerprint", str(file), first.keys[0])
    assert told["verdict"] == "match"
