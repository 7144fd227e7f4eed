"""Debian's redis-server on a unix socket, for the comparison only: no persistence, no TCP."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

import redis


def find_redis() -> str | None:
    return shutil.which("redis-server")


class RedisServer:
    """Context manager: a private server and a client with the hiredis parser."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._command = [
            binary,
            *("--port", "0"),
            *("--unixsocket", str(self._socket)),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--dir", str(folder)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(unix_socket_path=str(self._socket))

    def __enter__(self) -> RedisServer:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self._socket.exists():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.01)
        return self

    @property
    def version(self) -> str:
        info = self.client.info("server")
        assert isinstance(info, dict)
        return f"redis-server {info['redis_version']}, redis-py {redis.__version__} with hiredis"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
