"""Bodies of the calls that write: Reserve, Commit, Abort."""

from __future__ import annotations

from kvstore.config import Limits
from kvstore.model.keys import KEY_BYTES
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.values import Before, CommitResult, Reserved
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
        session = call.the_session()
        session.grants.check(request.nonce)
        reserved = self.reserved(request, call)
        session.grants.note(request.nonce, reserved.lease_id)
        retry = reserved.reason.is_retryable
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
            mark=reserved.mark,
        )

    def reserved(self, request: pb.ReserveRequest, call: Call) -> Reserved:
        """The reservation that a request asks for."""
        packed = request.chain
        chain = self._boundary.keys(packed, "chain")
        if request.first_block > len(chain):
            raise BadRequest(
                Reason.BAD_SIZE, f"first_block {request.first_block} is beyond {len(chain)} keys"
            )
        before = Before(request.parent, request.chain_start, request.since)
        if len(before.parent) != (KEY_BYTES if before.blocks else 0):
            raise BadRequest(
                Reason.BAD_KEY_LENGTH, f"parent is a key of {KEY_BYTES} bytes after a chain_start"
            )
        session = call.the_session()
        layout, _ = self._store.space_of(session, request.space_id)
        call.record.prompt(request.space_id, packed, layout.block_tokens)
        self._boundary.stage(call, "preconditions")
        reserved = self._store.reserve(
            session,
            request.space_id,
            chain,
            first=request.first_block,
            part=request.part,
            attempt=request.attempt,
            ttl_ns=ttl(request.ttl_ms, self._limits.reserve_ttl_ms) * NS_PER_MS,
            before=before,
            durable=request.durable,
        )
        self._boundary.stage(call, "plan")
        call.reason = reserved.reason
        call.record.count("blocks", len(chain) - request.first_block, len(reserved.wanted))
        return reserved

    async def commit(self, request: pb.CommitRequest, call: Call) -> pb.CommitReply:
        done = await self.committed(request.lease_id, call, durable=request.durable)
        return pb.CommitReply(
            visible=done.visible,
            waiting=done.waiting,
            failed=done.failed,
            reason=convert.reason_to_wire(done.reason),
        )

    async def committed(self, lease_id: int, call: Call, *, durable: bool) -> CommitResult:
        """What became of a commit, by the call's deadline."""
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
