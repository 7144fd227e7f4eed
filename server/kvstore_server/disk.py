"""The disk tier of this daemon, as the settings say. Called by the assembly, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.clock import Clock
from kvstore.config import Settings
from kvstore.policy.links import Link

if TYPE_CHECKING:
    from kvstore.tiers.disk.tier import DiskTier

READERS = 4
"""Threads that load: as many reach a device's limit."""
IN_FLIGHT_BYTES = 64 << 20
"""Small blocks may be on their way to and from the device by thousands."""
IN_FLIGHT_SHARE = 0.5
"""Of the host tier: what waits for the device, at most, in each direction."""
LOADS_MAX = 1 << 16
"""A long prompt is loaded at once; its bytes are bounded by the share."""
# What a load is taken for until some were measured: an ordinary NVMe device.
BYTES_PER_SECOND = 1e9
LATENCY_NS = 1_000_000


def make_disk(settings: Settings, clock: Clock) -> DiskTier | None:
    """The tier, its folder locked and not opened yet; None if there is none.

    StartError: another daemon has the folder, or the path cannot be one.
    """
    disk = settings.disk
    if not disk.path:
        return None
    # Imported late: a daemon without the tier starts sooner.
    from kvstore.tiers.disk.opening import DiskFolder
    from kvstore.tiers.disk.tier import DiskTier

    return DiskTier(
        DiskFolder(disk.path),
        capacity_bytes=disk.capacity_bytes,
        endurance_bytes_per_day=disk.endurance_bytes_per_day,
        clock=clock,
    )


def disk_link() -> Link:
    """The estimate of its speed."""
    return Link("disk", bytes_per_second=BYTES_PER_SECOND, latency_ns=LATENCY_NS)
