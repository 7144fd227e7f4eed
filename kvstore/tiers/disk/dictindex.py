"""An `Index` in memory, with a log of what was committed and faults on demand.

For tests and the simulator. It promises what `LmdbIndex` promises and lives as long as the object:
whoever "starts again" uses the same object, or `at` for an earlier moment. No I/O, no clock, no
lmdb.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvstore.tiers.disk.change import META, ROWS, SEGMENTS, TABLES, Change, pack_change
from kvstore.tiers.disk.format import Segment, unpack_segment, unpack_segment_key
from kvstore.tiers.disk.rows import (
    LOAD_ROWS,
    IndexRow,
    Place,
    RowBatch,
    index_bytes,
    unpack_rows,
    unseal,
)

_NODE_BYTES = 24
"""What LMDB adds to a row, about; for `used_bytes`."""


class Commit(NamedTuple):
    """One transaction as it was asked for."""

    remove: tuple[Place, ...]
    add: tuple[IndexRow, ...]
    remove_segments: tuple[int, ...]
    add_segments: tuple[Segment, ...]
    meta: tuple[tuple[str, bytes | None], ...]

    @property
    def change(self) -> Change:
        return pack_change(
            self.remove, self.add, self.remove_segments, self.add_segments, dict(self.meta)
        )


class CommitFault(NamedTuple):
    """A commit that raises `error`; holds: but took hold before, as LMDB's may."""

    error: OSError
    holds: bool = False


class DictIndex:
    """log: commits that took hold, in order. attempts: commits that were asked for. faults: number
    of an attempt, counted from 1, to what it meets. before: called with each commit before it takes
    hold, to look at the world at that moment; what it raises ends the commit.
    """

    def __init__(self) -> None:
        self.log: list[Commit] = []
        self.attempts = 0
        self.faults: dict[int, CommitFault] = {}
        self.before: Callable[[Commit], None] | None = None
        self.dropped_rows = 0
        self._tables: dict[bytes, dict[bytes, bytes]] = {table: {} for table in TABLES}
        self._bad: dict[tuple[bytes, bytes], None] = {}

    def at(self, commits: int) -> DictIndex:
        """A new index, as after the first `commits` of the log."""
        other = DictIndex()
        for commit in self.log[:commits]:
            other._apply(commit)
        return other

    def damage(self, place: Place) -> None:
        """Flips a bit of the row there. KeyError if there is none."""
        rows = self._tables[ROWS]
        name = place[0].to_bytes(4, "big") + place[1].to_bytes(4, "big")
        rows[name] = bytes([rows[name][0] ^ 1]) + rows[name][1:]

    def segments(self) -> list[Segment]:
        found = []
        for name, stored in sorted(self._tables[SEGMENTS].items()):
            number, value = unpack_segment_key(name), unseal(name, stored)
            if isinstance(number, int) and value is not None:
                segment = unpack_segment(number, value)
                if isinstance(segment, Segment):
                    found.append(segment)
        return found

    def row_count(self) -> int:
        return len(self._tables[ROWS])

    def load(self, batch_rows: int = LOAD_ROWS) -> Iterator[RowBatch]:
        start = b""
        while True:
            later = (item for item in sorted(self._tables[ROWS].items()) if item[0] > start)
            stored = list(itertools.islice(later, batch_rows))
            if not stored:
                return
            start = stored[-1][0]
            slots = {segment.segment: segment.slots for segment in self.segments()}
            batch, bad = unpack_rows(stored, slots)
            for name in bad:
                if (ROWS, name) not in self._bad:
                    self._bad[ROWS, name] = None
                    self.dropped_rows += 1
            if len(batch.rows):
                yield batch

    def commit(
        self,
        *,
        remove: Iterable[Place] = (),
        add: Iterable[IndexRow] = (),
        remove_segments: Iterable[int] = (),
        add_segments: Iterable[Segment] = (),
        meta: Mapping[str, bytes | None] | None = None,
    ) -> None:
        commit = Commit(
            tuple(remove),
            tuple(add),
            tuple(remove_segments),
            tuple(add_segments),
            tuple((meta or {}).items()),
        )
        _ = commit.change  # ValueError before anything happens.
        self.attempts += 1
        if self.before is not None:
            self.before(commit)
        fault = self.faults.get(self.attempts)
        if fault is None or fault.holds:
            self._apply(commit)
        if fault is not None:
            raise fault.error

    def meta(self) -> dict[str, bytes]:
        values = {name.decode(): unseal(name, v) for name, v in self._tables[META].items()}
        return {name: value for name, value in values.items() if value is not None}

    def allowance_bytes(self, slots: int) -> int:
        return max(index_bytes(slots), self.used_bytes())

    def used_bytes(self) -> int:
        return sum(
            len(name) + len(value) + _NODE_BYTES
            for table in self._tables.values()
            for name, value in table.items()
        )

    def close(self) -> None:
        return None

    def _apply(self, commit: Commit) -> None:
        change = commit.change
        for table, name in (*self._bad, *change.gone):
            self._tables[table].pop(name, None)
        self._bad.clear()
        for segment in change.gone_segments:
            self._tables[SEGMENTS].pop(segment, None)
            rows = self._tables[ROWS]
            for name in [name for name in rows if name.startswith(segment)]:
                del rows[name]
        for table, name, value in change.puts:
            self._tables[table][name] = value
        self.log.append(commit)
