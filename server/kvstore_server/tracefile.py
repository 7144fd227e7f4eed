"""Appends every request's record to a file (`trace.file`), one JSON object a line.

A file that was moved away (log rotation) is made anew. It holds no token and no whole key. See
`linefile` for what is promised of the writing.
"""

from __future__ import annotations

from kvstore.clock import Clock
from kvstore.model.reasons import Reason, StartError
from kvstore.model.record import Record
from kvstore_server.linefile import LineWriter, OneFile

SETTING = "trace.file"


class TraceFile:
    """`dropped` counts records that were not written."""

    def __init__(self, path: str, clock: Clock) -> None:
        """Raises StartError, naming `trace.file`, if the file cannot be opened."""
        try:
            file = OneFile(path)
        except OSError as error:
            detail = f"cannot append to {path}: {error.strerror}"
            raise StartError(Reason.START_SETTINGS, detail, SETTING) from None
        self._writer = LineWriter[Record](SETTING, file, Record.to_json_line, clock)

    @property
    def dropped(self) -> int:
        return self._writer.dropped

    def append(self, record: Record) -> None:
        """Queues a record. Never blocks."""
        self._writer.append(record, record.size_bytes)

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        self._writer.close()
