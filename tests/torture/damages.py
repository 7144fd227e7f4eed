"""Damage to the files of a disk tier and its ledger, of every kind, over one folder at rest.

`make_folder` lives a short life in a folder and reads it back as a `Rest`: its files, where each
block's record is, and an earlier state of the same files. `damages` changes some of its bytes, and
says which blocks that must cost.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import lmdb
import xxhash

from kvstore.ledger import LmdbLedger
from kvstore.tiers.base import SavedBlock
from kvstore.tiers.disk.folder import segment_name
from kvstore.tiers.disk.format import HEADER_BYTES, Row, Segment, pack_segment_key, record_bytes
from kvstore.tiers.disk.index import LmdbIndex
from kvstore.tiers.disk.opening import DiskFolder
from kvstore.tiers.disk.rows import IndexRow, pack_place, pack_row, seal
from tests.torture.disk_history import Name
from tests.torture.disk_life import content, length_of, pass_time, room, start

CAPACITY_BYTES = room(48, 16)
PAGE = 4_096
STEP = 512
"""Files are cut at every so many bytes."""
DATA, LOCK_MDB, SPARE = "disk/index/data.mdb", "disk/index/lock.mdb", "disk/index/spare"
FORMAT, LOCK = "disk/FORMAT", "disk/lock"
LEDGER = "ledger/ledger.mdb"


@dataclass
class Rest:
    """A folder at rest. files: content by path; older: that of the same files some commits before.
    rows: of the blocks that are there; gone: names that were forgotten, whose records are not
    written over yet. ledger: rows.
    """

    files: dict[str, bytes]
    older: dict[str, bytes]
    rows: dict[Name, Row]
    segments: dict[int, Segment]
    versions: dict[Name, int]
    gone: list[Name]
    ledger: list[tuple[str, bytes, bytes]]

    def place(self, name: Name) -> tuple[str, int, int]:
        """File, offset and bytes of a block's record."""
        row = self.rows[name]
        size = self.segments[row.segment].slot_bytes
        return segment_path(row.segment), row.slot * size, size

    def at(self, path: str, offset: int) -> Name | None:
        """The block of which this byte is: of its header page, or of its payload."""
        for name, row in self.rows.items():
            where, begin, _ = self.place(name)
            if where == path and begin <= offset < begin + HEADER_BYTES + row.length:
                return name
        return None


class Damage(NamedTuple):
    """files: content that is changed, None: removed. lost: the blocks that it must cost, all
    counted, and no others; None: that is not known, as any number of rows may be hit.
    """

    what: str
    files: dict[str, bytes | None]
    lost: frozenset[Name] | None = None


def segment_path(segment: int) -> str:
    return f"disk/segments/{segment_name(segment)}"


# ---------------------------------------------------------------- the folder


def make_folder(folder: Path) -> Rest:
    """Lives in `folder`, which is there."""
    disk = str(folder / "disk")
    tier = start(DiskFolder(disk), CAPACITY_BYTES)
    names, versions = _names(48), dict[Name, int]()

    def save(chosen: list[Name], version: int) -> None:
        for at in range(0, len(chosen), 6):
            part = chosen[at : at + 6]
            batch = [
                SavedBlock(*one, part[depth - 1][1] if depth else b"", depth, content(one, version))
                for depth, one in enumerate(part)
            ]
            assert all(isinstance(saved, bytes) for saved in tier.save_batch(batch))
        versions.update(dict.fromkeys(chosen, version))

    save(names[:40], 1)
    older = read_files(folder)
    # Slots are used again, by the same names and by others; some records are nobody's any more.
    tier.forget(names[8:28])
    save(names[14:22], 2)
    save(names[40:48], 2)
    tier.forget(gone := names[:4])
    pass_time(tier)
    tier.close()
    for name in (*names[8:14], *names[22:28], *gone):
        del versions[name]
    ledger = LmdbLedger(str(folder / "ledger"))
    values = [("space", b"%d" % n, hashlib.sha512(b"%d" % n).digest() * 3) for n in range(24)]
    ledger.put_many(values)
    ledger.put_many([("space", b"7", None), ("epoch", b"model", b"9"), ("space", b"8", b"new")])
    kept = ledger.rows()
    ledger.close()
    index = LmdbIndex(f"{disk}/index")
    rows = {(row.space_id, row.key): row.row for batch in index.load() for row in batch.unpack()}
    segments = {segment.segment: segment for segment in index.segments()}
    index.close()
    assert rows.keys() == versions.keys(), "all of it is there"
    return Rest(read_files(folder), older, rows, segments, versions, gone, kept)


