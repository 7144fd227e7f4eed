"""What the parts are told when the store is built of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import Settings
from kvstore.config.settings import DiskSettings
from kvstore.model.values import CoreLimits, TierKind, TierSpec
from kvstore_server.assembly import DISK_SHARE, eviction, regions_in

GIB = 1 << 30
HOST = TierSpec("host", TierKind.POOL, 2 * GIB, ingest=True)
DEVICE = TierSpec("device", TierKind.POOL, 6 * GIB)
DISK = TierSpec("disk", TierKind.ARCHIVE, 1)


@pytest.mark.parametrize(
    ("tiers", "disk_bytes", "reach"),
    [
        ([HOST], None, 1.0),
        ([HOST, DISK], 16 * GIB, 9.0),
        ([HOST, DISK], 0, 1.0 + DISK_SHARE),
        ([HOST, DEVICE, DISK], 16 * GIB, 3.0),
        ([DEVICE, HOST, DISK], 0, 1.0 + DISK_SHARE / 4),
    ],
)
def test_a_policy_is_told_the_bytes_of_all_pools_and_of_what_is_below_them(
    tiers: list[TierSpec], disk_bytes: int | None, reach: float
) -> None:
    disk = (
        DiskSettings() if disk_bytes is None else DiskSettings(path="/d", capacity_bytes=disk_bytes)
    )
    settings = Settings(disk=disk)
    policy: Any = eviction(settings, tiers)()
    assert 1 + policy._below == reach


def test_descriptors_are_counted_for_the_regions_of_all_pools() -> None:
    limits = CoreLimits(region_share=1 / 64)
    assert regions_in([HOST, DISK], limits) == 64
    assert regions_in([HOST, DEVICE, DISK], limits) == 128
