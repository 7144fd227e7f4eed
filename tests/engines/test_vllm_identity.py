"""Who shares with whom under vLLM: same bytes or nothing, and the operator is told why.

Each engine here has the same prompts and the same store as the first one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon
from tests.engines.conftest import write_model
from tests.engines.kit import STORED_TOKENS, Engine, check_ended_well, operator, prompts

pytestmark = pytest.mark.timeout(900)

ASKED = prompts(2, seed=21)


class Stored:
    """What the first engine has stored, and under which fingerprint."""

    def __init__(self, engine: Engine, daemon: Daemon) -> None:
        self.tokens = engine.generate(ASKED)["tokens"]
        self.keys: list[str] = keys_of(engine, ASKED[0])
        self.salted: list[str] = keys_of(engine, ASKED[0], "s")
        (only_mine,) = prompts(1, seed=22)
        engine.generate([only_mine])
        self.only_mine: str = keys_of(engine, only_mine)[0]
        engine.generate(prompts(1, seed=23))  # a step more, so that the last store has begun
        engine.send({"metrics": "vllm:kvstore_"})
        self.metrics: dict[str, float] = engine.receive()["metrics"]
        (space,) = operator(daemon, "spaces")["spaces"]
        self.space_id: int = space["space_id"]
        self.fingerprint: dict[str, Any] = space["fingerprint"]


def keys_of(engine: Engine, prompt: list[int], salt: str = "") -> list[str]:
    engine.send({"keys": prompt, "salt": salt})
    keys: list[str] = engine.receive()["keys"]
    return keys


@pytest.fixture(scope="module")
def stored(
    model: Path, engines: Callable[..., Engine], daemon: Daemon
) -> Iterator[tuple[Stored, Daemon]]:
    daemon.start()
    engine = engines(model, target=daemon.data_socket, disable_log_stats=False)
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
    assert len(first.keys) == STORED_TOKENS // 32
    for key in first.keys:
        assert explained(daemon, first.space_id, key) == ("HIT", [])


def test_outcomes_are_among_vllms_own_metrics(stored: tuple[Stored, Daemon]) -> None:
    first, _ = stored
    blocks = len(ASKED) * STORED_TOKENS // 32
    assert first.metrics["vllm:kvstore_tier_chunks store_stored"] >= blocks
    assert first.metrics["vllm:kvstore_tier_chunks lookup_miss"] >= blocks


def test_under_another_salt_nothing_was_ever_stored(stored: tuple[Stored, Daemon]) -> None:
    first, daemon = stored
    assert not set(first.salted) & set(first.keys)
    assert explained(daemon, first.space_id, first.salted[0])[0] == "MISS_NEVER_STORED"


@pytest.mark.parametrize(
    ("arguments", "field", "same_keys"),
    [
        ({"dtype": "float32"}, "encoding.kv_dtype", True),
        ({"block_size": 64}, "encoding.block_tokens", False),
    ],
    ids=["dtype", "block size"],
)
def test_another_engine_restores_nothing(
    stored: tuple[Stored, Daemon],
    model: Path,
    engines: Callable[..., Engine],
    arguments: dict[str, Any],
    field: str,
    same_keys: bool,
) -> None:
    """With other blocks the keys are others too, and the spaces show in what they differ."""
    first, daemon = stored
    engine = engines(model, target=daemon.data_socket, **arguments)
    assert engine.generate(ASKED)["cached"] == [0, 0]
    space = newest_space(daemon)
    assert space["space_id"] != first.space_id
    group, _, name = field.partition(".")
    assert space["fingerprint"][group][name] != first.fingerprint[group][name]
    if same_keys:
        # Its own blocks are there by now; those of a prompt that it has not seen are not.
        reason, fields = explained(daemon, space["space_id"], unseen_key(first, daemon))
        assert reason == "MISS_INCOMPATIBLE"
        assert field in fields
    check_ended_well(engine)


def unseen_key(first: Stored, daemon: Daemon) -> str:
    """Of the prompt that only the first engine was asked."""
    assert explained(daemon, first.space_id, first.only_mine)[0] == "HIT"
    return first.only_mine


def test_other_weights_under_the_same_path_restore_nothing(
    stored: tuple[Stored, Daemon], model: Path, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    first, daemon = stored
    kept = tmp_path / "kept"
    shutil.move(model, kept)
    try:
        write_model(model, 2)
        engine = engines(model, target=daemon.data_socket)
        done = engine.generate(ASKED)
        assert done["cached"] == [0, 0]
        assert done["tokens"] != first.tokens, "the weights are no others"
        space = newest_space(daemon)
        assert explained(daemon, space["space_id"], unseen_key(first, daemon)) == (
            "MISS_INCOMPATIBLE",
            ["identity.weights_revision"],
        )
        check_ended_well(engine)
    finally:
        shutil.rmtree(model)
        shutil.move(kept, model)


def test_weights_that_changed_while_the_engine_started_are_not_believed(
    stored: tuple[Stored, Daemon], model: Path, engines: Callable[..., Engine]
) -> None:
    """The file is touched when the process has begun: it may have read what was there before."""
    _, daemon = stored
    engine = engines(model, target=daemon.data_socket)
    file = model / "model.safetensors"
    file.chmod(0o600)
    assert engine.generate(ASKED)["cached"] == [0, 0]
    space = newest_space(daemon)
    assert space["state"] == "held"
    assert "weights_revision" not in space["fingerprint"]["identity"]
    assert "changed after the engine had begun" in engine.log()
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


def test_a_wrong_option_switches_the_store_off_and_nothing_else(
    stored: tuple[Stored, Daemon], model: Path, engines: Callable[..., Engine]
) -> None:
    first, daemon = stored
    engine = engines(model, target=daemon.data_socket, tier={"targt": "typo"})
    done = engine.generate(ASKED)
    assert (done["cached"], done["tokens"]) == ([0, 0], first.tokens)
    assert "kvstore is off" in engine.log()
    assert "targt: no such option" in engine.log()
    assert engine.stop() == 0


def test_the_fingerprint_is_one_that_the_operators_tool_reads(
    stored: tuple[Stored, Daemon], tmp_path: Path
) -> None:
    first, daemon = stored
    file = tmp_path / "fingerprint.json"
    file.write_text(json.dumps(first.fingerprint))
    told = operator(daemon, "explain", "--fingerprint", str(file), first.keys[0])
    assert told["verdict"] == "match"
