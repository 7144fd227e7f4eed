"""What a client measured: which part teaches the path from memory, and what cannot be true."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.testing.clock import ManualClock
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.loads import SECONDS_MAX, Loads, seconds_of
from kvstore_server.metrics import Metrics

MS = 10**6
LEASE = 7
BYTES = 1 << 20


class Told:
    """A store that notes what it is taught."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tiers = [SimpleNamespace(name="host"), SimpleNamespace(name="disk")]
        self.noted: list[tuple[int, int]] = []
        self.guarded: list[tuple[str, int, float, float]] = []
        self.guards = self

    def loaded(self, tenant: str, tier: int, load_s: float, prefill_s: float, now_ns: int) -> None:
        assert now_ns == self.clock.monotonic_ns()
        self.guarded.append((tenant, tier, load_s, prefill_s))

    def note_load(self, length_bytes: int, copy_ns: int, tier: int) -> None:
        self.noted.append((length_bytes, copy_ns))


def measured(
    *,
    waited_ms: int,
    load_ms: int,
    since_ms: int,
    predicted_ms: int = 0,
    copy_ms: int = 1,
    saved_us: float = 50_000,
) -> tuple[Told, Metrics, tuple[int, int]]:
    """A load from disk: the daemon waited, and the release came so long after the asking."""
    told, metrics = Told(), Metrics()
    loads = Loads(cast(Any, told), metrics, "default")
    asked_ns = told.clock.monotonic_ns()
    told.clock.advance_ns(waited_ms * MS)
    loads.granted(LEASE, 1, asked_ns)
    told.clock.advance_ns((since_ms - waited_ms) * MS)
    report = pb.LoadReport(
        lease_id=LEASE,
        copy_us=copy_ms * 1_000,
        load_us=load_ms * 1_000,
        predicted_us=predicted_ms * 1_000,
        prefill_saved_us=saved_us,
    )
    return told, metrics, loads.ended(report, BYTES)


def test_what_the_daemon_waited_itself_is_not_the_path_from_memory() -> None:
    told, metrics, figures = measured(waited_ms=80, load_ms=100, since_ms=110, predicted_ms=75)
    assert told.noted == [(BYTES, 20 * MS)]
    assert figures == (100_000, 75_000)
    assert told.guarded == [("default", 1, 0.1, 0.05)], "what it took, and what it replaced"
    flat = metrics.flat()
    assert flat['kvstore_load_predicted_seconds_total{tier="disk"}'] == pytest.approx(0.075)
    assert flat['kvstore_load_measured_seconds_total{tier="disk"}'] == pytest.approx(0.1)
    assert flat['kvstore_load_prediction_error_ratio_sum{tier="disk"}'] == pytest.approx(0.25)


@pytest.mark.parametrize("load_ms", [0, 80, 211], ids=["not told", "no path", "too long"])
def test_a_time_that_cannot_be_true_leaves_the_copy_alone(load_ms: int) -> None:
    told, metrics, figures = measured(
        waited_ms=80, load_ms=load_ms, since_ms=110, predicted_ms=75, copy_ms=9
    )
    assert told.noted == [(BYTES, 9 * MS)]
    assert figures == (0, 0)
    assert not any("_predict" in name for name in metrics.flat())


def test_a_copy_that_took_longer_than_its_lease_teaches_nothing() -> None:
    told, _, figures = measured(waited_ms=0, load_ms=0, since_ms=5, copy_ms=106)
    assert (told.noted, figures) == ([], (0, 0))


def test_a_lease_that_is_not_known_teaches_nothing() -> None:
    told = Told()
    report = pb.LoadReport(lease_id=LEASE, copy_us=10**12, load_us=1, prefill_saved_us=1)
    assert Loads(cast(Any, told), Metrics(), "default").ended(report, BYTES) == (0, 0)
    assert (told.noted, told.guarded) == ([], [])


def test_without_a_prediction_there_is_nothing_to_compare() -> None:
    told, metrics, figures = measured(waited_ms=0, load_ms=4, since_ms=5)
    assert (told.noted, figures) == ([(BYTES, 4 * MS)], (4_000, 0))
    assert not any("_predict" in name for name in metrics.flat())


@pytest.mark.parametrize(
    ("us", "expected_s"),
    [(2.5e6, 2.5), (0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (math.inf, SECONDS_MAX)],
)
def test_what_a_client_reports_is_a_number_of_seconds_within_bounds(
    us: float, expected_s: float
) -> None:
    assert seconds_of(us) == expected_s
    told, _, _ = measured(waited_ms=0, load_ms=4, since_ms=5, saved_us=us)
    assert told.guarded == [("default", 1, 0.004, expected_s)]


def test_leases_that_never_end_are_forgotten() -> None:
    loads = Loads(cast(Any, Told()), Metrics(), "default")
    for lease_id in range(1, 70_000):
        loads.granted(lease_id, 0, 0)
    assert len(loads._granted) == 1 << 16
    loads.forget(69_999)
    loads.forget(1)
    assert len(loads._granted) == (1 << 16) - 1
