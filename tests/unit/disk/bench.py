"""A disk tier on a bench: a folder in memory, a clock by hand, blocks whose bytes prove whose they
are, and a model of what was committed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import numpy as np

from kvstore.model.reasons import BlockCorrupt, KVStoreError
from kvstore.testing.clock import ManualClock
from kvstore.testing.folder import MemoryFolder
from kvstore.testing.payload import payload, tag_of
from kvstore.tiers.base import Bytes, SavedBlock
from kvstore.tiers.disk.format import record_bytes
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.rows import index_bytes
from kvstore.tiers.disk.tier import DiskTier

KIB = 1024
BLOCK = 8 * KIB
RECORD = record_bytes(BLOCK)
MS = 10**6
SECOND = 10**9
SPACE = 7
TENANT = "a"
FINGERPRINT = hashlib.sha256(b"fingerprint").digest()


def room(records: int) -> int:
    """A capacity for so many records, and their index."""
    return records * RECORD + index_bytes(records)


def key(number: int, name: str = "prompt") -> bytes:
    return hashlib.sha256(f"{name}/{number}".encode()).digest()


def keys(count: int, name: str = "prompt") -> list[bytes]:
    return [key(number, name) for number in range(count)]


def content(space_id: int, block_key: bytes, version: int = 0, length: int = BLOCK) -> Bytes:
    """The bytes of one write of one block, as in a slot of a pool: at the begin of a page."""
    made = aligned_bytes(length)
    made[:] = payload(tag_of(TENANT, space_id.to_bytes(8, "big"), block_key, version), length)
    return made


class DiskBench:
    """One tier over `folder`; `again` starts another one on what a kill -9 leaves."""

    def __init__(
        self,
        folder: MemoryFolder | None = None,
        *,
        capacity_bytes: int = 64 << 20,
        endurance_bytes_per_day: int = 0,
        clock: ManualClock | None = None,
        spaces: Sequence[int] = (SPACE,),
        ready: bool = True,
        parallel: bool = False,
    ) -> None:
        self.folder = folder or MemoryFolder()
        self.capacity_bytes = capacity_bytes
        self.clock = clock or ManualClock()
        self.spaces = spaces
        self.dropped: list[tuple[int, bytes]] = []
        self.tier = DiskTier(
            self.folder,
            capacity_bytes=capacity_bytes,
            endurance_bytes_per_day=endurance_bytes_per_day,
            clock=self.clock,
            parallel=parallel,
        )
        self.tier.on_dropped = lambda space_id, gone: self.dropped.extend(
            (space_id, one) for one in gone
        )
        for space_id in spaces:
            self.describe(space_id)
        if ready:
            assert self.tier.open()
            assert self.tier.load_index()

    def describe(self, space_id: int, tenant: str = TENANT) -> None:
        self.tier.describe(space_id, tenant, FINGERPRINT, BLOCK)

    def again(self, *, capacity_bytes: int = 0, spaces: Sequence[int] = ()) -> DiskBench:
        """What a restart after kill -9 finds."""
        return DiskBench(
            self.folder.restarted(),
            capacity_bytes=capacity_bytes or self.capacity_bytes,
            spaces=spaces or self.spaces,
        )

    # ------------------------------------------------------------------ verbs

    def block(
        self, block_key: bytes, *, space_id: int = SPACE, version: int = 0, parent: bytes = b"",
        depth: int = 0, length: int = BLOCK,
    ) -> SavedBlock:  # fmt: skip
        data = content(space_id, block_key, version, length)
        return SavedBlock(space_id, block_key, parent, depth, data)

    def chain(self, chain: Sequence[bytes], version: int = 0) -> list[SavedBlock]:
        """A prompt's blocks, each with its parent."""
        return [
            self.block(one, version=version, parent=chain[at - 1] if at else b"", depth=at)
            for at, one in enumerate(chain)
        ]

    def save(self, chain: Sequence[bytes], version: int = 0) -> list[bool]:
        """Saves a prompt in one batch; which blocks were taken."""
        return [isinstance(one, bytes) for one in self.tier.save_batch(self.chain(chain, version))]

    def find(self, wanted: Sequence[bytes], space_id: int = SPACE) -> list[bytes]:
        return list(asyncio.run(self.tier.find(space_id, wanted)))

    def load(self, block_key: bytes, space_id: int = SPACE, length: int = BLOCK) -> Bytes:
        into = aligned_bytes(length)
        self.tier.load(space_id, block_key, into)
        return into

    def reads(
        self,
        block_key: bytes,
        space_id: int = SPACE,
        versions: Sequence[int] = (0,),
        length: int = BLOCK,
    ) -> bool:
        """Whether the block is there; its bytes must then be those of one of `versions`."""
        try:
            got = self.load(block_key, space_id, length)
        except (BlockCorrupt, OSError, KVStoreError):
            return False
        right = [content(space_id, block_key, version, length) for version in versions]
        assert any(np.array_equal(got, one) for one in right), "wrong bytes"
        return True

    def verify(self, versions: Sequence[int] = (0,)) -> set[tuple[int, bytes]]:
        """Reads every block that is known; all of them must be there, and right."""
        volume = self.tier.volume
        assert volume is not None
        with volume.books:
            volume.ring.check()
        named = {}
        for batch in volume.index.load():
            for row in batch.unpack():
                if volume.find(row.space_id, (row.key,)):
                    named[row.space_id, row.key] = row.row.length
        for (space_id, block_key), length in named.items():
            assert self.reads(block_key, space_id, versions, length), "it is not readable"
        return set(named)

    def pass_time(self, elapsed_ns: int) -> None:
        """Time goes on, and the tier tends."""
        self.clock.advance_ns(elapsed_ns)
        self.tier.tend()

    def count(self, name: str) -> int:
        return self.tier.counts[name]
