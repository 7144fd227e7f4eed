"""A daemon whose world a test changes while it serves: what memory and file system have free, how
far the wall clock is off, and what its device does wrong.

    world = World(folder)
    daemon = daemons(environ=world.environ, module=guarded_daemon.MODULE, ...)   # see `start`
    world.set(memory_free_bytes=50 << 20); world.device.set(Fault(("read",), SEGMENTS, error="EIO"))

`python -m tests.e2e.guarded_daemon serve ...` is the product's daemon with the readings of its
world wrapped; what it does about them is its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.clock import SystemClock
from kvstore.tiers import memory_budget
from kvstore.tiers.disk.files import SegmentFiles
from kvstore_server.__main__ import main
from tests.torture import own_faults

MODULE = "tests.e2e.guarded_daemon"
VARIABLE = "GUARDED_WORLD"


class World:
    """What a test tells its daemon."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "world.json"
        self.device = own_faults.OwnFaults(folder)
        self.environ = {**self.device.environ, VARIABLE: str(self._file)}
        self._said: dict[str, float] = {}
        self.set()

    def set(self, **said: float) -> None:
        """memory_free_bytes, disk_free_bytes, wall_ahead_s: from now on; None: as it really is."""
        self._said.update(said)
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(self._said))
        draft.replace(self._file)


def _said() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(Path(os.environ[VARIABLE]).read_text())
    return told


def _wrapped(real: Callable[..., Any], name: str, field: str) -> Callable[..., Any]:
    """The reading with one field of it as the test says."""

    def read(*given: Any) -> Any:
        found = real(*given)
        value = _said().get(name)
        return found if value is None or found is None else found._replace(**{field: int(value)})

    return read


def plant() -> None:
    """Puts this process into the test's world, for good."""
    budget: Any = memory_budget
    files: Any = SegmentFiles
    clock: Any = SystemClock
    budget.tightest = _wrapped(budget.tightest, "memory_free_bytes", "available_bytes")
    files.statvfs = _wrapped(files.statvfs, "disk_free_bytes", "free_bytes")
    wall_s = clock.wall_s
    clock.wall_s = lambda self: wall_s(self) + _said().get("wall_ahead_s", 0.0)


if __name__ == "__main__":
    plant()
    own_faults.plant()
    main()
