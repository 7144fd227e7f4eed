"""The durable rows of the disk tier: which record is in which slot of which segment.

Promises. What `commit` was given is on the device when it returns, all of it or none. A row is
given back exactly as it was committed or not at all: each carries a checksum, since LMDB has none;
a damaged one is dropped and counted. A file that cannot be trusted is refused with `Unusable`,
which says why in a word that fits a file name.

Rows are stored under (segment, slot), not under their name: a batch's slots are neighbours, so a
commit writes few pages (5 ms instead of 18 for 256 rows of a million) and the file stays small, no
two rows can claim one slot, and a segment goes with all its rows. Two rows of one name cannot come
from a writer that removes the older one in the same commit; whoever loads them keeps the one of the
higher generation.

Everything here may wait for the device: call it from the writer's thread, never from the event
loop. `load` may be iterated in another thread, but rows that are committed or removed meanwhile may
or may not be among those that it still gives: whoever does both must know.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping

import lmdb

from kvstore.tiers.disk import probe
from kvstore.tiers.disk.change import (
    FORMAT_NAME,
    META,
    ROWS,
    SEGMENTS,
    TABLES,
    Change,
    pack_change,
)
from kvstore.tiers.disk.format import Segment, unpack_segment, unpack_segment_key
from kvstore.tiers.disk.rows import (
    LOAD_ROWS,
    SPARE_BYTES,
    Index,
    IndexRow,
    Place,
    RowBatch,
    Unusable,
    index_bytes,
    seal,
    unpack_rows,
    unseal,
)
from kvstore.tiers.disk.scratch import Held, Spare, install, remove_scratch, scratch_folder

__all__ = [
    "FORMAT",
    "LOAD_ROWS",
    "Index",
    "IndexRow",
    "LmdbIndex",
    "Place",
    "RowBatch",
    "Unusable",
    "index_bytes",
]

log = logging.getLogger(__name__)

FORMAT = 1
SPARE_FILE = "spare"

_MAP_ROOM = 2
_MAP_BYTES_MIN = 16 << 20
_MAP_BYTES_MAX = 1 << 42

# Mapped pages that were touched count as the daemon's memory. A kernel maps 64 KiB around each
# fault; about as much of the file holds this many neighbouring slots.
_FAULT_BYTES = 64 << 10
_FAULT_SLOTS = 384
_MAPPED_BYTES_MAX = 8 << 20

_COMPACT_BYTES_MIN = 64 << 20
_DISK_FULL_BYTES = 1 << 20
_AGING_COMMITS = 2
_BLOCK_BYTES = 512
"""Of `st_blocks`, whatever the file system's are."""
_FORMAT_VALUE = struct.Struct("<I")

# What LMDB raises for a file that is damaged or not of its format.
_DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)
_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.ENOMEM)


