"""What every pool's memory promises: zeroed regions, places that hold their bytes, generations.

The host tier, and the device tier on torch's CPU device and on the recording double. How bytes come
in and out differs: a host pool is written through views, a device's by copies across.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import shm
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import Place, Region
from kvstore.testing.gpu import RecordingDriver
from kvstore.tiers.base import Crossing, PoolMemory, RegionMemory
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.torchcpu import TorchCpuDriver

MIB = 1 << 20
TIER = 0


def region_of(region_id: int, slots: int = 5, slot_bytes: int = 8192) -> Region:
    header = shm.header_bytes(slots)
    total = header + slots * slot_bytes
    return Region(region_id, TIER, "default", slot_bytes, slots, header, total)


def at(region: Region, slot: int, offset: int = 0) -> Place:
    return Place(TIER, region.id, slot, 1, offset)


class HostBytes:
    """A host pool, by its views."""

    def __init__(self, memory: HostTier) -> None:
        self.memory: RegionMemory = memory
        self._views: PoolMemory = memory

    def put(self, place: Place, data: NDArray[np.uint8]) -> None:
        self._views.view(place, len(data))[:] = data

    def get(self, place: Place, length: int) -> NDArray[np.uint8]:
        return np.array(self._views.view(place, length))


class DeviceBytes:
    """A remote pool, by copies across."""

    def __init__(self, memory: DeviceTier) -> None:
        self.memory: RegionMemory = memory
        self._remote = memory

    def put(self, place: Place, data: NDArray[np.uint8]) -> None:
        (failed,) = self._remote.cross([Crossing(place, None, data, inward=True)])
        if failed is not None:
            raise failed

    def get(self, place: Place, length: int) -> NDArray[np.uint8]:
        return self._remote.read(place, length)


PoolBytes = HostBytes | DeviceBytes


@pytest.fixture(params=["from stock", "on the spot"])
def memory(request: pytest.FixtureRequest) -> Iterator[PoolMemory]:
    """The host tier, for what only mapped memory promises."""
    tier = HostTier(MIB, region_bytes=region_of(1).total_bytes, mlock="off")
    if request.param == "from stock":
        while tier.work():
            pass
    yield tier
    tier.close()


@pytest.fixture(
    params=["host", pytest.param("torch", marks=pytest.mark.torch), "recording"],
)
def pool(request: pytest.FixtureRequest) -> Iterator[PoolBytes]:
    """Each kind of pool. The double must not have seen anything that may not be."""
    if request.param == "host":
        host = HostTier(MIB, region_bytes=region_of(1).total_bytes, mlock="off")
        yield HostBytes(host)
        host.close()
        return
    recorder = RecordingDriver()
    driver = recorder if request.param == "recording" else TorchCpuDriver()
    with ThreadPoolExecutor(1) as background:
        tier = DeviceTier(
            driver, 16 * MIB, background=background, host_map=lambda region_id: None, export=True
        )
        tier.open()
        yield DeviceBytes(tier)
        tier.close()
    assert recorder.broken == []


def full(length: int, value: int) -> NDArray[np.uint8]:
    return np.full(length, value % 256, np.uint8)


def test_a_region_begins_all_zero(pool: PoolBytes) -> None:
    region = region_of(1)
    pool.memory.assign(region)
    for slot in range(region.slots):
        assert pool.memory.generation(1, slot) == 0
        assert not pool.get(at(region, slot), region.slot_bytes).any()


def test_places_do_not_overlap(pool: PoolBytes) -> None:
    regions = [region_of(1), region_of(2, slots=3, slot_bytes=4096)]
    for region in regions:
        pool.memory.assign(region)
    for region in regions:
        for slot in range(region.slots):
            pool.memory.set_generation(region.id, slot, 1000 * region.id + slot)
            pool.put(at(region, slot), full(region.slot_bytes, 10 * region.id + slot))
    for region in regions:
        for slot in range(region.slots):
            assert pool.memory.generation(region.id, slot) == 1000 * region.id + slot
            data = pool.get(at(region, slot), region.slot_bytes)
            assert (data == 10 * region.id + slot).all()


def test_parts_lie_side_by_side_in_a_slot(pool: PoolBytes) -> None:
    region = region_of(1)
    pool.memory.assign(region)
    pool.put(at(region, 2, 0), full(4096, 1))
    pool.put(at(region, 2, 4096), full(4096, 2))
    whole = pool.get(at(region, 2), 8192)
    assert (whole == np.repeat([1, 2], 4096)).all()


@pytest.mark.parametrize(
    ("slot", "offset", "length"), [(5, 0, 1), (-1, 0, 1), (0, 0, 8193), (0, 8192, 1), (4, -1, 1)]
)
def test_nothing_outside_a_slot_is_given(
    pool: PoolBytes, slot: int, offset: int, length: int
) -> None:
    region = region_of(1)
    pool.memory.assign(region)
    with pytest.raises(ValueError, match="are not in the region"):
        pool.get(at(region, slot, offset), length)
    with pytest.raises(ValueError, match="are not in the region"):
        pool.put(at(region, slot, offset), full(length, 1))


def test_generations_are_64_bits_wide(pool: PoolBytes) -> None:
    pool.memory.assign(region_of(1))
    pool.memory.set_generation(1, 4, 2**64 - 1)
    assert pool.memory.generation(1, 4) == 2**64 - 1
    assert pool.memory.generation(1, 3) == 0


def test_a_client_reads_generations_in_the_regions_file(pool: PoolBytes) -> None:
    region = region_of(7)
    pool.memory.assign(region)
    pool.memory.set_generation(7, 3, 42)
    client = shm.map_region(pool.memory.fd(7), region.header_bytes, writable=False, populate=True)
    assert client.generations(region.slots).tolist() == [0, 0, 0, 42, 0]


def test_a_client_reads_what_was_written_and_its_generation(memory: PoolMemory) -> None:
    region = region_of(7)
    memory.assign(region)
    memory.set_generation(7, 3, 42)
    memory.view(at(region, 3), 8192)[:] = 9
    client = shm.map_region(
        memory.fd(7), region.total_bytes, writable=False, populate=True, require=shm.ARENA_SEALS
    )
    slots = client.slots2d(region.header_bytes, region.slot_bytes, region.slots)
    assert (slots[3] == 9).all()
    assert not slots[2].any()
    assert client.generations(region.slots).tolist() == [0, 0, 0, 42, 0]


def test_a_clients_descriptor_cannot_write(pool: PoolBytes) -> None:
    region = region_of(1)
    pool.memory.assign(region)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(pool.memory.fd(1), b"x", 0)
    writable = os.open(f"/proc/self/fd/{pool.memory.fd(1)}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            shm.map_region(writable, region.header_bytes, writable=True, populate=False)
    finally:
        os.close(writable)


def test_a_closed_region_gives_nothing(pool: PoolBytes) -> None:
    region = region_of(1)
    pool.memory.assign(region)
    pool.memory.set_generation(1, 0, 5)
    pool.memory.unassign(1)
    assert pool.memory.generation(1, 0) == 0
    for access in (
        lambda: pool.get(at(region, 0), 1),
        lambda: pool.put(at(region, 0), full(1, 1)),
        lambda: pool.memory.fd(1),
        lambda: pool.memory.set_generation(1, 0, 6),
    ):
        with pytest.raises(KVStoreError) as refused:
            access()
        assert refused.value.reason is Reason.REGION_UNKNOWN
    pool.memory.unassign(1)


def test_a_view_outlives_its_region(memory: PoolMemory) -> None:
    region = region_of(1)
    memory.assign(region)
    view = memory.view(at(region, 1), 8192)
    view[:] = 77
    memory.unassign(1)
    assert (view == 77).all()


def test_a_region_is_assigned_once(pool: PoolBytes) -> None:
    pool.memory.assign(region_of(1))
    with pytest.raises(ValueError, match="already"):
        pool.memory.assign(region_of(1))


def test_an_old_regions_bytes_never_come_back(pool: PoolBytes) -> None:
    for region_id in range(1, 30):
        region = region_of(region_id)
        pool.memory.assign(region)
        for slot in range(region.slots):
            assert not pool.get(at(region, slot), region.slot_bytes).any()
            pool.put(at(region, slot), full(region.slot_bytes, 0xFF))
        pool.memory.unassign(region_id)
        pool.memory.released(region_id)
