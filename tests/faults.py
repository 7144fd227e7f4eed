"""What a device does wrong, as rules: which calls, on which files, and how they fail.

`FaultFs` applies them to a whole folder, through FUSE (`tests.faultfs`). Where there is no FUSE
the torture's debug daemon applies them to its own calls (`tests.torture.own_faults`). Rules travel
as JSON, and each is counted when it strikes, so that a test knows that its fault was there.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

SEGMENTS = "*/segments/*"
INDEX = "*/index/*"


@dataclass(frozen=True)
class Fault:
    """One rule.

    ops: of "read", "write", "sync", "grow" (making and allocating files), "open", "look" (stat,
    statvfs, list). where: pattern of the path. error: errno's name. delay_s: waits so long, or
    until the rule is gone. cut_bytes: a call moves so many bytes at most; -1: half of what it was
    to. lie: "flip" changes one byte; "torn" writes the first half only and says that it wrote all.
    chance: of each call.
    """

    ops: tuple[str, ...]
    where: str = "*"
    error: str = ""
    delay_s: float = 0.0
    cut_bytes: int | None = None
    lie: str = ""
    chance: float = 1.0

    @property
    def name(self) -> str:
        """In few words."""
        how = self.error or self.lie or (f"delay {self.delay_s:g} s" if self.delay_s else "cut")
        return f"{how} on {'+'.join(self.ops)}"


def pack(faults: Sequence[Fault]) -> str:
    return json.dumps([asdict(fault) for fault in faults])


def unpack(text: str) -> list[Fault]:
    return [Fault(**{**one, "ops": tuple(one["ops"])}) for one in json.loads(text or "[]")]


class Rules:
    """Rules that are in force, applied to calls from any thread."""

    def __init__(self, seed: int = 0) -> None:
        self._faults: list[Fault] = []
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self.struck: Counter[str] = Counter()
        self._turn = 0

    def set(self, faults: Sequence[Fault]) -> None:
        """From now on these and no others: who waits because of an older one waits no longer."""
        with self._changed:
            self._faults = list(faults)
            self._turn += 1
            self._changed.notify_all()

    def check(self, op: str, path: str) -> Fault | None:
        """Before a call: waits or raises OSError where a rule says so. The rule that alters what
        the call moves, if there is one.
        """
        with self._changed:
            fault = next((one for one in self._faults if self._strikes(one, op, path)), None)
            if fault is None:
                return None
            self.struck[fault.name] += 1
            turn = self._turn
            if fault.delay_s:
                self._changed.wait_for(lambda: self._turn != turn, fault.delay_s)
        if fault.error:
            number = int(getattr(errno, fault.error))
            raise OSError(number, os.strerror(number), path)
        return fault

    def read(self, path: str, length: int, inner: Callable[[int], bytes]) -> bytes:
        """A read of `length` bytes that `inner` does."""
        fault = self.check("read", path)
        if fault is None:
            return inner(length)
        data = inner(_cut(fault, length))
        if fault.lie == "flip" and data:
            at = self._rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
        return data

    def write(self, path: str, data: bytes, inner: Callable[[bytes], int]) -> int:
        """A write that `inner` does."""
        fault = self.check("write", path)
        if fault is None:
            return inner(data)
        if fault.lie == "torn":
            inner(data[: len(data) // 2])
            return len(data)
        if fault.lie == "flip" and data:
            at = self._rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
        return inner(data[: _cut(fault, len(data))])

    def _strikes(self, fault: Fault, op: str, path: str) -> bool:
        return (
            op in fault.ops
            and fnmatch.fnmatchcase(path, fault.where)
            and (fault.chance >= 1 or self._rng.random() < fault.chance)
        )


def _cut(fault: Fault, length: int) -> int:
    if fault.cut_bytes is None:
        return length
    return length // 2 if fault.cut_bytes < 0 else min(length, fault.cut_bytes)
