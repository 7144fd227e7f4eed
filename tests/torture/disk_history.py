"""What happened to a disk tier, in order, and what follows from it for a crash at any moment.

A `History` notes what was tried and what was told, with the moments of the log that a cut goes
through; `NotingFolder` lets a tier's index note when it commits. A `Standing` is the model: by
block which versions may be answered, and which have to be there since they were acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.tiers.disk.format import Segment
from kvstore.tiers.disk.opening import Folder, Opened
from kvstore.tiers.disk.rows import Index, IndexRow, Place, RowBatch

Name = tuple[int, bytes]
"""Space and key."""


class Event(NamedTuple):
    """what: "commit" (begins), "saved", "dropped", "forget" (begins), "forgotten", "ledger"
    (begins), "in ledger". values: of the ledger, as it is then.
    """

    at: int
    what: str
    names: tuple[Name, ...] = ()
    version: int = 0
    values: tuple[tuple[str, bytes, bytes], ...] = ()


@dataclass
class History:
    """What happened, in order. moment: gives the present one."""

    moment: Callable[[str], int]
    events: list[Event] = field(default_factory=list)
    versions: dict[bytes, tuple[Name, int]] = field(default_factory=dict)
    names: dict[Name, None] = field(default_factory=dict)

    def note(
        self,
        what: str,
        names: Iterable[Name] = (),
        version: int = 0,
        values: Iterable[tuple[str, bytes, bytes]] = (),
    ) -> None:
        """Something that begins or has ended now; as in Event."""
        moment = self.moment(what)
        self.events.append(Event(moment, what, tuple(names), version, tuple(values)))

    def wrote(self, name: Name, version: int, checksum: bytes) -> None:
        """A version that is about to be saved."""
        self.versions[checksum] = (name, version)
        self.names[name] = None

    def dump(self, path: Path) -> None:
        """As JSON."""
        events = [
            [
                event.at,
                event.what,
                [[space_id, key.hex()] for space_id, key in event.names],
                event.version,
                [[table, key.hex(), value.hex()] for table, key, value in event.values],
            ]
            for event in self.events
        ]
        path.write_text(json.dumps(events))


def load(path: Path) -> list[Event]:
    """The events that `History.dump` wrote."""
    return [
        Event(
            at,
            what,
            tuple((space_id, bytes.fromhex(key)) for space_id, key in names),
            version,
            tuple((t, bytes.fromhex(key), bytes.fromhex(value)) for t, key, value in values),
        )
        for at, what, names, version, values in json.loads(path.read_text())
    ]


@dataclass
class Standing:
    """What a crash may leave, as far as `events` were taken."""

    allowed: dict[Name, set[int]] = field(default_factory=dict)
    required: dict[Name, int] = field(default_factory=dict)
    ledgers: list[tuple[tuple[str, bytes, bytes], ...]] = field(default_factory=lambda: [()])
    acknowledged: bool = False

    def take(self, event: Event) -> None:
        """The next event."""
        if event.what == "ledger":
            self.ledgers.append(event.values)
        elif event.what == "in ledger":
            self.ledgers = [event.values]
        for name in event.names:
            if event.what == "commit":
                self.allowed.setdefault(name, set()).add(event.version)
            elif event.what == "saved":
                self.allowed[name] = {event.version}
                self.required[name] = event.version
                self.acknowledged = True
            else:
                self.required.pop(name, None)
            if event.what == "forgotten":
                self.allowed[name] = set()


# ---------------------------------------------------------------- what notes


class NotingIndex:
    """An index that notes when a commit begins that brings rows."""

    def __init__(self, index: Index, history: History) -> None:
        self._index = index
        self._history = history

    @property
    def dropped_rows(self) -> int:
        return self._index.dropped_rows

    def segments(self) -> list[Segment]:
        return self._index.segments()

    def row_count(self) -> int:
        return self._index.row_count()

    def load(self, batch_rows: int = 7) -> Iterator[RowBatch]:
        return self._index.load(batch_rows)

    def commit(
        self,
        *,
        remove: Iterable[Place] = (),
        add: Iterable[IndexRow] = (),
        remove_segments: Iterable[int] = (),
        add_segments: Iterable[Segment] = (),
        meta: Mapping[str, bytes | None] | None = None,
    ) -> None:
        rows = list(add)
        for row in rows:
            name, version = self._history.versions[row.row.checksum]
            assert name == (row.space_id, row.key), "a row of another block"
            self._history.note("commit", [name], version)
        self._index.commit(
            remove=remove,
            add=rows,
            remove_segments=remove_segments,
            add_segments=add_segments,
            meta=meta,
        )

    def meta(self) -> dict[str, bytes]:
        return self._index.meta()

    def allowance_bytes(self, slots: int) -> int:
        return self._index.allowance_bytes(slots)

    def used_bytes(self) -> int:
        return self._index.used_bytes()

    def close(self) -> None:
        self._index.close()


class NotingFolder:
    """A folder whose index notes."""

    def __init__(self, folder: Folder, history: History) -> None:
        self._folder = folder
        self._history = history

    def open(self) -> Opened:
        opened = self._folder.open()
        return Opened(NotingIndex(opened.index, self._history), opened.files, opened.set_aside)

    def is_there(self) -> bool:
        return self._folder.is_there()

    def set_aside(self, reason: str) -> None:
        self._folder.set_aside(reason)

    def aside_bytes(self) -> int:
        return self._folder.aside_bytes()

    def tidy(self) -> None:
        self._folder.tidy()

    def drop_aside(self) -> None:
        self._folder.drop_aside()

    def close(self) -> None:
        self._folder.close()
