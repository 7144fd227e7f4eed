"""What a check of a disk tier's folder found. Pure; made by `verify`, printed by the tool."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Kind(enum.Enum):
    """What is damaged: the daemon would answer a miss where it promised a block, or not start warm.

    FORMAT: the file of that name; INDEX: the whole of it; INDEX_ROW: a row, by its own checksum;
    SEGMENT_MISSING, SEGMENT_SIZE: a file that the index names; RECORD: the record of a row;
    UNREADABLE: the device refused; SLOT_TWICE, NAME_TWICE: two rows claim one slot, or one name;
    OVER_CAPACITY: the folder takes more than it may.
    """

    FORMAT = "format"
    INDEX = "index"
    INDEX_ROW = "index row"
    SEGMENT_MISSING = "segment missing"
    SEGMENT_SIZE = "segment size"
    RECORD = "record"
    UNREADABLE = "unreadable"
    SLOT_TWICE = "slot twice"
    NAME_TWICE = "name twice"
    OVER_CAPACITY = "over capacity"


class Damage(NamedTuple):
    """One finding. where: the file and slot, relative to the folder; what: one line."""

    kind: Kind
    where: str
    what: str


@dataclass(frozen=True)
class Accounting:
    """Where the folder's bytes are, as the file system counts them.

    capacity_bytes 0: not known. slot_bytes: of all slots, taken or not; record_bytes: of slots with
    a right record; payload_bytes: of their payloads.
    """

    capacity_bytes: int = 0
    segment_bytes: int = 0
    index_bytes: int = 0
    aside_bytes: int = 0
    other_bytes: int = 0
    unknown_segment_bytes: int = 0
    slot_bytes: int = 0
    record_bytes: int = 0
    payload_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Of everything in the folder."""
        parts = self.segment_bytes, self.index_bytes, self.aside_bytes, self.other_bytes
        return sum(parts) + self.unknown_segment_bytes


@dataclass(frozen=True)
class Report:
    """The result. Not damage, but counted: `unnamed_records`, which are whole and have no row
    (evicted, or not committed before a crash); `unnamed_slots` with bytes that are no record (a
    write that was cut); `unknown_segments`, files that the index does not name (a crash between
    making and naming); `parents_missing`, blocks that no prompt can reach.
    """

    folder: str
    folder_id: str = ""
    rows: int = 0
    right: int = 0
    spaces: int = 0
    segments: int = 0
    slots: int = 0
    parents_missing: int = 0
    unnamed_records: int = 0
    unnamed_slots: int = 0
    unknown_segments: int = 0
    bytes_read: int = 0
    notes: tuple[str, ...] = ()
    accounting: Accounting = field(default_factory=Accounting)
    damages: tuple[Damage, ...] = ()
    damage_counts: dict[Kind, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage_counts

    def to_dict(self) -> dict[str, Any]:
        """For JSON: names as here, sizes in bytes."""
        fields = {
            name: getattr(self, name)
            for name in (
                "folder", "folder_id", "rows", "right", "spaces", "segments", "slots",
                "parents_missing", "unnamed_records", "unnamed_slots", "unknown_segments",
                "bytes_read",
            )
        }  # fmt: skip
        accounting = {**vars(self.accounting), "total_bytes": self.accounting.total_bytes}
        return {
            "ok": self.ok,
            **fields,
            "notes": list(self.notes),
            "accounting": accounting,
            "damage_counts": {kind.value: count for kind, count in self.damage_counts.items()},
            "damages": [
                {"kind": damage.kind.value, "where": damage.where, "what": damage.what}
                for damage in self.damages
            ],
        }


class Findings:
    """Collects damages: all are counted, the first `kept_max` are kept."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self.kept: list[Damage] = []
        self.counts: Counter[Kind] = Counter()

    def add(self, kind: Kind, where: str, what: str, count: int = 1) -> None:
        """Notes a damage that stands for `count` of its kind."""
        self.counts[kind] += count
        if len(self.kept) < self._kept_max:
            self.kept.append(Damage(kind, where, what))
