"""A daemon that is away, killed in mid-call, restarted or frozen: every call of the SDK returns by
its deadline, as a miss, and the same object works again as soon as the daemon does.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding
from kvstore_client import AsyncClient, Client, ClientConfig, KVStoreError
from tests.daemon import Daemon, make_daemon
from tests.e2e.stage import (
    Child,
    Prompt,
    assert_quiet,
    model,
    record,
    resident_bytes,
    seconds_until,
    until,
)
from tests.rawclient import RawAdmin

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
Note = Callable[[str, object], None]

MODEL = model(1 << 16)
PROMPT = Prompt(MODEL, 1, blocks=16)
ROWS = np.stack(PROMPT.rows())
DEADLINE_MS = 200
LATE_S = 0.1
"""How far beyond its deadline a call may return; tests allow ten times of it and record it."""
BACK_S = 1.0
"""How soon after the daemon's return a client is of use again; likewise."""
MEMORY_S = 2.0
"""How soon a dead daemon's memory is free although its client is idle; likewise."""
SLACK = 10

AWAY = {
    Reason.UNAVAILABLE,
    Reason.BREAKER_OPEN,
    Reason.DEADLINE_EXCEEDED,
    Reason.SESSION_UNKNOWN,
    Reason.CANCELLED,
    Reason.DRAINING,
}
MISSES = {Reason.MISS_NEVER_STORED, Reason.GENERATION_CHANGED, Reason.MISS_IN_PROGRESS}


class Caller:
    """Makes every kind of call with one client, and keeps how late the latest one was."""

    def __init__(self, client: Client) -> None:
        self.space = client.space(MODEL)
        self.out = np.empty_like(ROWS)
        self.worst_s = 0.0
        self.wrong = 0
        self.reasons: set[Reason] = set()

    def calls(self) -> dict[str, Callable[[], tuple[Reason, int]]]:
        """(reason, blocks) of each call."""
        return {
            "status": self._status,
            "lookup": self._lookup,
            "fetch": self._fetch,
            "fetch and wait": self._fetch_and_wait,
            "view": self._view,
            "push": self._push,
            "explain": self._explain,
        }

    def all(self) -> None:
        """Each once; whatever they answer, in time."""
        for call in self.calls().values():
            self.timed(call)

    def timed(self, call: Callable[[], tuple[Reason, int]]) -> tuple[Reason, int]:
        started = time.monotonic()
        answered, blocks = call()
        self.worst_s = max(self.worst_s, time.monotonic() - started - DEADLINE_MS / 1e3)
        self.reasons.add(answered)
        return answered, blocks

    def works(self) -> bool:
        """Puts if need be, and gets all of it back right."""
        if self._fetch()[1] < len(ROWS):
            self._push()
            return False
        return True

    def _status(self) -> tuple[Reason, int]:
        return self.space.status(deadline_ms=DEADLINE_MS).reason, 0

    def _lookup(self) -> tuple[Reason, int]:
        hit = self.space.lookup(PROMPT.keys, deadline_ms=DEADLINE_MS)
        return hit.reason, hit.blocks

    def _fetch(self, wait_ms: int = 0) -> tuple[Reason, int]:
        self.out[:] = 0
        got = self.space.fetch(PROMPT.keys, self.out, wait_ms=wait_ms, deadline_ms=DEADLINE_MS)
        self._check(self.out, got.blocks)
        return got.reason, got.blocks

    def _fetch_and_wait(self) -> tuple[Reason, int]:
        return self._fetch(wait_ms=5_000)

    def _view(self) -> tuple[Reason, int]:
        with self.space.view(PROMPT.keys, deadline_ms=DEADLINE_MS) as views:
            copies = [np.array(array) for array in views.arrays]
        if views.valid:
            self._check(np.array(copies), len(copies))
        return views.reason, len(copies)

    def _push(self) -> tuple[Reason, int]:
        pushed = self.space.push(PROMPT.keys, ROWS, deadline_ms=DEADLINE_MS)
        return pushed.reason, pushed.stored

    def _explain(self) -> tuple[Reason, int]:
        try:
            return Reason.OK, len(self.space.explain(PROMPT.keys, deadline_ms=DEADLINE_MS))
        except KVStoreError as refused:
            return refused.reason, 0

    def _check(self, rows: np.ndarray, blocks: int) -> None:
        for index in range(blocks):
            self.wrong += PROMPT.finding(index, rows[index]) is not Finding.RIGHT


