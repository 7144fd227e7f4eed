"""The seam between the device tier and a GPU: memory, streams, events, nothing about blocks.

Implemented over CUDA (`cuda`), over CPU memory through torch (`torchcpu`) and by the recording
double of the tests (`kvstore.testing.gpu`).

A driver is called by the tier's worker threads alone, by several at once, never by the event
loop's. Every method may take as long as the device does. A copy is ordered by its stream and done
once an event that was recorded behind it has ended, not before.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

Stream = Any
Event = Any
"""What `stream` and `record` give; only the driver that made them looks inside."""


class DeviceLostError(OSError):
    """The device, or this process's context on it, is gone for good: so is everything in it."""


class DeviceFullError(OSError):
    """The device has no memory left for this; it works."""


class HandleKind(enum.IntEnum):
    """How memory is handed to another process; as on the wire (store.proto)."""

    CUDA_FD = 1
    CUDA_IPC = 2
    HOST_FILE = 3


class Exported(NamedTuple):
    """Memory as another process can open it. fd: a descriptor, the driver's until `drop`; -1: there
    is none, and `ipc_handle` names the memory.
    """

    kind: HandleKind
    fd: int
    ipc_handle: bytes = b""


class DeviceMemory(NamedTuple):
    """Memory on the device. mapped_bytes: whole granules; made: the driver's own notes."""

    mapped_bytes: int
    made: Any


class DeviceDriver(Protocol):
    """See the module's docstring. Any method raises DeviceLostError once the device is lost."""

    @property
    def uuid(self) -> str:
        """Names the device on this machine: "GPU-..." as NVML spells it."""
        ...

    def open(self) -> None:
        """Takes hold of the device; before anything else. StartError: there is none to be had."""
        ...

    def close(self) -> None:
        """Gives up the device, with what is left of memory, streams and registrations."""
        ...

    def granule_bytes(self) -> int:
        """Memory comes in multiples of this."""
        ...

    def make(self, total_bytes: int, *, shared: bool) -> DeviceMemory:
        """Memory of at least so many bytes, all zero when this returns. shared: it can be exported.
        DeviceFullError if the device has none left.
        """
        ...

    def export(self, memory: DeviceMemory) -> Exported:
        """A handle that another process can open. OSError if the system allows none."""
        ...

    def drop(self, memory: DeviceMemory) -> None:
        """Gives memory back, with its handle. Who has opened it elsewhere keeps the bytes."""
        ...

    def register(self, host: Bytes) -> None:
        """Pins host memory for the device, so that copies from and to it run beside everything
        else. OSError if it cannot be pinned: copies work all the same, and slower.
        """
        ...

    def unregister(self, host: Bytes) -> None:
        """Ends a registration: before the memory is unmapped, and after its last copy."""
        ...

    def stream(self) -> Stream:
        """A queue of copies beside all others."""
        ...

    def copy_in(self, stream: Stream, host: Bytes, memory: DeviceMemory, offset: int) -> None:
        """Queues a copy from host memory to `offset` of device memory."""
        ...

    def copy_out(self, stream: Stream, memory: DeviceMemory, offset: int, host: Bytes) -> None:
        """Queues a copy from `offset` of device memory to host memory."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that ends when everything queued before it has."""
        ...

    def drain(self, stream: Stream) -> None:
        """Blocks this thread until nothing that was queued is under way any more."""
        ...

    def wait(self, event: Event) -> None:
        """Blocks this thread, and no other, until the event has ended; frees it."""
        ...
