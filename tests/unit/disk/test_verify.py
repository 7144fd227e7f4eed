"""The offline check finds what is damaged, by name, and changes nothing."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.disk import format as fmt
from kvstore.tiers.disk.dictindex import DictIndex
from kvstore.tiers.disk.files import SegmentFiles
from kvstore.tiers.disk.folder import format_text, segment_name
from kvstore.tiers.disk.index import IndexRow, LmdbIndex
from kvstore.tiers.disk.pages import RecordBuffers, ScratchPages, aligned_bytes
from kvstore.tiers.disk.report import Damage, Kind, Report
from kvstore.tiers.disk.verify import NotChecked, verify

PAGE = 4_096
SLOTS = 8
BLOCK_BYTES = 5_000
SLOT_BYTES = fmt.record_bytes(BLOCK_BYTES)
TENANT = fmt.tenant_digest("tenant")


def key(number: int) -> bytes:
    return fmt.payload_checksum(number.to_bytes(8, "little")) * 2


class Folder:
    """A disk tier's folder: two segments, and ten blocks, each the child of the one before."""

    def __init__(self, path: Path, blocks: int = 10) -> None:
        self.path = path
        (path / "segments").mkdir(parents=True)
        (path / "FORMAT").write_bytes(format_text(uuid.UUID(int=7)))
        (path / "lock").touch()
        self.segments = [fmt.Segment(number, SLOT_BYTES, SLOTS, TENANT) for number in (3, 4)]
        self.files = SegmentFiles(str(path / "segments"))
        for segment in self.segments:
            self.files.create(segment.segment, segment.file_bytes)
        self.rows = [self.block(number) for number in range(blocks)]
        self.commit(self.rows, self.segments)

    def block(
        self, number: int, segment: int | None = None, slot: int | None = None, space_id: int = 1
    ) -> IndexRow:
        """Writes the record of block `number` and returns its row, not committed."""
        segment = 3 + number // SLOTS if segment is None else segment
        slot = number % SLOTS if slot is None else slot
        payload = aligned_bytes(BLOCK_BYTES)
        payload[:] = np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)
        row = fmt.Row(
            segment=segment,
            slot=slot,
            generation=number + 1,
            length=BLOCK_BYTES,
            checksum=fmt.payload_checksum(payload),
            parent=key(number - 1) if number else b"",
            depth=number,
        )
        header = fmt.RecordHeader(
            tenant_digest=TENANT,
            fingerprint_digest=bytes([space_id]) * 32,
            space_id=space_id,
            key=key(number),
            parent=row.parent,
            depth=row.depth,
            generation=row.generation,
            length=row.length,
            checksum=row.checksum,
        )
        scratch = ScratchPages()
        fmt.encode_into(header, scratch.header)
        buffers = RecordBuffers(scratch.header, payload, scratch.tail).fill().buffers
        self.files.pwritev(segment, slot * SLOT_BYTES, buffers)
        self.files.fdatasync(segment)
        return IndexRow(space_id, key(number), row)

    def commit(
        self,
        add: list[IndexRow],
        add_segments: list[fmt.Segment] | None = None,
        remove: list[tuple[int, int]] | None = None,
    ) -> None:
        index = LmdbIndex(str(self.path / "index"))
        index.commit(add=add, add_segments=add_segments or [], remove=remove or [])
        index.close()

    def file(self, segment: int) -> Path:
        return self.path / "segments" / segment_name(segment)

    def edit(self, segment: int, change: Callable[[bytearray], None]) -> None:
        """Changes a segment's bytes in place."""
        data = bytearray(self.file(segment).read_bytes())
        change(data)
        with self.file(segment).open("r+b") as file:
            file.write(data)
            file.truncate()
            os.fsync(file.fileno())

    def flip(self, segment: int, offset: int) -> None:
        def change(data: bytearray) -> None:
            data[offset] ^= 0x10

        self.edit(segment, change)

    def verify(self, capacity_bytes: int = 0) -> Report:
        return verify(str(self.path), capacity_bytes=capacity_bytes)


