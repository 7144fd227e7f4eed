"""The admin service: the operator's verbs, on a socket of its own. Decode, call the store,
encode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, cast

import grpc

import kvstore
from kvstore.model.fields import WEIGHT_EPOCH_MAX, check_name
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.record import Ring
from kvstore.store import Store
from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2 as pb
from kvstore.wire.v1 import admin_pb2_grpc, store_pb2
from kvstore_server import malformed
from kvstore_server.boundary import Boundary, Call, Context, bound_text
from kvstore_server.exposition import flatten, of_archives, of_guards
from kvstore_server.metrics import Metrics
from kvstore_server.sessions import explain_keys, explain_offer

Reply = TypeVar("Reply")

TENANT = "admin"
TRACE_LAST_DEFAULT = 100
WHY_BYTES_MAX = 1_024
TRACE_SPARE_BYTES = 4_096
LINE_HEAD_BYTES = 6  # tag and length of one record in the message


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """`kvstore.v1.Admin`. `on_drain` starts the daemon's own drain, as SIGTERM does."""

    def __init__(
        self,
        store: Store,
        boundary: Boundary,
        *,
        metrics: Metrics,
        ring: Ring,
        config_toml: str,
        on_drain: Callable[[float], None],
    ) -> None:
        self._store = store
        self._core = store.core
        self._boundary = boundary
        self._metrics = metrics
        self._ring = ring
        self._config_toml = config_toml
        self._on_drain = on_drain

    async def _run(
        self, op: str, context: Context, body: Callable[[Call], Awaitable[Reply]]
    ) -> Reply:
        return await self._boundary.run(f"admin_{op}", context, body, tenant=TENANT)

    async def refuse_malformed(self, op: str, context: Context) -> None:
        """Ends a call whose message is no protobuf."""

        async def body(call: Call) -> None:
            raise malformed.error()

        await self._run(op, context, body)

    # ------------------------------------------------------------------ looking

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        return await self._run("stats", context, self._stats)

    async def _stats(self, call: Call) -> pb.StatsReply:
        stats = self._store.stats()
        core = stats.core
        return pb.StatsReply(
            version=kvstore.__version__,
            instance_id=self._store.instance_id,
            uptime_s=stats.uptime_s,
            state=stats.state,
            tiers=[
                pb.TierStats(
                    name=tier.name,
                    capacity_bytes=tier.capacity_bytes,
                    used_bytes=tier.used_bytes,
                    block_bytes=tier.block_bytes,
                    blocks=tier.blocks,
                    free_slots=tier.free_slots,
                    regions=tier.regions,
                    closing_regions=tier.closing_regions,
                    staging_bytes=tier.staging_bytes,
                    evictions=tier.evictions,
                    state=stats.tier_states.get(tier.name, "ok"),
                )
                for tier in core.pools
            ]
            + [
                pb.TierStats(
                    name=name,
                    capacity_bytes=one.capacity_bytes,
                    used_bytes=one.used_bytes,
                    block_bytes=one.block_bytes,
                    blocks=one.blocks,
                    free_slots=one.free_slots,
                    regions=one.regions,
                    evictions=one.evictions,
                    state=one.state,
                )
                for name, one in stats.archives.items()
            ],
            tenants=[
                pb.TenantStats(
                    tenant=tenant.tenant,
                    used_bytes=tenant.used_bytes,
                    quota_bytes=tenant.quota_bytes,
                    blocks=tenant.blocks,
                    hit_tokens=self._metrics.hit_tokens(tenant.tenant),
                    lookup_tokens=self._metrics.lookup_tokens(tenant.tenant),
                )
                for tenant in core.tenants
            ],
            sessions=core.sessions,
            read_leases=core.read_leases,
            view_leases=core.view_leases,
            write_leases=core.write_leases,
            pins=core.pins,
            copies_in_flight=core.copies_in_flight,
            spaces_open=core.spaces_open,
            spaces_held=core.spaces_held,
            counters={
                **self._metrics.flat(),
                **flatten(of_archives({**stats.archives, **stats.devices})),
                **flatten(of_guards(stats.guards)),
            },
        )

    async def Spaces(self, request: pb.SpacesRequest, context: Context) -> pb.SpacesReply:
        return await self._run("spaces", context, self._spaces)

    async def _spaces(self, call: Call) -> pb.SpacesReply:
        return pb.SpacesReply(
            spaces=[
                pb.SpaceInfo(
                    space_id=row.space_id,
                    tenant=row.tenant,
                    state=row.state,
                    fingerprint=convert.fingerprint_to_wire(row.fingerprint),
                    fingerprint_digest=row.fingerprint.digest,
                    blocks=row.blocks,
                    bytes=row.bytes,
                    review_id=row.review_id,
                )
                for row in self._core.spaces()
            ],
            epoch_floors=self._core.epoch_floors(),
        )

    async def Explain(
        self, request: pb.AdminExplainRequest, context: Context
    ) -> store_pb2.ExplainReply:
        return await self._run("explain", context, partial(self._explain, request))

    async def _explain(self, request: pb.AdminExplainRequest, call: Call) -> store_pb2.ExplainReply:
        keys = self._boundary.keys(request.keys)
        self._known_tenant(request.tenant)
        if request.HasField("fingerprint"):
            fingerprint = convert.fingerprint_from_wire(request.fingerprint)
            tenant = request.tenant or self._only_tenant()
            return await explain_offer(self._store, tenant, b"", fingerprint, keys)
        # A tenant that is named sees what it would see: another's space looks like none.
        tenant = request.tenant or self._tenant_of(request.space_id)
        return await explain_keys(self._store, tenant, request.space_id, keys)

    def _tenants(self) -> list[str]:
        return [row.tenant for row in self._core.stats().tenants]

    def _known_tenant(self, name: str) -> None:
        """Refuses a tenant that is not configured; "" stands for all."""
        if name and name not in (names := self._tenants()):
            raise BadRequest(Reason.BAD_NAME, f"tenants are {', '.join(names)}", "tenants")

    def _only_tenant(self) -> str:
        names = self._tenants()
        if len(names) > 1:
            raise BadRequest(Reason.BAD_NAME, f"name one of {', '.join(names)}", "tenants")
        return names[0]

    def _tenant_of(self, space_id: int) -> str:
        for row in self._core.spaces():
            if row.space_id == space_id:
                return row.tenant
        raise BadRequest(Reason.SPACE_UNKNOWN, f"no space {space_id}; see `kvstore spaces`")

    async def Trace(self, request: pb.TraceRequest, context: Context) -> pb.TraceReply:
        return await self._run("trace", context, partial(self._trace, request))

    async def _trace(self, request: pb.TraceRequest, call: Call) -> pb.TraceReply:
        """The newest that match, as many as a message holds, oldest first."""
        lines: list[str] = []
        left_bytes = self._boundary.limits.message_bytes_max - TRACE_SPARE_BYTES
        last = request.last or TRACE_LAST_DEFAULT
        for record in reversed(self._ring.select(last, request.request_id, request.outcome)):
            line = record.to_json_line()
            left_bytes -= len(line) + LINE_HEAD_BYTES
            if left_bytes < 0:
                break
            lines.append(line)
            await asyncio.sleep(0)  # a long prompt's line takes milliseconds: others get their turn
        return pb.TraceReply(records=reversed(lines))

    async def Config(self, request: pb.ConfigRequest, context: Context) -> pb.ConfigReply:
        return await self._run("config", context, self._config)

    async def _config(self, call: Call) -> pb.ConfigReply:
        return pb.ConfigReply(toml=self._config_toml)

    # ------------------------------------------------------------------ deciding

    async def Invalidate(
        self, request: pb.InvalidateRequest, context: Context
    ) -> pb.InvalidateReply:
        return await self._run("invalidate", context, partial(self._invalidate, request))

    async def _invalidate(self, request: pb.InvalidateRequest, call: Call) -> pb.InvalidateReply:
        targets = (bool(request.space_id), bool(request.model_name), request.everything)
        if sum(targets) != 1:
            raise BadRequest(
                Reason.BAD_REQUEST,
                "name one of: a space, a model, or everything of a tenant or all",
            )
        bound_text(request.why, "why", WHY_BYTES_MAX)
        self._known_tenant(request.tenant)
        keys = self._boundary.keys(request.keys)
        if keys and not request.space_id:
            raise BadRequest(Reason.BAD_REQUEST, "keys are named within a space")
        if request.space_id:
            self._tenant_of(request.space_id)
        dropped = self._core.invalidate(
            tenant=request.tenant or None,
            space_id=request.space_id or None,
            model_name=request.model_name or None,
            everything=request.everything,
            keys=keys or None,
            why=request.why,
            now_ns=self._store.clock.monotonic_ns(),
        )
        durable = await self._store.durable(dropped.ticket, self._boundary.left_ns(call))
        if not (dropped.ticket and durable):
            # A space whose row is gone for good is not restored, whatever a slower tier keeps.
            await self._until_forgotten(call)
        return pb.InvalidateReply(dropped_blocks=dropped.blocks, spaces=dropped.spaces)

    async def _until_forgotten(self, call: Call) -> None:
        self._store.run_effects()
        if not await self._store.archives.until_forgotten(self._boundary.left_ns(call)):
            raise KVStoreError(
                Reason.IO_ERROR,
                "nobody is given these blocks any more, but a slower tier could not record that "
                "yet: ask again to learn whether it has, before the daemon is restarted",
            )

    async def SetWeightEpoch(
        self, request: pb.SetWeightEpochRequest, context: Context
    ) -> pb.SetWeightEpochReply:
        return await self._run("epoch", context, partial(self._epoch, request))

    async def _epoch(self, request: pb.SetWeightEpochRequest, call: Call) -> pb.SetWeightEpochReply:
        check_name(request.model_name, "model_name")
        bound_text(request.why, "why", WHY_BYTES_MAX)
        if request.epoch > WEIGHT_EPOCH_MAX:
            raise BadRequest(Reason.BAD_SIZE, f"an epoch is at most {WEIGHT_EPOCH_MAX}")
        done = self._core.set_epoch(
            request.model_name, request.epoch, request.why, self._store.clock.monotonic_ns()
        )
        durable = await self._store.durable(done.ticket, self._boundary.left_ns(call))
        return pb.SetWeightEpochReply(
            epoch=done.epoch,
            closed_spaces=done.closed_spaces,
            dropped_blocks=done.dropped_blocks,
            durable=durable,
        )

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:
        return await self._run("pin", context, partial(self._pin, request))

    async def _pin(self, request: pb.PinRequest, call: Call) -> pb.PinReply:
        keys = self._boundary.keys(request.keys)
        self._tenant_of(request.space_id)
        pinned = self._core.pin(request.space_id, keys, self._store.clock.monotonic_ns())
        self._store.run_effects()
        return pb.PinReply(
            pin_id=pinned.pin_id,
            pinned=pinned.pinned,
            reason=convert.reason_to_wire(pinned.reason),
        )

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinReply:
        return await self._run("unpin", context, partial(self._unpin, request))

    async def _unpin(self, request: pb.UnpinRequest, call: Call) -> pb.UnpinReply:
        known = self._core.unpin(request.pin_id, self._store.clock.monotonic_ns())
        self._store.run_effects()
        return pb.UnpinReply(known=known)

    async def Reviews(self, request: pb.ReviewsRequest, context: Context) -> pb.ReviewsReply:
        return await self._run("reviews", context, partial(self._reviews, request))

    async def _reviews(self, request: pb.ReviewsRequest, call: Call) -> pb.ReviewsReply:
        now_ns = self._store.clock.monotonic_ns()
        return pb.ReviewsReply(
            reviews=[
                pb.ReviewInfo(
                    review_id=row.review_id,
                    tenant=row.tenant,
                    fingerprint=convert.fingerprint_to_wire(row.fingerprint),
                    missing=row.missing,
                    state=row.state,
                    blocks=row.blocks,
                    age_s=max(0.0, (now_ns - row.created_ns) / 1e9),
                    decided_by=row.decided_by,
                    decided_why=row.decided_why,
                    revision=row.revision,
                    doubt=row.doubt,
                )
                for row in self._core.reviews(request.all)
            ]
        )

    async def Review(self, request: pb.ReviewRequest, context: Context) -> pb.ReviewReply:
        return await self._run("review", context, partial(self._review, request))

    async def _review(self, request: pb.ReviewRequest, call: Call) -> pb.ReviewReply:
        bound_text(request.who, "who")
        bound_text(request.why, "why", WHY_BYTES_MAX)
        # One that was rejected may be approved after all.
        doubts = {row.review_id for row in self._core.reviews(include_decided=True) if row.doubt}
        if request.approve and not request.revision and request.review_id not in doubts:
            raise BadRequest(Reason.BAD_NAME, "an approval names the weights revision vouched for")
        clock = self._store.clock
        reviewed = self._core.review(
            request.review_id,
            approve=request.approve,
            revision=request.revision,
            who=request.who,
            why=request.why,
            now_ns=clock.monotonic_ns(),
            wall_s=clock.wall_s(),
        )
        durable = await self._store.durable(reviewed.ticket, self._boundary.left_ns(call))
        call.reason = reviewed.reason
        return pb.ReviewReply(
            reason=convert.reason_to_wire(reviewed.reason),
            space_id=reviewed.space_id,
            durable=durable,
            detail=reviewed.detail or reviewed.reason.text,
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        return await self._run("drain", context, partial(self._drain, request))

    async def _drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainReply:
        sessions = self._store.session_count
        self._on_drain(request.grace_s)
        return pb.DrainReply(sessions=sessions)


def register(servicer: AdminServicer, server: grpc.aio.Server) -> None:
    """Adds the service to a server."""
    patched = malformed.Tolerant(server, servicer.refuse_malformed)
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, cast(grpc.aio.Server, patched))
