"""Renders numbers as Prometheus metrics. Names and units follow Prometheus' rules; help texts say
what moves them.

`counted` are the servicers' counts; `StoreCollector` adds the state of the store, of the memory and
of the fd socket. The collector reads a snapshot when it is scraped; the registry is the caller's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

import kvstore
from kvstore.model.sampling import Arm
from kvstore.model.values import CoreStats, PoolStats
from kvstore.store import StoreStats
from kvstore.store.guards import GuardStats
from kvstore.store.values import LinkStats
from kvstore.tiers.base import ArchiveStats
from kvstore.tiers.device import DeviceStats
from kvstore.tiers.host import HostStats
from kvstore_server.counts import Counts, Histogram, result_of
from kvstore_server.guarding import rows_of_guards
from kvstore_server.linefile import NOTHING, LineCounts

STATES = ("starting", "ready", "draining")
DEFAULT_TENANT = "default"
TENANT_DIGITS = 12
CORE_EVENTS = (
    *("blocks_acquired", "blocks_dropped", "blocks_stored", "commits", "copies_failed"),
    *("dropped_unsaved", "leases_expired", "loads", "loads_corrupt", "loads_failed", "promoted"),
    *("regions_reclaimed", "reservations_expired", "saved", "saves_failed", "spaces_doubted"),
    "staging_exchanged",
)
COPIES = ("commit", "demote", "load", "promote", "save")
DECISIONS = ("load", "recompute")
ARMS = tuple(arm.name.lower() for arm in Arm if arm)


class Snapshot(NamedTuple):
    """Everything that is shown, of one moment."""

    counts: Counts
    store: StoreStats
    fd_events: Mapping[str, int]
    fd_connections: int
    http_events: Mapping[str, int] = {}
    state: str = "ready"
    wanted_bytes: int = 0
    sessions_max: int = 0
    tcp_events: Mapping[str, int] = {}
    fd_sent_bytes: int = 0
    trace_dropped: int = 0
    recorded: LineCounts = NOTHING


class StoreCollector:
    """A prometheus_client collector. `take` may wait for the event loop, and raises when that is
    stuck."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry that asks at registration must not wait for the loop."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from families(self._take())


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """All metrics of a snapshot."""
    store = snapshot.store
    yield _gauge("build_info", "Version of the daemon.", [({"version": kvstore.__version__}, 1)])
    yield _gauge("uptime_seconds", "Since the daemon's start.", [({}, store.uptime_s)])
    states = [({"state": state}, int(state == snapshot.state)) for state in STATES]
    yield _gauge("state", "1 for the state that the daemon is in.", states)
    yield from _of_tiers(store)
    yield from _of_links(store.links)
    yield from _of_core(store.core)
    yield from _of_events(store.core.counters)
    yield _gauge("sessions_max", "Clients that may be attached.", [({}, snapshot.sessions_max)])
    yield from _of_host(store.host, snapshot.wanted_bytes)
    yield from of_archives({**store.archives, **store.devices})
    yield from of_guards(store.guards)
    yield _gauge("fd_connections", "Clients on the fd socket.", [({}, snapshot.fd_connections)])
    events = [({"event": name}, n) for name, n in sorted(snapshot.fd_events.items())]
    yield _counter("fd_events", "What happened on the fd sockets.", events)
    sent = "Bytes of blocks that were sent over the fd sockets to clients that map no memory."
    yield _counter("fd_sent_bytes", sent, [({}, snapshot.fd_sent_bytes)])
    events = [({"event": name}, n) for name, n in sorted(snapshot.http_events.items())]
    yield _counter("http_connections", "What became of connections over HTTP.", events)
    if snapshot.tcp_events:
        events = [({"event": name}, n) for name, n in sorted(snapshot.tcp_events.items())]
        yield _counter(
            "tcp_events", "Calls over TCP, and readings of certificates and tokens.", events
        )
    yield from _of_files(snapshot.trace_dropped, snapshot.recorded)
    yield from counted(snapshot.counts)


