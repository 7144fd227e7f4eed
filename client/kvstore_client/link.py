"""The link of one client to its daemon: session, breaker, and the thread that keeps both.

An operation asks for the session and waits for it at most until its deadline; the attempt itself is
made by the link's thread, so that nothing hangs in a caller. The same thread probes a daemon that
was away and sends releases, which nobody waits for. While all is well and nobody calls, no thread
is inside gRPC: the session lives by the fd socket.

One link belongs to one process. A forked child abandons it and makes another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.breaker import Breaker
from kvstore_client.channel import AttachStream, CallFailed, Transport
from kvstore_client.config import ClientConfig
from kvstore_client.regions import Memory
from kvstore_client.releases import Release, Releases, request_of
from kvstore_client.session import (
    NS_PER_MS,
    Clock,
    Deadline,
    Session,
    end_session,
    session_of,
)

__all__ = ["Link"]

log = logging.getLogger(__name__)

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
RELEASE_TIMEOUT_S = 1.0
DETACH_TIMEOUT_S = 0.2
PROBE_TIMEOUT_S = 0.5
STUMBLE_PAUSE_S = 0.5
KNOCKS_PER_RETRY = 5
"""While nobody listens, that is found out so often between two attempts to connect."""
OUTAGE_TIMEOUT_S_MIN = 0.1
"""A call that was given less says nothing about the daemon when it runs out of time."""

Reply = TypeVar("Reply", bound=Message)


class Link:
    """See the module's docstring. `open_transport` makes a fresh connection."""

    def __init__(
        self,
        config: ClientConfig,
        attach: pb.AttachRequest,
        open_transport: Callable[[], Transport],
        clock: Clock = time.monotonic_ns,
    ) -> None:
        self._config = config
        self._attach_request = attach.SerializeToString()
        self._open_transport = open_transport
        self._clock = clock
        self._changed = threading.Condition()
        self._breaker = Breaker(config.breaker_failures, config.breaker_retry_ms * NS_PER_MS)
        self._session: Session | None = None
        self._previous: tuple[bytes, Memory] | None = None
        self._wanted = False
        self._attempts = 0
        self._knock_ns = config.breaker_retry_ms * NS_PER_MS // KNOCKS_PER_RETRY
        self._knock_at_ns = 0
        self._failure = CallFailed(Reason.UNAVAILABLE, "not connected", outage=True)
        self._releases = Releases()
        self._retired: list[Session] = []
        self._connecting: Transport | None = None
        self._abandoned: list[Transport] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- for operations

    def session(self, deadline: Deadline) -> Session:
        """The session, made now if there is none. Raises CallFailed; at once while the breaker is
        open.
        """
        with self._changed:
            self._check_breaker()
            session = self._session
            if session is not None:
                return session
            attempt = self._attempts
            self._wanted = True
            self._wake()
            ended = self._changed.wait_for(
                lambda: self._session is not None or self._attempts != attempt or self._closed,
                deadline.left_s(),
            )
            if self._session is not None:
                return self._session
            if not ended:
                raise CallFailed(Reason.DEADLINE_EXCEEDED, "connecting took too long")
            raise CallFailed(self._failure.reason, self._failure.detail)

    def _check_breaker(self) -> None:
        if self._closed:
            raise CallFailed(Reason.UNAVAILABLE, "the client is closed")
        if self._breaker.is_open:
            if not self._failure.outage and self._session is None:
                # The daemon is there and refuses: that is worth more than that we wait.
                raise CallFailed(self._failure.reason, self._failure.detail)
            raise CallFailed(
                Reason.BREAKER_OPEN,
                f"{self._breaker.failures} failures in a row, the last {self._breaker.cause.name}",
            )

    def call(
        self, session: Session, method: str, request: Message, reply: type[Reply], timeout_s: float
    ) -> Reply:
        """A unary call. Raises CallFailed."""
        if timeout_s <= 0:
            raise CallFailed(Reason.DEADLINE_EXCEEDED)
        data = self.through(
            session,
            timeout_s,
            lambda: session.transport.unary(method, request.SerializeToString(), timeout_s),
        )
        return self.parse(reply, data)

    def through(self, session: Session, timeout_s: float, call: Callable[[], Any]) -> Any:
        """Runs what uses the session's transport, and learns from how it ends."""
        try:
            answer = call()
        except CallFailed as failure:
            self._learn(session, failure, timeout_s)
            raise
        if self._breaker.failures:
            self._succeeded()
        return answer

    def parse(self, kind: type[Reply], data: bytes) -> Reply:
        """Raises CallFailed(INTERNAL) on garbage, which counts as no answer."""
        try:
            return kind.FromString(data)
        except (DecodeError, TypeError) as error:
            failure = CallFailed(
                Reason.INTERNAL, f"the daemon's answer is no {kind.DESCRIPTOR.name}", outage=True
            )
            self._failed(failure)
            raise failure from error

    def release(self, session: Session, lease_id: int, report: pb.LoadReport | None = None) -> None:
        """Ends a lease of either kind, some time soon. Never waits."""
        self._release(Release(session, lease_id, report))

    def unheard(self, session: Session, nonce: int) -> None:
        """Ends what the call with this nonce was granted, or will be. Never waits."""
        self._release(Release(session, 0, nonce=nonce))

    def reported(self, session: Session | None, outcome: pb.RequestReport) -> bool:
        """Tells the daemon what became of a request, some time soon. Never waits. session: in which
        its space is known. False: the link is closed.
        """
        with self._changed:
            if self._closed:
                return False
            # Without a session it waits for one that somebody needs.
            if self._releases.report(session, outcome, self._clock()) and self._session is not None:
                self._wake()
            return True

    def _release(self, release: Release) -> None:
        with self._changed:
            if release.session is not self._session or self._closed:
                return
            if self._releases.add(release, self._clock()):
                self._wake()

    def lost(self, session: Session) -> None:
        """The session is over: its maps, leases, spaces are void. The next call makes another."""
        with self._changed:
            self._lose(session)

    def peek(self) -> tuple[Session | None, CallFailed]:
        """The session if there is one, and why there is none. Makes no call."""
        with self._changed:
            return self._session, self._failure

    # ---------------------------------------------------------------- what is learnt

    def _learn(self, session: Session, failure: CallFailed, timeout_s: float) -> None:
        if failure.reason is Reason.SESSION_UNKNOWN:
            self.lost(session)
        if not failure.outage:
            if self._breaker.failures:
                self._succeeded()
        elif failure.reason is not Reason.DEADLINE_EXCEEDED or timeout_s >= OUTAGE_TIMEOUT_S_MIN:
            self._failed(failure, session)

    def _failed(self, failure: CallFailed, session: Session | None = None) -> None:
        with self._changed:
            if session is not None and session is not self._session:
                return  # its end is known, and says nothing about the daemon of now
            self._failure = failure
            self._breaker.failed(failure.reason, self._clock())
            if self._breaker.is_open:
                self._wake()

    def _succeeded(self) -> None:
        with self._changed:
            self._breaker.succeeded()

    def _lose(self, session: Session) -> None:
        """Under the lock. Sockets are closed by the thread: that may take a moment."""
        if self._session is session:
            self._session = None
            if session.memory is not None:
                self._previous = (session.instance_id, session.memory)
            self._retired.append(session)
            self._wake()

    # ---------------------------------------------------------------- the thread

    def _wake(self) -> None:
        """Under the lock."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="kvstore-link", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            try:
                if not self._work_once():
                    return
            except Exception:  # the fail-open boundary: without this thread nothing recovers
                log.exception("kvstore: the link stumbled")
                with self._changed:
                    self._changed.wait(STUMBLE_PAUSE_S)

    def _work_once(self) -> bool:
        """Waits for work and does it. False when the link is closed."""
        with self._changed:
            while not self._has_work():
                self._changed.wait(self._pause_s())
            retired, self._retired = self._retired, []
            closed = self._closed
            now_ns = self._clock()
            probe = self._breaker.probe_in_ns(now_ns) == 0
            knock = self._knock_in_ns(now_ns) == 0 and not probe
            connect = self._session is None and (probe or self._wanted)
            session = self._session
            due = self._releases_in_ns(now_ns) == 0 and not self._breaker.is_open
            batch = self._releases.take(session) if due else []
        for over in retired:
            end_session(over)
        if closed:
            return False
        if connect:
            self._connect()
        elif knock:
            self._knock()
        elif probe and session is not None:
            self._probe(session)
        if batch:
            self._send_releases(batch)
        return True

    def _has_work(self) -> bool:
        if self._closed or self._retired:
            return True
        now_ns = self._clock()
        if self._breaker.is_open:
            return self._breaker.probe_in_ns(now_ns) == 0 or self._knock_in_ns(now_ns) == 0
        wanted = self._wanted and self._session is None
        return wanted or self._releases_in_ns(now_ns) == 0

    def _pause_s(self) -> float | None:
        """Until something is due by itself."""
        now_ns = self._clock()
        pause_ns = self._breaker.probe_in_ns(now_ns)
        if pause_ns is None:
            pause_ns = self._releases_in_ns(now_ns)
        knock_ns = self._knock_in_ns(now_ns)
        if pause_ns is not None and knock_ns is not None:
            pause_ns = min(pause_ns, knock_ns)
        return None if pause_ns is None else pause_ns / 1e9

    def _releases_in_ns(self, now_ns: int) -> int | None:
        return self._releases.due_in_ns(now_ns, self._session)

    def _knock_in_ns(self, now_ns: int) -> int | None:
        """Until it is time to see whether somebody listens again; None: not what is waited for."""
        if not (self._breaker.is_open and self._failure.absent and self._session is None):
            return None
        return max(0, self._knock_at_ns - now_ns)

    def _knock(self) -> None:
        """A daemon that is back is found at once, however long it was away."""
        transport = self._open_transport()
        absent = transport.absent()
        transport.close()
        with self._changed:
            now_ns = self._clock()
            self._knock_at_ns = now_ns + self._knock_ns
            if not absent:
                self._breaker.hasten(now_ns)

    def _connect(self) -> None:
        session: Session | None = None
        failure: CallFailed | None = None
        try:
            session = self._attach()
        except CallFailed as failed:
            failure = failed
        except Exception as error:  # the fail-open boundary: nothing ends this thread
            log.exception("kvstore: connecting failed")
            failure = CallFailed(Reason.INTERNAL, repr(error), outage=True)
        with self._changed:
            self._attempts += 1
            self._wanted = False
            self._connecting = None
            if session is not None and self._closed:
                self._retired.append(session)
            elif session is not None:
                self._session = session
                self._breaker.succeeded()
                self._releases.clear()
            elif failure is not None:
                self._failure = failure
                self._breaker.failed(failure.reason, self._clock())
            self._changed.notify_all()
        if session is not None and session.memory is not None and not session.memory.alive:
            self.lost(session)  # it hung up before it was ours

    def _attach(self) -> Session:
        timeout_s = self._config.connect_timeout_ms / 1e3
        transport = self._connecting = self._open_transport()
        try:
            # The stream has no deadline of its own: it may become the session's life. So the first
            # event is awaited with a timer that breaks the stream off.
            stream = transport.attach(self._attach_request, None)
            timer = threading.Timer(timeout_s, stream.cancel)
            timer.daemon = True
            timer.start()
            try:
                event = self.parse_event(stream.next_event())
            except CallFailed as failure:
                raise _attach_failure(failure, timed_out=not timer.is_alive()) from None
            finally:
                timer.cancel()
            session = session_of(event.welcome, transport)
            self._choose_data_path(session, event.welcome.fd_socket, stream, timeout_s)
        except BaseException:
            transport.close()
            raise
        return session

    @staticmethod
    def parse_event(data: bytes) -> pb.AttachEvent:
        try:
            return pb.AttachEvent.FromString(data)
        except (DecodeError, TypeError):
            raise CallFailed(
                Reason.INTERNAL, "the daemon's answer is no AttachEvent", outage=True
            ) from None

    def _choose_data_path(
        self, session: Session, offered: bool, stream: AttachStream, timeout_s: float
    ) -> None:
        kind = self._config.transport
        if kind != "stream":
            why = "the daemon offers none"
            if offered:
                try:
                    self._map_memory(session, timeout_s)
                except OSError as error:
                    why = str(error) or type(error).__name__
            if session.memory is not None:
                stream.end()
                return
            if kind == "shm":
                stream.end()
                raise CallFailed(Reason.NOT_SUPPORTED, f"no fd socket: {why}")
            way = "the fd socket" if session.fd_fetch else "gRPC"
            session.detail = f"no shared memory ({why}): bytes go through {way}, which is slower"
            log.warning("kvstore: %s", session.detail)
        session.stream = stream
        stream.on_end(lambda: self.lost(session))

    def _map_memory(self, session: Session, timeout_s: float) -> None:
        previous, self._previous = self._previous, None
        same = previous is not None and previous[0] == session.instance_id
        session.memory = Memory.attach(
            session.transport.dial_memory(timeout_s),
            session.secret,
            timeout_s,
            populate=self._config.populate,
            on_hangup=lambda: self.lost(session),
            previous=previous[1] if previous is not None and same else None,
        )

    def _probe(self, session: Session) -> None:
        """Any answer to a call will do; this one changes nothing."""
        request = pb.LookupRequest(session=session.secret, queries=[pb.Query()])
        with contextlib.suppress(CallFailed):
            self.call(session, "Lookup", request, pb.LookupReply, PROBE_TIMEOUT_S)

    # ---------------------------------------------------------------- releases

    def _send_releases(self, batch: list[Release]) -> None:
        request = request_of(batch)
        try:
            self.call(batch[0].session, "Release", request, pb.ReleaseReply, RELEASE_TIMEOUT_S)
        except CallFailed as failure:
            # A daemon that refuses, be it for a session that it does not know, has taken nothing.
            over = failure.reason is Reason.SESSION_UNKNOWN
            if failure.outage or failure.reason.is_retryable or over:
                heard = failure.outage and not failure.absent
                with self._changed:
                    self._releases.put_back(batch, self._clock(), heard=heard)

    # ---------------------------------------------------------------- end and forks

    def close(self) -> None:
        """Ends session and thread. Idempotent. Waits shortly for the daemon to hear of it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            session, self._session = self._session, None
            batch = self._releases.end(session)
            self._changed.notify_all()
        if session is not None:
            self._say_goodbye(session, batch)
            end_session(session)

    def _say_goodbye(self, session: Session, batch: list[Release]) -> None:
        with contextlib.suppress(CallFailed):
            if self._breaker.is_open:
                return
            if batch:
                data = request_of(batch).SerializeToString()
                session.transport.unary("Release", data, DETACH_TIMEOUT_S)
            request_data = pb.DetachRequest(session=session.secret).SerializeToString()
            session.transport.unary("Detach", request_data, DETACH_TIMEOUT_S)

    def before_fork(self) -> None:
        """A stream that stays open keeps a thread inside gRPC: its session ends, and the next call
        makes another.
        """
        session = self._session
        if session is not None and session.stream is not None:
            session.stream.end()

    def break_off(self) -> None:
        """Ends calls that are under way; the session lives on."""
        session = self._session
        for transport in (self._connecting, session.transport if session is not None else None):
            if transport is not None:
                transport.break_off()

    def last_before_fork(self) -> None:
        """A stream session that was made since `before_fork`. Not through the gate: it is shut."""
        session = self._session
        if session is not None and session.stream is not None:
            session.stream.cancel()

    def abandon_in_child(self) -> None:
        """After a fork: unmaps, and keeps what must not be closed: the parent uses it too."""
        session, self._session = self._session, None
        self._closed = True
        if self._connecting is not None:
            self._abandoned.append(self._connecting)
        for one in [*([session] if session is not None else []), *self._retired]:
            self._abandoned.append(one.transport)
            if one.memory is not None:
                one.memory.forget_in_child()
        _kept_in_child.append(self)


_kept_in_child: list[Link] = []
"""What a forked child inherited: never closed, never collected."""


def _attach_failure(failure: CallFailed, *, timed_out: bool) -> CallFailed:
    if timed_out and failure.outage:
        return CallFailed(
            Reason.DEADLINE_EXCEEDED,
            "the daemon did not answer within connect_timeout_ms",
            outage=True,
        )
    return failure
