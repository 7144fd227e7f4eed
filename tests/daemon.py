"""Real daemons for tests: started as processes on sockets in a temporary folder, ended by their own
pid.

    daemon = start_daemon(tmp_path, host__capacity_bytes="64MiB")
    ... daemon.data_socket, daemon.admin_socket, daemon.http_url ...
    daemon.kill(); daemon.restart(); assert daemon.stop() == 0

A setting `host.capacity_bytes` is the argument `host__capacity_bytes`. The fixture `daemons` does
the same and ends what a test has left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

READY_DEADLINE_S = 20.0
STOP_DEADLINE_S = 20.0

DEFAULTS: Mapping[str, Any] = {
    "host.capacity_bytes": "64MiB",
    "host.mlock": "off",
    "http.listen": "127.0.0.1:0",
    "server.drain_grace_s": 5,
    "server.log_format": "text",
}


class DaemonDied(AssertionError):
    """The daemon ended before it was ready. Carries its exit code and what it wrote."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(f"the daemon ended with {code} before it was ready:\n{output}")
        self.code = code
        self.output = output


class Daemon:
    """One `kvstored` process at a time, restartable on the same folder with the same settings."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        environ: Mapping[str, str] | None = None,
        argv_prefix: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.settings = dict(settings)
        self.environ = dict(environ or {})
        self.argv_prefix = argv_prefix
        self.module = "kvstore_server"
        self.ready: dict[str, Any] = {}
        self._ready_fd = -1
        self._log_file = folder / "kvstored.log"
        self._process: subprocess.Popen[bytes] | None = None

    # ---------------------------------------------------------------- what a test needs to know

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        """Of the daemon itself, also behind a wrapper such as `prlimit`."""
        return int(self.ready.get("pid", self.process.pid))

    @property
    def data_socket(self) -> str:
        """Of the tenant `default`, or of the only one."""
        sockets: dict[str, str] = self.ready["data_sockets"]
        return sockets["default"] if "default" in sockets else next(iter(sockets.values()))

    @property
    def data_sockets(self) -> dict[str, str]:
        """By tenant."""
        return dict(self.ready["data_sockets"])

    @property
    def admin_socket(self) -> str:
        return str(self.ready["admin_socket"])

    @property
    def http_url(self) -> str:
        """Without a path: "http://127.0.0.1:40123"."""
        return f"http://{self.ready['http']}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Everything that this folder's daemons have written."""
        with contextlib.suppress(FileNotFoundError):
            return self._log_file.read_text(encoding="utf-8", errors="replace")
        return ""

    # ---------------------------------------------------------------- life

    def spawn(self) -> subprocess.Popen[bytes]:
        """Starts the process without waiting for anything."""
        assert not self.alive, "still running"
        self.ready = {}
        flags = [f"--{name}={_text(value)}" for name, value in self.settings.items()]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
        environ["PYTHONPATH"] = _python_path(environ)
        argv = [*self.argv_prefix, sys.executable, "-m", self.module, "serve", *flags]
        self._close_ready_fd()
        self._ready_fd, write_fd = os.pipe()
        try:
            with self._log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environ, "KVSTORE_READY_FD": str(write_fd), **self.environ},
                    pass_fds=(write_fd,),
                )
        finally:
            os.close(write_fd)
        return self._process

    def start(self, deadline_s: float = READY_DEADLINE_S) -> Daemon:
        """Starts the process and returns when it is ready. Raises DaemonDied if it ends before."""
        mark = len(self.log())
        self.spawn()
        record = self._read_ready(deadline_s)
        if record is None:
            self.kill()
            raise AssertionError(f"not ready within {deadline_s} s:\n{self.log()[mark:]}")
        if not record:
            raise DaemonDied(self.wait(), self.log()[mark:])
        self.ready = json.loads(record)
        return self

    def _read_ready(self, deadline_s: float) -> bytes | None:
        """What the daemon writes when it is ready: b"" if it ended before, None if time is over."""
        end = time.monotonic() + deadline_s
        record = b""
        try:
            while select.select([self._ready_fd], [], [], max(0.0, end - time.monotonic()))[0]:
                piece = os.read(self._ready_fd, 65536)
                record += piece
                # A wrapper may hold the descriptor, too, and then there is no end of it.
                if not piece or record.endswith(b"\n"):
                    return record
        finally:
            self._close_ready_fd()
        return None

    def _close_ready_fd(self) -> None:
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Exit code; the process is killed, and the test fails, if it does not end in time."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {deadline_s} s:\n{self.log()}") from None

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """SIGTERM, then the exit code."""
        if self.alive:
            self.signal(signal.SIGTERM)
        return self.wait(deadline_s)

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up."""
        if self.alive:
            for pid in self._wrapped():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.signal(signal.SIGKILL)
            self.process.kill()
        self.process.wait(STOP_DEADLINE_S)
        self._close_ready_fd()

    def _wrapped(self) -> list[int]:
        """What a wrapper has started before it said who it is: some let it live on alone."""
        if not self.argv_prefix or self.ready:
            return []
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            return [int(pid) for pid in path.read_text().split()]
        return []

    def restart(self) -> Daemon:
        """Stops it if it runs, then starts it with the same settings."""
        if self.alive:
            self.stop()
        return self.start()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.kill()


def make_daemon(
    folder: Path,
    *,
    environ: Mapping[str, str] | None = None,
    argv_prefix: tuple[str, ...] = (),
    **settings: Any,
) -> Daemon:
    """A daemon that is not started yet. A setting of None is left to its default."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    merged = {"server.runtime_dir": str(folder / "run"), **DEFAULTS, **named}
    given = {name: value for name, value in merged.items() if value is not None}
    return Daemon(folder, given, environ=environ, argv_prefix=argv_prefix)


def start_daemon(
    folder: Path,
    *,
    environ: Mapping[str, str] | None = None,
    argv_prefix: tuple[str, ...] = (),
    **settings: Any,
) -> Daemon:
    """A daemon that is ready. End it with `stop` or `kill`, or use it as a context manager."""
    return make_daemon(folder, environ=environ, argv_prefix=argv_prefix, **settings).start()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """`daemons(**settings)` starts one in a folder of its own; `folder=` chooses another."""
    made: list[Daemon] = []

    def start(folder: Path = tmp_path, **settings: Any) -> Daemon:
        daemon = make_daemon(folder, **settings)
        made.append(daemon)
        return daemon.start()

    yield start
    for daemon in made:
        if daemon.alive:
            daemon.kill()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _python_path(environ: Mapping[str, str]) -> str:
    root = Path(__file__).resolve().parent.parent
    roots = [str(root), str(root / "server"), str(root / "client")]
    return os.pathsep.join([*roots, environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
