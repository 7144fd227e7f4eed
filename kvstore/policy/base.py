"""What a policy decides about a pool: whom to evict, what to save below, what to lift up.

Pure. One instance serves one pool (a tenant's slots of one size in one tier), called by the core
alone. The core decides what *may* be evicted: held entries are taken out with `shelve`. A policy
never sees bytes or a clock; `now_ns` comes with the call. Entries are compared by identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from kvstore.model.reasons import Reason


class Entry(Protocol):
    """A stored block as policies see it."""

    @property
    def key(self) -> bytes:
        """Block key, 32 bytes."""

    @property
    def parent(self) -> bytes:
        """Key of the block before it in its prompt; empty for the first, or where unknown."""

    @property
    def depth(self) -> int:
        """Index of the block in the prompt that stored it."""

    @property
    def hits(self) -> int:
        """How often it was acquired since it came into a pool."""

    @property
    def touched_ns(self) -> int:
        """Time of the last touch."""


E = TypeVar("E", bound=Entry)


class EvictionPolicy(Protocol[E]):
    """The seam. All of it but iteration is O(1) for an entry, on average.

    A batch is given from the tail of a prompt to its head, so that the head ends up warmest.
    """

    def insert(self, entries: Sequence[E], now_ns: int) -> None:
        """They became readable: candidates from now on."""

    def touch(self, entries: Sequence[E], now_ns: int) -> None:
        """They were used. A shelved entry that is touched is a candidate again."""

    def remove(self, entry: E) -> None:
        """It left the pool, or is no candidate any more. Idempotent."""

    def coldest(self) -> E | None:
        """Whom to evict next; None if there is no candidate."""

    def shelve(self, entry: E) -> None:
        """The coldest is held by a reader: take it out, another is asked for."""

    def unshelve(self, entry: E) -> None:
        """No reader holds it any more: a candidate again, at the cold end. Idempotent."""

    def admit(self, entry: E) -> bool:
        """Whether an evicted entry is worth a write to the archive below."""

    def promote(self, entry: E) -> bool:
        """Whether an entry that was just acquired is worth a slot in a faster pool."""

    def departed(self, entry: E, why: Reason, now_ns: int) -> None:
        """It left the pool for good: the history of names (ghosts) starts here."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[E]:
        """The candidates, coldest first as far as that is known."""

    def __contains__(self, entry: object) -> bool: ...
