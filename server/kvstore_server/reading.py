"""Bodies of the calls that read: Lookup, Acquire, Release, and the byte stream Fetch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import xxhash

from kvstore.config import Limits
from kvstore.model.cost import PrefillCost
from kvstore.model.hits import GroupPresence, HitRule, agreed_tokens, leading_run
from kvstore.model.layout import Layout
from kvstore.model.plan import Plan
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.values import LeaseMode, Place, Region
from kvstore.policy.plan import plan, runs_of
from kvstore.store import NS_PER_MS, Presence, Store
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Boundary, Call

GROUPS_MAX = 16
CHUNK_BYTES = 1 << 20
"""Payload of one stream message: 1-4 MiB is where gRPC is fastest."""
TOKENS_MAX = 1 << 31


class ReadCalls:
    """One instance a tenant."""

    def __init__(self, store: Store, boundary: Boundary, limits: Limits, tenant: str) -> None:
        self._store = store
        self._boundary = boundary
        self._limits = limits
        self._tenant = tenant

    # ------------------------------------------------------------------ lookup

    async def lookup(self, request: pb.LookupRequest, call: Call) -> pb.LookupReply:
        if not 0 < len(request.queries) <= GROUPS_MAX:
            raise BadRequest(Reason.BAD_REQUEST, f"a lookup has 1 to {GROUPS_MAX} queries")
        cost = _prefill(request)
        session = call.the_session()
        layouts: list[Layout] = []
        groups: list[GroupPresence] = []
        replies: list[pb.GroupHit] = []
        for query in request.queries:
            keys = self._boundary.keys(query.keys)
            layout, digest = self._store.space_of(session, query.space_id)
            presence = await self._store.lookup(session, query.space_id, keys)
            layouts.append(layout)
            groups.append(
                GroupPresence(
                    presence.codes, layout.block_tokens, _rule(query.rule), query.trailing_blocks
                )
            )
            replies.append(self._group_hit(call, query.space_id, keys, presence, digest))
        first = request.queries[0]
        call.record.prompt(
            first.space_id, first.keys, layouts[0].block_tokens, request.prompt_tokens
        )
        self._boundary.stage(call, "preconditions")
        tokens = agreed_tokens(groups)
        advice = self._advise(request.prompt_tokens, layouts, groups[0].codes, tokens, cost)
        self._boundary.stage(call, "plan")
        asked = len(keys_of(request.queries[0])) * layouts[0].block_tokens
        self._note(call, asked, tokens, groups[0], advice)
        return pb.LookupReply(groups=replies, agreed_tokens=tokens, plan=_plan_to_wire(advice))

    def _group_hit(
        self, call: Call, space_id: int, keys: Sequence[bytes], presence: Presence, digest: bytes
    ) -> pb.GroupHit:
        run = leading_run(presence.codes)
        hit = pb.GroupHit(hit_blocks=run, tiers=presence.codes, fingerprint_digest=digest)
        if not keys:
            hit.reason = pb.REASON_NOTHING_TO_DO
            call.reason = Reason.NOTHING_TO_DO
        elif run == len(keys):
            hit.reason = pb.REASON_OK
        else:
            absence = self._store.core.why_absent(call.the_session().id, space_id, keys[run])
            hit.reason = convert.reason_to_wire(absence.reason)
            hit.differences.extend(convert.differences_to_wire(absence.differences))
            if run == 0:
                call.reason = absence.reason
                self._boundary.rejected(call, absence.reason, absence.differences)
        return hit

    def _advise(
        self,
        prompt_tokens: int,
        layouts: Sequence[Layout],
        codes: bytes,
        tokens: int,
        cost: PrefillCost | None,
    ) -> Plan:
        block_tokens = layouts[0].block_tokens
        return plan(
            runs_of(codes[: tokens // block_tokens]),
            block_tokens,
            # Groups may cut blocks of other sizes: bytes for as many tokens as one block of the
            # first.
            sum(lay.block_bytes * block_tokens // lay.block_tokens for lay in layouts),
            self._store.links,
            cost,
            min(prompt_tokens, TOKENS_MAX),
        )

    def _note(
        self, call: Call, asked_tokens: int, tokens: int, first: GroupPresence, advice: Plan
    ) -> None:
        if tokens:
            call.reason = Reason.HIT
            slowest = max(first.codes[: tokens // first.block_tokens]) - 1
            call.tier = self._store.tiers[slowest].name
            if advice.reason is Reason.DECLINED_RECOMPUTE_FASTER:
                call.reason = advice.reason
        call.record.count("tokens", asked_tokens, tokens)
        call.record.planned(advice)
        self._boundary.metrics.lookup(self._tenant, asked_tokens, tokens, call.reason, call.tier)

    # ------------------------------------------------------------------ leases

    async def acquire(self, request: pb.AcquireRequest, call: Call) -> pb.AcquireReply:
        keys = self._boundary.keys(request.keys)
        session = call.the_session()
        layout, digest = self._store.space_of(session, request.space_id)
        view = request.mode == pb.LEASE_MODE_VIEW
        ttl_ms = ttl(request.ttl_ms, self._limits.lease_ttl_ms)
        call.record.prompt(request.space_id, request.keys, layout.block_tokens)
        self._boundary.stage(call, "preconditions")
        leased = await self._store.acquire(
            session,
            request.space_id,
            keys,
            mode=LeaseMode.VIEW if view else LeaseMode.COPY,
            ttl_ns=None if view else ttl_ms * NS_PER_MS,
            wait_ns=self._boundary.wait_ns(call, request.wait_ms),
            all_or_nothing=request.all_or_nothing,
        )
        self._boundary.stage(call, "movement")
        call.reason = leased.reason
        call.record.count("blocks", len(keys), leased.leased)
        reply = pb.AcquireReply(
            lease_id=leased.lease_id,
            leased_blocks=leased.leased,
            ttl_ms=0 if view else ttl_ms,
            fingerprint_digest=digest,
            block_bytes=layout.block_bytes,
            regions=map(region_to_wire, leased.regions),
            reason=convert.reason_to_wire(leased.reason),
        )
        if leased.leased:
            call.tier = self._store.host_name
            reply.places = convert.pack_places(map(_wire_place, leased.places))
        elif keys and leased.reason.is_miss:
            absence = self._store.core.why_absent(session.id, request.space_id, keys[0])
            call.reason = absence.reason
            reply.reason = convert.reason_to_wire(absence.reason)
            reply.differences.extend(convert.differences_to_wire(absence.differences))
        return reply

    async def release(self, request: pb.ReleaseRequest, call: Call) -> pb.ReleaseReply:
        limit = self._limits.leases_per_session_max
        if len(request.lease_ids) > limit or len(request.reports) > limit:
            raise BadRequest(Reason.BAD_SIZE, f"{limit} leases at most in a release")
        session = call.the_session()
        for report in request.reports:
            self._loaded(report, call)
        released, unknown = self._store.release(session, list(request.lease_ids))
        return pb.ReleaseReply(released=released, unknown=unknown)

    def _loaded(self, report: pb.LoadReport, call: Call) -> None:
        reason = Reason.from_wire(report.reason)
        length = self._store.note_load(
            call.the_session(), report.lease_id, report.blocks, report.copy_us * 1_000
        )
        self._boundary.metrics.loaded(
            self._tenant,
            reason,
            length_bytes=length,
            tokens=min(report.tokens, TOKENS_MAX),
            copy_s=report.copy_us / 1e6,
            prefill_saved_s=max(0.0, min(report.prefill_saved_us / 1e6, 86_400.0)),
        )
        call.record.loaded(report.request_id, report.blocks, length, report.copy_us, reason)

    # ------------------------------------------------------------------ byte stream

    async def fetch(self, request: pb.FetchRequest, call: Call) -> AsyncIterator[bytes]:
        """FetchChunk messages, encoded: the leading run of the keys, then a last one that says why
        it ends."""
        keys = self._boundary.keys(request.keys)
        session = call.the_session()
        layout, digest = self._store.space_of(session, request.space_id)
        call.record.prompt(request.space_id, request.keys, layout.block_tokens)
        self._boundary.stage(call, "preconditions")
        leased = await self._store.acquire(
            session,
            request.space_id,
            keys,
            mode=LeaseMode.COPY,
            ttl_ns=self._boundary.left_ns(call),
            wait_ns=self._boundary.wait_ns(call, request.wait_ms),
        )
        sent = 0
        try:
            first = pb.ChunkHeader(fingerprint_digest=digest, block_bytes=layout.block_bytes)
            yield convert.encode_fetch_chunk(first.SerializeToString(), b"")
            for block, place in enumerate(leased.places):
                if place is None:
                    break
                for chunk in self._chunks(block, place, layout.block_bytes):
                    yield chunk
                if self._store.generation(place) != place.generation:
                    # The lease ran out while a slow reader took its time: what was sent is void.
                    call.reason = Reason.GENERATION_CHANGED
                    break
                sent += 1
                yield self._sealed(block, place, layout.block_bytes)
        finally:
            if leased.lease_id:
                self._store.release(session, (leased.lease_id,))
        call.record.count("blocks", len(keys), sent)
        if sent < len(keys) and call.reason is Reason.OK:
            absent = self._store.core.why_absent(session.id, request.space_id, keys[sent])
            call.reason = absent.reason if sent == 0 else Reason.OK
            end = absent.reason
        else:
            end = call.reason
        if sent:
            call.tier = self._store.host_name
        last = pb.ChunkHeader(block=sent, reason=convert.reason_to_wire(end))
        yield convert.encode_fetch_chunk(last.SerializeToString(), b"")

    def _chunks(self, block: int, place: Place, block_bytes: int) -> list[bytes]:
        data = self._store.block_view(place, block_bytes).data
        return [
            convert.encode_fetch_chunk(
                pb.ChunkHeader(block=block, offset=offset).SerializeToString(),
                data[offset : offset + CHUNK_BYTES],
            )
            for offset in range(0, block_bytes, CHUNK_BYTES)
        ]

    def _sealed(self, block: int, place: Place, block_bytes: int) -> bytes:
        """The empty last chunk of a block: sent only after its generation was found unchanged."""
        data = self._store.block_view(place, block_bytes).data
        header = pb.ChunkHeader(
            block=block, offset=block_bytes, last=True, checksum=xxhash.xxh3_128_digest(data)
        )
        return convert.encode_fetch_chunk(header.SerializeToString(), b"")


def keys_of(query: pb.Query) -> range:
    """The indexes of a query's keys."""
    return range(len(query.keys) // 32)


def region_to_wire(region: Region) -> pb.RegionInfo:
    return pb.RegionInfo(
        region_id=region.id,
        slot_bytes=region.slot_bytes,
        slots=region.slots,
        data_offset=region.header_bytes,
        total_bytes=region.total_bytes,
    )


def ttl(asked_ms: int, most_ms: int) -> int:
    """What is asked for, but at most the setting; the setting where nothing is asked for."""
    return min(asked_ms, most_ms) if asked_ms else most_ms


def _wire_place(place: Place | None) -> tuple[int, int, int] | None:
    return None if place is None else (place.region, place.slot, place.generation)


def _rule(number: int) -> HitRule:
    try:
        return HitRule(number)
    except ValueError:
        raise BadRequest(Reason.BAD_REQUEST, f"there is no hit rule {number}") from None


def _prefill(request: pb.LookupRequest) -> PrefillCost | None:
    if not request.HasField("prefill"):
        return None
    cost = PrefillCost(request.prefill.a_us_per_token, request.prefill.b_us_per_token2)
    if not cost.valid():
        raise BadRequest(Reason.BAD_SIZE, "prefill costs are finite and not negative")
    return cost


def _plan_to_wire(advice: Plan) -> pb.Plan:
    return pb.Plan(
        load_blocks=advice.load_blocks,
        recompute_tokens=advice.recompute_tokens,
        load_ms=advice.load_ms,
        ideal_load_ms=advice.ideal_load_ms,
        recompute_ms=advice.recompute_ms,
        reason=convert.reason_to_wire(advice.reason),
        bytes_per_second=advice.bytes_per_second,
    )
