"""Fakes for tests of what uses a client: ours, and those of an engine's adapter.

    store = FakeStore()                                  # a daemon in this process, no socket file
    client = Client("/fake", transport=store.transport)

    def answer(method, request):                         # or every answer by hand
        if method == "Lookup":
            return grpc.StatusCode.UNAVAILABLE
        return store.answer(method, request)
    client = Client("/fake", transport=FakeTransport.factory(answer))

An answer is a message, bytes (garbage included), a StatusCode, an exception, or NEVER. For the
streams it is a sequence of those. With a `FakeClock`, NEVER takes the time of the call's timeout
and no real time at all.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore.model.reasons import KVStoreError, Reason
from kvstore.wire import status
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import AttachStream, CallFailed, Transport, mapped
from kvstore_client.fakestore import FakeStore

__all__ = ["NEVER", "Answer", "FakeClock", "FakeStore", "FakeTransport", "Never", "refusal"]


class Never(enum.Enum):
    """No answer."""

    NEVER = 0


NEVER = Never.NEVER
Answer = Message | bytes | grpc.StatusCode | BaseException | Never
"""What one call is answered, see the module's docstring."""

REQUESTS: dict[str, type[Message]] = {
    "Attach": pb.AttachRequest,
    "Detach": pb.DetachRequest,
    "Open": pb.OpenRequest,
    "Lookup": pb.LookupRequest,
    "Acquire": pb.AcquireRequest,
    "Release": pb.ReleaseRequest,
    "Reserve": pb.ReserveRequest,
    "Commit": pb.CommitRequest,
    "Abort": pb.AbortRequest,
    "Fetch": pb.FetchRequest,
    "Explain": pb.ExplainRequest,
}


class FakeClock:
    """Nanoseconds that pass when they are told to."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class FakeRpcError(grpc.RpcError):
    """What gRPC raises for a status."""

    def __init__(self, code: grpc.StatusCode, error: KVStoreError | None = None) -> None:
        super().__init__()
        self._code = code
        self._error = error

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "a fake" if self._error is None else self._error.detail

    def trailing_metadata(self) -> Any:
        if self._error is None:
            return ()
        return ((status.DETAIL_KEY, status.detail_of(self._error)),)


def refusal(reason: Reason, detail: str = "a fake refusal") -> FakeRpcError:
    """What a daemon's refusal looks like to gRPC."""
    return FakeRpcError(status.code_of(reason), KVStoreError(reason, detail))


class FakeTransport:
    """A connection of which a function makes all answers.

    `answer(method, request)`; the request of "Push" is the list of its chunks. `dial`: makes the
    client's end of an fd socket; None: there is none. `clock`: see NEVER.
    """

    def __init__(
        self,
        answer: Callable[[str, Any], Any],
        dial: Callable[[], socket.socket] | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        self._answer = answer
        self._dial = dial
        self._clock = clock
        self.closed = False

    @classmethod
    def factory(
        cls,
        answer: Callable[[str, Any], Any],
        dial: Callable[[], socket.socket] | None = None,
        clock: FakeClock | None = None,
    ) -> Callable[[], Transport]:
        """For `Client(transport=...)`: every connection is answered by the same function."""
        return lambda: cls(answer, dial, clock)

    def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        return self._encode(self._ask(method, request), timeout_s)

    def attach(self, request: bytes, timeout_s: float | None) -> AttachStream:
        events = _sequence(self._ask("Attach", request))
        return _FakeAttach(self._encode(event, timeout_s or 0.0) for event in events)

    def download(self, request: bytes, timeout_s: float) -> Iterator[bytes]:
        for chunk in _sequence(self._ask("Fetch", request)):
            yield self._encode(chunk, timeout_s)

    def upload(self, chunks: Iterator[bytes], timeout_s: float) -> bytes:
        parsed = [pb.PushChunk.FromString(chunk) for chunk in chunks]
        return self._encode(self._answer("Push", parsed), timeout_s)

    def dial_memory(self, timeout_s: float) -> socket.socket:
        if self._dial is None:
            raise ConnectionRefusedError("there is no fd socket")
        sock = self._dial()
        sock.settimeout(timeout_s)
        return sock

    def absent(self) -> bool:
        return False

    def break_off(self) -> None:
        """Nothing is under way for long."""

    def close(self) -> None:
        self.closed = True

    def _ask(self, method: str, request: bytes) -> Any:
        if self.closed:
            raise CallFailed(Reason.UNAVAILABLE, "closed", outage=True)
        return self._answer(method, REQUESTS[method].FromString(request))

    def _encode(self, answer: Any, timeout_s: float) -> bytes:
        with mapped():
            if isinstance(answer, Never):
                if self._clock is not None:
                    self._clock.advance(timeout_s)
                raise FakeRpcError(grpc.StatusCode.DEADLINE_EXCEEDED)
            if isinstance(answer, grpc.StatusCode):
                raise FakeRpcError(answer)
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer, Message):
                return answer.SerializeToString()
            data: bytes = answer
            return data


class _FakeAttach:
    def __init__(self, events: Iterator[bytes]) -> None:
        self._events = events
        self._callbacks: list[Callable[[], None]] = []

    def next_event(self) -> bytes:
        try:
            return next(self._events)
        except StopIteration:
            raise CallFailed(Reason.UNAVAILABLE, "the stream ended", outage=True) from None

    def on_end(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def cancel(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def end(self) -> None:
        self.cancel()


def _sequence(answer: Any) -> Iterable[Any]:
    if isinstance(answer, Message | bytes | grpc.StatusCode | BaseException | Never):
        return (answer,)
    sequence: Iterable[Any] = answer
    return sequence
