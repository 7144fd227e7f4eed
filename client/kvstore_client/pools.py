"""Pools of GPU memory that the daemon lends: opened once, copied from within the GPU.

Who fetches into a tensor names its GPU in Acquire if the daemon lends pools of it, or of another
one whose memory it can read; what is leased may then be in a pool. A pool is mapped by the thread
that maps host regions, belongs to its region and ends with it, when no copy is under way. A copy
counts as one out of host memory does: once the generation, read after its event, is the leased one.

Whatever fails (no bindings, a handle that is not taken, no way between two GPUs) is told of once,
counted, and ends the naming for the session: blocks come by way of host regions then.

The driver is a seam: NVIDIA's bindings, imported when a daemon lends a pool (`CudaPools`), or CPU
memory in a GPU's place (`torchcpu`, the tests' double). Its calls may take as long as the device
does: they are made by who copies, and by the thread that maps.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import CallFailed
from kvstore_client.mapped import Held
from kvstore_client.results import PoolUse

__all__ = ["Access", "CudaPools", "NoPool", "Pool", "PoolDriver", "Pools", "Reader"]

log = logging.getLogger(__name__)

IPC_HANDLE_BYTES = 64

Opened = Any
Stream = Any
Tensor = Any
Place = Any


class PoolDriver(Protocol):
    """What is asked of a device beside `device.Driver`, whose streams and events order these
    copies, too. Any method may raise: it cannot be done.
    """

    def readable(self, place: Place, uuids: Sequence[str]) -> str:
        """Of these GPUs the one whose memory can be copied to this place, itself if it is one of
        them; empty: none.
        """

    def open(self, memory: pb.DeviceMemory, fd: int | None, place: Place) -> Opened:
        """Maps a pool for copies to this place. The descriptor is the caller's."""

    def admit(self, opened: Opened, place: Place) -> None:
        """Makes an open pool one for copies to this place, too."""

    def copy(self, stream: Stream, opened: Opened, offset: int, target: Tensor) -> None:
        """Queues a copy from `offset` on to a tensor of any strides, as many bytes as it has."""

    def close(self, opened: Opened) -> None:
        """Unmaps it, when no copy is under way."""


class _Device(Protocol):
    def pools(self) -> PoolDriver: ...


class Reader(NamedTuple):
    """Whose tensors are fetched into."""

    device: _Device
    place: Place


