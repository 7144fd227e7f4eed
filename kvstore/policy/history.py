"""What is remembered of blocks that left: when they were last asked for, how often, in which class.

It reaches back a number of departures, no farther: what left before is not known, although its
place may not have been needed. So a prompt is forgotten or known as a whole. Where places alone
decided, prompts came back with some blocks in another class than their neighbours, and agents hit
1 to 4 points less in small pools; the same came of remembering for longer.

A set-associative table in packed arrays, 17 bytes a place: a name belongs to one set of 16 places,
and in a full set the one that left first goes. Places are made at first need; when the pool has
grown, a larger table is put in front of the old one, which is only read from then on and dropped
once the new one has taken as many names: nothing is ever copied over, so no call takes longer than
another. A name is the first 8 bytes of a key, which is a digest; two names meet by chance once in
10^19 pairs, and that only blurs a count.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

WAYS = 16
TICK_NS = 1 << 26
"""67 ms: 32 bits of it are nine years."""
USES_MAX = 15
PLACES_MAX = 1 << 26
SPARE = 1.25
"""Places for each name: sets are not filled evenly."""
PLACE_BYTES = 17
_TURNS = 0xFFFFFFFF


class Past(NamedTuple):
    """A block's past. uses: how often it was asked for, at most `USES_MAX`; grade: its class."""

    asked_ns: int
    uses: int
    grade: int


class _Table:
    """One table of `sets` sets. added: names that were put in."""

    __slots__ = ("added", "facts", "names", "sets", "ticks", "turns")

    def __init__(self, sets: int) -> None:
        places = sets * WAYS
        self.sets = sets
        self.names = array("Q", bytes(8 * places))
        self.ticks = array("I", bytes(4 * places))
        self.turns = array("I", bytes(4 * places))
        self.facts = array("B", bytes(places))
        self.added = 0

    def put(self, name: int, tick: int, facts: int, turn: int) -> None:
        start = name % self.sets * WAYS
        stop = start + WAYS
        try:
            place = self.names.index(name, start, stop)
        except ValueError:
            turns = self.turns[start:stop]
            first = min(turns)
            if (oldest := max(turns)) > turn:
                # Turns began anew: one from before is older than all that came since.
                first = oldest
            place = start + turns.index(first)
            self.names[place] = name
            self.added += 1
        self.ticks[place] = tick
        self.facts[place] = facts
        self.turns[place] = turn

    def take(self, name: int) -> tuple[int, int, int] | None:
        start = name % self.sets * WAYS
        try:
            place = self.names.index(name, start, start + WAYS)
        except ValueError:
            return None
        self.names[place] = 0
        turn, self.turns[place] = self.turns[place], 0
        return self.ticks[place], self.facts[place], turn


class History:
    """The pasts of the last blocks that left: of as many as `resize` said."""

    def __init__(self) -> None:
        self._table: _Table | None = None
        self._older: _Table | None = None
        self._reach = 0
        self._turn = 0
        """Of the last departure, less whole rounds of 32 bits."""

    @property
    def table_bytes(self) -> int:
        """Of all tables."""
        tables = [table for table in (self._table, self._older) if table is not None]
        return sum(PLACE_BYTES * WAYS * table.sets for table in tables)

    def resize(self, names: int) -> None:
        """It shall reach back `names` departures; a table that has room for them stays."""
        self._reach = min(names, int(PLACES_MAX / SPARE))
        if self._table is None or self._reach > self._table.sets * WAYS:
            sets = -(-int(self._reach * SPARE) // WAYS) or 1
            self._older = self._table
            self._table = _Table(sets)

    @property
    def reach(self) -> int:
        """How many departures it reaches back."""
        return self._reach

    def put(self, key: bytes, past: Past) -> None:
        """The block left."""
        table = self._table
        if table is None:
            return
        tick = (past.asked_ns // TICK_NS) & 0xFFFFFFFF
        # A turn of 0 is an empty place.
        self._turn = self._turn % _TURNS + 1
        table.put(_name(key), tick, min(past.uses, USES_MAX) << 4 | past.grade, self._turn)
        if self._older is not None and table.added >= self._older.sets * WAYS:
            self._older = None

    def take(self, key: bytes) -> Past | None:
        """The block's past, if it is remembered; it is forgotten here."""
        name = _name(key)
        found = self._table.take(name) if self._table is not None else None
        if found is None and self._older is not None:
            found = self._older.take(name)
        if found is None:
            return None
        tick, facts, turn = found
        if (self._turn - turn) % _TURNS >= self._reach:
            return None
        return Past(tick * TICK_NS, facts >> 4, facts & 15)


def _name(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") or 1