class LmdbIndex:
    """An `Index` in one LMDB file, synchronous and without WRITEMAP: with it a full disk is SIGBUS.

    A forked child must not use it: every call there is OSError (EBADF).
    """

    def __init__(self, folder: str, slots: int = 0, *, ahead: probe.Ahead | None = None) -> None:
        """Opens the index in `folder`, or makes it, whole or not at all, if there is none.

        slots: how many it will probably hold; the map grows beyond. ahead: its examination, if that
        was begun. Unusable if what is there cannot be trusted: it is not open then and can be
        renamed. OSError if the device refuses.
        Takes about 0.1 s and 0.2 s a million rows, since a child examines the file first.
        """
        self._folder = os.path.abspath(folder)
        self._path = os.path.join(self._folder, probe.DATA_FILE)
        self._map_bytes = _MAP_BYTES_MIN
        while self._map_bytes < _MAP_ROOM * index_bytes(slots):
            self._map_bytes *= 2
        self._spare = Spare(os.path.join(self._folder, SPARE_FILE), SPARE_BYTES)
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._env: lmdb.Environment | None = None
        self._tables: dict[bytes, lmdb._Database] = {}
        self._closed = False
        # A root that a failed commit wrote and LMDB took back may come back after a power cut, with
        # its pages written over: what the file holds is made certain before it is written again.
        self._unsure = True
        self._touched_bytes = 0
        self._file: Held | None = None
        self._bad: dict[tuple[bytes, bytes], None] = {}
        self._rows = 0
        self._used_bytes = 0
        self.dropped_rows = 0
        try:
            if not os.path.exists(self._path):
                self._make()
            elif reason := ahead.verdict() if ahead is not None else probe.examine(self._folder):
                raise Unusable(reason)
            remove_scratch(self._folder)
            with self._guard, self._errors():
                self._check()
                self._compact()
                self._spare.make()
                self._used_bytes = self._measure()
                self._file = Held(self._path)
        except BaseException:
            self.close()
            raise

    def segments(self) -> list[Segment]:
        with self._guard, self._errors():
            return self._segments()

    def row_count(self) -> int:
        return self._rows

    def load(self, batch_rows: int = LOAD_ROWS) -> Iterator[RowBatch]:
        start = b""
        while True:
            with self._guard, self._errors():
                stored = self._read(ROWS, start, batch_rows)
                if not stored:
                    self._close_env()
                    return
                start = stored[-1][0] + b"\0"
                slots = {segment.segment: segment.slots for segment in self._segments()}
                batch, bad = unpack_rows(stored, slots)
                for name in bad:
                    self._drop(ROWS, name)
                self._count_touched(len(stored))
            if len(batch.rows):
                yield batch

    def commit(
        self,
        *,
        remove: Iterable[Place] = (),
        add: Iterable[IndexRow] = (),
        remove_segments: Iterable[int] = (),
        add_segments: Iterable[Segment] = (),
        meta: Mapping[str, bytes | None] | None = None,
    ) -> None:
        change = pack_change(remove, add, remove_segments, add_segments, meta or {})
        with self._guard:
            try:
                with self._errors():
                    self._write_with_spare(change)
                    self._check_name()
            except Unusable as reason:
                raise OSError(errno.EIO, f"the index is {reason}", self._path) from reason
            self._bad.clear()
            self._spare.make()
            with contextlib.suppress(OSError):
                self._used_bytes = self._measure()
            self._count_touched(change.parts(_FAULT_SLOTS) * _FAULT_SLOTS)

    def meta(self) -> dict[str, bytes]:
        named = {}
        with self._guard, self._errors():
            for name, stored in self._read(META, b"", None):
                value = unseal(name, stored)
                if value is None:
                    self._drop(META, name)
                else:
                    named[name.decode("utf-8", "replace")] = value
        named.pop(FORMAT_NAME, None)
        return named

    def allowance_bytes(self, slots: int) -> int:
        # From memory: asked under the lock that look-ups need.
        return max(index_bytes(slots), self._used_bytes)

    def used_bytes(self) -> int:
        return self._used_bytes

    def close(self) -> None:
        with self._guard:
            self._closed = True
            self._close_env()
            if self._file is not None:
                self._file.close()

    # ------------------------------------------------------------------ file

    def _make(self) -> None:
        """A new file appears under its name when it is complete and on the device."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        with scratch_folder(self._folder) as scratch:
            name = FORMAT_NAME.encode()
            with (
                self._errors(),
                self._open(scratch, create=True) as env,
                env.begin(write=True) as transaction,
            ):
                tables = {table: env.open_db(table, txn=transaction) for table in TABLES}
                stored = seal(name, _FORMAT_VALUE.pack(FORMAT))
                transaction.put(name, stored, db=tables[META])
            install(os.path.join(scratch, probe.DATA_FILE), self._path)

    def _check(self) -> None:
        env = self._environment()
        with env.begin() as transaction:
            name = FORMAT_NAME.encode()
            stored = transaction.get(name, db=self._tables[META])
            version = unseal(name, stored) if stored is not None else None
            if version is None or len(version) != _FORMAT_VALUE.size:
                raise Unusable("no-format")
            if (number := _FORMAT_VALUE.unpack(version)[0]) != FORMAT:
                raise Unusable(f"format-{number}")
            self._rows = transaction.stat(self._tables[ROWS])["entries"]
        self._used_bytes = self._measure()

    def _check_name(self) -> None:
        """A file that was removed takes commits without complaint until it is closed; nobody would
        find them. OSError if it was.
        """
        if self._file is not None and not self._file.is_there():
            self._close_env()
            raise FileNotFoundError(errno.ENOENT, "removed or replaced", self._path)

    def _compact(self) -> None:
        """LMDB's file never shrinks: after slots became fewer it would keep its largest size."""
        if self._used_bytes < max(_COMPACT_BYTES_MIN, 2 * index_bytes(self._rows)):
            return
        try:
            with scratch_folder(self._folder) as scratch:
                self._environment().copy(scratch, compact=True)
                self._close_env()
                install(os.path.join(scratch, probe.DATA_FILE), self._path)
        except (OSError, lmdb.Error) as error:
            # It only costs space, which the allowance counts.
            log.warning("the index in %s was not compacted: %s", self._folder, error)
        self._check()

    def _open(self, folder: str, create: bool = False) -> lmdb.Environment:
        return lmdb.open(
            folder,
            map_size=self._map_bytes,
            mode=0o600,
            create=create,
            readahead=False,
            max_dbs=len(TABLES),
        )

    def _environment(self) -> lmdb.Environment:
        if self._closed or os.getpid() != self._pid:
            raise OSError(errno.EBADF, "the index is closed here", self._path)
        if self._env is None:
            self._check_name()
            if reason := probe.strange(self._folder) or probe.short(self._folder):
                raise Unusable(reason)
            env = self._env = self._open(self._folder)
            if probe.truncated(env, self._folder):
                self._close_env()
                raise Unusable("truncated")
            # Readers that died (a tool, an earlier daemon) would keep old pages from being reused.
            env.reader_check()
            self._map_bytes = env.info()["map_size"]
            self._tables = {name: env.open_db(name, create=False) for name in TABLES}
        return self._env

    def _close_env(self) -> None:
        env, self._env = self._env, None
        self._touched_bytes = 0
        if env is not None and os.getpid() == self._pid:
            env.close()

    def _count_touched(self, slots: int) -> None:
        """Unmaps the file once enough of it was touched; the next access opens it in 0.3 ms."""
        self._touched_bytes += -(-slots // _FAULT_SLOTS) * _FAULT_BYTES
        if self._touched_bytes > _MAPPED_BYTES_MAX:
            self._close_env()

    def _measure(self) -> int:
        with os.scandir(self._folder) as entries:
            return sum(entry.stat().st_blocks * _BLOCK_BYTES for entry in entries)

    # ------------------------------------------------------------------ rows

    def _read(self, table: bytes, start: bytes, count: int | None) -> list[tuple[bytes, bytes]]:
        with (
            self._environment().begin(db=self._tables[table]) as transaction,
            transaction.cursor() as cursor,
        ):
            if not cursor.set_range(start):
                return []
            return list(itertools.islice(cursor.iternext(keys=True, values=True), count))

    def _segments(self) -> list[Segment]:
        found = []
        for name, stored in self._read(SEGMENTS, b"", None):
            number, value = unpack_segment_key(name), unseal(name, stored)
            segment = None
            if isinstance(number, int) and value is not None:
                segment = unpack_segment(number, value)
            if isinstance(segment, Segment):
                found.append(segment)
            else:
                self._drop(SEGMENTS, name)
        return found

    def _drop(self, table: bytes, name: bytes) -> None:
        if (table, name) not in self._bad:
            self._bad[table, name] = None
            self.dropped_rows += 1

    def _write_with_spare(self, change: Change) -> None:
        try:
            self._write(change)
        except lmdb.Error as error:
            self._unsure = True
            self._close_env()
            if self._why(error).errno != errno.ENOSPC:
                raise
            # Without the spare's room nothing could be removed on a full disk. What was removed may
            # be written over only after two more transactions; then additions fit, too.
            if not any(table == ROWS for table, _, _ in change.puts):
                self._spare.drop()
            name = FORMAT_NAME.encode()
            again = Change([], [], [(META, name, seal(name, _FORMAT_VALUE.pack(FORMAT)))])
            for _ in range(_AGING_COMMITS):
                self._write(again)
            self._write(change)

    def _write(self, change: Change) -> None:
        while True:
            env = self._environment()
            if self._unsure:
                env.sync(True)
                self._unsure = False
            try:
                with env.begin(write=True) as transaction:
                    for table, name in (*self._bad, *change.gone):
                        transaction.delete(name, db=self._tables[table])
                    for segment in change.gone_segments:
                        self._delete_segment(transaction, segment)
                    for table, name, value in change.puts:
                        transaction.put(name, value, db=self._tables[table])
                    rows = transaction.stat(self._tables[ROWS])["entries"]
            except lmdb.MapFullError as error:
                if self._map_bytes >= _MAP_BYTES_MAX:
                    text = f"the index is over {_MAP_BYTES_MAX >> 30} GiB"
                    raise OSError(errno.ENOSPC, text, self._path) from error
                self._map_bytes *= 2
                env.set_mapsize(self._map_bytes)
            else:
                self._rows = rows
                return

    def _delete_segment(self, transaction: lmdb.Transaction, name: bytes) -> None:
        transaction.delete(name, db=self._tables[SEGMENTS])
        with transaction.cursor(self._tables[ROWS]) as cursor:
            found = cursor.set_range(name)
            while found and bytes(cursor.key()).startswith(name):
                found = cursor.delete()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            self._close_env()
            raise Unusable(f"damaged-{type(error).__name__}") from error
        except lmdb.Error as error:
            # A failed write may leave the environment unusable for good: the next call opens anew.
            self._unsure = True
            self._close_env()
            raise self._why(error) from error

    def _why(self, error: lmdb.Error) -> OSError:
        text = str(error)
        for code in _CODES:
            if text.endswith(os.strerror(code)):
                return OSError(code, text, self._path)
        # LMDB reports a full disk as an input/output error: its own write came up short.
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize < _DISK_FULL_BYTES:
                return OSError(errno.ENOSPC, f"the disk is full: {text}", self._path)
        return OSError(errno.EIO, text, self._path)
