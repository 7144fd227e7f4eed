"""The disk tier without a device: the production ring decides who goes, a dict is its index.

One tenant, one size of records. A save is in the index at once, so nothing is ever in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.model.hits import ABSENT
from kvstore.tiers.disk.ring import NO_SEGMENT, Ring, Slot, Victim

RECORD_BYTES = 4096
_TENANT = bytes(16)
_NOWHERE = (NO_SEGMENT, 0)


class SimulatedArchive:
    """At most `capacity_blocks`: whole segments of a 32nd of it each, as on a real disk. Or what
    `ring` has room for, in records of `record_bytes`.

    writes, reads: blocks, since the start.
    """

    def __init__(
        self, capacity_blocks: int, *, ring: Ring | None = None, record_bytes: int = RECORD_BYTES
    ) -> None:
        self._ring = ring or Ring(capacity_blocks * RECORD_BYTES, lambda _: 0)
        self._record_bytes = record_bytes
        self._places: dict[bytes, Slot] = {}
        self._keys: list[bytes] = []
        """By row; rows of blocks that went are used again."""
        self._unused: list[int] = []
        self._loaded: list[Slot] = []
        self.writes = 0
        self.reads = 0

    @property
    def capacity_bytes(self) -> int:
        """As `Ring`."""
        return self._ring.capacity_bytes

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def below(self, keys: Sequence[bytes], codes: bytes) -> dict[bytes, int]:
        """What is worth loading, as the store decides it: absent keys before the first one that
        neither pools nor the archive hold; to the archive's tier, 1.
        """
        found: dict[bytes, int] = {}
        for key, code in zip(keys, codes, strict=True):
            if code == ABSENT:
                if key not in self._places:
                    break
                found[key] = 1
        return found

    def load(self, key: bytes) -> bool:
        """Reads a block; False: it is not there."""
        place = self._places.get(key)
        if place is None:
            return False
        self.reads += 1
        self._loaded.append(place)
        return True

    def touch(self) -> None:
        """Tells the ring of what was read since the last time."""
        if self._loaded:
            places = np.array(self._loaded, np.uint32)
            self._ring.touch(places[:, 0], places[:, 1])
            self._loaded.clear()

    def wanted(self, keys: Sequence[bytes]) -> None:
        """Tells the ring, before it chooses again, of those of `keys` that it has."""
        self._loaded += [self._places[key] for key in keys if key in self._places]

    def save(self, blocks: Sequence[tuple[bytes, bytes, int]]) -> list[bytes]:
        """Writes (key, parent, depth) each; the keys that were aged out for them."""
        self.touch()  # before it is chosen who goes
        ring = self._ring
        aged: list[bytes] = []
        owed: list[Victim] = []
        left = [block for block in blocks if block[0] not in self._places]
        written: list[tuple[Slot, tuple[bytes, bytes, int]]] = []
        while left:
            placement = ring.place(_TENANT, self._record_bytes, len(left))
            aged += [self._forget(victim.row) for victim in placement.victims]
            # Their slots are free once that is committed: with these blocks, or before.
            owed += placement.victims
            written += zip(placement.slots, left, strict=False)
            left = left[len(placement.slots) :]
            if not placement.victims:
                break
            if left:
                ring.release(owed)
                owed.clear()
        ring.release(owed)
        if written:
            self._settle([slot for slot, _ in written], [block for _, block in written])
            while ring.stock():
                pass
        return aged

    def _forget(self, row: int) -> bytes:
        key = self._keys[row]
        del self._places[key]
        self._unused.append(row)
        return key

    def _settle(self, slots: list[Slot], batch: Sequence[tuple[bytes, bytes, int]]) -> None:
        rows, parents = [], []
        for slot, (key, parent, _) in zip(slots, batch, strict=True):
            if self._unused:
                row = self._unused.pop()
                self._keys[row] = key
            else:
                row = len(self._keys)
                self._keys.append(key)
            rows.append(row)
            parents.append(self._places.get(parent, _NOWHERE))
            self._places[key] = slot
        depths = np.array([depth for _, _, depth in batch], np.int64)
        self._ring.settle(slots, np.array(rows, np.int64), depths, np.array(parents))
        self.writes += len(batch)