@pytest.mark.parametrize(
    ("name", "kind", "right"),
    [
        ("FORMAT", Kind.FORMAT, 10),
        ("index/data.mdb", Kind.INDEX, 0),
        ("index/lock.mdb", Kind.INDEX, 0),
        ("index", Kind.INDEX, 0),
        ("segments", Kind.SEGMENT_MISSING, 0),
    ],
)
def test_links_and_pipes_are_found_and_neither_followed_nor_waited_for(
    folder: Folder, name: str, kind: Kind, right: int
) -> None:
    path = folder.path / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(path)
        report = folder.verify()
        assert kind in report.damage_counts
        assert report.right == right
        path.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "disk")


def only(report: Report) -> Damage:
    """The one damage of a report."""
    (damage,) = report.damages
    assert report.damage_counts == {damage.kind: 1}
    assert not report.ok
    return damage


# ---------------------------------------------------------------- nothing damaged


def test_a_right_folder_is_right(folder: Folder) -> None:
    report = folder.verify()
    assert report.ok
    assert report.damages == ()
    assert report.folder_id == str(uuid.UUID(int=7))
    assert (report.rows, report.right, report.spaces) == (10, 10, 1)
    assert (report.segments, report.slots) == (2, 2 * SLOTS)
    assert (report.parents_missing, report.unnamed_records, report.unnamed_slots) == (0, 0, 0)
    assert report.bytes_read == 2 * SLOTS * SLOT_BYTES


def test_the_sums_are_those_of_the_file_system(folder: Folder) -> None:
    (folder.path / "aside" / "1-truncated").mkdir(parents=True)
    (folder.path / "aside" / "1-truncated" / "data.mdb").write_bytes(b"x" * 50_000)
    (folder.path / "ledger").mkdir()
    (folder.path / "ledger" / "ledger.mdb").write_bytes(b"x" * 9_000)
    books = folder.verify().accounting
    assert books.segment_bytes >= books.slot_bytes == 2 * SLOTS * SLOT_BYTES
    assert (books.record_bytes, books.payload_bytes) == (10 * SLOT_BYTES, 10 * BLOCK_BYTES)
    assert 50_000 <= books.aside_bytes < 60_000
    assert books.other_bytes >= 9_000
    everything = sum(
        path.lstat().st_blocks * 512 for path in folder.path.rglob("*") if path.is_file()
    )
    assert books.total_bytes == everything


def test_progress_ends_at_its_total(folder: Folder) -> None:
    seen: list[tuple[int, int]] = []
    verify(str(folder.path), progress=lambda done, total: seen.append((done, total)))
    done, totals = [one for one, _ in seen], {total for _, total in seen}
    assert done == sorted(done)
    assert done[0] == 0
    assert totals == {done[-1]} == {2 * SLOTS * SLOT_BYTES}


def test_what_evictions_and_crashes_leave_is_counted_not_damage(folder: Folder) -> None:
    folder.commit([], remove=[(3, 2)])  # evicted: the record stays
    folder.block(20, segment=4, slot=5)  # written, never committed
    folder.files.create(9, 4 * PAGE)  # made, never named
    folder.block(21, segment=4, slot=6)
    folder.edit(
        4, lambda data: data.__setitem__(slice(6 * SLOT_BYTES, 6 * SLOT_BYTES + 9), b"x" * 9)
    )
    report = folder.verify()
    assert report.ok
    assert (report.rows, report.right) == (9, 9)
    assert (report.unnamed_records, report.unnamed_slots, report.unknown_segments) == (2, 1, 1)
    assert report.parents_missing == 1, "the child of the evicted block"
    assert report.accounting.unknown_segment_bytes >= 4 * PAGE


