"""The table of leases: every deadline comes once, and the heap does not grow with the traffic."""

from __future__ import annotations

from typing import cast

from kvstore.core.leases import LeaseKind, LeaseTable, ReadLease, Session
from kvstore.core.spaces import Space

NO_SPACE = cast(Space, None)


def lease(table: LeaseTable, session: Session, until_ns: int | None) -> ReadLease:
    made = ReadLease(LeaseKind.COPY, session, NO_SPACE, until_ns)
    table.add(made)
    return made


def test_deadlines_come_in_order_and_once() -> None:
    table, session = LeaseTable(), Session(1, "a", b"g")
    late, early, never = (lease(table, session, until) for until in (30, 10, None))
    assert table.next_due_ns() == 10
    assert list(table.due(9)) == []
    assert list(table.due(30)) == [early, late]
    assert list(table.due(99)) == []
    assert table.next_due_ns() is None
    assert table.get(never.id) is never


def test_what_ended_has_no_deadline_any_more() -> None:
    table, session = LeaseTable(), Session(1, "a", b"g")
    first, second = lease(table, session, 10), lease(table, session, 20)
    table.remove(first)
    assert (first.ended, table.get(first.id)) == (True, None)
    assert table.next_due_ns() == 20
    assert list(table.due(99)) == [second]
    assert session.leases == {second.id: second}
    assert table.counts[LeaseKind.COPY] == 1


def test_the_heap_forgets_what_ended_early() -> None:
    table, session = LeaseTable(), Session(1, "a", b"g")
    kept = lease(table, session, 10**9)
    for index in range(10_000):
        table.remove(lease(table, session, 1_000 + index))
    assert len(table.dated()) <= 65
    assert kept.id in table.dated()


def test_a_deadline_can_come_sooner_but_not_later() -> None:
    table, session = LeaseTable(), Session(1, "a", b"g")
    first, never = lease(table, session, 100), lease(table, session, None)
    table.shorten(first, 200)
    table.shorten(never, 5)
    assert list(table.due(99)) == []
    table.shorten(first, 50)
    assert (first.until_ns, table.next_due_ns()) == (50, 50)
    assert list(table.due(50)) == [first]
    table.remove(first)
    assert list(table.due(999)) == []
    assert table.get(never.id) is never


def test_the_heap_forgets_the_later_deadlines_of_shortened_leases() -> None:
    table, session = LeaseTable(), Session(1, "a", b"g")
    kept = [lease(table, session, 10**9) for _ in range(100)]
    for one in kept:
        table.shorten(one, 10**8)
    for index in range(10_000):
        gone = lease(table, session, 10**9)
        table.shorten(gone, 1_000 + index)
        table.remove(gone)
    assert table.dated() >= {one.id for one in kept}
    assert len(table._heap) <= 2 * len(kept) + 65
    assert sorted(one.id for one in table.due(10**8)) == [one.id for one in kept]
