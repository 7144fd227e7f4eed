"""Up: which blocks of a hit rise into which faster pool.

A reader has asked for them, and they are in a pool that is not the fastest that he reaches, where
they were or were just loaded. Each may rise into the fastest pool that has a free place for it, or
whose coldest block is worth less: policies decide that (`promote`), for any ordered list of pools.
Who comes first in the prompt is asked first; where one is refused the rest is not asked, so that
what is in a fast pool is the head of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.arena import Arena
from kvstore.core.books import Books
from kvstore.core.moves import Moves
from kvstore.core.pools import Fill, Slot
from kvstore.core.states import SlotState

READY = SlotState.READY

PROMOTIONS_PER_CALL_MAX = 64
"""Each costs two copies' bookkeeping; a long prompt rises over several calls, its head first."""


class Promotions:
    """See the module's docstring."""

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves

    def consider(
        self, slots: Sequence[Slot | None], reach: frozenset[int] | None, now_ns: int
    ) -> None:
        """What a reader holds, from head to tail, may rise as far as he reaches; None: any pool.

        Slots are taken from the head on; the head's copy comes last, so that it ends up warmest.
        """
        pools = [a for a in self.books.open_pools if reach is None or a.tier in reach]
        fastest = pools[0].tier if pools else len(self.books.tiers)
        low = [slot for slot in slots if slot is not None and slot.pool.tier > fastest]
        if not low:
            return
        self.books.next_command()
        rising: list[Slot] = []
        for slot in low:
            if slot.state is not READY or slot.rising or slot.pins:
                continue
            while pools and pools[0].tier < slot.pool.tier:
                if self._rise(slot, pools[0], now_ns):
                    rising.append(slot)
                    break
                # Full of what is worth more than this block, and so than those behind it.
                del pools[0]
            if not pools or self.books.moves_full or len(rising) == PROMOTIONS_PER_CALL_MAX:
                break
        for slot in reversed(rising):
            self.moves.fly_up(slot)

    def _rise(self, slot: Slot, arena: Arena, now_ns: int) -> bool:
        """Takes the slot that a block is promoted to, if it is worth that."""
        space = slot.space
        assert space is not None
        assert slot.holds, "its reader holds it"
        pool = space.pools[arena.tier]
        assert pool is not None
        policy = pool.policy
        if not policy.promote(slot, None, now_ns):
            return False
        target = self.moves.take(
            pool, now_ns, lambda coldest: policy.promote(slot, coldest, now_ns)
        )
        if target is None:
            return False
        pool.begin(target, space, slot.key, slot.parent, slot.depth, Fill(None))
        slot.rising = target
        slot.holds += 1
        return True
