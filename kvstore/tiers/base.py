"""What a tier is to the rest: memory whose slots the core names, or an archive addressed by key.

The shell assigns and closes memory on the event loop's thread; the mover's threads copy into views
of it. An archive's blocking calls run on the mover's threads only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.model.reasons import KVStoreError
from kvstore.model.values import Place, Region

Bytes = NDArray[np.uint8]


class RegionMemory(Protocol):
    """Memory of a pool: regions cut into slots, with a generation a slot in the region's header."""

    def assign(self, region: Region) -> None:
        """Makes the memory of `region`: header and slots all zero, usable at once."""
        ...

    def unassign(self, region_id: int) -> None:
        """Closes a region: no new view and no descriptor of it. Views that live stay valid."""
        ...

    def released(self, region_id: int) -> None:
        """No process can reach the closed region any more: its bytes may be used again."""
        ...

    def set_generation(self, region_id: int, slot: int, generation: int) -> None:
        """Writes the slot's generation where readers compare it."""
        ...

    def generation(self, region_id: int, slot: int) -> int:
        """The slot's generation; 0, which is never one of a content, if the region is closed."""
        ...

    def fd(self, region_id: int) -> int:
        """A descriptor to hand to a client; it stays the tier's, and is closed by `unassign`."""
        ...


class PoolMemory(RegionMemory, Protocol):
    """A pool that this process's threads read and write themselves."""

    def view(self, place: Place, length: int) -> Bytes:
        """uint8 [length] at `place`, writeable. KVStoreError (REGION_UNKNOWN) once it is closed."""
        ...


class Crossing(NamedTuple):
    """A copy between a remote pool and host memory. memory: uint8 [n], read if `inward`, else
    written; host: where in a host pool it lies, None if it is in none.
    """

    device: Place
    host: Place | None
    memory: Bytes
    inward: bool


class RemotePool(RegionMemory, Protocol):
    """A pool that only a device can read and write: its bytes cross over in batches. Both methods
    wait for the device, so they belong to the mover's threads.
    """

    def cross(self, crossings: Sequence[Crossing]) -> list[KVStoreError | OSError | None]:
        """Copies all of them, beside each other; what became of each, None if it is done. When this
        returns the device touches none of the memory any more.
        """
        ...

    def read(self, place: Place, length: int) -> Bytes:
        """uint8 [length] of a copy of what is at `place`, at the start of a page. KVStoreError or
        OSError if it cannot be had.
        """
        ...


class SavedBlock(NamedTuple):
    """A block on its way into an archive. key: 32 bytes; parent: key of the block before it in its
    prompt, empty for the first; depth: its index; data: uint8 [n].
    """

    space_id: int
    key: bytes
    parent: bytes
    depth: int
    data: Bytes


class ArchiveUsage(NamedTuple):
    """What an archive holds now."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


@dataclass(frozen=True)
class ArchiveStats:
    """A snapshot of an archive, for people and metrics.

    block_bytes: of the blocks that can be read. regions: files, or what else it is cut into. state:
    a word, or the sentence that says what is wrong. gauges, counters: what else it tells, by names
    that are parts of metrics' names, in the units that they end with; a counter's name may have a
    label: "write_errors kind=full".
    """

    capacity_bytes: int
    used_bytes: int
    block_bytes: int
    blocks: int
    free_slots: int
    regions: int
    evictions: int
    state: str
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)


Saved = bytes | KVStoreError | OSError
"""The xxh3-128 digest of what was stored, or why it was not."""


class Archive(Protocol):
    """Blocks addressed by (space, key), that ages by itself and may outlive the process.

    `find`, `wanted`, `describe`, `usage` and `stats` never wait for the device; the other methods
    do, and are called by the mover's threads: `save_batch` and `forget` by one at a time, `load` by
    several at once, but never for one name at the same time.
    """

    on_dropped: Callable[[int, list[bytes]], None]
    """Called, on any thread, with a space and the keys in it that have aged out by themselves."""

    async def find(self, space_id: int, keys: Sequence[bytes]) -> Collection[bytes]:
        """Those of `keys` that it holds."""
        ...

    def save_batch(self, blocks: Sequence[SavedBlock]) -> list[Saved]:
        """Stores blocks, durably when it returns if it is a durable archive; what became of each.
        A block that is held already stays as it is. Each name at most once.
        """
        ...

    def load(self, space_id: int, key: bytes, into: Bytes) -> bytes:
        """Fills `into` and verifies it; returns its xxh3-128 digest. OSError by the device,
        BlockCorrupt if the bytes are not those saved, KVStoreError (MISS_EVICTED) if it has aged
        out.
        """
        ...

    def wanted(self, space_id: int, keys: Sequence[bytes]) -> None:
        """Those of `keys` that it holds are used elsewhere: they age as if they had been loaded."""
        ...

    def forget(self, names: Sequence[tuple[int, bytes]]) -> None:
        """Drops names (space id, key); an empty key drops the whole space. Unknown names are no
        error. None is found from now on. OSError: not durably yet, which is tried again with
        the next change.
        """
        ...

    def describe(
        self, space_id: int, tenant: str, fingerprint_digest: bytes, slot_bytes: int
    ) -> None:
        """Whose a space's blocks are, and the size of a slot that takes one. Told before its first
        save, and after a restart again.
        """
        ...

    def usage(self) -> ArchiveUsage: ...

    def stats(self) -> ArchiveStats: ...
