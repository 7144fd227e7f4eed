"""Which blocks are on disk, in memory: the rows that answer every look-up.

Packed numpy columns and an open-addressing table of row numbers; no Python object a block. A row
number names a block from `put` until `remove`, and is used again then.

Locking. Changes come from one thread at a time, under the caller's lock (the one that guards the
ring). `find` needs none: it may run on the event loop's thread at any moment, and answers from what
is there at that moment. It compares whole keys and spaces, so a change under way can make it miss,
never mistake one block for another. What it answers may be gone when it is used: `get`, under the
lock, says where a block is. This rests on the interpreter lock, which no numpy call here releases
between reading a row's number and its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.format import Row
from kvstore.tiers.disk.index import RowBatch

NO_ROW = -1


class Entry(NamedTuple):
    """What is known of a block: enough to read its record and to verify it, but for the parent,
    which is in the record's header."""

    row: int
    segment: int
    slot: int
    generation: int
    length: int
    checksum: bytes


class Catalog:
    """Blocks by (space id, key)."""

    def __init__(self, expected_rows: int = 0) -> None:
        """expected_rows: room made at once; it grows as needed."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Blocks in open spaces and in dropped ones that were not swept yet."""
        raise NotImplementedError

    def find(self, space_id: int, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Row number of each key, NO_ROW where it is not known. Without a lock; see above."""
        raise NotImplementedError

    def get(self, space_id: int, key: bytes) -> Entry | None:
        """Where the block is."""
        raise NotImplementedError

    def put(self, space_id: int, key: bytes, row: Row) -> int:
        """Makes the block known and returns its row number. ValueError if it is known already
        (remove it first, so that its slot is released), the space was dropped, or a field does not
        fit (length is below 4 GiB)."""
        raise NotImplementedError

    def put_batch(self, batch: RowBatch) -> NDArray[np.int64]:
        """Row numbers of loaded rows; NO_ROW for one of a dropped space, one that does not fit, and
        the older one (by generation) of two of one name. If an older one was known before, it
        stays and the newer gets NO_ROW only if its generation is lower."""
        raise NotImplementedError

    def remove(self, rows: Sequence[int] | NDArray[np.int64]) -> None:
        """Forgets blocks by row number. IndexError or KeyError if one names no block."""
        raise NotImplementedError

    def names(self, rows: Sequence[int] | NDArray[np.int64]) -> list[tuple[int, bytes]]:
        """(space id, key) of each."""
        raise NotImplementedError

    def places(
        self, rows: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """(segment, slot) of each, u32 [n] and u32 [n]."""
        raise NotImplementedError

    def drop_space(self, space_id: int) -> None:
        """From now on `find` and `get` know none of its blocks, and loading none to come. O(1);
        their rows stay until they are swept."""
        raise NotImplementedError

    def sweep(self, rows_max: int) -> NDArray[np.int64]:
        """Up to `rows_max` row numbers of dropped spaces, each named until it is removed; empty if
        there are none left. Looks at a bounded number of rows, so call it until `swept`."""
        raise NotImplementedError

    @property
    def swept(self) -> bool:
        """Whether no row of a dropped space is left."""
        raise NotImplementedError

    def space_blocks(self, space_id: int) -> int:
        """How many blocks of the space are known."""
        raise NotImplementedError
