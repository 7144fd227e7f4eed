"""What the stages about the disk tier's device look at: its figures, its state, and whether the
daemon answers those who ask for its health.
"""

from __future__ import annotations

import itertools
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.daemon import Daemon
from tests.e2e.stage import Prompt
from tests.field.rules import metrics
from tests.rawclient import RawAdmin
from tests.torture.oracle import LATE_S, Away, Client, Oracle

RECOVERY_S = 5.0
"""From the end of a fault until all is well: the bound. Ten times it decides."""
RECOVERY_S_MAX = 10 * RECOVERY_S
START_S = 60.0
"""For a start, on a machine that has other work; stage A times starts."""
POLL_S = 0.01
ACT_AFTER = 3
"""Bad answers in a row after which a supervisor restarts a daemon, if nobody says otherwise."""

DROPS = (
    "kvstore_disk_corrupt_dropped_total",
    'kvstore_disk_read_errors_total{kind="io"}',
    'kvstore_tier_evictions_total{tier="disk"}',
)
"""Counters that go up by one for each block that goes: damaged, not read, or for want of room."""


def drops(daemon: Daemon) -> int:
    """Blocks that the tier says it has no more, though they were durable."""
    now = metrics(daemon)
    return int(sum(now.get(name, 0) for name in DROPS))


def state_of(daemon: Daemon) -> str:
    """The disk tier's state, in words."""
    with RawAdmin(daemon.admin_socket) as admin:
        return next(str(tier.state) for tier in admin.stats().tiers if tier.name == "disk")


def part(prompt: Prompt, first: int) -> Prompt:
    """A prompt without its first blocks."""
    rest = Prompt(prompt.fingerprint, 0, 0, tenant=prompt.tenant)
    rest.keys = prompt.keys[first:]
    return rest


def missing(client: Client, prompt: Prompt) -> list[int]:
    """Indexes of the blocks that are not there; all others are read and checked."""
    gone: list[int] = []
    first = 0
    while first < len(prompt.keys):
        first += client.get(part(prompt, first))
        if first < len(prompt.keys):
            gone.append(first)
            first += 1
    return gone


def seconds_until(found: Callable[[], bool], bound_s: float) -> float:
    """How long it took until that was true; more than `bound_s` if it was not within it."""
    began = time.monotonic()
    while not found():
        if time.monotonic() - began > bound_s:
            break
        time.sleep(POLL_S)
    return time.monotonic() - began


class Recovery(NamedTuple):
    """Seconds from the end of a fault until the tier wrote, and until all of it worked; more than
    RECOVERY_S_MAX if it does not.
    """

    written_s: float
    well_s: float


def recover(
    daemon: Daemon, client: Client, fresh: Callable[[], Prompt], old: Sequence[Prompt]
) -> Recovery:
    """Uses the tier until all of it works: a durable put, a load, the state."""
    began = time.monotonic()
    loads = metrics(daemon)["kvstore_disk_loads_total"]
    written_s = 2 * RECOVERY_S_MAX
    mine: list[Prompt] = []
    for turn in itertools.count():
        took_s = time.monotonic() - began
        prompt = fresh()
        if client.put(prompt, durable=True).durable > 0:
            written_s = min(written_s, time.monotonic() - began)
            mine.append(prompt)
        # What was written since then goes out of memory sooner or later, and is loaded.
        if old:
            client.get(old[turn % len(old)])
        if mine:
            client.get(mine[turn // 2 % len(mine)])
        read = metrics(daemon)["kvstore_disk_loads_total"] > loads
        if (mine and read and _is_well(state_of(daemon))) or took_s > RECOVERY_S_MAX:
            break
        time.sleep(POLL_S)
    return Recovery(written_s, time.monotonic() - began)


def _is_well(state: str) -> bool:
    """What was, and is over, is said for a while."""
    troubles = ("stopped", "bypassed", "tried again", "opening", "loading")
    return not any(trouble in state for trouble in troubles)


class Health:
    """Asks for the daemon's health all the time, as a supervisor does: as many late or bad answers
    in a row as make one act are a failure. longest_s: of the answers so far.
    """

    def __init__(self, daemon: Daemon, oracle: Oracle, every_s: float = 0.05) -> None:
        self.longest_s = 0.0
        self._daemon = daemon
        self._oracle = oracle
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        bad = 0
        while not self._ended.wait(self._every_s):
            for path in ("healthz", "readyz"):
                why = self._asked(path)
                bad = bad + 1 if why and self._daemon.alive and not self._ended.is_set() else 0
                if bad == ACT_AFTER:
                    self._oracle.failed(f"/{path} and {ACT_AFTER - 1} before: {why}")

    def _asked(self, path: str) -> str:
        """What was wrong with the answer."""
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"{self._daemon.http_url}/{path}", timeout=10):
                why = ""
        except OSError as error:
            why = str(error)
        took_s = time.monotonic() - began
        self.longest_s = max(self.longest_s, took_s)
        return why or (f"{took_s:.2f} s" if took_s > LATE_S else "")

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def disk_bytes(folder: Path) -> int:
    """What a folder takes on its device, in blocks of the file system, its folders included."""
    total, todo = 0, [folder]
    while todo:
        current = todo.pop()
        try:
            total += current.lstat().st_blocks * 512
            if current.is_dir() and not current.is_symlink():
                todo += current.iterdir()
        except FileNotFoundError:
            continue
    return total


__all__ = [
    "RECOVERY_S",
    "RECOVERY_S_MAX",
    "START_S",
    "Away",
    "Health",
    "disk_bytes",
    "drops",
    "metrics",
    "missing",
    "part",
    "recover",
    "seconds_until",
    "state_of",
]
