"""Bodies of the calls that write: Reserve, Commit, Abort, and the byte stream Push."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np

from kvstore.config import Limits
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import CommitResult, Reserved
from kvstore.store import NS_PER_MS, Store
from kvstore.wire import convert
from kvstore.wire.status import RETRY_AFTER_MS
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Boundary, Call
from kvstore_server.reading import ttl


class WriteCalls:
    """One instance a tenant."""

    def __init__(self, store: Store, boundary: Boundary, limits: Limits, tenant: str) -> None:
        self._store = store
        self._boundary = boundary
        self._limits = limits
        self._tenant = tenant

    async def reserve(self, request: pb.ReserveRequest, call: Call) -> pb.ReserveReply:
        reserved = self._reserve(request, call)
        retry = bool(reserved.reason.is_retryable)
        return pb.ReserveReply(
            lease_id=reserved.lease_id,
            wanted=convert.pack_u32(reserved.wanted),
            offsets=convert.pack_u64(reserved.offsets),
            staging_region_id=reserved.staging_region,
            part_bytes=reserved.part_bytes,
            present=reserved.present,
            reserved=reserved.reserved,
            reason=convert.reason_to_wire(reserved.reason),
            retry_after_ms=RETRY_AFTER_MS if retry else 0,
            ttl_ms=ttl(request.ttl_ms, self._limits.reserve_ttl_ms),
        )

    def _reserve(self, request: pb.ReserveRequest, call: Call) -> Reserved:
        chain = self._boundary.keys(request.chain, "chain")
        if request.first_block > len(chain):
            raise BadRequest(
                Reason.BAD_SIZE, f"first_block {request.first_block} is beyond {len(chain)} keys"
            )
        session = call.the_session()
        layout, _ = self._store.space_of(session, request.space_id)
        call.record.prompt(request.space_id, request.chain, layout.block_tokens)
        self._boundary.stage(call, "preconditions")
        reserved = self._store.reserve(
            session,
            request.space_id,
            chain,
            first=request.first_block,
            part=request.part,
            attempt=request.attempt,
            ttl_ns=ttl(request.ttl_ms, self._limits.reserve_ttl_ms) * NS_PER_MS,
        )
        call.reason = reserved.reason
        call.record.count("blocks", len(chain) - request.first_block, len(reserved.wanted))
        return reserved

    async def commit(self, request: pb.CommitRequest, call: Call) -> pb.CommitReply:
        done = await self._commit(request.lease_id, call, durable=request.durable)
        return pb.CommitReply(
            visible=done.visible,
            waiting=done.waiting,
            failed=done.failed,
            reason=convert.reason_to_wire(done.reason),
        )

    async def _commit(self, lease_id: int, call: Call, *, durable: bool) -> CommitResult:
        done = await self._store.commit(
            call.the_session(), lease_id, durable=durable, wait_ns=self._boundary.left_ns(call)
        )
        self._boundary.stage(call, "movement")
        call.reason = done.reason
        call.tier = self._store.host_name
        call.record.count("blocks", done.visible + done.waiting + done.failed, done.visible)
        return done

    async def abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortReply:
        released, _ = self._store.release(call.the_session(), (request.lease_id,))
        return pb.AbortReply(known=released == 1)

    # ------------------------------------------------------------------ byte stream

    async def push(
        self,
        first: pb.PushChunk | None,
        chunks: AsyncIterator[pb.PushChunk],
        call: Call,
    ) -> pb.PushReply:
        """Takes a reservation's bytes as a stream; commits at its end, aborts if it breaks off."""
        if first is None or not first.HasField("reserve"):
            raise BadRequest(Reason.BAD_REQUEST, "the first message of a push reserves")
        reserved = self._reserve(first.reserve, call)
        reply = pb.PushReply(
            present=reserved.present,
            reserved=reserved.reserved,
            reason=convert.reason_to_wire(reserved.reason),
        )
        if not reserved.lease_id:
            return reply
        done: CommitResult | None = None
        try:
            if await self._fill(reserved, chunks):
                done = await self._commit(reserved.lease_id, call, durable=False)
        finally:
            if done is None:
                self._store.release(call.the_session(), (reserved.lease_id,))
        if done is None:
            raise KVStoreError(Reason.ABORTED, "the stream ended without commit")
        reply.stored = done.visible + done.waiting
        reply.failed = done.failed
        if done.reason is not Reason.OK:
            reply.reason = convert.reason_to_wire(done.reason)
        return reply

    async def _fill(self, reserved: Reserved, chunks: AsyncIterator[pb.PushChunk]) -> bool:
        """Writes the stream into the staging windows; True if it asked for the commit and nothing
        is missing."""
        offsets = dict(zip(reserved.wanted, reserved.offsets, strict=True))
        filled = dict.fromkeys(reserved.wanted, 0)
        async for chunk in chunks:
            if chunk.payload:
                self._write(reserved, offsets, filled, chunk)
            if chunk.commit:
                return all(length == reserved.part_bytes for length in filled.values())
        return False

    def _write(
        self,
        reserved: Reserved,
        offsets: dict[int, int],
        filled: dict[int, int],
        chunk: pb.PushChunk,
    ) -> None:
        block, at, payload = chunk.header.block, chunk.header.offset, chunk.payload
        if block not in offsets:
            return  # present already, or no room: the client sends without knowing
        if at != filled[block] or at + len(payload) > reserved.part_bytes:
            raise BadRequest(
                Reason.BAD_SIZE, "payload is sent in order and fills each block's part exactly"
            )
        window = self._store.staging_view(
            reserved.staging_region, offsets[block] + at, len(payload)
        )
        np.copyto(window, np.frombuffer(payload, np.uint8))
        filled[block] = at + len(payload)
