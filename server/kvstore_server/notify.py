"""What the service manager is told, by the protocol of sd_notify(3): one datagram a message.

READY, STOPPING, RELOADING, and WATCHDOG while the event loop runs. The loop itself feeds the
watchdog: a thread of its own would go on feeding for a loop that is stuck. No message may hold the
loop up: a manager that does not read loses messages, and only READY, which it waits for, is worth
waiting for. Without NOTIFY_SOCKET all of it is nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"
READY_S_MAX = 5.0
"""That READY may wait for a manager that is slow to read."""


class ServiceManager:
    """Where messages go, and how often the watchdog wants one, as the environment says.

    `watchdog_s` is the longest silence that the manager allows; 0: there is no watchdog.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get(NOTIFY_VARIABLE, "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._told = False
        self.watchdog_s = _watchdog_s(environ) if address else 0.0

    def ready(self) -> None:
        """The daemon serves. The manager's watchdog runs from here on."""
        self._send("READY=1", READY_S_MAX)

    def stopping(self) -> None:
        """The daemon drains."""
        self._send("STOPPING=1")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Settings are read again meanwhile, however that ends."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._send("READY=1", READY_S_MAX)

    async def feed_watchdog(self) -> None:
        """Says that the event loop runs, three times as often as the watchdog wants to hear it.
        Ends at once if there is none, else when it is cancelled.
        """
        while self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)

    def _send(self, message: str, wait_s: float = 0.0) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(wait_s)
                sock.connect(self._address)
                sock.send(message.encode())
        except OSError as error:
            level = logging.DEBUG if self._told else logging.WARNING  # not at each feeding
            log.log(level, "%s: cannot notify: %s", NOTIFY_VARIABLE, error.strerror or error)
            self._told = True
        else:
            self._told = False


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """Seconds between two signs of life at most; 0 if none are wanted, or of another process."""
    of = environ.get(WATCHDOG_PID_VARIABLE, "")
    given = environ.get(WATCHDOG_VARIABLE, "")
    if of not in ("", str(os.getpid())) or not given.isascii() or not given.isdigit():
        return 0.0
    return int(given) / 1e6
