"""What the device gives without us: O_DIRECT transfers of whole records by a few threads, with
nothing in between but Python's `preadv` and `pwritev`.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.files import SystemCalls
from tests.bench.harness import timed

THREADS = 4

Bytes = NDArray[np.uint8]


class Piece(NamedTuple):
    """A record: where it begins in which file."""

    fd: int
    offset: int


class Direct:
    """Threads and page-aligned buffers that live as long as the comparison.

    bypassed: whether the page cache is out of play; else its pages are dropped after use. about:
    the same in words.
    """

    def __init__(self, folder: Path, record_bytes: int, records: int) -> None:
        """folder: on the device that is measured. records: most in one transfer."""
        self.record_bytes = record_bytes
        self.memory = np.frombuffer(mmap.mmap(-1, records * record_bytes), np.uint8)
        self.memory[:] = np.random.default_rng(5).integers(0, 256, len(self.memory), np.uint8)
        self._folder = folder
        self._pool = ThreadPoolExecutor(THREADS, "direct")
        self._flags = os.O_DIRECT
        self.bypassed = self._try()
        self.about = "page cache bypassed"
        if not self._flags:
            self.about = "direct I/O is refused here: page cache in between, dropped after use"
        elif not self.bypassed:
            self.about = "direct I/O goes through the page cache here, dropped after use"

    def close(self) -> None:
        self._pool.shutdown()

    # ------------------------------------------------------------------ files

    def open(self, path: Path, access: int = os.O_RDONLY) -> int:
        """A descriptor past the page cache, where the file system grants that."""
        return os.open(path, access | os.O_CLOEXEC | self._flags, 0o600)

    def allocate(self, path: Path, records: int) -> int:
        """A descriptor of a new file: preallocated, never written, synced."""
        fd = self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        SystemCalls().fallocate(fd, records * self.record_bytes)
        os.fsync(fd)
        return fd

    def _try(self) -> bool:
        """Whether what is read does not stay in the page cache. Some file systems refuse direct
        I/O, others take it and go their usual way.
        """
        path = self._folder / "direct-probe"
        fds = []
        try:
            try:
                fds.append(self.open(path, os.O_RDWR | os.O_CREAT))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._flags = 0
                return False
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            self._whole(os.pwritev(fds[0], [self._buffer(0)], 0))
            os.fsync(fds[0])
            os.posix_fadvise(fds[1], 0, 0, os.POSIX_FADV_DONTNEED)
            self._whole(os.preadv(fds[0], [self._buffer(0)], 0))
            return not _is_cached(fds[1])
        finally:
            for fd in fds:
                os.close(fd)
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ transfers

    def read(self, pieces: Sequence[Piece]) -> float:
        """Seconds to read records into the buffers, all threads taking the next one."""

        def one(number: int, piece: Piece) -> None:
            self._whole(os.preadv(piece.fd, [self._buffer(number)], piece.offset))
            self._drop(piece.fd, piece.offset)

        return timed(lambda: self._each(pieces, one))

    def write(self, fd: int, first: int, records: int) -> float:
        """Seconds to write records from number `first` of the file on, and to sync them once."""
        pieces = [Piece(fd, (first + at) * self.record_bytes) for at in range(records)]

        def one(number: int, piece: Piece) -> None:
            self._whole(os.pwritev(piece.fd, [self._buffer(number)], piece.offset))

        def run() -> None:
            self._each(pieces, one)
            os.fdatasync(fd)

        return timed(run)

    def _each(self, pieces: Sequence[Piece], one: Callable[[int, Piece], None]) -> None:
        left, guard = iter(enumerate(pieces)), threading.Lock()

        def work() -> None:
            while (item := _next(left, guard)) is not None:
                one(*item)

        for future in [self._pool.submit(work) for _ in range(THREADS)]:
            future.result()

    def _buffer(self, number: int) -> memoryview:
        start = number * self.record_bytes
        return self.memory[start : start + self.record_bytes].data

    def _whole(self, moved: int) -> None:
        if moved != self.record_bytes:
            raise OSError(errno.EIO, f"{moved} of {self.record_bytes} bytes were moved")

    def _drop(self, fd: int, offset: int) -> None:
        if not self.bypassed:
            os.posix_fadvise(fd, offset, self.record_bytes, os.POSIX_FADV_DONTNEED)


def _next(left: Iterator[tuple[int, Piece]], guard: threading.Lock) -> tuple[int, Piece] | None:
    with guard:
        return next(left, None)


def _is_cached(fd: int) -> bool:
    """Whether a page of the file, opened without O_DIRECT, is in the page cache."""
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return True  # it cannot be asked: a file system in memory, as a rule
