"""Tells whoever started the daemon that it serves, and where: a descriptor, a file, the service
manager.

The ready record is one JSON object: pid, version, instance_id, data_sockets by tenant,
admin_socket, http, capacity.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from kvstore.model.reasons import Reason, StartError
from kvstore_server.notify import ServiceManager

FD_VARIABLE = "KVSTORE_READY_FD"


class Announcer:
    """What the environment and the command line asked for. Made before anything else is opened.

    `manager` is the service manager's side of it, which wants to hear more than these two.
    """

    def __init__(self, environ: Mapping[str, str], ready_file: str | None) -> None:
        """Raises StartError if what was asked for cannot be written to."""
        self.manager = ServiceManager(environ)
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
        self.manager.ready()

    def stopping(self) -> None:
        """Says that the daemon drains; the ready file goes."""
        self.manager.stopping()
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._file)


def _readable(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o644)  # by all, written by us alone, at any umask
