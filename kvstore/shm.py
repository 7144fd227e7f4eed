"""Shared memory between the daemon and its clients: sealed memfds, mappings, and their hand-over.

Promises. A process that holds a region's descriptor can neither change its bytes nor its size
(arena regions), or its bytes but never its size (staging regions): no access through a mapping made
here ends in SIGBUS. A mapping stays for as long as a view of it lives, and not a moment longer once
it is closed. Every call that may fault in many pages releases the interpreter lock.

Bytes of a region's file: one little-endian u64 generation a slot, padded to a whole page
(`header_bytes`), then the slots, each `slot_bytes` long. Linux 5.1 or newer.

Daemon and client use this module; it imports nothing of ours and starts no thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE
HEADER_ALIGN_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of ARM with pages of 4 KiB; elsewhere `join` says why it cannot."""
GENERATION_BYTES = 8
FRAME_BYTES_MAX = 1 << 16
FDS_PER_FRAME_MAX = 4

_FRAME = struct.Struct("<I")
_INT_BYTES = struct.calcsize("i")
_CLOEXEC = socket.MSG_CMSG_CLOEXEC
_MAP_FAILED = ctypes.c_void_p(-1).value

# Numbers of the Linux ABI that Python's modules do not have.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MFD_NOEXEC_SEAL = 0x0008
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25


class Seal(enum.IntFlag):
    """What can no longer be done to a memfd, by anybody."""

    SEAL = 0x01
    SHRINK = 0x02
    GROW = 0x04
    WRITE = 0x08
    FUTURE_WRITE = 0x10


NO_SEALS = Seal(0)
ARENA_SEALS = Seal.SHRINK | Seal.GROW | Seal.FUTURE_WRITE | Seal.SEAL
STAGING_SEALS = Seal.SHRINK | Seal.GROW | Seal.SEAL


