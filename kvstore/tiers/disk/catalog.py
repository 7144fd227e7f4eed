"""Which blocks are on disk, in memory: the rows that answer every look-up.

Packed numpy columns and a hash table of row numbers, 85 to 94 bytes a block; no Python object a
block. A row number names a block from `put` until `remove`, and is used again then.

Locking. Changes come from one thread at a time, under the caller's lock (the one that guards the
ring). `find` needs none: it runs on the event loop's thread at any moment and answers from what is
there then. While a change is under way it may miss a block or name one that just went, so its
answer is advice; where a block is, `get` says under the lock, and the record itself proves whose it
is. Whatever could take long (growing, sweeping) is either done beside the arrays in use or in
bounded steps.
"""

from __future__ import annotations

import array
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.format import CHECKSUM_BYTES, KEY_BYTES, ROW_DTYPE, Row
from kvstore.tiers.disk.hashtable import NAME_WORDS, ROWS_MAX, Hash, HashTable, Names, zeros
from kvstore.tiers.disk.rows import IndexRow, RowBatch

NO_ROW = -1
LENGTH_MAX = (1 << 32) - 1
SPACE_MAX = (1 << 64) - 2

_NO_SPACE = np.uint64(SPACE_MAX + 1)
_CHUNK_ROWS = 1 << 16
_SECRET_BYTES = 16 * NAME_WORDS
_GROWTH = 1.5
_ROWS_MIN = 1_024
_SPACE = struct.Struct("=Q")

RowNumbers = NDArray[np.int64]


class Entry(NamedTuple):
    """What is known of a block: enough to read its record and to verify it. The parent is in the
    record's header.
    """

    row: int
    segment: int
    slot: int
    generation: int
    length: int
    checksum: bytes
    depth: int

    def to_row(self, parent: bytes) -> Row:
        """As an index row, to compare a header with; parent: what the header says."""
        return Row(
            self.segment, self.slot, self.generation, self.length, self.checksum, parent, self.depth
        )


class _Columns:
    """A value a row number. names: u64 [n, 5]; places: u32 [n, 2]."""

    __slots__ = ("checksums", "depths", "generations", "lengths", "names", "places")

    def __init__(self, size: int) -> None:
        """Room for `size` rows. Untouched room takes no memory."""
        self.names: Names = zeros((size, NAME_WORDS), np.uint64)
        self.places: NDArray[np.uint32] = zeros((size, 2), np.uint32)
        self.generations: NDArray[np.uint64] = zeros(size, np.uint64)
        self.lengths: NDArray[np.uint32] = zeros(size, np.uint32)
        self.depths: NDArray[np.uint32] = zeros(size, np.uint32)
        self.checksums: NDArray[np.void] = zeros(size, f"V{CHECKSUM_BYTES}")

    def __len__(self) -> int:
        return len(self.names)

    def grow(self, size: int) -> None:
        """Room for `size` rows. One column after the other, so that only one is there twice; the
        names last, whose length is the columns'.
        """
        for name in sorted(self.__slots__, key="names".__eq__):
            column = getattr(self, name)
            larger = zeros((size, *column.shape[1:]), column.dtype)
            larger[: len(column)] = column
            setattr(self, name, larger)


class _View(NamedTuple):
    """What `find` reads; replaced as a whole when either array is."""

    names: Names
    table: HashTable


