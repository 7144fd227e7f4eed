"""The wall clock of a debug daemon: a file says how many seconds it is off."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvstore.clock import SystemClock

VARIABLE = "TORTURE_WALL"


def bend(path: str) -> None:
    """Takes the offset out of a file from now on. "": leaves the clock as it is."""
    if path:
        clock: Any = SystemClock
        clock.wall_s = lambda self: time.time() + float(Path(path).read_text() or 0)
