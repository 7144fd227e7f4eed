"""What loads took, against what their plans had predicted. On the event loop's thread.

A client measures a load from the asking for its lease on; the daemon knows how much of that it
waited for slower tiers itself. What is left is the path from host memory to the engine, and teaches
that path's estimate.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvstore.store import Store
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.metrics import Metrics

LEASES_MAX = 1 << 16
"""Leases that are remembered, the latest ones: those that expire are never released."""
NS_PER_US = 1_000
ON_THE_WAY_NS = 100_000_000
"""What a call may take from a client's clock to ours."""
PREDICTED_US_MAX = 86_400_000_000
SECONDS_MAX = 86_400.0
"""Of what a client reports: sums stay sums whatever one of them says."""


def seconds_of(us: float) -> float:
    """Seconds of microseconds that a client reports, within bounds; 0 for what is no number."""
    return min(us / 1e6, SECONDS_MAX) if us > 0 else 0.0


class _Granted(NamedTuple):
    tier: int
    asked_ns: int
    waited_ns: int


class Loads:
    """One instance a tenant."""

    def __init__(self, store: Store, metrics: Metrics, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._metrics = metrics
        self._granted: OrderedDict[int, _Granted] = OrderedDict()

    def granted(self, lease_id: int, tier: int, asked_ns: int) -> None:
        """A read lease was asked for at `asked_ns`, and is given out now; 0 is none. tier: index of
        the slowest that one of its blocks came from.
        """
        if not lease_id:
            return
        waited_ns = self._store.clock.monotonic_ns() - asked_ns
        self._granted[lease_id] = _Granted(tier, asked_ns, waited_ns)
        if len(self._granted) > LEASES_MAX:
            self._granted.popitem(last=False)

    def ended(self, report: pb.LoadReport, length_bytes: int) -> tuple[int, int]:
        """A load of `length_bytes` went well, and its lease ends. (measured, predicted) in us; 0
        where it was not, or cannot be true.
        """
        granted = self._granted.pop(report.lease_id, None)
        copy_ns = report.copy_us * NS_PER_US
        if granted is None:  # nothing bounds what is said of it
            return 0, 0
        # Since it was asked for it took at most: who says more teaches others nothing.
        most_ns = self._store.clock.monotonic_ns() - granted.asked_ns + ON_THE_WAY_NS
        load_ns = report.load_us * NS_PER_US
        if not granted.waited_ns < load_ns <= most_ns:
            if copy_ns <= most_ns:
                self._store.note_load(length_bytes, copy_ns, granted.tier)
            return 0, 0
        self._store.note_load(length_bytes, load_ns - granted.waited_ns, granted.tier)
        saved_s = seconds_of(report.prefill_saved_us)
        now_ns = self._store.clock.monotonic_ns()
        self._store.guards.loaded(self._tenant, granted.tier, load_ns / 1e9, saved_s, now_ns)
        predicted_us = min(report.predicted_us, PREDICTED_US_MAX)
        if predicted_us:
            tier = self._store.tiers[granted.tier].name
            self._metrics.predicted(tier, load_ns / 1e9, predicted_us / 1e6)
        return report.load_us, predicted_us

    def forget(self, lease_id: int) -> None:
        """A lease ends without a load that is worth learning from."""
        self._granted.pop(lease_id, None)
