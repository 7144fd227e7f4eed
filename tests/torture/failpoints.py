"""Named places in a daemon at which a test makes it fail.

The product has no switch for this: `tests.torture.debug_daemon` wraps the functions below in its
own process, and `kvstored` cannot be made to. A name is that of a function and whether it strikes
`before` it is called or `after` it returned. What strikes:

    disk.commit.before=kill             SIGKILL to itself, every time it gets there
    disk.pwrite.before=error:EIO,nth:3  OSError, the third time (and only then)
    disk.pread.before=sleep:30000       waits so many milliseconds, every time
    disk.pread.before=note:/tmp/calls   adds its name as a line to a file

Several are separated by semicolons. `nth:N` counts calls from 1; `from:N` strikes from the N-th on.
"""

from __future__ import annotations

import errno
import functools
import importlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VARIABLE = "TORTURE_FAILPOINTS"

PLACES: dict[str, tuple[str, str]] = {
    # Files and rows.
    "disk.create": ("kvstore.tiers.disk.files", "SegmentFiles.create"),
    "disk.pread": ("kvstore.tiers.disk.files", "SegmentFiles.preadv"),
    "disk.pwrite": ("kvstore.tiers.disk.files", "SegmentFiles.pwritev"),
    "disk.sync": ("kvstore.tiers.disk.files", "SegmentFiles.fdatasync"),
    "disk.unlink": ("kvstore.tiers.disk.files", "SegmentFiles.unlink"),
    "disk.commit": ("kvstore.tiers.disk.index", "LmdbIndex.commit"),
    "disk.install": ("kvstore.tiers.disk.index", "install"),
    # The folder.
    "disk.open": ("kvstore.tiers.disk.opening", "DiskFolder.open"),
    "disk.set_aside": ("kvstore.tiers.disk.opening", "DiskFolder.set_aside"),
    "disk.tidy": ("kvstore.tiers.disk.opening", "DiskFolder.tidy"),
    "disk.drop_aside": ("kvstore.tiers.disk.opening", "DiskFolder.drop_aside"),
    # What is written in which order.
    "disk.place": ("kvstore.tiers.disk.writer", "Writer._place"),
    "disk.take_out": ("kvstore.tiers.disk.writer", "Writer._take_out"),
    "disk.settle": ("kvstore.tiers.disk.writer", "Writer.settle"),
    "disk.publish": ("kvstore.tiers.disk.writer", "Writer._publish"),
    "disk.retire": ("kvstore.tiers.disk.writer", "Writer._unlink"),
    "disk.reclaim": ("kvstore.tiers.disk.writer", "Writer.reclaim"),
    "disk.sweep": ("kvstore.tiers.disk.writer", "Writer.sweep"),
    "disk.orphans": ("kvstore.tiers.disk.writer", "Writer.remove_orphans"),
    # The tier.
    "disk.load_index": ("kvstore.tiers.disk.tier", "DiskTier.load_index"),
    "disk.save_batch": ("kvstore.tiers.disk.tier", "DiskTier.save_batch"),
    "disk.load": ("kvstore.tiers.disk.tier", "DiskTier.load"),
    "disk.forget": ("kvstore.tiers.disk.tier", "DiskTier.forget"),
    "disk.close": ("kvstore.tiers.disk.tier", "DiskTier.close"),
    # Movement, and what is decided.
    "mover.submit": ("kvstore.mover", "Mover.submit"),
    "mover.save": ("kvstore.mover", "Mover._save"),
    "mover.forget": ("kvstore.mover", "Mover._forget"),
    "mover.copy": ("kvstore.mover", "Mover._copy"),
    "mover.end": ("kvstore.mover", "Mover._end"),
    "store.copies_done": ("kvstore.store.shell", "Store.copies_done"),
    "core.commit": ("kvstore.core.core", "Core.commit"),
    "core.invalidate": ("kvstore.core.core", "Core.invalidate"),
    "core.set_epoch": ("kvstore.core.core", "Core.set_epoch"),
    "ledger.put": ("kvstore.ledger", "LmdbLedger.put_many"),
    # Start and end.
    "ledger.rows": ("kvstore.ledger", "LmdbLedger.rows"),
    "store.restore": ("kvstore.store.shell", "Store.restore"),
    "daemon.announce": ("kvstore_server.app", "App._announce"),
    "store.drain": ("kvstore.store.shell", "Store.drain"),
    "store.save_warmest": ("kvstore.store.shell", "Store.save_warmest"),
    "daemon.close": ("kvstore_server.assembly", "Assembly.close"),
}
"""Name: module and function."""


ACTIONS = ("kill", "sleep", "error", "note", "off")


class BadFailpoint(ValueError):
    """What was asked for is no failpoint."""


@dataclass
class Failpoint:
    """One that is armed."""

    name: str
    action: str
    argument: str = ""
    nth: int = 0
    first: int = 1

    def strikes(self, call: int) -> bool:
        return call == self.nth if self.nth else call >= self.first

    def strike(self) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "sleep":
            time.sleep(int(self.argument) / 1_000)
        elif self.action == "note":
            with open(self.argument, "a", encoding="ascii") as file:
                file.write(f"{self.name}\n")
        elif self.action == "error":
            number = getattr(errno, self.argument)
            raise OSError(number, f"failpoint {self.name}: {os.strerror(number)}")


def parse(text: str) -> list[Failpoint]:
    """BadFailpoint if a name or an action is unknown."""
    found = []
    for item in filter(None, text.split(";")):
        name, _, what = item.strip().partition("=")
        place, _, when = name.rpartition(".")
        if place not in PLACES or when not in ("before", "after"):
            raise BadFailpoint(f"{name!r} is none of {', '.join(PLACES)} with .before or .after")
        action, *more = what.split(",")
        action, _, argument = action.partition(":")
        if action not in ACTIONS:
            raise BadFailpoint(f"{action!r} is none of {', '.join(ACTIONS)}")
        if action == "error" and not hasattr(errno, argument):
            raise BadFailpoint(f"{argument!r} is no errno")
        point = Failpoint(name, action, argument)
        for limit in more:
            kind, _, number = limit.partition(":")
            if kind not in ("nth", "from"):
                raise BadFailpoint(f"{limit!r} is none of nth:N, from:N")
            setattr(point, "nth" if kind == "nth" else "first", int(number))
        found.append(point)
    return found


def arm(text: str) -> None:
    """Wraps what `text` names, in this process, for good."""
    for point in parse(text):
        place, _, when = point.name.rpartition(".")
        wrap(PLACES[place], point, before=when == "before")


def wrap(place: tuple[str, str], point: Failpoint, *, before: bool) -> None:
    """Lets `point` strike around a function: (module, "Class.method" or "function")."""
    owner: Any = importlib.import_module(place[0])
    *path, name = place[1].split(".")
    for part in path:
        owner = getattr(owner, part)
    inner: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        call = next(calls)
        if before and point.strikes(call):
            point.strike()
        result = inner(*args, **kwargs)
        if not before and point.strikes(call):
            point.strike()
        return result

    setattr(owner, name, outer)
