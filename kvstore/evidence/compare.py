"""Two sides compared: a statistic of each, the change, and its interval by the bootstrap.

Percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13):
both sides are drawn anew with replacement, each from itself, and the change is computed of each
draw; the interval holds the middle share of the changes. It takes requests to be independent.
Seeded: the same records and criteria give the same numbers.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Change", "Side", "change_of", "side_of"]

DRAWN_ELEMENTS_MAX: Final = 1 << 22
"""Drawn at a time: 32 MiB of numbers."""
BEYOND_P99_MIN: Final = 5
"""Requests that have to lie beyond a percentile before its interval is believed."""

Values = NDArray[np.float64]


class Side(NamedTuple):
    """One side of a comparison, described."""

    requests: int
    mean: float
    p50: float
    p99: float
    worst: float


class Change(NamedTuple):
    """applied / baseline - 1 (or the difference), with its interval. `why`: why there is none."""

    metric: str
    baseline: float
    applied: float
    baseline_requests: int
    applied_requests: int
    change: float | None
    low: float | None
    high: float | None
    why: str = ""
    absolute: bool = False
    """The change is a difference, in the metric's unit."""

    def shown(self, value: float | None) -> str:
        """A change or an end of its interval, for people."""
        if value is None:
            return "-"
        return f"{value:+,.4g}" if self.absolute else f"{value:+.1%}"

    @property
    def interval(self) -> str:
        """The interval for people, or why there is none."""
        return (
            self.why if self.low is None else f"{self.shown(self.low)} to {self.shown(self.high)}"
        )

    @property
    def improved(self) -> bool:
        """The whole interval is below no change."""
        return self.high is not None and self.high < 0

    @property
    def worse(self) -> bool:
        """The whole interval is above no change."""
        return self.low is not None and self.low > 0


def side_of(values: Values) -> Side:
    """Mean, median, 99th percentile and worst; NaN where there is nothing."""
    if not values.size:
        nan = float("nan")
        return Side(0, nan, nan, nan, nan)
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return Side(int(values.size), float(values.mean()), float(p50), float(p99), float(values.max()))


def change_of(
    metric: str,
    baseline: Values,
    applied: Values,
    *,
    statistic: str,
    absolute: bool,
    confidence: float,
    resamples: int,
    seed: int,
) -> Change:
    """Compares a statistic ("mean", "p50", "p99", "worst") of two sides.

    absolute: the difference, for shares, which may be 0. The seed is mixed with the metric's name:
    comparisons do not depend on their order.
    """
    before, after = _of_all(baseline, statistic), _of_all(applied, statistic)
    counts = (int(baseline.size), int(applied.size))
    change = float(_change(np.array([before]), np.array([after]), absolute)[0])
    known = None if np.isnan(change) else change
    told = Change(metric, before, after, *counts, known, None, None, absolute=absolute)
    why = _why_no_interval(statistic, counts, before, absolute)
    if why:
        return told._replace(why=why)
    chance = np.random.default_rng([seed, zlib.crc32(metric.encode())])
    drawn = _change(
        _drawn(baseline, statistic, resamples, chance),
        _drawn(applied, statistic, resamples, chance),
        absolute,
    )
    drawn = drawn[np.isfinite(drawn)]
    if drawn.size < resamples // 2:
        return told._replace(why="the baseline is mostly 0")
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return told._replace(low=float(low), high=float(high))


def _why_no_interval(statistic: str, counts: tuple[int, int], before: float, absolute: bool) -> str:
    if min(counts) < 2:
        return "no requests on one side" if not min(counts) else "one request on one side"
    if statistic == "worst":
        return "the worst of a sample has no interval"
    if statistic == "p99" and min(counts) * 0.01 < BEYOND_P99_MIN:
        return f"fewer than {BEYOND_P99_MIN} requests lie beyond the 99th percentile"
    if not absolute and before == 0:
        return "the baseline is 0"
    return ""


def _of_all(values: Values, statistic: str) -> float:
    return float(_statistic(values[None], statistic)[0]) if values.size else float("nan")


def _drawn(values: Values, statistic: str, resamples: int, chance: np.random.Generator) -> Values:
    found = np.empty(resamples)
    step = max(1, DRAWN_ELEMENTS_MAX // values.size)
    for first in range(0, resamples, step):
        count = min(step, resamples - first)
        drawn = values[chance.integers(0, values.size, (count, values.size))]
        found[first : first + count] = _statistic(drawn, statistic)
    return found


def _statistic(rows: Values, statistic: str) -> Values:
    if statistic == "mean":
        return np.asarray(rows.mean(axis=1))
    if statistic == "worst":
        return np.asarray(rows.max(axis=1))
    return np.asarray(np.quantile(rows, {"p50": 0.5, "p99": 0.99}[statistic], axis=1))


def _change(baseline: Values, applied: Values, absolute: bool) -> Values:
    if absolute:
        return applied - baseline
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(baseline > 0, applied / baseline - 1, np.nan)
