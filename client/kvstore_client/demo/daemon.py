"""A daemon of the demo's own: a child process on unix sockets in a folder of its own, ended by its
pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["DaemonFailedError", "RunningDaemon", "start_daemon"]

READY_S: Final = 30.0
STOP_S: Final = 20.0
POLL_S: Final = 0.01


class DaemonFailedError(Exception):
    """The daemon ended or was not ready in time; the message ends with what it wrote."""


@dataclass(slots=True)
class RunningDaemon:
    """A daemon that is ready. `data_socket` and `admin_socket` are paths."""

    process: subprocess.Popen[bytes]
    data_socket: str
    admin_socket: str
    ready_ms: float

    def stop(self) -> int:
        """SIGTERM, after 20 s SIGKILL; the exit code. Nothing happens if it has ended already."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(STOP_S)


def start_daemon(folder: Path, capacity: str) -> RunningDaemon:
    """Starts `kvstored` with a host tier of `capacity` (such as "512MiB") in `folder`."""
    ready_file, log_file = folder / "ready.json", folder / "kvstored.log"
    argv = [sys.executable, "-m", "kvstore_server", "serve", "--ready-file", str(ready_file)]
    argv += [f"--server.runtime_dir={folder / 'run'}", f"--host.capacity_bytes={capacity}"]
    argv += ["--http.listen=", "--host.mlock=off", "--server.log_format=text"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    begun = time.monotonic()
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
        )
    try:
        while time.monotonic() < begun + READY_S:
            if ready_file.exists():  # it appears whole, by a rename
                ready = json.loads(ready_file.read_text(encoding="utf-8"))
                ready_ms = (time.monotonic() - begun) * 1e3
                data_socket = next(iter(ready["data_sockets"].values()))
                return RunningDaemon(process, data_socket, ready["admin_socket"], ready_ms)
            if process.poll() is not None:
                break
            time.sleep(POLL_S)
    except BaseException:
        process.kill()
        raise
    process.kill()
    written = log_file.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise DaemonFailedError(f"kvstored was not ready within {READY_S:.0f} s:\n{written}")
