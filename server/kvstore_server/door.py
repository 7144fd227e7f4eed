"""The door to the data service over TCP: who calls is found out before anything of a call is read.

A connection has come here with a certificate of `tcp.client_ca_file`. Each call on it must show a
token, too, and both must be one tenant's (`identity`). Whoever is not let in gets one constant
answer, whatever is missing or wrong and whichever method was asked for, health and reflection
included; no message of his is received. Whoever is let in meets the servicer of his tenant alone.

All methods are registered as streams of bytes: on the wire a call with one message is a stream of
one, and so the check comes before gRPC takes the first message in.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import grpc

from kvstore.clock import Clock
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.wire import status
from kvstore_server.boundary import Context
from kvstore_server.identity import Entry, Identity, bearer
from kvstore_server.logs import Throttled

log = logging.getLogger(__name__)

Handler = Any
"""grpc.RpcMethodHandler, which cannot be subscripted where it is defined."""

REFUSAL: Final = KVStoreError(
    Reason.PERMISSION_DENIED, "no token and certificate of one tenant came with this call"
)
REFUSAL_CODE: Final = grpc.StatusCode.UNAUTHENTICATED
_REFUSAL_TRAILERS: Final = ((status.DETAIL_KEY, status.detail_of(REFUSAL)),)

FIRST_MESSAGE_S: Final = 30.0
"""Whoever was let in has so long to say what he wants; then his place is another's."""

LET_IN, REFUSED, REVOKED, TOO_MANY = "calls", "calls_refused", "calls_revoked", "calls_too_many"


class Methods:
    """In place of a server in generated code's `add_...Servicer_to_server`: keeps the handlers."""

    def __init__(self) -> None:
        self._generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic += handlers

    def find(self, details: _Details) -> Handler | None:
        """The handler of a method; None if there is none."""
        found = (generic.service(details) for generic in self._generic)
        return next((handler for handler in found if handler is not None), None)


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[Any, ...] = ()


class Door(grpc.GenericRpcHandler):
    """See the module's docstring. Belongs to the event loop's thread."""

    def __init__(
        self,
        identity: Identity,
        tenants: Mapping[str, Methods],
        clock: Clock,
        *,
        calls_per_tenant_max: int,
        first_message_s: float = FIRST_MESSAGE_S,
    ) -> None:
        self._identity = identity
        self._tenants = tenants
        self._calls_max = calls_per_tenant_max
        self._first_message_s = first_message_s
        self._warn = Throttled(log, clock)
        self._inside: dict[asyncio.Task[Any], Entry] = {}
        self._revoked: set[asyncio.Task[Any]] = set()
        self._active: Counter[str] = Counter()
        self.counts: Counter[str] = Counter(dict.fromkeys((LET_IN, REFUSED, REVOKED, TOO_MANY), 0))

    def service(self, details: Any) -> Handler:
        """Of every method there is one handler; it cannot be told from here who asks."""
        method = details.method

        async def call(messages: AsyncIterator[bytes], context: Context) -> None:
            await self._call(method, messages, context)

        return grpc.stream_stream_rpc_method_handler(call)

    def exchange(self, identity: Identity) -> int:
        """From now on these are the tokens and names. Ends the calls of those that are not let in
        any more; how many.
        """
        self._identity = identity
        gone = [task for task, one in self._inside.items() if not identity.still_lets_in(one)]
        self._revoked.update(gone)
        for task in gone:
            task.cancel()
        return len(gone)

    async def _call(self, method: str, messages: AsyncIterator[bytes], context: Context) -> None:
        metadata = cast("tuple[tuple[str, str | bytes], ...]", context.invocation_metadata() or ())
        entry = self._identity.entry(certificate_names(context), bearer(metadata))
        if entry is None:
            self.counts[REFUSED] += 1
            self._warn.warning("refused", "a call over TCP was refused", peer=context.peer())
            await _refuse(context)
            return
        if self._active[entry.tenant] >= self._calls_max:
            self.counts[TOO_MANY] += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once")
        self.counts[LET_IN] += 1
        task = asyncio.current_task()
        assert task is not None
        self._active[entry.tenant] += 1
        self._inside[task] = entry
        try:
            await self._serve(self._tenants[entry.tenant], method, messages, context)
        except asyncio.CancelledError:
            if task not in self._revoked:
                raise
            self.counts[REVOKED] += 1
            await _refuse(context)
        finally:
            self._active[entry.tenant] -= 1
            del self._inside[task]
            self._revoked.discard(task)

    async def _first(self, messages: AsyncIterator[bytes]) -> bytes:
        """The one message of a call. One that was left out is an empty one, which is refused for
        what it lacks.
        """
        task = asyncio.current_task()
        assert task is not None
        late = asyncio.get_running_loop().call_later(self._first_message_s, task.cancel)
        try:
            return await anext(aiter(messages), b"")
        finally:
            late.cancel()

    async def _serve(
        self, methods: Methods, method: str, messages: AsyncIterator[bytes], context: Context
    ) -> None:
        handler = methods.find(_Details(method))
        if handler is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        decode: Callable[[bytes], Any] = handler.request_deserializer
        encode: Callable[[Any], bytes] = handler.response_serializer
        sending = cast(Context, _Sending(context, encode))
        requests: Any
        if handler.request_streaming:
            requests = _decoded(messages, decode)
            body = handler.stream_stream or handler.stream_unary
        else:
            requests = decode(await self._first(messages))
            body = handler.unary_stream or handler.unary_unary
        if inspect.isasyncgenfunction(body):
            async for reply in body(requests, sending):
                await sending.write(reply)
            return
        reply = await body(requests, sending)
        if not handler.response_streaming:
            await sending.write(reply)


class _Sending:
    """A call's context, encoding what is written."""

    def __init__(self, context: Context, encode: Callable[[Any], bytes]) -> None:
        self._context = context
        self._encode = encode

    async def write(self, message: Any) -> None:
        await self._context.write(self._encode(message))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def certificate_names(context: Context) -> list[str]:
    """The names in the certificate of a call's connection: the alternative names of the subject, or
    its common name if there are none.
    """
    found = cast("Mapping[str, Sequence[bytes]]", context.auth_context())
    names = found.get("x509_subject_alternative_name") or found.get("x509_common_name") or ()
    return [name.decode("utf-8", "replace") for name in names]


async def _refuse(context: Context) -> None:
    await context.abort(REFUSAL_CODE, str(REFUSAL), trailing_metadata=_REFUSAL_TRAILERS)


async def _decoded(
    messages: AsyncIterator[bytes], decode: Callable[[bytes], Any]
) -> AsyncIterator[Any]:
    async for message in messages:
        yield decode(message)