def _of_files(trace_dropped: int, recorded: LineCounts) -> Iterator[Metric]:
    lost = "Records that `trace.file` did not get."
    yield _counter("trace_dropped_lines", lost, [({}, trace_dropped)])
    written = "Prompts in the access log."
    yield _counter("record_lines", written, [({}, recorded.written)])
    lost = "Calls that the access log did not get."
    yield _counter("record_dropped_lines", lost, [({}, recorded.dropped)])
    size = "Bytes of the access log's files."
    yield _gauge("record_bytes", size, [({}, recorded.bytes)])


def counted(counts: Counts) -> Iterator[Metric]:
    """The metrics of what the servicers count."""
    results: dict[tuple[str, str, str], Histogram] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    for (op, reason, tier), histogram in counts.requests.items():
        results.setdefault((op, result_of(reason), tier), Histogram()).add(histogram)
        reasons[op, reason.name] += sum(histogram.counts)
    yield _histogram(
        "request_seconds",
        "Time in the daemon, by operation, result and slowest tier touched.",
        ("op", "result", "tier"),
        results.items(),
    )
    yield _counter("requests", "Calls by reason.", _rows(("op", "reason"), reasons.items()))
    yield from _lookups(counts)
    yield from _loads(counts)
    yield from _plans(counts)
    yield from _evidence(counts)
    yield _counter(
        "fingerprint_rejections",
        "Fingerprints refused and prefixes missed because this field differs.",
        _by("field", counts.rejections),
    )
    yield _counter("fingerprints_held", "Offers of incomplete fingerprints.", [({}, counts.held)])


def tenant_label(name: str) -> str:
    """How a tenant is called in the metrics: the first digits of the SHA-256 of its name, since
    names are nobody's business who may read numbers. `default` is ours, and stays.
    """
    if name == DEFAULT_TENANT:
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:TENANT_DIGITS]


def flatten(metrics: Iterable[Metric]) -> dict[str, float]:
    """`name{label="value"}` to value, without buckets."""
    found = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found


def _lookups(counts: Counts) -> Iterator[Metric]:
    lookups = _rows(("tenant", "result"), counts.lookups.items())
    yield _counter("lookups", "Look-ups by result.", lookups)
    asked = _by("tenant", counts.lookup_tokens)
    yield _counter("lookup_tokens", "Tokens asked for in look-ups.", asked)
    yield _counter(
        "hit_tokens",
        "Tokens found and advised to load, by the slowest tier that the hit needs.",
        _rows(("tenant", "tier"), counts.hit_tokens.items()),
    )
    yield _counter(
        "declined_tokens",
        "Tokens found, but predicted to be recomputed faster.",
        _by("tenant", counts.declined_tokens),
    )


def _loads(counts: Counts) -> Iterator[Metric]:
    loads = _rows(("tenant", "reason"), counts.loads.items())
    yield _counter("loads", "Loads that clients report, by reason.", loads)
    tokens = _by("tenant", counts.loaded_tokens)
    yield _counter("loaded_tokens", "Tokens that were loaded, not prefilled.", tokens)
    copied = _by("tenant", counts.loaded_bytes)
    yield _counter("loaded_bytes", "Bytes that clients copied.", copied)
    yield _counter(
        "prefill_saved_seconds",
        "Prefill time that loads replaced, by the clients' cost models.",
        _by("tenant", counts.prefill_saved_s),
    )
    yield _histogram(
        "client_copy_seconds",
        "Copy time of a load, as the client measured it.",
        ("tenant",),
        (((tenant,), one) for tenant, one in counts.client_copy.items()),
    )


def _evidence(counts: Counts) -> Iterator[Metric]:
    """All sides from the start, so that a rate shows the first one."""
    for name, values, text in (
        ("withheld_lookups", counts.withheld_lookups, "Look-ups that found what was withheld."),
        ("withheld_tokens", counts.withheld_tokens, "Tokens that they would have loaded."),
        ("reported_computed_tokens", counts.computed_tokens, "Tokens that clients computed."),
        ("reported_moved_bytes", counts.moved_bytes, "Bytes that clients loaded for requests."),
    ):
        yield _counter(name, text, _by("arm", {arm: values[arm] for arm in ARMS}))
    saving = "Time that withheld loads would have saved, by the plan."
    yield _counter("withheld_saving_seconds", saving, [({}, counts.withheld_saving_s)])
    rows = [
        (_labels(("arm", "outcome"), (arm, outcome)), counts.reported[arm, outcome])
        for arm in ARMS
        for outcome in ("ok", "failed")
    ]
    yield _counter("reported_requests", "Requests that clients report, by side.", rows)
    yield _histogram(
        "first_token_seconds",
        "Time to the first token, as clients measured it, by side.",
        ("arm",),
        (((arm,), counts.first_token.get(arm, Histogram())) for arm in ARMS),
    )
    audited = [({"outcome": one}, counts.audited[one]) for one in ("match", "mismatch")]
    yield _counter("audited_blocks", "Stored blocks that were computed and compared.", audited)


