"""The catalog: exact names, row numbers used again, spaces that go in steps, bounded memory."""

from __future__ import annotations

import gc
import hashlib
import threading
from random import Random

import numpy as np
import pytest

from kvstore.tiers.disk.catalog import LENGTH_MAX, NO_ROW, Catalog
from kvstore.tiers.disk.format import ROW_DTYPE, Row
from kvstore.tiers.disk.hashtable import FILL_MAX, SIZE_MIN, Hash, HashTable
from kvstore.tiers.disk.rows import IndexRow, RowBatch

SECRET = bytes(range(1, 81))


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def row(number: int, *, generation: int = 1, length: int = 4096) -> Row:
    return Row(
        number // 100, number % 100, generation, length, key(number)[:16], key(number - 1), number
    )


def batch(rows: list[IndexRow]) -> RowBatch:
    packed = np.zeros(len(rows), ROW_DTYPE)
    for index, (_, _, r) in enumerate(rows):
        fields = (r.segment, r.slot, r.generation, r.length, r.checksum, r.parent)
        packed[index] = (1, 0, r.depth, *fields)
    keys = np.frombuffer(b"".join(r.key for r in rows), np.uint8).reshape(-1, 32)
    return RowBatch(np.array([r.space_id for r in rows], np.uint64), keys, packed)


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(secret=SECRET)


def test_an_empty_catalog_knows_nothing(catalog: Catalog) -> None:
    assert catalog.find(1, []).tolist() == []
    assert catalog.find(1, [key(1), key(2)]).tolist() == [NO_ROW, NO_ROW]
    assert catalog.get(1, key(1)) is None
    assert len(catalog) == 0
    assert catalog.swept


def test_a_block_is_told_as_it_was_put(catalog: Catalog) -> None:
    number = catalog.put(7, key(250), row(250, generation=1 << 40, length=LENGTH_MAX))
    entry = catalog.get(7, key(250))
    assert entry is not None
    assert entry.to_row(key(249)) == row(250, generation=1 << 40, length=LENGTH_MAX)
    assert entry.row == number
    assert catalog.find(7, [key(1), key(250)]).tolist() == [NO_ROW, number]
    assert catalog.names([number]) == [(7, key(250))]
    segments, slots = catalog.places([number])
    assert (segments.tolist(), slots.tolist()) == ([2], [50])
    assert catalog.depths([number]).tolist() == [250]


def test_spaces_do_not_meet_and_every_bit_of_a_key_counts(catalog: Catalog) -> None:
    catalog.put(1, key(1), row(1))
    assert catalog.get(2, key(1)) is None
    for bit in range(256):
        flipped = (int.from_bytes(key(1), "big") ^ 1 << bit).to_bytes(32, "big")
        assert catalog.get(1, flipped) is None
    assert catalog.get(1, key(1)) is not None


def test_one_is_found_as_many_are(catalog: Catalog) -> None:
    chance = Random(11)
    for step in range(3_000):
        catalog.put(step % 3, key(step), row(step, generation=step + 1))
        if step % 2:
            gone = chance.randrange(step)
            catalog.remove([n for n in catalog.find(gone % 3, [key(gone)]).tolist() if n != NO_ROW])
    for space in range(3):
        names = [key(number) for number in range(3_100)]
        for name, number in zip(names, catalog.find(space, names).tolist(), strict=True):
            assert catalog.get(space, name) == (
                catalog.entries([number])[0] if number >= 0 else None
            )
    with pytest.raises(ValueError, match="32 bytes"):
        catalog.get(0, b"short")


def test_put_refuses_what_is_known_and_changes_nothing(catalog: Catalog) -> None:
    catalog.put(1, key(1), row(1))
    fresh = IndexRow(1, key(2), row(2))
    for bad in (
        [fresh, IndexRow(1, key(1), row(1))],
        [fresh, fresh],
        [fresh, IndexRow(1, key(3), row(3, length=0))],
        [fresh, IndexRow(1, key(3), row(3, length=LENGTH_MAX + 1))],
        [fresh, IndexRow(1 << 64, key(3), row(3))],
        [fresh, IndexRow(1, b"short", row(3))],
    ):
        with pytest.raises(ValueError, match=r"\w"):
            catalog.put_many(bad)
        assert len(catalog) == 1
        assert catalog.get(1, key(2)) is None
    assert catalog.put_many([fresh, fresh._replace(space_id=2)]) == [1, 2]


