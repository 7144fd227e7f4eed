"""What every pool's memory promises: zeroed regions, places that hold their bytes, generations."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import shm
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import Place, Region
from kvstore.tiers.base import PoolMemory
from kvstore.tiers.host import HostTier

MIB = 1 << 20
TIER = 0


def region_of(region_id: int, slots: int = 5, slot_bytes: int = 8192) -> Region:
    header = shm.header_bytes(slots)
    total = header + slots * slot_bytes
    return Region(region_id, TIER, "default", slot_bytes, slots, header, total)


def at(region: Region, slot: int, offset: int = 0) -> Place:
    return Place(TIER, region.id, slot, 1, offset)


@pytest.fixture(params=["from stock", "on the spot"])
def memory(request: pytest.FixtureRequest) -> Iterator[PoolMemory]:
    tier = HostTier(MIB, region_bytes=region_of(1).total_bytes, mlock="off")
    if request.param == "from stock":
        while tier.work():
            pass
    yield tier
    tier.close()


def test_a_region_begins_all_zero(memory: PoolMemory) -> None:
    region = region_of(1)
    memory.assign(region)
    for slot in range(region.slots):
        assert memory.generation(1, slot) == 0
        assert not memory.view(at(region, slot), region.slot_bytes).any()


def test_places_do_not_overlap(memory: PoolMemory) -> None:
    regions = [region_of(1), region_of(2, slots=3, slot_bytes=4096)]
    for region in regions:
        memory.assign(region)
    for region in regions:
        for slot in range(region.slots):
            memory.set_generation(region.id, slot, 1000 * region.id + slot)
            memory.view(at(region, slot), region.slot_bytes)[:] = 10 * region.id + slot
    for region in regions:
        for slot in range(region.slots):
            assert memory.generation(region.id, slot) == 1000 * region.id + slot
            data = memory.view(at(region, slot), region.slot_bytes)
            assert (data == 10 * region.id + slot).all()


def test_parts_lie_side_by_side_in_a_slot(memory: PoolMemory) -> None:
    region = region_of(1)
    memory.assign(region)
    memory.view(at(region, 2, 0), 4096)[:] = 1
    memory.view(at(region, 2, 4096), 4096)[:] = 2
    whole = memory.view(at(region, 2), 8192)
    assert (whole == np.repeat([1, 2], 4096)).all()


@pytest.mark.parametrize(
    ("slot", "offset", "length"), [(5, 0, 1), (-1, 0, 1), (0, 0, 8193), (0, 8192, 1), (4, -1, 1)]
)
def test_nothing_outside_a_slot_is_given(
    memory: PoolMemory, slot: int, offset: int, length: int
) -> None:
    region = region_of(1)
    memory.assign(region)
    with pytest.raises(ValueError, match="are not in the region"):
        memory.view(at(region, slot, offset), length)


def test_generations_are_64_bits_wide(memory: PoolMemory) -> None:
    memory.assign(region_of(1))
    memory.set_generation(1, 4, 2**64 - 1)
    assert memory.generation(1, 4) == 2**64 - 1
    assert memory.generation(1, 3) == 0


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


def test_a_clients_descriptor_cannot_write(memory: PoolMemory) -> None:
    region = region_of(1)
    memory.assign(region)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(memory.fd(1), b"x", 0)
    writable = os.open(f"/proc/self/fd/{memory.fd(1)}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            shm.map_region(writable, region.total_bytes, writable=True, populate=False)
    finally:
        os.close(writable)


def test_a_closed_region_gives_nothing(memory: PoolMemory) -> None:
    region = region_of(1)
    memory.assign(region)
    memory.set_generation(1, 0, 5)
    memory.unassign(1)
    assert memory.generation(1, 0) == 0
    for access in (
        lambda: memory.view(at(region, 0), 1),
        lambda: memory.fd(1),
        lambda: memory.set_generation(1, 0, 6),
    ):
        with pytest.raises(KVStoreError) as refused:
            access()
        assert refused.value.reason is Reason.REGION_UNKNOWN
    memory.unassign(1)


def test_a_view_outlives_its_region(memory: PoolMemory) -> None:
    region = region_of(1)
    memory.assign(region)
    view = memory.view(at(region, 1), 8192)
    view[:] = 77
    memory.unassign(1)
    assert (view == 77).all()


def test_a_region_is_assigned_once(memory: PoolMemory) -> None:
    memory.assign(region_of(1))
    with pytest.raises(ValueError, match="already"):
        memory.assign(region_of(1))


def test_an_old_regions_bytes_never_come_back(memory: PoolMemory) -> None:
    for region_id in range(1, 30):
        region = region_of(region_id)
        memory.assign(region)
        for slot in range(region.slots):
            view = memory.view(at(region, slot), region.slot_bytes)
            assert not view.any()
            view[:] = 0xFF
        memory.unassign(region_id)
