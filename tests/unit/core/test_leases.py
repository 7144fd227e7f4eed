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
