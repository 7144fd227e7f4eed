"""The numbers: counted right, in the form that Prometheus takes, with closed sets of labels."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

import kvstore.core
from kvstore.core.effects import Why
from kvstore.model.plan import Overlap, Plan, Split
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreStats, PoolStats, TenantStats
from kvstore.store import StoreStats
from kvstore.testing.files import Injection, Op
from kvstore.tiers.base import ArchiveStats
from kvstore.tiers.host import HostStats
from kvstore_server.counts import LATENCY_BOUNDS_S, Histogram, result_of
from kvstore_server.exposition import (
    ARCHIVE_TEXTS,
    COPIES,
    CORE_EVENTS,
    STATES,
    Snapshot,
    StoreCollector,
    tenant_label,
)
from kvstore_server.metrics import FIELDS_MAX, Metrics
from tests.unit.disk.bench import DiskBench, keys

POOL = PoolStats("host", 0, 1000, 900, 100, 50, 3, 1, 4, 7, 700, 70, 9)
CORE = CoreStats(
    (POOL,), (TenantStats("default", 800, 1000, 7, 700),), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, {"x": 11}
)
HOST = HostStats(1000, 800, 100, 50, 0, 900, 0, "", 640, "", "", 3, 1, 2, 1)


SPLIT = Split(Overlap.SERIAL, 4, 0, 0, 1.0, 2.0)


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
        metrics.lookup("default", asked, rng.randrange(asked + 1), 0, reason, "host")
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
    assert {one.labels["state"]: one.value for one in families["kvstore_state"].samples} == {
        "starting": 0,
        "ready": 1,
        "draining": 0,
    }
    strict = list(parse_openmetrics(generate_openmetrics(registry).decode()))  # type: ignore[no-untyped-call]
    assert {family.name for family in strict} >= set(families) - {"kvstore_build_info"}


@pytest.mark.parametrize("state", STATES)
def test_a_daemon_is_in_one_state(state: str) -> None:
    registry = CollectorRegistry()
    counts = Metrics().snapshot()
    registry.register(StoreCollector(lambda: Snapshot(counts, STORE, {}, 0, state=state)))
    shown = {s: registry.get_sample_value("kvstore_state", {"state": s}) for s in STATES}
    assert {s for s, value in shown.items() if value} == {state}


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
    errors = {
        one.labels["kind"]: one.value for one in families["kvstore_disk_write_errors"].samples
    }
    assert errors == {"full": 0, "read_only": 0, "io": 2, "gone": 0, "other": 0}
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
    metrics.lookup("a", 100, 64, 0, Reason.HIT, "host")
    metrics.lookup("a", 100, 0, 32, Reason.DECLINED_RECOMPUTE_FASTER, "disk")
    metrics.lookup("a", 100, 0, 0, Reason.MISS_NEVER_STORED, "")
    metrics.lookup("b", 10, 10, 0, Reason.HIT, "disk")
    assert (metrics.lookup_tokens("a"), metrics.hit_tokens("a")) == (300, 64)
    flat, a, b = metrics.flat(), tenant_label("a"), tenant_label("b")
    assert flat[f'kvstore_hit_tokens_total{{tenant="{a}",tier="host"}}'] == 64
    assert flat[f'kvstore_declined_tokens_total{{tenant="{a}"}}'] == 32
    assert flat[f'kvstore_lookups_total{{tenant="{a}",result="miss"}}'] == 1
    assert flat[f'kvstore_lookups_total{{tenant="{b}",result="hit"}}'] == 1
    assert not any("bucket" in name for name in flat)


def test_only_a_load_that_succeeded_saves_prefill() -> None:
    metrics = Metrics()
    for reason in (Reason.OK, Reason.GENERATION_CHANGED):
        metrics.loaded(
            "default", reason, length_bytes=100, tokens=16, copy_s=0.002, prefill_saved_s=1.5
        )
    flat = metrics.flat()
    assert flat['kvstore_prefill_saved_seconds_total{tenant="default"}'] == 1.5
    assert flat['kvstore_loaded_tokens_total{tenant="default"}'] == 16
    assert flat['kvstore_loaded_bytes_total{tenant="default"}'] == 200
    assert flat['kvstore_client_copy_seconds_count{tenant="default"}'] == 2
    assert flat['kvstore_loads_total{tenant="default",reason="GENERATION_CHANGED"}'] == 1


def test_plans_are_summed_by_what_they_advise_where_something_was_weighed() -> None:
    metrics = Metrics()
    for blocks, load_ms, recompute_ms in ((4, 10.0, 80.0), (4, 30.0, 20.5), (0, 9.0, 3.0)):
        reason = Reason.OK if blocks else Reason.DECLINED_RECOMPUTE_FASTER
        metrics.planned(Plan(blocks, 0, load_ms, 1.0, recompute_ms, reason, 1e9, SPLIT))
    metrics.planned(Plan(4, 0, 50.0, 1.0, 0.0, Reason.COST_UNKNOWN, 1e9, SPLIT))
    flat = metrics.flat()
    found = {name: flat[name] for name in flat if name.startswith("kvstore_plan_")}
    assert found == {
        'kvstore_plan_load_seconds_total{decision="load"}': pytest.approx(0.04),
        'kvstore_plan_load_seconds_total{decision="recompute"}': pytest.approx(0.009),
        'kvstore_plan_recompute_seconds_total{decision="load"}': pytest.approx(0.1005),
        'kvstore_plan_recompute_seconds_total{decision="recompute"}': pytest.approx(0.003),
    }


def test_a_tenant_is_shown_by_a_digest_that_a_shell_can_make() -> None:
    metrics = _busy()
    name = "secret-customer"
    metrics.lookup(name, 10, 5, 0, Reason.HIT, "host")
    metrics.loaded(name, Reason.OK, length_bytes=1, tokens=1, copy_s=0.1, prefill_saved_s=1)
    core = dataclasses.replace(CORE, tenants=(TenantStats(name, 1, 2, 3, 4),))
    store = dataclasses.replace(STORE, core=core)
    registry = CollectorRegistry()
    registry.register(StoreCollector(lambda: Snapshot(metrics.snapshot(), store, {}, 0)))
    text = generate_latest(registry).decode()
    assert name not in text
    assert text.count(f'tenant="{hashlib.sha256(name.encode()).hexdigest()[:12]}"') > 8


def test_events_and_errors_are_shown_before_the_first_of_them() -> None:
    families = {family.name: family for family in _registry(Metrics()).collect()}
    for name in ("core_events", "copies", "copied_bytes", "disk_read_errors", "plan_load_seconds"):
        samples = families[f"kvstore_{name}"].samples
        assert samples, name
        assert all(one.value == 0 for one in samples), name


def test_all_that_the_core_counts_has_a_name_here() -> None:
    source = "".join(path.read_text() for path in Path(kvstore.core.__file__).parent.glob("*.py"))
    counted = re.findall(r"counters\[(.+?)\] \+=", source)
    names = {name for one in counted for name in re.findall(r'(?<!f)"([a-z_]+)"', one)}
    assert names == set(CORE_EVENTS)
    assert set(COPIES) == set(get_args(Why))


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
