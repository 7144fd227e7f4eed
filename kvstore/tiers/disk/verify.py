"""Checks a disk tier's folder that no daemon uses: every row against its record, byte for byte.

Promises. Nothing in the folder is changed: the index is read from a copy, files are opened to read.
A folder that a daemon holds is refused, and none can start while it is checked. Whatever is found
is in the report; damage never ends the check, and what one part of it spoils the others are still
checked for. Memory: about 200 bytes a block.

Blocks for as long as it takes to read all segments. `kvstore verify` and tests use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.files import SegmentFile, SegmentFiles, Truncated
from kvstore.tiers.disk.folder import (
    ASIDE_FOLDER,
    FORMAT_FILE,
    INDEX_FOLDER,
    LOCK_FILE,
    SEGMENTS_FOLDER,
    read_format_text,
    segment_name,
)
from kvstore.tiers.disk.format import (
    HEADER_BYTES,
    KEY_BYTES,
    ROW_DTYPE,
    Fault,
    Finding,
    RecordHeader,
    Row,
    Segment,
    check_record,
    decode,
    record_bytes,
    unpack_row,
)
from kvstore.tiers.disk.index import Index, LmdbIndex, RowBatch, Unusable
from kvstore.tiers.disk.opening import strangers
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.probe import DATA_FILE, strange
from kvstore.tiers.disk.report import Accounting, Findings, Kind, Report

DAMAGES_KEPT_MAX = 1_000
_READ_BYTES = 4 << 20
_BLOCK_BYTES = 512  # of st_blocks
_FORMAT_BYTES_MAX = 4_096
_OVER_CAPACITY = 1.02

OpenIndex = Callable[[str], Index]
Progress = Callable[[int, int], None]


class NotChecked(Exception):
    """The folder cannot be checked now; the argument says why and what to do."""


def verify(
    folder: str,
    *,
    progress: Progress = lambda done, total: None,
    capacity_bytes: int = 0,
    open_index: OpenIndex = LmdbIndex,
    damages_kept_max: int = DAMAGES_KEPT_MAX,
) -> Report:
    """Checks `folder`. NotChecked if a daemon holds it or it cannot be opened.

    progress: gets bytes read and bytes to read. capacity_bytes: that of the daemon's settings; 0 is
    not known, and not compared. open_index: opens the index in a copy of its folder.
    """
    with _held(folder):
        return _Check(folder, progress, capacity_bytes, open_index, damages_kept_max).run()


@contextlib.contextmanager
def _held(folder: str) -> Iterator[None]:
    """Keeps daemons out. A folder without a lock file has never been one's."""
    if not os.path.isdir(folder):
        raise NotChecked(f"{folder} is no folder")
    path = os.path.join(folder, LOCK_FILE)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield
        return
    except OSError as error:
        raise NotChecked(f"{path}: {error.strerror}") from error
    try:
        # Shared: two checks may run side by side.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise NotChecked(f"a daemon holds {folder}: stop it, or check a copy") from None
    try:
        yield
    finally:
        os.close(fd)


class _Rows(NamedTuple):
    """All rows, ordered by segment and slot."""

    space_ids: NDArray[np.uint64]
    keys: NDArray[np.uint8]  # [n, 32]
    rows: NDArray[np.void]  # ROW_DTYPE [n]

    def name(self, index: int) -> tuple[int, bytes]:
        return int(self.space_ids[index]), self.keys[index].tobytes()


