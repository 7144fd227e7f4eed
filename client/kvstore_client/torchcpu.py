"""CPU tensors in a GPU's place, where there is none: `Client(path, device=TorchCpu())`.

For tests and demonstration, with a daemon whose `device.driver` is "torch-cpu". All of what a fetch
into CUDA tensors does runs but the CUDA calls: a stream is a thread that copies in order, an event
what that thread has promised, a pool the daemon's file, mapped for reading.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvstore import shm
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.arrays import Bytes
from kvstore_client.device import Place, Tensor

__all__ = ["TorchCpu"]

UUIDS = "CPU-"
"""How names of such devices begin."""

Event = list[Future[Any]]


class _Stream:
    """A thread that copies in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvstore-torch-stream")
        self._copies: list[Future[Any]] = []
        self._guard = threading.Lock()

    def copy(self, memory: Any, host: Tensor, tensor: Tensor, *, inward: bool) -> None:
        """memory: what has to stay until the copy is done."""

        def run() -> None:
            assert memory is not None
            with sys.modules["torch"].inference_mode():
                if inward:
                    tensor.copy_(host)
                else:
                    host.copy_(tensor)

        with self._guard:
            self._copies.append(self._thread.submit(run))

    def event(self) -> Event:
        with self._guard:
            event = self._copies
            self._copies = [copy for copy in event if not copy.done()]
            return event


class TorchCpu:
    """See the module's docstring. Implements device.Driver and pools.PoolDriver."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    # ---------------------------------------------------------------- as device.Driver

    def owns(self, data: object) -> bool:
        torch: Any = sys.modules.get("torch")
        return torch is not None and isinstance(data, torch.Tensor) and data.device.type == "cpu"

    def current_stream(self, tensor: Tensor) -> _Stream | None:
        return None  # what the caller computes has ended when he calls

    def copy_stream(self, tensor: Tensor) -> _Stream:
        # By process: a forked child has no such thread. One that two threads make at once is one.
        return self._streams.setdefault(os.getpid(), _Stream())

    def record(self, stream: _Stream | None) -> Event:
        return [] if stream is None else stream.event()

    def done(self, event: Event) -> bool:
        return all(copy.done() for copy in event)

    def await_event(self, stream: _Stream, event: Event) -> None:
        """Events of the caller's have ended."""

    def hold(self, tensor: Tensor, stream: _Stream) -> None:
        """A copy holds it."""

    def copy_in(self, stream: _Stream, host: Bytes, target: Tensor) -> None:
        stream.copy(host, _alias(host, target), target, inward=True)

    def copy_out(self, stream: _Stream, source: Tensor, host: Bytes) -> None:
        stream.copy(host, _alias(host, source), source, inward=False)

    def wait(self, event: Event) -> None:
        for copy in event:
            copy.result()

    def place(self, tensor: Tensor) -> Place:
        return tensor.device

    def register(self, address: int, length_bytes: int, place: Place, *, read_only: bool) -> bool:
        return True

    def unregister(self, address: int) -> None:
        """Nothing to be done."""

    def pools(self) -> TorchCpu:
        return self

    # ---------------------------------------------------------------- as pools.PoolDriver

    def readable(self, place: Place, uuids: Sequence[str]) -> str:
        return next((uuid for uuid in uuids if uuid.startswith(UUIDS)), "")

    def open(self, memory: pb.DeviceMemory, fd: int | None, place: Place) -> shm.MappedRegion:
        if memory.kind != pb.DEVICE_HANDLE_KIND_HOST_FILE or fd is None:
            raise OSError(f"device memory of kind {memory.kind}")
        return shm.map_region(
            fd, memory.mapped_bytes, writable=False, populate=False, require=shm.Seal.SHRINK
        )

    def admit(self, opened: shm.MappedRegion, place: Place) -> None:
        """There is one place."""

    def copy(self, stream: _Stream, opened: shm.MappedRegion, offset: int, target: Tensor) -> None:
        length = target.numel() * target.element_size()
        self.copy_in(stream, opened.u8[offset : offset + length], target)

    def close(self, opened: shm.MappedRegion) -> None:
        opened.close()


def _alias(host: Bytes, like: Tensor) -> Tensor:
    """Host bytes as a tensor; by their address, since torch warns of memory that must not be
    written, and nobody writes to this.
    """
    memory = (ctypes.c_uint8 * host.size).from_address(host.ctypes.data)
    torch: Any = sys.modules["torch"]
    return torch.frombuffer(memory, dtype=like.dtype).reshape(like.shape)
