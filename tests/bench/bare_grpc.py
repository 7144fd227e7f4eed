"""What gRPC alone costs: a server in another process that streams the same bytes out of memory,
with nothing else to do, and a client that copies them into the same destination.

It tells how much of `fetch_stream_64_blocks_over_memcpy` is ours.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

import grpc
import numpy as np
from numpy.typing import NDArray

METHOD = "/bench/Stream"
MESSAGE_BYTES = 1 << 20
OPTIONS = [("grpc.max_receive_message_length", 4 << 20)]


class BareGrpc:
    """Context manager: the server process, and a stream into an array."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "bare.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=OPTIONS)
        self._stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            METHOD
        )

    def __enter__(self) -> BareGrpc:
        command = [sys.executable, "-m", "tests.bench.bare_grpc", str(self._socket)]
        self._process = subprocess.Popen(command)
        deadline = time.monotonic() + 20
        while not self._socket.exists():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("the bare gRPC server did not start")
            time.sleep(0.01)
        return self

    def into(self, out: NDArray[np.uint8]) -> None:
        """Fills uint8 [n, MESSAGE_BYTES], a message a row."""
        for row, message in enumerate(
            self._stream(str(len(out)).encode(), timeout=60, wait_for_ready=True)
        ):
            np.copyto(out[row], np.frombuffer(message, np.uint8))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)


async def _serve(path: str) -> None:
    block = np.random.default_rng(3).integers(0, 256, MESSAGE_BYTES, dtype=np.uint8).tobytes()

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield block

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench", {"Stream": handler}),)
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