class NoPool(CallFailed):
    """A pool cannot be opened, or not be copied from."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.NOT_SUPPORTED, detail)


# ---------------------------------------------------------------- one pool


class Pool(Held):
    """The memory of a device region, open in this process."""

    def __init__(self, driver: PoolDriver, opened: Opened) -> None:
        self._driver, self._opened = driver, opened
        super().__init__()

    def admit(self, place: Place) -> None:
        """Raises NoPool if it cannot be copied to this place."""
        if not self.use():
            raise CallFailed(Reason.REGION_UNKNOWN)
        try:
            self._driver.admit(self._opened, place)
        except Exception as error:
            raise NoPool(str(error)) from error
        finally:
            self.leave()

    def copy(self, stream: Stream, offset: int, target: Tensor) -> None:
        """While it is in use, until the event behind the copy. Raises NoPool."""
        try:
            self._driver.copy(stream, self._opened, offset, target)
        except Exception as error:
            raise NoPool(f"a copy out of a pool: {error}") from error

    def _give_up(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            try:
                self._driver.close(opened)
            except Exception as error:
                log.warning("kvstore: a pool of the device cannot be closed: %s", error)

    def _forget(self) -> None:
        self._opened = None


# ---------------------------------------------------------------- the pools of a session


class Access(NamedTuple):
    """How tensors in one place come by the pools of a GPU."""

    uuid: str
    driver: PoolDriver
    place: Place

    def open(self, memory: pb.DeviceMemory, fd: int | None) -> Pool:
        return Pool(self.driver, self.driver.open(memory, fd, self.place))


@dataclass(slots=True)
class Pools:
    """What a session knows of pools: the GPUs that the daemon lends, who can read them, and what
    became of it. For several threads.
    """

    uuids: tuple[str, ...] = ()
    _blocks: int = 0
    _refused: int = 0
    _detail: str = ""
    _found: dict[Place, Access | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def access(self, readers: Iterable[Reader | None]) -> Access | None:
        """For a fetch into all of these, of which None is host memory; None: it names no GPU."""
        if not self.uuids:
            return None
        (reader, *others) = set(readers)
        if reader is None or others:
            return None
        with self._lock:
            if reader.place not in self._found:
                self._found[reader.place] = None
                try:
                    driver = reader.device.pools()
                    gpu = driver.readable(reader.place, self.uuids)
                    if gpu:
                        self._found[reader.place] = Access(gpu, driver, reader.place)
                except Exception as error:
                    self._note(f"no pool can be read into {reader.place}: {error}")
            return self._found[reader.place]

    def refuse(self, access: Access, why: str) -> None:
        """Such pools cannot be used: no more are asked for."""
        with self._lock:
            if self._found.get(access.place) == access:
                self._found[access.place] = None
                self._note(f"pools of {access.uuid} are not used for {access.place}: {why}")

    def _note(self, detail: str) -> None:
        self._refused += 1
        self._detail = detail
        log.warning("kvstore: %s; blocks in GPU memory come through CPU memory", detail)

    def read(self, blocks: int) -> None:
        """So many blocks came out of pools, and were right."""
        with self._lock:
            self._blocks += blocks

    def use(self) -> PoolUse:
        with self._lock:
            return PoolUse(self.uuids, self._blocks, self._refused, self._detail)


# ---------------------------------------------------------------- CUDA


class _Mapping(NamedTuple):
    """A pool in this process's device addresses. mapped_bytes: 0 if it was opened by name.
    ordinals: of the GPUs that may read it, that for which it was opened first.
    """

    address: int
    mapped_bytes: int
    ordinals: list[int]


Within = Callable[[Any, Stream], contextlib.AbstractContextManager[None]]
"""(torch.device, stream): what torch does within goes to this stream."""


class CudaPools:
    """By CUDA's virtual memory API, or by legacy IPC handles, which only the pool's own GPU opens.

    Places, tensors and streams are torch's. Calls are made in the primary context that torch has,
    which is current in the calling thread for no longer than that.
    """

    def __init__(self, within: Within, api: Any = None) -> None:
        """api: the bindings; None: those installed. OSError: there are none."""
        self._within_torch = within
        try:
            self._api = importlib.import_module("cuda.bindings.driver") if api is None else api
        except ImportError as error:
            raise OSError(f"the extra `gpu` is not installed: {error}") from error
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._call(self._api.cuInit(0))

    def readable(self, place: Place, uuids: Sequence[str]) -> str:
        api, own = self._api, int(place.index)
        if (gpu := self._uuid(own)) in uuids:
            return gpu
        (count,) = self._call(api.cuDeviceGetCount())
        for ordinal in range(int(count)):
            gpu = self._uuid(ordinal)
            if gpu in uuids and ordinal != own and self._reaches(own, ordinal):
                return gpu
        return ""

    def _uuid(self, ordinal: int) -> str:
        """As the daemon spells it."""
        (device,) = self._call(self._api.cuDeviceGet(ordinal))
        (raw,) = self._call(self._api.cuDeviceGetUuid(device))
        return f"GPU-{uuid.UUID(bytes=bytes(raw.bytes)[:16])}"

    def _reaches(self, reader: int, owner: int) -> bool:
        api = self._api
        ((own,), (peer,)) = (self._call(api.cuDeviceGet(one)) for one in (reader, owner))
        (reaches,) = self._call(api.cuDeviceCanAccessPeer(own, peer))
        return bool(reaches)

    def open(self, memory: pb.DeviceMemory, fd: int | None, place: Place) -> _Mapping:
        ordinal = int(place.index)
        with self._current(ordinal):
            if memory.kind == pb.DEVICE_HANDLE_KIND_CUDA_FD and fd is not None:
                return self._import(fd, memory.mapped_bytes, ordinal)
            if memory.kind == pb.DEVICE_HANDLE_KIND_CUDA_IPC:
                if memory.device_uuid != self._uuid(ordinal):
                    raise OSError("a legacy handle is for its own GPU only")
                return self._open_by_name(memory.ipc_handle, ordinal)
        raise OSError(f"device memory of kind {memory.kind}")

    def _import(self, fd: int, mapped_bytes: int, ordinal: int) -> _Mapping:
        api = self._api
        kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        (handle,) = self._call(api.cuMemImportFromShareableHandle(fd, kind))
        address, is_mapped = 0, False
        try:
            (reserved,) = self._call(
                api.cuMemAddressReserve(mapped_bytes, 0, api.CUdeviceptr(0), 0)
            )
            address = int(reserved)
            self._call(api.cuMemMap(address, mapped_bytes, 0, handle, 0))
            is_mapped = True
            mapping = _Mapping(address, mapped_bytes, [])
            self._let_read(mapping, ordinal)
        except BaseException:
            if is_mapped:
                api.cuMemUnmap(address, mapped_bytes)
            if address:
                api.cuMemAddressFree(address, mapped_bytes)
            raise
        finally:
            api.cuMemRelease(handle)  # what is mapped lives on, whatever becomes of the daemon
        return mapping

    def _let_read(self, mapping: _Mapping, ordinal: int) -> None:
        api = self._api
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        # Device memory has no other way; nothing here writes to it.
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(api.cuMemSetAccess(mapping.address, mapping.mapped_bytes, [access], 1))
        mapping.ordinals.append(ordinal)

    def _open_by_name(self, name: bytes, ordinal: int) -> _Mapping:
        api = self._api
        handle = api.CUipcMemHandle()
        if len(name) != IPC_HANDLE_BYTES:
            raise OSError(f"a legacy handle of {len(name)} bytes")
        ctypes.memmove(handle.getPtr(), name, len(name))
        lazy = int(api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        (address,) = self._call(api.cuIpcOpenMemHandle(handle, lazy))
        return _Mapping(int(address), 0, [ordinal])

    def admit(self, opened: _Mapping, place: Place) -> None:
        ordinal = int(place.index)
        if ordinal in opened.ordinals:
            return
        if not opened.mapped_bytes:
            raise OSError("a legacy handle is for its own GPU only")
        with self._lock, self._current(ordinal):
            if ordinal not in opened.ordinals:
                self._let_read(opened, ordinal)

    def copy(self, stream: Stream, opened: _Mapping, offset: int, target: Tensor) -> None:
        source = opened.address + offset
        with self._current(int(target.device.index)):
            if target.is_contiguous():
                self._copy(stream, source, target)
                return
            # Bytes in a row first: the driver copies no others, and torch knows any strides. The
            # memory between is this stream's, and so is used again only behind these copies.
            with self._within_torch(target.device, stream):
                row = target.new_empty(target.shape)
                self._copy(stream, source, row)
                target.copy_(row, non_blocking=True)

    def _copy(self, stream: Stream, source: int, target: Tensor) -> None:
        length = target.numel() * target.element_size()
        api = self._api
        self._call(
            api.cuMemcpyDtoDAsync(target.data_ptr(), source, length, int(stream.cuda_stream))
        )

    def close(self, opened: _Mapping) -> None:
        api = self._api
        with self._current(opened.ordinals[0]):
            if not opened.mapped_bytes:
                self._call(api.cuIpcCloseMemHandle(opened.address))
                return
            self._call(api.cuMemUnmap(opened.address, opened.mapped_bytes))
            self._call(api.cuMemAddressFree(opened.address, opened.mapped_bytes))

    @contextlib.contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """In the context of this GPU; what was the thread's is its own again afterwards."""
        api = self._api
        if ordinal not in self._contexts:
            (device,) = self._call(api.cuDeviceGet(ordinal))
            # It is torch's, and retained once for the life of the process.
            (self._contexts[ordinal],) = self._call(api.cuDevicePrimaryCtxRetain(device))
        self._call(api.cuCtxPushCurrent(self._contexts[ordinal]))
        try:
            yield
        finally:
            api.cuCtxPopCurrent()

    def _call(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a call returned behind its result. OSError if that is an error."""
        result, *values = answer
        if result != self._api.CUresult.CUDA_SUCCESS:
            raise OSError(getattr(result, "name", str(result)))
        return tuple(values)
