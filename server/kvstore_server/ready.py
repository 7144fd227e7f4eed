"""Tells whoever started the daemon that it serves, and where: a descriptor, a file, the service
manager.

The ready record is one JSON object: pid, version, instance_id, data_sockets by tenant,
admin_socket, http, capacity.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from kvstore.model.reasons import Reason, StartError

log = logging.getLogger(__name__)

FD_VARIABLE = "KVSTORE_READY_FD"
NOTIFY_VARIABLE = "NOTIFY_SOCKET"  # systemd: sd_notify(3)


class Announcer:
    """What the environment and the command line asked for. Made before anything else is opened."""

    def __init__(self, environ: Mapping[str, str], ready_file: str | None) -> None:
        """Raises StartError if what was asked for cannot be written to."""
        self._notify_address = environ.get(NOTIFY_VARIABLE, "")
        self._file = ready_file
        self._fd: int | None = None
        given = environ.get(FD_VARIABLE, "")
        if given:
            try:
                self._fd = int(given)
                os.fstat(self._fd)
                os.set_inheritable(self._fd, False)
            except (ValueError, OSError):
                detail = f"{FD_VARIABLE}={given} is no open descriptor"
                raise StartError(Reason.START_SETTINGS, detail, FD_VARIABLE) from None
        if ready_file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(ready_file)

    def ready(self, record: Mapping[str, Any]) -> None:
        """Says once that the daemon serves; first in the file, which others may look for then."""
        line = json.dumps(record).encode() + b"\n"
        if self._file is not None:
            temporary = f"{self._file}.{os.getpid()}"
            try:
                with open(temporary, "wb", opener=_readable) as file:
                    file.write(line)
                os.rename(temporary, self._file)
            except OSError as error:
                detail = f"cannot write {self._file}: {error.strerror}"
                raise StartError(Reason.START_SETTINGS, detail, "--ready-file") from None
        if self._fd is not None:
            with contextlib.suppress(OSError):  # whoever asked is gone: no reason not to serve
                os.write(self._fd, line)
            os.close(self._fd)
            self._fd = None
        self._notify("READY=1")

    def stopping(self) -> None:
        """Says that the daemon drains; the ready file goes."""
        self._notify("STOPPING=1")
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._file)

    def _notify(self, message: str) -> None:
        if not self._notify_address:
            return
        address = self._notify_address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.connect(address)
                sock.send(message.encode())
        except OSError as error:
            log.warning("%s: cannot notify: %s", NOTIFY_VARIABLE, error.strerror)


def _readable(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o644)  # by all, written by us alone, at any umask
