"""What one vLLM engine has computed, another one goes on with: prefixes, conversations, ranks,
prefill in one process and decoding in another, and an engine that is killed in the middle.

One store and its engines in order: tests run from top to bottom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.keys import BlockKey
from kvstore_client import Client
from tests.daemon import Daemon
from tests.engines.kit import (
    BLOCK_TOKENS,
    PROMPT_TOKENS,
    START_S,
    STORED_TOKENS,
    Engine,
    check_ended_well,
    has,
    operator,
    prompts,
    until_has,
    until_in_use,
)

pytestmark = pytest.mark.timeout(900)

KNOWN = prompts(2, seed=41)
BASE, *TAILS = prompts(4, seed=42)
SHARED = [BASE[: 5 * BLOCK_TOKENS] + tail[:140] for tail in TAILS[:2]]
LONGER = BASE[: 7 * BLOCK_TOKENS] + TAILS[2][:76]
CORRUPT, INCOMPLETE = prompts(2, seed=43)
(LONG,) = prompts(1, seed=44, length=2_000)
RACED = prompts(2, seed=45)
HANDED_OVER = prompts(2, seed=46)
(CONVERSATION,) = prompts(1, seed=47)
BATCH = prompts(12, seed=48, length=1_500)
CHECKED = [*KNOWN, BASE, *SHARED, LONGER, CORRUPT, INCOMPLETE, *RACED, *HANDED_OVER, *BATCH[:3]]

SAID_TOKENS = 240
"""Of the answer, when the conversation is resumed; more is generated."""
TURN_TOKENS = 1_700
LOGPROBS = 5


class Reference:
    """What an engine without a store answers."""

    def __init__(self, engine: Engine) -> None:
        self._tokens = {}
        for prompt in CHECKED:
            (self._tokens[str(prompt)],) = engine.generate([prompt])["tokens"]
        assert len({str(made) for made in self._tokens.values()}) == len(CHECKED), (
            "too dull a model"
        )
        done = engine.generate([LONG], logprobs=LOGPROBS)
        (self.long_tokens,), (self.logprobs,) = done["tokens"], done["logprobs"]
        (self.answer,) = engine.generate([CONVERSATION], max_tokens=SAID_TOKENS + 32)["tokens"]

    def of(self, asked: list[list[int]]) -> list[list[int]]:
        return [self._tokens[str(prompt)] for prompt in asked]


@pytest.fixture(scope="module")
def reference(model: Path, engines: Callable[..., Engine]) -> Reference:
    engine = engines(model, target=None)
    made = Reference(engine)
    assert engine.stop() == 0
    return made


@pytest.fixture(scope="module")
def first(model: Path, engines: Callable[..., Engine], daemon: Daemon) -> Engine:
    """It ends by `kill -9`, in the last test."""
    daemon.start(START_S)
    return engines(model, target=daemon.data_socket, tier={"durable": True})


@pytest.fixture(scope="module")
def second(model: Path, engines: Callable[..., Engine], daemon: Daemon) -> Iterator[Engine]:
    engine = engines(model, target=daemon.data_socket)
    yield engine
    check_ended_well(engine)


def check(
    engine: Engine, reference: Reference, asked: list[list[int]], restored: list[int]
) -> None:
    """Tokens are those without a store, and so many of each prompt were not computed."""
    done = engine.generate(asked)
    assert done["tokens"] == reference.of(asked)
    assert done["cached"] == restored, engine.log()[-3000:]


def test_cold_and_warm_in_one_engine(first: Engine, daemon: Daemon, reference: Reference) -> None:
    check(first, reference, KNOWN, [0, 0])
    check(first, reference, KNOWN, [STORED_TOKENS] * 2)
    asked = [BASE, CORRUPT, INCOMPLETE, *RACED[:1]]
    for prompt in asked:
        check(first, reference, [prompt], [0])
    until_has(first, daemon, *KNOWN, *asked)


def test_the_logprobs_of_a_long_restored_prefix_are_those_of_a_computed_one(
    first: Engine, second: Engine, daemon: Daemon, reference: Reference
) -> None:
    cold = first.generate([LONG], logprobs=LOGPROBS)
    until_has(first, daemon, LONG)
    warm = second.generate([LONG], logprobs=LOGPROBS)
    assert cold["cached"] == [0]
    assert warm["cached"] == [len(LONG) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert warm["tokens"] == [reference.long_tokens]
    assert len(warm["logprobs"][0][0]) == LOGPROBS
    assert warm["logprobs"] == cold["logprobs"] == [reference.logprobs]


def test_prompts_that_begin_alike_share_their_beginning(
    second: Engine, reference: Reference
) -> None:
    check(second, reference, SHARED, [5 * BLOCK_TOKENS] * 2)
    # Its first five blocks vLLM has by now itself, the two after them the store.
    check(second, reference, [LONGER], [7 * BLOCK_TOKENS])


def test_a_missing_row_ends_what_is_restored(
    first: Engine, second: Engine, daemon: Daemon, reference: Reference
) -> None:
    (space,) = operator(daemon, "spaces")["spaces"]
    key = first.keys(INCOMPLETE)[6]
    operator(daemon, "invalidate", "--space", str(space["space_id"]), key)
    check(second, reference, [INCOMPLETE], [6 * BLOCK_TOKENS])


def test_a_row_that_the_disk_has_corrupted_is_not_restored(
    first: Engine, second: Engine, daemon: Daemon, reference: Reference
) -> None:
    (space,) = operator(daemon, "spaces")["spaces"]
    (key,) = [BlockKey(bytes.fromhex(first.keys(CORRUPT)[4]))]
    with Client(daemon.data_socket) as client:
        fetched = client.space(Fingerprint.from_dict(space["fingerprint"])).fetch([key])
        assert fetched.blocks == 1
        row = bytes(memoryview(fetched.data).cast("B"))
    assert daemon.stop() == 0
    flip(Path(daemon.settings["disk.path"]), row)
    daemon.restart()
    until_in_use(second, daemon)
    check(second, reference, [CORRUPT], [4 * BLOCK_TOKENS])
    until_in_use(first, daemon)


def flip(folder: Path, row: bytes) -> None:
    """A bit of the record that holds this row."""
    for path in (folder / "segments").iterdir():
        at = path.read_bytes().find(row)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 5_000)
                file.write(bytes([row[5_000] ^ 1]))
            return
    raise AssertionError("no record holds this row")


def test_two_engines_that_compute_the_same_at_the_same_time(
    first: Engine, second: Engine, reference: Reference
) -> None:
    """They store the same keys; whoever is first, both answer right."""
    for engine in (first, second):
        engine.send({"prompts": RACED[1:]})
    for engine in (first, second):
        assert engine.receive()["tokens"] == reference.of(RACED[1:])


def test_one_engine_prefills_and_another_decodes(
    first: Engine, second: Engine, daemon: Daemon, reference: Reference
) -> None:
    done = first.generate(HANDED_OVER, max_tokens=1)
    assert done["tokens"] == [tokens[:1] for tokens in reference.of(HANDED_OVER)]
    until_has(first, daemon, *HANDED_OVER)
    check(second, reference, HANDED_OVER, [STORED_TOKENS] * 2)


def until_has_of(engine: Engine, daemon: Daemon, keys: list[str]) -> None:
    """While the engine computes."""
    while not has(daemon, keys):
        assert engine.process.poll() is None
        assert not engine.has_answered(), "nothing was stored while it computed"
        time.sleep(0.02)


def test_what_a_prefiller_did_not_get_to_the_other_computes(
    model: Path,
    engines: Callable[..., Engine],
    second: Engine,
    daemon: Daemon,
    reference: Reference,
) -> None:
    prefiller = engines(model, target=daemon.data_socket, max_num_batched_tokens=256)
    keys = prefiller.keys(BATCH[0])
    prefiller.send({"prompts": BATCH, "max_tokens": 1})
    until_has_of(prefiller, daemon, keys[:1])
    prefiller.kill()
    done = second.generate(BATCH[:3])
    assert done["tokens"] == reference.of(BATCH[:3])
    assert done["cached"][0] > 0, "nothing of what it had stored was restored"


def test_a_conversation_goes_on_warm_after_its_engine_was_killed_in_mid_answer(
    first: Engine, second: Engine, daemon: Daemon, reference: Reference
) -> None:
    """Warm up to the answer's last whole block: `offload_prompt_only` is off."""
    blocks = (PROMPT_TOKENS + SAID_TOKENS) // BLOCK_TOKENS
    begun = CONVERSATION + reference.answer[:SAID_TOKENS]
    keys = first.keys(begun)
    first.send({"prompts": [CONVERSATION], "max_tokens": TURN_TOKENS})
    until_has_of(first, daemon, keys)
    log = first.log()
    first.kill()
    assert "kvstore is off" not in log
    done = second.generate([begun])
    assert done["cached"] == [blocks * BLOCK_TOKENS]
    assert done["tokens"] == [reference.answer[SAID_TOKENS:]]
