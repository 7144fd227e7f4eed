"""A clock that a test moves."""

from __future__ import annotations


class ManualClock:
    """A `kvstore.clock.Clock` that stands still until it is told otherwise."""

    def __init__(self, now_ns: int = 1_000_000_000, wall_s: float = 1_700_000_000.0) -> None:
        self._now_ns = now_ns
        self._wall_s = wall_s

    def monotonic_ns(self) -> int:
        """The moment that was set."""
        return self._now_ns

    def wall_s(self) -> float:
        """The date that was set."""
        return self._wall_s

    def advance_ns(self, elapsed_ns: int) -> int:
        """Moves both readings on; returns the new moment."""
        if elapsed_ns < 0:
            raise ValueError(f"a monotonic clock does not go back: {elapsed_ns} ns")
        self._now_ns += elapsed_ns
        self._wall_s += elapsed_ns / 1e9
        return self._now_ns
