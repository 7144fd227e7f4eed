"""The clock as a value: what reads time is given a Clock, so that a test can give it another one.

Only the shells (daemon, SDK) and the mover hold a clock; the core takes `now_ns` as an argument.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings that must not be mixed: intervals come from one, dates from the other."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary moment; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump. For what a person reads, never for a deadline."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_s(self) -> float:
        return time.time()
