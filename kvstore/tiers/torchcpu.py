"""The device driver on torch's CPU device: CPU memory in a GPU's place, where there is none.

For tests and demonstration: all of the device tier runs but the CUDA calls. Memory is a sealed
memfd seen as a torch tensor, a stream is a thread that copies in order, an event what that thread
has promised. torch is imported late, by `open`.
"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from kvstore.model.reasons import Reason, StartError
from kvstore.model.values import PAGE_BYTES
from kvstore.shm import ARENA_SEALS
from kvstore.tiers.driver import (
    Bytes,
    DeviceLostError,
    DeviceMemory,
    Event,
    Exported,
    HandleKind,
    Stream,
)
from kvstore.tiers.stock import Memory

UUID = "CPU-00000000-0000-0000-0000-000000000000"


class _Made(NamedTuple):
    """A memfd, and the same bytes as a torch tensor, uint8 [mapped_bytes]."""

    file: Memory
    tensor: Any


class _Stream:
    """A thread that copies in order."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "kvstore-torch-stream")
        self._copies: list[tuple[int, Future[Any]]] = []
        """With the thread that queued it; 0: an event of that thread has it."""
        self._guard = threading.Lock()

    def copy(self, target: Any, source: Any) -> None:
        with self._guard:
            copy = self.thread.submit(target.copy_, source)
            self._copies.append((threading.get_ident(), copy))

    def outstanding(self) -> list[Future[Any]]:
        """Copies that were queued and are not known to be done."""
        with self._guard:
            return [copy for _, copy in self._copies if not copy.done()]

    def event(self) -> list[Future[Any]]:
        """As `outstanding`, and those that failed before an event of whoever queued them told so;
        later ones do not tell it again.
        """
        own = threading.get_ident()
        with self._guard:
            left = [
                (who, copy)
                for who, copy in self._copies
                if not copy.done() or (who and copy.exception() is not None)
            ]
            self._copies = [(0 if who == own else who, copy) for who, copy in left]
            return [copy for _, copy in left]


class TorchCpuDriver:
    """See the module's docstring. Implements DeviceDriver."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._streams: list[_Stream] = []

    @property
    def uuid(self) -> str:
        """See `DeviceDriver`."""
        return UUID

    def open(self) -> None:
        """See `DeviceDriver`."""
        try:
            self._torch = importlib.import_module("torch")
        except ImportError as error:
            raise StartError(
                Reason.START_SETTINGS,
                f"device.driver torch-cpu needs torch: {error}",
                "device.driver",
            ) from None
        self._torch.set_num_threads(1)

    def close(self) -> None:
        """See `DeviceDriver`. Waits for the copies that are queued."""
        self._torch = None
        for stream in self._streams:
            stream.thread.shutdown(wait=True)
        self._streams.clear()

    def granule_bytes(self) -> int:
        """See `DeviceDriver`."""
        return PAGE_BYTES

    def make(self, total_bytes: int, *, shared: bool) -> DeviceMemory:
        """See `DeviceDriver`."""
        torch = self._opened()
        mapped_bytes = -(-total_bytes // PAGE_BYTES) * PAGE_BYTES
        file = Memory(mapped_bytes)
        file.seal(mapped_bytes, ARENA_SEALS, client_writes=False)
        return DeviceMemory(mapped_bytes, _Made(file, torch.from_numpy(file.shared.map.u8)))

    def export(self, memory: DeviceMemory) -> Exported:
        """See `DeviceDriver`. The descriptor is read-only, which a GPU's cannot be."""
        self._opened()
        return Exported(HandleKind.HOST_FILE, memory.made.file.fd)

    def drop(self, memory: DeviceMemory) -> None:
        """See `DeviceDriver`."""
        memory.made.file.close()

    def register(self, host: Bytes) -> None:
        """See `DeviceDriver`: nothing to be done."""

    def unregister(self, host: Bytes) -> None:
        """See `DeviceDriver`: nothing to be done."""

    def stream(self) -> Stream:
        """See `DeviceDriver`."""
        self._opened()
        stream = _Stream()
        self._streams.append(stream)
        return stream

    def copy_in(self, stream: Stream, host: Bytes, memory: DeviceMemory, offset: int) -> None:
        """See `DeviceDriver`."""
        torch = self._opened()
        stream.copy(memory.made.tensor[offset : offset + len(host)], torch.from_numpy(host))

    def copy_out(self, stream: Stream, memory: DeviceMemory, offset: int, host: Bytes) -> None:
        """See `DeviceDriver`."""
        torch = self._opened()
        stream.copy(torch.from_numpy(host), memory.made.tensor[offset : offset + len(host)])

    def record(self, stream: Stream) -> Event:
        """See `DeviceDriver`."""
        self._opened()
        return stream.event()

    def drain(self, stream: Stream) -> None:
        """See `DeviceDriver`."""
        wait(stream.outstanding())

    def wait(self, event: Event) -> None:
        """See `DeviceDriver`."""
        copies: list[Future[Any]] = event
        for copy in copies:
            try:
                copy.result()
            except RuntimeError as error:
                raise OSError(str(error)) from None

    def _opened(self) -> Any:
        if self._torch is None:
            raise DeviceLostError("the device is closed")
        return self._torch