def _plans(counts: Counts) -> Iterator[Metric]:
    for name, seconds, text in (
        ("load", counts.planned_load_s, "Predicted time of loading what look-ups found"),
        ("recompute", counts.planned_recompute_s, "Predicted prefill time of the same tokens"),
    ):
        rows = [({"decision": one}, seconds.get(one, 0.0)) for one in DECISIONS]
        yield _counter(f"plan_{name}_seconds", f"{text}, by what was advised.", rows)
    for name, of_tier, text in (
        ("predicted", counts.predicted_load_s, "What plans had predicted for loads that followed"),
        ("measured", counts.measured_load_s, "Time from asking to the last byte of those loads"),
    ):
        tiers = _by("tier", of_tier)
        yield _counter(f"load_{name}_seconds", f"{text}, by slowest tier.", tiers)
    yield _histogram(
        "load_prediction_error_ratio",
        "How far predictions of loads were off, as a share of what was measured, by slowest tier.",
        ("tier",),
        (((tier,), one) for tier, one in counts.load_error.items()),
    )


def _of_links(links: Iterable[LinkStats]) -> Iterator[Metric]:
    links = list(links)
    for name, field, text in (
        ("transfers", "samples", "Measured loads out of the tier."),
        ("bytes", "moved_bytes", "Bytes of the measured loads."),
        ("seconds", "moving_s", "Time that the measured loads took."),
        (
            "predicted_seconds",
            "predicted_s",
            "Time that the measured loads were predicted to take.",
        ),
        ("probes", "probes", "Times the daemon itself measured a tier that plans passed over."),
    ):
        rows: list[_Row] = [({"tier": one.tier}, getattr(one, field)) for one in links]
        yield _counter(f"link_{name}", text, rows)
    for name, field, text in (
        ("bytes_per_second", "bytes_per_second", "Estimate of the tier's bandwidth."),
        ("latency_seconds", "latency_s", "Estimate of a load's fixed time."),
        ("queued_bytes", "queued_bytes", "Bytes that are being loaded."),
    ):
        rows = [({"tier": one.tier}, getattr(one, field)) for one in links]
        yield _gauge(f"link_{name}", text, rows)


def _of_tiers(store: StoreStats) -> Iterator[Metric]:
    pools: list[tuple[dict[str, str], PoolStats | ArchiveStats]] = [
        ({"tier": pool.name}, pool) for pool in store.core.pools
    ]
    tiers = pools + [({"tier": name}, archive) for name, archive in store.archives.items()]
    for name, text in (
        ("capacity_bytes", "Bytes that the tier may use."),
        ("used_bytes", "Bytes of regions or files, and of all else that the tier takes."),
        ("block_bytes", "Bytes of blocks that can be read."),
        ("blocks", "Blocks that can be read."),
        ("free_slots", "Slots without a block in open regions."),
        ("regions", "Open regions; of a disk: files."),
    ):
        yield _gauge(f"tier_{name}", text, [(tier, getattr(one, name)) for tier, one in tiers])
    for name, text in (
        ("staging_bytes", "Bytes of staging regions."),
        ("closing_bytes", "Bytes of closed regions that a process still has mapped."),
        ("pinned_bytes", "Bytes of pinned blocks."),
        ("closing_regions", "Closed regions that a process still has mapped."),
    ):
        yield _gauge(f"tier_{name}", text, [(tier, getattr(pool, name)) for tier, pool in pools])
    yield _counter(
        "tier_evictions",
        "Blocks that made room for others.",
        [(tier, one.evictions) for tier, one in tiers],
    )