class _Check:
    """One run."""

    def __init__(
        self,
        folder: str,
        progress: Progress,
        capacity_bytes: int,
        open_index: OpenIndex,
        damages_kept_max: int,
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._capacity_bytes = capacity_bytes
        self._open_index = open_index
        self._findings = Findings(damages_kept_max)
        self._strangers = strangers(folder)
        self._notes: list[str] = []
        self._fingerprints: dict[int, bytes] = {}
        self._bytes_done = 0
        self._bytes_total = 0
        self._right = 0
        self._record_bytes = 0
        self._payload_bytes = 0
        self._unnamed_records = 0
        self._unnamed_slots = 0
        self._buffer = aligned_bytes(0)

    def run(self) -> Report:
        folder_id, readable = self._check_format()
        if not readable:
            return Report(
                self._folder, damages=tuple(self._findings.kept),
                damage_counts=dict(self._findings.counts),
            )  # fmt: skip
        segments, rows = self._read_index()
        self._check_slots(rows)
        self._check_names(rows)
        files = SegmentFiles(os.path.join(self._folder, SEGMENTS_FOLDER))
        try:
            there = self._list(files)
            unknown = sorted(set(there) - {segment.segment for segment in segments})
            self._bytes_total = sum(
                segment.file_bytes for segment in segments if segment.segment in there
            )
            self._progress(0, self._bytes_total)
            self._check_segments(files, there, segments, rows)
            self._notes += files.mode.reasons
        finally:
            files.close()
        accounting = self._account(segments, there, unknown)
        return Report(
            folder=self._folder,
            folder_id=str(folder_id or ""),
            rows=len(rows.rows),
            right=self._right,
            spaces=len(np.unique(rows.space_ids)),
            segments=len(segments),
            slots=sum(segment.slots for segment in segments),
            parents_missing=_parents_missing(rows),
            unnamed_records=self._unnamed_records,
            unnamed_slots=self._unnamed_slots,
            unknown_segments=len(unknown),
            bytes_read=self._bytes_done,
            notes=tuple(self._notes),
            accounting=accounting,
            damages=tuple(self._findings.kept),
            damage_counts=dict(self._findings.counts),
        )

    # ------------------------------------------------------------------ format and index

    def _check_format(self) -> tuple[uuid.UUID | None, bool]:
        """The folder's id, and whether the rest can be understood."""
        if FORMAT_FILE in self._strangers:
            self._findings.add(Kind.FORMAT, FORMAT_FILE, "no plain file")
            return None, True
        try:
            with open(os.path.join(self._folder, FORMAT_FILE), "rb") as file:
                found = read_format_text(file.read(_FORMAT_BYTES_MAX))
        except OSError as error:
            self._findings.add(Kind.FORMAT, FORMAT_FILE, str(error.strerror))
            return None, True
        if isinstance(found, Fault):
            self._findings.add(Kind.FORMAT, FORMAT_FILE, found.text)
            return None, found.finding is not Finding.FUTURE_VERSION
        return found, True

    def _read_index(self) -> tuple[list[Segment], _Rows]:
        source = os.path.join(self._folder, INDEX_FOLDER)
        if INDEX_FOLDER in self._strangers or (os.path.isdir(source) and strange(source)):
            self._findings.add(Kind.INDEX, INDEX_FOLDER, "no folder of plain files")
            return [], _pack_rows([])
        # LMDB would make one in the copy, without a word.
        if not os.path.exists(os.path.join(source, DATA_FILE)):
            self._findings.add(Kind.INDEX, INDEX_FOLDER, "there is none")
            return [], _pack_rows([])
        with tempfile.TemporaryDirectory(prefix="kvstore-verify-") as scratch:
            copy = os.path.join(scratch, INDEX_FOLDER)
            try:
                os.mkdir(copy)
                shutil.copyfile(os.path.join(source, DATA_FILE), os.path.join(copy, DATA_FILE))
            except OSError as error:
                self._findings.add(Kind.INDEX, INDEX_FOLDER, f"cannot be copied: {error}")
                return [], _pack_rows([])
            try:
                return self._load(copy)
            except Unusable as reason:
                self._findings.add(Kind.INDEX, INDEX_FOLDER, str(reason))
            except OSError as error:
                self._findings.add(Kind.INDEX, INDEX_FOLDER, str(error.strerror or error))
        return [], _pack_rows([])

    def _load(self, folder: str) -> tuple[list[Segment], _Rows]:
        index = self._open_index(folder)
        try:
            segments = index.segments()
            rows = _pack_rows(list(index.load()))
            index.meta()
            if index.dropped_rows:
                what = f"{index.dropped_rows} rows, segments or values are damaged"
                self._findings.add(Kind.INDEX_ROW, INDEX_FOLDER, what, index.dropped_rows)
            return segments, rows
        finally:
            index.close()

    # ------------------------------------------------------------------ rows

    def _check_slots(self, rows: _Rows) -> None:
        segment, slot = rows.rows["segment"], rows.rows["slot"]
        same = (segment[1:] == segment[:-1]) & (slot[1:] == slot[:-1])
        for at in np.flatnonzero(same):
            where = _where(int(segment[at]), int(slot[at]))
            self._findings.add(Kind.SLOT_TWICE, where, "two rows claim it")

    def _check_names(self, rows: _Rows) -> None:
        names = _names(rows.space_ids, rows.keys)
        _, first, counts = np.unique(names, return_index=True, return_counts=True)
        for at in first[counts > 1]:
            space_id, key = rows.name(int(at))
            where = _where(int(rows.rows["segment"][at]), int(rows.rows["slot"][at]))
            what = f"block {key[:4].hex()} of space {space_id} is in other slots, too"
            self._findings.add(Kind.NAME_TWICE, where, what)

    # ------------------------------------------------------------------ segments

    def _list(self, files: SegmentFiles) -> dict[int, SegmentFile]:
        if SEGMENTS_FOLDER in self._strangers:
            self._findings.add(Kind.SEGMENT_MISSING, SEGMENTS_FOLDER, "no folder")
            return {}
        try:
            return files.list()
        except OSError as error:
            self._findings.add(Kind.SEGMENT_MISSING, SEGMENTS_FOLDER, str(error.strerror))
            return {}

    def _check_segments(
        self,
        files: SegmentFiles,
        there: dict[int, SegmentFile],
        segments: list[Segment],
        rows: _Rows,
    ) -> None:
        numbers = rows.rows["segment"]
        for segment in segments:
            begin, end = np.searchsorted(numbers, [segment.segment, segment.segment + 1])
            file = there.get(segment.segment)
            where = _where(segment.segment)
            if file is None:
                what = f"{end - begin} blocks are lost"
                self._findings.add(Kind.SEGMENT_MISSING, where, what)
                continue
            if file.size_bytes != segment.file_bytes:
                what = f"{file.size_bytes} bytes, not {segment.file_bytes}"
                self._findings.add(Kind.SEGMENT_SIZE, where, what)
            taken: dict[int, list[int]] = {}
            for at in range(int(begin), int(end)):
                taken.setdefault(int(rows.rows["slot"][at]), []).append(at)
            self._check_segment(files, segment, rows, taken)

    def _check_segment(
        self, files: SegmentFiles, segment: Segment, rows: _Rows, taken: dict[int, list[int]]
    ) -> None:
        together = max(_READ_BYTES // segment.slot_bytes, 1)
        for first in range(0, segment.slots, together):
            count = min(together, segment.slots - first)
            for slot, record in self._read(files, segment, first, count):
                if not taken.get(slot):
                    self._count_unnamed(record)
                for at in taken.get(slot, ()):
                    self._check_record(segment, slot, record, rows, at)
            self._bytes_done += count * segment.slot_bytes
            self._progress(self._bytes_done, self._bytes_total)

    def _read(
        self, files: SegmentFiles, segment: Segment, first: int, count: int
    ) -> Iterator[tuple[int, Bytes | Fault | OSError]]:
        """Slots and what is in them: many at once, one by one where that fails."""
        size = segment.slot_bytes
        if len(self._buffer) < count * size:
            self._buffer = aligned_bytes(count * size)
        into = self._buffer[: count * size]
        try:
            files.preadv(segment.segment, first * size, [into])
        except (Truncated, OSError) as error:
            if count == 1:
                yield first, error.fault if isinstance(error, Truncated) else error
                return
            for slot in range(first, first + count):
                yield from self._read(files, segment, slot, 1)
            return
        for number in range(count):
            yield first + number, into[number * size : (number + 1) * size]

    def _count_unnamed(self, record: Bytes | Fault | OSError) -> None:
        if not isinstance(record, np.ndarray):
            return
        found = decode(record)
        if isinstance(found, RecordHeader):
            self._unnamed_records += 1
        elif found.finding is not Finding.EMPTY:
            self._unnamed_slots += 1

    def _check_record(
        self,
        segment: Segment,
        slot: int,
        record: Bytes | Fault | OSError,
        rows: _Rows,
        at: int,
    ) -> None:
        where = _where(segment.segment, slot)
        if isinstance(record, OSError):
            self._findings.add(Kind.UNREADABLE, where, str(record.strerror or record))
            return
        space_id, key = rows.name(at)
        row = unpack_row(rows.rows[at].tobytes())
        if isinstance(row, Row) and record_bytes(row.length) > segment.slot_bytes:
            row = Fault(Finding.OTHER_BLOCK, "length", f"{row.length} bytes do not fit the slot")
        fault = record if isinstance(record, Fault) else None
        if isinstance(row, Fault):
            fault = row
        elif isinstance(record, np.ndarray):
            fault = check_record(
                record[:HEADER_BYTES],
                record[HEADER_BYTES:],
                space_id=space_id,
                key=key,
                row=row,
                fingerprint_digest=self._fingerprint(space_id, record),
                tenant_digest=segment.tenant_digest,
            )
        if fault is not None:
            what = f"block {key[:4].hex()} of space {space_id}: {fault.text}"
            self._findings.add(Kind.RECORD, where, what)
            return
        assert isinstance(row, Row)
        self._right += 1
        self._record_bytes += segment.slot_bytes
        self._payload_bytes += row.length

    def _fingerprint(self, space_id: int, record: Bytes) -> bytes | None:
        """That of the space's first record: all of a space have one, whichever it is."""
        known = self._fingerprints.get(space_id)
        if known is None:
            header = decode(record)
            if isinstance(header, RecordHeader) and header.space_id == space_id:
                self._fingerprints[space_id] = header.fingerprint_digest
        return known

    # ------------------------------------------------------------------ accounting

    def _account(
        self, segments: list[Segment], there: dict[int, SegmentFile], unknown: Sequence[int]
    ) -> Accounting:
        known = [there[s.segment] for s in segments if s.segment in there]
        segment_bytes = sum(file.allocated_bytes for file in known)
        unknown_bytes = sum(there[number].allocated_bytes for number in unknown)
        parts = {name: self._tree_bytes(name) for name in (INDEX_FOLDER, ASIDE_FOLDER)}
        everything = self._tree_bytes("")
        accounting = Accounting(
            capacity_bytes=self._capacity_bytes,
            segment_bytes=segment_bytes,
            index_bytes=parts[INDEX_FOLDER],
            aside_bytes=parts[ASIDE_FOLDER],
            other_bytes=everything - sum(parts.values()) - segment_bytes - unknown_bytes,
            unknown_segment_bytes=unknown_bytes,
            slot_bytes=sum(segment.file_bytes for segment in segments),
            record_bytes=self._record_bytes,
            payload_bytes=self._payload_bytes,
        )
        if 0 < self._capacity_bytes * _OVER_CAPACITY < accounting.total_bytes:
            what = f"{accounting.total_bytes} bytes, of {self._capacity_bytes}"
            self._findings.add(Kind.OVER_CAPACITY, "", what)
        return accounting

    def _tree_bytes(self, name: str) -> int:
        """On the device, of all files below; what cannot be looked into is a note."""

        def unreadable(error: OSError) -> None:
            if name == "" or not isinstance(error, FileNotFoundError):
                self._notes.append(f"not counted: {error}")

        total = 0
        root = os.path.join(self._folder, name)
        for folder, _, files in os.walk(root, onerror=unreadable):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, file)).st_blocks * _BLOCK_BYTES
        return total


