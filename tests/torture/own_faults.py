"""Faults of the device where there is no FUSE: a daemon that fails its own calls on segment files.

    device = OwnFaults(folder)           # in place of a FaultFs
    daemon.module, daemon.environ = own_faults.MODULE, {**daemon.environ, **device.environ}

`python -m tests.torture.own_faults serve ...` is the debug daemon with the rules of
TORTURE_FAULTS, a folder in which the two leave each other what is in force and what has struck.
The index and the ledger, whose calls LMDB makes, are left alone.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.files import SegmentFiles, SystemCalls
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore_server.__main__ import main
from tests.faults import Fault, Rules, pack, unpack
from tests.torture import failpoints, mutants

VARIABLE = "TORTURE_FAULTS"
MODULE = "tests.torture.own_faults"
POLL_S = 0.005
ANSWER_S = 5.0
PAGE_BYTES = 4_096

Bytes = NDArray[np.uint8]


class OwnFaults:
    """As FaultFs; what it is told has an effect on the daemon that has its `environ`."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        self.path = self.backing = folder / "plain"
        self._control = folder / "control"
        self.environ = {VARIABLE: str(self._control)}
        self._turn = 0
        self._seed = seed

    def __enter__(self) -> OwnFaults:
        self.path.mkdir(parents=True)
        self._control.mkdir()
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set(self, *faults: Fault) -> Counter[str]:
        """See FaultFs. Without a daemon that listens, nothing has struck."""
        self._turn += 1
        _leave(self._control / "rules", [self._turn, self._seed, pack(faults)])
        end = time.monotonic() + (ANSWER_S if self._turn > 1 else 0)
        while time.monotonic() < end:
            turn, struck = _found(self._control / "struck") or [0, {}]
            if turn == self._turn:
                return Counter(struck)
            time.sleep(POLL_S)
        return Counter()

    def clear(self) -> Counter[str]:
        return self.set()


def _leave(path: Path, value: Any) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def _found(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------- the daemon's side


def _obey(control: Path, rules: Rules) -> None:
    turn = 0
    while True:
        said = _found(control / "rules")
        if said and said[0] != turn:
            turn = said[0]
            struck = dict(rules.struck)
            rules.struck.clear()
            rules.set(unpack(said[2]))
            _leave(control / "struck", [turn, struck])
        time.sleep(POLL_S)


class _Calls:
    """The calls of segment files, by the rules."""

    def __init__(self, rules: Rules, inner: SystemCalls) -> None:
        self._rules = rules
        self._inner = inner

    def calls(self) -> SystemCalls:
        return SystemCalls(
            open=self._inner.open,
            fallocate=self._fallocate,
            preadv=self._preadv,
            pwritev=self._pwritev,
            fsync=self._sync(self._inner.fsync),
            fdatasync=self._sync(self._inner.fdatasync),
        )

    def _fallocate(self, fd: int, size_bytes: int) -> None:
        self._rules.check("grow", _path(fd))
        self._inner.fallocate(fd, size_bytes)

    def _sync(self, inner: Any) -> Any:
        def sync(fd: int) -> None:
            self._rules.check("sync", _path(fd))
            inner(fd)

        return sync

    def _preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        moved = 0

        def inner(length: int) -> bytes:
            nonlocal moved
            moved = min(length, self._inner.preadv(fd, buffers, offset))
            return b"".join(bytes(data) for data in buffers)[:moved]

        data = self._rules.read(_path(fd), sum(one.nbytes for one in buffers), inner)
        left = np.frombuffer(data, np.uint8)
        for one in buffers:
            one[: len(left)] = left[: len(one)]
            left = left[len(one) :]
        return moved

    def _pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        def inner(part: bytes) -> int:
            whole = len(part) // PAGE_BYTES * PAGE_BYTES  # past the page cache only whole pages go
            copy = aligned_bytes(max(whole, PAGE_BYTES))[:whole]
            copy[:] = np.frombuffer(part, np.uint8)[:whole]
            return self._inner.pwritev(fd, [copy], offset) if whole else 0

        return self._rules.write(_path(fd), b"".join(bytes(data) for data in buffers), inner)


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def plant() -> None:
    """Puts this process's segment files under the rules of its folder, for good."""
    control = Path(os.environ[VARIABLE])
    said = _found(control / "rules")
    rules = Rules(said[1] if said else 0)
    threading.Thread(target=_obey, args=(control, rules), daemon=True).start()
    defaults = cast("Any", SegmentFiles.__init__).__kwdefaults__
    defaults["calls"] = _Calls(rules, defaults["calls"]).calls()


if __name__ == "__main__":
    mutants.plant(os.environ.get(mutants.VARIABLE, ""))
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    plant()
    main()
