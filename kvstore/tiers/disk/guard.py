"""Whether the device may be used now: warn and stop lines for writes, reads and endurance.

A path that fails is stopped, then tried half-open with a few blocks, first soon, then every few
seconds, so that it resumes by itself. A device that answers late is as bad as one that fails: while
reads hang, nobody is sent after them. Pure: time is an argument, monotonic in ns, or the wall
clock's in s where a day matters. Each object belongs to one lock of the tier's.
"""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections import Counter

RETRY_NS_MIN = 500_000_000
RETRY_NS_MAX = 4_000_000_000
"""The longest pause between tries: what is back is used again within five seconds."""
PROBE_BLOCKS = 8
FAILURES_IN_A_ROW = 4
"""So many failed reads, with no good one in between, are the device's trouble, not a block's."""
STALL_NS = 2_000_000_000
STALLED_MAX = 2
"""So many reads that hang are the device's trouble: others would only wait behind them."""

WARN_SHARE = 0.8
HOUR_S = 3_600
DAY_HOURS = 24

UNLIMITED = 1 << 62

SAMPLE_NS = 10_000_000_000
SAMPLES_MAX = 8_640


class Path:
    """One direction, reading or writing. reason: why it is stopped; empty: it is not. on_trial: it
    was, and a few blocks show whether it is over.
    """

    def __init__(self, *, failures_to_stop: int = 1) -> None:
        self.reason = ""
        self.on_trial = False
        self._failures_to_stop = failures_to_stop
        self._failures = 0
        self._retry_ns = RETRY_NS_MIN
        self._retry_at_ns = 0

    @property
    def stopped(self) -> bool:
        return bool(self.reason)

    def allowed(self, now_ns: int) -> int:
        """How many blocks may be tried now."""
        if not self.reason:
            return PROBE_BLOCKS if self.on_trial else UNLIMITED
        return PROBE_BLOCKS if self.due(now_ns) else 0

    def due(self, now_ns: int) -> bool:
        """Whether it is stopped, and time to try."""
        return bool(self.reason) and now_ns >= self._retry_at_ns

    def seems_well(self) -> None:
        """Something else than a block went through: a few blocks may follow."""
        self.reason, self.on_trial = "", True

    def retry_in_s(self, now_ns: int) -> float:
        """Until it is tried again."""
        return max(0, self._retry_at_ns - now_ns) / 1e9

    def succeeded(self) -> bool:
        """True if that ends a stop."""
        was, self.reason = self.reason or self.on_trial, ""
        self.on_trial = False
        self._failures = 0
        self._retry_ns = RETRY_NS_MIN
        return bool(was)

    def failed(self, reason: str, now_ns: int) -> bool:
        """True if it is stopped by that, and was not before."""
        self._failures += 1
        was = self.reason or self.on_trial
        if not was and self._failures < self._failures_to_stop:
            return False
        self.on_trial = False
        if was:
            self._retry_ns = min(2 * self._retry_ns, RETRY_NS_MAX)
        self.reason = reason
        self._retry_at_ns = now_ns + self._retry_ns
        return not was


class Hanging:
    """Reads that are out, and how long."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}

    def begin(self, who: int, now_ns: int) -> None:
        """who: a thread; it reads one block at a time."""
        self._since[who] = now_ns

    def end(self, who: int) -> None:
        self._since.pop(who, None)

    def stalled(self, now_ns: int) -> bool:
        """Whether so many hang that others would only wait behind them. From any thread."""
        late = sum(now_ns - since >= STALL_NS for since in list(self._since.values()))
        return late >= STALLED_MAX


class Endurance:
    """Bytes written in the last 24 hours, by the hour, against a budget; 0: none.

    It outlives the daemon as the bytes that `pack` gives. `wrote` belongs to one thread at a time;
    the others are for any, and copy the hours in one step.
    """

    def __init__(self, budget_bytes_per_day: int, packed: bytes = b"") -> None:
        self.budget_bytes_per_day = budget_bytes_per_day
        self._said = ""
        self._hours: Counter[int] = Counter()
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            hours = json.loads(packed or b"{}")
            self._hours.update({int(hour): int(length) for hour, length in hours.items()})

    def wrote(self, length: int, wall_s: float) -> None:
        """So many bytes went to the device."""
        self._hours[int(wall_s // HOUR_S)] += length

    def day_bytes(self, wall_s: float) -> int:
        """Written in the last 24 hours; what a clock that was set back calls the future is left
        out.
        """
        now = int(wall_s // HOUR_S)
        hours = dict(self._hours)
        for hour in [hour for hour in hours if hour <= now - DAY_HOURS]:
            self._hours.pop(hour, None)
            del hours[hour]
        return sum(length for hour, length in hours.items() if hour <= now)

    def bytes_per_s(self, wall_s: float) -> float:
        """The rate of writes since the hour before this one began."""
        hour, into_s = divmod(wall_s, HOUR_S)
        hours = dict(self._hours)
        length = hours.get(int(hour), 0) + hours.get(int(hour) - 1, 0)
        return length / (HOUR_S + into_s)

    def stop_reason(self, wall_s: float) -> str:
        """Why nothing more is written now; empty if something is."""
        budget = self.budget_bytes_per_day
        if not budget or self.day_bytes(wall_s) < budget:
            return ""
        return "the day's budget of writes is used up (setting: disk.endurance_bytes_per_day)"

    def warns(self, wall_s: float) -> bool:
        """Whether the warn line is passed."""
        budget = self.budget_bytes_per_day
        return bool(budget) and self.day_bytes(wall_s) >= WARN_SHARE * budget

    def news(self, wall_s: float) -> str:
        """The line that was passed since this was asked last, in words; empty: none was."""
        before, self._said = self._said, self.stop_reason(wall_s)
        if not self._said and self.warns(wall_s):
            self._said = f"over {WARN_SHARE:.0%} of the day's budget of writes is used"
        return "" if self._said == before else self._said

    def pack(self) -> bytes:
        """For the index's named values."""
        hours = dict(self._hours)
        return json.dumps({str(hour): length for hour, length in hours.items()}).encode()


class Ages:
    """How long ago a block was written, by the number of its write, to ten seconds; of one that an
    earlier daemon wrote, since when this one runs.
    """

    def __init__(self) -> None:
        self._generations: list[int] = []
        self._times_ns: list[int] = []

    def note(self, generation: int, now_ns: int) -> None:
        """This is the last write by now."""
        if self._times_ns and now_ns - self._times_ns[-1] < SAMPLE_NS:
            return
        self._generations.append(generation)
        self._times_ns.append(now_ns)
        if len(self._times_ns) > SAMPLES_MAX:
            # Twice as coarse, as far back.
            self._generations = self._generations[::2]
            self._times_ns = self._times_ns[::2]

    def age_s(self, generation: int, now_ns: int) -> float:
        """Seconds, at least."""
        at = bisect_left(self._generations, generation)
        if at >= len(self._times_ns):
            return 0.0
        return (now_ns - self._times_ns[at]) / 1e9
