"""The two tables of states, and which change into which. The law that `check` holds the core to.

Slot:   FREE -take-> FILLING -all parts done-> READY -evict-> FREE
        FILLING | READY -abort, fail, drop, close-> DOOMED -last hold-> FREE, or FREE at once
Space:  HELD -approve-> OPEN, OPEN | HELD -> CLOSED (final)

Holds of a slot are the read leases on it and the copies that write it or read it under its name. A
victim has none but its own save's. A copy that takes away what a victim was holds nothing: it
*leaves* the slot, and the next fill of the slot waits for it. A slot's generation is raised when it
is taken, before the first byte of the new content can be written.
"""

from __future__ import annotations

import enum


class SlotState(enum.Enum):
    """State of one slot of a pool."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    DOOMED = "doomed"

    # There is one of each; the hash of Enum is a function in Python, and moves are looked up often.
    __hash__ = object.__hash__


class SpaceState(enum.Enum):
    """State of a space. Ids are never reused, so CLOSED is final."""

    OPEN = "open"
    HELD = "held"
    CLOSED = "closed"


SLOT_MOVES: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (SlotState.FREE, SlotState.FILLING),
        (SlotState.FILLING, SlotState.READY),
        (SlotState.FILLING, SlotState.DOOMED),
        (SlotState.FILLING, SlotState.FREE),
        (SlotState.READY, SlotState.DOOMED),
        (SlotState.READY, SlotState.FREE),
        (SlotState.DOOMED, SlotState.FREE),
    }
)

SPACE_MOVES: frozenset[tuple[SpaceState, SpaceState]] = frozenset(
    {
        (SpaceState.HELD, SpaceState.OPEN),
        (SpaceState.HELD, SpaceState.CLOSED),
        (SpaceState.OPEN, SpaceState.CLOSED),
    }
)
