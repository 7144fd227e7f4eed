"""Odd schedules from a seed: threads that change places at every chance, sleeps where threads meet,
and bounds so small that everything waits for everything ("buggify").

Planted into a process of the torture by replacing functions and numbers of the product in it, as
planted bugs are; the product has none of it.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

VARIABLE = "TORTURE_JITTER"
SWITCH_S = 1e-6
CHANCES = (0.0, 0.0, 0.02, 0.2, 0.5)
"""How often a point sleeps; each point has one of these in a run."""
LONGEST_S = (0.0002, 0.002, 0.01)
LOOP_LONGEST_S = 0.001
"""On the event loop's thread, where all wait."""

Point = tuple[str, str]  # module and class, names of methods

DAEMON: Sequence[Point] = (
    ("kvstore.mover:Mover", "_next_turn _run _write _end"),
    ("kvstore.tiers.disk.tier:DiskTier", "load save_batch forget tend"),
    ("kvstore.tiers.disk.volume:Volume", "read _read discard tell_touches"),
    (
        "kvstore.tiers.disk.writer:Writer",
        "_place _take_out _make_segments _write_one _sync settle _commit _publish _unlink sweep",
    ),
    ("kvstore.tiers.host:HostTier", "view set_generation work"),
    ("kvstore.ledger:LmdbLedger", "put_many"),
)
"""Where threads of the daemon meet."""
LOOP: Sequence[Point] = (
    ("kvstore.mover:Mover", "submit _deliver"),
    ("kvstore.tiers.host:HostTier", "assign unassign released"),
    ("kvstore_server.fdsocket:FdSocket", "_unmap"),
    ("kvstore.store.shell:Store", "copies_done"),
)
"""And its event loop."""
CLIENT: Sequence[Point] = (
    ("kvstore_client.regions:Memory", "region staging _map _close _receive _finish_closing"),
    ("kvstore_client.link:Link", "_work_once _lose _connect release"),
)
SLOW_COPY = 0.2
"""How often a client's copy begins after its lease has ended, if that is soon."""
SOON_S = 0.1


class Jitter:
    """Sleeps at points that a seed chooses. `plant` once; `remove` puts everything back."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(str(seed))
        self._undo: list[tuple[Any, str, Any]] = []
        self._switch_s = sys.getswitchinterval()

    def plant(self, points: Sequence[Point], longest_s: Sequence[float] = LONGEST_S) -> None:
        sys.setswitchinterval(SWITCH_S)
        for place, names in points:
            module, _, owner = place.partition(":")
            target = getattr(importlib.import_module(module), owner)
            for name in names.split():
                chance, most_s = self.random.choice(CHANCES), self.random.choice(longest_s)
                self.replace(target, name, self._late(getattr(target, name), chance, most_s))

    def replace(self, target: Any, name: str, value: Any) -> None:
        """AttributeError if there is nothing of that name to replace."""
        self._undo.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def remove(self) -> None:
        while self._undo:
            target, name, value = self._undo.pop()
            setattr(target, name, value)
        sys.setswitchinterval(self._switch_s)

    def late_copies(self, late_s: float) -> None:
        """A client's copy begins late now and then; not where that takes long."""
        if late_s > SOON_S:
            return
        gather = importlib.import_module("kvstore.gather")
        raw = importlib.import_module("tests.rawclient").RawClient
        for target, name in ((gather, "copy_blocks"), (raw, "copy")):
            self.replace(target, name, self._slow(getattr(target, name), late_s))

    def _slow(self, copy: Callable[..., Any], late_s: float) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            if self.random.random() < SLOW_COPY:
                time.sleep(late_s)
            return copy(*args, **kwargs)

        return slow

    def _late(self, work: Callable[..., Any], chance: float, most_s: float) -> Callable[..., Any]:
        chosen = self.random

        @functools.wraps(work)
        def late(*args: Any, **kwargs: Any) -> Any:
            if chosen.random() < chance:
                time.sleep(chosen.random() * most_s)
            result = work(*args, **kwargs)
            if chosen.random() < chance / 2:
                time.sleep(chosen.random() * most_s)
            return result

        return late


def plant_daemon(seed: str) -> None:
    """For a daemon's whole life. "": nothing."""
    if not seed:
        return
    jitter = Jitter(seed)
    jitter.plant(DAEMON)
    jitter.plant(LOOP, (LOOP_LONGEST_S,))
    _narrow(jitter)


def _narrow(jitter: Jitter) -> None:
    """Few threads, short turns, one copy at a time."""
    chance = jitter.random
    assembly = importlib.import_module("kvstore_server.assembly")
    mover = importlib.import_module("kvstore.mover")
    tier = importlib.import_module("kvstore.tiers.disk.tier")
    disk = importlib.import_module("kvstore_server.disk")
    readers = chance.choice((1, 1, 2, 4))
    for module in (assembly, disk):
        jitter.replace(module, "READERS", readers)
    jitter.replace(assembly, "COPY_THREADS", chance.choice((1, 2, 4)))
    jitter.replace(mover, "SAVES_MAX", chance.choice((1, 3, 1024)))
    jitter.replace(mover, "SAVE_BYTES_MAX", chance.choice((1, 64 << 10, 64 << 20)))
    jitter.replace(tier, "WRITE_THREADS", chance.choice((2, 3, 6)))
    jitter.replace(tier, "TEND_EVERY_S", chance.choice((0.005, 0.05)))
    lanes = importlib.import_module("kvstore.lanes")
    lanes.Lane.__init__.__kwdefaults__["copies_max"] = chance.choice((1, 2, 64))
    limits = {
        "copies_in_flight_max": chance.choice((1, 2, 16)),
        "copies_in_flight_bytes": chance.choice((1, 64 << 20)),
        "loads_in_flight_max": chance.choice((1, 4, 1 << 16)),
        "save_ahead_share": chance.choice((0.0, 0.25, 0.9)),
    }
    assert limits.keys() <= disk.DISK_LIMITS.keys(), "limits are named as the daemon's"
    disk.DISK_LIMITS.update(limits)


@contextmanager
def jittery_clients(seed: object, late_s: float) -> Iterator[None]:
    """Clients of this process, for a while. late_s: longer than their leases."""
    jitter = Jitter(seed)
    try:
        jitter.plant(CLIENT)
        jitter.late_copies(late_s)
        yield
    finally:
        jitter.remove()