def test_row_numbers_are_used_again(catalog: Catalog) -> None:
    first = catalog.put_many([IndexRow(1, key(n), row(n)) for n in range(100)])
    catalog.remove(first[20:50])
    assert catalog.find(1, [key(n) for n in range(100)]).tolist() == [
        NO_ROW if 20 <= n < 50 else first[n] for n in range(100)
    ]
    again = catalog.put_many([IndexRow(1, key(n), row(n)) for n in range(200, 230)])
    assert sorted(again) == first[20:50]
    assert len(catalog) == 100


def test_rows_that_are_none_are_refused(catalog: Catalog) -> None:
    first, second = catalog.put_many([IndexRow(1, key(n), row(n)) for n in (1, 2)])
    catalog.remove([first])
    for wrong in ([first], [second + 1], [-1], [second, second], [second, first]):
        with pytest.raises(KeyError):
            catalog.remove(wrong)
    with pytest.raises(KeyError):
        catalog.entries([first])
    assert catalog.get(1, key(2)) is not None


def test_loading_keeps_the_first_of_a_name_and_what_fits(catalog: Catalog) -> None:
    catalog.put(1, key(1), row(1))
    catalog.drop_space(9)
    loaded = [
        IndexRow(1, key(1), row(11)),
        IndexRow(1, key(2), row(2)),
        IndexRow(9, key(3), row(3)),
        IndexRow(1, key(2), row(12)),
        IndexRow(1, key(4), row(4, length=1 << 33)),
        IndexRow(1, key(5), row(5)),
    ]
    rows = catalog.put_batch(batch(loaded)).tolist()
    assert [number != NO_ROW for number in rows] == [False, True, False, False, False, True]
    entries = catalog.entries([number for number in rows if number != NO_ROW])
    assert [(entry.segment, entry.slot) for entry in entries] == [(0, 2), (0, 5)]
    assert len(catalog) == 3
    found = catalog.find_batch(*batch(loaded)[:2])
    assert found.tolist() == [0, rows[1], NO_ROW, rows[1], NO_ROW, rows[5]]


def test_a_dropped_space_is_silent_at_once_and_swept_in_steps(catalog: Catalog) -> None:
    for space in (1, 2, 3):
        catalog.put_many([IndexRow(space, key(n), row(n)) for n in range(50)])
    catalog.drop_space(2)
    assert catalog.find(2, [key(n) for n in range(50)]).tolist() == [NO_ROW] * 50
    assert catalog.get(2, key(0)) is None
    with pytest.raises(ValueError, match="dropped"):
        catalog.put(2, key(60), row(60))
    swept: list[int] = []
    while not catalog.swept:
        step = catalog.sweep(rows_max=7)
        assert len(step) <= 7
        assert {space for space, _ in catalog.names(step)} <= {2}
        swept += step.tolist()
        catalog.remove(step)
    assert len(swept) == len(set(swept)) == 50
    assert [catalog.space_blocks(space) for space in (1, 2, 3)] == [50, 0, 50]
    with pytest.raises(ValueError, match="dropped"):
        catalog.put(2, key(60), row(60))
    catalog.forget_dropped()
    assert catalog.put(2, key(60), row(60)) in swept


def test_a_sweep_that_was_not_followed_up_finds_the_rows_again(catalog: Catalog) -> None:
    catalog.put_many([IndexRow(1, key(n), row(n)) for n in range(10)])
    catalog.drop_space(1)
    assert catalog.sweep(100).tolist() == catalog.sweep(100).tolist() == list(range(10))
    catalog.forget_dropped()
    assert not catalog.swept, "what is not swept is not forgotten"


