"""What an index is to the disk tier, and its rows: sealed one by one, unpacked by thousands.

A row is stored under its (segment, slot), with an xxh3-64 over place, name and content, so that a
right row in the wrong place is damage, too. Pure. The index makes them, the catalog loads them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.tiers.disk import format as disk_format
from kvstore.tiers.disk.format import (
    KEY_BYTES,
    ROW_BYTES,
    ROW_DTYPE,
    ROW_KEY_BYTES,
    Fault,
    Row,
    Segment,
)

Place = tuple[int, int]
"""(segment, slot)."""

_PLACE = struct.Struct(">II")
_CHECKSUM_BYTES = 8
_VALUE_BYTES = ROW_KEY_BYTES + ROW_BYTES + _CHECKSUM_BYTES

STORED_DTYPE = np.dtype(
    [
        ("segment", ">u4"),
        ("slot", ">u4"),
        ("space_id", ">u8"),
        ("key", "u1", (KEY_BYTES,)),
        ("row", ROW_DTYPE),
        ("checksum", f"V{_CHECKSUM_BYTES}"),
    ]
)
"""A stored row: its key (8 bytes), then its value."""

LOAD_ROWS = 5_000

# Measured over fills and churn of several kinds (the unit test repeats some): a row takes 152 bytes
# where slots were filled in order, 260 where pages are half full. LMDB never writes over a page
# that the transaction before could see, so up to two more copies of what a commit touches remain.
_ROW_ALLOWANCE_BYTES = 260
_COPIES = 2
_COPIES_BYTES_MAX = 8 << 20
_FILE_ALLOWANCE_BYTES = 128 << 10
SPARE_BYTES = 256 << 10
"""That an index keeps free for itself, so that rows can be removed on a full disk."""


class IndexRow(NamedTuple):
    """A block's name and where its record is. key: 32 bytes."""

    space_id: int
    key: bytes
    row: Row

    @property
    def place(self) -> Place:
        return self.row.segment, self.row.slot


class RowBatch(NamedTuple):
    """Rows of one step of loading, packed: space_ids u64 [n], keys uint8 [n, 32],
    rows ROW_DTYPE [n].
    """

    space_ids: NDArray[np.uint64]
    keys: NDArray[np.uint8]
    rows: NDArray[np.void]

    def unpack(self) -> list[IndexRow]:
        """The same rows as objects, for verification and tests."""
        unpacked = []
        for space_id, key, packed in zip(self.space_ids, self.keys, self.rows, strict=True):
            row = disk_format.unpack_row(packed.tobytes())
            if isinstance(row, Fault):
                raise ValueError(row.text)
            unpacked.append(IndexRow(int(space_id), key.tobytes(), row))
        return unpacked


class Unusable(Exception):
    """The index cannot be used; the argument says why, in a word that fits a file name."""


class Index(Protocol):
    """Rows by (segment, slot), segments by id, and a few named values."""

    @property
    def dropped_rows(self) -> int:
        """Damaged rows, segments and named values that reading left out so far."""
        ...

    def segments(self) -> list[Segment]:
        """All segments, by id. Unusable, OSError."""
        ...

    def row_count(self) -> int:
        """How many rows there are, damaged ones included. From memory."""
        ...

    def load(self, batch_rows: int = LOAD_ROWS) -> Iterator[RowBatch]:
        """All rows in order of segment and slot, at most `batch_rows` at a time.

        A row that is damaged, or lies in no known slot, is left out, counted, and removed by the
        next commit. Unusable, OSError.
        """
        ...

    def commit(
        self,
        *,
        remove: Iterable[Place] = (),
        add: Iterable[IndexRow] = (),
        remove_segments: Iterable[int] = (),
        add_segments: Iterable[Segment] = (),
        meta: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """One transaction, durable on return: first removals, then additions.

        remove: (segment, slot) of rows that go; one that is not there is no error.
        remove_segments: go with all their rows. add: overwrites what is at its segment and slot.
        meta: named values; None deletes. ValueError for a field that does not fit. OSError (ENOSPC,
        EDQUOT, EROFS, EIO, ...) if it is not known to have taken hold: whether it did shows when
        rows are read again, so the slots of `add` must not be written before a later commit has
        removed their rows.
        """
        ...

    def meta(self) -> dict[str, bytes]:
        """The named values. Unusable, OSError."""
        ...

    def allowance_bytes(self, slots: int) -> int:
        """The most bytes that the index takes with so many slots, and no less than it takes now."""
        ...

    def used_bytes(self) -> int:
        """Bytes that the index takes now."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


def index_bytes(slots: int) -> int:
    """The most bytes that the files of an index of `slots` slots take."""
    rows = _ROW_ALLOWANCE_BYTES * slots
    copies = min(_COPIES * rows, _COPIES_BYTES_MAX)
    return _FILE_ALLOWANCE_BYTES + SPARE_BYTES + rows + copies


# ---------------------------------------------------------------- what is stored


def pack_place(place: Place) -> bytes:
    """A row's key: segments sort by id, slots within. ValueError unless both are u32."""
    try:
        return _PLACE.pack(*place)
    except struct.error as error:
        raise ValueError(f"segment {place[0]}, slot {place[1]}: {error}") from None


def seal(name: bytes, value: bytes) -> bytes:
    """`value`, then the xxh3-64 of name and value."""
    return value + xxhash.xxh3_64_digest(name + value)


def unseal(name: bytes, stored: bytes) -> bytes | None:
    """The value; None if it is damaged."""
    value = stored[:-_CHECKSUM_BYTES]
    return value if xxhash.xxh3_64_digest(name + value) == stored[len(value) :] else None


def pack_row(row: IndexRow) -> tuple[bytes, bytes]:
    """(key, value) as stored. ValueError for a field that does not fit."""
    name = pack_place(row.place)
    try:
        value = disk_format.pack_row_key(row.space_id, row.key) + disk_format.pack_row(row.row)
    except struct.error as error:
        raise ValueError(f"row at segment {row.row.segment}: {error}") from None
    return name, seal(name, value)


def unpack_rows(
    stored: Sequence[tuple[bytes, bytes]], slots: Mapping[int, int]
) -> tuple[RowBatch, list[bytes]]:
    """Rows of (key, value) pairs, and the keys of those that are damaged or lie in no slot of
    `slots` (segment id to number of slots).
    """
    digest, covered = xxhash.xxh3_64_digest, _VALUE_BYTES - _CHECKSUM_BYTES
    whole: list[bytes] = []
    bad: list[bytes] = []
    for name, value in stored:
        joined = name + value
        if (
            len(name) == _PLACE.size
            and len(value) == _VALUE_BYTES
            and digest(joined[:-_CHECKSUM_BYTES]) == value[covered:]
        ):
            whole.append(joined)
        else:
            bad.append(name)
    packed = np.frombuffer(b"".join(whole), STORED_DTYPE)
    rows = packed["row"]
    segments, inverse = np.unique(packed["segment"], return_inverse=True)
    limits = np.array([slots.get(int(segment), 0) for segment in segments], np.int64)
    fits = (
        (rows["segment"] == packed["segment"])
        & (rows["slot"] == packed["slot"])
        & (rows["slot"] < limits[inverse.reshape(-1)])
        & (rows["format"] == disk_format.VERSION)
        & (rows["zero"] == 0)
    )
    bad += [whole[index][: _PLACE.size] for index in np.flatnonzero(~fits)]
    if not fits.all():
        packed = packed[fits]
    batch = RowBatch(packed["space_id"].astype(np.uint64), packed["key"], packed["row"])
    return batch, bad
