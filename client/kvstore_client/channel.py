"""The transport: one target, one gRPC channel, and the one place where its errors are mapped.

`Transport` is the seam: every policy (deadlines, breaker, sessions) is above it, every socket below
it, and `kvstore_client.testing` has another one. Only bytes pass it, so that garbage can be played.
`CallFailed` is the only exception that comes out of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.sockets import FD_SUFFIX, bytes_too_long
from kvstore.wire import status
from kvstore_client.forks import GATE, grpc_works_here

__all__ = [
    "AttachStream",
    "CallFailed",
    "GrpcTransport",
    "Transport",
    "mapped",
    "socket_path",
]

SERVICE = "/kvstore.v1.Store/"
RECEIVE_BYTES_MAX = 64 << 20
KNOCK_TIMEOUT_S = 0.1
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    # Two clients of one process are two connections, and each attempt to connect is a fresh one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # A stream of blocks is read in larger pieces than gRPC would: a sixth less of processor time.
    ("grpc.experimental.tcp_min_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
)
# Of a status without an ErrorDetail. These are the word of our own gRPC or of the daemon on a
# request; any other means that nobody answered it properly.
_ANSWERS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


Metadata = tuple[tuple[str, str], ...] | None


class CallFailed(Exception):
    """A call got no answer, or a refusal. `outage`: the daemon gave no proper answer at all;
    `absent`: because nobody listens there.
    """

    def __init__(
        self, reason: Reason, detail: str = "", *, outage: bool = False, absent: bool = False
    ) -> None:
        super().__init__(reason, detail)
        if reason in (Reason.OK, Reason.HIT):
            reason = Reason.INTERNAL  # a failure that says so contradicts itself
        self.reason = reason
        self.detail = detail or reason.text
        self.outage = outage
        self.absent = absent


class AttachStream(Protocol):
    """The stream of one session."""

    def next_event(self) -> bytes:
        """The next AttachEvent, encoded. Raises CallFailed at its end and at the deadline of the
        attempt."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, from any thread, when the stream is over."""

    def cancel(self) -> None:
        """Breaks it off, from any thread. Idempotent."""

    def end(self) -> None:
        """Breaks it off and waits until no thread is inside it. Not beside `next_event`."""


class Transport(Protocol):
    """One connection to one daemon. Calls may come from several threads."""

    def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """A call with one answer, by its name in the service."""

    def attach(self, request: bytes, timeout_s: float | None) -> AttachStream:
        """Opens a session. timeout_s: life of the stream; None: until it is ended."""

    def download(self, request: bytes, timeout_s: float) -> Iterator[bytes]:
        """Fetch: the encoded chunks. Closing the iterator breaks the call off."""

    def upload(self, chunks: Iterator[bytes], timeout_s: float) -> bytes:
        """Push. `chunks` is consumed in another thread."""

    def dial_memory(self, timeout_s: float) -> socket.socket:
        """A connected fd socket. Raises OSError."""

    def absent(self) -> bool:
        """Whether nobody listens there. Costs next to nothing, and no call."""

    def break_off(self) -> None:
        """Ends the calls that are under way: they fail. It stays usable."""

    def close(self) -> None:
        """Breaks off what is under way, for good. Idempotent."""


def socket_path(target: str | os.PathLike[str]) -> str:
    """The path of a target: "unix:/path", "unix:///path" or "/path". BadRequest for any other."""
    path = os.fspath(target) if isinstance(target, os.PathLike) else target
    if not isinstance(path, str):
        raise _no_target(f", not {type(target).__name__}")
    if path.startswith("unix:"):
        path = path[len("unix:") :]
        if path.startswith("//"):
            path = path[2:]
    if not path or "\0" in path or "://" in path:
        raise _no_target("")
    if path.endswith(FD_SUFFIX):
        raise _no_target(f": {path!r} is the fd socket that stands beside it")
    try:
        over = bytes_too_long(path, data=True)
    except UnicodeEncodeError:
        raise _no_target(", which is no valid Unicode") from None
    if over:
        raise _no_target(f"; {path!r} is too long for a socket by {over} bytes")
    return path


def _no_target(why: str) -> BadRequest:
    return BadRequest(
        Reason.BAD_NAME,
        "the target is the path of the daemon's data socket, with or without `unix:`, or "
        f"tcp://HOST:PORT{why}",
        "target",
    )


