"""Room in pools: regions that are gone, more capacity, growth that is paused; and who gets what is
free then.
"""

from __future__ import annotations

from kvstore.core.arena import Arena
from kvstore.core.books import Books
from kvstore.core.moves import Moves
from kvstore.core.pools import Pool
from kvstore.core.turns import Turns


class Room:
    """See the module's docstring."""

    def __init__(self, books: Books, moves: Moves, turns: Turns) -> None:
        self.books = books
        self.moves = moves
        self.turns = turns

    def region_gone(self, region_id: int, now_ns: int) -> None:
        """No process can reach a closed region any more: its bytes are free, and go to who claimed
        them.
        """
        books = self.books
        arena = next((arena for arena in books.pools if arena.gone(region_id)), None)
        if arena is None:
            return
        books.staging_closing.pop(region_id, None)
        self._grant(arena, now_ns)
        self.turns.serve(now_ns)

    def grow(self, tier: int, capacity_bytes: int, now_ns: int) -> None:
        """A pool may use more from now on."""
        arena = self._arena(tier)
        arena.grow(capacity_bytes)
        self._grant(arena, now_ns)

    def pause(self, tier: int, paused: bool, now_ns: int) -> None:
        """Whether a pool works with what it has."""
        arena = self._arena(tier)
        arena.paused = paused
        self._grant(arena, now_ns)

    def _arena(self, tier: int) -> Arena:
        arena = self.books.arenas[tier]
        assert arena is not None, "an archive keeps its own capacity"
        return arena

    def _grant(self, arena: Arena, now_ns: int) -> None:
        while (grant := arena.next_grant()) is not None:
            claimant, total_bytes = grant
            if isinstance(claimant, Pool):
                self.moves.grant(claimant, total_bytes, now_ns)
            elif (session := self.books.sessions.get(claimant)) is not None:
                self.turns.grant(session, total_bytes, now_ns)
