"""Effects: what the core wants done, in order. The shell runs them; the core never waits for one.

`Copy` moves bytes and is answered by `Core.done`. `Assign` and `AssignStaging` make memory and take
hold at once. `Unassign` and `UnassignStaging` close it and are answered by `Core.region_gone` once
no process can reach it. `Persist` is answered by `Core.persisted`. The others are not answered.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvstore.model.values import Place, Region

Why = Literal["commit", "demote", "promote", "save", "load"]


class Assign(NamedTuple):
    """Make this region: zeroed header, then slots."""

    region: Region


class Unassign(NamedTuple):
    """Close this region: no slot of it is held and no copy touches it."""

    region_id: int


class AssignStaging(NamedTuple):
    """Make a staging region that this session may write."""

    region_id: int
    session: int
    total_bytes: int


class UnassignStaging(NamedTuple):
    """Close this staging region: no copy reads it any more."""

    region_id: int


class Copy(NamedTuple):
    """Move `length` bytes. A target in a pool carries the generation of the new content: write it
    into the region's header before the first byte. Copies that are out at the same time do not
    depend on each other.

    parent, depth: of a save, the key of the block before it (empty: the first) and its index.
    """

    copy_id: int
    why: Why
    space_id: int
    key: bytes
    source: Place
    target: Place
    length: int
    parent: bytes = b""
    depth: int = 0


class Forget(NamedTuple):
    """An archive must not find this name from now on; an empty key means the whole space.

    A save of the name that is emitted later stores it anew.
    """

    tier: int
    space_id: int
    key: bytes


class Wanted(NamedTuple):
    """An archive is told that these blocks, which it holds, are used in a pool: as if they were
    loaded. Else it ages out what only it has soon after.
    """

    tier: int
    space_id: int
    keys: list[bytes]


class Persist(NamedTuple):
    """Write one durable row, or delete it (value None). Tables: epoch, review, space."""

    ticket: int
    table: str
    key: bytes
    value: bytes | None


class Ready(NamedTuple):
    """A lease that was not ready at once can be settled."""

    lease_id: int


Effect = (
    Assign | Unassign | AssignStaging | UnassignStaging | Copy | Forget | Wanted | Persist | Ready
)
