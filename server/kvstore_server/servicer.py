"""The data service: one servicer a tenant, because the way in says who asks.

Each method is one line: the boundary runs the body that decodes, asks the store and encodes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar, cast

import grpc

from kvstore.config import Limits
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.store import Store
from kvstore.wire.v1 import store_pb2 as pb
from kvstore.wire.v1 import store_pb2_grpc
from kvstore_server import malformed
from kvstore_server.boundary import Boundary, Call, Context
from kvstore_server.reading import ReadCalls
from kvstore_server.sessions import SessionCalls
from kvstore_server.streams import StreamCalls
from kvstore_server.writing import WriteCalls

Reply = TypeVar("Reply")


class StoreServicer(store_pb2_grpc.StoreServicer):
    """`kvstore.v1.Store` for one tenant."""

    def __init__(
        self, store: Store, boundary: Boundary, limits: Limits, *, tenant: str, fd_socket: bool
    ) -> None:
        """`fd_socket`: whether memory can be had by this way in."""
        self._boundary = boundary
        self._tenant = tenant
        self._has_memory = fd_socket
        self._sessions = SessionCalls(store, boundary, limits, tenant=tenant, fd_socket=fd_socket)
        self._reads = ReadCalls(store, boundary, limits, tenant)
        self._writes = WriteCalls(store, boundary, limits, tenant)
        self._streams = StreamCalls(store, boundary, limits, self._reads, self._writes)

    async def _run(
        self,
        op: str,
        context: Context,
        secret: bytes,
        body: Callable[[Call], Awaitable[Reply]],
        request_id: str = "",
    ) -> Reply:
        return await self._boundary.run(
            op, context, body, tenant=self._tenant, secret=secret, request_id=request_id
        )

    # Streamed answers are written by the bodies (`Call.send`), not yielded: a generator that is
    # dropped in the middle would free what it holds whenever it is collected.

    async def Attach(  # type: ignore[override]
        self, request: pb.AttachRequest, context: Context
    ) -> None:
        body = partial(self._sessions.attach, request)
        await self._boundary.run("attach", context, body, tenant=self._tenant)

    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.DetachReply:
        return await self._run("detach", context, request.session, self._sessions.detach)

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenReply:
        body = partial(self._sessions.open, request)
        return await self._run("open", context, request.session, body)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        body = partial(self._reads.lookup, request)
        return await self._run("lookup", context, request.session, body, request.request_id)

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireReply:
        body = partial(self._reads.acquire, request)
        return await self._run("acquire", context, request.session, body, request.request_id)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        body = partial(self._reads.release, request)
        return await self._run("release", context, request.session, body)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveReply:
        body = partial(self._writes.reserve if self._has_memory else self._no_memory, request)
        return await self._run("reserve", context, request.session, body, request.request_id)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        body = partial(self._writes.commit, request)
        return await self._run("commit", context, request.session, body, request.request_id)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        body = partial(self._writes.abort, request)
        return await self._run("abort", context, request.session, body)

    async def Fetch(  # type: ignore[override]
        self, request: pb.FetchRequest, context: Context
    ) -> None:
        """Its messages are encoded already: see `register`."""
        body = partial(self._streams.fetch, request)
        await self._run("fetch", context, request.session, body, request.request_id)

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushChunk], context: Context
    ) -> pb.PushReply:
        body = partial(self._streams.push, request_iterator)
        return await self._boundary.run("push", context, body, tenant=self._tenant)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainReply:
        body = partial(self._sessions.explain, request)
        return await self._run("explain", context, request.session, body)

    @staticmethod
    async def _no_memory(request: pb.ReserveRequest, call: Call) -> pb.ReserveReply:
        """Nothing can be written where nobody can get the memory: its bytes would be published."""
        raise KVStoreError(Reason.NOT_SUPPORTED, "there is no memory by this way in: use Push")

    async def refuse_malformed(self, op: str, context: Context) -> None:
        """Ends a call whose message is no protobuf, as every refusal ends: with a record."""

        async def body(call: Call) -> None:
            raise malformed.error()

        await self._boundary.run(op, context, body, tenant=self._tenant)


def register(servicer: StoreServicer, server: grpc.aio.Server) -> None:
    """Adds the service to a server, with a pass-through encoder for Fetch: its messages are encoded
    already, with one copy of the payload less.
    """
    fetch = grpc.unary_stream_rpc_method_handler(
        servicer.Fetch, request_deserializer=pb.FetchRequest.FromString, response_serializer=bytes
    )
    patched = malformed.Tolerant(server, servicer.refuse_malformed, {"Fetch": fetch})
    store_pb2_grpc.add_StoreServicer_to_server(servicer, cast(grpc.aio.Server, patched))
