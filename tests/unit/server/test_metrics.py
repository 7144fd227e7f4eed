"""The numbers: counted right, in the form that Prometheus takes, with closed sets of labels."""

from __future__ import annotations

import errno
import random
import re
from collections import defaultdict

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvstore.model.reasons import Reason
from kvstore.model.values import CoreStats, PoolStats, TenantStats
from kvstore.store import StoreStats
from kvstore.testing.files import Injection, Op
from kvstore.tiers.base import ArchiveStats
from kvstore.tiers.host import HostStats
from kvstore_server.counts import LATENCY_BOUNDS_S, Histogram, result_of
from kvstore_server.exposition import ARCHIVE_TEXTS, Snapshot, StoreCollector
from kvstore_server.metrics import FIELDS_MAX, Metrics
from tests.unit.disk.bench import DiskBench, keys

POOL = PoolStats("host", 0, 1000, 900, 100, 50, 3, 1, 4, 7, 700, 70, 9)
CORE = CoreStats(
    (POOL,), (TenantStats("default", 800, 1000, 7, 700),), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, {"x": 11}
)
HOST = HostStats(1000, 800, 100, 50, 0, 900, 0, "", "", 3, 1, 2, 1)


def _disk() -> ArchiveStats:
    bench = DiskBench()
    bench.folder.files.inject(Injection(Op.CREATE, error=errno.EIO))
    bench.save(keys(2))
    return bench.tier.stats()


DISK = _disk()
STORE = StoreStats("ready", 12.5, CORE, {}, HOST, {"disk": DISK})


def _busy(seed: int = 5) -> Metrics:
    print(f"seed {seed}")
    rng = random.Random(seed)
    metrics = Metrics()
    for _ in range(2000):
        reason = rng.choice(list(Reason))
        op = rng.choice(["lookup", "acquire", "release"])
        metrics.request(op, reason, rng.choice(["", "host"]), rng.expovariate(100))
        asked = rng.randrange(100)
        metrics.lookup("default", asked, rng.randrange(asked + 1), reason, "host")
        metrics.loaded(
            "default", reason, length_bytes=10, tokens=16, copy_s=0.001, prefill_saved_s=0.5
        )
        metrics.rejection("identity.weights_revision")
    return metrics


def _registry(metrics: Metrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(
        StoreCollector(lambda: Snapshot(metrics.snapshot(), STORE, {"accepted": 3}, 2))
    )
    return registry


def test_both_expositions_are_taken_by_prometheus_own_parsers() -> None:
    registry = _registry(_busy())
    text = generate_latest(registry).decode()
    families = {family.name: family for family in parse_text(text)}
    assert families["kvstore_tier_used_bytes"].samples[0].value == 900
    assert families["kvstore_state"].samples[0].labels == {"state": "ready"}
    strict = list(parse_openmetrics(generate_openmetrics(registry).decode()))  # type: ignore[no-untyped-call]
    assert {family.name for family in strict} >= set(families) - {"kvstore_build_info"}


def test_names_and_help_follow_the_rules() -> None:
    for family in _registry(_busy()).collect():
        assert re.fullmatch(r"kvstore_[a-z_]+", family.name), family.name
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|us|ns|mib|kb|count|total)$", family.name), family.name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total")


def test_a_slower_tier_is_shown_beside_memory_and_each_of_its_numbers_has_a_text() -> None:
    families = {family.name: family for family in _registry(_busy()).collect()}
    tiers = {one.labels["tier"]: one.value for one in families["kvstore_tier_used_bytes"].samples}
    assert tiers == {"host": 900, "disk": DISK.used_bytes}
    assert families["kvstore_disk_ok"].samples[0].value == 0
    (errors,) = families["kvstore_disk_write_errors"].samples
    assert (errors.labels, errors.value) == ({"kind": "io"}, 2)
    for name in [*DISK.gauges, *DISK.counters]:
        assert name.split(" ")[0] in ARCHIVE_TEXTS


