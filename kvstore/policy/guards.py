"""Guards: warn and stop lines for what can go wrong, and the way back.

Value in, state out; pure: `now_ns` is an argument. What a stop means is carried out by whoever owns
the guard (`kvstore.store.guards`).

    OK <-> WARN          at the warn line; back only well below it
    OK | WARN -> STOP    at the stop line: the guarded path is bypassed, `hold_ns` at least
    STOP -> PROBE        half-open: a few may try
    PROBE -> STOP        it is as bad as before
    PROBE -> OK | WARN   what was tried went well

A `Guard` watches a level, which is known whether the path is used or not: it leaves STOP once the
level is back. A `RateGuard` watches outcomes of use, so it knows nothing while it stops: only what
is tried half-open tells, and until then it stays half-open. Each trial costs whoever makes it:
after one that failed it holds twice as long, up to `HOLD_MAX_NS`, until one goes well.

Promises, which the tests hold it to: a stop is entered at most once in the hold time that it then
has; a guard whose cause has gone is out of STOP after that time, and is OK or WARN after another,
or after `trials` uses that went well.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

CLEAR_SHARE = 0.95
"""A line that was crossed is behind only below this share of it, so that a value which stays at the
line does not flap."""
TRIALS = 8
"""So many uses are let through half-open in one `hold_ns`, and decide."""
HOLD_MAX_NS = 300_000_000_000
"""Of a stop that only a trial ends; where `hold_ns` itself is longer it does not grow."""
BUCKETS = 12
"""Of a window: what is older leaves it in steps of a twelfth."""
UNLIMITED = 1 << 62


class State(enum.IntEnum):
    """Of a guard; the numbers are those of its metric."""

    OK = 0
    WARN = 1
    PROBE = 2
    STOP = 3


@dataclass(frozen=True)
class GuardLimits:
    """All lines. 0: no such line. A share is a fraction of 1. Free bytes have lines at which and
    below which it warns and stops, all others at which and above; 0: they follow from the size.

    hold_s: shortest stop. window_s, samples_min: of outcomes, over which rates are taken, and how
    many at least. loads_min: as samples_min, of loads by clients.
    """

    hold_s: float = 2.0
    window_s: float = 60.0
    samples_min: int = 64
    loads_min: int = 16
    memory_free_warn_bytes: int = 0
    memory_free_stop_bytes: int = 0
    disk_free_warn_bytes: int = 0
    disk_free_stop_bytes: int = 0
    disk_writes_warn_share: float = 0.8
    errors_warn_share: float = 0.01
    errors_stop_share: float = 0.5
    corrupt_warn_share: float = 0.005
    corrupt_stop_share: float = 0.25
    load_warn_ratio: float = 1.0
    load_stop_ratio: float = 2.0
    held_warn: int = 1
    held_stop: int = 64

    @property
    def hold_ns(self) -> int:
        return int(self.hold_s * 1e9)

    @property
    def window_ns(self) -> int:
        return int(self.window_s * 1e9)


class Change(NamedTuple):
    """A guard has gone from one state to another, at this value."""

    was: State
    now: State
    value: float


class Guard:
    """Of a level. value: the last one seen. warnings, stops: how often each was entered. hold_ns:
    how long a stop lasts at least, and half-open until more are let through.
    """

    def __init__(
        self,
        warn: float,
        stop: float,
        *,
        hold_ns: int,
        falling: bool = False,
        trials: int = TRIALS,
    ) -> None:
        """warn, stop: the lines, 0: none. falling: less is worse. trials: uses that are let through
        half-open in one hold time.
        """
        self.warn = warn
        self.stop = stop
        self.state = State.OK
        self.value = 0.0
        self.warnings = 0
        self.stops = 0
        self.hold_ns = hold_ns
        self._trials = trials
        self._falling = falling
        self._since_ns = 0
        self._left = 0
        self._left_since_ns = 0

    def see(self, value: float | None, now_ns: int) -> Change | None:
        """Takes a value, None: it is not known; gives the change of state that it makes."""
        if value is not None:
            self.value = value
        was, now = self.state, self._next(value, now_ns)
        if now is was:
            return None
        self.state, self._since_ns = now, now_ns
        self.warnings += now is State.WARN and was is State.OK
        self.stops += now is State.STOP
        self._left, self._left_since_ns = self._trials, now_ns
        return Change(was, now, self.value)

    @property
    def stopped(self) -> bool:
        """Whether nobody may use what it guards. Half-open `take` tells."""
        return self.state is State.STOP

    def take(self, count: int, now_ns: int) -> int:
        """How many of `count` uses are let through now; they count as used."""
        if self.state is State.STOP:
            return 0
        if self.state is not State.PROBE:
            return count
        if now_ns - self._left_since_ns >= self.hold_ns:
            self._left, self._left_since_ns = self._trials, now_ns
        taken = min(count, self._left)
        self._left -= taken
        return taken

    # ------------------------------------------------------------------ lines

    def _next(self, value: float | None, now_ns: int) -> State:
        over = self._since_ns + self.hold_ns <= now_ns
        if self.state is State.STOP:
            return State.PROBE if over and self._is_back(value) else State.STOP
        if value is not None and self._past(value, self.stop):
            return State.STOP
        if self.state is State.PROBE and not self._settled(value, over):
            return State.PROBE
        return self._below_stop(value)

    def _below_stop(self, value: float | None) -> State:
        if value is None:
            return State.OK
        line = self.warn
        if self.state is State.WARN:
            line = self._clear(line)
        return State.WARN if self._past(value, line) else State.OK

    def _is_back(self, value: float | None) -> bool:
        return value is None or not self._past(value, self._clear(self.stop))

    def _settled(self, value: float | None, over: bool) -> bool:
        """Whether what was seen half-open is enough; none of it was past the stop line."""
        return over

    def _clear(self, line: float) -> float:
        return line / CLEAR_SHARE if self._falling else line * CLEAR_SHARE

    def _past(self, value: float, line: float) -> bool:
        if not line:
            return False
        return value <= line if self._falling else value >= line


class RateGuard(Guard):
    """Of a rate over the outcomes of use, in a sliding window: the sum of parts by that of wholes.

    Shares of failures: a part of 1 or 0 and a whole of 1 each. Ratios: what it took, and what it
    may have taken.
    """

    def __init__(
        self,
        warn: float,
        stop: float,
        *,
        hold_ns: int,
        window_ns: int,
        samples_min: int,
        trials: int = TRIALS,
    ) -> None:
        super().__init__(warn, stop, hold_ns=hold_ns, trials=trials)
        self._hold_min_ns = hold_ns
        self._samples_min = samples_min
        self._bucket_ns = max(window_ns // BUCKETS, 1)
        self._buckets: deque[list[float]] = deque()
        """Each: since when, in buckets of time; parts, wholes, samples."""

    def note(self, part: float, whole: float, now_ns: int, samples: int = 1) -> None:
        """So many uses have ended."""
        bucket = now_ns // self._bucket_ns
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append([bucket, 0.0, 0.0, 0])
        last = self._buckets[-1]
        last[1] += part
        last[2] += whole
        last[3] += samples

    def look(self, now_ns: int) -> Change | None:
        """Judges by what was noted until now."""
        oldest = now_ns // self._bucket_ns - BUCKETS
        # Half-open there are few uses, however long it takes until there are enough.
        while self._buckets and self._buckets[0][0] <= oldest and self.state is not State.PROBE:
            self._buckets.popleft()
        if self.state is State.STOP:
            self._buckets.clear()  # of those who were under way when it stopped
        change = self.see(self._rate(), now_ns)
        if change is not None and change.now in (State.STOP, State.PROBE):
            self._buckets.clear()
        if change is not None:
            self._hold_on(change)
        return change

    def _hold_on(self, change: Change) -> None:
        if change.now in (State.OK, State.WARN):
            self.hold_ns = self._hold_min_ns
        elif change.now is State.STOP and change.was is State.PROBE:
            self.hold_ns = min(2 * self.hold_ns, max(HOLD_MAX_NS, self._hold_min_ns))

    @property
    def samples(self) -> int:
        """In the window."""
        return int(sum(bucket[3] for bucket in self._buckets))

    def _rate(self) -> float | None:
        needed = self._trials if self.state is State.PROBE else self._samples_min
        if self.samples < max(min(needed, self._samples_min), 1):
            return None
        return self._ratio()

    def _ratio(self) -> float | None:
        whole = sum(bucket[2] for bucket in self._buckets)
        return sum(bucket[1] for bucket in self._buckets) / whole if whole > 0 else None

    def _below_stop(self, value: float | None) -> State:
        if value is None and self.state is State.WARN:
            # Too few outcomes to begin a warning; one that has begun ends if they are fine.
            value = self._ratio()
        return super()._below_stop(value)

    def _settled(self, value: float | None, over: bool) -> bool:
        return value is not None
