"""Bodies of the calls about sessions and fingerprints: Attach, Detach, Open, Explain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import kvstore
from kvstore.config import Limits
from kvstore.model.fingerprint import Fingerprint, Verdict
from kvstore.model.keys import short
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import KeyExplanation, Opening
from kvstore.store import Session, Store
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Boundary, Call, bound_text

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
GROUP_BYTES_MAX = 64
DRAIN_POLL_S = 0.02
EXPLAINED_AT_ONCE = 32
"""Keys that are explained before other calls get their turn: about a millisecond."""

_STANDING = frozenset({Reason.MISS_IN_PROGRESS, Reason.HELD_FOR_REVIEW})
"""Why a key misses whatever an archive has of it."""


class SessionCalls:
    """One instance a tenant."""

    def __init__(
        self, store: Store, boundary: Boundary, limits: Limits, *, tenant: str, fd_socket: bool
    ) -> None:
        self._store = store
        self._boundary = boundary
        self._limits = limits
        self._tenant = tenant
        self._fd_socket = fd_socket

    async def attach(self, request: pb.AttachRequest, call: Call) -> None:
        """Sends the welcome, and keeps the stream while the session lives on it."""
        if request.protocol_major != PROTOCOL_MAJOR:
            raise KVStoreError(
                Reason.PROTOCOL_VERSION,
                f"the client speaks {request.protocol_major}, the daemon {PROTOCOL_MAJOR}",
            )
        bound_text(request.client_name, "client_name")
        bound_text(request.engine_id, "engine_id")
        if not 0 < len(request.group_id) <= GROUP_BYTES_MAX:
            raise BadRequest(Reason.BAD_NAME, f"group_id has 1 to {GROUP_BYTES_MAX} bytes")
        call.record.engine_id = request.engine_id
        self._boundary.stage(call, "input")
        session = self._store.attach(
            self._tenant, request.group_id, request.engine_id, request.client_name
        )
        try:
            await call.send(pb.AttachEvent(welcome=self._welcome(request, session)))
            self._boundary.finish(call)  # its end is no outcome of the call
            await self._until_over(session, call)
        finally:
            # A client with an fd socket may end its stream: that socket and its process are the
            # session's life then.
            if not session.fd_bound:
                self._store.end_session(session.id)

    async def _until_over(self, session: Session, call: Call) -> None:
        """Until the session has ended, or the daemon drains and nothing is under way."""
        drained = asyncio.ensure_future(self._store.drained.wait())
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait((drained, ended), return_when=asyncio.FIRST_COMPLETED)
            if drained.done() and not ended.done():
                await call.send(pb.AttachEvent(notice=pb.Notice(reason=pb.REASON_DRAINING)))
                while self._store.unfinished and not ended.done():
                    await asyncio.wait((ended,), timeout=DRAIN_POLL_S)
        finally:
            drained.cancel()
            ended.cancel()

    def _welcome(self, request: pb.AttachRequest, session: Session) -> pb.Welcome:
        limits, core = self._limits, self._store.core.limits
        return pb.Welcome(
            protocol_minor=min(request.protocol_minor, PROTOCOL_MINOR),
            session=session.secret,
            instance_id=self._store.instance_id,
            daemon_version=kvstore.__version__,
            limits=pb.Limits(
                keys_per_call_max=limits.keys_per_call_max,
                message_bytes_max=limits.message_bytes_max,
                part_bytes_max=limits.part_bytes_max,
                leases_per_session_max=limits.leases_per_session_max,
                view_bytes_per_session_max=core.view_bytes_per_session_max,
                staging_bytes=core.staging_bytes,
                lease_ttl_ms_max=limits.lease_ttl_ms,
                reserve_ttl_ms_max=limits.reserve_ttl_ms,
            ),
            fd_socket=self._fd_socket,
            fd_fetch=self._fd_socket,
            tiers=[tier.name for tier in self._store.tiers],
            device_uuids=self._store.device_uuids if self._fd_socket else [],
        )

    async def detach(self, call: Call) -> pb.DetachReply:
        self._store.end_session(call.the_session().id)
        return pb.DetachReply()

    async def open(self, request: pb.OpenRequest, call: Call) -> pb.OpenReply:
        fingerprint = convert.fingerprint_from_wire(request.fingerprint)
        opening = self._store.open(call.the_session(), fingerprint)
        self._boundary.stage(call, "preconditions")
        call.reason = opening.reason
        if opening.verdict is Verdict.INCOMPATIBLE:
            self._boundary.rejected(call, opening.reason, opening.differences)
        elif opening.verdict is Verdict.HELD:
            self._boundary.held(call, opening.review_id, opening.missing)
        return opening_to_wire(opening)

    async def explain(self, request: pb.ExplainRequest, call: Call) -> pb.ExplainReply:
        keys = self._boundary.keys(request.keys)
        session = call.the_session()
        if request.HasField("fingerprint"):
            fingerprint = convert.fingerprint_from_wire(request.fingerprint)
            return await explain_offer(
                self._store, session.tenant, session.group, fingerprint, keys
            )
        reason = Reason.OK
        try:
            self._store.space_of(session, request.space_id)
        except KVStoreError as error:
            if error.reason is not Reason.SPACE_CLOSED:
                raise
            reason = error.reason  # why it was closed is what each key is told
        return await explain_keys(
            self._store, session.tenant, request.space_id, keys, reason=reason
        )


def opening_to_wire(opening: Opening) -> pb.OpenReply:
    reply = pb.OpenReply(
        verdict=convert.VERDICTS[opening.verdict],
        space_id=opening.space_id,
        reason=convert.reason_to_wire(opening.reason),
        differences=convert.differences_to_wire(opening.differences),
        fingerprint_digest=opening.digest,
        review_id=opening.review_id,
        missing=opening.missing,
        detail=opening.detail or opening.reason.text,
    )
    if opening.layout is not None:
        reply.block_bytes = opening.layout.block_bytes
        reply.slot_bytes = opening.layout.slot_bytes
        reply.parts = len(opening.layout.parts)
    return reply


async def explain_offer(
    store: Store, tenant: str, group: bytes, fingerprint: Fingerprint, keys: Sequence[bytes]
) -> pb.ExplainReply:
    """What an offer of this fingerprint would be answered, and why `keys` miss in its space. Of one
    that is welcome and was never made the reason is that of a miss: it would begin empty.
    """
    opening = store.core.explain_offer(tenant, group, fingerprint)
    reason, detail = opening.reason, opening.detail
    if opening.verdict is Verdict.MATCH and not opening.space_id:
        reason = Reason.MISS_INCOMPATIBLE if opening.differences else Reason.MISS_NEVER_STORED
        detail = "no engine has offered it yet: it would begin with nothing stored"
    reply = pb.ExplainReply(
        verdict=convert.VERDICTS[opening.verdict],
        reason=convert.reason_to_wire(reason),
        differences=convert.differences_to_wire(opening.differences),
        detail=detail or reason.text,
    )
    if opening.space_id:
        reply.keys.extend(await _explained(store, tenant, opening.space_id, keys))
    return reply


async def explain_keys(
    store: Store, tenant: str, space_id: int, keys: Sequence[bytes], *, reason: Reason = Reason.OK
) -> pb.ExplainReply:
    """Why `keys` are where they are in a space. `reason`: of the space itself."""
    closed = reason is not Reason.OK
    return pb.ExplainReply(
        verdict=pb.VERDICT_INCOMPATIBLE if closed else pb.VERDICT_MATCH,
        reason=convert.reason_to_wire(reason),
        keys=await _explained(store, tenant, space_id, keys),
        detail=reason.text if closed else "",
    )


async def _explained(
    store: Store, tenant: str, space_id: int, keys: Sequence[bytes]
) -> list[pb.KeyExplanation]:
    below = await store.archives.held_for(tenant, space_id, keys)
    explained = []
    for index, key in enumerate(keys):
        if index % EXPLAINED_AT_ONCE == EXPLAINED_AT_ONCE - 1:
            await asyncio.sleep(0)
        found = store.core.explain(tenant, space_id, key, store.clock.monotonic_ns())
        if found.tier < 0 and found.reason not in _STANDING and key in below:
            found = KeyExplanation(Reason.HIT, below[key], 0, 0, -1)
        explained.append(
            pb.KeyExplanation(
                key=short(key),
                reason=convert.reason_to_wire(found.reason),
                tier="" if found.tier < 0 else store.tiers[found.tier].name,
                generation=found.generation,
                leases=found.leases,
                age_s=-1.0 if found.age_ns < 0 else found.age_ns / 1e9,
                differences=convert.differences_to_wire(found.differences),
                detail=found.detail or found.reason.text,
            )
        )
    return explained
