"""The end of the device tier: after the last copy, and never later than the daemon's patience."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from kvstore import shm
from kvstore.config import Settings
from kvstore.config.device import DeviceSettings
from kvstore.model.values import Place, Region, TierKind, TierSpec
from kvstore.testing.gpu import RecordingDriver
from kvstore.tiers.base import Crossing
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk.threads import DeviceThreads
from kvstore.tiers.host import HostTier
from kvstore_server.gpu import NAME, begin, end, with_device

SLOT = 4096
HUNG_S = 30


class Stand:
    """A device with a copy that is begun and ends when it is told to, in a thread of the mover's,
    or in one that reads for another tier.
    """

    def __init__(self) -> None:
        self.driver = RecordingDriver()
        self.threads = DeviceThreads(3, "test")
        self.others = DeviceThreads(1, "test")
        host = np.zeros(SLOT, np.uint8)
        self.tier = DeviceTier(
            self.driver, 1 << 20, background=self.threads, host_map=lambda region_id: host
        )
        self.threads.submit(self.tier.open).result(HUNG_S)
        header = shm.header_bytes(1)
        self.tier.assign(Region(1, 0, "t", SLOT, 1, header, header + SLOT))
        self.place = Place(0, 1, 0, 1, 0)
        self.crossing = Crossing(self.place, Place(1, 2, 0, 1, 0), host, True)
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.driver.before = self.before

    def before(self, call: str) -> None:
        if call == "wait":
            self.waiting.set()
            self.go_on.wait(HUNG_S)


@pytest.fixture
def stand() -> Iterator[Stand]:
    one = Stand()
    yield one
    one.go_on.set()
    one.others.shutdown()
    one.threads.shutdown()
    assert one.driver.broken == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_device_is_given_back_after_its_last_copy(stand: Stand, elsewhere: bool) -> None:
    threads = stand.others if elsewhere else stand.threads
    copy = threads.submit(stand.tier.cross, [stand.crossing])
    assert stand.waiting.wait(HUNG_S)
    assert not end(stand.threads, stand.tier, patience_s=0.01)
    assert not {"unregister", "drop", "close"} & set(stand.driver.log)
    stand.go_on.set()
    assert copy.result(HUNG_S) == [None]
    for thread in threading.enumerate():
        if thread.name.startswith("kvstore-gpu-end"):
            thread.join(HUNG_S)
    assert stand.driver.log[-3:] == ["unregister", "drop", "close"]


def test_the_device_is_given_back_at_once_when_nothing_runs(stand: Stand) -> None:
    stand.go_on.set()
    assert stand.threads.submit(stand.tier.cross, [stand.crossing]).result(HUNG_S) == [None]
    assert end(stand.threads, stand.tier, patience_s=HUNG_S)
    assert stand.driver.log[-1] == "close"
    assert stand.tier.stats().registered_bytes == 0


def test_what_is_asked_of_a_device_that_ends_is_refused(stand: Stand) -> None:
    stand.go_on.set()
    assert end(stand.threads, stand.tier, patience_s=HUNG_S)
    (outcome,) = stand.tier.cross([stand.crossing])
    assert outcome is not None
    assert stand.driver.log[-1] == "close"


@pytest.mark.parametrize(("driver", "granule_bytes"), [("cuda", 2 << 20), ("torch-cpu", 4096)])
def test_the_tier_is_cut_to_what_its_memory_comes_in(
    driver: Literal["cuda", "torch-cpu"], granule_bytes: int
) -> None:
    settings = Settings(device=DeviceSettings(capacity_bytes=1 << 30, driver=driver))
    _, spec = with_device(settings, [TierSpec("host", TierKind.POOL, 1 << 30, ingest=True)])
    assert (spec.name, spec.granule_bytes) == (NAME, granule_bytes)


@pytest.mark.torch
@pytest.mark.parametrize(("pools", "told"), [("staged", 0), ("shared_unproven", 1)])
def test_what_is_not_proven_is_told_of_at_the_start(
    pools: Literal["staged", "shared_unproven"], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    settings = Settings(
        device=DeviceSettings(capacity_bytes=1 << 20, driver="torch-cpu", pools=pools)
    )
    with contextlib.ExitStack() as undo:
        host = HostTier(1 << 20, region_bytes=1 << 16, mlock="off")
        undo.callback(host.close)
        _, device = begin(settings, host, undo)
        assert device is not None
        assert device.shares == bool(told)
    assert caplog.text.count("has not been proven") == told
