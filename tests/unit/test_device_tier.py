"""The device tier's order of things, seen by a device that records it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore import shm
from kvstore.model.reasons import KVStoreError, NoSpace, Reason
from kvstore.model.values import Place, Region
from kvstore.testing.gpu import GRANULE_BYTES, RecordingDriver
from kvstore.tiers.base import Crossing
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.driver import DeviceLostError, HandleKind
from kvstore.tiers.host import HostTier

MIB = 1 << 20
DEVICE, HOST = 0, 1
SLOT = 8192


def region_of(region_id: int, tier: int = DEVICE, slots: int = 4) -> Region:
    header = shm.header_bytes(slots)
    return Region(region_id, tier, "default", SLOT, slots, header, header + slots * SLOT)


def place(region_id: int, slot: int, tier: int = DEVICE) -> Place:
    return Place(tier, region_id, slot, 1, 0)


class Stand:
    """A host tier above which a device tier copies, as in the daemon: nothing of it on this
    thread, which stands for the event loop's.
    """

    def __init__(self, *, export: bool = False, capacity_bytes: int = MIB) -> None:
        self.driver = RecordingDriver()
        self.worker = ThreadPoolExecutor(1)
        self.host = HostTier(MIB, region_bytes=region_of(1).total_bytes, mlock="off")
        self.tier = DeviceTier(
            self.driver,
            capacity_bytes,
            background=self.worker,
            host_map=self.host.mapped,
            export=export,
        )
        self.host.unmapping = self.tier.release_host
        self.worker.submit(self.tier.open).result()
        self.driver.loop_thread = threading.get_ident()

    def crossing(self, device: Place, host: Place, *, inward: bool) -> Crossing:
        return Crossing(device, host, self.host.view(host, SLOT), inward)

    def cross(self, *crossings: Crossing) -> list[KVStoreError | OSError | None]:
        return self.worker.submit(self.tier.cross, list(crossings)).result()

    def settle(self) -> None:
        """What the background threads would have done by now."""
        self.worker.submit(self._work).result()

    def _work(self) -> None:
        while self.host.work():
            pass


@pytest.fixture
def stand() -> Iterator[Stand]:
    one = Stand()
    yield one
    one.worker.submit(one.tier.close).result()
    one.host.close()
    one.worker.shutdown()
    assert one.driver.broken == []


def test_a_copy_has_ended_only_after_its_event(stand: Stand) -> None:
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    stand.host.view(place(2, 0, HOST), SLOT)[:] = 7
    inward = stand.crossing(place(1, 3), place(2, 0, HOST), inward=True)
    outward = stand.crossing(place(1, 3), place(2, 1, HOST), inward=False)
    assert stand.cross(inward) == [None]
    assert stand.cross(outward) == [None]
    assert (stand.host.view(place(2, 1, HOST), SLOT) == 7).all()
    calls = [call for call in stand.driver.log if call in ("copy_in", "copy_out", "record", "wait")]
    assert calls == ["copy_in", "record", "wait", "copy_out", "record", "wait"]


def test_a_batch_is_begun_before_it_is_waited_for(stand: Stand) -> None:
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    batch = [stand.crossing(place(1, i), place(2, i, HOST), inward=True) for i in range(4)]
    assert stand.cross(*batch) == [None] * 4
    calls = [call for call in stand.driver.log if call in ("copy_in", "wait")]
    assert calls == ["copy_in"] * 4 + ["wait"] * 4


def test_memory_is_made_by_the_first_copy_and_given_back_once_closed(stand: Stand) -> None:
    stand.tier.assign(region_of(1))
    assert "make" not in stand.driver.log
    assert stand.tier.stats().made_bytes == 0
    stand.host.assign(region_of(2, HOST))
    assert stand.cross(stand.crossing(place(1, 0), place(2, 0, HOST), inward=True)) == [None]
    assert stand.tier.stats().made_bytes == GRANULE_BYTES
    stand.tier.unassign(1)
    assert stand.tier.stats().made_bytes == GRANULE_BYTES, "clients may have it open"
    stand.tier.released(1)
    assert stand.tier.stats().made_bytes == 0
    stand.settle()
    assert stand.driver.memories == {}


def test_a_host_region_is_registered_once_and_unregistered_before_it_is_unmapped(
    stand: Stand,
) -> None:
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    for slot in range(3):
        crossing = stand.crossing(place(1, slot), place(2, slot, HOST), inward=True)
        assert stand.cross(crossing) == [None]
    del crossing
    assert stand.driver.log.count("register") == 1
    assert stand.tier.stats().registered_bytes == region_of(2).total_bytes
    stand.host.unassign(2)
    stand.settle()
    assert stand.driver.log.count("unregister") == 1
    assert stand.driver.registered == {}
    assert stand.tier.stats().registered_bytes == 0


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(stand: Stand) -> None:
    stand.driver.pins = False
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    for slot in range(2):
        crossing = stand.crossing(place(1, slot), place(2, slot, HOST), inward=True)
        assert stand.cross(crossing) == [None]
    assert stand.driver.log.count("register") == 1, "it is not tried for each copy"
    assert "pins nothing" in stand.tier.stats().unpinned_reason


def test_regions_stay_within_the_capacity() -> None:
    stand = Stand(capacity_bytes=2 * GRANULE_BYTES)
    stand.host.assign(region_of(9, HOST))
    for region_id in range(1, 4):
        stand.tier.assign(region_of(region_id))
    outcomes = [
        stand.cross(stand.crossing(place(i, 0), place(9, 0, HOST), inward=True))[0]
        for i in range(1, 4)
    ]
    assert outcomes[:2] == [None, None]
    assert isinstance(outcomes[2], NoSpace)
    stand.tier.unassign(1)
    stand.tier.released(1)
    assert stand.cross(stand.crossing(place(3, 0), place(9, 0, HOST), inward=True)) == [None]
    stand.worker.submit(stand.tier.close).result()
    stand.host.close()
    stand.worker.shutdown()
    assert stand.driver.broken == []


def test_a_full_device_is_no_lost_one(stand: Stand) -> None:
    stand.driver.capacity_bytes = 0
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    (outcome,) = stand.cross(stand.crossing(place(1, 0), place(2, 0, HOST), inward=True))
    assert isinstance(outcome, NoSpace)
    assert outcome.reason is Reason.NO_SPACE
    assert not stand.tier.lost
    stand.driver.capacity_bytes = MIB
    assert stand.cross(stand.crossing(place(1, 0), place(2, 0, HOST), inward=True)) == [None]


@pytest.mark.parametrize("calls", range(6))
def test_a_lost_device_fails_everything_from_then_on(stand: Stand, calls: int) -> None:
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    stand.driver.lost_at = calls  # make, register, copy_in, record, wait, and what comes next
    for _ in range(2):
        crossing = stand.crossing(place(1, 0), place(2, 0, HOST), inward=True)
        stand.cross(crossing)
    (outcome,) = stand.cross(crossing)
    assert isinstance(outcome, DeviceLostError)
    assert "told to be lost" in stand.tier.lost
    assert stand.tier.stats().state == f"lost: {stand.tier.lost}"
    with pytest.raises(DeviceLostError):
        stand.worker.submit(stand.tier.read, place(1, 0), 16).result()
    # What the context took with it is not there to be given back, nor under way any more.
    stand.driver.registered.clear()
    stand.driver.broken.clear()
    stand.driver._queued.clear()


@pytest.mark.parametrize("at", ["copy_in", "record", "wait"])
def test_a_defect_in_a_batch_leaves_no_copy_under_way(stand: Stand, at: str) -> None:
    """Whoever asked is answered, and gives the memory of all of the batch to others."""
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    calls: list[str] = []

    def before(call: str) -> None:
        calls.append(call)
        if calls.count(at) == 2 and call == at:
            raise RuntimeError("no OSError")

    stand.driver.before = before
    batch = [stand.crossing(place(1, i), place(2, i, HOST), inward=True) for i in range(3)]
    with pytest.raises(RuntimeError, match="no OSError"):
        stand.cross(*batch)
    assert not any(stand.driver._queued.values())
    assert not stand.tier.lost
    stand.driver.before = lambda call: None
    assert stand.cross(batch[0]) == [None]


def test_a_device_whose_copies_cannot_be_ended_after_a_defect_is_lost(stand: Stand) -> None:
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))

    def before(call: str) -> None:
        if call in ("wait", "drain"):
            raise RuntimeError("no OSError")

    stand.driver.before = before
    with pytest.raises(RuntimeError, match="no OSError"):
        stand.cross(stand.crossing(place(1, 0), place(2, 0, HOST), inward=True))
    assert "cannot be ended" in stand.tier.lost
    stand.driver.before = lambda call: None
    stand.driver.registered.clear()
    stand.driver._queued.clear()


def test_pools_are_handed_out_only_if_they_may_be() -> None:
    for export in (False, True):
        stand = Stand(export=export)
        stand.tier.assign(region_of(1))
        stand.host.assign(region_of(2, HOST))
        assert stand.tier.exported(1) is None
        assert stand.cross(stand.crossing(place(1, 0), place(2, 0, HOST), inward=True)) == [None]
        handed = stand.tier.exported(1)
        assert (handed is not None) == export == ("export" in stand.driver.log)
        assert handed is None or handed[1] == GRANULE_BYTES
        stand.tier.unassign(1)
        assert stand.tier.exported(1) is None
        stand.worker.submit(stand.tier.close).result()
        stand.host.close()
        stand.worker.shutdown()
        assert stand.driver.broken == []


@pytest.mark.parametrize(
    ("kind", "kept"), [(HandleKind.CUDA_FD, False), (HandleKind.CUDA_IPC, True)]
)
def test_memory_that_others_opened_by_name_is_freed_once_they_let_go(
    kind: HandleKind, kept: bool
) -> None:
    stand = Stand(export=True)
    stand.driver.export_kind = kind
    stand.host.assign(region_of(9, HOST))
    for region_id in (1, 2):
        stand.tier.assign(region_of(region_id))
        crossing = stand.crossing(place(region_id, 0), place(9, 0, HOST), inward=True)
        assert stand.cross(crossing) == [None]
        stand.tier.unassign(region_id)
        stand.settle()
    del crossing
    assert (len(stand.driver.memories) == 2) == kept
    stand.tier.released(1)
    stand.settle()
    assert len(stand.driver.memories) == kept
    assert stand.tier.stats().made_bytes == GRANULE_BYTES
    stand.worker.submit(stand.tier.close).result()
    assert stand.driver.memories == {}
    stand.host.close()
    stand.worker.shutdown()
    assert stand.driver.broken == []


def test_a_pool_that_cannot_be_exported_is_used_all_the_same() -> None:
    stand = Stand(export=True)
    stand.driver.exports = False
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    assert stand.cross(stand.crossing(place(1, 0), place(2, 0, HOST), inward=True)) == [None]
    assert stand.tier.exported(1) is None
    assert not stand.tier.lost
    stand.worker.submit(stand.tier.close).result()
    stand.host.close()
    stand.worker.shutdown()


def test_what_is_read_begins_at_a_page(stand: Stand) -> None:
    stand.tier.assign(region_of(1))
    stand.host.assign(region_of(2, HOST))
    stand.host.view(place(2, 0, HOST), SLOT)[:] = np.arange(SLOT) % 251
    assert stand.cross(stand.crossing(place(1, 1), place(2, 0, HOST), inward=True)) == [None]
    data = stand.worker.submit(stand.tier.read, place(1, 1), SLOT).result()
    assert (data == np.arange(SLOT) % 251).all()
    assert data.ctypes.data % 4096 == 0
