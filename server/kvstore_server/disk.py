"""The disk tier of this daemon, as the settings say. Called by the assembly, once."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvstore.clock import Clock
from kvstore.config import Settings
from kvstore.core.ahead import ABOVE_DISK_SHARE
from kvstore.policy.links import Link

if TYPE_CHECKING:
    from kvstore.tiers.disk.opening import DiskFolder
    from kvstore.tiers.disk.tier import DiskTier

READERS = 8
"""Threads that load: four reads beside each other reach a device's limit, the others verify or wait
for a processor. With four threads 64 blocks took 1.4 times as long on a busy machine.
"""
DISK_LIMITS: dict[str, Any] = {
    "copies_in_flight_max": 16,
    "copies_in_flight_bytes": 64 << 20,
    # A long prompt is loaded at once, bounded by what the host tier can spare.
    "loads_in_flight_max": 1 << 16,
    "copies_in_flight_share": 0.5,
    "save_ahead_share": ABOVE_DISK_SHARE,
}
"""The core's limits above a disk."""
# What a load is taken for until some were measured: an ordinary NVMe device.
BYTES_PER_SECOND = 1e9
LATENCY_NS = 1_000_000


def take_folder(settings: Settings) -> DiskFolder | None:
    """The tier's folder, locked, its index being examined; None if there is none.

    Called before the rest of the daemon is imported: a child examines meanwhile. StartError:
    another daemon has the folder, or the path cannot be one.
    """
    if not settings.disk.path:
        return None
    # Imported late: a daemon without the tier starts sooner.
    from kvstore.tiers.disk.opening import DiskFolder

    folder = DiskFolder(settings.disk.path)
    folder.examine_ahead()
    return folder


def make_disk(settings: Settings, clock: Clock, folder: DiskFolder) -> DiskTier:
    """The tier, not opened yet."""
    from kvstore.tiers.disk.tier import DiskTier

    disk = settings.disk
    return DiskTier(
        folder,
        capacity_bytes=disk.capacity_bytes,
        endurance_bytes_per_day=disk.endurance_bytes_per_day,
        quota_bytes={name: one.disk_quota_bytes for name, one in settings.tenants.items()},
        clock=clock,
    )


def device_threads() -> Executor:
    """Threads of the mover for the tier: readers, and one that writes."""
    from kvstore.tiers.disk.threads import DeviceThreads

    return DeviceThreads(READERS + 1, "kvstore-device")


def ledger_threads() -> ThreadPoolExecutor:
    """The loop's default executor, in which the ledger waits for its device."""
    from kvstore.tiers.disk.threads import LooseThreads

    return LooseThreads(1, "kvstore-ledger")


def disk_link(then: Link) -> Link:
    """The estimate of its speed; `then`: the path from host memory, which loaded blocks go over."""
    return Link("disk", bytes_per_second=BYTES_PER_SECOND, latency_ns=LATENCY_NS, then=then)
