"""When to stop asking a daemon that does not answer, and when to ask again. Pure: the clock is an
argument.

    CLOSED --failures in a row--> OPEN --probe succeeds--> CLOSED
                                   `--probe fails: the pause doubles, up to a bound

While it is open no call is made; a probe in the background finds out whether the daemon is back.
"""

from __future__ import annotations

from kvstore.model.reasons import Reason

__all__ = ["Breaker"]

FIRST_PAUSE_NS = 50_000_000


class Breaker:
    """Counts failures of one connection. Not locked: its owner is."""

    def __init__(self, failures_max: int, pause_max_ns: int) -> None:
        self._failures_max = failures_max
        self._pause_max_ns = pause_max_ns
        self._pause_ns = min(FIRST_PAUSE_NS, pause_max_ns)
        self._failures = 0
        self._probe_at_ns: int | None = None
        self.cause = Reason.OK
        """Why the last failure failed; OK after a success."""

    @property
    def is_open(self) -> bool:
        """True: make no calls."""
        return self._probe_at_ns is not None

    @property
    def failures(self) -> int:
        """Failures since the last success, until it opened: an outage counts once."""
        return self._failures

    def succeeded(self) -> None:
        """The daemon has answered, whatever it said."""
        self._failures = 0
        self._probe_at_ns = None
        self._pause_ns = min(FIRST_PAUSE_NS, self._pause_max_ns)
        self.cause = Reason.OK

    def failed(self, cause: Reason, now_ns: int) -> None:
        """A call or a probe got no answer. Failures of calls that were under way when it opened do
        not put the probe off.
        """
        self.cause = cause
        if self._probe_at_ns is None:
            self._failures += 1
            if self._failures >= self._failures_max:
                self._probe_at_ns = now_ns + self._pause_ns
        elif now_ns >= self._probe_at_ns:
            self._pause_ns = min(2 * self._pause_ns, self._pause_max_ns)
            self._probe_at_ns = now_ns + self._pause_ns

    def hasten(self, now_ns: int) -> None:
        """There is a sign that the daemon is back: the next probe is due."""
        if self._probe_at_ns is not None:
            self._probe_at_ns = min(self._probe_at_ns, now_ns)

    def probe_in_ns(self, now_ns: int) -> int | None:
        """Until the next probe: 0 when it is due, None while closed."""
        if self._probe_at_ns is None:
            return None
        return max(0, self._probe_at_ns - now_ns)
