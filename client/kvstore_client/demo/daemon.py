"""A daemon of the demo's own: a child process on unix sockets in a folder of its own, ended by its
pid."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["DaemonFailedError", "RunningDaemon", "running_daemon"]

READY_S: Final = 30.0
STOP_S: Final = 20.0
POLL_S: Final = 0.01


class DaemonFailedError(Exception):
    """The daemon ended or was not ready in time; the message ends with what it wrote."""


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that is ready. `data_socket` and `admin_socket` are paths."""

    pid: int
    data_socket: str
    admin_socket: str
    ready_ms: float


@contextlib.contextmanager
def running_daemon(folder: Path, capacity: str, disk_capacity: str) -> Iterator[RunningDaemon]:
    """`kvstored` with a host tier of `capacity` (such as "512MiB") and a disk tier in `folder`, for
    a `with`; a later one finds what the disk of an earlier one holds.

    At its end, whatever ended it: SIGTERM, after 20 s SIGKILL, and the process is gone.
    """
    ready_file, log_file = folder / "ready.json", folder / "kvstored.log"
    ready_file.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "kvstore_server", "serve", "--ready-file", str(ready_file)]
    argv += [f"--server.runtime_dir={folder / 'run'}", f"--host.capacity_bytes={capacity}"]
    argv += [f"--disk.path={folder / 'disk'}", f"--disk.capacity_bytes={disk_capacity}"]
    argv += ["--http.listen=", "--host.mlock=off", "--server.log_format=text"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
        )
    try:
        yield _wait_until_ready(process, ready_file, log_file)
    finally:
        _end(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes], ready_file: Path, log_file: Path
) -> RunningDaemon:
    begun = time.monotonic()
    while time.monotonic() < begun + READY_S and process.poll() is None:
        if ready_file.exists():  # it appears whole, by a rename
            ready = json.loads(ready_file.read_text(encoding="utf-8"))
            ready_ms = (time.monotonic() - begun) * 1e3
            data_socket = next(iter(ready["data_sockets"].values()))
            return RunningDaemon(process.pid, data_socket, ready["admin_socket"], ready_ms)
        time.sleep(POLL_S)
    written = log_file.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise DaemonFailedError(f"kvstored was not ready within {READY_S:.0f} s:\n{written}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
