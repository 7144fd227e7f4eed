"""Registrations of shared memory with a device: made once, left whatever happens, ended before the
memory goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore import shm
from kvstore_client.device import DeviceRows, DeviceTarget, pinned
from kvstore_client.regions import Staging
from tests.device_double import RecordingDevice, Tensor

TOTAL_BYTES = 1 << 16


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
    tensor = Tensor(np.zeros((1, 64), np.uint8))
    target = DeviceTarget(DeviceRows(device, tensor, 1, [slice(0, 64)], "out"))
    first, second = mapped(), mapped()
    pin = pinned(device, first)
    assert pin is not None
    pin.leave()
    device.registering = lambda: raising(RuntimeError("CUDA error: out of memory"))
    with pytest.raises(RuntimeError):
        target.begin([], 0, [first, second])  # type: ignore[list-item]
    target.settle()
    assert pin.end(), "it is still in use"
    assert not device.registered
    assert not device.broken
