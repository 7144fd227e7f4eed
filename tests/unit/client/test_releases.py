"""What waits to be sent: leases end with their session, what became of requests does not."""

from __future__ import annotations

from typing import Any

from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.releases import LINGER_NS, OUTCOMES_MAX, Release, Releases

ONE: Any = object()
OTHER: Any = object()


def outcome(name: str = "r", space_id: int = 7) -> pb.RequestReport:
    return pb.RequestReport(request_id=name, space_id=space_id, failed=True)


def names(batch: list[Release]) -> list[str]:
    return [one.outcome.request_id for one in batch if one.outcome is not None]


def test_a_report_outlives_its_session_without_its_space() -> None:
    waiting = Releases()
    waiting.add(Release(ONE, 5), 0)
    waiting.report(ONE, outcome("a"), 0)
    waiting.report(None, outcome("b", 0), 0)
    waiting.clear()
    batch = waiting.take(OTHER)
    assert [(one.session, one.lease_id) for one in batch] == [(OTHER, 0)] * 2
    assert [one.outcome and one.outcome.space_id for one in batch] == [0, 0]
    assert names(batch) == ["a", "b"]
    assert waiting.take(OTHER) == []


def test_in_its_own_session_a_report_names_its_space() -> None:
    waiting = Releases()
    waiting.report(ONE, outcome(), 0)
    (one,) = waiting.take(ONE)
    assert one.outcome == outcome()


def test_without_a_session_reports_are_neither_due_nor_lost() -> None:
    waiting = Releases()
    assert waiting.report(None, outcome(), 0)
    assert waiting.due_in_ns(10**12, None) is None
    assert waiting.take(None) == []
    assert waiting.end(None) == []
    waiting.report(None, outcome(), 0)
    assert waiting.due_in_ns(0, ONE) == LINGER_NS
    assert names(waiting.take(ONE)) == ["r"]


def test_what_was_not_heard_is_said_again_and_in_order() -> None:
    waiting = Releases()
    measured = pb.LoadReport(lease_id=5)
    waiting.add(Release(ONE, 5, measured), 0)
    for name in "ab":
        waiting.report(ONE, outcome(name), 0)
    batch = waiting.take(ONE)
    waiting.report(ONE, outcome("c"), 0)
    waiting.put_back(batch, 0, heard=False)
    again = waiting.take(ONE)
    assert names(again) == ["a", "b", "c"]
    assert again[0] == Release(ONE, 5, measured)


def test_what_may_have_been_heard_is_not_said_again() -> None:
    waiting = Releases()
    waiting.add(Release(ONE, 5, pb.LoadReport(lease_id=5)), 0)
    waiting.report(ONE, outcome(), 0)
    waiting.put_back(waiting.take(ONE), 0, heard=True)
    assert waiting.take(ONE) == [Release(ONE, 5)]


def test_reports_that_wait_are_bounded_and_the_latest_stay() -> None:
    waiting = Releases()
    for number in range(OUTCOMES_MAX + 3):
        waiting.report(None, outcome(str(number)), 0)
    batch = waiting.take(ONE)
    assert names(batch)[0] == "3"
    for number in range(len(batch)):
        waiting.report(None, outcome(f"new {number}"), 0)
    waiting.put_back(batch, 0, heard=False)
    assert names(waiting.take(ONE))[0] != "3", "those that came meanwhile are newer"
