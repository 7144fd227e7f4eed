"""vLLM with the store through outages: tokens are those without it, and what is stored is restored.

One life of one daemon, told in order: tests run from top to bottom and share their engines.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon
from tests.engines.kit import STORED_TOKENS, Engine, check_ended_well, operator, prompts

pytestmark = pytest.mark.timeout(900)

EARLY = prompts(2, seed=10)  # before there is a daemon
FIRST = prompts(3, seed=11)
DISK = prompts(3, seed=12)
FROZEN = prompts(2, seed=13)
THAWED = prompts(1, seed=14)
AWAY = prompts(2, seed=15)
KILLED = prompts(5, seed=16, length=1_500)
ALL = [*EARLY, *FIRST, *DISK, *FROZEN, *THAWED, *AWAY, *KILLED]

OUTAGE_S = 15.0
"""That a pass over a few prompts may take while nobody answers; alone it takes under a second."""
RECOVERY_S = 20.0


@pytest.fixture(scope="module")
def without(model: Path, engines: Callable[..., Engine]) -> dict[str, list[int]]:
    """Tokens of each prompt from an engine that has no store, prompts one by one."""
    engine = engines(model, target=None)
    tokens = {}
    for prompt in ALL:
        done = engine.generate([prompt])
        assert done["cached"] == [0]
        tokens[str(prompt)] = done["tokens"][0]
    assert len({str(made) for made in tokens.values()}) == len(ALL), "the model is too dull"
    assert engine.stop() == 0
    return tokens


@pytest.fixture(scope="module")
def writer(model: Path, engines: Callable[..., Engine], daemon: Daemon) -> Iterator[Engine]:
    """Started while there is no daemon."""
    assert not daemon.alive
    target = Path(daemon.settings["server.runtime_dir"]) / "data.sock"
    engine = engines(model, target=str(target), tier={"durable": True})
    yield engine
    check_ended_well(engine)


@pytest.fixture(scope="module")
def reader(
    model: Path, engines: Callable[..., Engine], daemon: Daemon, writer: Engine
) -> Iterator[Engine]:
    """Another process with the same model, after the writer has stored everything."""
    engine = engines(model, target=daemon.data_socket)
    yield engine
    check_ended_well(engine)


def check(
    engine: Engine,
    asked: list[list[int]],
    without: dict[str, list[int]],
    restored: int | None,
    **more: Any,
) -> float:
    """Tokens are those without a store, and so many tokens of each prompt were not computed; None:
    any number. Returns the seconds that it took.
    """
    done = engine.generate(asked, **more)
    assert done["tokens"] == [without[str(prompt)] for prompt in asked]
    assert done["finish"] == ["length"] * len(asked)
    if restored is not None:
        assert done["cached"] == [restored] * len(asked), engine.log()[-2000:]
    seconds: float = done["s"]
    return seconds


def until_in_use(engine: Engine, daemon: Daemon, without: dict[str, list[int]]) -> None:
    """The same prompt under one salt after the other, until what it computes is stored."""
    end = time.monotonic() + RECOVERY_S
    before = _stored(daemon)
    while time.monotonic() < end:
        check(engine, THAWED, without, 0, salt=f"recovery {next(_salts)}")
        if _stored(daemon) > before:
            return
    raise AssertionError(f"not in use again after {RECOVERY_S} s:\n{engine.log()[-3000:]}")


_salts = itertools.count()


def _stored(daemon: Daemon) -> int:
    return sum(int(space["blocks"]) for space in operator(daemon, "spaces")["spaces"])


def test_without_a_daemon_the_engine_starts_and_answers(
    writer: Engine, without: dict[str, list[int]]
) -> None:
    assert check(writer, EARLY, without, 0) < OUTAGE_S


def test_a_daemon_that_comes_later_is_used(
    writer: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    daemon.start()
    until_in_use(writer, daemon, without)
    for asked in (FIRST, DISK, FROZEN, KILLED):
        check(writer, asked, without, 0)


def test_a_new_process_restores_what_another_stored(
    reader: Engine, without: dict[str, list[int]]
) -> None:
    check(reader, FIRST, without, STORED_TOKENS)


def test_another_salt_restores_nothing(reader: Engine, without: dict[str, list[int]]) -> None:
    check(reader, FIRST, without, 0, salt="another tenant")


def test_a_frozen_daemon_is_a_miss_and_is_used_again_when_it_thaws(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    daemon.signal(signal.SIGSTOP)
    try:
        assert check(reader, FROZEN, without, 0) < OUTAGE_S
    finally:
        daemon.signal(signal.SIGCONT)
    until_in_use(reader, daemon, without)


@pytest.mark.parametrize("index", range(len(KILLED)))
def test_a_daemon_killed_while_it_is_asked_costs_no_token(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]], index: int
) -> None:
    """At another moment each: while it looks up, loads, or after."""
    delay_s = random.Random(index).uniform(0.0, 0.12)
    killer = threading.Timer(delay_s, daemon.kill)
    killer.start()
    took_s = check(reader, [KILLED[index]], without, None)
    killer.join()
    daemon.start()
    assert took_s < OUTAGE_S, f"killed after {delay_s} s"


def test_a_dead_daemon_is_a_miss(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    daemon.kill()
    assert check(reader, AWAY, without, 0) < OUTAGE_S


def test_what_was_stored_is_restored_from_disk_after_a_kill(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    daemon.start()
    until_in_use(reader, daemon, without)
    check(reader, DISK, without, STORED_TOKENS)


def test_after_a_reset_nothing_that_was_stored_before_is_used(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    """vLLM resets the connector after an update of the weights, which may be others then."""
    reader.send({"reset": True, "connector": True})
    assert reader.receive()["reset"]
    check(reader, DISK, without, 0)
    held = [space for space in operator(daemon, "spaces")["spaces"] if space["state"] == "held"]
    assert [space["fingerprint"]["identity"]["weight_epoch"] for space in held] == [1]
