"""What a tier is to the rest: memory whose slots the core names, or an archive addressed by key.

The shell assigns and closes memory on the event loop's thread; the mover's threads copy into views
of it. An archive's blocking calls run on the mover's threads only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.model.values import Place, Region

Bytes = NDArray[np.uint8]


class PoolMemory(Protocol):
    """Memory of a pool: regions cut into slots, with a generation a slot in the region's header."""

    def assign(self, region: Region) -> None:
        """Makes the memory of `region`: header and slots all zero, usable at once."""
        ...

    def unassign(self, region_id: int) -> None:
        """Closes a region: no new view and no descriptor of it. Views that live stay valid."""
        ...

    def view(self, place: Place, length: int) -> Bytes:
        """uint8 [length] at `place`, writeable. KVStoreError (REGION_UNKNOWN) once it is closed."""
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


class ArchiveUsage(NamedTuple):
    """What an archive holds now."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


class Archive(Protocol):
    """Blocks addressed by (space, key), that ages by itself.

    Except for `find` its methods block, and may be called from several threads at once, but never
    for one name at the same time.
    """

    async def find(self, space_id: int, keys: Sequence[bytes]) -> Collection[bytes]:
        """Those of `keys` that it holds. From memory: it never waits for the device."""
        ...

    def save(self, space_id: int, key: bytes, data: Bytes) -> bytes:
        """Stores uint8 [n]; returns the xxh3-128 digest of what it stored. OSError by the device,
        NoSpace if it takes nothing now.
        """
        ...

    def load(self, space_id: int, key: bytes, into: Bytes) -> bytes:
        """Fills `into` and verifies it; returns its xxh3-128 digest. OSError by the device,
        BlockCorrupt if the bytes are not those saved, KVStoreError (MISS_EVICTED) if it has aged
        out.
        """
        ...

    def forget(self, space_id: int, key: bytes) -> None:
        """Drops a name; an empty key drops the whole space. Unknown names are no error."""
        ...

    def usage(self) -> ArchiveUsage: ...
