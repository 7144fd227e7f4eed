"""Bodies of the calls that read: Lookup, Acquire, Release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.config import Limits
from kvstore.model.hits import GroupPresence, HitRule, agreed_tokens, leading_run
from kvstore.model.layout import Layout
from kvstore.model.plan import Plan
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.sampling import Arm
from kvstore.model.values import Absence, LeaseMode
from kvstore.policy.plan import run_table
from kvstore.store import NS_PER_MS, Leased, Store
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.advice import (
    TOKENS_MAX,
    advise,
    needed,
    overlap_of,
    plan_to_wire,
    prefill_of,
)
from kvstore_server.boundary import Boundary, Call, bound_text
from kvstore_server.evidence import Evidence
from kvstore_server.loads import Loads, seconds_of
from kvstore_server.regioninfo import region_to_wire

GROUPS_MAX = 16


_ARMS: dict[Arm, pb.Arm.ValueType] = {
    Arm.UNSPECIFIED: pb.ARM_UNSPECIFIED,
    Arm.APPLIED: pb.ARM_APPLIED,
    Arm.HELD_OUT: pb.ARM_HELD_OUT,
    Arm.SHADOW: pb.ARM_SHADOW,
}
_MODES = {pb.LEASE_MODE_COPY: LeaseMode.COPY, pb.LEASE_MODE_VIEW: LeaseMode.VIEW}


class _Group(NamedTuple):
    """One cache group of a lookup."""

    space_id: int
    packed: bytes
    keys: list[bytes]
    layout: Layout
    digest: bytes
    rule: HitRule
    window_blocks: int


class ReadCalls:
    """One instance a tenant."""

    def __init__(self, store: Store, boundary: Boundary, limits: Limits, tenant: str) -> None:
        self._store = store
        self._boundary = boundary
        self._limits = limits
        self._tenant = tenant
        self._loads = Loads(store, boundary.metrics, tenant)
        self.evidence = Evidence(store, boundary, tenant)

    # ------------------------------------------------------------------ lookup

    async def lookup(self, request: pb.LookupRequest, call: Call) -> pb.LookupReply:
        if not 0 < len(request.queries) <= GROUPS_MAX:
            raise BadRequest(Reason.BAD_REQUEST, f"a lookup has 1 to {GROUPS_MAX} queries")
        cost, overlap = prefill_of(request), overlap_of(request)
        arm = self.evidence.arm(request)
        groups = [self._group(query, call) for query in request.queries]
        first = groups[0]
        call.record.prompt(
            first.space_id, first.packed, first.layout.block_tokens, request.prompt_tokens
        )
        self._boundary.stage(call, "preconditions")
        session = call.the_session()
        codes = [await self._store.lookup(session, g.space_id, g.keys) for g in groups]
        replies = [
            self._hit(group, found, call) for group, found in zip(groups, codes, strict=True)
        ]
        presence = [
            GroupPresence(found, group.layout.block_tokens, group.rule, group.window_blocks)
            for group, found in zip(groups, codes, strict=True)
        ]
        tokens = agreed_tokens(presence)
        layouts = [group.layout for group in groups]
        pushing = all(group.rule is HitRule.BITMAP for group in groups)

        def weigh(worth: int) -> Plan:
            return advise(
                self._store.links,
                request.prompt_tokens,
                layouts,
                presence,
                worth,
                cost,
                overlap,
                request.before_tokens,
            )

        advice = self._guarded(presence, tokens, weigh, trying=not (arm.withheld or pushing))
        shown = self.evidence.withhold(call, arm, advice, first.layout, request)
        self._boundary.stage(call, "plan")
        self._note(call, presence, tokens, advice, None if shown is advice else shown.reason)
        if shown is advice:
            self._store.probes.passed_over(
                session, first.space_id, first.keys, codes[0], first.layout.block_bytes, advice
            )
        return pb.LookupReply(
            groups=replies,
            agreed_tokens=tokens,
            plan=plan_to_wire(shown),
            arm=_ARMS[arm],
            audit=bool(shown.load_blocks) and self.evidence.audited(request),
        )

    def _guarded(
        self,
        groups: Sequence[GroupPresence],
        tokens: int,
        weigh: Callable[[int], Plan],
        *,
        trying: bool,
    ) -> Plan:
        """The plan that loads nothing from a tier which a guard has stopped for this tenant.
        `weigh` makes one of so many tokens. Guards are asked of what it loads only: of those that
        are half-open, each asking is a trial if this request is `trying`.
        """
        advice = weigh(tokens)
        asked: set[int] = set()
        declined: set[int] = set()
        while tiers := _loaded_from(advice) - asked:
            asked |= tiers
            now_ns = self._store.clock.monotonic_ns()
            more = self._store.guards.declines(self._tenant, tiers, now_ns, trying=trying)
            if more:
                declined |= more
                advice = weigh(_tokens_before(groups, tokens, declined))
        if declined and not advice.load_blocks:
            advice = advice._replace(reason=Reason.DECLINED_GUARD)
        return advice

    def _group(self, query: pb.Query, call: Call) -> _Group:
        packed = query.keys
        keys = self._boundary.keys(packed)
        layout, digest = self._store.space_of(call.the_session(), query.space_id)
        try:
            rule = HitRule(query.rule)
        except ValueError:
            raise BadRequest(Reason.BAD_REQUEST, f"there is no hit rule {query.rule}") from None
        return _Group(query.space_id, packed, keys, layout, digest, rule, query.trailing_blocks)

    def _hit(self, group: _Group, codes: bytes, call: Call) -> pb.GroupHit:
        """One group's answer. The first group that misses gives the call its reason."""
        run = leading_run(codes)
        hit = pb.GroupHit(hit_blocks=run, tiers=codes, fingerprint_digest=group.digest)
        absence = Absence(Reason.OK)
        if not group.keys:
            absence = Absence(Reason.NOTHING_TO_DO)
        elif run < len(codes):
            absence = self._why(call, group.space_id, group.keys[run])
            hit.differences.extend(convert.differences_to_wire(absence.differences))
            if run == 0:
                self._boundary.rejected(call, absence.reason, absence.differences)
        if call.reason is Reason.OK:
            call.reason = absence.reason
        hit.reason = convert.reason_to_wire(absence.reason)
        return hit

    def _why(self, call: Call, space_id: int, key: bytes) -> Absence:
        return self._store.core.why_absent(call.the_session().id, space_id, key)

    def _note(
        self,
        call: Call,
        groups: Sequence[GroupPresence],
        tokens: int,
        advice: Plan,
        withheld: Reason | None = None,
    ) -> None:
        """Counts a lookup. `withheld`: why the request is not given what the advice is about."""
        useful_tokens = 0
        if not tokens:
            if call.reason is Reason.OK:
                call.reason = Reason.NOTHING_TO_DO
        else:
            declined = advice.reason in (Reason.DECLINED_RECOMPUTE_FASTER, Reason.DECLINED_GUARD)
            call.reason = advice.reason if declined else withheld or Reason.HIT
            # A plan may load the part that is fast to load, and leave what only a slow tier has.
            useful_tokens = min(advice.load_blocks * groups[0].block_tokens, tokens)
            used = useful_tokens or tokens
            tables = [run_table(needed(group, used)) for group in groups]
            slowest = max((int(table[:, 0].max()) for table in tables if len(table)), default=0)
            call.tier = self._store.tiers[slowest].name
        asked = len(groups[0].codes) * groups[0].block_tokens
        call.record.count("tokens", asked, tokens)
        call.record.planned(advice)
        hit_tokens = 0 if withheld else useful_tokens
        self._boundary.metrics.lookup(
            self._tenant, asked, hit_tokens, tokens - useful_tokens, call.reason, call.tier
        )
        if not withheld:
            self._boundary.metrics.planned(advice)

    # ------------------------------------------------------------------ leases

    async def acquire(self, request: pb.AcquireRequest, call: Call) -> pb.AcquireReply:
        packed = request.keys
        keys = self._boundary.keys(packed)
        session = call.the_session()
        layout, digest = self._store.space_of(session, request.space_id)
        mode = _MODES.get(request.mode)
        if mode is None:
            raise BadRequest(Reason.BAD_REQUEST, f"there is no lease mode {request.mode}")
        view = mode is LeaseMode.VIEW
        ttl_ms = ttl(request.ttl_ms, self._limits.lease_ttl_ms)
        session.grants.check(request.nonce)
        call.record.prompt(request.space_id, packed, layout.block_tokens)
        self._boundary.stage(call, "preconditions")
        declined = self.evidence.declined(call, request.request_id)
        if declined is not None:
            call.record.count("blocks", len(keys), 0)
            call.reason = declined
            return pb.AcquireReply(
                fingerprint_digest=digest,
                block_bytes=layout.block_bytes,
                reason=convert.reason_to_wire(declined),
            )
        asked_ns = self._store.clock.monotonic_ns()
        leased = await self._store.acquire(
            session,
            request.space_id,
            keys,
            mode=mode,
            ttl_ns=None if view else ttl_ms * NS_PER_MS,
            wait_ns=self._boundary.wait_ns(call, request.wait_ms),
            load_ns=self._boundary.load_ns(call),
            all_or_nothing=request.all_or_nothing,
            device_uuid=request.device_uuid if session.fd_bound else "",
            prompt_tokens=request.prompt_tokens,
        )
        try:
            session.grants.check(request.nonce)
        except KVStoreError:
            self._store.release(session, (leased.lease_id,))
            raise
        session.grants.note(request.nonce, leased.lease_id)
        self._loads.granted(leased.lease_id, leased.slowest, asked_ns)
        self._boundary.stage(call, "movement")
        # What comes after a gap is of no use to who reads a prompt, and is asked for again.
        call.record.count("blocks", len(keys), leased.leading)
        absence = self.absence(call, request.space_id, keys, leased)
        call.reason = absence.reason
        reply = pb.AcquireReply(
            lease_id=leased.lease_id,
            leased_blocks=leased.leased,
            ttl_ms=0 if view else ttl_ms,
            fingerprint_digest=digest,
            block_bytes=layout.block_bytes,
            regions=[
                region_to_wire(one, self._store.device_pool(one.id, self._tenant))
                for one in leased.regions
            ],
            reason=convert.reason_to_wire(absence.reason),
            differences=convert.differences_to_wire(absence.differences),
        )
        if leased.leased:
            call.tier = self._store.tiers[leased.slowest].name
            reply.places = convert.pack_places(p and p[1:4] for p in leased.places)
        return reply

    def absence(self, call: Call, space_id: int, keys: Sequence[bytes], leased: Leased) -> Absence:
        """Why the first absent block of a lease is absent; OK if none is."""
        if not keys:
            return Absence(Reason.NOTHING_TO_DO)
        if leased.leased or not leased.reason.is_miss:
            return Absence(leased.reason)
        run = leading_run(self._store.core.lookup(call.the_session().id, space_id, keys))
        if run == len(keys):
            return Absence(leased.reason)  # it came a moment too late
        return self._why(call, space_id, keys[run])

    async def release(self, request: pb.ReleaseRequest, call: Call) -> pb.ReleaseReply:
        limit = self._limits.leases_per_session_max
        given = (request.lease_ids, request.reports, request.unheard)
        if max(map(len, given)) > limit:
            raise BadRequest(
                Reason.BAD_SIZE,
                f"{limit} leases at most in a release",
                "limits.leases_per_session_max",
            )
        for report in request.reports:
            bound_text(report.request_id, "request_id")
        self.evidence.check(request)
        lease_ids = list(request.lease_ids)
        ending = set(lease_ids)
        for report in request.reports:
            self._loaded(report, call, ends=report.lease_id in ending)
            ending.discard(report.lease_id)
        session = call.the_session()
        for lease_id in lease_ids:
            if self._store.leased_bytes(session, lease_id, 1):  # else it may be another session's
                self._loads.forget(lease_id)
        released, unknown = self._store.release(session, lease_ids)
        unheard = list(map(session.grants.give_up, request.unheard))
        released += self._store.release(session, unheard)[0]
        call.record.count("leases", len(lease_ids) + len(request.unheard), released)
        for outcome in request.requests:
            self.evidence.reported(outcome, call)
        held = [self.evidence.audit(audit, call) for audit in request.audits]
        return pb.ReleaseReply(released=released, unknown=unknown, review_id=max(held, default=0))

    def _loaded(self, report: pb.LoadReport, call: Call, *, ends: bool) -> None:
        """Counts a load, once: with the release that ends its lease. What is said of any other
        lease, as by a release that is sent again, is counted as such, without its figures.
        """
        reason = Reason.from_wire(report.reason)
        session = call.the_session()
        blocks = self._store.leased_bytes(session, report.lease_id, report.blocks) if ends else 0
        known = ends and bool(self._store.leased_bytes(session, report.lease_id, 1))
        if not known and reason is Reason.OK:
            reason = Reason.LEASE_UNKNOWN
        load_us = predicted_us = 0
        if reason is Reason.OK and session.fd_bound:
            # Who maps no memory was sent the bytes: that tells nothing of copies out of memory.
            load_us, predicted_us = self._loads.ended(report, blocks)
        copy_s = seconds_of(report.copy_us) if known else 0.0
        self._boundary.metrics.loaded(
            self._tenant,
            reason,
            length_bytes=blocks,
            tokens=min(report.tokens, TOKENS_MAX),
            copy_s=copy_s,
            prefill_saved_s=seconds_of(report.prefill_saved_us),
        )
        call.record.loaded(
            report.request_id,
            report.blocks,
            blocks,
            int(copy_s * 1e6),
            reason,
            load_us=load_us,
            predicted_us=predicted_us,
        )


def _loaded_from(advice: Plan) -> set[int]:
    return {one.tier for one in advice.tiers if one.length_bytes} if advice.load_blocks else set()


def _tokens_before(groups: Sequence[GroupPresence], tokens: int, tiers: set[int]) -> int:
    """Tokens before the first that comes from one of `tiers`. Groups agree on few lengths only: of
    several all or nothing.
    """
    for group in groups:
        codes = needed(group, tokens)
        blocks = min((codes.find(1 + tier) for tier in tiers if 1 + tier in codes), default=-1)
        if blocks >= 0:
            whole = len(groups) == 1 and group.rule is not HitRule.TRAILING
            return blocks * group.block_tokens if whole else 0
    return tokens


def ttl(asked_ms: int, most_ms: int) -> int:
    """What is asked for, but at most the setting; the setting where nothing is asked for."""
    return min(asked_ms, most_ms) if asked_ms else most_ms
