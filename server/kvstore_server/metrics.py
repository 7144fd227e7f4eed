"""What the servicers call to count; cheap enough for every call (about 1 us).

All on the event loop's thread; `snapshot` copies the numbers there, so that another thread can
render them at leisure and all sums agree. Labels come from closed sets only: operations, reasons,
tiers, tenants of the configuration, fingerprint fields.
"""

from __future__ import annotations

from kvstore.model.plan import Plan
from kvstore.model.reasons import Reason
from kvstore.model.sampling import Arm
from kvstore_server.counts import ERROR_BOUNDS_RATIO, Counts, Histogram, result_of
from kvstore_server.exposition import counted, flatten

FIELDS_MAX = 64
OTHER_FIELD = "other"


class Metrics:
    """What the servicers call. All on the event loop's thread."""

    def __init__(self) -> None:
        self._counts = Counts()

    def request(self, op: str, reason: Reason, tier: str, seconds: float) -> None:
        """One call has ended. `tier` is the slowest that it touched, "" if none."""
        key = (op, reason, tier)
        cell = self._counts.requests.get(key)
        if cell is None:
            cell = self._counts.requests[key] = Histogram()
        cell.observe(max(0.0, seconds))

    def lookup(
        self,
        tenant: str,
        asked_tokens: int,
        hit_tokens: int,
        declined_tokens: int,
        reason: Reason,
        tier: str,
    ) -> None:
        """A lookup asked for `asked_tokens` and found `hit_tokens` that are worth loading, the
        slowest of them in `tier`, and `declined_tokens` that are not."""
        counts = self._counts
        result = result_of(reason)
        counts.lookups[tenant, result] += 1
        counts.lookup_tokens[tenant] += asked_tokens
        if declined_tokens:
            counts.declined_tokens[tenant] += declined_tokens
        if hit_tokens:
            counts.hit_tokens[tenant, tier] += hit_tokens

    def planned(self, plan: Plan) -> None:
        """A lookup weighed loading what it found against computing it. Nothing was weighed where
        the prefill cost is unknown.
        """
        if not plan.recompute_ms:
            return
        counts = self._counts
        decision = "load" if plan.load_blocks else "recompute"
        loads, prefills = counts.planned_load_s, counts.planned_recompute_s
        loads[decision] = loads.get(decision, 0.0) + plan.load_ms / 1e3
        prefills[decision] = prefills.get(decision, 0.0) + plan.recompute_ms / 1e3

    def predicted(self, tier: str, measured_s: float, predicted_s: float) -> None:
        """A load that followed a plan was measured; `tier` is the slowest that it touched."""
        counts = self._counts
        for sums, seconds in (
            (counts.predicted_load_s, predicted_s),
            (counts.measured_load_s, measured_s),
        ):
            sums[tier] = sums.get(tier, 0.0) + seconds
        errors = counts.load_error.setdefault(tier, Histogram(ERROR_BOUNDS_RATIO))
        errors.observe(abs(predicted_s - measured_s) / measured_s)

    def loaded(
        self,
        tenant: str,
        reason: Reason,
        *,
        length_bytes: int,
        tokens: int,
        copy_s: float,
        prefill_saved_s: float,
    ) -> None:
        """A client reports what it did with a lease. The figures are the client's own."""
        counts = self._counts
        counts.loads[tenant, reason.name] += 1
        counts.client_copy.setdefault(tenant, Histogram()).observe(max(0.0, copy_s))
        counts.loaded_bytes[tenant] += length_bytes
        if reason is Reason.OK:
            counts.loaded_tokens[tenant] += tokens
            saved_s = counts.prefill_saved_s.get(tenant, 0.0)
            counts.prefill_saved_s[tenant] = saved_s + prefill_saved_s

    def withheld(self, arm: Arm, lookups: int, tokens: int, saving_s: float) -> None:
        """A lookup found what was worth loading, and was not given it. lookups: 0 for a later part
        of a prompt that counts already.
        """
        counts, side = self._counts, arm.name.lower()
        counts.withheld_lookups[side] += lookups
        counts.withheld_tokens[side] += tokens
        counts.withheld_saving_s += saving_s

    def reported(
        self,
        arm: Arm,
        *,
        failed: bool,
        computed_tokens: int,
        loaded_bytes: int,
        first_token_s: float,
    ) -> None:
        """A client reports what became of a request. first_token_s 0: it was not measured."""
        counts, side = self._counts, arm.name.lower()
        counts.reported[side, "failed" if failed else "ok"] += 1
        counts.computed_tokens[side] += computed_tokens
        counts.moved_bytes[side] += loaded_bytes
        if first_token_s:
            counts.first_token.setdefault(side, Histogram()).observe(first_token_s)

    def audited(self, matched: int, mismatched: int) -> None:
        """Blocks were computed and compared with what is stored."""
        self._counts.audited["match"] += matched
        self._counts.audited["mismatch"] += mismatched

    @property
    def audit_mismatches(self) -> int:
        """Audited blocks that differed."""
        return self._counts.audited["mismatch"]

    def rejection(self, field_name: str) -> None:
        """A fingerprint was refused, or a prefix missed, because this field differs."""
        rejections = self._counts.rejections
        known = field_name in rejections or len(rejections) < FIELDS_MAX
        rejections[field_name if known else OTHER_FIELD] += 1

    def held_for_review(self) -> None:
        """An incomplete fingerprint was offered."""
        self._counts.held += 1

    def hit_tokens(self, tenant: str) -> int:
        return sum(n for (name, _), n in self._counts.hit_tokens.items() if name == tenant)

    def lookup_tokens(self, tenant: str) -> int:
        return self._counts.lookup_tokens[tenant]

    def snapshot(self) -> Counts:
        """The numbers of this moment."""
        return self._counts.copy()

    def flat(self) -> dict[str, float]:
        """Every counter as Prometheus would show it, `name{labels}` to value; buckets are left
        out."""
        return flatten(counted(self._counts))
