"""A GPU that writes down what is asked of it, for tests of the client: streams that run nothing by
themselves, so that what is used before it was waited for is not there.

It opens pools as well: files that stand for a GPU's memory.

A queued step runs when an event behind it is asked about or waited for, after the events that its
stream awaits; with `stuck` the caller's kernels never end.
`broken` has each rule that was broken: memory unregistered that is not registered or not mapped any
more, a stream asked for in another thread than the caller's, a kernel waited for that never ends, a
pool copied from after it was closed, or what takes long done by the caller though `remote`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import shm
from kvstore.wire.v1 import store_pb2 as pb

__all__ = ["RecordingDevice", "Tensor"]

Event = tuple["Stream", int]


class Tensor:
    """What stands for a tensor in a device's memory: numpy's strides, torch's names."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index])


class Stream:
    """Steps in order: a copy or kernel with its name, or an event to wait for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[Any] = []
        self.done = 0


class RecordingDevice:
    """See the module's docstring. journal: what ran or was asked, in order."""

    def __init__(self, *, registers: bool = True) -> None:
        self.journal: list[str] = []
        self.broken: list[str] = []
        self.registered: dict[int, int] = {}
        self.compute = Stream("compute")
        self.copies = Stream("copies")
        self.lost = self.stuck = False
        self.asked: Callable[[], None] = lambda: None
        """Called when an event is asked about."""
        self.landed: Callable[[], None] = lambda: None
        """Called when an event has ended, before whoever waits for it goes on."""
        self.placing: Callable[[], object] = lambda: None
        """Called when memory is about to be registered, by who copies. What it raises gets out, as
        with the next ones, by who registers and who unregisters.
        """
        self.registering: Callable[[], object] = lambda: None
        self.unregistering: Callable[[], object] = lambda: None
        self.pooling: Callable[[], object] = lambda: None
        """Called when it is asked for what opens pools; the next ones when a pool is opened, let be
        read, or copied from. What they raise gets out.
        """
        self.opening: Callable[[], object] = lambda: None
        self.admitting: Callable[[], object] = lambda: None
        self.copying: Callable[[], object] = lambda: None
        self.readable_uuid = "GPU-1"
        self.remote = False
        """Whether the caller is an event loop, which must not wait."""
        self._open: set[int] = set()
        self._registers = registers
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._caller = threading.get_ident()

    def launch(self, name: str, kernel: Callable[[], None]) -> None:
        """Queues a kernel on the caller's stream."""
        with self._lock:
            self.compute.steps.append((name, kernel))

    def has_registered(self, mappings: int) -> bool:
        """Waits for it."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.registered) == mappings, 10)

    def note(self, text: str) -> None:
        with self._lock:
            self.journal.append(text)

    # ---------------------------------------------------------------- the driver

    def owns(self, data: object) -> bool:
        return isinstance(data, Tensor)

    def current_stream(self, tensor: Any) -> Stream:
        if threading.get_ident() != self._caller:
            self.broken.append("the current stream of a thread that is not the caller's")
        return self.compute

    def copy_stream(self, tensor: Any) -> Stream:
        return self.copies

    def record(self, stream: Stream) -> Event:
        with self._lock:
            return stream, len(stream.steps)

    def done(self, event: Event) -> bool:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.asked()
        if self.stuck and event[0] is self.compute:
            return False
        with self._lock:
            self._run_until(*event)
        return True

    def await_event(self, stream: Stream, event: Event) -> None:
        with self._lock:
            stream.steps.append(event)

    def hold(self, tensor: Any, stream: Stream) -> None:
        self.note("hold")

    def copy_in(self, stream: Stream, host: NDArray[np.uint8], target: Tensor) -> None:
        def run() -> None:
            target.array[...] = host.view(target.array.dtype).reshape(target.shape)

        with self._lock:
            stream.steps.append(("copied in", run))

    def copy_out(self, stream: Stream, source: Tensor, host: NDArray[np.uint8]) -> None:
        def run() -> None:
            host[...] = np.ascontiguousarray(source.array).reshape(-1).view(np.uint8)

        with self._lock:
            stream.steps.append(("copied out", run))

    def wait(self, event: Event) -> None:
        self._takes_long("wait")
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        with self._lock:
            self._run_until(*event)
            self.journal.append("event ended")
        self.landed()

    def _run_until(self, stream: Stream, position: int) -> None:
        if self.stuck and stream is self.compute:
            self.broken.append("a kernel was waited for that never ends")
            raise RuntimeError("it would hang")
        while stream.done < position:
            first, second = stream.steps[stream.done]
            stream.steps[stream.done] = None  # it holds the memory
            stream.done += 1
            if isinstance(first, Stream):
                self._run_until(first, second)
            else:
                second()
                self.journal.append(first)

    def _takes_long(self, what: str) -> None:
        if self.remote and threading.get_ident() == self._caller:
            self.broken.append(f"{what} by the thread of the event loop")

    # ---------------------------------------------------------------- pools

    def pools(self) -> RecordingDevice:
        self.pooling()
        return self

    def readable(self, place: str, uuids: Sequence[str]) -> str:
        self._takes_long("readable")
        return self.readable_uuid if self.readable_uuid in uuids else ""

    def open(self, memory: pb.DeviceMemory, fd: int | None, place: str) -> shm.MappedRegion:
        self._takes_long("open")
        self.opening()
        assert fd is not None
        opened = shm.map_region(fd, memory.mapped_bytes, writable=False, populate=False)
        with self._lock:
            self.journal.append("pool opened")
            self._open.add(id(opened))
        return opened

    def admit(self, opened: shm.MappedRegion, place: str) -> None:
        self.admitting()

    def copy(self, stream: Stream, opened: shm.MappedRegion, offset: int, target: Tensor) -> None:
        self._takes_long("copy")
        self.copying()
        length = target.array.size * target.array.itemsize

        def run() -> None:
            if id(opened) not in self._open:
                self.broken.append("a pool was copied from that is closed")
                return
            data = opened.u8[offset : offset + length]
            target.array[...] = data.view(target.array.dtype).reshape(target.shape)

        with self._lock:
            stream.steps.append(("copied from a pool", run))

    def close(self, opened: shm.MappedRegion) -> None:
        with self._lock:
            self.journal.append("pool closed")
            self._open.remove(id(opened))
        opened.close()

    # ---------------------------------------------------------------- host memory

    def place(self, tensor: Tensor) -> str:
        self.placing()
        return "the only one"

    def register(self, address: int, length_bytes: int, place: str, *, read_only: bool) -> bool:
        self.registering()
        with self._lock:
            self.journal.append("registered read-only" if read_only else "registered")
            if self._registers:
                self.registered[address] = length_bytes
                self._changed.notify_all()
            return self._registers

    def unregister(self, address: int) -> None:
        self.unregistering()
        with self._lock:
            self.journal.append("unregistered")
            if self.registered.pop(address, None) is None:
                self.broken.append("memory was unregistered that is not registered")
            self._changed.notify_all()
            if not _mapped(address):
                self.broken.append("memory was unmapped before it was unregistered")


def _mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end and "memfd:" in line:
            return True
    return False