# ---------------------------------------------------------------- rows


def _pack_rows(batches: Sequence[RowBatch]) -> _Rows:
    spaces = np.concatenate([np.zeros(0, np.uint64), *(batch.space_ids for batch in batches)])
    keys = np.concatenate([np.zeros((0, KEY_BYTES), np.uint8), *(batch.keys for batch in batches)])
    rows = np.concatenate([np.zeros(0, ROW_DTYPE), *(batch.rows for batch in batches)])
    order = np.lexsort((rows["slot"], rows["segment"]))
    return _Rows(spaces[order], keys[order], rows[order])


def _names(space_ids: NDArray[np.uint64], keys: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Space and key of each as 40 bytes that can be sorted and compared."""
    names = np.empty((len(space_ids), 8 + KEY_BYTES), np.uint8)
    names[:, :8] = space_ids.astype(">u8").view(np.uint8).reshape(-1, 8)
    names[:, 8:] = keys
    # Bytes of one length: that numpy ignores zeros at their ends changes no comparison.
    return names.view(f"S{8 + KEY_BYTES}").reshape(-1)


def _parents_missing(rows: _Rows) -> int:
    parents = np.frombuffer(rows.rows["parent"].tobytes(), np.uint8).reshape(-1, KEY_BYTES)
    has_one = parents.any(axis=1)
    wanted = _names(rows.space_ids[has_one], parents[has_one])
    there = _names(rows.space_ids, rows.keys)
    return int(np.count_nonzero(~np.isin(wanted, there)))


def _where(segment_id: int, slot: int | None = None) -> str:
    path = f"{SEGMENTS_FOLDER}/{segment_name(segment_id)}"
    return path if slot is None else f"{path} slot {slot}"
