"""What every ledger promises: rows come back as written, all of a call or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstore.ledger import KEY_BYTES_MAX, Change, Ledger, VolatileLedger, open_ledger


@pytest.fixture(params=["durable", "volatile"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    made = open_ledger(str(tmp_path / "state") if request.param == "durable" else "")
    assert made.durable == (request.param == "durable")
    yield made
    made.close()


def test_a_new_ledger_is_empty(ledger: Ledger) -> None:
    assert ledger.rows() == []
    assert ledger.set_aside == ""


def test_rows_come_back_in_order(ledger: Ledger) -> None:
    ledger.put_many([("space", b"b", b"2"), ("epoch", b"z", b""), ("space", b"", b"\0\xff")])
    assert ledger.rows() == [("epoch", b"z", b""), ("space", b"", b"\0\xff"), ("space", b"b", b"2")]


def test_rows_are_replaced_and_deleted(ledger: Ledger) -> None:
    ledger.put_many([("epoch", b"a", b"1"), ("epoch", b"b", b"1"), ("epoch", b"a", b"2")])
    ledger.put_many([("epoch", b"b", None), ("epoch", b"absent", None)])
    assert ledger.rows() == [("epoch", b"a", b"2")]


def test_tables_do_not_meet(ledger: Ledger) -> None:
    ledger.put_many([("ab", b"c", b"1"), ("a", b"bc", b"2"), ("a", b"\0bc", b"3")])
    ledger.put_many([("ab", b"c", None)])
    assert ledger.rows() == [("a", b"\0bc", b"3"), ("a", b"bc", b"2")]


def test_names_are_checked_before_anything_is_written(ledger: Ledger) -> None:
    fits = b"k" * (KEY_BYTES_MAX - len("t"))
    ledger.put_many([("t", fits, b"v")])
    for bad in [("t", fits + b"k", b"v"), ("t\0", b"", b"v"), ("", b"", b"v")]:
        with pytest.raises(ValueError, match="table"):
            ledger.put_many([("t", b"other", b"v"), bad])
    assert ledger.rows() == [("t", fits, b"v")]


def test_nothing_to_write_is_fine(ledger: Ledger) -> None:
    ledger.put_many([])
    assert ledger.rows() == []


def test_closing_twice_is_fine(ledger: Ledger) -> None:
    ledger.close()
    ledger.close()


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "ab", "b"]),
        st.binary(max_size=2),
        st.one_of(st.none(), st.binary(max_size=3)),
    ),
    max_size=12,
)


@given(batches=st.lists(CHANGES, max_size=4))
def test_both_are_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Change]]
) -> None:
    folder = tmp_path_factory.mktemp("state")
    plain: dict[tuple[str, bytes], bytes] = {}
    durable, volatile = open_ledger(str(folder)), VolatileLedger()
    for batch in batches:
        durable.put_many(batch)
        volatile.put_many(batch)
        for table, key, value in batch:
            if value is None:
                plain.pop((table, key), None)
            else:
                plain[table, key] = value
    durable.close()
    durable = open_ledger(str(folder))
    assert durable.rows() == volatile.rows() == sorted((*n, v) for n, v in plain.items())
    durable.close()