class Catalog:
    """Blocks by (space id, key)."""

    def __init__(self, expected_rows: int = 0, *, secret: bytes | None = None) -> None:
        """expected_rows: room made at once; it grows as needed. secret: 80 random bytes that keep
        clients from making keys collide; drawn from the system if not given.
        """
        self._hash = Hash(os.urandom(_SECRET_BYTES) if secret is None else secret)
        self._columns = _Columns(max(int(expected_rows * _GROWTH), _ROWS_MIN))
        self._view = _View(self._columns.names, HashTable(expected_rows))
        self._rows_used = 0
        self._free = array.array("I")
        self._blocks: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._swept_to = 0

    def __len__(self) -> int:
        """Blocks in open spaces and in dropped ones that were not swept yet."""
        return self._view.table.used

    # ---------------------------------------------------------------- reading

    def find(self, space_id: int, keys: Sequence[bytes]) -> RowNumbers:
        """i64 [n]: row number of each 32-byte key, NO_ROW where it is not known. ValueError for a
        key of another length. Without a lock; see above.
        """
        if space_id in self._dropped or not keys:
            return np.full(len(keys), NO_ROW, np.int64)
        names = _names(np.uint64(space_id), _join(keys))
        view = self._view
        return view.table.find(names, self._hash(names), view.names)

    def find_batch(self, space_ids: NDArray[np.uint64], keys: NDArray[np.uint8]) -> RowNumbers:
        """The same for packed names: u64 [n] and uint8 [n, 32]."""
        names = _names(space_ids, keys)
        found = self._view.table.find(names, self._hash(names), self._view.names)
        found[self._of_dropped(names)] = NO_ROW
        return found

    def get(self, space_id: int, key: bytes) -> Entry | None:
        """Where the block is. ValueError for a key of another length."""
        # As `entries` of what `find` gives, in a sixth of the time: every read asks.
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key is not {KEY_BYTES} bytes long")
        if space_id in self._dropped:
            return None
        view, columns = self._view, self._columns
        name = _SPACE.pack(space_id) + key
        row = view.table.find_one(name, self._hash.one(name), view.names)
        if row == NO_ROW:
            return None
        segment, slot = columns.places[row].tolist()
        return Entry(
            row,
            segment,
            slot,
            int(columns.generations[row]),
            int(columns.lengths[row]),
            columns.checksums[row].tobytes(),
            int(columns.depths[row]),
        )

    def entries(self, rows: Sequence[int] | RowNumbers) -> list[Entry]:
        """What is known of each row number. KeyError if one names no block."""
        chosen = self._live(rows)
        columns = self._columns
        return [
            Entry(row, segment, slot, generation, length, checksum, depth)
            for row, (segment, slot), generation, length, checksum, depth in zip(
                chosen.tolist(),
                columns.places[chosen].tolist(),
                columns.generations[chosen].tolist(),
                columns.lengths[chosen].tolist(),
                columns.checksums[chosen].tolist(),
                columns.depths[chosen].tolist(),
                strict=True,
            )
        ]

    def names(self, rows: Sequence[int] | RowNumbers) -> list[tuple[int, bytes]]:
        """(space id, key) of each. KeyError if one names no block."""
        names = self._columns.names[self._live(rows)]
        keys = names[:, 1:].tobytes()
        return [
            (space, keys[at : at + KEY_BYTES])
            for space, at in zip(names[:, 0].tolist(), range(0, len(keys), KEY_BYTES), strict=True)
        ]

    def places(
        self, rows: Sequence[int] | RowNumbers
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """(segments, slots), u32 [n] each. KeyError if one names no block."""
        places = self._columns.places[self._live(rows)]
        return places[:, 0], places[:, 1]

    def depths(self, rows: Sequence[int] | RowNumbers) -> NDArray[np.uint32]:
        """u32 [n]: index of each block in its prompt. KeyError if one names no block."""
        return self._columns.depths[self._live(rows)]

    def space_blocks(self, space_id: int) -> int:
        """How many blocks of the space are known; of a dropped one, how many are to be swept."""
        return self._blocks.get(space_id, 0)

    # ---------------------------------------------------------------- changing

    def put(self, space_id: int, key: bytes, row: Row) -> int:
        """Makes one block known; as `put_many`."""
        return self.put_many([IndexRow(space_id, key, row)])[0]

    def put_many(self, rows: Sequence[IndexRow]) -> list[int]:
        """Makes blocks known and returns their row numbers. ValueError, and nothing is put, if a
        name is known already (remove it first, so that its slot is released), is twice among
        `rows`, its space was dropped, or a field does not fit (length is below 4 GiB).
        """
        packed = np.zeros(len(rows), ROW_DTYPE)
        for index, (space_id, _, row) in enumerate(rows):
            if not (0 <= space_id <= SPACE_MAX and 0 < row.length <= LENGTH_MAX):
                raise ValueError(f"space {space_id}, length {row.length}: out of range")
            fields = (row.segment, row.slot, row.generation, row.length, row.checksum)
            packed[index] = (0, 0, row.depth, *fields, b"")
        spaces = np.array([row.space_id for row in rows], np.uint64)
        names = _names(spaces, _join([row.key for row in rows]))
        hashed = self._hash(names)
        if not self._new(names, hashed).all():
            raise ValueError("a block is known already, or its space was dropped")
        entered: list[int] = self._enter(names, hashed, packed).tolist()
        return entered

    def put_batch(self, batch: RowBatch) -> RowNumbers:
        """i64 [n]: row numbers of loaded rows, NO_ROW for one whose name is known (the first one
        stays; both were committed for that name), whose space was dropped, or that does not fit.
        """
        names = _names(batch.space_ids, batch.keys)
        hashed = self._hash(names)
        lengths = batch.rows["length"]
        new = self._new(names, hashed) & (lengths > 0) & (lengths <= LENGTH_MAX)
        new &= batch.space_ids <= SPACE_MAX
        rows = np.full(len(names), NO_ROW, np.int64)
        rows[new] = self._enter(names[new], hashed[new], batch.rows[new])
        return rows

    def remove(self, rows: Sequence[int] | RowNumbers) -> None:
        """Forgets blocks by row number. KeyError, and none is removed, if one names no block or is
        there twice.
        """
        chosen = self._live(rows)
        if len(np.unique(chosen)) != len(chosen):
            raise KeyError("a row number is there twice")
        names = self._columns.names[chosen]
        self._view.table.remove(chosen, self._hash(names))
        self._columns.names[chosen] = _NO_SPACE
        self._free.frombytes(chosen.astype(np.uint32).tobytes())
        self._count(names, -1)

    def drop_space(self, space_id: int) -> None:
        """From now on `find` and `get` know none of its blocks and none can be put. Takes no time;
        the rows stay until they are swept.
        """
        self._dropped.add(space_id)
        self._swept_to = 0

    def sweep(self, rows_max: int) -> RowNumbers:
        """Up to `rows_max` row numbers of dropped spaces, to take out of ring and index and to
        `remove`. It looks at a bounded number of rows, so that few or none are found before
        `swept`.
        """
        if self._swept_to >= self._rows_used:
            self._swept_to = 0
        start, end = self._swept_to, min(self._swept_to + _CHUNK_ROWS, self._rows_used)
        found = np.flatnonzero(self._of_dropped(self._columns.names[start:end]))[:rows_max]
        self._swept_to = start + int(found[-1]) + 1 if len(found) == rows_max else end
        return found + start

    @property
    def swept(self) -> bool:
        """Whether no row of a dropped space is left."""
        return not any(self._blocks.get(space_id, 0) for space_id in self._dropped)

    def forget_dropped(self) -> None:
        """Stops remembering dropped spaces without rows: call it when nothing of them can come any
        more, neither by loading nor by a save under way.
        """
        self._dropped = {space for space in self._dropped if self._blocks.get(space, 0)}

    # ---------------------------------------------------------------- parts

    def _live(self, rows: Sequence[int] | RowNumbers) -> RowNumbers:
        chosen = np.asarray(rows, np.int64)
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < self._rows_used):
            raise KeyError("no row has that number")
        if (self._columns.names[chosen, 0] == _NO_SPACE).any():
            raise KeyError("a row number names no block")
        return chosen

    def _of_dropped(self, names: Names) -> NDArray[np.bool_]:
        if not self._dropped:
            return np.zeros(len(names), np.bool_)
        among: NDArray[np.bool_] = np.isin(names[:, 0], np.array([*self._dropped], np.uint64))
        return among

    def _new(self, names: Names, hashed: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which can be entered: unknown, of an open space, and the first of its name."""
        known = self._view.table.find(names, hashed, self._view.names)
        new: NDArray[np.bool_] = known == NO_ROW
        new &= ~self._of_dropped(names)
        if len(np.unique(hashed)) != len(hashed):
            first = np.zeros(len(names), np.bool_)
            first[np.unique(names, axis=0, return_index=True)[1]] = True
            new &= first
        return new

    def _enter(
        self, names: Names, hashed: NDArray[np.uint64], packed: NDArray[np.void]
    ) -> RowNumbers:
        rows = self._take_numbers(len(names))
        columns = self._columns
        columns.names[rows] = names
        columns.places[rows, 0] = packed["segment"]
        columns.places[rows, 1] = packed["slot"]
        columns.generations[rows] = packed["generation"]
        columns.lengths[rows] = packed["length"]
        columns.depths[rows] = packed["depth"]
        columns.checksums[rows] = packed["checksum"]
        # Entered last: from here on `find` answers with them.
        self._view.table.add(rows, hashed)
        self._count(names, 1)
        return rows

    def _take_numbers(self, count: int) -> RowNumbers:
        reused = min(count, len(self._free))
        end = self._rows_used + count - reused
        if end > ROWS_MAX:
            raise ValueError(f"more than {ROWS_MAX} blocks")
        if end > len(self._columns):
            self._columns.grow(max(end, int(len(self._columns) * _GROWTH)))
        table = self._view.table
        if not table.has_room(count):
            table = self._rebuilt(table.used + count)
        self._view = _View(self._columns.names, table)
        rows = np.arange(self._rows_used - reused, end)
        if reused:
            rows[:reused] = self._free[-reused:]
            del self._free[-reused:]
        self._rows_used = end
        return rows

    def _rebuilt(self, rows: int) -> HashTable:
        """Built beside the one in use, in steps that let other threads run."""
        table, names = HashTable(rows), self._columns.names
        for start in range(0, self._rows_used, _CHUNK_ROWS):
            end = min(start + _CHUNK_ROWS, self._rows_used)
            live = np.flatnonzero(names[start:end, 0] != _NO_SPACE) + start
            table.add(live, self._hash(names[live]))
        return table

    def _count(self, names: Names, sign: int) -> None:
        spaces, counts = np.unique(names[:, 0], return_counts=True)
        for space, count in zip(spaces.tolist(), counts.tolist(), strict=True):
            blocks = self._blocks.get(space, 0) + sign * count
            if blocks:
                self._blocks[space] = blocks
            else:
                self._blocks.pop(space, None)


def _join(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    joined = np.frombuffer(b"".join(keys), np.uint8)
    if keys and set(map(len, keys)) != {KEY_BYTES}:
        raise ValueError(f"a key is not {KEY_BYTES} bytes long")
    return joined.reshape(-1, KEY_BYTES)


def _names(spaces: NDArray[np.uint64] | np.uint64, keys: NDArray[np.uint8]) -> Names:
    names = np.empty((len(keys), NAME_WORDS), np.uint64)
    names[:, 0] = spaces
    names[:, 1:] = np.ascontiguousarray(keys).view(np.uint64)
    return names