def test_histograms_are_cumulative_and_agree_with_the_reasons() -> None:
    by_result: dict[tuple[str, ...], list[float]] = defaultdict(list)
    calls = 0.0
    for family in _registry(_busy()).collect():
        for sample in family.samples:
            if sample.name == "kvstore_request_seconds_bucket":
                key = tuple(sample.labels[name] for name in ("op", "result", "tier"))
                by_result[key].append(sample.value)
            if sample.name == "kvstore_requests_total":
                calls += sample.value
    assert calls == 2000
    assert sum(buckets[-1] for buckets in by_result.values()) == 2000
    for buckets in by_result.values():
        assert buckets == sorted(buckets)
        assert len(buckets) == len(LATENCY_BOUNDS_S) + 1


def test_hit_declined_and_missed_tokens_are_told_apart() -> None:
    metrics = Metrics()
    metrics.lookup("a", 100, 64, Reason.HIT, "host")
    metrics.lookup("a", 100, 32, Reason.DECLINED_RECOMPUTE_FASTER, "disk")
    metrics.lookup("a", 100, 0, Reason.MISS_NEVER_STORED, "")
    metrics.lookup("b", 10, 10, Reason.HIT, "disk")
    assert (metrics.lookup_tokens("a"), metrics.hit_tokens("a")) == (300, 64)
    flat = metrics.flat()
    assert flat['kvstore_hit_tokens_total{tenant="a",tier="host"}'] == 64
    assert flat['kvstore_declined_tokens_total{tenant="a"}'] == 32
    assert flat['kvstore_lookups_total{tenant="a",result="miss"}'] == 1
    assert flat['kvstore_lookups_total{tenant="b",result="hit"}'] == 1
    assert not any("bucket" in name for name in flat)


def test_only_a_load_that_succeeded_saves_prefill() -> None:
    metrics = Metrics()
    for reason in (Reason.OK, Reason.GENERATION_CHANGED):
        metrics.loaded("a", reason, length_bytes=100, tokens=16, copy_s=0.002, prefill_saved_s=1.5)
    flat = metrics.flat()
    assert flat['kvstore_prefill_saved_seconds_total{tenant="a"}'] == 1.5
    assert flat['kvstore_loaded_tokens_total{tenant="a"}'] == 16
    assert flat['kvstore_loaded_bytes_total{tenant="a"}'] == 200
    assert flat['kvstore_client_copy_seconds_count{tenant="a"}'] == 2
    assert flat['kvstore_loads_total{tenant="a",reason="GENERATION_CHANGED"}'] == 1


def test_a_snapshot_does_not_move() -> None:
    metrics = _busy()
    before = metrics.snapshot()
    shown = sum(sum(one.counts) for one in before.requests.values())
    metrics.request("lookup", Reason.HIT, "host", 0.001)
    metrics.rejection("geometry.layers")
    assert sum(sum(one.counts) for one in before.requests.values()) == shown
    assert before.rejections == {"identity.weights_revision": 2000}


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for number in range(3 * FIELDS_MAX):
        metrics.rejection(f"field-{number}")
    rejections = metrics.snapshot().rejections
    assert len(rejections) == FIELDS_MAX + 1
    assert rejections["other"] == 2 * FIELDS_MAX


@pytest.mark.parametrize(
    ("reason", "result"),
    [
        (Reason.HIT, "hit"),
        (Reason.MISS_EVICTED, "miss"),
        (Reason.DECLINED_RECOMPUTE_FASTER, "declined"),
        (Reason.ALREADY_PRESENT, "ok"),
        (Reason.NO_SPACE, "refused"),
        (Reason.BAD_KEY_LENGTH, "refused"),
        (Reason.INTERNAL, "failed"),
        (Reason.CANCELLED, "cancelled"),
    ],
)
def test_results(reason: Reason, result: str) -> None:
    assert result_of(reason) == result


def test_bounds_are_upper_bounds_and_nothing_is_lost() -> None:
    histogram = Histogram()
    for seconds in (0.0, LATENCY_BOUNDS_S[0], LATENCY_BOUNDS_S[-1], 1e9):
        histogram.observe(seconds)
    found = dict(histogram.cumulative())
    assert found[str(LATENCY_BOUNDS_S[0])] == 2
    assert found[str(LATENCY_BOUNDS_S[-1])] == 3
    assert found["+Inf"] == 4
