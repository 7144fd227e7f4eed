"""The numbers behind the metrics, as plain integers and histogram buckets.

`Metrics` fills one `Counts`; `exposition` renders a copy of it. Values, without a clock or a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.model.reasons import Reason

LATENCY_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0),
)
ERROR_BOUNDS_RATIO = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""|predicted - measured| / measured."""
_FINE = frozenset(
    {
        Reason.OK,
        Reason.ALREADY_PRESENT,
        Reason.ALREADY_RESERVED,
        Reason.NOTHING_TO_DO,
        Reason.COST_UNKNOWN,
        Reason.ABORTED,
    }
)
_FAILED = frozenset(
    {
        Reason.UNSPECIFIED,
        Reason.COPY_FAILED,
        Reason.DEADLINE_EXCEEDED,
        Reason.GENERATION_CHANGED,
        Reason.INTERNAL,
        Reason.IO_ERROR,
        Reason.UNAVAILABLE,
        Reason.WRITE_GROUP_FAILED,
    }
)


def result_of(reason: Reason) -> str:
    """The few results that latencies are told apart by: hit, miss, declined, ok, cancelled, failed,
    refused."""
    if reason is Reason.HIT:
        return "hit"
    if reason.is_miss:
        return "miss"
    if reason.is_declined:
        return "declined"
    if reason in _FINE:
        return "ok"
    if reason is Reason.CANCELLED:
        return "cancelled"
    return "failed" if reason in _FAILED else "refused"


class Histogram:
    """Counts by upper bound (the last one is infinity) and the sum; of seconds, or of what
    `bounds` are in.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(upper bound as Prometheus writes it, observations up to it)."""
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield bound, total


@dataclass(slots=True)
class Counts:
    """Every number, by its labels. Names are those of the metrics without prefix and suffix."""

    requests: dict[tuple[str, Reason, str], Histogram] = field(default_factory=dict)
    """(operation, reason, tier)"""
    lookups: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(tenant, result)"""
    lookup_tokens: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(tenant, slowest tier that the hit needs)"""
    declined_tokens: Counter[str] = field(default_factory=Counter)
    loads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(tenant, reason name), as clients report"""
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    prefill_saved_s: dict[str, float] = field(default_factory=dict)
    client_copy: dict[str, Histogram] = field(default_factory=dict)
    """By tenant."""
    planned_load_s: dict[str, float] = field(default_factory=dict)
    planned_recompute_s: dict[str, float] = field(default_factory=dict)
    """By what the plan decided."""
    withheld_lookups: Counter[str] = field(default_factory=Counter)
    """By arm."""
    withheld_tokens: Counter[str] = field(default_factory=Counter)
    """By arm."""
    withheld_saving_s: float = 0.0
    reported: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(arm, outcome)"""
    computed_tokens: Counter[str] = field(default_factory=Counter)
    """By arm, as clients report."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """By arm, as clients report."""
    first_token: dict[str, Histogram] = field(default_factory=dict)
    """By arm."""
    audited: Counter[str] = field(default_factory=Counter)
    """Blocks by result."""
    predicted_load_s: dict[str, float] = field(default_factory=dict)
    measured_load_s: dict[str, float] = field(default_factory=dict)
    load_error: dict[str, Histogram] = field(default_factory=dict)
    """By the slowest tier: loads of which a plan had told how long they take."""
    rejections: Counter[str] = field(default_factory=Counter)
    """By the field that differed."""
    held: int = 0

    def copy(self) -> Counts:
        """An independent copy; a few hundred small lists."""
        return Counts(
            requests={key: _copied(one) for key, one in self.requests.items()},
            lookups=Counter(self.lookups),
            lookup_tokens=Counter(self.lookup_tokens),
            hit_tokens=Counter(self.hit_tokens),
            declined_tokens=Counter(self.declined_tokens),
            loads=Counter(self.loads),
            loaded_tokens=Counter(self.loaded_tokens),
            loaded_bytes=Counter(self.loaded_bytes),
            prefill_saved_s=dict(self.prefill_saved_s),
            client_copy={key: _copied(one) for key, one in self.client_copy.items()},
            planned_load_s=dict(self.planned_load_s),
            planned_recompute_s=dict(self.planned_recompute_s),
            withheld_tokens=Counter(self.withheld_tokens),
            withheld_lookups=Counter(self.withheld_lookups),
            withheld_saving_s=self.withheld_saving_s,
            reported=Counter(self.reported),
            computed_tokens=Counter(self.computed_tokens),
            moved_bytes=Counter(self.moved_bytes),
            first_token={key: _copied(one) for key, one in self.first_token.items()},
            audited=Counter(self.audited),
            predicted_load_s=dict(self.predicted_load_s),
            measured_load_s=dict(self.measured_load_s),
            load_error={key: _copied(one) for key, one in self.load_error.items()},
            rejections=Counter(self.rejections),
            held=self.held,
        )


def _copied(histogram: Histogram) -> Histogram:
    copy = Histogram(histogram.bounds)
    copy.add(histogram)
    return copy
