"""vLLM with the store through outages: tokens are those without it, and what is stored is restored.

One life of one daemon, told in order: tests run from top to bottom and share their engines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, make_daemon
from tests.engines.kit import (
    START_S,
    STORED_TOKENS,
    Engine,
    check_ended_well,
    operator,
    prompts,
    stored_blocks,
    until_has,
    until_in_use,
)
from tests.rawclient import RawAdmin

_fresh = itertools.count(2_000_000)

pytestmark = pytest.mark.timeout(900)

EARLY = prompts(2, seed=10)  # before there is a daemon
FIRST = prompts(3, seed=11)
DISK = prompts(3, seed=12)
FROZEN = prompts(2, seed=13)
LOADING = prompts(1, seed=14, length=1_500)
AWAY = prompts(2, seed=15)
KILLED = prompts(5, seed=16, length=1_500)
UNSEEN = prompts(2, seed=17)  # asked while the daemon is frozen
FULL = prompts(6, seed=19)
REJECTED = prompts(1, seed=20)
ALL = [*EARLY, *FIRST, *DISK, *FROZEN, *LOADING, *AWAY, *KILLED, *UNSEEN, *FULL, *REJECTED]

DEADLINES = {"lookup_deadline_ms": 1_000, "load_deadline_ms": 4_000, "store_deadline_ms": 5_000}
OUTAGE_S = 15.0
"""That a pass over a few prompts may take while nobody answers; alone it takes under a second."""
FROZEN_S = 30.0
"""Longer than any deadline, and than the daemon gives a client that is silent."""
SMALL: dict[str, Any] = {"host__capacity_bytes": "4MiB", "host__staging_bytes": "512KiB"}
SMALL_BLOCKS = 28


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
    engine = engines(model, target=str(target), tier={**DEADLINES, "durable": True})
    yield engine
    check_ended_well(engine)


@pytest.fixture(scope="module")
def reader(
    model: Path, engines: Callable[..., Engine], daemon: Daemon, writer: Engine
) -> Iterator[Engine]:
    """Another process with the same model, after the writer has stored everything."""
    engine = engines(model, target=daemon.data_socket, tier=DEADLINES)
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


def test_without_a_daemon_the_engine_starts_and_answers(
    writer: Engine, without: dict[str, list[int]]
) -> None:
    assert check(writer, EARLY, without, 0) < OUTAGE_S


def test_a_daemon_that_comes_later_is_used(
    writer: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    daemon.start(START_S)
    until_in_use(writer, daemon)
    for prompt in (*FIRST, *DISK, *FROZEN, *LOADING, *KILLED):
        check(writer, [prompt], without, 0)
        until_has(writer, daemon, prompt)


def test_a_new_process_restores_what_another_stored(
    reader: Engine, without: dict[str, list[int]]
) -> None:
    check(reader, FIRST, without, STORED_TOKENS)


def test_another_salt_restores_nothing(reader: Engine, without: dict[str, list[int]]) -> None:
    check(reader, FIRST, without, 0, salt="another tenant")


def test_a_frozen_daemon_is_a_miss_and_nothing_is_written_when_it_thaws(
    reader: Engine, writer: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    """Frozen about when it loads, for longer than all deadlines: by then vLLM has given the rows to
    others. Neither they nor what the store has may change afterwards.
    """
    freezer = threading.Timer(0.05, daemon.signal, [signal.SIGSTOP])
    begun = time.monotonic()
    freezer.start()
    try:
        assert check(reader, LOADING, without, None) < OUTAGE_S
        freezer.join()
        for asked in (FROZEN, UNSEEN):
            assert check(reader, asked, without, 0) < OUTAGE_S
        time.sleep(max(0.0, begun + FROZEN_S - time.monotonic()))
        rows = reader.rows()
    finally:
        daemon.signal(signal.SIGCONT)
    stored_blocks(daemon)  # it answers again
    time.sleep(1.0)
    assert reader.rows() == rows
    until_in_use(reader, daemon)
    until_in_use(writer, daemon)
    check(writer, UNSEEN, without, None)


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
    daemon.start(START_S)
    assert took_s < OUTAGE_S, f"killed after {delay_s} s"


def test_a_dead_daemon_is_a_miss(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    daemon.kill()
    assert check(reader, AWAY, without, 0) < OUTAGE_S


@contextlib.contextmanager
def in_its_place(daemon: Daemon, folder: Path, **settings: Any) -> Iterator[Daemon]:
    """Another daemon on the sockets of this one, which is dead."""
    runtime = daemon.settings["server.runtime_dir"]
    other = make_daemon(folder, server__runtime_dir=runtime, **settings).start(START_S)
    try:
        yield other
    finally:
        other.kill()


def test_a_daemon_that_is_full_gives_up_other_blocks_and_the_engine_goes_on(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]], tmp_path: Path
) -> None:
    """Of less than half of what is stored in it."""
    with in_its_place(daemon, tmp_path, **SMALL) as small:
        until_in_use(reader, small)
        for prompt in FULL:
            check(reader, [prompt], without, 0)
        check(reader, FULL, without, None)
        assert 0 < stored_blocks(small) <= SMALL_BLOCKS


def test_a_daemon_that_rejects_what_it_is_given_costs_no_token(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]], tmp_path: Path
) -> None:
    """Whatever the engine stores is larger than this daemon takes."""
    with in_its_place(daemon, tmp_path, host__staging_bytes="64KiB") as strict:
        check(reader, REJECTED, without, 0)
        until_refused(reader, strict, "PART_TOO_LARGE")
        assert stored_blocks(strict) == 0


def until_refused(engine: Engine, daemon: Daemon, reason: str) -> None:
    """Until the daemon has answered so; what it remembers of calls tells."""
    end = time.monotonic() + OUTAGE_S
    while True:
        with RawAdmin(daemon.admin_socket) as admin:
            records = map(json.loads, admin.call("Trace", last=1_000).records)
            reasons = {record["reason"] for record in records}
        if reason in reasons:
            return
        assert time.monotonic() < end, reasons
        engine.generate(prompts(1, seed=next(_fresh)), max_tokens=1)


def test_what_was_stored_is_restored_from_disk_after_a_kill(
    reader: Engine, daemon: Daemon, without: dict[str, list[int]]
) -> None:
    daemon.start(START_S)
    until_in_use(reader, daemon)
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