@pytest.mark.parametrize("seed", range(4))
def test_any_changes_leave_what_a_dictionary_says(seed: int) -> None:
    random = Random(seed)
    catalog = Catalog(secret=random.randbytes(80))
    model: dict[tuple[int, bytes], int] = {}
    for _ in range(60):
        new = {
            (random.randrange(3), key(random.randrange(6_000)))
            for _ in range(random.randrange(300))
        }
        fresh = sorted(name for name in new if name not in model)
        places = [random.randrange(1_000_000) for _ in fresh]
        if random.random() < 0.5:
            loaded = [
                IndexRow(*name, row(place)) for name, place in zip(fresh, places, strict=True)
            ]
            assert NO_ROW not in catalog.put_batch(batch(loaded)).tolist() if loaded else True
        else:
            catalog.put_many(
                [IndexRow(*name, row(place)) for name, place in zip(fresh, places, strict=True)]
            )
        model.update(zip(fresh, places, strict=True))
        gone = random.sample(sorted(model), random.randrange(min(len(model), 250) + 1))
        numbers = [int(catalog.find(space, [name])[0]) for space, name in gone]
        assert catalog.names(numbers) == gone
        catalog.remove(numbers)
        for name in gone:
            del model[name]
        assert len(catalog) == len(model)
    for space in range(3):
        asked = [key(n) for n in range(6_000)]
        found = catalog.find(space, asked).tolist()
        known = [index for index, number in enumerate(found) if number != NO_ROW]
        entries = catalog.entries([found[index] for index in known])
        told = {(space, asked[index]): entry for index, entry in zip(known, entries, strict=True)}
        expected = {name: place for name, place in model.items() if name[0] == space}
        assert {name: e.segment * 100 + e.slot for name, e in told.items()} == expected


def test_the_table_stays_within_its_fill_through_churn(catalog: Catalog) -> None:
    for round_ in range(300):
        numbers = catalog.put_many([IndexRow(1, key(round_ * 50 + n), row(n)) for n in range(50)])
        catalog.remove(numbers)
    table = catalog._view.table
    assert table.size == SIZE_MIN
    assert table.used == 0
    assert table.gone <= table.size * FILL_MAX


def test_colliding_names_are_kept_apart() -> None:
    # A hash of zeros puts every name in one place: only the comparison tells them apart.
    hashed, table = Hash(bytes(80)), HashTable(0)
    names = np.arange(5 * 100, dtype=np.uint64).reshape(-1, 5)
    table.add(np.arange(100), hashed(names))
    assert table.find(names, hashed(names), names).tolist() == list(range(100))
    table.remove(np.arange(0, 100, 2), hashed(names[::2]))
    assert table.find(names, hashed(names), names).tolist() == [
        n if n % 2 else NO_ROW for n in range(100)
    ]


def test_find_answers_while_another_thread_changes_the_catalog(catalog: Catalog) -> None:
    kept = [key(n) for n in range(500)]
    numbers = catalog.put_many([IndexRow(1, k, row(n)) for n, k in enumerate(kept)])
    done = threading.Event()
    wrong: list[list[int]] = []

    def ask() -> None:
        while not done.is_set():
            found = catalog.find(1, kept).tolist()
            if found != numbers:
                wrong.append(found)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for round_ in range(40):
            added = [IndexRow(2, key(10_000 + round_ * 500 + n), row(n)) for n in range(500)]
            rows = catalog.put_many(added)
            if round_ % 2:
                catalog.remove(rows)
    finally:
        done.set()
        thread.join()
    assert not wrong, "blocks that nobody touches are found throughout"


def test_a_block_costs_bytes_not_objects() -> None:
    catalog = Catalog(expected_rows=20_000, secret=SECRET)
    generator = np.random.default_rng(1)
    packed = np.zeros(20_000, ROW_DTYPE)
    packed["length"] = 1
    keys = generator.integers(0, 256, (20_000, 32), dtype=np.uint8)
    gc.collect()
    before = len(gc.get_objects())
    catalog.put_batch(RowBatch(np.ones(20_000, np.uint64), keys, packed))
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    columns = catalog._columns
    row_bytes = sum(getattr(columns, name)[0].nbytes for name in columns.__slots__)
    assert row_bytes + catalog._view.table.slots.nbytes / 20_000 <= 100
