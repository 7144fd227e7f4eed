"""Appends every request's record to a file, one JSON object a line, from a thread of its own.

The event loop never waits for the file: what the thread cannot keep up with is dropped and counted.
A file that was moved away (log rotation) is made anew. The file is the owner's alone; it holds no
token and no whole key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading

from kvstore.clock import Clock
from kvstore.model.reasons import Reason, StartError
from kvstore.model.record import Record, Ring
from kvstore_server.logs import Throttled

log = logging.getLogger(__name__)

QUEUED_MAX = 8192
BATCH_MAX = 512


class TraceFile:
    """One writer thread. `dropped` counts records that were not written."""

    def __init__(self, path: str, clock: Clock) -> None:
        """Raises StartError, naming `trace.file`, if the file cannot be opened."""
        self.dropped = 0
        self._path = path
        self._warn = Throttled(log, clock)
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUED_MAX)
        try:
            self._fd = self._open()
        except OSError as error:
            detail = f"cannot append to {path}: {error.strerror}"
            raise StartError(Reason.START_SETTINGS, detail, "trace.file") from None
        self._thread = threading.Thread(target=self._run, name="kvstore-trace", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> None:
        """Queues a record. Never blocks."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._fd)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._path, flags, 0o600)

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < BATCH_MAX and batch[-1] is not None:
                    batch.append(self._queue.get_nowait())
            self._write([record for record in batch if record is not None])
            if batch[-1] is None:
                return

    def _write(self, records: list[Record]) -> None:
        lines = "".join(f"{record.to_json_line()}\n" for record in records)
        try:
            self._follow_rotation()
            rest = memoryview(lines.encode())
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.dropped += len(records)
            self._warn.warning("trace", "trace.file: records are lost", error=error.strerror)

    def _follow_rotation(self) -> None:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        ours = os.fstat(self._fd)
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            fresh = self._open()
            os.close(self._fd)
            self._fd = fresh


class TracingRing(Ring):
    """A ring whose records also go to a file."""

    __slots__ = ("_file",)

    def __init__(self, records_max: int, file: TraceFile) -> None:
        super().__init__(records_max)
        self._file = file

    def append(self, record: Record) -> None:
        super().append(record)
        self._file.append(record)