def _of_core(core: CoreStats) -> Iterator[Metric]:
    for name, text in (
        ("used_bytes", "Bytes of the tenant's regions."),
        ("quota_bytes", "Bytes that the tenant keeps when others need room."),
        ("block_bytes", "Bytes of the tenant's blocks that can be read."),
        ("blocks", "The tenant's blocks that can be read."),
    ):
        values = {one.tenant: getattr(one, name) for one in core.tenants}
        yield _gauge(f"tenant_{name}", text, _by("tenant", values))
    leases = {"copy": core.read_leases, "view": core.view_leases, "write": core.write_leases}
    yield _gauge("leases", "Leases held.", [({"kind": kind}, n) for kind, n in leases.items()])
    spaces = {"open": core.spaces_open, "held": core.spaces_held}
    yield _gauge(
        "spaces",
        "Fingerprints in use, or held for review.",
        [({"state": state}, n) for state, n in spaces.items()],
    )
    yield _gauge("sessions", "Clients attached.", [({}, core.sessions)])
    yield _gauge("pins", "Operators' pins.", [({}, core.pins)])
    yield _gauge("reviews_held", "Fingerprints that wait for review.", [({}, core.reviews_held)])
    yield _gauge("copies_in_flight", "Copies under way.", [({}, core.copies_in_flight)])
    yield _gauge("saves_in_flight", "Saves to an archive under way.", [({}, core.saves_in_flight)])


def _of_events(counters: Mapping[str, int]) -> Iterator[Metric]:
    """All of them from the start, so that a rate shows the first one."""
    for name, prefix, text in (
        ("copies", "copies_", "Copies of blocks that ended, well or not, by what for."),
        ("copied_bytes", "copied_bytes_", "Bytes of blocks that were copied, by what for."),
    ):
        rows: list[_Row] = [({"why": why}, counters.get(prefix + why, 0)) for why in COPIES]
        yield _counter(name, text, rows)
    rows = [({"event": name}, counters.get(name, 0)) for name in CORE_EVENTS]
    yield _counter("core_events", "What the core counts.", rows)


def _of_host(host: HostStats, wanted_bytes: int) -> Iterator[Metric]:
    fine = not host.prefault_error
    yield _gauge("host_ok", "0 while memory is refused; status says why.", [({}, fine)])
    wanted = "Bytes of host memory that the settings ask for."
    yield _gauge("host_wanted_bytes", wanted, [({}, wanted_bytes)])
    for name, text in (
        ("prefaulted_bytes", "Bytes of host memory that are faulted in."),
        ("locked_bytes", "Bytes of host memory that cannot be swapped out."),
        ("huge_bytes", "Bytes of host memory that were put into huge pages."),
        ("stock_bytes", "Bytes of host memory that are prepared for regions to come."),
    ):
        yield _gauge(f"host_{name}", text, [({}, getattr(host, name))])
    assigned = {"stock": host.assigned_from_stock, "spot": host.assigned_on_the_spot}
    yield _counter(
        "host_assigned_regions",
        "Regions made, from prepared memory or on the spot.",
        [({"source": source}, n) for source, n in assigned.items()],
    )


def of_guards(guards: Sequence[GuardStats]) -> Iterator[Metric]:
    """State, value and lines of each guard."""
    for name, text, counter, rows in rows_of_guards(guards, tenant_label):
        yield (_counter if counter else _gauge)(name, text, rows)


def of_archives(archives: Mapping[str, ArchiveStats | DeviceStats]) -> Iterator[Metric]:
    """A metric for each number of a tier beside the host: `kvstore_disk_saves_total`."""
    for tier, archive in archives.items():
        yield from _of_archive(tier, archive)


def _of_archive(tier: str, archive: ArchiveStats | DeviceStats) -> Iterator[Metric]:
    fine = archive.state.startswith("ok")
    yield _gauge(f"{tier}_ok", "0 while something is wrong; status says what.", [({}, fine)])
    for name, value in archive.gauges.items():
        yield _gauge(f"{tier}_{name}", _text_of(name), [({}, value)])
    for name, rows in _labelled(archive.counters).items():
        yield _counter(f"{tier}_{name}", _text_of(name), rows)


