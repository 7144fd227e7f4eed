"""Registrations of shared memory with a device: made once, left whatever happens, ended before the
memory goes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore import shm
from kvstore_client.device import DeviceRows, DeviceTarget, pinned
from kvstore_client.mapped import Staging
from tests.device_double import RecordingDevice, Tensor

TOTAL_BYTES = 1 << 16
TENSOR = Tensor(np.zeros((1, 64), np.uint8))


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice()


@pytest.fixture
def mapped() -> Iterator[Callable[[], Staging]]:
    """Makes mapped regions."""
    made: list[shm.SharedRegion] = []

    def make() -> Staging:
        made.append(shm.create_region(TOTAL_BYTES, "kvstore-test"))
        return Staging(len(made), made[-1].map)

    yield make
    for region in made:
        region.close()


def raising(error: Exception) -> None:
    raise error


def test_a_region_that_cannot_be_registered_leaves_no_other_one_in_use(
    device: RecordingDevice, mapped: Callable[[], Staging]
) -> None:
    target = DeviceTarget(DeviceRows(device, TENSOR, 1, [slice(0, 64)], "out"))
    first, second = mapped(), mapped()
    pin = pinned(device, first, TENSOR)
    assert pin is not None
    pin.leave()
    device.placing = lambda: raising(RuntimeError("CUDA error: out of memory"))
    with pytest.raises(RuntimeError):
        target.begin([], 0, [first, second])  # type: ignore[list-item]
    target.settle()
    assert pin.end(10), "it is still in use"
    assert not device.registered
    assert not device.broken


def test_memory_goes_though_the_device_cannot_be_told(
    device: RecordingDevice, mapped: Callable[[], Staging], caplog: pytest.LogCaptureFixture
) -> None:
    region = mapped()
    pin = pinned(device, region, TENSOR)
    assert pin is not None
    pin.leave()
    assert device.has_registered(1)
    device.unregistering = lambda: raising(RuntimeError("CUDA error: the context is lost"))
    assert pin.end(10)
    assert pin.end()
    assert [record.message for record in caplog.records] == [
        "kvstore: memory cannot be unregistered from the device: CUDA error: the context is lost"
    ]
    del pin
    assert region.drop(), "it is still mapped"


def test_a_registration_that_is_dropped_ends_before_its_memory_is_unmapped(
    device: RecordingDevice, mapped: Callable[[], Staging]
) -> None:
    """As when the daemon hangs up while a copy is under way, and the session is forgotten."""
    region = mapped()
    pin = pinned(device, region, TENSOR)
    assert pin is not None
    assert not region.drop(), "a copy is under way"
    del region
    assert device.has_registered(1)
    del pin
    assert device.has_registered(0)
    assert not device.broken


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_unregisters_nothing(
    device: RecordingDevice, mapped: Callable[[], Staging]
) -> None:
    region = mapped()
    pin = pinned(device, region, TENSOR)
    assert pin is not None
    assert device.has_registered(1)
    child = os.fork()
    if not child:
        region.pin = None
        del pin
        os._exit(len(device.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    pin.leave()
    assert pin.end(10)
    assert not device.broken


def test_a_mapping_that_is_just_being_registered_is_used_and_not_unmapped(
    device: RecordingDevice, mapped: Callable[[], Staging]
) -> None:
    may_go_on = threading.Event()
    device.registering = lambda: may_go_on.wait(60)
    first, second = mapped(), mapped()
    pins = [pinned(device, region, TENSOR) for region in (first, second)]
    assert not device.registered
    for pin in pins:
        assert pin is not None
        pin.leave()
    assert not first.drop()
    assert not second.drop()
    may_go_on.set()
    for pin in pins:
        assert pin is not None
        assert pin.end(10)
    assert first.drop()
    assert second.drop()
    assert device.journal.count("registered") <= 1, "the other one's turn came when it had to go"
    assert not device.registered
    assert not device.broken


def test_a_registration_that_fails_is_no_matter(
    device: RecordingDevice, mapped: Callable[[], Staging], caplog: pytest.LogCaptureFixture
) -> None:
    device.registering = lambda: raising(RuntimeError("CUDA error: out of memory"))
    region = mapped()
    pin = pinned(device, region, TENSOR)
    assert pin is not None
    pin.leave()
    assert pin.end(10)
    assert [record.message for record in caplog.records] == [
        "kvstore: memory cannot be registered with the device: CUDA error: out of memory"
    ]
    assert region.drop()
    assert "unregistered" not in device.journal


def test_memory_is_not_withdrawn_under_a_copy_and_nobody_waits_for_it(
    device: RecordingDevice, mapped: Callable[[], Staging]
) -> None:
    region = mapped()
    region.memory.u8[:] = 7
    view = region.memory.u8[:64]
    pin = pinned(device, region, TENSOR)
    assert pin is not None
    assert device.has_registered(1)
    assert not region.withdraw(0.0)
    assert (view == 7).all()
    pin.leave()
    assert region.withdraw(10)
    assert not view.any()
    assert not device.registered
    assert not device.broken
