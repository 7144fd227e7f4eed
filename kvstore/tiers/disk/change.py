"""A commit of the index, packed and in order, before anything is written. For the indices alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvstore.tiers.disk.format import Segment, pack_segment, pack_segment_key
from kvstore.tiers.disk.rows import IndexRow, Place, pack_place, pack_row, seal

TABLES = SEGMENTS, ROWS, META = b"seg", b"row", b"meta"
FORMAT_NAME = "format"
META_NAME_BYTES_MAX = 255


class Change(NamedTuple):
    """gone: (table, name). gone_segments: names, which go with all their rows. puts: (table, name,
    sealed value), after the removals.
    """

    gone: list[tuple[bytes, bytes]]
    gone_segments: list[bytes]
    puts: list[tuple[bytes, bytes, bytes]]

    def parts(self, slots: int) -> int:
        """In how many stretches of so many slots its rows lie."""
        names = [name for _, name in self.gone] + [name for _, name, _ in self.puts]
        return len({(name[:4], int.from_bytes(name[4:8], "big") // slots) for name in names})


def pack_change(
    remove: Iterable[Place],
    add: Iterable[IndexRow],
    remove_segments: Iterable[int],
    add_segments: Iterable[Segment],
    meta: Mapping[str, bytes | None],
) -> Change:
    """As `Index.commit` says. ValueError for a field that does not fit."""
    change = Change([], [pack_segment_key(segment) for segment in remove_segments], [])
    # In order of keys, so that each page is met once.
    change.gone.extend((ROWS, name) for name in sorted(map(pack_place, remove)))
    change.puts.extend((ROWS, *row) for row in sorted(map(pack_row, add)))
    for segment in add_segments:
        name = pack_segment_key(segment.segment)
        change.puts.append((SEGMENTS, name, seal(name, pack_segment(segment))))
    for text, value in meta.items():
        name = text.encode()
        if not 0 < len(name) <= META_NAME_BYTES_MAX or text == FORMAT_NAME:
            raise ValueError(f"{text!r} is no name of a value")
        if value is None:
            change.gone.append((META, name))
        else:
            change.puts.append((META, name, seal(name, value)))
    return change