def assert_in_time(caller: Caller, note: Note, name: str) -> None:
    record(note, f"latest_call_{name}", max(0.0, caller.worst_s))
    assert caller.worst_s < LATE_S * SLACK
    assert caller.wrong == 0


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Calls without pause from another thread."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                caller.all()
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        assert not failures


@pytest.fixture
def config() -> ClientConfig:
    return ClientConfig(deadline_ms=DEADLINE_MS)


def test_away_from_the_start_then_there(
    tmp_path: Path, config: ClientConfig, record_property: Note
) -> None:
    daemon = make_daemon(tmp_path, host__capacity_bytes="16MiB")
    path = str(tmp_path / "run" / "data.sock")
    with Client(path, config=config) as client, daemon:
        caller = Caller(client)
        for _ in range(4):
            for name, call in caller.calls().items():
                answered, blocks = caller.timed(call)
                assert answered in AWAY, name
                assert blocks == 0
        assert_in_time(caller, record_property, "away")
        # Once it is known to be away, calls cost next to nothing.
        started = time.monotonic()
        for _ in range(100):
            caller.timed(caller.calls()["lookup"])
        record(record_property, "call_while_known_away", (time.monotonic() - started) / 100)
        assert time.monotonic() - started < 100 * 0.01
        daemon.start()
        back_s = seconds_until("the client works", caller.works, BACK_S * SLACK)
        record(record_property, "works_after_first_start", back_s)


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_restarted_under_load(
    daemons: Daemons, config: ClientConfig, record_property: Note, ending: str
) -> None:
    daemon = daemons(host__capacity_bytes="16MiB", server__drain_grace_s=1)
    seed = 99
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Client(daemon.data_socket, config=config) as client:
        caller, other = Caller(client), Caller(client)
        until("the client works", caller.works)
        worst_back_s = 0.0
        for _ in range(5):
            with calling(other):
                time.sleep(rng.uniform(0.05, 0.25))
                getattr(daemon, ending)()  # most likely in the middle of a call
                for _ in range(3):
                    caller.all()
            daemon.start()
            back_s = seconds_until("the client works", caller.works, BACK_S * SLACK)
            worst_back_s = max(worst_back_s, back_s)
        record(record_property, f"works_after_{ending}", worst_back_s)
        assert_in_time(caller, record_property, ending)
        assert_in_time(other, record_property, f"{ending}_under_load")
        unexpected = (caller.reasons | other.reasons) - AWAY - MISSES
        print(f"reasons seen: {sorted(reason.name for reason in unexpected)}")
        assert Reason.INTERNAL not in unexpected
        assert Reason.UNSPECIFIED not in unexpected
    with RawAdmin(daemon.admin_socket) as admin:
        assert_quiet(admin)


def test_frozen_and_thawed(daemons: Daemons, config: ClientConfig, record_property: Note) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    with Client(daemon.data_socket, config=config) as client:
        caller, other = Caller(client), Caller(client)
        until("the client works", caller.works)
        worst_back_s = 0.0
        for _ in range(2):
            with calling(other):
                daemon.signal(signal.SIGSTOP)
                try:
                    for _ in range(3):
                        caller.all()
                finally:
                    daemon.signal(signal.SIGCONT)
                back_s = seconds_until("the client works", caller.works, BACK_S * SLACK)
                worst_back_s = max(worst_back_s, back_s)
        record(record_property, "works_after_thaw", worst_back_s)
        assert_in_time(caller, record_property, "frozen")
        assert_in_time(other, record_property, "frozen_under_load")
    with RawAdmin(daemon.admin_socket) as admin:
        assert_quiet(admin)


def test_asyncio_calls_return_in_time_too(
    daemons: Daemons, config: ClientConfig, record_property: Note
) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    worst_s = asyncio.run(_freeze_under_asyncio(daemon, config))
    record(record_property, "latest_call_asyncio", max(0.0, worst_s))
    assert worst_s < LATE_S * SLACK


