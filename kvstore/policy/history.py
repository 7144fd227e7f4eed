"""What is remembered of blocks that left: when they were last asked for, how often, in which class.

A set-associative table in packed arrays, 13 bytes a place: a name belongs to one set of 16 places,
and in a full set the one that was asked for longest ago goes. Places are made for four names a
block at first need; when the pool has grown, a larger table is put in front of the old one, which
is only read from then on and dropped once the new one has taken as many names: nothing is ever
copied over, so no call takes longer than another. A name is the first 8 bytes of a key, which is a
digest; two names meet by chance once in 10^19 pairs, and that only blurs a count.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

WAYS = 16
TICK_NS = 1 << 26
"""67 ms: 32 bits of it are nine years."""
USES_MAX = 15
PLACES_MAX = 1 << 26


class Past(NamedTuple):
    """A block's past. uses: how often it was asked for, at most `USES_MAX`; grade: its class."""

    asked_ns: int
    uses: int
    grade: int


class _Table:
    """One table of `sets` sets. added: names that were put in."""

    __slots__ = ("added", "facts", "names", "sets", "ticks")

    def __init__(self, sets: int) -> None:
        places = sets * WAYS
        self.sets = sets
        self.names = array("Q", bytes(8 * places))
        self.ticks = array("I", bytes(4 * places))
        self.facts = array("B", bytes(places))
        self.added = 0

    def put(self, name: int, tick: int, facts: int) -> None:
        start = name % self.sets * WAYS
        stop = start + WAYS
        try:
            place = self.names.index(name, start, stop)
        except ValueError:
            ticks = self.ticks[start:stop]
            place = start + ticks.index(min(ticks))
            self.names[place] = name
            self.added += 1
        self.ticks[place] = tick
        self.facts[place] = facts

    def take(self, name: int) -> tuple[int, int] | None:
        start = name % self.sets * WAYS
        try:
            place = self.names.index(name, start, start + WAYS)
        except ValueError:
            return None
        self.names[place] = 0
        tick, self.ticks[place] = self.ticks[place], 0
        return tick, self.facts[place]


class History:
    """The pasts of the last blocks that left: as many as `resize` said, about."""

    def __init__(self) -> None:
        self._table: _Table | None = None
        self._older: _Table | None = None

    @property
    def table_bytes(self) -> int:
        """Of all tables."""
        tables = [table for table in (self._table, self._older) if table is not None]
        return sum(13 * WAYS * table.sets for table in tables)

    def resize(self, names: int) -> None:
        """There shall be room for `names`; a table that has it stays."""
        sets = -(-min(names, PLACES_MAX) // WAYS) or 1
        if self._table is None or sets > self._table.sets:
            self._older = self._table
            self._table = _Table(sets)

    @property
    def places(self) -> int:
        """For how many names there is room."""
        return 0 if self._table is None else self._table.sets * WAYS

    def put(self, key: bytes, past: Past) -> None:
        """The block left."""
        table = self._table
        if table is None:
            return
        # A tick of 0 is an empty place.
        tick = (past.asked_ns // TICK_NS + 1) & 0xFFFFFFFF
        table.put(_name(key), tick, min(past.uses, USES_MAX) << 4 | past.grade)
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
        tick, facts = found
        return Past((tick - 1) * TICK_NS, facts >> 4, facts & 15)


def _name(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") or 1