def test_nothing_is_changed(folder: Folder) -> None:
    folder.flip(3, 100)

    def state() -> dict[str, tuple[int, int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size, path.read_bytes())
            for path in sorted(folder.path.rglob("*"))
            if path.is_file()
        }

    before = state()
    folder.verify()
    assert state() == before


@pytest.mark.root
def test_a_read_only_file_system_can_be_checked(folder: Folder) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    path = str(folder.path).encode()
    bind, remount_read_only = 0x1000, 0x1000 | 0x20 | 0x1
    if libc.mount(path, path, None, bind, None) != 0:
        pytest.skip(f"no bind mount: {os.strerror(ctypes.get_errno())}")
    try:
        assert libc.mount(None, path, None, remount_read_only, None) == 0
        with pytest.raises(OSError, match="Read-only"):
            (folder.path / "new").touch()
        report = folder.verify()
        assert report.ok
        assert report.right == 10
    finally:
        assert libc.umount2(path, 2) == 0


# ---------------------------------------------------------------- damage


def test_every_part_of_a_record_is_looked_at(folder: Folder) -> None:
    """A flipped bit each 97 bytes of a record is found; behind the payload it is nobody's."""
    pristine = folder.file(3).read_bytes()
    index = dict_index(folder)
    for at in range(0, SLOT_BYTES, 97):
        folder.flip(3, 2 * SLOT_BYTES + at)
        report = verify(str(folder.path), open_index=lambda path: index)
        if at < PAGE + BLOCK_BYTES:
            damage = only(report)
            assert damage.kind is Kind.RECORD, at
            assert damage.where == "segments/00000003.seg slot 2"
            expected = "foreign" if at < 8 else "header" if at < PAGE else "payload"
            assert expected in damage.what, at
            assert report.right == 9
        else:
            assert report.ok, at
        folder.file(3).write_bytes(pristine)


def test_swapped_records_are_named(folder: Folder) -> None:
    def swap(data: bytearray) -> None:
        one, two = slice(0, SLOT_BYTES), slice(SLOT_BYTES, 2 * SLOT_BYTES)
        data[one], data[two] = data[two], data[one]

    folder.edit(3, swap)
    report = folder.verify()
    assert report.damage_counts == {Kind.RECORD: 2}
    assert all("other block (key)" in damage.what for damage in report.damages)
    assert key(0)[:4].hex() in report.damages[0].what
    assert key(0).hex() not in report.damages[0].what


def test_a_stale_record_is_named(folder: Folder) -> None:
    """An older write of the same block, which a lost write would leave."""
    row = folder.rows[4]
    folder.commit([row._replace(row=row.row._replace(generation=99))])
    damage = only(folder.verify())
    assert "other block (generation): 5, expected 99" in damage.what


def test_a_lost_write_is_empty(folder: Folder) -> None:
    folder.edit(3, lambda data: data.__setitem__(slice(0, SLOT_BYTES), bytes(SLOT_BYTES)))
    assert "empty" in only(folder.verify()).what


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"length": 4_999}, "length"),
        ({"checksum": b"c" * 16}, "checksum"),
        ({"parent": b"p" * 32}, "parent"),
        ({"depth": 77}, "depth"),
        ({"length": 1 << 40}, "do not fit"),
    ],
)
def test_a_wrong_row_is_named(folder: Folder, change: dict[str, object], expected: str) -> None:
    row = folder.rows[4]
    folder.commit([row._replace(row=row.row._replace(**change))])  # type: ignore[arg-type]
    assert expected in only(folder.verify()).what


