"""Tensors in a GPU's memory: fetched into from the daemon's host regions, pushed from into staging.

Copies run on a stream of their own, once what the caller's stream had been given when he called has
ended: the kernel that writes a block, or the one that still reads the memory that it is to go to.
That is asked for again and again, and given up at the deadline, before anything is queued: what is
queued has to be waited for, however long it takes. Nothing counts before the event behind a copy
has ended: no generation is compared, no layer is told of, nothing is committed and no lease
released. Host regions are registered with the device by a thread of their own, from their first
copy on, and unregistered before they are unmapped; until then, and where that cannot be, copies are
slower and no less right.

The driver is a seam: torch.cuda, imported when the first such tensor comes, or the tests' double.
All waiting for kernels and copies is done in the thread that copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kvstore.gather import Source
from kvstore.model.reasons import BadRequest, Reason
from kvstore.shm import MappedRegion
from kvstore_client.arrays import Bytes
from kvstore_client.channel import CallFailed
from kvstore_client.mapped import Held, Region, Staging
from kvstore_client.pools import CudaPools, PoolDriver, Reader

__all__ = ["DeviceFill", "DeviceRows", "DeviceTarget", "Driver", "Pin", "TorchCuda", "pinned"]

log = logging.getLogger(__name__)

PAUSE_S, PAUSE_MAX_S = 20e-6, 1e-3
"""Between two looks at the caller's kernels: each pause is twice the one before."""

Stream = Any
Event = Any
Tensor = Any
Place = Any


