"""Extents: parts get ranges that never overlap, and all of it comes back."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.core.staging import EXTENT_ALIGN_BYTES, Extent, Extents


def test_parts_begin_on_cache_lines_from_the_lowest_hole_on() -> None:
    extents = Extents(1_000)
    offsets, taken = extents.take(100, 3)
    assert offsets == [0, 128, 256]
    assert taken == [Extent(0, 384)]
    assert all(offset % EXTENT_ALIGN_BYTES == 0 for offset in offsets)


def test_fewer_parts_than_asked_for_if_there_is_no_room() -> None:
    extents = Extents(1_000)
    assert extents.take(300, 9)[0] == [0, 320, 640]
    assert extents.take(300, 1) == ([], [])


def test_holes_are_filled_first_and_grow_together() -> None:
    extents = Extents(640)
    taken = [extents.take(64, 1)[1][0] for _ in range(10)]
    for extent in (taken[2], taken[4], taken[3], taken[7]):
        extents.give(extent)
    assert list(extents.holes()) == [Extent(128, 192), Extent(448, 64)]
    offsets, parts = extents.take(64, 4)
    assert offsets == [128, 192, 256, 448]
    assert len(parts) == 2
    for extent in [*parts, *(taken[i] for i in (0, 1, 5, 6, 8, 9))]:
        extents.give(extent)
    assert list(extents.holes()) == [Extent(0, 640)]
    assert extents.used_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_ranges_never_overlap_and_none_is_lost(seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    extents = Extents(64 * 1_024)
    out: list[Extent] = []
    for _ in range(300):
        if out and random.random() < 0.5:
            extents.give(out.pop(random.randrange(len(out))))
        else:
            part_bytes = random.choice([32, 64, 100, 4_096])
            offsets, taken = extents.take(part_bytes, random.randint(1, 9))
            for offset in offsets:
                within = [e for e in taken if e.offset <= offset]
                assert any(offset + part_bytes <= e.offset + e.length for e in within)
            out += taken
        ranges = sorted([*out, *extents.holes()])
        assert [e.offset for e in ranges] == [0, *(e.offset + e.length for e in ranges)][:-1]
        assert sum(e.length for e in out) == extents.used_bytes
