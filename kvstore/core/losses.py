"""A pool whose memory is gone, as a GPU's that was reset: forgets what was in it, and lets it go.

For any pool but the ingest one. Blocks that an archive has, too, are found there from now on; the
others are lost, which is allowed. No block goes there any more, and no region of it is made again.
"""

from __future__ import annotations

from kvstore.core.books import Books
from kvstore.core.moves import Moves
from kvstore.core.pools import RegionBook
from kvstore.core.states import SlotState
from kvstore.model.reasons import Reason

FILLING, READY = SlotState.FILLING, SlotState.READY

BLOCKS_PER_CALL = 1024
"""Each takes 10 us: nobody waits longer for a pool of many than for one of few."""


class Losses:
    """See the module's docstring."""

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves
        self.names = moves.names

    def lose(self, tier: int, now_ns: int, blocks_max: int) -> bool:
        """See `Core.lose`."""
        books = self.books
        arena = books.arenas[tier]
        assert arena is not None, "an archive looks after itself"
        assert arena is not books.ingest, "there is no service without the ingest pool"
        if arena in books.open_pools:
            books.open_pools.remove(arena)
            arena.paused = True
            arena.claims.clear()
            self._stop_rising(tier)
        left = blocks_max
        for region in list(arena.regions.values()):
            if left <= 0:
                break
            left -= self._forget(region, now_ns)
            if not region.held():
                self.moves.close_region(region, now_ns)
        return not arena.regions

    def _stop_rising(self, tier: int) -> None:
        """What is on its way up into the pool stays where it is."""
        for flight in self.books.flights.values():
            source, target = flight.source, flight.target
            if source is None or target is None or target.pool.tier != tier:
                continue
            if source.rising is target:
                self.names.stop_rising(source)

    def _forget(self, region: RegionBook, now_ns: int) -> int:
        """Drops what is in a region; how many blocks."""
        dropped = 0
        for slot in region.slots:
            if slot.state in (READY, FILLING):
                self.names.drop(slot, Reason.MISS_EVICTED, now_ns)
                dropped += 1
        return dropped