class Driver(Protocol):
    """What is asked of a GPU. Streams and events are looked into by the driver alone."""

    def owns(self, data: object) -> bool:
        """Whether this is a tensor in a device's memory."""

    def current_stream(self, tensor: Tensor) -> Stream:
        """The stream on which this thread's kernels run."""

    def copy_stream(self, tensor: Tensor) -> Stream:
        """A stream for our copies alone, on the tensor's device."""

    def record(self, stream: Stream) -> Event:
        """An event that ends when everything queued before it has."""

    def done(self, event: Event) -> bool:
        """Whether the event has ended."""

    def await_event(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on begins after the event."""

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """The tensor's memory is not given to others before what the stream has now has ended."""

    def copy_in(self, stream: Stream, host: Bytes, target: Tensor) -> None:
        """Queues a copy of uint8 [n] to a tensor of n bytes, of any strides."""

    def copy_out(self, stream: Stream, source: Tensor, host: Bytes) -> None:
        """Queues a copy of a tensor of n bytes, of any strides, to uint8 [n]."""

    def wait(self, event: Event) -> None:
        """Blocks this thread, without the interpreter lock, until the event has ended."""

    def place(self, tensor: Tensor) -> Place:
        """The device whose memory it is; holds nothing of the tensor."""

    def register(self, address: int, length_bytes: int, place: Place, *, read_only: bool) -> bool:
        """Pins host memory, by way of this device for all. False if it cannot be. Takes seconds for
        GiB that are not there yet.
        """

    def unregister(self, address: int) -> None:
        """Ends that, when no copy is under way and before the memory is unmapped."""

    def pools(self) -> PoolDriver:
        """What opens pools of its memory. Raises where nothing does."""


class TorchCuda:
    """Over torch.cuda."""

    PORTABLE, READ_ONLY = 0x01, 0x08
    """cudaHostRegisterPortable (for all devices), cudaHostRegisterReadOnly"""

    def __init__(self, torch: Any = None) -> None:
        """torch: for tests; else the one that is loaded when the first tensor comes."""
        self._given = torch
        self._streams: dict[str, Stream] = {}
        self._registered_on: dict[int, Any] = {}
        self._pools: CudaPools | None = None
        self._lock = threading.Lock()

    @property
    def _torch(self) -> Any:
        return self._given or sys.modules["torch"]  # whoever has a tensor has loaded it

    def owns(self, data: object) -> bool:
        torch: Any = sys.modules.get("torch")
        return torch is not None and isinstance(data, torch.Tensor) and data.is_cuda

    def current_stream(self, tensor: Tensor) -> Stream:
        return self._torch.cuda.current_stream(tensor.device)

    def copy_stream(self, tensor: Tensor) -> Stream:
        with self._lock:
            name = str(tensor.device)
            if name not in self._streams:
                self._streams[name] = self._torch.cuda.Stream(tensor.device)
            return self._streams[name]

    def record(self, stream: Stream) -> Event:
        event = self._torch.cuda.Event()
        event.record(stream)
        return event

    def done(self, event: Event) -> bool:
        return bool(event.query())

    def await_event(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def copy_in(self, stream: Stream, host: Bytes, target: Tensor) -> None:
        with self._on(target.device, stream):
            target.copy_(self._alias(host, target), non_blocking=True)

    def copy_out(self, stream: Stream, source: Tensor, host: Bytes) -> None:
        with self._on(source.device, stream):
            self._alias(host, source).copy_(source, non_blocking=True)

    @contextlib.contextmanager
    def _on(self, device: Any, stream: Stream) -> Iterator[None]:
        """Copies to this stream. Mode and device are a thread's own: only in inference mode may a
        tensor be written that an engine made in it, and the first device is a new thread's, which
        would get a context there.
        """
        torch = self._torch
        with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
            yield

    def _alias(self, host: Bytes, like: Tensor) -> Tensor:
        """Host bytes as a tensor. By its address: torch warns of memory that must not be written,
        and nobody writes to this. The caller keeps `host` until the copy's event.
        """
        memory = (ctypes.c_uint8 * host.size).from_address(host.ctypes.data)
        return self._torch.frombuffer(memory, dtype=like.dtype).reshape(like.shape)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def place(self, tensor: Tensor) -> Place:
        return tensor.device

    def register(self, address: int, length_bytes: int, place: Place, *, read_only: bool) -> bool:
        flags = self.PORTABLE | (self.READ_ONLY if read_only else 0)
        cuda = self._torch.cuda
        with cuda.device(place):
            if int(cuda.cudart().cudaHostRegister(address, length_bytes, flags)) == 0:
                self._registered_on[address] = place
                return True
            self._forget_error()
            return False

    def unregister(self, address: int) -> None:
        cuda = self._torch.cuda
        with cuda.device(self._registered_on.pop(address)):
            if int(cuda.cudart().cudaHostUnregister(address)) != 0:
                self._forget_error()

    def pools(self) -> PoolDriver:
        with self._lock:
            if self._pools is None:
                self._pools = CudaPools(self._on)
            return self._pools

    def _forget_error(self) -> None:
        """Else torch would find it behind its next kernel, and blame that."""
        with contextlib.suppress(OSError, AttributeError, IndexError):
            major = str(self._torch.version.cuda).split(".")[0]
            ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


# ---------------------------------------------------------------- registered memory


_registering = threading.Lock()
"""One mapping at a time: the driver does no more, and threads that wait there use its lock up."""


class Pin(Held):
    """A mapping's registration with the device, made in a thread of its own: no copy waits for it.
    ValueError: the mapping is closed.
    """

    def __init__(self, driver: Driver, memory: MappedRegion, place: Place) -> None:
        self._view: Bytes | None = memory.u8  # stays mapped until it is unregistered
        self._driver, self._address = driver, memory.address
        self._registered = False
        super().__init__(users=1)  # who registers it: meanwhile it ends no more than under a copy
        try:
            threading.Thread(
                target=self._register, args=(memory, place), name="kvstore-pin", daemon=True
            ).start()
        except RuntimeError as error:
            log.warning("kvstore: no thread to register memory with the device: %s", error)
            self._users = 0

    def _register(self, memory: MappedRegion, place: Place) -> None:
        try:
            with _registering:
                if not self._ending:
                    self._registered = self._driver.register(
                        self._address, memory.total_bytes, place, read_only=not memory.writable
                    )
        except Exception as error:
            log.warning("kvstore: memory cannot be registered with the device: %s", error)
        finally:
            self.leave()

    def _give_up(self) -> None:
        """What the driver raises (its context is lost, torch is going) keeps no memory."""
        registered, self._registered = self._registered, False
        if registered:
            try:
                self._driver.unregister(self._address)
            except Exception as error:
                log.warning("kvstore: memory cannot be unregistered from the device: %s", error)

    def _forget(self) -> None:
        self._view = None


_pinning = threading.Lock()


def pinned(driver: Driver, mapped: Region | Staging, tensor: Tensor) -> Pin | None:
    """The registration of a region or of staging, in use until `leave`; begun now, by way of the
    tensor's device, if there is none. None: the daemon has closed it.
    """
    with _pinning:
        if mapped.pin is None and not mapped.gone:
            with contextlib.suppress(ValueError):
                mapped.pin = Pin(driver, mapped.memory, driver.place(tensor))
        pin = mapped.pin
    return pin if isinstance(pin, Pin) and pin.use() else None


# ---------------------------------------------------------------- rows of a tensor


class DeviceRows:
    """A tensor whose first dimension counts blocks: [n, ...], of any strides.

    spans: the bytes of a row, one after the other, within a block. BadRequest naming `name` if it
    does not fit.
    """

    def __init__(
        self, driver: Driver, tensor: Tensor, count: int, spans: Sequence[slice], name: str
    ) -> None:
        self.driver, self.tensor, self.spans = driver, tensor, tuple(spans)
        row_bytes = sum(span.stop - span.start for span in spans)
        shape: tuple[int, ...] = tuple(tensor.shape)
        held: int = tensor.element_size()
        for size in shape[1:]:
            held *= size
        if not shape or shape[0] < count or held != row_bytes:
            raise _bad(
                name, f"{name} has rows of {held} bytes in {shape}, not {count} x {row_bytes}"
            )
        if len(self.spans) == 1:
            self._pieces = [tensor]
        elif tensor.is_contiguous():
            flat = tensor.reshape(shape[0], len(self.spans), -1)
            self._pieces = [flat[:, number] for number in range(len(self.spans))]
        elif len(shape) > 1 and shape[1] == len(self.spans):
            self._pieces = [tensor[:, number] for number in range(len(self.spans))]
        else:
            raise _bad(name, f"{name} has the parts of a layer as its second dimension")
        self.row_bytes: int = row_bytes
        # In the caller's thread: what it has queued by now comes before our copies.
        self._queued = driver.record(driver.current_stream(tensor))

    @property
    def reader(self) -> Reader:
        """Whose memory it is."""
        return Reader(self.driver, self.driver.place(self.tensor))

    def await_kernels(self, check: Callable[[], None]) -> None:
        """Returns when what the caller had queued has ended. What `check` raises ends the wait."""
        pause_s = PAUSE_S
        while not self.driver.done(self._queued):
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def stream(self) -> Stream:
        """Ours, on which everything queued from now on comes after what the caller had queued."""
        stream = self.driver.copy_stream(self.tensor)
        self.driver.await_event(stream, self._queued)
        self.driver.hold(self.tensor, stream)
        return stream

    def pieces(self, row: int) -> list[tuple[slice, Tensor]]:
        """(bytes within the block, where they are in the tensor) of a row."""
        return [(span, piece[row]) for span, piece in zip(self.spans, self._pieces, strict=True)]


class DeviceTarget:
    """Where one layer goes, in a device's memory: see layer_reads.Target. For one thread."""

    def __init__(self, rows: DeviceRows) -> None:
        self._rows = rows
        self._stream: Stream | None = None
        self._pins: list[Held] = []
        self._sources: list[Sequence[Source]] = []

    @property
    def layer_bytes(self) -> int:
        return self._rows.row_bytes

    @property
    def reader(self) -> Reader | None:
        return self._rows.reader

    def await_kernels(self, check: Callable[[], None]) -> None:
        self._rows.await_kernels(check)

    def begin(self, sources: Sequence[Source], first_row: int, regions: Sequence[Region]) -> None:
        rows, driver = self._rows, self._rows.driver
        stream = self._stream = rows.stream() if self._stream is None else self._stream
        self._sources.append(sources)  # the memory stays mapped until the event
        for region in regions:
            pin = pinned(driver, region, rows.tensor)
            if pin is not None:
                self._pins.append(pin)  # at once: `settle` leaves it though the next one fails
        row = first_row
        for number, (slots2d, slots) in enumerate(sources):
            within = regions[number] if regions else None
            pool = None if within is None else within.pool
            slot_bytes = 0 if within is None else within.slot_bytes
            if pool is not None:
                if not pool.use():
                    raise CallFailed(Reason.REGION_UNKNOWN)
                self._pins.append(pool)
            for slot in np.asarray(slots, np.intp).tolist():
                for span, target in rows.pieces(row):
                    if pool is None:
                        driver.copy_in(stream, slots2d[slot, span], target)
                    else:
                        pool.copy(stream, slot * slot_bytes + span.start, target)
                row += 1

    def settle(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        driver = self._rows.driver
        try:
            driver.wait(driver.record(stream))
        finally:
            pins, self._pins, self._sources = self._pins, [], []
            for pin in pins:
                pin.leave()


class DeviceFill:
    """Fills blocks from the rows of a tensor: a `Fill`. `begin` and `settle` do many at a time."""

    def __init__(self, rows: DeviceRows, first_block: int) -> None:
        self._rows, self._first_block = rows, first_block
        self._stream: Stream | None = None
        self._targets: list[Bytes] = []

    def await_kernels(self, check: Callable[[], None]) -> None:
        """Before the first copy: returns when the rows are written. What `check` raises ends it."""
        self._rows.await_kernels(check)

    @contextlib.contextmanager
    def into(self, staging: Staging | None) -> Iterator[None]:
        """Around copies into this staging: at its end they are there, whatever happened."""
        rows = self._rows
        pin = None if staging is None else pinned(rows.driver, staging, rows.tensor)
        try:
            yield
        finally:
            try:
                self.settle()
            finally:
                if pin is not None:
                    pin.leave()

    def begin(self, index: int, target: Bytes) -> None:
        """Queues the copy of block `index`. One layer of it is at its place in the block."""
        if self._stream is None:
            self._stream = self._rows.stream()
        self._targets.append(target)
        base = self._rows.spans[0].start
        for span, source in self._rows.pieces(index - self._first_block):
            here = target[span.start - base : span.stop - base]
            self._rows.driver.copy_out(self._stream, source, here)

    def settle(self) -> None:
        """Returns when everything that was begun is in host memory."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._rows.driver.wait(self._rows.driver.record(stream))
        self._targets = []

    def __call__(self, index: int, target: Bytes) -> None:
        try:
            self.begin(index, target)
        finally:
            self.settle()


def _bad(name: str, detail: str) -> BadRequest:
    return BadRequest(Reason.BAD_SIZE, detail, name)
