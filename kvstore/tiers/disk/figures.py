"""The disk tier's numbers and its state in words. Reads the tier, changes nothing, and waits for no
device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tiers.base import ArchiveStats, ArchiveUsage
from kvstore.tiers.disk.files import Trouble
from kvstore.tiers.disk.guard import WARN_SHARE

if TYPE_CHECKING:
    from kvstore.tiers.disk.tier import DiskTier

CORRUPT_WARN = 3
CORRUPT_WINDOW_NS = 3_600 * 10**9


def usage(tier: DiskTier) -> ArchiveUsage:
    """What it holds."""
    volume = tier.volume
    if volume is None:
        return ArchiveUsage(tier.capacity_bytes, 0, 0)
    with volume.books:
        of_ring = volume.ring.usage()
    used_bytes = of_ring.segment_bytes + of_ring.index_bytes + of_ring.aside_bytes
    return ArchiveUsage(tier.capacity_bytes, used_bytes, of_ring.live_slots)


def stats(tier: DiskTier) -> ArchiveStats:
    """Everything for status, top and metrics."""
    gauges = _gauges(tier)
    # Copied in one step: threads that save and load count names that were not there before.
    counters = {name: float(count) for name, count in dict(tier.counts).items()}
    counters["save_seconds"] = counters.pop("save_ns", 0) / 1e9
    volume = tier.volume
    if volume is None:
        return ArchiveStats(
            tier.capacity_bytes, 0, 0, 0, 0, 0, 0, state(tier), gauges, _all(counters)
        )
    with volume.books:
        of_ring = volume.ring.usage()
    gauges["slots"] = of_ring.slots
    gauges["index_bytes"] = volume.index.used_bytes()
    gauges["aside_bytes"] = of_ring.aside_bytes
    gauges["direct_io"] = volume.files.mode.direct
    counters["rows_dropped"] = volume.index.dropped_rows
    return ArchiveStats(
        capacity_bytes=tier.capacity_bytes,
        used_bytes=of_ring.segment_bytes + of_ring.index_bytes + of_ring.aside_bytes,
        block_bytes=of_ring.live_bytes,
        blocks=of_ring.live_slots,
        free_slots=of_ring.free_slots,
        regions=of_ring.segments,
        evictions=tier.counts["evictions"],
        state=state(tier),
        gauges=gauges,
        counters=_all(counters),
    )


COUNTERS = (
    "saves",
    "saved_bytes",
    "saves_refused",
    "save_batches",
    "save_seconds",
    "loads",
    "loaded_bytes",
    "corrupt_dropped",
    "rows_dropped",
    "lost_segments",
    "set_aside",
    "forgotten",
    *(f"{way}_errors kind={kind.name.lower()}" for way in ("read", "write") for kind in Trouble),
)


def _all(counters: dict[str, float]) -> dict[str, float]:
    """Also those that are zero, so that a rate can be taken from the start; evictions are told
    apart."""
    counters.pop("evictions", None)
    return {**dict.fromkeys(COUNTERS, 0.0), **counters}


def _gauges(tier: DiskTier) -> dict[str, float]:
    now_ns, wall_s = tier.clock.monotonic_ns(), tier.clock.wall_s()
    free_bytes, spare_bytes = tier.file_system
    return {
        **(
            {"file_system_free_bytes": free_bytes, "spare_bytes": spare_bytes}
            if spare_bytes
            else {}
        ),
        "loading": tier.phase in ("opening", "loading"),
        "writing_stopped": tier.writes.stopped or bool(tier.endurance.stop_reason(wall_s)),
        "reading_stopped": tier.reading.path.stopped or tier.reading.hanging.stalled(now_ns),
        "written_day_bytes": tier.endurance.day_bytes(wall_s),
        "endurance_day_bytes": tier.endurance.budget_bytes_per_day,
        "write_bytes_per_second": tier.endurance.bytes_per_s(wall_s),
        "eviction_age_seconds": tier.eviction_age_s,
    }


def state(tier: DiskTier) -> str:
    """ "ok", or what is wrong or unusual, the worst first."""
    now_ns, wall_s = tier.clock.monotonic_ns(), tier.clock.wall_s()
    said: list[str] = []
    if tier.phase == "opening" and not tier.writes.stopped:
        said.append("opening")
    if tier.phase == "loading":
        said.append(f"loading: {_loaded_percent(tier)} %")
    if tier.writes.stopped:
        seconds = tier.writes.retry_in_s(now_ns)
        said.append(f"writing stopped ({tier.writes.reason}), tried again in {seconds:.0f} s")
    if tier.writes.on_trial:
        said.append("writing is tried again")
    if tier.reading.path.stopped:
        said.append(f"reading bypassed ({tier.reading.path.reason})")
    if tier.reading.hanging.stalled(now_ns):
        said.append("reading bypassed (the device does not answer)")
    if reason := tier.endurance.stop_reason(wall_s):
        said.append(f"writing stopped: {reason}")
    elif tier.endurance.warns(wall_s):
        said.append(f"over {WARN_SHARE:.0%} of the day's budget of writes is used")
    recent = sum(now_ns - at_ns < CORRUPT_WINDOW_NS for at_ns in tier.reading.corrupt_ns)
    if recent >= CORRUPT_WARN:
        said.append(f"{recent} damaged records within the hour: check the device")
    if tier.set_aside:
        said.append(f"an older content was set aside ({tier.set_aside})")
    if said:
        return "; ".join(said)
    modes = () if tier.volume is None else tier.volume.files.mode.reasons
    return f"ok ({'; '.join(modes)})" if modes else "ok"


def _loaded_percent(tier: DiskTier) -> int:
    volume = tier.volume
    if volume is None:
        return 0
    rows = volume.index.row_count()
    return min(100, 100 * len(volume.catalog) // rows) if rows else 100