def test_a_space_has_one_fingerprint_and_one_tenant(folder: Folder) -> None:
    folder.commit([folder.block(30, segment=4, slot=4, space_id=2)])
    assert folder.verify().ok

    def rewrite(data: bytearray) -> None:
        found = fmt.decode(data[:PAGE])
        assert isinstance(found, fmt.RecordHeader)
        data[:PAGE] = fmt.encode(found._replace(tenant_digest=fmt.tenant_digest("other")))
        found = fmt.decode(data[SLOT_BYTES : SLOT_BYTES + PAGE])
        assert isinstance(found, fmt.RecordHeader)
        other = found._replace(fingerprint_digest=b"o" * 32)
        data[SLOT_BYTES : SLOT_BYTES + PAGE] = fmt.encode(other)

    folder.edit(3, rewrite)
    whats = [damage.what for damage in folder.verify().damages]
    assert ["(tenant)" in whats[0], "(fingerprint)" in whats[1]] == [True, True]
    assert len(whats) == 2


@pytest.mark.parametrize(
    "size", [0, 1, PAGE, 3 * SLOT_BYTES, 3 * SLOT_BYTES + PAGE, 8 * SLOT_BYTES - 1]
)
def test_a_cut_segment_loses_what_is_behind_the_cut(folder: Folder, size: int) -> None:
    os.truncate(folder.file(3), size)
    report = folder.verify()
    lost = SLOTS - size // SLOT_BYTES
    assert report.damage_counts == {Kind.SEGMENT_SIZE: 1, Kind.RECORD: lost}
    assert report.right == 10 - lost
    assert all("truncated" in d.what for d in report.damages if d.kind is Kind.RECORD)


def test_a_longer_segment_is_of_wrong_size(folder: Folder) -> None:
    os.truncate(folder.file(3), SLOTS * SLOT_BYTES + PAGE)
    report = folder.verify()
    assert only(report).kind is Kind.SEGMENT_SIZE
    assert report.right == 10


def test_a_missing_segment_is_named(folder: Folder) -> None:
    folder.file(3).unlink()
    report = folder.verify()
    assert only(report) == Damage(
        Kind.SEGMENT_MISSING, "segments/00000003.seg", "8 blocks are lost"
    )
    assert report.right == 2


def test_a_missing_folder_of_segments_is_damage(folder: Folder) -> None:
    shutil.rmtree(folder.path / "segments")
    assert folder.verify().damage_counts == {Kind.SEGMENT_MISSING: 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b"hello", "foreign"),
        (b"kvstore-disk 1\nx", "damaged"),
    ],
)
def test_a_wrong_format_file_is_damage_and_the_rest_is_checked(
    folder: Folder, text: bytes | None, expected: str
) -> None:
    if text is None:
        (folder.path / "FORMAT").unlink()
    else:
        (folder.path / "FORMAT").write_bytes(text)
    report = folder.verify()
    damage = only(report)
    assert damage.kind is Kind.FORMAT
    assert expected in damage.what
    assert report.right == 10


def test_a_later_format_is_not_looked_into(folder: Folder) -> None:
    (folder.path / "FORMAT").write_bytes(b"kvstore-disk 2\n\xff")
    report = folder.verify()
    assert "future version" in only(report).what
    assert (report.rows, report.bytes_read) == (0, 0)


