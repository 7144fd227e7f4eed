"""The few rows that outlive the daemon: weight epochs, reviews, spaces.

Promises. What `put_many` wrote is on the device when it returns, all rows of a call or none. A row
is given back exactly as written, or its file is set aside: nothing is guessed from damage. A file
that is removed under the daemon is made anew with all rows. One daemon a folder. A file that cannot
be used is renamed with its reason, never removed, and the ledger starts empty; the caller learns it
from `set_aside`, since without epochs older bytes must not be trusted.

The file is LMDB (synchronous, no WRITEMAP: with it a full disk is SIGBUS), each row with a checksum
of its own, because LMDB has none. Before LMDB follows what stands in the file its order is checked.

`put_many` blocks for some milliseconds: call it from a worker thread. Used by the shell alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import stat
import struct
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import lmdb
import xxhash

from kvstore import folders, lmdbfile
from kvstore.model.reasons import Reason, StartError

log = logging.getLogger(__name__)

Row = tuple[str, bytes, bytes]
Change = tuple[str, bytes, "bytes | None"]

FORMAT = 1
SETTING = "state.path"
FILE = "ledger.mdb"
LOCK_FILE = "ledger.lock"
KEY_BYTES_MAX = 511 - 1
"""Of a row's table and key together: LMDB's limit, less a separator."""

CLOSE_WAIT_S = 2.0

_MAP_BYTES = 16 << 20
_MAP_BYTES_MAX = 1 << 30
_DISK_FULL_BYTES = 1 << 20
_DIGEST_BYTES = 16
_FORMAT_KEY = b"\0format"
_FORMAT_VALUE = struct.Struct("<I")

# What LMDB raises for a file that is damaged or not of its format.
_DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
)


class Ledger(Protocol):
    """Rows (table, key) -> value."""

    @property
    def durable(self) -> bool:
        """Whether rows outlive the process."""
        ...

    @property
    def set_aside(self) -> str:
        """Why an older file was set aside; empty if none was."""
        ...

    @property
    def tended(self) -> bool:
        """Whether `put_many` of nothing, now and then, is of use: it looks whether the file is
        there.
        """
        ...

    def put_many(self, rows: Iterable[Change]) -> None:
        """Writes rows, or deletes those of value None; a later one of the same name wins.

        ValueError if a name is too long or a table's is not plain; OSError if they could not be
        written: then none is, and the next call may succeed.
        """
        ...

    def rows(self) -> list[Row]:
        """All rows, ordered by table and key."""
        ...

    def close(self) -> None:
        """Idempotent. What hangs in the device is left."""
        ...


def open_ledger(folder: str) -> Ledger:
    """The ledger of `folder`, which is made if absent; a volatile one if it is empty.

    StartError: START_LOCKED if another daemon has the folder, START_DISK if it cannot be used.
    """
    return LmdbLedger(folder) if folder else VolatileLedger()


class VolatileLedger:
    """Rows that end with the process."""

    durable = False
    set_aside = ""
    tended = False

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._rows: dict[bytes, bytes] = {}

    def put_many(self, rows: Iterable[Change]) -> None:
        named = [(_name(table, key), value) for table, key, value in rows]
        with self._guard:
            for name, value in named:
                if value is None:
                    self._rows.pop(name, None)
                else:
                    self._rows[name] = bytes(value)

    def rows(self) -> list[Row]:
        with self._guard:
            return [(*_unname(name), value) for name, value in sorted(self._rows.items())]

    def close(self) -> None:
        return None


class LateLedger:
    """Rows in memory until a folder can be used that could not be at the start; then in its file.

    Of the rows that the file has from earlier daemons those stay that nobody has given anew, but
    none of `tables`: what they name was begun anew without them.
    """

    tended = True

    def __init__(self, folder: str, *, tables: Collection[str] = ()) -> None:
        """Makes nothing."""
        self._folder = folder
        self._tables = frozenset(tables)
        self._memory = VolatileLedger()
        self._guard = threading.Lock()
        self._file: LmdbLedger | None = None

    @property
    def durable(self) -> bool:
        return self._file is not None

    @property
    def set_aside(self) -> str:
        return "" if self._file is None else self._file.set_aside

    def put_many(self, rows: Iterable[Change]) -> None:
        with self._guard:
            if self._file is not None:
                self._file.put_many(rows)
                return
            self._memory.put_many(rows)
            try:
                file = LmdbLedger(self._folder)
            except StartError as error:
                raise OSError(errno.EIO, error.detail, self._folder) from error
            try:
                old = [row for row in file.rows() if row[0] in self._tables]
                file.put_many([*((table, key, None) for table, key, _ in old), *self.rows()])
            except BaseException:
                file.close()
                raise
            log.info("the ledger in %s can be used now: rows are durable", self._folder)
            self._file = file

    def rows(self) -> list[Row]:
        return self._memory.rows() if self._file is None else self._file.rows()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Unusable(Exception):
    """The file cannot be used; the argument says why, in words that go into a file name."""


class LmdbLedger:
    """Rows in one LMDB file of a folder that is ours alone."""

    durable = True
    tended = True

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, FILE)
        self._map_bytes = _MAP_BYTES
        self._env: lmdb.Environment | None = None
        self._unsure = True  # a root that was taken back may be on the device still
        self._rows: dict[bytes, bytes] = {}  # as the file has them, or had them
        self._owed = False  # the file has to be given all rows
        self._file: os.stat_result | None = None
        # LMDB's own locking is off: the folder's lock keeps other processes out, this one threads.
        self._guard = threading.Lock()
        self.set_aside = ""
        self._lock_fd = _lock_folder(folder)
        try:
            self._start()
            self._rows = {_name(table, key): value for table, key, value in self.rows()}
        except lmdb.Error as error:
            self.close()
            raise _start_error(f"cannot open {self._path}: {error}") from error
        except OSError as error:
            self.close()
            raise _start_error(f"cannot use {folder}: {error.strerror}") from error

    def put_many(self, rows: Iterable[Change]) -> None:
        changes = [(_name(table, key), value) for table, key, value in rows]
        with self._guard:
            if self._is_gone():
                self._begin_anew()
            if self._owed:
                changes = [*self._rows.items(), *changes]
            while changes:
                try:
                    self._write(changes)
                    self._take_in(changes)
                    return
                except lmdb.MapFullError as error:
                    if self._map_bytes >= _MAP_BYTES_MAX:
                        text = f"the ledger is over {_MAP_BYTES_MAX >> 20} MiB"
                        raise OSError(errno.ENOSPC, text, self._path) from error
                    self._map_bytes *= 2
                    self._open_env().set_mapsize(self._map_bytes)
                except lmdb.Error as error:
                    # A failed write may leave the environment unusable for good: open a new one.
                    self._unsure = True
                    self._close_env()
                    raise self._why(error) from error

    def rows(self) -> list[Row]:
        with self._guard:
            return self._read(self._open_env())

    def close(self) -> None:
        if not self._guard.acquire(timeout=CLOSE_WAIT_S):
            log.warning("the ledger %s is left as it is: its device does not answer", self._path)
            return
        try:
            self._close_env()
            fd, self._lock_fd = self._lock_fd, -1
            if fd >= 0:
                os.close(fd)
        finally:
            self._guard.release()

    # ------------------------------------------------------------------ file

    def _start(self) -> None:
        try:
            self._check()
        except _Unusable as reason:
            self._close_env()
            self._move_aside(str(reason))
            self._check()
        folders.sync(self._folder)
        self._file = os.stat(self._path)

    def _is_gone(self) -> bool:
        """Whether what lies under the file's name is not what was opened. OSError."""
        if self._lock_fd < 0:
            raise OSError(errno.EBADF, "the ledger is closed", self._path)
        return self._file is None or not _is_at(self._path, self._file)

    def _begin_anew(self) -> None:
        """Makes the file anew. OSError; then it is to be made still."""
        log.error("the ledger %s was removed or replaced: it is made anew", self._path)
        self._close_env()
        self._file, self._owed = None, True
        try:
            if not _is_at(os.path.join(self._folder, LOCK_FILE), os.fstat(self._lock_fd)):
                locked = _lock_folder(self._folder)
                os.close(self._lock_fd)
                self._lock_fd = locked
            if os.path.lexists(self._path):
                self._move_aside("replaced")
            self._start()
        except StartError as error:
            raise OSError(errno.EIO, error.detail, self._path) from error
        except lmdb.Error as error:
            self._close_env()
            raise self._why(error) from error

    def _take_in(self, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        self._owed = False
        for name, value in changes:
            if value is None:
                self._rows.pop(name, None)
            else:
                self._rows[name] = bytes(value)

    def _check(self) -> None:
        """Opens the file and reads all of it; raises _Unusable."""
        try:
            self._examine()
            env = self._open_env()
            # Beyond the end of a truncated file LMDB's mapping is SIGBUS.
            needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
            if os.path.getsize(self._path) < needed:
                raise _Unusable("truncated")
            if env.stat()["entries"] == 0:
                self._write([(_FORMAT_KEY, _FORMAT_VALUE.pack(FORMAT))])
            with env.begin() as transaction:
                stored = transaction.get(_FORMAT_KEY)
            version = _unseal(_FORMAT_KEY, stored) if stored is not None else None
            if version is None or len(version) != _FORMAT_VALUE.size:
                raise _Unusable("no-format")
            if (number := _FORMAT_VALUE.unpack(version)[0]) != FORMAT:
                raise _Unusable(f"format-{number}")
            self._read(env)
        except _DAMAGE as error:
            raise _Unusable(type(error).__name__) from error

    def _examine(self) -> None:
        """LMDB ends the process over a file that is damaged: at once, or at a later write."""
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(self._path).st_mode
            if stat.S_ISLNK(mode) or stat.S_ISFIFO(mode):
                # Through a link it would write over what is not ours; a pipe would be waited for.
                raise _Unusable("strange")
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            data = file.read()
            if reason := lmdbfile.examine(data) if data else "empty":
                raise _Unusable(reason)

    def _move_aside(self, reason: str) -> None:
        for number in itertools.count(1):
            target = f"{self._path}.aside-{number}-{reason}"
            if not os.path.lexists(target):
                break
        os.rename(self._path, target)
        self.set_aside = f"{reason}: kept as {target}"
        log.warning("ledger set aside, starting empty: %s", self.set_aside)

    def _open_env(self) -> lmdb.Environment:
        if self._lock_fd < 0:
            raise OSError(errno.EBADF, "the ledger is closed", self._path)
        if self._env is None:
            self._env = lmdb.open(
                self._path,
                subdir=False,
                mode=0o600,
                map_size=self._map_bytes,
                readahead=False,
                lock=False,
                max_dbs=0,
            )
            # A file may have been grown by an earlier run.
            self._map_bytes = self._env.info()["map_size"]
        return self._env

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _write(self, changes: list[tuple[bytes, bytes | None]]) -> None:
        env = self._open_env()
        if self._unsure:
            env.sync(True)
            self._unsure = False
        with env.begin(write=True) as transaction:
            for name, value in changes:
                if value is None:
                    transaction.delete(name)
                else:
                    transaction.put(name, _seal(name, value))

    def _read(self, env: lmdb.Environment) -> list[Row]:
        rows: list[Row] = []
        with env.begin() as transaction, transaction.cursor() as cursor:
            for name, stored in cursor:
                value = _unseal(bytes(name), bytes(stored))
                if value is None:
                    raise _Unusable("bad-checksum")
                if name != _FORMAT_KEY:
                    rows.append((*_unname(bytes(name)), value))
        return rows

    def _why(self, error: lmdb.Error) -> OSError:
        # LMDB reports a full disk as an input/output error: its own write came up short.
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize < _DISK_FULL_BYTES:
                return OSError(errno.ENOSPC, f"the disk is full: {error}", self._path)
        return OSError(errno.EIO, str(error), self._path)


# ---------------------------------------------------------------- rows


def _name(table: str, key: bytes) -> bytes:
    if not (table.isascii() and table.isidentifier()):
        raise ValueError(f"{table!r} is no name of a table")
    name = table.encode("ascii") + b"\0" + key
    if len(name) > KEY_BYTES_MAX + 1:
        raise ValueError(f"table and key have {len(name) - 1} bytes; at most {KEY_BYTES_MAX}")
    return name


def _unname(name: bytes) -> tuple[str, bytes]:
    table, _, key = name.partition(b"\0")
    return table.decode("ascii"), key


def _digest(name: bytes, value: bytes) -> bytes:
    # The name too: a right value in the wrong place is damage as well.
    return xxhash.xxh3_128_digest(struct.pack("<I", len(name)) + name + value)


def _seal(name: bytes, value: bytes) -> bytes:
    return _digest(name, value) + value


def _unseal(name: bytes, stored: bytes) -> bytes | None:
    """The value; None if it is damaged."""
    value = stored[_DIGEST_BYTES:]
    return value if _digest(name, value) == stored[:_DIGEST_BYTES] else None


# ---------------------------------------------------------------- folder


def _lock_folder(folder: str) -> int:
    path = os.path.join(folder, LOCK_FILE)
    try:
        folders.prepare(folder)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _start_error(f"cannot use {folder}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StartError(
            Reason.START_LOCKED, f"another daemon holds {path}; give each its own folder", SETTING
        ) from None
    except OSError as error:
        os.close(fd)
        raise _start_error(f"cannot lock {path}: {error.strerror}") from error
    return fd


def _is_at(path: str, file: os.stat_result) -> bool:
    """Whether `path` names this file. OSError if it cannot be asked."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), file)
    except FileNotFoundError:
        return False


def _start_error(detail: str) -> StartError:
    return StartError(Reason.START_DISK, detail, SETTING)
