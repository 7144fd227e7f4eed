"""Engines that start in seconds: a process that has imported vLLM, and forks.

Most of an engine's start are imports, the same for each. The nursery makes them once for all tests
of a run; what it forks is a process of its own from then on, with a start time, memory and threads
that it shares with nobody. (One that has begun before the fork would make the copies unsafe: there
is none, or the nursery does not start.)

    child = fork("tests.engines.engine_child", environ=..., stdin=..., stdout=..., stderr=...)
    child.pid, child.poll(), child.wait(10), child.kill()
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

REQUEST_BYTES_MAX = 1 << 18
START_S = 300.0
MODULES = (
    "vllm",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.kv_offload.tiering.spec",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)


class Child:
    """A process that the nursery has forked. `status`: a pipe that tells its pid, then its end."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._told = b""
        self.returncode: int | None = None
        self.pid = 0
        while not self.pid and self.returncode is None:
            assert self._hear(START_S), "the nursery does not answer"
        assert self.pid, "the nursery did not fork"

    def _hear(self, timeout_s: float) -> bool:
        """Takes in what is told next. False: nothing within that time."""
        if not select.select([self._status], [], [], timeout_s)[0]:
            return False
        piece = os.read(self._status, 64)
        self._told += piece
        pid, end, code = self._told.partition(b"\n")
        self.pid = int(pid) if end else 0
        if code.endswith(b"\n"):
            self.returncode = int(code)
        elif not piece:  # whoever would tell was killed, too
            self.returncode = -signal.SIGKILL
        if self.returncode is not None:
            os.close(self._status)
        return True

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        while self.returncode is None and self._hear(0.0):
            pass
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """The exit code. Raises TimeoutError."""
        while self.returncode is None:
            if not self._hear(timeout_s):
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, to those that it has started too: an engine's core outlives its server."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def fork(
    module: str, *arguments: str, environ: Mapping[str, str], stdin: int, stdout: int, stderr: int
) -> Child:
    """Runs `main()` of this module with these arguments, this environment, these descriptors."""
    told, tells = os.pipe()
    try:
        argv = [module, *arguments]
        request = json.dumps({"argv": argv, "environ": dict(environ)}).encode()
        assert len(request) < REQUEST_BYTES_MAX
        socket.send_fds(_nursery(), [request], [stdin, stdout, stderr, tells])
    finally:
        os.close(tells)
    return Child(told)


@functools.cache
def _nursery() -> socket.socket:
    """Starts it; it ends when this process does, by the end of the connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    from tests.daemon import _python_path
    from tests.engines.engine_child import QUIET

    environ = {**os.environ, **QUIET, "PYTHONPATH": _python_path(os.environ)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.nursery", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env=environ,
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()

    def end() -> None:
        ours.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # it may still be importing
            process.kill()

    atexit.register(end)
    return ours


# -------------------------------------------------------------------- in the nursery's process


def _serve(connection: socket.socket) -> None:
    for name in MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    # Who supervises an engine ends with it; nobody waits for that.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 4)
        if not request:
            return
        if os.fork() == 0:
            connection.close()
            _supervise(json.loads(request), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(request: dict[str, Any], descriptors: list[int]) -> None:
    """Forks the process, tells its pid, and in the end its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, tells = descriptors
    pid = os.fork()
    if pid == 0:
        os.close(tells)
        os.setsid()
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.argv = request["argv"]
        importlib.import_module(sys.argv[0]).main()
        return
    for descriptor in standard:
        os.close(descriptor)
    os.write(tells, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(tells, f"{code}\n".encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
