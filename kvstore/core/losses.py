"""A pool whose memory is gone, as a GPU's that was reset: forgets what was in it, and lets it go.

For any pool but the ingest one. Blocks that an archive has, too, are found there from now on; the
others are lost, which is allowed. No region of it is made again.
"""

from __future__ import annotations

from kvstore.core.arena import Arena
from kvstore.core.books import Books
from kvstore.core.moves import Moves
from kvstore.core.names import Names
from kvstore.core.states import SlotState
from kvstore.model.reasons import Reason

FILLING, READY = SlotState.FILLING, SlotState.READY


def lose(books: Books, tier: int, now_ns: int) -> bool:
    """The pool's bytes are not to be had any more. True once all its regions are closed: leases
    that hold some of it end first. Called again until then; calling it once more changes nothing.
    """
    arena = books.arenas[tier]
    assert arena is not None, "an archive looks after itself"
    assert arena is not books.ingest, "there is no service without the ingest pool"
    arena.paused = True
    arena.claims.clear()
    names = Names(books)
    _stop_rising(books, names, tier)
    for region in list(arena.regions.values()):
        for slot in region.slots:
            if slot.state in (READY, FILLING):
                names.drop(slot, Reason.MISS_EVICTED, now_ns)
    _close(arena, Moves(books, names), now_ns)
    return not arena.regions


def _stop_rising(books: Books, names: Names, tier: int) -> None:
    """What is on its way up into the pool stays where it is."""
    for flight in books.flights.values():
        source, target = flight.source, flight.target
        if source is None or target is None or target.pool.tier != tier:
            continue
        if source.rising is target:
            names.stop_rising(source)


def _close(arena: Arena, moves: Moves, now_ns: int) -> None:
    for region in list(arena.regions.values()):
        if not region.held():
            moves.close_region(region, now_ns)
