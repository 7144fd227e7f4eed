"""The daemon's own access log (`record.path`): a folder of files in the block traces' format.

    access-00000001.jsonl ...   one line a prompt, the oldest file first; `kvstore simulate FOLDER`
    salt                        what block ids and tenants are hashed with; not for others

A start begins a new file, and so does every eighth of `record.capacity_bytes`; the oldest files go,
so that all of them together never have more. A folder or file that was taken away is made anew.
What lines say is decided in `kvstore.model.accesses`, what the writing promises in `linefile`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence

from kvstore import folders
from kvstore.clock import Clock
from kvstore.model.accesses import GETS, PUTS, SALT_BYTES, Prompts, Space, line
from kvstore.model.reasons import Reason, StartError
from kvstore.model.record import Record
from kvstore_server.linefile import (
    LineCounts,
    LineWriter,
    Write,
    append_whole,
    is_at,
    open_to_append,
)

SETTING = "record.path"
FILES = 8
"""Into so many files the log is cut, so that making room costs no more than an eighth of it."""
NAME = re.compile(r"access-(\d{8,})\.jsonl")
SALT = "salt"


class LogFolder:
    """Whole lines in files of one folder, at most `capacity_bytes` of them."""

    def __init__(self, path: str, capacity_bytes: int, write: Write = os.write) -> None:
        """OSError, folders.NotOurs."""
        self._path = folders.prepare(path)
        self._capacity_bytes = capacity_bytes
        self._rotate_bytes = capacity_bytes // FILES
        self._system_write = write
        self._fd = -1
        self._name = ""
        self._size = 0
        self._number = max(self._files(), default=0)
        self.bytes = self._total()

    def salt(self) -> bytes:
        """The folder's salt, made at first use. OSError."""
        path = os.path.join(self._path, SALT)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            salt = os.read(fd, SALT_BYTES)
            if len(salt) != SALT_BYTES:
                salt = secrets.token_bytes(SALT_BYTES)
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                append_whole(fd, salt, self._system_write)
            return salt
        finally:
            os.close(fd)

    def write(self, lines: Sequence[bytes]) -> int:
        """See `linefile.Lines`. A line of more bytes than a file may have gets one of its own; one
        of more than all files may have is left out.
        """
        written = 0
        try:
            if self._fd >= 0 and not is_at(self._fd, os.path.join(self._path, self._name)):
                self._close()
            for batch in self._batches(lines):
                self._append(batch)
                written += len(batch)
        except OSError:
            self._close()  # whatever is wrong with the file, the next lines try another
            if not written:
                raise
        return written

    def _batches(self, lines: Sequence[bytes]) -> Iterator[list[bytes]]:
        """Lines that go into one file; where that is full, the next one is for those after them."""
        batch: list[bytes] = []
        size = 0
        for one in lines:
            if len(one) > self._capacity_bytes:
                continue
            if self._size + size and self._size + size + len(one) > self._rotate_bytes:
                if batch:
                    yield batch
                self._close()
                batch, size = [], 0
            batch.append(one)
            size += len(one)
        if batch:
            yield batch

    def close(self) -> None:
        self._close()

    def _append(self, batch: Sequence[bytes]) -> None:
        data = b"".join(batch)
        self._make_room(len(data))
        if self._fd < 0:
            self._open()
        append_whole(self._fd, data, self._system_write)
        self._size += len(data)
        self.bytes = self._total()

    def _open(self) -> None:
        folders.prepare(self._path)
        self._number += 1
        self._name = f"access-{self._number:08}.jsonl"
        self._fd = open_to_append(os.path.join(self._path, self._name))
        self._size = os.fstat(self._fd).st_size

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd, self._size = self._fd, -1, 0
            os.close(fd)

    def _make_room(self, more: int) -> None:
        """Removes the oldest files, never the one that is written to."""
        sizes = {
            name: os.stat(os.path.join(self._path, name)).st_size
            for _, name in sorted(self._files().items())
        }
        total = sum(sizes.values())
        for name, size in sizes.items():
            if total + more <= self._capacity_bytes:
                break
            if self._fd >= 0 and name == self._name:
                continue
            os.unlink(os.path.join(self._path, name))
            total -= size

    def _files(self) -> dict[int, str]:
        """By number; none where there is no folder any more."""
        with contextlib.suppress(FileNotFoundError):
            found = [NAME.fullmatch(name) for name in os.listdir(self._path)]
            return {int(match[1]): match[0] for match in found if match}
        return {}

    def _total(self) -> int:
        total = 0
        for name in self._files().values():
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(self._path, name)).st_size
        return total


class AccessLog:
    """What the ring hands every record to. Only `append` and `counts` are the event loop's."""

    def __init__(
        self,
        path: str,
        capacity_bytes: int,
        space_of: Callable[[int], Space | None],
        clock: Clock,
        write: Write = os.write,
    ) -> None:
        """`space_of`: of a space id; None: there is none any more. Raises StartError, naming
        `record.path`, if the folder cannot be used.
        """
        try:
            self._folder = LogFolder(path, capacity_bytes, write)
            self._salt = self._folder.salt()
        except OSError as error:
            detail = getattr(error, "detail", None) or f"cannot use {path}: {error.strerror}"
            raise StartError(Reason.START_SETTINGS, detail, SETTING) from None
        self._space_of = space_of
        self._prompts = Prompts()
        self._writer = LineWriter[tuple[Record, Space]](SETTING, self._folder, self._line, clock)

    def append(self, record: Record) -> None:
        """Queues a record, if it is one of an access. Never blocks, never fails."""
        if record.keys and (record.verb in GETS or record.verb in PUTS):
            space = self._space_of(record.space_id)
            if space is not None:
                self._writer.append((record, space), record.size_bytes)

    def counts(self) -> LineCounts:
        """Lines that were written and dropped, bytes of all files."""
        return LineCounts(self._writer.written, self._writer.dropped, self._folder.bytes)

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        self._writer.close()

    def _line(self, item: tuple[Record, Space]) -> str | None:
        access = self._prompts.note(*item)
        return None if access is None else line(access, self._salt)
