"""What a service manager hears: a datagram socket of the test's own stands for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_server.notify import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def heard(manager: socket.socket) -> list[bytes]:
    messages = []
    manager.setblocking(False)
    try:
        while True:
            messages.append(manager.recv(4096))
    except BlockingIOError:
        return messages


def fill(filler: socket.socket) -> None:
    """Until the manager's queue takes no more."""
    with contextlib.suppress(BlockingIOError):
        while True:
            filler.send(b"x")


def environ(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), **more}


def test_a_reload_is_told_with_its_time_and_its_end_even_if_it_fails(
    manager: socket.socket,
) -> None:
    service = ServiceManager(environ(manager))
    with pytest.raises(ValueError, match="no such token"), service.reloading():
        raise ValueError("no such token")
    begun, ended = heard(manager)
    first, second = begun.decode().split("\n")
    assert first == "RELOADING=1"
    name, usec = second.split("=")
    assert name == "MONOTONIC_USEC"
    assert int(usec) > 0
    assert ended == b"READY=1"


async def test_the_loop_feeds_the_watchdog_until_it_is_told_to_end(manager: socket.socket) -> None:
    service = ServiceManager(environ(manager, WATCHDOG_USEC="3000", WATCHDOG_PID=str(os.getpid())))
    assert service.watchdog_s == 0.003
    manager.setblocking(False)
    feeding = asyncio.ensure_future(service.feed_watchdog())
    for _ in range(3):
        assert await asyncio.get_running_loop().sock_recv(manager, 100) == b"WATCHDOG=1"
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding


async def test_a_loop_that_is_stuck_feeds_nothing(manager: socket.socket) -> None:
    service = ServiceManager(environ(manager, WATCHDOG_USEC="3000"))
    feeding = asyncio.ensure_future(service.feed_watchdog())
    await asyncio.sleep(0)
    assert heard(manager) == [b"WATCHDOG=1"]
    stuck_until = time.monotonic() + 20 * service.watchdog_s
    while time.monotonic() < stuck_until:
        pass
    assert heard(manager) == []
    feeding.cancel()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"WATCHDOG_USEC": ""},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "3000", "WATCHDOG_PID": "1"},
    ],
)
async def test_a_watchdog_that_is_none_or_another_processs_is_not_fed(
    manager: socket.socket, given: dict[str, str]
) -> None:
    service = ServiceManager(environ(manager, **given))
    assert service.watchdog_s == 0.0
    await service.feed_watchdog()
    assert heard(manager) == []


async def test_without_a_manager_there_is_no_watchdog() -> None:
    await ServiceManager({"WATCHDOG_USEC": "3000"}).feed_watchdog()


def test_a_manager_that_does_not_read_holds_nobody_up(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    service = ServiceManager(environ(manager))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
        filler.setblocking(False)
        filler.connect(manager.getsockname())
        fill(filler)
    with caplog.at_level(logging.WARNING):
        service.stopping()
        service.stopping()
    assert len(caplog.records) == 1  # not one a feeding
    assert b"STOPPING=1" not in heard(manager)
    service.stopping()
    assert heard(manager) == [b"STOPPING=1"]
