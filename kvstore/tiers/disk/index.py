"""The durable rows of the disk tier: which record is in which slot of which segment.

Promises. What `commit` was given is on the device when it returns, all of it or none. A row is
given back exactly as it was committed or not at all: each carries a checksum of its name and
content, since LMDB has none, and a damaged one is dropped and counted. A file that cannot be
trusted is refused with `Unusable`, which says why in a word that fits a file name. Truncation is
found before a page is touched that is not there.

Rows are stored under (segment, slot), not under their name: a batch's slots are neighbours, so a
commit writes few pages and the file stays small, no two rows can claim one slot, and a segment goes
with all its rows. Two rows of one name cannot come from a writer that removes the older one in the
same commit; whoever loads them keeps the one of the higher generation.

Everything here may wait for the device: call it from the writer's thread, never from the event
loop. One caller at a time; `load` may be iterated in another thread than `commit` is called from,
as long as the two do not run at the same time. A forked child must not use an open index: it
refuses (OSError EBADF) in any process but the one that opened it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.format import Row, Segment

LOAD_ROWS = 10_000


class Unusable(Exception):
    """The index cannot be used; the argument says why, in words that go into a file name."""


class IndexRow(NamedTuple):
    """A block's name and where its record is. key: 32 bytes."""

    space_id: int
    key: bytes
    row: Row


class RowBatch(NamedTuple):
    """Rows of one step of loading, packed: space_ids u64 [n], keys uint8 [n, 32],
    rows ROW_DTYPE [n].
    """

    space_ids: NDArray[np.uint64]
    keys: NDArray[np.uint8]
    rows: NDArray[np.void]

    def unpack(self) -> list[IndexRow]:
        """The same rows as objects, for verification and tests."""
        raise NotImplementedError


class Index(Protocol):
    """Rows by (segment, slot), segments by id, and a few named values."""

    @property
    def dropped_rows(self) -> int:
        """Damaged rows and segments that `load` and `segments` left out so far."""
        ...

    def segments(self) -> list[Segment]:
        """All segments, by id. OSError by the device."""
        ...

    def row_count(self) -> int:
        """How many rows there are, damaged ones included. From memory."""
        ...

    def load(self, batch_rows: int = LOAD_ROWS) -> Iterator[RowBatch]:
        """All rows in order of segment and slot, at most `batch_rows` at a time. A row that is
        damaged, or lies in no known segment, is left out and counted. Unusable, OSError.
        """
        ...

    def commit(
        self,
        *,
        remove: Iterable[tuple[int, int]] = (),
        add: Iterable[IndexRow] = (),
        remove_segments: Iterable[int] = (),
        add_segments: Iterable[Segment] = (),
        meta: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """One transaction, durable on return: first removals, then additions.

        remove: (segment, slot) of rows that go; one that is not there is no error.
        remove_segments: go with all their rows. add: overwrites what is at its segment and slot.
        meta: named values; None deletes. OSError (ENOSPC, EDQUOT, EROFS, EIO) if nothing was
        written; the next call may succeed. ValueError for a field that does not fit.
        """
        ...

    def meta(self) -> dict[str, bytes]:
        """The named values; a damaged one is left out and counted."""
        ...

    def allowance_bytes(self, rows: int) -> int:
        """The most bytes that the index's files take with so many slots in use; for the
        capacity's sum.
        """
        ...

    def used_bytes(self) -> int:
        """Bytes that the index's files take now."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


def index_bytes(rows: int) -> int:
    """The most bytes that the files of an LmdbIndex take with `rows` slots."""
    raise NotImplementedError


class LmdbIndex:
    """An `Index` in one LMDB file in a folder of its own."""

    def __init__(self, folder: str, rows_max: int) -> None:
        """Opens or makes the index in `folder`, which is made if absent (its parent synced).

        rows_max: slots it is expected to hold; the map grows beyond when needed.
        Unusable if what is there cannot be trusted: the caller closes nothing, sets the folder
        aside and tries again. OSError if the device refuses.
        """
        raise NotImplementedError
