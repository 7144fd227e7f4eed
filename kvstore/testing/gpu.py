"""A device that is none, and watches: the device tier's order of things, recorded and judged.

Copies happen when their event is waited for and not before, so that whoever publishes a block too
early publishes other bytes. What must never be is noted in `broken`: a call on the event loop's
thread, a copy between memory that is dropped, unregistered under way or out of bounds, a second
registration, memory that is unmapped while it is registered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvstore.tiers.driver import (
    Bytes,
    DeviceFullError,
    DeviceLostError,
    DeviceMemory,
    Event,
    Exported,
    HandleKind,
    Stream,
)

GRANULE_BYTES = 1 << 16


class _Queued(NamedTuple):
    source: Bytes
    target: Bytes
    host: Bytes
    memory: Bytes


class RecordingDriver:
    """Implements DeviceDriver; see the module's docstring. `log` has a word a call, in order."""

    def __init__(self, *, loop_thread: int = 0, capacity_bytes: int = 1 << 40) -> None:
        """`loop_thread`: ident of the thread that may call nothing; 0: any may."""
        self.log: list[str] = []
        self.broken: list[str] = []
        self.loop_thread = loop_thread
        self.capacity_bytes = capacity_bytes
        self.pins = True
        """Whether host memory can be registered."""
        self.exports = True
        self.export_kind = HandleKind.CUDA_FD
        self.lost_at: int | None = None
        """The number of calls until the device is lost."""
        self.before: Callable[[str], None] = lambda call: None
        """Called with the name of each call, in its thread."""
        self.registered: dict[int, int] = {}
        self.memories: dict[int, Bytes] = {}
        self._queued: dict[int, list[_Queued]] = {}
        self._guard = threading.RLock()

    @property
    def uuid(self) -> str:
        """See `DeviceDriver`."""
        return "REC-00000000-0000-0000-0000-000000000000"

    def _note(self, call: str) -> None:
        if threading.get_ident() == self.loop_thread:
            self.broken.append(f"{call} on the loop's thread")
        self.before(call)
        with self._guard:
            if self.lost_at is not None:
                self.lost_at -= 1
                if self.lost_at < 0:
                    raise DeviceLostError("the recording device was told to be lost")
            self.log.append(call)

    def open(self) -> None:
        """See `DeviceDriver`."""
        self._note("open")

    def close(self) -> None:
        """See `DeviceDriver`."""
        self.log.append("close")
        if self.registered:
            self.broken.append(f"{len(self.registered)} registrations are left")
        if any(self._queued.values()):
            self.broken.append("copies are under way at the end")

    def granule_bytes(self) -> int:
        """See `DeviceDriver`."""
        return GRANULE_BYTES

    def make(self, total_bytes: int, *, shared: bool) -> DeviceMemory:
        """See `DeviceDriver`."""
        self._note("make")
        mapped_bytes = -(-total_bytes // GRANULE_BYTES) * GRANULE_BYTES
        with self._guard:
            if sum(map(len, self.memories.values())) + mapped_bytes > self.capacity_bytes:
                raise DeviceFullError("the recording device is full")
            made = np.zeros(mapped_bytes, np.uint8)
            self.memories[id(made)] = made
            return DeviceMemory(mapped_bytes, made)

    def export(self, memory: DeviceMemory) -> Exported:
        """See `DeviceDriver`: a descriptor of an empty file, which nobody reads."""
        self._note("export")
        if not self.exports:
            raise OSError("the recording device exports nothing")
        if self.export_kind is HandleKind.CUDA_IPC:
            return Exported(self.export_kind, -1, b"recorded")
        return Exported(self.export_kind, os.memfd_create("kvstore-recorded"))

    def drop(self, memory: DeviceMemory) -> None:
        """See `DeviceDriver`."""
        self._note("drop")
        with self._guard:
            if self.memories.pop(id(memory.made), None) is None:
                self.broken.append("memory is dropped twice")
            if any(one.memory is memory.made for one in self._under_way()):
                self.broken.append("memory is dropped under a copy")

    def register(self, host: Bytes) -> None:
        """See `DeviceDriver`."""
        self._note("register")
        if not self.pins:
            raise OSError("the recording device pins nothing")
        with self._guard:
            if host.ctypes.data in self.registered:
                self.broken.append("host memory is registered twice")
            self.registered[host.ctypes.data] = host.nbytes

    def unregister(self, host: Bytes) -> None:
        """See `DeviceDriver`. Reads the memory, which ends the process if it is unmapped."""
        self._note("unregister")
        int(host[0]) + int(host[-1])
        with self._guard:
            begin = host.ctypes.data
            if self.registered.pop(begin, None) is None:
                self.broken.append("what is not registered is unregistered")
            for one in self._under_way():
                if begin <= one.host.ctypes.data < begin + host.nbytes:
                    self.broken.append("host memory is unregistered under a copy")

    def stream(self) -> Stream:
        """See `DeviceDriver`."""
        self._note("stream")
        with self._guard:
            number = len(self._queued)
            self._queued[number] = []
            return number

    def copy_in(self, stream: Stream, host: Bytes, memory: DeviceMemory, offset: int) -> None:
        """See `DeviceDriver`."""
        self._note("copy_in")
        self._queue(stream, host, memory, offset, inward=True)

    def copy_out(self, stream: Stream, memory: DeviceMemory, offset: int, host: Bytes) -> None:
        """See `DeviceDriver`."""
        self._note("copy_out")
        self._queue(stream, host, memory, offset, inward=False)

    def _queue(
        self, stream: int, host: Bytes, memory: DeviceMemory, offset: int, *, inward: bool
    ) -> None:
        with self._guard:
            if id(memory.made) not in self.memories:
                self.broken.append("a copy uses memory that was dropped")
            if not 0 <= offset <= len(memory.made) - len(host):
                self.broken.append("a copy is out of bounds")
            device = memory.made[offset : offset + len(host)]
            source, target = (host, device) if inward else (device, host)
            self._queued[stream].append(_Queued(source, target, host, memory.made))

    def record(self, stream: Stream) -> Event:
        """See `DeviceDriver`."""
        self._note("record")
        with self._guard:
            return stream, list(self._queued[stream])

    def drain(self, stream: Stream) -> None:
        """See `DeviceDriver`."""
        self._note("drain")
        with self._guard:
            self._end(stream, list(self._queued[stream]))

    def wait(self, event: Event) -> None:
        """See `DeviceDriver`. The copies happen now."""
        self._note("wait")
        stream, queued = event
        with self._guard:
            self._end(stream, queued)

    def _end(self, stream: int, queued: list[_Queued]) -> None:
        left = self._queued[stream]
        for one in queued:
            if any(one is other for other in left):
                np.copyto(one.target, one.source)
        self._queued[stream] = [one for one in left if not any(one is other for other in queued)]

    def _under_way(self) -> list[_Queued]:
        return [one for queued in self._queued.values() for one in queued]
