"""How often blocks of a class are used again, and after how long: learnt from what happens.

For each class a count of accesses and a histogram of the ages at which blocks were asked for again.
An access begins a wait; the wait ends in a bin of the histogram, or does not end. Who began to wait
a minute ago says nothing about what happens after an hour, so the chance in a bin is taken among
those who began early enough to have reached it (Kaplan and Meier, 1958); without that all that is
asked for late looked rarer than it is, the more so the less time has been watched. Out of both come

- the density at an age: the largest over all horizons of (uses that came within the horizon) over
  (time that blocks waited within the horizon), of those that had waited so long already. This is
  the Gittins index of the class; with the horizon fixed it is LHD (Beckmann et al., NSDI 2018).
- the chance at an age: of those that had waited so long, the part that was asked for within a time.

All counts are halved now and then, so that they follow change. Pure.
"""

from __future__ import annotations

from bisect import bisect_right

BINS = 28
"""Half octaves from a quarter of a second: up to 0.35 s, 0.5 s, 0.7 s ... 45 minutes, and over."""
FIRST_NS = 250_000_000
EDGES_NS = [int(FIRST_NS * 2 ** (index / 2)) for index in range(1, BINS)]
"""Where bins 1, 2, ... begin."""
_STARTS_NS = [0, *EDGES_NS]
_STARTS_S = [start / 1e9 for start in _STARTS_NS]
_WIDTHS_S = [
    after - before
    for before, after in zip(
        _STARTS_S, [*_STARTS_S[1:], FIRST_NS / 1e9 * 2 ** (BINS / 2)], strict=True
    )
]
REFRESH = 64
"""Curves are computed anew after so many changes, or a sixteenth of all counts if that is more: two
tenths of a millisecond each time."""
STALE_NS = 30 * 10**9
"""Or after so much time: who still waits has become older."""
MARK_NS = FIRST_NS // 2
MARKS_MAX = 512
MARK_STEPS = 16
"""An old mark is left out if that opens no gap over a sixteenth of its age."""


class Curve:
    """One class."""

    __slots__ = (
        "_changes",
        "_counts",
        "_densities",
        "_due",
        "_last_ns",
        "_left",
        "_refreshed_ns",
        "_times_ns",
        "accesses",
        "again",
        "since_ns",
    )

    def __init__(self) -> None:
        self.accesses = 0.0
        self.again = [0.0] * BINS
        self.since_ns = 0
        """Of the first access."""
        self._densities = [0.0] * BINS
        self._left = [0.0] * (BINS + 1)
        self._changes = 0
        self._due = 1
        self._refreshed_ns = 0
        self._last_ns = -MARK_NS
        """Of the last access that was counted, or of a mark since."""
        self._times_ns: list[int] = []
        """Marks: times, and the accesses until then in `_counts`. Thinner the older they are."""
        self._counts: list[float] = []

    def begin(self, now_ns: int) -> None:
        """A block came into the class: it was asked for."""
        if now_ns - self._last_ns >= MARK_NS:
            self._pause(now_ns)
        self._last_ns = now_ns
        self.accesses += 1.0
        self._changes += 1
        if self._changes & 63 < 2:
            self._mark(now_ns)

    def end(self, age_ns: int) -> None:
        """A block of the class was asked for again at this age."""
        self.again[bisect_right(EDGES_NS, age_ns)] += 1.0
        self._changes += 1

    def densities(self, now_ns: int) -> list[float]:
        """Uses a second, for an age in each bin."""
        if self._changes >= self._due or now_ns - self._refreshed_ns > STALE_NS:
            self._refresh(now_ns)
        return self._densities

    def chance(self, age_ns: int, within_ns: int, now_ns: int) -> float:
        """0 to 1: that a block of this age is asked for again before so much time went by."""
        if self._changes >= self._due or now_ns - self._refreshed_ns > STALE_NS:
            self._refresh(now_ns)
        begin = bisect_right(EDGES_NS, age_ns)
        end = bisect_right(EDGES_NS, age_ns + within_ns)
        left = self._left[begin]
        return (left - self._left[end + 1]) / left if left > 0 else 0.0

    def halve(self) -> None:
        """Old counts weigh half."""
        self.accesses /= 2
        self.again = [count / 2 for count in self.again]
        self._counts = [count / 2 for count in self._counts]

    def _refresh(self, now_ns: int) -> None:
        self._changes = 0
        self._refreshed_ns = now_ns
        self._due = max(REFRESH, int(self.accesses / 16)) if self.accesses > REFRESH else 1
        self._due = min(self._due, 4_096)
        if now_ns - self._last_ns >= MARK_NS:
            self._pause(now_ns)
        left = [1.0]
        ended: list[float] = []
        for count, start_ns in zip(self.again, _STARTS_NS, strict=True):
            reached = left[-1] * self._accesses_until(now_ns - start_ns)
            chance = min(count / reached, 1.0) if reached >= 1.0 else 0.0
            ended.append(left[-1] * chance)
            left.append(left[-1] - ended[-1])
        self._left = left
        areas = [
            width * (alive - count / 2)
            for width, alive, count in zip(_WIDTHS_S, left, ended, strict=False)
        ]
        for bin_ in range(BINS):
            best = total = area = 0.0
            for horizon in range(bin_, BINS):
                total += ended[horizon]
                area += areas[horizon]
                if total > best * area and area > 0:
                    best = total / area
            self._densities[bin_] = best

    # ------------------------------------------------------------------ how many began before

    def _pause(self, now_ns: int) -> None:
        """Nothing began since the last access: both ends are marked."""
        times_ns = self._times_ns
        if times_ns and times_ns[-1] == self._last_ns:
            self._counts[-1] = self.accesses
        elif times_ns:
            times_ns.append(self._last_ns)
            self._counts.append(self.accesses)
        else:
            self.since_ns = now_ns
        self._last_ns = now_ns
        self._append(now_ns)

    def _mark(self, now_ns: int) -> None:
        if now_ns - self._times_ns[-1] >= MARK_NS:
            self._append(now_ns)

    def _append(self, now_ns: int) -> None:
        self._times_ns.append(now_ns)
        self._counts.append(self.accesses)
        if len(self._times_ns) > MARKS_MAX:
            self._thin(now_ns)

    def _thin(self, now_ns: int) -> None:
        """Leaves out marks that are close to their neighbours for their age, and all but the last
        of those that are older than any bin begins.
        """
        times_ns = self._times_ns
        first = max(bisect_right(times_ns, now_ns - _STARTS_NS[-1]) - 1, 0)
        kept = [first]
        for index in range(first + 1, len(times_ns) - 1):
            gap_ns = times_ns[index + 1] - times_ns[kept[-1]]
            if gap_ns * MARK_STEPS > now_ns - times_ns[index]:
                kept.append(index)
        kept.append(len(times_ns) - 1)
        self._times_ns = [times_ns[index] for index in kept]
        self._counts = [self._counts[index] for index in kept]

    def _accesses_until(self, then_ns: int) -> float:
        """How many began until then, in a straight line between marks; all, if it is later."""
        times_ns, counts = self._times_ns, self._counts
        after = bisect_right(times_ns, then_ns)
        if after == 0:
            return 0.0
        if after == len(times_ns):
            return self.accesses
        before_ns, before = times_ns[after - 1], counts[after - 1]
        part = (then_ns - before_ns) / (times_ns[after] - before_ns)
        return before + (counts[after] - before) * part
