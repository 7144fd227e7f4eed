"""An opened folder: what is in it, in memory and on the device, and how it is read.

Promises. A block is known here from the commit of its row on, never before, and no longer than its
row is to stay. What is read is verified against what was promised, else it is not given, and the
block is known no longer.

Locking. `books` guards catalog, ring, segments and debts, for microseconds to a few milliseconds,
never across the device. What changes files or rows is the `writer`'s, one thread at a time; `read`
and `find` may run on any.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.model.reasons import BlockCorrupt, KVStoreError, Reason
from kvstore.tiers.base import Bytes, SavedBlock
from kvstore.tiers.disk.catalog import NO_ROW, Catalog, Entry
from kvstore.tiers.disk.files import Files, Truncated
from kvstore.tiers.disk.format import KEY_BYTES, Fault, Segment, check_record, record_bytes
from kvstore.tiers.disk.pages import RecordBuffers, ScratchPages
from kvstore.tiers.disk.ring import Ring, Slot, Victim
from kvstore.tiers.disk.rows import Index, Place, RowBatch

SWEEP_ROWS = 4_096
TOUCHES_MAX = 128
"""Reads that the ring is told of together: one by one they cost more than the look-up."""
WANTED_MAX = 16
"""Batches of names that wait until it is chosen who goes; older ones are forgotten."""


class SpaceInfo(NamedTuple):
    """Whose a space's blocks are: 32 bytes each."""

    tenant_digest: bytes
    fingerprint_digest: bytes


class _Children(NamedTuple):
    """Blocks that have parents. rows: i64 [n], space_ids: u64 [n], parents: keys, uint8 [n, 32]."""

    rows: NDArray[np.int64]
    space_ids: NDArray[np.uint64]
    parents: NDArray[np.uint8]


@dataclass
class Debts:
    """What the next commit has to do besides its own.

    victims: known no longer, but their rows may be there. doubtful: slots whose rows a failed
    commit may have brought. places: rows that no slot of the ring stands for. retired: segments to
    remove with their rows. made: segments to add. meta: named values. first: nothing may be placed
    before they are paid.
    """

    victims: list[Victim] = field(default_factory=list)
    doubtful: list[Slot] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    made: list[Segment] = field(default_factory=list)
    meta: dict[str, bytes | None] = field(default_factory=dict)
    first: bool = False

    def __bool__(self) -> bool:
        return any((self.victims, self.doubtful, self.places, self.retired, self.made, self.meta))

    def add(self, older: Debts) -> None:
        """Takes back what a commit did not pay."""
        self.victims += older.victims
        self.doubtful += older.doubtful
        self.places += older.places
        self.retired += older.retired
        self.made += older.made
        self.meta = {**older.meta, **self.meta}
        self.first |= older.first