async def _freeze_under_asyncio(daemon: Daemon, config: ClientConfig) -> float:
    async def timed(call: Any) -> float:
        started = time.monotonic()
        await call
        return time.monotonic() - started - DEADLINE_MS / 1e3

    async with AsyncClient(daemon.data_socket, config=config) as client:
        space = client.space(MODEL)
        assert (await space.push(PROMPT.keys, ROWS, deadline_ms=5_000)).stored == 16
        daemon.signal(signal.SIGSTOP)
        try:
            calls = [
                *(space.lookup(PROMPT.keys) for _ in range(8)),
                *(space.fetch(PROMPT.keys) for _ in range(8)),
                *(space.push(PROMPT.keys, ROWS) for _ in range(8)),
            ]
            late = await asyncio.gather(*map(timed, calls))
        finally:
            daemon.signal(signal.SIGCONT)
        end = time.monotonic() + BACK_S * SLACK
        while (await space.fetch(PROMPT.keys)).blocks < 16:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        return max(late)


def test_no_push_is_said_to_be_stored_that_is_not(daemons: Daemons, config: ClientConfig) -> None:
    """Killed in the middle of pushes: what was answered as stored was visible."""
    daemon = daemons(host__capacity_bytes="32MiB")
    with Client(daemon.data_socket, config=config) as client:
        space = client.space(MODEL)
        for turn in range(4):
            killer = threading.Timer(0.02 * turn + 0.01, daemon.kill)
            killer.start()
            seen_before_death = 0
            for number in range(200):
                prompt = Prompt(MODEL, 1_000 * turn + number, blocks=4)
                pushed = space.push(prompt.keys, np.stack(prompt.rows()))
                fetched = space.fetch(prompt.keys)
                if fetched.blocks:
                    seen_before_death += 1
                    rows = np.asarray(fetched.data)
                    prompt.assert_right(list(rows[: fetched.blocks]))
                    assert fetched.blocks == 4
                elif pushed.stored:
                    assert fetched.reason in AWAY
                if not daemon.alive:
                    break
            killer.join()
            assert not daemon.alive
            daemon.start()
            until("the client works", Caller(client).works)
            assert space.lookup(Prompt(MODEL, 1_000 * turn, blocks=4).keys).blocks == 0


# ---------------------------------------------------------------- memory


def test_a_dead_daemons_memory_is_free_although_its_client_is_idle(
    daemons: Daemons, record_property: Note
) -> None:
    daemon = daemons(host__capacity_bytes="64MiB")
    worst_s = 0.0
    for _ in range(3):
        with Child("sdk_idle", daemon.data_socket, 1) as child:
            assert child.hear()["right"] == 256
            before = resident_bytes(child.pid, mapped="memfd:kvstore")
            assert before >= 16 << 20
            with_daemon = shared_bytes()
            daemon.kill()
            seconds = seconds_until(
                "the client has let go",
                lambda pid=child.pid: not resident_bytes(pid, mapped="memfd:kvstore"),  # type: ignore[misc]
                MEMORY_S * SLACK,
            )
            worst_s = max(worst_s, seconds)
            freed = with_daemon - shared_bytes()
            record(record_property, "shared_memory_freed", freed / (1 << 20), "MiB")
            daemon.start()
            # Not a call was made until here; the same object goes on with the new daemon.
            assert child.ask("again")["right"] == 256
    record(record_property, "memory_freed_after_kill_with_idle_client", worst_s)


def shared_bytes() -> int:
    """Shmem of the whole machine: others move it too, so it is recorded, not asserted."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    return 0


def test_views_from_before_a_restart_are_refused(daemons: Daemons, config: ClientConfig) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    with Client(daemon.data_socket, config=config) as client:
        caller = Caller(client)
        until("the client works", caller.works)
        with caller.space.view(PROMPT.keys) as views:
            assert views.valid
            kept = [np.array(array) for array in views.arrays]
            daemon.kill()
            daemon.start()
            until("the client has noticed", lambda: not views.valid)
        for index, row in enumerate(kept):
            assert PROMPT.finding(index, row) is Finding.RIGHT
