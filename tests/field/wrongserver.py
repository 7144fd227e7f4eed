"""A data service that answers any of its calls wrongly: over real gRPC, before a store in this
process that knows the right answers.

    with WrongServer(folder) as server:
        server.wrong["Lookup"] = garbage(b"\\xff")
        client = Client(server.path, transport=server.transport)
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from kvstore.wire import status
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import GrpcTransport
from kvstore_client.testing import FakeRpcError, FakeStore

SERVICE = pb.DESCRIPTOR.services_by_name["Store"]
METHODS = tuple(SERVICE.methods_by_name)
"""Of the service's descriptor, so that a new call is covered."""

Wrong = Callable[["Exchange"], Iterable[bytes]]
"""Makes the answers of one call, one only where the call is unary."""


class Exchange:
    """One call: what was asked, what would be right, and how to refuse."""

    def __init__(self, context: grpc.ServicerContext, right: Callable[[], list[bytes]]) -> None:
        self.context = context
        self.right = right

    def wait(self, seconds: float | None = None) -> None:
        """Until the caller is gone, or so long."""
        gone = threading.Event()
        if self.context.add_callback(gone.set):
            gone.wait(seconds)


# ---------------------------------------------------------------- ways to be wrong


def code(number: grpc.StatusCode, *detail: bytes) -> Wrong:
    """A status, bare or with something for a detail."""

    def answer(exchange: Exchange) -> list[bytes]:
        exchange.context.set_trailing_metadata(tuple((status.DETAIL_KEY, one) for one in detail))
        exchange.context.abort(number, "as the test wants it")
        raise AssertionError("aborting raises")

    return answer


def garbage(*messages: bytes) -> Wrong:
    return lambda exchange: messages


def twice(exchange: Exchange) -> list[bytes]:
    """Every message of a stream twice; of one answer, all of its fields."""
    return [piece for message in exchange.right() for piece in (message + message, message)]


def late(seconds: float) -> Wrong:
    def answer(exchange: Exchange) -> list[bytes]:
        exchange.wait(seconds)
        return exchange.right()

    return answer


def never(exchange: Exchange) -> list[bytes]:
    exchange.wait()
    return []


def cut(exchange: Exchange) -> list[bytes]:
    """Half of the last message."""
    *whole, last = exchange.right()
    return [*whole, last[: len(last) // 2]]


# ---------------------------------------------------------------- the server


class WrongServer:
    """See the module's docstring. `seen` counts the calls that were answered wrongly."""

    def __init__(self, folder: Path, store: FakeStore) -> None:
        self.path = str(folder / "wrong.sock")
        self.store = store
        self.wrong: dict[str, Wrong] = {}
        self.seen: Counter[str] = Counter()
        self._over = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(64))
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self._server.add_insecure_port(f"unix:{self.path}")

    def was_called(self, method: str, before: int) -> bool:
        """Whether it has answered more calls wrongly than `before`."""
        return self.seen[method] > before

    def transport(self) -> GrpcTransport:
        """For `Client(transport=...)`: calls go to this server, memory comes from the store."""
        return _Transport(self.path, self.store.dial)

    def __enter__(self) -> WrongServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.stop(0).wait()

    def answers(
        self, method: str, requests: list[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        descriptor = SERVICE.methods_by_name[method]
        message = getattr(pb, descriptor.input_type.name)
        parsed = [message.FromString(request) for request in requests]

        def right() -> list[bytes]:
            given = self.store.answer(method, parsed if descriptor.client_streaming else parsed[0])
            if isinstance(given, FakeRpcError):
                context.set_trailing_metadata(given.trailing_metadata())
                context.abort(given.code(), given.details())
            many = given if isinstance(given, list) else [given]
            return [one.SerializeToString() for one in many]

        wrong = self.wrong.get(method)
        if wrong is not None:
            self.seen[method] += 1
        exchange = Exchange(context, right)
        yield from right() if wrong is None else wrong(exchange)
        if method == "Attach" and wrong is None:
            exchange.wait()  # the stream is the life of a session without shared memory


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, server: WrongServer) -> None:
        self._server = server

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        descriptor = SERVICE.methods_by_name.get(method)
        if descriptor is None:
            return None
        answers = self._server.answers
        if descriptor.server_streaming:
            return grpc.unary_stream_rpc_method_handler(
                lambda request, context: answers(method, [request], context)
            )
        if descriptor.client_streaming:
            return grpc.stream_unary_rpc_method_handler(
                lambda requests, context: next(answers(method, list(requests), context), b"")
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: next(answers(method, [request], context), b"")
        )


class _Transport(GrpcTransport):
    def __init__(self, path: str, dial: Callable[[], socket.socket]) -> None:
        super().__init__(path)
        self._dial = dial

    def dial_memory(self, timeout_s: float) -> socket.socket:
        sock = self._dial()
        sock.settimeout(timeout_s)
        return sock