def header_bytes(slots: int) -> int:
    """Bytes before slot 0: a u64 a slot, padded to 4096."""
    return -(-slots * GENERATION_BYTES // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES


# ---------------------------------------------------------------- system calls


def whole_pages(length: int) -> NDArray[np.uint8]:
    """uint8 [length] of memory of its own, at the start of a page: what a disk takes directly."""
    return np.frombuffer(mmap.mmap(-1, max(length, 1)), np.uint8)[:length]


def _bind() -> tuple[Any, Any, Any, Any]:
    # A CDLL call releases the interpreter lock; PyDLL, and the mmap module's constructor, do not.
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    address = ctypes.c_void_p
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (address, size)
    libc.madvise.argtypes = (address, size, ctypes.c_int)
    libc.mlock.argtypes = (address, size)
    return libc.mmap, libc.munmap, libc.madvise, libc.mlock


_mmap, _munmap, _madvise, _mlock = _bind()


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _advise(address: int, length: int, advice: int) -> None:
    _check(_madvise(address, length, advice), "madvise")


# ---------------------------------------------------------------- mappings


class _Exporter:
    """What every view's chain of bases ends in: the mapping lives as long as this object."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, length: int, writable: bool) -> None:
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": (length,),
            "typestr": "|u1",
            "version": 3,
        }


class _Mapping:
    """Address range of one mapping, and in which process it exists."""

    __slots__ = ("address", "length", "only_in_pid")

    def __init__(self, address: int, length: int) -> None:
        self.address = address
        self.length = length
        self.only_in_pid = 0  # 0: also in forked children

    @property
    def here(self) -> bool:
        return self.only_in_pid in (0, os.getpid())

    def unmap(self) -> None:
        # A forked child does not have a DONTFORK mapping, but may have something else at its
        # address.
        if self.here:
            _check(_munmap(self.address, self.length), "munmap")


class MappedRegion:
    """A region's bytes in this process. Made by `map_region`; holds no descriptor.

    Views are numpy arrays; they and everything derived from them (slices, memoryviews, tensors)
    keep the mapping in place.
    """

    def __init__(self, address: int, total_bytes: int, *, writable: bool) -> None:
        self.total_bytes = total_bytes
        self.writable = writable
        self._mapping = _Mapping(address, total_bytes)
        exporter = _Exporter(address, total_bytes, writable)
        self._finalizer = weakref.finalize(exporter, self._mapping.unmap)
        # At interpreter exit other threads may still copy; the kernel unmaps in its own time.
        self._finalizer.atexit = False
        self._root: NDArray[np.uint8] | None = np.asarray(exporter)

    @property
    def address(self) -> int:
        """Where the mapping starts, for registering it with a device. Valid until `close`."""
        return self._mapping.address

    @property
    def u8(self) -> NDArray[np.uint8]:
        """All bytes, uint8 [total_bytes]; not writeable if the region was mapped for reading.

        Raises ValueError once closed, and in a forked child if the mapping was not inherited.
        """
        if self._root is None:
            raise ValueError("the region is closed")
        if not self._mapping.here:
            raise ValueError("the region is not mapped in a forked child; map it again")
        return self._root

    def generations(self, slots: int) -> NDArray[np.uint64]:
        """The slots' generations, uint64 [slots]."""
        return self.u8[: slots * GENERATION_BYTES].view(np.uint64)

    def slots2d(self, data_offset: int, slot_bytes: int, slots: int) -> NDArray[np.uint8]:
        """The slots, uint8 [slots, slot_bytes], C-contiguous. ValueError if they do not fit."""
        end = data_offset + slot_bytes * slots
        if data_offset < 0 or slot_bytes <= 0 or slots < 0 or end > self.total_bytes:
            raise ValueError(
                f"{slots} slots of {slot_bytes} bytes at {data_offset} do not fit in a region of "
                f"{self.total_bytes} bytes"
            )
        return self.u8[data_offset:end].reshape(slots, slot_bytes)

    def close(self) -> bool:
        """Gives up this object's hold; idempotent. True if the bytes are unmapped.

        False if views still live: no new ones are given, and the last one to go unmaps. Ask again.
        """
        self._root = None
        return not self._finalizer.alive

    def withdraw(self) -> None:
        """Closes, and lets go of the shared bytes although views still live: from now on they show
        zeros of this process alone, and what is written through them goes there.

        OSError (ENOMEM) if there is no room for it.
        """
        self._root = None
        held = self._finalizer.peek()  # while it is held nobody unmaps
        mapping = self._mapping
        if held is None or not mapping.here:
            return
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        address = _mmap(mapping.address, mapping.length, protection, flags, -1, 0)
        if address != mapping.address:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {mapping.length} bytes: {os.strerror(number)}")
        if mapping.only_in_pid:
            _advise(mapping.address, mapping.length, mmap.MADV_DONTFORK)

    def trim(self, total_bytes: int) -> None:
        """Makes the region end at `total_bytes`: its maker has cut the file there."""
        if not 0 < total_bytes <= self.total_bytes:
            raise ValueError(f"cannot trim {self.total_bytes} bytes to {total_bytes}")
        # What is mapped beyond the end is out of reach from now on, and goes with the rest.
        self._root = self.u8[:total_bytes]
        self.total_bytes = total_bytes


def map_region(
    fd: int, total_bytes: int, *, writable: bool, populate: bool, require: Seal = NO_SEALS
) -> MappedRegion:
    """Maps the first `total_bytes` of `fd`, shared. `fd` may be closed afterwards.

    `populate` faults all pages in at once (0.04-0.1 s a GiB for resident memory). `require` names
    seals that must be there: with Seal.SHRINK nobody can make a later access fault. Raises
    ValueError if the file is shorter or lacks a seal, OSError (EPERM) for a writable map of a
    sealed region.
    """
    size = os.fstat(fd).st_size
    if total_bytes <= 0 or size < total_bytes:
        raise ValueError(f"cannot map {total_bytes} bytes of a file of {size} bytes")
    if require and (missing := require & ~seals_of(fd)):
        raise ValueError(f"the descriptor lacks the seals {missing!r}")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = _map_aligned(fd, total_bytes, protection, flags)
    region = MappedRegion(address, total_bytes, writable=writable)
    # KV bytes can be inverted to text: they have no place in a core file.
    _advise(address, total_bytes, mmap.MADV_DONTDUMP)
    return region


def _map_aligned(fd: int, total_bytes: int, protection: int, flags: int) -> int:
    """The address, at which a huge page may begin if there can be any: the kernel aligns by itself
    in some versions and settings only.
    """
    if total_bytes < HUGE_PAGE_BYTES:
        return _mapped(None, total_bytes, protection, flags, fd)
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    length = -(-total_bytes // PAGE_BYTES) * PAGE_BYTES
    reserved = _mapped(None, length + HUGE_PAGE_BYTES, 0, nothing, -1)
    aligned = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _mapped(aligned, total_bytes, protection, flags | _MAP_FIXED, fd)
    except OSError:
        _munmap(reserved, length + HUGE_PAGE_BYTES)
        raise
    if before := aligned - reserved:
        _check(_munmap(reserved, before), "munmap")
    if after := HUGE_PAGE_BYTES - before:
        _check(_munmap(aligned + length, after), "munmap")
    return aligned


def _mapped(at: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    address = _mmap(at, length, protection, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {length} bytes: {os.strerror(number)}")
    return int(address)


def dontfork(region: MappedRegion) -> None:
    """Keeps the mapping out of forked children: they neither hold its memory nor can touch it."""
    mapping = region._mapping
    _advise(mapping.address, mapping.length, mmap.MADV_DONTFORK)
    mapping.only_in_pid = os.getpid()


def prefault(
    region: MappedRegion,
    start: int,
    length: int,
    *,
    write: bool,
    advise: Callable[[int, int, int], None] = _advise,
) -> bool:
    """Faults in the pages of [start, start + length); contents stay. Releases the interpreter lock.

    `write` makes them writable at once (else the first write of each page faults once more,
    cheaply). True if the kernel did it in one call (Linux 5.14), False if the pages were touched
    one by one.
    """
    view = region.u8
    end = min(start + length, region.total_bytes)
    start -= start % PAGE_BYTES
    if start < 0 or end <= start:
        return True
    try:
        advise(
            region.address + start,
            end - start,
            _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ,
        )
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Reading allocates a memfd's page too, and unlike a write it is safe beside other writers.
        view[start:end:PAGE_BYTES].max()
        return False
    return True


def join(
    region: MappedRegion,
    start: int,
    length: int,
    *,
    advise: Callable[[int, int, int], None] = _advise,
) -> tuple[int, str]:
    """Puts what lies in [start, start + length), and is faulted in, into huge pages, as far as
    whole ones of the region do that no device is at: (bytes that are in some, why there are no
    more to be had). Contents stay, also while others read and write. Linux 6.1, whatever the
    system does by itself; releases the interpreter lock.

    Single pages come from all over the memory: a device took 2.2 times as long to read into them.
    """
    end = min(start + length, region.total_bytes)
    joined = 0
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    for at in range(first, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        try:
            advise(region.address + at, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
            joined += HUGE_PAGE_BYTES
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY):  # else a device is at it just now
                return joined, str(error)
    return joined, ""


def lock(region: MappedRegion) -> tuple[bool, str]:
    """Keeps the region's pages from being swapped out: (done, why not)."""
    if _mlock(region.address, region.total_bytes) == 0:
        return True, ""
    number = ctypes.get_errno()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    return False, f"mlock: {os.strerror(number)} (RLIMIT_MEMLOCK is {allowed})"


# ---------------------------------------------------------------- making regions


class SharedRegion:
    """The maker's side of a region: a descriptor that may write, and a mapping that may write."""

    def __init__(self, fd: int, mapped: MappedRegion) -> None:
        self.fd = fd
        self.map = mapped

    @property
    def total_bytes(self) -> int:
        return self.map.total_bytes

    def shrink(self, total_bytes: int) -> None:
        """Gives the bytes beyond `total_bytes` back. Before sealing, and before the first view."""
        if total_bytes != self.total_bytes:
            self.map.trim(total_bytes)
            os.ftruncate(self.fd, total_bytes)

    def seal(self, seals: Seal) -> None:
        """Adds seals, for good. This object's mapping, made before, goes on writing."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, int(seals))
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise OSError(errno.EINVAL, f"{seals!r} needs Linux 5.1 or newer") from error
            raise

    def close(self) -> bool:
        """Closes descriptor and mapping; idempotent. True if unmapped: see MappedRegion.close."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        return self.map.close()


def create_region(total_bytes: int, name: str) -> SharedRegion:
    """A new region of zeros, mapped for writing, not yet sealed and not yet faulted in.

    `name` shows in /proc/PID/maps. OSError (ENOMEM, EMFILE) if there is none to be had.
    """
    fd = _memfd(name)
    try:
        os.ftruncate(fd, total_bytes)
        return SharedRegion(fd, map_region(fd, total_bytes, writable=True, populate=False))
    except BaseException:
        os.close(fd)
        raise


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Where sysctl vm.memfd_noexec is 2, memfds that might be executed are refused.
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def seals_of(fd: int) -> Seal:
    """The seals of a memfd; none for a descriptor that is no memfd."""
    try:
        return Seal(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & 0x1F)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return NO_SEALS


def open_readonly_fd(fd: int) -> int:
    """A second descriptor of the same memory that cannot write, with a file position of its own."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


# ---------------------------------------------------------------- hand-over


def send_frame(sock: socket.socket, payload: bytes, fd: int | None = None) -> None:
    """Sends one frame (u32 little-endian length, payload), with `fd` on its first byte. Blocking.

    After an exception (timeout included) the stream may hold half a frame: close it.
    """
    if len(payload) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(payload)} bytes is over {FRAME_BYTES_MAX}")
    data = memoryview(_FRAME.pack(len(payload)) + payload)
    if fd is not None:
        data = data[socket.send_fds(sock, [data], [fd]) :]
    if data:  # sendall of nothing is a call too, and fails if the peer has answered and hung up
        sock.sendall(data)


def recv_frame(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receives one frame and the descriptors that came with it, which the caller then owns.
    Blocking.

    ConnectionError when the peer hung up or broke the framing; TimeoutError by the socket's
    timeout. After either the stream may be inside a frame: close it. No descriptor is leaked.
    """
    fds: list[int] = []
    try:
        (length,) = _FRAME.unpack(_recv_exactly(sock, _FRAME.size, fds))
        if length > FRAME_BYTES_MAX:
            raise ConnectionError(f"the peer announced a frame of {length} bytes")
        return _recv_exactly(sock, length, fds), fds
    except BaseException:
        close_fds(fds)
        raise


def close_fds(fds: list[int]) -> None:
    """Closes received descriptors that nobody wants."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()


def _recv_exactly(sock: socket.socket, length: int, fds: list[int]) -> bytes:
    # Never more than asked for: descriptors then belong to the frame that is being read.
    data = bytearray()
    while len(data) < length:
        # Not socket.recv_fds: before Python 3.14 it ignores flags, and children would inherit.
        piece, ancillary, flags, _ = sock.recvmsg(
            length - len(data), socket.CMSG_LEN(FDS_PER_FRAME_MAX * _INT_BYTES), _CLOEXEC
        )
        for level, kind, numbers in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(memoryview(numbers[: len(numbers) & -_INT_BYTES]).cast("i"))
        if not piece:
            raise ConnectionError("the peer hung up")
        if flags & socket.MSG_CTRUNC or len(fds) > FDS_PER_FRAME_MAX:
            raise ConnectionError("the peer sent more descriptors than a frame may carry")
        data += piece
    return bytes(data)
