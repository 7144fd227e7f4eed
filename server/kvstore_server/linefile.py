"""Lines into files from a thread of its own: what the trace and the access log are written with.

The event loop never waits for a file. What the thread cannot keep up with is dropped and counted,
and so is what a full or failing disk does not take; the next lines are tried anew. A file holds
whole lines only: one that was written in part is cut off again. Files are the owner's alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvstore.clock import Clock
from kvstore_server.logs import Throttled

log = logging.getLogger(__name__)

QUEUED_MAX = 8192
QUEUED_BYTES_MAX = 64 << 20
"""Of what is queued: keys of long prompts are kept until their line is made."""
BATCH_MAX = 512

Item = TypeVar("Item")
Write = Callable[[int, memoryview], int]


class Lines(Protocol):
    """Where lines go. Used by the writer's thread alone."""

    def write(self, lines: Sequence[bytes]) -> int:
        """Appends whole lines, in order; how many. Fewer: the others are lost. OSError: all are
        that were not counted by an earlier call.
        """

    def close(self) -> None:
        """Gives the file back."""


class LineCounts(NamedTuple):
    """Since the start. bytes: of the files now, as far as that is known."""

    written: int
    dropped: int
    bytes: int


NOTHING = LineCounts(0, 0, 0)


class LineWriter(Generic[Item]):
    """One writer thread. `encode` makes an item's line in that thread, or None for none. written:
    lines.
    """

    def __init__(
        self, setting: str, lines: Lines, encode: Callable[[Item], str | None], clock: Clock
    ) -> None:
        """`setting`: named in warnings."""
        self.written = 0
        self._setting = setting
        self._lines = lines
        self._encode = encode
        self._warn = Throttled(log, clock)
        self._queue: queue.Queue[tuple[Item, int] | None] = queue.Queue(QUEUED_MAX)
        # Each counted by one thread alone; what lies between them is queued.
        self._given_bytes = 0
        self._taken_bytes = 0
        self._full = 0
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=f"kvstore-{setting}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written: for want of room in the queue, or in the file."""
        return self._full + self._lost

    def append(self, item: Item, size_bytes: int) -> None:
        """Queues an item that takes about so much memory. Never blocks."""
        if self._given_bytes - self._taken_bytes + size_bytes > QUEUED_BYTES_MAX:
            self._full += 1
        else:
            try:
                self._queue.put_nowait((item, size_bytes))
                self._given_bytes += size_bytes
            except queue.Full:
                self._full += 1

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        self._queue.put(None)
        self._thread.join()
        self._lines.close()

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < BATCH_MAX and batch[-1] is not None:
                    batch.append(self._queue.get_nowait())
            lines = []
            for entry in batch:
                if entry is not None:
                    text = self._encode(entry[0])
                    self._taken_bytes += entry[1]
                    if text is not None:
                        lines.append(f"{text}\n".encode())
            self._write(lines)
            if batch[-1] is None:
                return

    def _write(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        written, why = 0, "there is no room for so long a line"
        try:
            written = self._lines.write(lines)
        except OSError as error:
            why = error.strerror or str(error)
        self.written += written
        if written < len(lines):
            self._lost += len(lines) - written
            self._warn.warning("lines", f"{self._setting}: lines are lost", error=why)


def open_to_append(path: str) -> int:
    """A file of the owner's alone; no link is followed. OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def append_whole(fd: int, data: bytes, write: Write = os.write) -> None:
    """Appends all of it or, as far as the file can be cut, nothing. OSError."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[write(fd, rest) :]
    except OSError:
        done = len(data) - len(rest)
        if done:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, os.fstat(fd).st_size - done)
        raise


class OneFile:
    """Appends to one file, which is made anew where it was moved away (log rotation)."""

    def __init__(self, path: str, write: Write = os.write) -> None:
        """OSError."""
        self._path = path
        self._system_write = write
        self._fd = open_to_append(path)

    def write(self, lines: Sequence[bytes]) -> int:
        self._follow_rotation()
        append_whole(self._fd, b"".join(lines), self._system_write)
        return len(lines)

    def close(self) -> None:
        os.close(self._fd)

    def _follow_rotation(self) -> None:
        if not is_at(self._fd, self._path):
            fresh = open_to_append(self._path)
            os.close(self._fd)
            self._fd = fresh


def is_at(fd: int, path: str) -> bool:
    """Whether the open file is the one that lies at `path`."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
