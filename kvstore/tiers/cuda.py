"""The device driver over CUDA, by NVIDIA's own bindings (the extra `gpu`; imported late).

Memory comes from the virtual memory API, so that it can be exported as a POSIX descriptor, or,
where the device cannot do that, from `cuMemAlloc` with legacy IPC handles, which processes open
only within one IPC namespace. The context is the device's primary one, made current in each thread
that calls.

All calls of the bindings return (CUresult, value ...) and release the interpreter lock.
"""

from __future__ import annotations

import importlib
import os
import threading
import uuid as uuids
from typing import Any, NamedTuple

from kvstore.model.reasons import Reason, StartError
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

LOST = (
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_DEVICE_NOT_LICENSED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_MPS_CONNECTION_FAILED",
    "CUDA_ERROR_MPS_RPC_FAILURE",
    "CUDA_ERROR_MPS_SERVER_NOT_READY",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_UNKNOWN",
)
"""After one of these every later call of the process fails as well: its memory is gone."""

PLAIN_GRANULE_BYTES = 2 << 20
"""cuMemAlloc packs smaller ones together, and an IPC handle names the whole of what is packed."""


class _Virtual(NamedTuple):
    """Memory of the virtual memory API. fd: -1 until it is exported."""

    address: int
    handle: Any
    fd: list[int]


class _Plain(NamedTuple):
    """Memory of cuMemAlloc."""

    address: int


