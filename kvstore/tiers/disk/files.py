"""Segment files: made whole before they are used, read and written in whole pages, never mapped.

Promises. A segment that `create` returned is allocated and its name is durable. A transfer is
complete, or raises: short ones are continued, a file that ends too early is `Truncated`. What
`fdatasync` returned for is on the device. Device errors stay OSError with their number; `classify`
says what they mean for the tier. Bytes go past the page cache, whose copy would be a second one of
what the host tier holds; where the file system refuses that, through it, and `mode` says why. Every
call releases the interpreter lock while it waits, and only waits for the device outside the lock
that guards the open files.

Any thread may call anything; calls on one slot at the same time are the caller's to order.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from kvstore.model.values import PAGE_BYTES
from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.folder import segment_name, segment_of
from kvstore.tiers.disk.format import Fault, Finding
from kvstore.tiers.disk.pages import aligned_bytes, check_size, check_transfer, transfer

FILES_OPEN_MAX = 128
"""Descriptors that stay open. More only while more segments are in use or not yet synced."""
FULL_BYTES = 1 << 20
"""A file system with less left is full, whatever the error says: LMDB answers EIO."""

_ZEROS_BYTES = 1 << 20
_Move: TypeAlias = "Callable[[int, Sequence[Bytes], int], int]"


class FileSystem(NamedTuple):
    """What a file system has. free_bytes: for users without privilege."""

    total_bytes: int
    free_bytes: int
    read_only: bool


class SegmentFile(NamedTuple):
    """A file that is there. allocated_bytes: on the device; less than its size if it has holes."""

    size_bytes: int
    allocated_bytes: int


class IoMode(NamedTuple):
    """How bytes get to the device. reasons: why not direct, why not preallocated; one each."""

    direct: bool
    preallocated: bool
    reasons: tuple[str, ...] = ()


class Truncated(Exception):
    """The file ends before the bytes that were asked for. Not an OSError: the device is fine."""

    def __init__(self, segment_id: int, offset: int, wanted: int, got: int) -> None:
        self.fault = Fault(
            Finding.TRUNCATED,
            detail=f"{got} of {wanted} bytes at {offset} of {segment_name(segment_id)}",
        )
        super().__init__(self.fault.text)


class Trouble(enum.Enum):
    """What an OSError means for the tier.

    FULL: no room, evict and try again. READ_ONLY: reads go on. IO: the device failed. GONE: the
    folder, file or device is not there. OTHER: of the process, as too many open files.
    """

    FULL = "full"
    READ_ONLY = "read-only"
    IO = "input/output error"
    GONE = "gone"
    OTHER = "other"


_TROUBLES = {
    Trouble.FULL: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    Trouble.READ_ONLY: (errno.EROFS, errno.EACCES, errno.EPERM),
    Trouble.GONE: (
        errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN,
        errno.ESHUTDOWN,
    ),
    # ENODATA: a medium error of a disk. EUCLEAN, EBADMSG: damage that the file system found.
    Trouble.IO: (
        errno.EIO, errno.EREMOTEIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.ETIMEDOUT,
        errno.EILSEQ, errno.EPROTO, errno.ENOLINK,
    ),
}  # fmt: skip
_TROUBLE_OF = {number: trouble for trouble, numbers in _TROUBLES.items() for number in numbers}


def classify(error: OSError, file_system: FileSystem | None) -> Trouble:
    """What `error` means. `file_system`: as it is now; None if it cannot be asked, or for the error
    of a read, which no lack of room explains.
    """
    if error.errno == errno.EIO and file_system is not None:
        if file_system.read_only:
            return Trouble.READ_ONLY
        if file_system.free_bytes < FULL_BYTES:
            return Trouble.FULL
    return _TROUBLE_OF.get(error.errno or 0, Trouble.OTHER)


class Files(Protocol):
    """Segment files of one folder. Offsets, sizes and buffers are whole pages (4096 bytes).

    Buffers are uint8 arrays that begin at a page. OSError by the device; ValueError for what is not
    aligned, a defect of the caller.
    """

    @property
    def mode(self) -> IoMode:
        """How bytes get to the device, as far as is known now."""
        ...

    def create(self, segment_id: int, size_bytes: int) -> None:
        """Makes a file of zeros, allocated, and its name durable. OSError: it is not there."""
        ...

    def preadv(self, segment_id: int, offset: int, buffers: Sequence[Bytes]) -> None:
        """Fills the buffers. Truncated if the file ends before."""
        ...

    def pwritev(self, segment_id: int, offset: int, buffers: Sequence[Bytes]) -> None:
        """Writes the buffers. After an error any part of them may have been written."""
        ...

    def fdatasync(self, segment_id: int) -> None:
        """Waits until what was written is durable. After an error treat all of it as lost."""
        ...

    def unlink(self, segment_id: int) -> None:
        """Removes the file, durably. Reads that run end as if it were there."""
        ...

    def list(self) -> dict[int, SegmentFile]:
        """The segments that are there, by id."""
        ...

    def statvfs(self) -> FileSystem: ...

    def close(self) -> None:
        """Closes descriptors. Idempotent; calls after it raise OSError (EBADF)."""
        ...


# ---------------------------------------------------------------- system calls


def _bind_fallocate() -> Callable[[int, int], None]:
    # Python has posix_fallocate only, which glibc imitates by a write a block where the file
    # system cannot: slow, and it tells nobody.
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)

    def fallocate(fd: int, size_bytes: int) -> None:
        while call(fd, 0, 0, size_bytes) != 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    return fallocate


@dataclass(frozen=True)
class SystemCalls:
    """What `SegmentFiles` asks of the system. Tests pass others that fail or come up short."""

    open: Callable[[str, int, int], int] = os.open
    fallocate: Callable[[int, int], None] = _bind_fallocate()  # noqa: RUF009 (bound once)
    preadv: _Move = os.preadv  # type: ignore[assignment]
    pwritev: _Move = os.pwritev  # type: ignore[assignment]
    fsync: Callable[[int], None] = os.fsync
    fdatasync: Callable[[int], None] = os.fdatasync


# ---------------------------------------------------------------- real files


class _Handle:
    """An open file. dirty: written since it was synced, so closing it could lose an error."""

    __slots__ = ("direct", "dirty", "doomed", "fd", "users", "writable")

    def __init__(self, fd: int, *, direct: bool, writable: bool) -> None:
        self.fd = fd
        self.direct = direct
        self.writable = writable
        self.users = 1
        self.dirty = False
        self.doomed = False


_Handles: TypeAlias = "list[_Handle]"  # `list` is a method below


class SegmentFiles:
    """See the module's docstring. Implements Files on a folder that is there; makes none."""

    def __init__(
        self,
        folder: str,
        *,
        calls: SystemCalls = SystemCalls(),
        files_open_max: int = FILES_OPEN_MAX,
    ) -> None:
        self._folder = folder
        self._calls = calls
        self._files_open_max = files_open_max
        self._guard = threading.Lock()
        self._handles: OrderedDict[int, _Handle] = OrderedDict()
        self._no_direct = ""
        self._no_fallocate = ""
        self._closed = False

    @property
    def mode(self) -> IoMode:
        reasons = tuple(filter(None, (self._no_direct, self._no_fallocate)))
        return IoMode(not self._no_direct, not self._no_fallocate, reasons)

    def create(self, segment_id: int, size_bytes: int) -> None:
        check_size(size_bytes)
        path = self._path(segment_id)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self._calls.open(path, flags, 0o600)
        whole = False
        try:
            self._allocate(fd, size_bytes)
            self._calls.fsync(fd)
            self._drop_cache(fd, 0, 0)
            self._sync_folder()
            whole = True
        finally:
            os.close(fd)
            if not whole:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def preadv(self, segment_id: int, offset: int, buffers: Sequence[Bytes]) -> None:
        wanted = check_transfer(offset, buffers)
        done = self._transfer(self._calls.preadv, segment_id, offset, buffers, write=False)
        if done < wanted:
            raise Truncated(segment_id, offset, wanted, done)

    def pwritev(self, segment_id: int, offset: int, buffers: Sequence[Bytes]) -> None:
        wanted = check_transfer(offset, buffers)
        done = self._transfer(self._calls.pwritev, segment_id, offset, buffers, write=True)
        if done < wanted:
            detail = f"short write: {done} of {wanted} bytes"
            raise OSError(errno.EIO, detail, self._path(segment_id))

    def fdatasync(self, segment_id: int) -> None:
        handle = self._enter(segment_id)
        try:
            # Before the call: what is written while it runs may not be covered by it.
            handle.dirty = False
            self._calls.fdatasync(handle.fd)
            # A removed file takes writes without complaint until its last descriptor closes.
            if os.fstat(handle.fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed", self._path(segment_id))
            if not handle.direct:
                self._drop_cache(handle.fd, 0, 0)
        finally:
            self._leave(handle)

    def unlink(self, segment_id: int) -> None:
        with self._guard:
            handle = self._handles.pop(segment_id, None)
            idle = handle is not None and self._doom(handle)
        if handle is not None and idle:
            os.close(handle.fd)
        os.unlink(self._path(segment_id))
        self._sync_folder()

    def list(self) -> dict[int, SegmentFile]:
        found: dict[int, SegmentFile] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                segment_id = segment_of(entry.name)
                if segment_id is not None and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found[segment_id] = SegmentFile(stat.st_size, stat.st_blocks * 512)
        return found

    def statvfs(self) -> FileSystem:
        stat = os.statvfs(self._folder)
        return FileSystem(
            total_bytes=stat.f_blocks * stat.f_frsize,
            free_bytes=stat.f_bavail * stat.f_frsize,
            read_only=bool(stat.f_flag & os.ST_RDONLY),
        )

    def close(self) -> None:
        with self._guard:
            self._closed = True
            handles = list(self._handles.values())
            self._handles.clear()
            idle = [handle for handle in handles if self._doom(handle)]
        for handle in idle:
            os.close(handle.fd)

    # ------------------------------------------------------------------ parts

    def _path(self, segment_id: int) -> str:
        return os.path.join(self._folder, segment_name(segment_id))

    def _sync_folder(self) -> None:
        fd = self._calls.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
        try:
            self._calls.fsync(fd)
        finally:
            os.close(fd)

    def _allocate(self, fd: int, size_bytes: int) -> None:
        if not self._no_fallocate:
            try:
                self._calls.fallocate(fd, size_bytes)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                self._no_fallocate = "the file system cannot preallocate: zeros are written"
        zeros = aligned_bytes(_ZEROS_BYTES)
        for offset in range(0, size_bytes, _ZEROS_BYTES):
            chunk = zeros[: size_bytes - offset]
            if self._move(self._calls.pwritev, fd, offset, [chunk]) < len(chunk):
                raise OSError(errno.EIO, "short write of zeros")

    def _transfer(
        self,
        call: _Move,
        segment_id: int,
        offset: int,
        buffers: Sequence[Bytes],
        *,
        write: bool,
    ) -> int:
        while True:
            handle = self._enter(segment_id, write)
            try:
                done = self._move(call, handle.fd, offset, buffers)
                if not handle.direct and not write:
                    self._drop_cache(handle.fd, offset, done)
                return done
            except OSError as error:
                # Offsets and buffers are whole pages, so it is the alignment that it refuses.
                if error.errno != errno.EINVAL or not handle.direct:
                    raise
                self._no_direct = f"direct I/O of {PAGE_BYTES}-byte pages is refused"
            finally:
                handle.dirty |= write
                self._leave(handle)

    def _move(
        self,
        call: _Move,
        fd: int,
        offset: int,
        buffers: Sequence[Bytes],
    ) -> int:
        return transfer(lambda rest, done: call(fd, rest, offset + done), buffers)

    def _drop_cache(self, fd: int, offset: int, length: int) -> None:
        with contextlib.suppress(OSError):  # advice
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    # ------------------------------------------------------------------ open files

    def _enter(self, segment_id: int, write: bool = False) -> _Handle:
        """An open file that stays open until `_leave`."""
        return self._opened(segment_id, write) or self._add(segment_id, write)

    def _opened(self, segment_id: int, write: bool) -> _Handle | None:
        with self._guard:
            if self._closed:
                raise OSError(errno.EBADF, "the files are closed", self._folder)
            handle = self._handles.get(segment_id)
            if handle is None or not self._serves(handle, write):
                return None
            handle.users += 1
            self._handles.move_to_end(segment_id)
            return handle

    def _serves(self, handle: _Handle, write: bool) -> bool:
        return handle.direct == (not self._no_direct) and (handle.writable or not write)

    def _add(self, segment_id: int, write: bool) -> _Handle:
        made = self._open(segment_id, write)
        idle: _Handles = []
        with self._guard:
            other = self._handles.get(segment_id)
            if self._closed or (other is not None and self._serves(other, write)):
                made.doomed = True  # another thread was faster: ours serves this one call
            else:
                if other is not None and self._doom(other):
                    idle.append(other)
                self._handles[segment_id] = made
                self._handles.move_to_end(segment_id)
                idle += self._surplus()
        for old in idle:
            os.close(old.fd)
        return made

    def _open(self, segment_id: int, write: bool) -> _Handle:
        try:
            return self._open_as(segment_id, os.O_RDWR)
        except OSError as error:
            if write or _TROUBLE_OF.get(error.errno or 0) is not Trouble.READ_ONLY:
                raise
            return self._open_as(segment_id, os.O_RDONLY)

    def _open_as(self, segment_id: int, access: int) -> _Handle:
        path = self._path(segment_id)
        writable = access == os.O_RDWR
        flags = access | os.O_NOFOLLOW | os.O_CLOEXEC
        if not self._no_direct:
            try:
                fd = self._calls.open(path, flags | os.O_DIRECT, 0)
                return _Handle(fd, direct=True, writable=writable)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._no_direct = "the file system refuses direct I/O: the page cache is in between"
        return _Handle(self._calls.open(path, flags, 0), direct=False, writable=writable)

    def _surplus(self) -> _Handles:
        """Takes out what is open beyond the limit, longest unused first. The guard is held."""
        surplus: _Handles = []
        over = len(self._handles) - self._files_open_max
        for segment_id, handle in list(self._handles.items()) if over > 0 else ():
            if len(surplus) < over and not handle.users and not handle.dirty:
                del self._handles[segment_id]
                surplus.append(handle)
        return surplus

    def _doom(self, handle: _Handle) -> bool:
        """Marks a file that is no longer ours to reuse; True: close it now. The guard is held."""
        handle.doomed = True
        return handle.users == 0

    def _leave(self, handle: _Handle) -> None:
        with self._guard:
            handle.users -= 1
            last = handle.doomed and handle.users == 0
        if last:
            os.close(handle.fd)
