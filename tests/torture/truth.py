"""What may be read and what must be there after a crash at any moment of a life in one thread.

Every write, drop and acknowledgement has a moment of the folder's clock (`MemoryFolder.stamp`), so
that `crashed` can tell what was known at the moment of the cut. A block's name is (owner, key).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Name = tuple[object, bytes]


@dataclass
class Written:
    """One write of a block. begun: its commit; None: only reserved."""

    version: int
    reserved: int
    begun: int | None = None


@dataclass
class Dropped:
    """One invalidation. acked: when it was said to be durable."""

    begun: int
    acked: int | None = None


@dataclass
class Block:
    """The history of one name. durable: (moment, moment of the reservation) of an acknowledgement;
    lost: last moment at which a tier below said, or may have said, that it has it no longer.
    """

    writes: list[Written] = field(default_factory=list)
    drops: list[Dropped] = field(default_factory=list)
    durable: tuple[int, int] | None = None
    lost: int = -1

    @property
    def dropped_at(self) -> int:
        return max((drop.begun for drop in self.drops), default=-1)

    def possible(self) -> set[int]:
        """Versions that a read may give now."""
        gone = self.dropped_at
        return {w.version for w in self.writes if w.begun is not None and w.reserved > gone}

    def must(self) -> bool:
        """Whether a tier that outlives the daemon has to have it."""
        if self.durable is None:
            return False
        # What is saved may have to make room for what is saved with it, before that is said.
        _, reserved = self.durable
        return reserved > self.dropped_at and reserved > self.lost

    def crashed(self, moment: int) -> Block:
        """The history as a crash at `moment` leaves it; a new life begins at moment 0."""
        gone = max(
            (d.begun for d in self.drops if d.acked is not None and d.acked <= moment), default=-1
        )
        after = Block()
        for write in self.writes:
            if write.begun is not None and write.begun <= moment and write.reserved > gone:
                after.writes.append(Written(write.version, 0, 0))
        # A drop that nobody was told of may have happened or not.
        dropped = max((d.begun for d in self.drops if d.begun <= moment), default=-1)
        if self.durable is not None:
            acked, reserved = self.durable
            if acked <= moment and reserved > max(dropped, self.lost):
                after.durable = (0, 0)
        return after


class Truth:
    """All blocks of all owners."""

    def __init__(self) -> None:
        self.blocks: dict[Name, Block] = {}
        self._versions = 0

    def new_version(self) -> int:
        self._versions += 1
        return self._versions

    def block(self, name: Name) -> Block:
        return self.blocks.setdefault(name, Block())

    def lose(self, names: Iterable[Name], moment: int) -> None:
        """These may be gone from below."""
        for name in names:
            self.block(name).lost = moment

    def drop(self, names: Iterable[Name], moment: int) -> list[Dropped]:
        """An invalidation begins; set `acked` of what this returns when it is acknowledged."""
        drops = []
        for name in names:
            drops.append(Dropped(moment))
            self.block(name).drops.append(drops[-1])
        return drops

    def of(self, owner: object) -> Iterator[Name]:
        """The names of an owner that were ever written."""
        return (name for name in list(self.blocks) if name[0] == owner)

    def must(self) -> Iterator[Name]:
        """What has to be there after a restart."""
        return (name for name, block in self.blocks.items() if block.must())

    def crashed(self, moment: int) -> None:
        self.blocks = {name: block.crashed(moment) for name, block in self.blocks.items()}