def load_bindings() -> Any:
    """`cuda.bindings.driver`. StartError if the extra is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise StartError(
            Reason.START_SETTINGS,
            f"the extra `gpu` is not installed (pip install tiered-kvstore[gpu]): {error}",
            "device.capacity_bytes",
        ) from None


class CudaDriver:
    """See the module's docstring. Implements DeviceDriver."""

    def __init__(self, index: int, api: Any = None) -> None:
        """`index`: of the GPU among those visible. `api`: the bindings; None: those installed."""
        self._index = index
        self._api = load_bindings() if api is None else api
        self._lost = {getattr(self._api.CUresult, name, None) for name in LOST} - {None}
        self._context: Any = None
        self._device: Any = None
        self._uuid = ""
        self._prop: Any = None
        self._granule_bytes = 0
        self._virtual = False
        self._streams: list[Any] = []
        self._thread = threading.local()

    @property
    def uuid(self) -> str:
        """See `DeviceDriver`."""
        return self._uuid

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """See `DeviceDriver`."""
        api = self._api
        try:
            self._call(api.cuInit(0))
            (self._device,) = self._call(api.cuDeviceGet(self._index))
            (raw,) = self._call(api.cuDeviceGetUuid(self._device))
            (self._context,) = self._call(api.cuDevicePrimaryCtxRetain(self._device))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no driver's library
            raise StartError(
                Reason.START_SETTINGS, f"GPU {self._index} cannot be used: {error}", "device.gpu"
            ) from None
        self._uuid = f"GPU-{uuids.UUID(bytes=bytes(raw.bytes)[:16])}"
        attribute = api.CUdevice_attribute
        self._virtual = bool(
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            and self._attribute(
                attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            )
        )
        self._granule_bytes = self._ask_granule() if self._virtual else PLAIN_GRANULE_BYTES

    def _attribute(self, attribute: Any) -> int:
        (value,) = self._call(self._api.cuDeviceGetAttribute(attribute, self._device))
        return int(value)

    def _ask_granule(self) -> int:
        api = self._api
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self._index
        fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        prop.requestedHandleTypes = fd_type
        self._prop = prop
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (granule,) = self._call(api.cuMemGetAllocationGranularity(prop, minimum))
        return int(granule)

    def close(self) -> None:
        """See `DeviceDriver`. Whatever is left goes with the context."""
        context, self._context = self._context, None
        if context is None:
            return
        for stream in self._streams:
            self._api.cuStreamDestroy(stream)
        self._streams.clear()
        self._api.cuDevicePrimaryCtxRelease(self._device)

    def _enter(self) -> None:
        """Makes the context current in this thread."""
        if self._context is None:
            raise DeviceLostError("the device is closed")
        if getattr(self._thread, "context", None) is not self._context:
            self._call(self._api.cuCtxSetCurrent(self._context))
            self._thread.context = self._context

    def _call(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a call returned behind its result. OSError of the kind that the result means."""
        result, *values = answer
        if result == self._api.CUresult.CUDA_SUCCESS:
            return tuple(values)
        name = getattr(result, "name", str(result))
        if result in self._lost:
            raise DeviceLostError(name)
        if name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise DeviceFullError(name)
        raise OSError(name)

    # ------------------------------------------------------------------ memory

    def granule_bytes(self) -> int:
        """See `DeviceDriver`."""
        return self._granule_bytes

    def make(self, total_bytes: int, *, shared: bool) -> DeviceMemory:
        """See `DeviceDriver`."""
        self._enter()
        mapped_bytes = -(-total_bytes // self._granule_bytes) * self._granule_bytes
        made = self._make_virtual(mapped_bytes) if self._virtual else self._make_plain(mapped_bytes)
        memory = DeviceMemory(mapped_bytes, made)
        try:
            stream = self._api.CUstream(0)
            self._call(self._api.cuMemsetD8Async(made.address, 0, mapped_bytes, stream))
            self.wait(self.record(stream))
        except OSError:
            self.drop(memory)
            raise
        return memory

    def _make_plain(self, mapped_bytes: int) -> _Plain:
        (address,) = self._call(self._api.cuMemAlloc(mapped_bytes))
        return _Plain(int(address))

    def _make_virtual(self, mapped_bytes: int) -> _Virtual:
        api = self._api
        (handle,) = self._call(api.cuMemCreate(mapped_bytes, self._prop, 0))
        address = 0
        try:
            (reserved,) = self._call(
                api.cuMemAddressReserve(mapped_bytes, 0, api.CUdeviceptr(0), 0)
            )
            address = int(reserved)
            self._call(api.cuMemMap(address, mapped_bytes, 0, handle, 0))
            access = api.CUmemAccessDesc()
            access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self._index
            access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._call(api.cuMemSetAccess(address, mapped_bytes, [access], 1))
        except OSError:
            if address:
                api.cuMemUnmap(address, mapped_bytes)
                api.cuMemAddressFree(address, mapped_bytes)
            api.cuMemRelease(handle)
            raise
        return _Virtual(address, handle, [-1])

    def export(self, memory: DeviceMemory) -> Exported:
        """See `DeviceDriver`."""
        self._enter()
        api, made = self._api, memory.made
        if isinstance(made, _Plain):
            (handle,) = self._call(api.cuIpcGetMemHandle(made.address))
            return Exported(HandleKind.CUDA_IPC, -1, _bytes_at(handle.getPtr(), 64))
        if made.fd[0] < 0:
            fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            (fd,) = self._call(api.cuMemExportToShareableHandle(made.handle, fd_type, 0))
            made.fd[0] = int(fd)
            os.set_inheritable(made.fd[0], False)
        return Exported(HandleKind.CUDA_FD, made.fd[0])

    def drop(self, memory: DeviceMemory) -> None:
        """See `DeviceDriver`."""
        made = memory.made
        if isinstance(made, _Virtual) and made.fd[0] >= 0:
            os.close(made.fd[0])
            made.fd[0] = -1
        self._enter()
        api = self._api
        if isinstance(made, _Plain):
            self._call(api.cuMemFree(made.address))
            return
        self._call(api.cuMemUnmap(made.address, memory.mapped_bytes))
        self._call(api.cuMemAddressFree(made.address, memory.mapped_bytes))
        self._call(api.cuMemRelease(made.handle))

    # ------------------------------------------------------------------ host memory

    def register(self, host: Bytes) -> None:
        """See `DeviceDriver`."""
        self._enter()
        self._call(self._api.cuMemHostRegister(host.ctypes.data, host.nbytes, 0))

    def unregister(self, host: Bytes) -> None:
        """See `DeviceDriver`."""
        self._enter()
        self._call(self._api.cuMemHostUnregister(host.ctypes.data))

    # ------------------------------------------------------------------ copies

    def stream(self) -> Stream:
        """See `DeviceDriver`. It does not wait for the legacy default stream."""
        self._enter()
        flag = int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        (stream,) = self._call(self._api.cuStreamCreate(flag))
        self._streams.append(stream)
        return stream

    def copy_in(self, stream: Stream, host: Bytes, memory: DeviceMemory, offset: int) -> None:
        """See `DeviceDriver`."""
        self._enter()
        address = memory.made.address + offset
        api = self._api
        self._call(api.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, stream))

    def copy_out(self, stream: Stream, memory: DeviceMemory, offset: int, host: Bytes) -> None:
        """See `DeviceDriver`."""
        self._enter()
        address = memory.made.address + offset
        api = self._api
        self._call(api.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, stream))

    def record(self, stream: Stream) -> Event:
        """See `DeviceDriver`. The event sleeps instead of spinning while it is waited for."""
        self._enter()
        flags = self._api.CUevent_flags
        quiet = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        (event,) = self._call(self._api.cuEventCreate(quiet))
        self._call(self._api.cuEventRecord(event, stream))
        return event

    def drain(self, stream: Stream) -> None:
        """See `DeviceDriver`."""
        self._enter()
        self._call(self._api.cuStreamSynchronize(stream))

    def wait(self, event: Event) -> None:
        """See `DeviceDriver`."""
        self._enter()
        try:
            self._call(self._api.cuEventSynchronize(event))
        finally:
            self._api.cuEventDestroy(event)


def _bytes_at(address: int, length: int) -> bytes:
    """Bytes of a struct of the bindings, which do not show its fields."""
    import ctypes

    return ctypes.string_at(address, length)