class Volume:
    """See the module's docstring."""

    def __init__(self, index: Index, files: Files, ring: Ring) -> None:
        self.index = index
        self.files = files
        self.ring = ring
        self.catalog = Catalog(index.row_count())
        self.books = threading.Lock()
        self.debts = Debts()
        self.segments: dict[int, Segment] = {}
        self.lost_segments = 0
        self.orphans: list[int] = []
        self._scratch = ScratchPages()
        self._touched: list[Slot] = []
        self.wanted: deque[tuple[int, Sequence[bytes]]] = deque(maxlen=WANTED_MAX)
        """Space and keys that are used in pools; may be added to by any thread."""

    # ------------------------------------------------------------------ start

    def restore_segments(self) -> None:
        """Takes the segments of the index that have a file; the rows of others are lost."""
        present = self.files.list()
        known = set()
        for segment in self.index.segments():
            known.add(segment.segment)
            if segment.segment in present:
                self.segments[segment.segment] = segment
                self.ring.restore_segment(segment)
            else:
                self.lost_segments += 1
                self.debts.retired.append(segment.segment)
        self.orphans = sorted(present.keys() - known)

    def load(self, spaces: Collection[int], go_on: Callable[[], bool]) -> None:
        """Makes the rows known step by step; rows of other spaces than these are to be removed.

        Nothing may be placed before it has ended and the debts are paid. Unusable, OSError.
        """
        known = np.array(sorted(spaces), np.uint64)
        orphans: list[_Children] = []
        for loaded in self.index.load():
            if not go_on():
                return
            ours = np.isin(loaded.space_ids, known)
            self._owe(loaded, ~ours)
            batch = loaded
            if not ours.all():
                batch = RowBatch(loaded.space_ids[ours], loaded.keys[ours], loaded.rows[ours])
            rows = self._take_in(batch)
            parents = np.frombuffer(batch.rows["parent"].tobytes(), np.uint8)
            parents = parents.reshape(-1, KEY_BYTES)
            child = (rows != NO_ROW) & parents.any(axis=1)
            children = _Children(rows[child], batch.space_ids[child], parents[child])
            # Parents were mostly saved before: few have to be remembered.
            orphans.append(self._link(children))
        for children in orphans:
            self._link(children)

    def _owe(self, batch: RowBatch, chosen: NDArray[np.bool_]) -> None:
        rows = batch.rows[chosen]
        self.debts.places += zip(rows["segment"].tolist(), rows["slot"].tolist(), strict=True)

    def _take_in(self, batch: RowBatch) -> NDArray[np.int64]:
        """Row numbers; NO_ROW for what is left out, which is owed."""
        with self.books:
            rows = self.catalog.put_batch(batch)
            new = np.flatnonzero(rows != NO_ROW)
            packed = batch.rows[new]
            taken = self.ring.restore(
                packed["segment"],
                packed["slot"],
                rows[new],
                packed["depth"],
                packed["generation"],
            )
            if not taken.all():
                self.catalog.remove(rows[new[~taken]])
                rows[new[~taken]] = NO_ROW
        self._owe(batch, rows == NO_ROW)
        return rows

    def _link(self, children: _Children) -> _Children:
        """Tells the ring of parents; those whose parent is not known. A child that went meanwhile
        has no row, or is another block: its slot then gets a wrong parent, which only costs a good
        order of eviction.
        """
        parents = self.catalog.find_batch(children.space_ids, children.parents)
        both = parents != NO_ROW
        if both.any():
            with self.books, contextlib.suppress(KeyError):
                below = np.stack(self.catalog.places(children.rows[both]), axis=1)
                above = np.stack(self.catalog.places(parents[both]), axis=1)
                self.ring.link(below, above)
        return _Children(*(column[~both] for column in children))

    # ------------------------------------------------------------------ reading

    def find(self, space_id: int, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that are known. Without a lock."""
        rows = self.catalog.find(space_id, keys)
        return [key for key, row in zip(keys, rows.tolist(), strict=True) if row != NO_ROW]

    def known(self, blocks: Sequence[SavedBlock]) -> dict[tuple[int, bytes], Entry]:
        """What is known of those that are known."""
        space_ids = np.array([block.space_id for block in blocks], np.uint64)
        keys = np.frombuffer(b"".join([block.key for block in blocks]), np.uint8)
        with self.books:
            rows = self.catalog.find_batch(space_ids, keys.reshape(len(blocks), KEY_BYTES))
            found = np.flatnonzero(rows != NO_ROW)
            entries = self.catalog.entries(rows[found])
        named = [(blocks[index].space_id, blocks[index].key) for index in found.tolist()]
        return dict(zip(named, entries, strict=True))

    def entry(self, space_id: int, key: bytes) -> Entry | None:
        """What is known of a block."""
        with self.books:
            return self.catalog.get(space_id, key)

    def read(self, space_id: int, key: bytes, space: SpaceInfo, into: Bytes) -> bytes:
        """Fills `into`; its digest. OSError; BlockCorrupt, and the block is known no longer;
        KVStoreError (MISS_EVICTED).
        """
        with self.books:
            entry = self.catalog.get(space_id, key)
            if entry is None:
                raise KVStoreError(Reason.MISS_EVICTED, "aged out")
            slot = Slot(entry.segment, entry.slot)
            slot_bytes = self.segments[entry.segment].slot_bytes
            self.ring.pin(slot)
        try:
            fault = self._read(entry, space_id, key, space, slot_bytes, into)
        except OSError:
            if self.entry(space_id, key) == entry:
                raise
            raise KVStoreError(Reason.MISS_EVICTED, "aged out while it was read") from None
        finally:
            with self.books:
                self.ring.unpin(slot)
                self._touched.append(slot)
                if len(self._touched) >= TOUCHES_MAX:
                    self.tell_touches()
        if fault is None:
            return entry.checksum
        if not self.discard(space_id, key, entry):
            raise KVStoreError(Reason.MISS_EVICTED, "aged out while it was read")
        raise BlockCorrupt(Reason.MISS_CORRUPT, f"{key[:4].hex()}: {fault.text}")

    def tell_touches(self) -> None:
        """Tells the ring what was read, or is used in pools: before it chooses, and now and then.
        `books` is held.
        """
        for _ in range(len(self.wanted)):
            rows = self.catalog.find(*self.wanted.popleft())
            self.ring.touch(*self.catalog.places(rows[rows != NO_ROW]))
        if self._touched:
            touched = np.array(self._touched, np.uint32)
            self._touched.clear()
            self.ring.touch(touched[:, 0], touched[:, 1])

    def _read(
        self,
        entry: Entry,
        space_id: int,
        key: bytes,
        space: SpaceInfo,
        slot_bytes: int,
        into: Bytes,
    ) -> Fault | None:
        if entry.length != len(into) or record_bytes(entry.length) > slot_bytes:
            detail = f"{entry.length} bytes in a slot of {slot_bytes}, asked for {len(into)}"
            raise KVStoreError(Reason.BAD_SIZE, detail)
        scratch = self._scratch
        record = RecordBuffers(scratch.header, into, scratch.tail)
        try:
            self.files.preadv(entry.segment, entry.slot * slot_bytes, record.buffers)
        except Truncated as short:
            return short.fault
        record.take()
        return check_record(
            scratch.header,
            into,
            space_id=space_id,
            key=key,
            row=entry,
            fingerprint_digest=space.fingerprint_digest,
            tenant_digest=space.tenant_digest,
        )

    def discard(self, space_id: int, key: bytes, entry: Entry | None = None) -> bool:
        """Knows a block no longer, if it is there (and still this one); the next commit removes its
        row.
        """
        with self.books:
            found = self.catalog.get(space_id, key)
            if found is None or entry not in (None, found):
                return False
            self.catalog.remove((found.row,))
            self.debts.victims += self.ring.evict((Slot(found.segment, found.slot),))
            return True

    def give_up(self, spaces: Collection[int]) -> Iterator[list[tuple[int, bytes]]]:
        """Knows no block of these spaces any more, and gives their names. In memory alone."""
        with self.books:
            for space_id in spaces:
                self.catalog.drop_space(space_id)
            while not self.catalog.swept:
                rows = self.catalog.sweep(SWEEP_ROWS)
                names = self.catalog.names(rows)
                self.catalog.remove(rows)
                yield names


def make_volume(
    index: Index,
    files: Files,
    *,
    capacity_bytes: int,
    share: float,
    aside_bytes: int,
    quota_bytes: Mapping[bytes, int],
) -> Volume:
    """What is in an opened folder, its rows not loaded yet. capacity_bytes 0: `share` of what the
    file system has free or this folder has taken of it. Unusable, OSError.
    """
    present = files.list()
    taken = [segment.segment for segment in index.segments()]
    if not capacity_bytes:
        used = sum(one.allocated_bytes for one in present.values()) + aside_bytes
        capacity_bytes = int((files.statvfs().free_bytes + used + index.used_bytes()) * share)
    ring = Ring(
        capacity_bytes,
        index.allowance_bytes,
        aside_bytes=aside_bytes,
        # Of a file that the index does not name the number may be anything, also the last one.
        next_segment=max([*taken, -1]) + 1,
        strange_segments=present.keys() - taken,
        quota_bytes=quota_bytes,
    )
    volume = Volume(index, files, ring)
    volume.restore_segments()
    volume.debts.first = True
    return volume
