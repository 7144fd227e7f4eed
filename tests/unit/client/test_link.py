"""The link: one attempt for all who wait, what ends a session, what is released when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import CallFailed
from kvstore_client.config import ClientConfig
from kvstore_client.link import Link
from kvstore_client.session import Deadline, Session
from kvstore_client.testing import NEVER, FakeClock, FakeStore, FakeTransport, refusal

ATTACH = pb.AttachRequest(protocol_major=1, group_id=b"g")
MINUTE_NS = 60_000_000_000


@pytest.fixture
def store() -> Iterator[FakeStore]:
    fake = FakeStore(capacity_blocks=8)
    yield fake
    fake.close()


class Case:
    """A link whose answers a test may replace by method."""

    def __init__(self, store: FakeStore, **config: Any) -> None:
        self.clock = FakeClock()
        self.wrong: dict[str, Callable[[Any], Any]] = {}
        self.store = store
        self.link = Link(
            ClientConfig(**config),
            ATTACH,
            FakeTransport.factory(self.answer, store.dial, self.clock),
            self.clock,
        )

    def answer(self, method: str, request: Any) -> Any:
        if method in self.wrong:
            return self.wrong[method](request)
        return self.store.answer(method, request)

    def session(self) -> Session:
        return self.link.session(Deadline(self.clock() + MINUTE_NS, self.clock))

    def lookup(self, session: Session, timeout_s: float = 1.0) -> pb.LookupReply:
        request = pb.LookupRequest(session=session.secret, queries=[pb.Query(space_id=1)])
        return self.link.call(session, "Lookup", request, pb.LookupReply, timeout_s)

    def reason(self, call: Callable[[], Any]) -> Reason:
        with pytest.raises(CallFailed) as caught:
            call()
        return caught.value.reason


@pytest.fixture
def case(store: FakeStore) -> Iterator[Case]:
    one = Case(store)
    yield one
    one.link.close()


def test_all_who_wait_share_one_attempt(case: Case, store: FakeStore) -> None:
    sessions: list[Session] = []
    threads = [threading.Thread(target=lambda: sessions.append(case.session())) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(map(id, sessions))) == 1
    assert len(sessions) == 10
    assert store.requests["Attach"] == 1


def test_the_stream_ends_where_memory_is_shared(case: Case) -> None:
    session = case.session()
    assert session.stream is None
    assert session.memory is not None


def test_an_unknown_session_is_made_anew(case: Case, store: FakeStore) -> None:
    first = case.session()
    case.wrong["Lookup"] = lambda request: refusal(Reason.SESSION_UNKNOWN)
    assert case.reason(lambda: case.lookup(first)) is Reason.SESSION_UNKNOWN
    second = case.session()
    assert second is not first
    assert second.secret != first.secret
    assert store.requests["Attach"] == 2


def test_hang_up_ends_the_session(case: Case, store: FakeStore) -> None:
    first = case.session()
    store.hang_up()
    with case.link._changed:
        assert case.link._changed.wait_for(lambda: case.link._session is not first, 10)
    assert case.session() is not first


def test_failures_of_calls_open_the_breaker_and_a_probe_keeps_the_session(
    store: FakeStore,
) -> None:
    case = Case(store, breaker_failures=2)
    session = case.session()
    case.wrong["Lookup"] = lambda request: grpc.StatusCode.UNAVAILABLE
    for _ in range(2):
        assert case.reason(lambda: case.lookup(session)) is Reason.UNAVAILABLE
    assert case.reason(case.session) is Reason.BREAKER_OPEN
    # The probe is a call of the session itself: a daemon that was frozen goes on with it.
    del case.wrong["Lookup"]
    before = store.requests["Lookup"]
    case.clock.advance(1.0)
    with case.link._changed:
        case.link._changed.notify_all()
    assert store.wait(lambda s: s.requests["Lookup"] > before)
    with case.link._changed:
        assert case.link._changed.wait_for(lambda: not case.link._breaker.is_open, 10)
    assert case.session() is session
    case.link.close()


class Knocked(FakeTransport):
    """A connection to a socket on which somebody listens only while `there`."""

    there = True
    knocks = 0

    def absent(self) -> bool:
        Knocked.knocks += 1
        return not Knocked.there

    def attach(self, request: bytes, timeout_s: float | None) -> Any:
        if not Knocked.there:
            raise CallFailed(Reason.UNAVAILABLE, outage=True, absent=True)
        return super().attach(request, timeout_s)


def test_a_daemon_that_listens_again_is_found_between_two_attempts(store: FakeStore) -> None:
    Knocked.there = False
    clock = FakeClock()
    config = ClientConfig(breaker_failures=1, breaker_retry_ms=1_000_000)
    link = Link(config, ATTACH, lambda: Knocked(store.answer, store.dial), clock)

    def turn(until: Callable[[], bool]) -> None:
        with link._changed:
            link._changed.notify_all()
            assert link._changed.wait_for(until, 10)

    deadline = Deadline(clock() + MINUTE_NS, clock)
    with pytest.raises(CallFailed):
        link.session(deadline)
    for attempts in range(2, 12):  # by now the pause between attempts is 51.2 s
        pause_ns = link._breaker.probe_in_ns(clock())
        assert pause_ns is not None
        clock.now_ns += pause_ns
        turn(lambda attempts=attempts: link._attempts == attempts)  # type: ignore[misc]
    clock.advance(20.0)
    Knocked.there = True
    link._knock_at_ns = 0
    turn(lambda: link._session is not None)
    assert not link._breaker.is_open
    assert Knocked.knocks >= 1
    link.close()


def test_calls_of_a_session_that_is_over_say_nothing_about_the_daemon(store: FakeStore) -> None:
    case = Case(store, breaker_failures=1)
    first = case.session()

    def hang_up(request: Any) -> Any:
        case.link.lost(first)  # as the fd socket's thread does
        return grpc.StatusCode.UNAVAILABLE

    case.wrong["Lookup"] = hang_up
    assert case.reason(lambda: case.lookup(first)) is Reason.UNAVAILABLE
    del case.wrong["Lookup"]
    assert case.session() is not first
    case.link.close()


def test_a_call_with_hardly_any_time_says_nothing_about_the_daemon(store: FakeStore) -> None:
    case = Case(store, breaker_failures=1)
    session = case.session()
    case.wrong["Lookup"] = lambda request: NEVER
    for _ in range(5):
        assert case.reason(lambda: case.lookup(session, 0.01)) is Reason.DEADLINE_EXCEEDED
    assert case.session() is session
    assert case.reason(lambda: case.lookup(session, 1.0)) is Reason.DEADLINE_EXCEEDED
    assert case.reason(case.session) is Reason.BREAKER_OPEN
    case.link.close()


def test_refusals_do_not_count(store: FakeStore) -> None:
    case = Case(store, breaker_failures=2)
    session = case.session()
    outcomes = [grpc.StatusCode.UNAVAILABLE, refusal(Reason.NO_SPACE)] * 5
    case.wrong["Lookup"] = lambda request: outcomes.pop(0)
    while outcomes:
        case.reason(lambda: case.lookup(session))
    assert case.session() is session
    case.link.close()


def test_an_incomplete_welcome_is_no_session(store: FakeStore) -> None:
    for welcome in (
        pb.Welcome(),
        pb.Welcome(session=b"short", instance_id=b"i" * 16),
        pb.Welcome(session=b"s" * 16),
    ):
        case = Case(store)
        event = pb.AttachEvent(welcome=welcome)
        case.wrong["Attach"] = partial(lambda answer, request: answer, event)
        assert case.reason(case.session) is Reason.INTERNAL
        case.link.close()


def test_releases_that_follow_closely_go_together(case: Case, store: FakeStore) -> None:
    session = case.session()
    for lease_id in range(100, 150):
        report = pb.LoadReport(lease_id=lease_id, blocks=1)
        case.link.release(session, lease_id, report)
    assert store.requests["Release"] == 0  # the clock stands still
    case.clock.advance(0.01)
    with case.link._changed:
        case.link._changed.notify_all()
    assert store.wait(lambda s: len(s.reports) == 50)
    assert store.requests["Release"] == 1


def test_leases_of_another_session_are_void(case: Case, store: FakeStore) -> None:
    old = case.session()
    case.link.release(old, 7)
    case.link.lost(old)
    new = case.session()
    case.link.release(old, 8)
    case.link.release(new, 9)
    case.clock.advance(0.01)
    released: list[int] = []

    def release(request: pb.ReleaseRequest) -> Any:
        released.extend(request.lease_ids)
        return store.answer("Release", request)

    case.wrong["Release"] = release
    with case.link._changed:
        case.link._changed.notify_all()
    assert store.wait(lambda s: s.requests["Release"] > 0)
    assert released == [9]


def test_releases_wait_for_a_daemon_that_is_away(store: FakeStore) -> None:
    case = Case(store, breaker_failures=1)
    session = case.session()
    away = [True]
    case.wrong["Release"] = lambda request: (
        grpc.StatusCode.UNAVAILABLE if away[0] else store.answer("Release", request)
    )
    store.leases.add(5)
    case.link.release(session, 5)
    case.clock.advance(0.01)
    with case.link._changed:
        case.link._changed.notify_all()
        assert case.link._changed.wait_for(lambda: case.link._breaker.is_open, 10)
    away[0] = False
    case.clock.advance(1.0)
    with case.link._changed:
        case.link._changed.notify_all()
    assert store.wait(lambda s: not s.leases)
    case.link.close()


def test_a_release_that_was_refused_for_want_of_room_is_said_again(store: FakeStore) -> None:
    case = Case(store)
    session = case.session()
    refusals = [refusal(Reason.LIMIT_QUEUE)] * 2
    case.wrong["Release"] = lambda request: (
        refusals.pop() if refusals else store.answer("Release", request)
    )
    store.leases.add(5)
    case.link.release(session, 5)
    while store.leases:
        case.clock.advance(1.0)
        with case.link._changed:
            case.link._changed.notify_all()
        store.wait(lambda s: not s.leases, 0.01)
    assert refusals == []
    assert not case.link._breaker.is_open
    case.link.close()


@pytest.mark.parametrize("heard", [False, True])
def test_a_report_that_a_lost_session_refused_goes_with_the_next_one(
    store: FakeStore, heard: bool
) -> None:
    """Unless no answer came: then the daemon may have counted it."""
    case = Case(store)
    first = case.session()
    answers: list[Any] = [grpc.StatusCode.UNAVAILABLE if heard else refusal(Reason.SESSION_UNKNOWN)]
    case.wrong["Release"] = lambda request: (
        answers.pop() if answers else store.answer("Release", request)
    )
    assert case.link.reported(first, pb.RequestReport(request_id="old", space_id=1))
    case.clock.advance(0.01)
    with case.link._changed:
        case.link._changed.notify_all()
        assert case.link._changed.wait_for(lambda: not answers, 10)
    case.link.lost(first)
    assert case.link.reported(None, pb.RequestReport(request_id="new"))
    case.session()
    while not any(one.request_id == "new" for one in store.outcomes):
        case.clock.advance(1.0)
        with case.link._changed:
            case.link._changed.notify_all()
        store.wait(lambda s: bool(s.outcomes), 0.01)
    seen = [(one.request_id, one.space_id) for one in store.outcomes]
    assert seen == [("new", 0)] if heard else [("old", 0), ("new", 0)]
    case.link.close()


def test_close_detaches_and_ends_the_thread(case: Case, store: FakeStore) -> None:
    session = case.session()
    thread = case.link._thread
    assert thread is not None
    case.link.close()
    case.link.close()
    assert store.requests["Detach"] == 1
    assert session.memory is not None
    assert not session.memory.alive
    thread.join(10)
    assert not thread.is_alive()
    assert case.reason(case.session) is Reason.UNAVAILABLE