class GrpcTransport:
    """A gRPC channel to a unix socket, and the fd socket beside it. `tcp` has another one."""

    def __init__(self, target: str, connect_timeout_ms: int = 1_000) -> None:
        self._path = self._checked(target)
        # By its name a pause; it also bounds one attempt to connect.
        self._options = (*_OPTIONS, ("grpc.min_reconnect_backoff_ms", connect_timeout_ms))
        if not grpc_works_here():
            raise CallFailed(
                Reason.UNAVAILABLE,
                "gRPC cannot be used in a forked child while GRPC_ENABLE_FORK_SUPPORT is off",
                outage=True,
            )
        self._closed = False
        self._channel: grpc.Channel | None = None
        self._unary: dict[str, Any] = {}

    def _checked(self, target: str) -> str:
        return socket_path(target)

    def _open(self) -> grpc.Channel:
        return grpc.insecure_channel(f"unix:{self._path}", options=self._options)

    def _metadata(self) -> Metadata:
        """Of each call."""
        return None

    def _the_channel(self) -> grpc.Channel:
        """Inside the gate."""
        if self._closed:
            raise CallFailed(Reason.UNAVAILABLE, "the connection is closed", outage=True)
        channel = self._channel
        if channel is None:
            channel = self._channel = self._open()
        return channel

    def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        with GATE.call(), mapped():
            call = self._unary.get(method)
            if call is None:
                call = self._unary[method] = self._the_channel().unary_unary(SERVICE + method)
            # Never call.future(): it runs a thread inside gRPC that a fork would meet.
            reply: bytes = call(
                request, timeout=timeout_s, wait_for_ready=False, metadata=self._metadata()
            )
            return reply

    def attach(self, request: bytes, timeout_s: float | None) -> AttachStream:
        self._knock()
        with GATE.call(), mapped():
            call: Any = self._the_channel().unary_stream(SERVICE + "Attach")
            return _GrpcAttach(
                call(request, timeout=timeout_s, wait_for_ready=False, metadata=self._metadata())
            )

    def _knock(self) -> None:
        """Finds out that nobody listens without gRPC, whose attempts cost threads and a little
        memory each: a daemon may be away for days.
        """
        try:
            self._connected(self._path, KNOCK_TIMEOUT_S).close()
        except (FileNotFoundError, ConnectionRefusedError, PermissionError) as error:
            raise CallFailed(
                Reason.UNAVAILABLE, f"{self._path}: {error.strerror}", outage=True, absent=True
            ) from None
        except OSError:
            pass  # a full backlog: gRPC will say it

    def absent(self) -> bool:
        try:
            self._knock()
        except CallFailed:
            return True
        return False

    @staticmethod
    def _connected(path: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return sock

    def download(self, request: bytes, timeout_s: float) -> Iterator[bytes]:
        with GATE.call(), mapped():
            method: Any = self._the_channel().unary_stream(SERVICE + "Fetch")
            call = method(
                request, timeout=timeout_s, wait_for_ready=False, metadata=self._metadata()
            )
            try:
                yield from call
            finally:
                call.cancel()

    def upload(self, chunks: Iterator[bytes], timeout_s: float) -> bytes:
        with GATE.call(), mapped():
            call: Any = self._the_channel().stream_unary(SERVICE + "Push")
            reply: bytes = call(
                chunks, timeout=timeout_s, wait_for_ready=False, metadata=self._metadata()
            )
            return reply

    def dial_memory(self, timeout_s: float) -> socket.socket:
        return self._connected(f"{self._path}{FD_SUFFIX}", timeout_s)

    def break_off(self) -> None:
        # Not through the gate: a fork that waits for it calls this.
        channel, self._channel, self._unary = self._channel, None, {}
        if channel is not None:
            channel.close()

    def close(self) -> None:
        self._closed = True
        with GATE.call():
            self.break_off()


class _GrpcAttach:
    def __init__(self, call: Any) -> None:
        self._call = call

    def next_event(self) -> bytes:
        with GATE.call(), mapped():
            try:
                event: bytes = next(self._call)
            except StopIteration:
                raise CallFailed(
                    Reason.UNAVAILABLE, "the daemon ended the session", outage=True
                ) from None
            return event

    def on_end(self, callback: Callable[[], None]) -> None:
        if not self._call.add_callback(callback):
            callback()

    def cancel(self) -> None:
        self._call.cancel()

    def end(self) -> None:
        with GATE.call(), contextlib.suppress(grpc.RpcError):
            self._call.cancel()
            for _ in self._call:
                pass


@contextlib.contextmanager
def mapped() -> Iterator[None]:
    """Every exception of gRPC that belongs to the world becomes CallFailed."""
    try:
        yield
    except grpc.RpcError as error:
        raise _failure(error) from None
    except ValueError as error:
        # What a closed channel says: it was closed because the session is over.
        raise CallFailed(Reason.UNAVAILABLE, str(error), outage=True) from None


def _failure(error: Any) -> CallFailed:
    code = error.code()
    metadata = tuple(tuple(pair) for pair in error.trailing_metadata() or ())
    answered = any(key == status.DETAIL_KEY for key, _ in metadata)
    reason, detail = status.reason_of(code, metadata)
    if not answered:
        detail = f"{code.name}: {error.details() or ''}"
        if code is grpc.StatusCode.CANCELLED:
            reason = Reason.UNAVAILABLE
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            detail = (
                "this call is not served there: the target is the data socket, not the admin "
                "socket, of a daemon of this version"
            )
    return CallFailed(reason, detail, outage=not answered and code not in _ANSWERS)
