"""What every index of the disk tier promises: commits whole and in order, rows as committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvstore.tiers.disk.dictindex import DictIndex
from kvstore.tiers.disk.format import Row, Segment
from kvstore.tiers.disk.index import LmdbIndex
from kvstore.tiers.disk.rows import Index, IndexRow, index_bytes

TENANT = b"\x07" * 32
SLOTS = 8


@pytest.fixture(params=["lmdb", "dict"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Index]]:
    """Each call closes the index and opens it again; the first makes it."""
    opened: list[Index] = []

    def again() -> Index:
        if request.param == "dict":
            if not opened:
                opened.append(DictIndex())
            return opened[0]
        for index in opened:
            index.close()
        opened[:] = [LmdbIndex(str(tmp_path / "index"))]
        return opened[0]

    yield again
    for index in opened:
        index.close()


@pytest.fixture
def index(reopen: Callable[[], Index]) -> Index:
    return reopen()


def segment(number: int, slots: int = SLOTS) -> Segment:
    return Segment(number, 8192, slots, TENANT)


def row(number: int, slot: int, *, name: int = 0, space: int = 1, generation: int = 1) -> IndexRow:
    key = name.to_bytes(32, "big")
    parent = (name - 1).to_bytes(32, "big") if name > 1 else b""
    where = Row(number, slot, generation, 4096, bytes([slot]) * 16, parent, max(name - 1, 0))
    return IndexRow(space, key, where)


def rows(index: Index, batch_rows: int = 10_000) -> list[IndexRow]:
    return [row for batch in index.load(batch_rows) for row in batch.unpack()]


def test_a_new_index_is_empty(index: Index) -> None:
    assert index.segments() == []
    assert rows(index) == []
    assert index.row_count() == 0
    assert index.meta() == {}
    assert index.dropped_rows == 0


def test_what_was_committed_is_there_after_opening_again(reopen: Callable[[], Index]) -> None:
    index = reopen()
    added = [row(1, 0, name=9), row(1, 3, name=2, space=1 << 63), row(4, 7, name=1)]
    index.commit(
        add=added, add_segments=[segment(4), segment(1)], meta={"generation": b"\0\7", "é": b""}
    )
    for reopened in (False, True):
        index = reopen() if reopened else index
        assert rows(index) == added
        assert index.segments() == [segment(1), segment(4)]
        assert index.meta() == {"generation": b"\0\7", "é": b""}
        assert index.row_count() == 3


def test_rows_come_in_order_of_their_place_and_in_batches(index: Index) -> None:
    added = [row(number, slot) for number in (0, 1, 300) for slot in range(SLOTS)]
    mixed = list(added)
    Random(1).shuffle(mixed)
    index.commit(add=mixed, add_segments=[segment(0), segment(1), segment(300)])
    batches = [batch.unpack() for batch in index.load(batch_rows=5)]
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 4]
    assert [row for batch in batches for row in batch] == added


def test_a_batch_is_packed_arrays(index: Index) -> None:
    index.commit(add=[row(2, 5, name=77, space=3, generation=9)], add_segments=[segment(2)])
    (batch,) = index.load()
    assert batch.space_ids.dtype == np.uint64
    assert batch.space_ids.tolist() == [3]
    assert batch.keys.shape == (1, 32)
    assert batch.keys[0].tobytes() == (77).to_bytes(32, "big")
    assert [int(batch.rows[name][0]) for name in ("segment", "slot", "generation")] == [2, 5, 9]


def test_a_slot_has_one_row_and_additions_follow_removals(index: Index) -> None:
    index.commit(add=[row(1, 0, name=1), row(1, 1, name=2)], add_segments=[segment(1)])
    index.commit(remove=[(1, 0), (1, 1), (1, 2), (9, 9)], add=[row(1, 0, name=3, generation=2)])
    assert rows(index) == [row(1, 0, name=3, generation=2)]
    index.commit(add=[row(1, 0, name=4, generation=3)])
    assert rows(index) == [row(1, 0, name=4, generation=3)]
    assert index.row_count() == 1


def test_a_segment_goes_with_its_rows(index: Index) -> None:
    added = [row(number, slot) for number in (1, 2, 258) for slot in range(SLOTS)]
    index.commit(add=added, add_segments=[segment(1), segment(2), segment(258)])
    index.commit(remove_segments=[2, 5], add=[row(1, 0, name=7)])
    assert {found.row.segment for found in rows(index)} == {1, 258}
    assert index.segments() == [segment(1), segment(258)]
    index.commit(remove_segments=[258])
    assert len(rows(index)) == SLOTS


def test_a_segment_that_went_may_come_back_empty(index: Index) -> None:
    index.commit(add=[row(1, 0)], add_segments=[segment(1)])
    index.commit(remove_segments=[1], add_segments=[segment(1, slots=2)])
    assert rows(index) == []
    assert index.segments() == [segment(1, slots=2)]


def test_rows_in_no_known_slot_are_dropped_counted_and_removed(index: Index) -> None:
    index.commit(
        add=[row(1, 0), row(1, SLOTS), row(2, 0), row(3, 0)], add_segments=[segment(1), segment(3)]
    )
    assert rows(index) == [row(1, 0), row(3, 0)]
    assert index.dropped_rows == 2
    assert rows(index) == [row(1, 0), row(3, 0)]
    assert index.dropped_rows == 2, "each once"
    assert index.row_count() == 4
    index.commit(add=[row(1, SLOTS - 1)])
    assert index.row_count() == 3


def test_a_dropped_place_may_be_used_by_the_commit_that_cleans_it(index: Index) -> None:
    index.commit(add=[row(5, 0)])
    assert rows(index) == []
    index.commit(add=[row(5, 0, name=2)], add_segments=[segment(5)])
    assert rows(index) == [row(5, 0, name=2)]


def test_nothing_is_written_of_a_commit_that_does_not_fit(index: Index) -> None:
    index.commit(add=[row(1, 0)], add_segments=[segment(1)])
    wrong = row(1, 1)
    for bad in (
        wrong._replace(key=b"short"),
        wrong._replace(space_id=1 << 64),
        wrong._replace(row=wrong.row._replace(slot=1 << 32)),
        wrong._replace(row=wrong.row._replace(checksum=b"")),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            index.commit(remove=[(1, 0)], add=[row(1, 2), bad])
    for name in ("", "format", "x" * 256):
        with pytest.raises(ValueError, match="name"):
            index.commit(remove=[(1, 0)], meta={name: b""})
    assert rows(index) == [row(1, 0)]


def test_values_are_replaced_and_deleted(index: Index) -> None:
    index.commit(meta={"a": b"1", "b": b"2"})
    index.commit(meta={"a": None, "b": b"3", "absent": None})
    assert index.meta() == {"b": b"3"}


def test_the_allowance_covers_what_is_used(index: Index) -> None:
    assert index.allowance_bytes(1_000) >= index_bytes(1_000) > 152_000
    assert index.allowance_bytes(0) >= index.used_bytes()
    index.commit(add=[row(1, slot) for slot in range(SLOTS)], add_segments=[segment(1)])
    assert 0 < index.used_bytes() <= index.allowance_bytes(SLOTS)


def test_closing_twice_is_fine(index: Index) -> None:
    index.close()
    index.close()


places = st.tuples(st.integers(0, 2), st.integers(0, 3))


@settings(max_examples=15, deadline=None)
@given(
    commits=st.lists(
        st.tuples(
            st.lists(places, max_size=4),
            st.lists(places, max_size=4, unique=True),
            st.sets(st.integers(0, 2), max_size=1),
        ),
        max_size=8,
    )
)
@pytest.mark.parametrize("kind", ["lmdb", "dict"])
def test_any_commits_leave_what_a_dictionary_says(
    kind: str,
    commits: list[tuple[list[tuple[int, int]], list[tuple[int, int]], set[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    index: Index = DictIndex()
    if kind == "lmdb":
        index = LmdbIndex(str(tmp_path_factory.mktemp("index")))
    every = [segment(number, slots=4) for number in range(3)]
    index.commit(add_segments=every)
    model: dict[tuple[int, int], IndexRow] = {}
    for generation, (removed, added, retired) in enumerate(commits):
        new = [row(*place, name=generation, generation=generation) for place in added]
        again = [segment(number, slots=4) for number in retired]
        index.commit(remove=removed, add=new, remove_segments=retired, add_segments=again)
        for place in list(model):
            if place in removed or place[0] in retired:
                del model[place]
        model.update({found.place: found for found in new})
        assert rows(index, batch_rows=3) == [found for _, found in sorted(model.items())]
        assert index.row_count() == len(model)
    index.close()