def _names(count: int) -> list[Name]:
    """In four spaces of two tenants, of two sizes."""
    return [(1 + n // 6 % 4, hashlib.sha256(b"at rest/%d" % n).digest()) for n in range(count)]


def read_files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def write_files(folder: Path, files: dict[str, bytes | None]) -> None:
    """Makes `folder`, which is not there yet, and these files below it."""
    folder.mkdir(mode=0o700)
    for path, data in files.items():
        if data is not None:
            target = folder / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.write_bytes(data)


# ---------------------------------------------------------------- damage


@dataclass
class _Kinds:
    """Makes damages; each method gives one of its kind, by chance, or all that there are."""

    rest: Rest
    chance: random.Random
    _places: list[str] = field(default_factory=list)

    # ---- records

    def record_flip(self) -> Damage:
        """Bits of a record's header or payload."""
        name = self.chance.choice(list(self.rest.rows))
        path, begin, _ = self.rest.place(name)
        within = HEADER_BYTES if self.chance.random() < 0.5 else self.rest.rows[name].length
        offset = begin + (0 if within == HEADER_BYTES else HEADER_BYTES)
        offset += self.chance.randrange(within)
        return self._segment("flipped record", path, self._flipped(path, offset), {name})

    def segment_flip(self) -> Damage:
        """A bit anywhere in a segment."""
        path = self._segment_file()
        offset = self.chance.randrange(len(self.rest.files[path]))
        hit = self.rest.at(path, offset)
        lost = set() if hit is None else {hit}
        return self._segment("flipped segment", path, self._flipped(path, offset), lost)

    def swapped(self) -> Damage:
        """Two records of a size in each other's place."""
        one, two = self._two_alike()
        files = dict(self.rest.files)
        records = [self._record(files, name) for name in (one, two)]
        self._put(files, one, records[1])
        self._put(files, two, records[0])
        return self._changed("swapped records", files, {one, two})

    def doubled(self) -> Damage:
        """A record in the place of another, too."""
        one, two = self._two_alike()
        files = dict(self.rest.files)
        self._put(files, two, self._record(files, one))
        return self._changed("record in another's place", files, {two})

    def stale(self) -> Damage:
        """What was in the slot before: another block, or an older write of this one."""
        while True:
            name = self.chance.choice(list(self.rest.rows))
            path, begin, size = self.rest.place(name)
            before = self.rest.older.get(path, b"")[begin : begin + size]
            if len(before) == size and before != self._record(self.rest.files, name):
                break
        files = dict(self.rest.files)
        self._put(files, name, before)
        return self._changed("stale record", files, {name})

    def stale_payload(self) -> Damage:
        """The header is right, the payload that of an older write of the same block."""
        again = [name for name, version in self.rest.versions.items() if version == 2]
        name = self.chance.choice(again)
        older = content(name, 1).tobytes()
        path, begin, _ = self.rest.place(name)
        data = bytearray(self.rest.files[path])
        data[begin + HEADER_BYTES : begin + HEADER_BYTES + len(older)] = older
        return self._segment("stale payload", path, bytes(data), {name})

    def future_record(self) -> Damage:
        """A record of the next version, whole."""
        name = self.chance.choice(list(self.rest.rows))
        path, begin, _ = self.rest.place(name)
        data = bytearray(self.rest.files[path])
        data[begin + 8 : begin + 12] = struct.pack("<I", 2)
        checked = bytes(data[begin : begin + HEADER_BYTES - 8])
        digest = struct.pack("<Q", xxhash.xxh3_64_intdigest(checked))
        data[begin + HEADER_BYTES - 8 : begin + HEADER_BYTES] = digest
        return self._segment("record of the future", path, bytes(data), {name})

    def zeroed_page(self) -> Damage:
        """A page of a segment."""
        path = self._segment_file()
        data = bytearray(self.rest.files[path])
        page = self.chance.randrange(len(data) // PAGE) * PAGE
        was = bytes(data[page : page + PAGE])
        data[page : page + PAGE] = bytes(PAGE)
        hit = self.rest.at(path, page)
        lost = set() if hit is None or not any(was) else {hit}
        return self._segment("zeroed page of a segment", path, bytes(data), lost)

    # ---- segments

    def cut_segments(self) -> Iterator[Damage]:
        """Two segments of different sizes, at every 512 bytes."""
        sizes = {len(self.rest.files[path]): path for path in self._segment_files()}
        for path in sorted(sizes.values())[:2]:
            data = self.rest.files[path]
            for size in range(0, len(data), STEP):
                lost = {
                    name
                    for name in self.rest.rows
                    if self.rest.place(name)[0] == path and sum(self.rest.place(name)[1:]) > size
                }
                yield self._segment(f"segment cut at {size}", path, data[:size], lost)

    def whole_segment(self) -> Damage:
        """A segment that is gone, foreign, another one's, or longer than it was."""
        path = self._segment_file()
        here = {name for name in self.rest.rows if self.rest.place(name)[0] == path}
        data = self.rest.files[path]
        kind = self.chance.randrange(4)
        if kind == 0:
            return Damage("segment removed", {path: None}, frozenset(here))
        if kind == 1:
            foreign = self.chance.randbytes(len(data))
            return self._segment("foreign segment", path, foreign, here)
        if kind == 2:
            alike = [p for p in self._segment_files() if p != path]
            other = self.rest.files[self.chance.choice(alike)]
            return self._segment("segment of another id", path, other, here)
        return self._segment("segment that grew", path, data + bytes(PAGE), set())

    # ---- index

    def index_flip(self) -> Damage:
        """A few bytes of the index."""
        data = bytearray(self.rest.files[DATA])
        used = len(data)
        if self.chance.random() < 0.3:  # what LMDB itself goes by: roots, headers, offsets
            page = self.chance.randrange(used // PAGE)
            offset = page * PAGE + self.chance.randrange(160 if page < 2 else 96)
        else:
            offset = self.chance.randrange(used)
        for at in range(offset, min(offset + self.chance.choice((1, 1, 1, 2, 8)), len(data))):
            data[at] ^= 1 << self.chance.randrange(8)
        return Damage(f"index flipped at {offset}", {DATA: bytes(data)})

    def index_page(self) -> Damage:
        """A page of the index: zeroed, foreign, another one's, or as it was before."""
        data = bytearray(self.rest.files[DATA])
        pages = len(data) // PAGE
        page, kind = self.chance.randrange(pages) * PAGE, self.chance.randrange(4)
        older = self.rest.older[DATA][page : page + PAGE]
        other = self.chance.randrange(pages) * PAGE
        new = (bytes(PAGE), self.chance.randbytes(PAGE), bytes(data[other : other + PAGE]), older)
        if len(new[kind]) == PAGE:
            data[page : page + PAGE] = new[kind]
        word = ("zeroed", "foreign", "another one's", "stale")[kind]
        return Damage(f"page {page // PAGE} of the index {word}", {DATA: bytes(data)})

    def cut_index(self) -> Iterator[Damage]:
        """At every 512 bytes."""
        data = self.rest.files[DATA]
        for size in range(0, len(data), STEP):
            yield Damage(f"index cut at {size}", {DATA: data[:size]})

    def future_rows(self, folder: Path) -> Iterator[Damage]:
        """Rows, segments and the index itself of the next version, with right checksums."""
        for _ in range(4):
            name = self.chance.choice(list(self.rest.rows))
            stored = pack_row(IndexRow(*name, self.rest.rows[name]))[1][:-8]
            place = pack_place((self.rest.rows[name].segment, self.rest.rows[name].slot))
            future = stored[:40] + struct.pack("<H", 2) + stored[42:]
            data = self._edited(folder, b"row", place, seal(place, future))
            yield Damage("row of the future", {DATA: data}, frozenset({name}))
        segment = self.chance.choice(list(self.rest.segments))
        number = pack_segment_key(segment)
        lost = {name for name, row in self.rest.rows.items() if row.segment == segment}
        future = struct.pack("<HHIQ32s", 2, 0, 4, 8192, bytes(32))
        data = self._edited(folder, b"seg", number, seal(number, future))
        yield Damage("segment row of the future", {DATA: data}, frozenset(lost))
        stored = seal(b"format", struct.pack("<I", 2))
        data = self._edited(folder, b"meta", b"format", stored)
        yield Damage("index of the future", {DATA: data})

    # ---- small files

    def small_files(self) -> Iterator[Damage]:
        """FORMAT and what locks: cut, flipped, foreign, of the future, gone."""
        text = self.rest.files[FORMAT]
        for size in range(len(text)):
            yield Damage(f"FORMAT cut at {size}", {FORMAT: text[:size]})
        for offset in range(len(text)):
            flipped = bytearray(text)
            flipped[offset] ^= 1 << self.chance.randrange(8)
            yield Damage(f"FORMAT flipped at {offset}", {FORMAT: bytes(flipped)})
        for other in (b"something else\n", text.replace(b"disk 1", b"disk 2"), None, bytes(9_000)):
            yield Damage("FORMAT of something else", {FORMAT: other})
        nothing: frozenset[Name] = frozenset()
        for path in (LOCK, LOCK_MDB, SPARE, "ledger/ledger.lock"):
            for other in (b"", None, b"foreign" * 99, self.chance.randbytes(8_192)):
                yield Damage(f"{path} of something else", {path: other}, nothing)
        for path in (DATA, LEDGER):
            for other in (b"", None, b"foreign\n" * 2_048, self.chance.randbytes(40_960)):
                yield Damage(f"{path} of something else", {path: other})
        yield Damage("files that nobody named", {"disk/segments/0000ffff.seg": bytes(PAGE),
                     "disk/segments/notes.txt": b"mine"}, nothing)  # fmt: skip

    # ---- ledger

    def ledger_flip(self) -> Damage:
        """A few bytes of the ledger."""
        data = bytearray(self.rest.files[LEDGER])
        page = self.chance.randrange(len(data) // PAGE)
        near = self.chance.random() < 0.4
        offset = page * PAGE + self.chance.randrange((160 if page < 2 else 96) if near else PAGE)
        for at in range(offset, min(offset + self.chance.choice((1, 1, 2, 8)), len(data))):
            data[at] ^= 1 << self.chance.randrange(8)
        return Damage(f"ledger flipped at {offset}", {LEDGER: bytes(data)}, frozenset())

    def ledger_pages(self) -> Iterator[Damage]:
        """Each page zeroed, and the file cut at every 512 bytes."""
        data = self.rest.files[LEDGER]
        for page in range(0, len(data), PAGE):
            zeroed = data[:page] + bytes(PAGE) + data[page + PAGE :]
            yield Damage(f"page {page // PAGE} of the ledger zeroed", {LEDGER: zeroed}, frozenset())
        for size in range(0, len(data), STEP):
            yield Damage(f"ledger cut at {size}", {LEDGER: data[:size]}, frozenset())

    # ---- parts

    def _segment_files(self) -> list[str]:
        return sorted(segment_path(segment) for segment in self.rest.segments)

    def _segment_file(self) -> str:
        return self.chance.choice(self._segment_files())

    def _two_alike(self) -> tuple[Name, Name]:
        one = self.chance.choice(list(self.rest.rows))
        size = record_bytes(length_of(one[1]))
        alike = [n for n in self.rest.rows if n != one and record_bytes(length_of(n[1])) == size]
        return one, self.chance.choice(alike)

    def _record(self, files: dict[str, bytes], name: Name) -> bytes:
        path, begin, size = self.rest.place(name)
        return files[path][begin : begin + size]

    def _put(self, files: dict[str, bytes], name: Name, record: bytes) -> None:
        path, begin, size = self.rest.place(name)
        files[path] = files[path][:begin] + record + files[path][begin + size :]

    def _flipped(self, path: str, offset: int) -> bytes:
        data = bytearray(self.rest.files[path])
        data[offset] ^= 1 << self.chance.randrange(8)
        return bytes(data)

    def _segment(self, what: str, path: str, data: bytes, lost: set[Name]) -> Damage:
        return Damage(f"{what} {path[-12:]}", {path: data}, frozenset(lost))

    def _changed(self, what: str, files: dict[str, bytes], lost: set[Name]) -> Damage:
        changed: dict[str, bytes | None] = {
            path: data for path, data in files.items() if data != self.rest.files[path]
        }
        return Damage(what, changed, frozenset(lost))

    def _edited(self, folder: Path, table: bytes, name: bytes, value: bytes) -> bytes:
        """The index with one more commit, of this value."""
        (folder / "data.mdb").write_bytes(self.rest.files[DATA])
        with (
            lmdb.open(str(folder), max_dbs=3, map_size=16 << 20, lock=False) as env,
            env.begin(write=True) as transaction,
        ):
            transaction.put(name, value, db=env.open_db(table, txn=transaction))
        return (folder / "data.mdb").read_bytes()


def damages(rest: Rest, chance: random.Random, scratch: Path, count: int) -> Iterator[Damage]:
    """About `count` of them, of all kinds; scratch: an empty folder."""
    kinds = _Kinds(rest, chance)
    by_chance: dict[Callable[[], Damage], int] = {
        kinds.record_flip: 12, kinds.segment_flip: 8, kinds.swapped: 3, kinds.doubled: 3,
        kinds.stale: 4, kinds.stale_payload: 1, kinds.future_record: 1, kinds.zeroed_page: 4,
        kinds.whole_segment: 3, kinds.index_flip: 36, kinds.index_page: 8, kinds.ledger_flip: 16,
    }  # fmt: skip
    fixed = [
        *kinds.cut_segments(),
        *kinds.cut_index(),
        *kinds.future_rows(scratch),
        *kinds.small_files(),
        *kinds.ledger_pages(),
    ]
    chance.shuffle(fixed)
    # All of these at full scale, and about as large a part of them at a smaller one.
    del fixed[count // 3 :]
    yield from fixed
    makers = list(by_chance)
    for maker in chance.choices(makers, list(by_chance.values()), k=count - len(fixed)):
        yield maker()
