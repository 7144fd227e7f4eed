"""The daemon under a service manager: a datagram socket of the test's stands for systemd's."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import make_daemon

pytestmark = pytest.mark.process

HEAR_S = 20.0
WATCHDOG_S = 0.3


class Manager:
    """Hears what a daemon says to $NOTIFY_SOCKET, and from which process it came."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self.senders: set[int] = set()

    def hear(self, wait_s: float = HEAR_S) -> str:
        """The next message; "" if none comes in time."""
        self._sock.settimeout(wait_s)
        try:
            message, ancillary, _, _ = self._sock.recvmsg(4096, 64)
        except TimeoutError:
            return ""
        self.senders.add(int.from_bytes(ancillary[0][2][:4], "little"))
        return message.decode()

    def hear_until(self, wanted: str) -> list[str]:
        """Everything up to a message that begins so."""
        end = time.monotonic() + HEAR_S
        messages: list[str] = []
        while not messages or not messages[-1].startswith(wanted):
            assert time.monotonic() < end, f"no {wanted}, but {messages[-5:]}"
            messages.append(self.hear())
        return messages

    def hear_all(self) -> list[str]:
        messages: list[str] = []
        while message := self.hear(0.001):
            messages.append(message)
        return messages

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(params=["a path", "an abstract name"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"kvstore-{os.getpid()}"
    made = Manager(str(tmp_path / "notify") if request.param == "a path" else f"@{name}")
    yield made
    made.close()


def test_a_life_as_the_service_manager_hears_it(manager: Manager, tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
    with make_daemon(tmp_path, environ=environ) as daemon:
        daemon.start()
        assert manager.hear() == "READY=1"
        for _ in range(3):
            assert manager.hear() == "WATCHDOG=1"
        daemon.signal(signal.SIGHUP)
        assert "\nMONOTONIC_USEC=" in manager.hear_until("RELOADING=1")[-1]
        manager.hear_until("READY=1")
        # A process that does not run says nothing, and is not taken for dead when it runs again.
        daemon.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.pid, os.WSTOPPED)
        manager.hear_all()
        assert manager.hear(5 * WATCHDOG_S) == ""
        daemon.signal(signal.SIGCONT)
        assert manager.hear() == "WATCHDOG=1"
        daemon.signal(signal.SIGTERM)
        manager.hear_until("STOPPING=1")
        assert daemon.wait() == 0
        assert manager.senders == {daemon.ready["pid"]}


def test_a_start_that_fails_never_says_ready(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    daemon = make_daemon(
        tmp_path, environ={"NOTIFY_SOCKET": manager.address}, http__listen="192.0.2.1:1"
    )
    daemon.spawn()
    assert daemon.wait() == 2
    assert manager.hear_all() == []
    manager.close()