@pytest.mark.parametrize("how", ["absent", "file absent", "empty", "cut", "foreign"])
def test_an_index_that_cannot_be_read_is_damage(folder: Folder, how: str) -> None:
    data = folder.path / "index" / "data.mdb"
    if how == "absent":
        shutil.rmtree(data.parent)
    elif how == "file absent":
        data.unlink()
    elif how == "empty":
        data.write_bytes(b"")
    elif how == "cut":
        os.truncate(data, data.stat().st_size // 2 // PAGE * PAGE)
    else:
        data.write_bytes(b"\xa5" * data.stat().st_size)
    report = folder.verify()
    assert only(report).kind is Kind.INDEX
    assert (report.rows, report.unknown_segments) == (0, 2)


def dict_index(folder: Folder) -> DictIndex:
    index = DictIndex()
    index.commit(add=folder.rows, add_segments=folder.segments)
    return index


def test_damaged_rows_are_counted(folder: Folder) -> None:
    index = dict_index(folder)
    index.damage((3, 0))
    index.damage((4, 1))
    report = verify(str(folder.path), open_index=lambda path: index)
    assert report.damage_counts == {Kind.INDEX_ROW: 2}
    assert (report.rows, report.right, report.unnamed_records) == (8, 8, 2)
    assert report.parents_missing == 1, "block 9's parent has its row, block 1's has none"


def test_one_name_in_two_slots_is_damage(folder: Folder) -> None:
    folder.commit([folder.block(5, segment=4, slot=7)])
    report = folder.verify()
    damage = only(report)
    assert damage.kind is Kind.NAME_TWICE
    assert key(5)[:4].hex() in damage.what


def test_two_rows_of_one_slot_are_damage(folder: Folder) -> None:
    class Twice(DictIndex):
        """An index that gives its rows once more, as LMDB's cannot."""

        def load(self, batch_rows: int = 10_000):  # type: ignore[no-untyped-def]
            yield from super().load(batch_rows)
            yield from super().load(batch_rows)

    index = Twice()
    index.commit(add=folder.rows[:1], add_segments=folder.segments)
    report = verify(str(folder.path), open_index=lambda path: index)
    assert report.damage_counts == {Kind.SLOT_TWICE: 1, Kind.NAME_TWICE: 1}


def test_a_folder_over_its_capacity_is_damage(folder: Folder) -> None:
    total = folder.verify().accounting.total_bytes
    assert folder.verify(capacity_bytes=total).ok
    damage = only(folder.verify(capacity_bytes=total * 9 // 10))
    assert damage.kind is Kind.OVER_CAPACITY


def test_kept_damages_are_bounded_all_are_counted(folder: Folder) -> None:
    folder.edit(3, lambda data: data.__setitem__(slice(None), b"\xff" * len(data)))
    report = verify(str(folder.path), damages_kept_max=3)
    assert len(report.damages) == 3
    assert report.damage_counts == {Kind.RECORD: 8}


def test_a_report_becomes_json(folder: Folder) -> None:
    folder.flip(3, 0)
    fields = folder.verify().to_dict()
    assert fields["ok"] is False
    assert fields["damage_counts"] == {"record": 1}
    assert fields["damages"][0]["where"] == "segments/00000003.seg slot 0"
    assert fields["accounting"]["total_bytes"] > 0


# ---------------------------------------------------------------- who may


def test_a_folder_that_a_daemon_holds_is_refused(folder: Folder) -> None:
    with (folder.path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NotChecked, match="a daemon holds"):
            folder.verify()
    assert folder.verify().ok


def test_no_daemon_starts_while_it_is_checked(folder: Folder) -> None:
    refused: list[bool] = []

    def progress(done: int, total: int) -> None:
        with (folder.path / "lock").open("r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append(True)
            else:
                refused.append(False)

    verify(str(folder.path), progress=progress)
    assert set(refused) == {True}
    with (folder.path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotChecked, match="no folder"):
        verify(str(tmp_path / "absent"))


def test_another_folder_is_damage_all_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    report = verify(str(tmp_path))
    assert report.damage_counts == {Kind.FORMAT: 1, Kind.INDEX: 1, Kind.SEGMENT_MISSING: 1}


def test_many_blocks_in_big_reads(tmp_path: Path) -> None:
    """More slots than one read takes, with holes: each is looked at once."""
    folder = Folder(tmp_path / "disk")
    big = fmt.Segment(7, SLOT_BYTES, 900, TENANT)
    folder.files.create(7, big.file_bytes)
    rows = [folder.block(100 + slot, segment=7, slot=slot) for slot in range(0, 900, 7)]
    folder.commit(rows, [big])
    folder.flip(7, 7 * SLOT_BYTES * 100 + PAGE)
    report = folder.verify()
    assert report.right == 10 + len(rows) - 1
    assert only(report).where == "segments/00000007.seg slot 700"
