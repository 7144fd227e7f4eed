"""How often blocks of a class are used again, and after how long: learnt from what happens.

For each class a count of accesses and a histogram of the ages at which blocks were asked for again.
An access begins a wait; the wait ends in a bin of the histogram, or does not end. Out of both come

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
_STARTS_S = [0.0] + [edge / 1e9 for edge in EDGES_NS]
_WIDTHS_S = [
    after - before
    for before, after in zip(
        _STARTS_S, [*_STARTS_S[1:], FIRST_NS / 1e9 * 2 ** (BINS / 2)], strict=True
    )
]
REFRESH = 64
"""Curves are computed anew after so many changes, or a sixteenth of all counts if that is more: a
tenth of a millisecond each time."""


class Curve:
    """One class."""

    __slots__ = ("_changes", "_densities", "_due", "_left", "accesses", "again")

    def __init__(self) -> None:
        self.accesses = 0.0
        self.again = [0.0] * BINS
        self._densities = [0.0] * BINS
        self._left = [0.0] * (BINS + 1)
        self._changes = 0
        self._due = 1

    def begin(self) -> None:
        """A block came into the class: it was asked for."""
        self.accesses += 1.0
        self._changes += 1

    def end(self, age_ns: int) -> None:
        """A block of the class was asked for again at this age."""
        self.again[bisect_right(EDGES_NS, age_ns)] += 1.0
        self._changes += 1

    def densities(self) -> list[float]:
        """Uses a second, for an age in each bin."""
        if self._changes >= self._due:
            self._refresh()
        return self._densities

    def chance(self, age_ns: int, within_ns: int) -> float:
        """0 to 1: that a block of this age is asked for again before so much time went by."""
        if self._changes >= self._due:
            self._refresh()
        begin = bisect_right(EDGES_NS, age_ns)
        end = bisect_right(EDGES_NS, age_ns + within_ns)
        left = self._left[begin]
        return min((left - self._left[end + 1]) / left, 1.0) if left > 0 else 0.0

    def halve(self) -> None:
        """Old counts weigh half."""
        self.accesses /= 2
        self.again = [count / 2 for count in self.again]

    def _refresh(self) -> None:
        self._changes = 0
        self._due = max(REFRESH, int(self.accesses / 16)) if self.accesses > REFRESH else 1
        self._due = min(self._due, 4_096)
        left = [self.accesses]
        for count in self.again:
            left.append(max(left[-1] - count, 0.0))
        self._left = left
        areas = [
            width * max(alive - count / 2, 0.0)
            for width, alive, count in zip(_WIDTHS_S, left, self.again, strict=False)
        ]
        for bin_ in range(BINS):
            best = total = area = 0.0
            for horizon in range(bin_, BINS):
                total += self.again[horizon]
                area += areas[horizon]
                if total > best * area and area > 0:
                    best = total / area
            self._densities[bin_] = best
