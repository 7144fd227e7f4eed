"""Waiting for what other processes do: a condition, looked at until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 0.005


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether `condition` comes true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(STEP_S)
    return True
