"""The breaker: what opens it, when it probes, what closes it."""

from __future__ import annotations

from kvstore.model.reasons import Reason
from kvstore_client.breaker import FIRST_PAUSE_NS, Breaker

MS = 1_000_000


def breaker(failures: int = 3, pause_max_ms: int = 400) -> Breaker:
    return Breaker(failures, pause_max_ms * MS)


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    one = breaker()
    for _ in range(2):
        one.failed(Reason.UNAVAILABLE, 0)
        assert not one.is_open
    one.succeeded()
    for number in range(3):
        assert not one.is_open, number
        one.failed(Reason.UNAVAILABLE, 0)
    assert one.is_open
    assert (one.failures, one.cause) == (3, Reason.UNAVAILABLE)


def test_a_probe_is_due_after_a_pause_that_doubles_up_to_its_bound() -> None:
    one = breaker(failures=1)
    assert one.probe_in_ns(0) is None
    one.failed(Reason.UNAVAILABLE, 0)
    now_ns, pauses = 0, []
    for _ in range(6):
        pause_ns = one.probe_in_ns(now_ns)
        assert pause_ns is not None
        assert one.probe_in_ns(now_ns + pause_ns) == 0
        pauses.append(pause_ns // MS)
        now_ns += pause_ns
        one.failed(Reason.UNAVAILABLE, now_ns)
    assert pauses == [50, 100, 200, 400, 400, 400]


def test_calls_that_were_under_way_do_not_put_the_probe_off() -> None:
    one = breaker(failures=1)
    one.failed(Reason.UNAVAILABLE, 0)
    for _ in range(10):
        one.failed(Reason.DEADLINE_EXCEEDED, FIRST_PAUSE_NS // 2)
    assert one.probe_in_ns(FIRST_PAUSE_NS) == 0


def test_an_outage_counts_once() -> None:
    one = breaker(failures=2)
    for now_ms in range(0, 1_000, 10):
        one.failed(Reason.UNAVAILABLE, now_ms * MS)
    assert one.failures == 2


def test_a_sign_of_life_makes_the_probe_due() -> None:
    one = breaker(failures=1)
    one.hasten(0)
    assert not one.is_open
    for now_ns in (0, 50 * MS, 150 * MS):
        one.failed(Reason.UNAVAILABLE, now_ns)
    assert one.probe_in_ns(151 * MS) == 199 * MS
    one.hasten(151 * MS)
    assert one.probe_in_ns(151 * MS) == 0
    one.hasten(10**12)
    assert one.probe_in_ns(151 * MS) == 0


def test_success_closes_it_and_starts_anew() -> None:
    one = breaker(failures=1)
    for now_ns in (0, 50 * MS, 150 * MS):
        one.failed(Reason.UNAVAILABLE, now_ns)
    one.succeeded()
    assert (one.is_open, one.failures, one.cause) == (False, 0, Reason.OK)
    one.failed(Reason.UNAVAILABLE, 10**12)
    assert one.probe_in_ns(10**12) == FIRST_PAUSE_NS


def test_a_bound_below_the_first_pause_holds() -> None:
    one = breaker(failures=1, pause_max_ms=10)
    one.failed(Reason.UNAVAILABLE, 0)
    assert one.probe_in_ns(0) == 10 * MS