ARCHIVE_TEXTS = {
    "file_system_free_bytes": "Bytes that its file system has free.",
    "spare_bytes": "Bytes that the tier leaves free in its file system.",
    "loading": "1 until all that an earlier daemon has saved can be found.",
    "writing_stopped": "1 while nothing is saved; status says why.",
    "reading_stopped": "1 while nothing is loaded; status says why.",
    "written_day_bytes": "Bytes written in the last 24 hours.",
    "endurance_day_bytes": "Bytes that may be written in 24 hours; 0: no limit.",
    "write_bytes_per_second": "Rate of writes since the hour before this one began.",
    "save_chance_wanted": "Least chance of another use with which a block is saved, 0 to 1; 0: the"
    " policy's own line alone.",
    "eviction_age_seconds": "How long ago what last made room was saved, at least.",
    "slots": "Places for blocks.",
    "index_bytes": "Bytes of the index.",
    "aside_bytes": "Bytes of what could not be opened and was set aside.",
    "direct_io": "0 if bytes go through the page cache.",
    "saves": "Blocks saved.",
    "saved_bytes": "Bytes of blocks saved.",
    "saves_refused": "Blocks not saved because writing was stopped.",
    "save_batches": "Group commits.",
    "save_seconds": "Time in group commits.",
    "loads": "Blocks loaded and verified.",
    "loaded_bytes": "Bytes of blocks loaded.",
    "corrupt_dropped": "Records that were damaged, or another's, and dropped.",
    "rows_dropped": "Damaged rows of the index, dropped.",
    "lost_segments": "Files of the index that were not there.",
    "set_aside": "Times that a content could not be opened and was set aside.",
    "forgotten": "Names forgotten on request.",
    "made_bytes": "Bytes of the GPU's memory that are taken.",
    "registered_bytes": "Bytes of host memory that are pinned for the GPU.",
    "exported_regions": "Pools that engines can open.",
    "copies": "Blocks copied between host memory and the GPU.",
    "copied_bytes": "Bytes of blocks copied between host memory and the GPU.",
    "copies_failed": "Blocks that were not copied because the GPU was full, or lost.",
    "write_errors": "Errors of the device in writing.",
    "read_errors": "Errors of the device in reading.",
}


def _text_of(name: str) -> str:
    return ARCHIVE_TEXTS.get(name, f"{name.replace('_', ' ').capitalize()}.")


def _labelled(counters: Mapping[str, float]) -> dict[str, list[_Row]]:
    """Counters "name label=value" by name."""
    found: dict[str, list[_Row]] = {}
    for counter, value in counters.items():
        name, *labels = counter.split(" ")
        found.setdefault(name, []).append((dict(one.split("=", 1) for one in labels), value))
    return found


_Row = tuple[dict[str, str], float]


def _rows(names: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> list[_Row]:
    return [(_labels(names, key), value) for key, value in sorted(values)]


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> dict[str, str]:
    pairs = zip(names, values, strict=True)
    return {name: tenant_label(value) if name == "tenant" else value for name, value in pairs}


def _by(name: str, values: Mapping[str, float]) -> list[_Row]:
    return [(_labels((name,), (key,)), value) for key, value in sorted(values.items())]


def _gauge(name: str, text: str, rows: Iterable[_Row]) -> Metric:
    metric = GaugeMetricFamily(f"kvstore_{name}", text)
    for labels, value in rows:
        metric.add_sample(metric.name, labels, value)
    return metric


def _counter(name: str, text: str, rows: Iterable[_Row]) -> Metric:
    metric = CounterMetricFamily(f"kvstore_{name}", text)
    for labels, value in rows:
        metric.add_sample(f"{metric.name}_total", labels, value)
    return metric


def _histogram(
    name: str,
    text: str,
    names: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], Histogram]],
) -> Metric:
    metric = HistogramMetricFamily(f"kvstore_{name}", text)
    for key, histogram in sorted(rows, key=lambda row: row[0]):
        labels = _labels(names, key)
        for bound, count in histogram.cumulative():
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
        metric.add_sample(f"{metric.name}_sum", labels, histogram.sum)
        metric.add_sample(f"{metric.name}_count", labels, sum(histogram.counts))
    return metric
