"""Storing a prompt that is longer than its pool: what an archive has of it already gives way to
what comes after it. Else no more of it could be stored than the pool holds at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.core.books import Books
from kvstore.core.moves import Moves
from kvstore.core.pools import Pool, Slot
from kvstore.core.states import SlotState

READY = SlotState.READY

ARCHIVE_SHARE = 0.25
"""Of an archive, that one prompt may take up in this way: a longer one would drive out too much of
what others ask for, only to be aged out itself before it is asked for again.
"""


class Through:
    """The blocks of one chain that may give way to the rest of it, for one command, its end first:
    what it begins with is what other prompts share. `found`: what there is of the chain; blocks:
    length of the whole prompt, as far as that is known.
    """

    def __init__(
        self, books: Books, moves: Moves, pool: Pool, found: Sequence[Slot | None], blocks: int
    ) -> None:
        self._moves = moves
        self._pool = pool
        archive = books.archive_below(pool.tier)
        may = (
            archive is not None
            and blocks * pool.slot_bytes <= ARCHIVE_SHARE * books.tiers[archive].capacity_bytes
        )
        self._yielding = _saved(found, pool) if may else iter(())

    def take(self, now_ns: int) -> Slot | None:
        """A FREE slot, as `Moves.take`; or, if only this prompt is left, that of a block of its own
        that an archive has and nobody uses.
        """
        slot = self._moves.take(self._pool, now_ns)
        while slot is None:
            victim = next(self._yielding, None)
            if victim is None:
                return None
            self._moves.evict(victim, now_ns)
            slot = self._pool.free.popleft() if self._pool.free else None
        return slot


def _saved(found: Sequence[Slot | None], pool: Pool) -> Iterator[Slot]:
    for slot in reversed(found):
        if (
            slot is not None
            and slot.pool is pool
            and slot.state is READY
            and slot.saved
            and not slot.holds
        ):
            yield slot
