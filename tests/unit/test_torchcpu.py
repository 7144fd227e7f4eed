"""Streams of the device driver on torch's CPU device; these tests need no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.tiers.torchcpu import TorchCpuDriver, _Stream

HUNG_S = 30


class Target:
    """Takes copies as a tensor does. It waits until it may go on, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.go_on = threading.Event()
        self.copied: list[object] = []

    def copy_(self, source: object) -> None:
        assert self.go_on.wait(HUNG_S)
        if self.fails:
            raise RuntimeError("no copy")
        self.copied.append(source)


@pytest.fixture
def stream() -> Iterator[_Stream]:
    one = _Stream()
    yield one
    one.thread.shutdown()


def ends(stream: _Stream, *targets: Target) -> None:
    for target in targets:
        target.go_on.set()
    TorchCpuDriver().drain(stream)


def test_a_failed_copy_is_told_by_its_own_event_and_forgotten(stream: _Stream) -> None:
    driver, bad, good = TorchCpuDriver(), Target(fails=True), Target()
    stream.copy(bad, 1)
    event = stream.event()
    ends(stream, bad)
    for _ in range(2):
        with pytest.raises(OSError, match="no copy"):
            driver.wait(event)
    stream.copy(good, 2)
    event = stream.event()
    ends(stream, good)
    driver.wait(event)
    assert good.copied == [2]
    assert stream.event() == []
    assert stream._copies == []


def test_a_copy_that_failed_before_its_event_is_told(stream: _Stream) -> None:
    bad = Target(fails=True)
    stream.copy(bad, 1)
    ends(stream, bad)
    event = stream.event()
    with pytest.raises(OSError, match="no copy"):
        TorchCpuDriver().wait(event)
    assert stream.event() == []


def test_nobody_s_failure_is_forgotten_by_the_event_of_another(stream: _Stream) -> None:
    bad = Target(fails=True)
    with ThreadPoolExecutor(1) as other:
        other.submit(stream.copy, bad, 1).result(HUNG_S)
        ends(stream, bad)
        assert len(stream.event()) == 1, "all that was queued before"
        event = other.submit(stream.event).result(HUNG_S)
        with pytest.raises(OSError, match="no copy"):
            TorchCpuDriver().wait(event)
        assert stream.event() == []
