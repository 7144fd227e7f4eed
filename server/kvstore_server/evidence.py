"""What a lookup says to the side that its request is on, and what clients report of requests and of
audits. Bodies' helpers, one instance a tenant, on the event loop's thread.

Promises: a withheld request costs what a miss costs, a hash of its last key more; the figures of a
report are bounded here and are the client's own; an audit's mismatch keeps the fingerprint from
everybody until a person decides.
"""

from __future__ import annotations

import logging
from typing import Any

from kvstore.model.keys import KEY_BYTES
from kvstore.model.layout import Layout
from kvstore.model.plan import Plan
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.record import KEY_SHOWN_BYTES, RecordBuilder
from kvstore.model.sampling import Arm
from kvstore.model.values import REPORTS_PER_CALL_MAX
from kvstore.store import Store
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Boundary, Call, bound_text

log = logging.getLogger(__name__)

TOKENS_MAX = 1 << 31
BYTES_MAX = 1 << 50
US_MAX = 86_400_000_000
BLOCKS_MAX = 1 << 20
WORST_MAX = 1e12


class Evidence:
    """See the module's docstring."""

    def __init__(self, store: Store, boundary: Boundary, tenant: str) -> None:
        self._store = store
        self._boundary = boundary
        self._tenant = tenant

    # ------------------------------------------------------------------ lookups

    def arm(self, request: pb.LookupRequest) -> Arm:
        """The side of a lookup's request. BadRequest(BAD_KEY_LENGTH)."""
        if request.last_key:
            _check_key(request.last_key, "last_key")
        sampling = self._boundary.sampling
        # The keys of a long prompt are copied out of the message to have the last one.
        drawn = 0 < sampling.serve_share < 1
        return sampling.arm(_last_key(request) if drawn else b"")

    def audited(self, request: pb.LookupRequest) -> bool:
        """Whether a served hit of this request is to be computed and compared."""
        sampling = self._boundary.sampling
        return sampling.audit_share > 0 and sampling.audited(_last_key(request))

    def withhold(
        self, call: Call, arm: Arm, advice: Plan, layout: Layout, request: pb.LookupRequest
    ) -> Plan:
        """The plan that a request of this side is given. What it would have loaded is recorded.

        A prompt's first look-up stands for it. Its later ones, and those that only ask which blocks
        are still to be pushed, are marked as parts: who counts prompts leaves them out.
        """
        record = call.record.record
        # A push may ask under its request's name about other keys, which are on the other side.
        pushing = all(query.rule == pb.HIT_RULE_BITMAP for query in request.queries)
        part = pushing or bool(request.before_tokens)
        if arm.withheld or part:
            record.evidence = {"arm": arm.name.lower(), **({"part": True} if part else {})}
        if not arm.withheld:
            if not pushing:
                call.the_session().withheld.served(record.request_id)
            return advice
        if not advice.load_blocks:
            return advice
        if not pushing:
            self._note_withheld(call, arm, advice, layout, part)
        return advice._replace(
            load_blocks=0,
            recompute_tokens=min(request.prompt_tokens, TOKENS_MAX),
            reason=arm.reason,
        )

    def _note_withheld(
        self, call: Call, arm: Arm, advice: Plan, layout: Layout, part: bool
    ) -> None:
        tokens = advice.load_blocks * layout.block_tokens
        saved_ms = max(0.0, advice.recompute_ms - advice.load_ms) if advice.recompute_ms else 0.0
        record = call.record.record
        record.evidence = {
            **(record.evidence or {}),
            "would_load": {
                "blocks": advice.load_blocks,
                "tokens": tokens,
                "bytes": round(advice.bytes_per_second * advice.ideal_load_ms / 1e3),
                "load_ms": round(advice.load_ms, 3),
                "saved_ms": round(saved_ms, 3) if advice.recompute_ms else None,
            },
        }
        self._boundary.metrics.withheld(arm, 0 if part else 1, tokens, saved_ms / 1e3)
        call.the_session().withheld.note(record.request_id, arm.reason)

    def declined(self, call: Call, request_id: str) -> Reason | None:
        """Why a load is declined whatever its keys: nothing is loaded in shadow mode, nor of a
        request of this session that was held out a moment ago.
        """
        if self._boundary.sampling.serve_share <= 0:
            return Reason.DECLINED_SHADOW
        return call.the_session().withheld.why(request_id)

    # ------------------------------------------------------------------ reports

    def reported(self, report: pb.RequestReport, call: Call) -> None:
        """Counts and records what became of a request."""
        arm = self._boundary.sampling.arm(report.last_key)
        first_token_s = min(report.first_token_us, US_MAX) / 1e6
        self._boundary.metrics.reported(
            arm,
            failed=report.failed,
            computed_tokens=min(report.computed_tokens, TOKENS_MAX),
            loaded_bytes=min(report.loaded_bytes, BYTES_MAX),
            first_token_s=first_token_s,
        )
        clock = self._store.clock
        now_ns = clock.monotonic_ns()
        builder = RecordBuilder("report", report.request_id, self._tenant, now_ns, clock.wall_s())
        builder.engine_id = call.record.engine_id
        record = builder.record
        record.space_id = report.space_id
        record.prompt_tokens = min(report.prompt_tokens, TOKENS_MAX)
        record.evidence = {"arm": arm.name.lower(), "request": self._figures(report)}
        self._boundary.keep(builder.finish(Reason.OK, now_ns))

    def _figures(self, report: pb.RequestReport) -> dict[str, Any]:
        tiers = self._store.tiers
        tier = tiers[report.tier - 1].name if 0 < report.tier <= len(tiers) else "none"
        return {
            "last_key": report.last_key[:KEY_SHOWN_BYTES].hex(),
            "found_tokens": min(report.found_tokens, TOKENS_MAX),
            "tier": tier,
            "loaded_tokens": min(report.loaded_tokens, TOKENS_MAX),
            "loaded_bytes": min(report.loaded_bytes, BYTES_MAX),
            "load_us": min(report.load_us, US_MAX),
            "computed_tokens": min(report.computed_tokens, TOKENS_MAX),
            "prefill_us": min(report.prefill_us, US_MAX),
            "first_token_us": min(report.first_token_us, US_MAX),
            "failed": report.failed,
            "load_reason": Reason.from_wire(report.reason).name,
        }

    def check(self, request: pb.ReleaseRequest) -> None:
        """BadRequest for a report that cannot be one; before anything is done."""
        for name, reports in (("requests", request.requests), ("audits", request.audits)):
            if len(reports) > REPORTS_PER_CALL_MAX:
                text = f"{REPORTS_PER_CALL_MAX} {name} at most in a release"
                raise BadRequest(Reason.BAD_SIZE, text, name)
        for report in request.requests:
            bound_text(report.request_id, "request_id")
            _check_key(report.last_key, "last_key")
        for audit in request.audits:
            bound_text(audit.request_id, "request_id")
            _check_key(audit.key, "key")
            if not 0 < audit.blocks <= BLOCKS_MAX or audit.mismatched > audit.blocks:
                raise BadRequest(Reason.BAD_SIZE, "an audit compares some blocks, and counts them")
            if not 0 <= audit.worst <= WORST_MAX:
                raise BadRequest(Reason.BAD_SIZE, f"worst is from 0 to {WORST_MAX:g}")

    def audit(self, audit: pb.AuditReport, call: Call) -> int:
        """Counts what was compared; the id of the review, if it now holds the fingerprint."""
        self._boundary.metrics.audited(audit.blocks - audit.mismatched, audit.mismatched)
        digits = audit.key[:KEY_SHOWN_BYTES].hex()
        evidence = {"blocks": audit.blocks, "mismatched": audit.mismatched, "worst": audit.worst}
        clock = self._store.clock
        now_ns = clock.monotonic_ns()
        builder = RecordBuilder("audit", audit.request_id, self._tenant, now_ns, clock.wall_s())
        builder.engine_id = call.record.engine_id
        builder.record.space_id = audit.space_id
        builder.record.evidence = {"audit": {"key": digits, **evidence}}
        reason = Reason.HELD_BY_AUDIT if audit.mismatched else Reason.OK
        self._boundary.keep(builder.finish(reason, now_ns))
        if not audit.mismatched:
            return 0
        try:
            self._store.space_of(call.the_session(), audit.space_id)
        except KVStoreError:
            return 0  # not this tenant's, or closed or held already
        words = (
            f"an audit by {call.record.engine_id or 'an engine'} found {audit.mismatched} of "
            f"{audit.blocks} blocks to differ, {audit.worst:.3g} times what is tolerated, "
            f"first at {digits}"
        )
        held = self._store.hold(audit.space_id, Reason.HELD_BY_AUDIT, words)
        self._boundary.warn.warning(
            f"audit {audit.space_id}",
            "an audit found blocks that differ: their fingerprint is held for review",
            tenant=self._tenant,
            space_id=audit.space_id,
            **evidence,
        )
        return held


def _last_key(request: pb.LookupRequest) -> bytes:
    return request.last_key or request.queries[0].keys[-KEY_BYTES:]


def _check_key(key: bytes, name: str) -> None:
    if len(key) != KEY_BYTES:
        raise BadRequest(Reason.BAD_KEY_LENGTH, f"{name} has {KEY_BYTES} bytes")
