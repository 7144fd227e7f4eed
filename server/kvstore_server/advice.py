"""What a lookup advises: the arguments of the plan from a request, and its answer on the wire."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.model.cost import COST_MAX, PrefillCost
from kvstore.model.hits import GroupPresence, HitRule
from kvstore.model.layout import Layout
from kvstore.model.plan import Overlap, Plan
from kvstore.model.reasons import BadRequest, Reason
from kvstore.policy.links import Link
from kvstore.policy.plan import FixedLoad, Runs, plan, run_table, runs_of
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb

TOKENS_MAX = 1 << 31

_OVERLAPS = {
    pb.OVERLAP_SERIAL: Overlap.SERIAL,
    pb.OVERLAP_LAYERWISE: Overlap.LAYERWISE,
    pb.OVERLAP_TAIL: Overlap.TAIL,
}


def prefill_of(request: pb.LookupRequest) -> PrefillCost | None:
    """The cost that the client gives; None: none. BadRequest: it is no cost."""
    if not request.HasField("prefill"):
        return None
    cost = PrefillCost(request.prefill.a_us_per_token, request.prefill.b_us_per_token2)
    if not cost.valid():
        raise BadRequest(
            Reason.BAD_SIZE, f"prefill costs are from 0 to {COST_MAX:g} us, and not both 0"
        )
    return cost


def overlap_of(request: pb.LookupRequest) -> Overlap:
    """What the engine can do at the same time. BadRequest for what nobody knows."""
    overlap = _OVERLAPS.get(request.overlap)
    if overlap is None:
        raise BadRequest(Reason.BAD_REQUEST, f"there is no overlap {request.overlap}")
    return overlap


def needed(group: GroupPresence, tokens: int) -> bytes:
    """Presence codes of the blocks that a prefix of `tokens` needs of a group."""
    end = tokens // group.block_tokens
    windowed = group.rule is HitRule.TRAILING
    return group.codes[max(0, end - group.window_blocks) if windowed else 0 : end]


def advise(
    links: Sequence[Link],
    prompt_tokens: int,
    layouts: Sequence[Layout],
    groups: Sequence[GroupPresence],
    tokens: int,
    cost: PrefillCost | None,
    overlap: Overlap = Overlap.SERIAL,
    before_tokens: int = 0,
) -> Plan:
    """Load or recompute, over all groups, counted in blocks of the first one. before_tokens: of the
    prompt, which the engine has or loads anyway.

    What needs the whole prefix is loaded block by block; of a window group its last blocks,
    whatever is loaded of the others.
    """
    windows = [group.rule is HitRule.TRAILING for group in groups]
    base = groups[0 if all(windows) else windows.index(False)]
    runs: Runs | list[tuple[int, int]] = run_table(needed(base, tokens))
    block_bytes = 0
    fixed: list[FixedLoad] = []
    for layout, group, window in zip(layouts, groups, windows, strict=True):
        if window:
            for tier, blocks in runs_of(needed(group, tokens)):
                fixed.append(FixedLoad(tier, blocks * layout.block_bytes))
        else:
            # Groups may cut blocks of other sizes: bytes for as many tokens as the base's.
            block_bytes += layout.block_bytes * base.block_tokens // layout.block_tokens
    if all(windows) and len(runs):
        runs = [(int(runs[0][0]), tokens // base.block_tokens)]
    advice = plan(
        runs,
        base.block_tokens,
        max(block_bytes, 1),
        links,
        cost,
        min(prompt_tokens, TOKENS_MAX),
        cached_tokens=min(before_tokens, TOKENS_MAX),
        overlap=overlap,
        fixed=fixed,
    )
    return _in_blocks_of(groups[0].block_tokens, base.block_tokens, advice)


def _in_blocks_of(first_tokens: int, base_tokens: int, advice: Plan) -> Plan:
    if first_tokens == base_tokens:
        return advice
    head, computed, tail, loaded = (
        blocks * base_tokens // first_tokens for blocks in (*advice.split[1:4], advice.load_blocks)
    )
    split = advice.split._replace(head_blocks=head, computed_blocks=computed, tail_blocks=tail)
    tiers = tuple(
        one._replace(
            found_blocks=one.found_blocks * base_tokens // first_tokens,
            load_blocks=one.load_blocks * base_tokens // first_tokens,
        )
        for one in advice.tiers
    )
    return advice._replace(load_blocks=loaded, split=split, tiers=tiers)


def plan_to_wire(advice: Plan) -> pb.Plan:
    """The plan as a reply has it."""
    split = advice.split
    return pb.Plan(
        load_blocks=advice.load_blocks,
        recompute_tokens=advice.recompute_tokens,
        load_ms=advice.load_ms,
        ideal_load_ms=advice.ideal_load_ms,
        recompute_ms=advice.recompute_ms,
        reason=convert.reason_to_wire(advice.reason),
        bytes_per_second=advice.bytes_per_second,
        head_blocks=split.head_blocks,
        computed_blocks=split.computed_blocks,
        tail_blocks=split.tail_blocks,
        total_ms=split.total_ms,
        compute_only_ms=split.compute_only_ms,
        tiers=[
            pb.TierPlan(
                tier=1 + one.tier,
                found_blocks=one.found_blocks,
                load_blocks=one.load_blocks,
                bytes=one.length_bytes,
                bytes_per_second=one.bytes_per_second,
                queued_bytes=one.queued_bytes,
                ideal_load_ms=one.ideal_load_ms,
                load_ms=one.load_ms,
                recompute_ms=one.recompute_ms,
            )
            for one in advice.tiers
        ],
    )
