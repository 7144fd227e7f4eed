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
    """A stored block as policies see it.

    uses, grade: a policy's own notes, which travel with the block from pool to pool; uses 0: it
    came in anew.
    """

    uses: int
    grade: int

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
        """Time of the last use or touch; for `use`, of the one before."""

    @property
    def saved(self) -> bool:
        """Whether an archive has it."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the last prompt that had it, as far as that is known."""


E = TypeVar("E", bound=Entry)


class EvictionPolicy(Protocol[E]):
    """The seam. All of it but iteration is O(1) for an entry, on average.

    A batch is given from the tail of a prompt to its head, so that the head ends up warmest.
    """

    def insert(self, entries: Sequence[E], now_ns: int) -> None:
        """They became readable: candidates from now on."""

    def use(self, entries: Sequence[E], now_ns: int) -> None:
        """A reader asked for them. A shelved entry that is used is a candidate again."""

    def touch(self, entries: Sequence[E], now_ns: int) -> None:
        """They are part of what is being written: to be kept warm, but asked for by nobody. A
        shelved entry that is touched is a candidate again.
        """

    def remove(self, entry: E) -> None:
        """It left the pool, or is no candidate any more. Idempotent."""

    def coldest(self) -> E | None:
        """Whom to evict next; None if there is no candidate."""

    def shelve(self, entry: E) -> None:
        """The coldest may not go now: take it out, another is asked for."""

    def unshelve(self, entry: E) -> None:
        """It may go now: a candidate again, at the cold end. Idempotent."""

    def admit(self, entry: E, at_least: float = 0.0) -> bool:
        """Whether an evicted entry is worth a write to the archive below: by this policy's own
        lights, and if it is asked for again with this chance at least, 0 to 1.
        """

    def promote(self, entry: E, over: E | None, now_ns: int) -> bool:
        """Whether an entry of a slower pool that a reader has just asked for is worth this pool's
        place of `over`, its coldest; or, None, a free place and the copy. Blocks of one pool have
        one size, so what one is worth is worth it by byte.
        """

    def beside(self) -> EvictionPolicy[E]:
        """A policy for another pool of the same blocks, in another tier: what is learnt of blocks
        is learnt for both.
        """

    def departed(self, entry: E, why: Reason, now_ns: int) -> None:
        """It left the pool, once for each `insert`: for another pool with reason OK, else for good,
        and the history of names (ghosts) starts here.
        """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[E]:
        """The candidates, coldest first as far as that is known."""

    def __contains__(self, entry: object) -> bool: ...
