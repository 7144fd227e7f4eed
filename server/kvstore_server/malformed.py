"""Messages that are no protobuf: refused as any other wrong input, with a reason and a record.

gRPC itself would answer UNKNOWN without a detail, and log a traceback for each: a peer could fill
the log. `Tolerant` stands before a server while any service is added to it, so that whoever answers
for the server is asked to refuse instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvstore.model.reasons import BadRequest, Reason
from kvstore_server.boundary import Context

Handler = Any
"""grpc.RpcMethodHandler, which cannot be subscripted where it is defined."""
Refuse = Callable[[Context], Awaitable[Any]]
"""Ends the call with `error()`; it raises."""

_MALFORMED: Final = object()


class Tolerant:
    """In place of a server in generated code's `add_...Servicer_to_server`: exchanges handlers by
    name, and has what cannot be parsed refused by `refuse(op, context)`.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        refuse: Callable[[str, Context], Awaitable[Any]],
        changed: Mapping[str, Handler] | None = None,
    ) -> None:
        self._server = server
        self._refuse = refuse
        self._changed = dict(changed or {})

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Left out: the same handlers come by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Handler]) -> None:
        found = {
            name: tolerant(self._changed.get(name, handler), partial(self._refuse, name.lower()))
            for name, handler in handlers.items()
        }
        generic = grpc.method_handlers_generic_handler(service, found)
        self._server.add_generic_rpc_handlers((generic,))


def error() -> BadRequest:
    """What such a message is answered with."""
    return BadRequest(Reason.BAD_REQUEST, "the message cannot be parsed")


def tolerant(handler: Handler, refuse: Refuse) -> Handler:
    """The handler, calling `refuse` in place of the method for what its decoder cannot parse."""
    decode: Any = handler.request_deserializer

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _MALFORMED

    encode: Any = handler.response_serializer
    if handler.stream_stream is not None:
        method = _of_streams(handler.stream_stream, refuse)
        return grpc.stream_stream_rpc_method_handler(method, decoded, encode)
    if handler.stream_unary is not None:
        method = _of_stream(handler.stream_unary)
        return grpc.stream_unary_rpc_method_handler(method, decoded, encode)
    if handler.unary_stream is not None:
        method = _of_one(handler.unary_stream, refuse)
        return grpc.unary_stream_rpc_method_handler(method, decoded, encode)
    assert handler.unary_unary is not None
    method = _of_one(handler.unary_unary, refuse)
    return grpc.unary_unary_rpc_method_handler(method, decoded, encode)


def _of_one(method: Any, refuse: Refuse) -> Any:
    async def checked(request: Any, context: Context) -> Any:
        if request is _MALFORMED:
            return await refuse(context)
        return await method(request, context)

    return checked


def _of_stream(method: Any) -> Any:
    async def checked(requests: AsyncIterator[Any], context: Context) -> Any:
        return await method(_parsed(requests), context)

    return checked


def _of_streams(method: Any, refuse: Refuse) -> Any:
    async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        try:
            async for reply in method(_parsed(requests), context):
                yield reply
        except BadRequest:
            await refuse(context)

    return checked


async def _parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The messages of a stream; raises `error()` into the body that reads them."""
    async for request in requests:
        if request is _MALFORMED:
            raise error()
        yield request
