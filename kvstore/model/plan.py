"""The advice of a lookup: how much of the hit to load, how much to compute, and why. Pure values.

Made by `kvstore.policy.plan.plan` in the daemon and in the calculator, carried to the client, and
kept in the request's record, so that what was predicted can be held against what was measured.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from kvstore.model.reasons import Reason

__all__ = ["Overlap", "Plan", "Split", "TierPlan"]


class Overlap(enum.Enum):
    """What the engine can do at the same time; decides what a plan minimises."""

    SERIAL = "serial"
    """Loads, then computes the rest: minimises the sum."""
    LAYERWISE = "layerwise"
    """Loads the layers to come while it computes: minimises the longer of the two."""
    TAIL = "tail"
    """Computes the head of what is slow to load while the tail of it loads."""


class Split(NamedTuple):
    """Where the hit is cut: `[0, head)` is loaded, `[head, head + computed)` is computed,
    `[head + computed, head + computed + tail)` is loaded meanwhile; blocks after it are computed.

    Only `Overlap.TAIL` has blocks in `computed_blocks` and `tail_blocks`.
    """

    overlap: Overlap
    head_blocks: int
    computed_blocks: int
    tail_blocks: int
    total_ms: float
    """Until the whole prompt (the whole hit, if the prompt's length is unknown) is there; without a
    prefill cost, the load alone."""
    compute_only_ms: float
    """The same if nothing were loaded; 0 when the cost is unknown."""


class TierPlan(NamedTuple):
    """What a plan says of the blocks in one tier. Milliseconds are predictions.

    `length_bytes` and the times are of the blocks to be loaded, with what has to be loaded besides;
    of all that was found where the plan declines.
    """

    tier: int
    """Index of the tier, the fastest is 0."""
    found_blocks: int
    """Of the hit."""
    load_blocks: int
    length_bytes: int
    bytes_per_second: float
    """Estimate of the whole path from the tier to the engine."""
    queued_bytes: int
    """Before them on the path."""
    ideal_load_ms: float
    load_ms: float
    recompute_ms: float
    """Prefill time of their tokens; 0 when the cost is unknown."""


class Plan(NamedTuple):
    """What to do with a hit. Milliseconds are predictions.

    `load_ms`, `ideal_load_ms` and `recompute_ms` are of the blocks to be loaded; of the whole hit
    when the plan declines it, so that the reason can be checked.
    """

    load_blocks: int
    """Blocks to load: the leading ones, but for `Overlap.TAIL` (see `split`)."""
    recompute_tokens: int
    """Tokens of the prompt that are left to compute; 0 when the prompt's length is unknown."""
    load_ms: float
    """Latency, queue and transfer."""
    ideal_load_ms: float
    """bytes / bandwidth: the bound that no load beats."""
    recompute_ms: float
    """Prefill time of the tokens that would be loaded; 0 when the cost is unknown."""
    reason: Reason
    """OK, DECLINED_RECOMPUTE_FASTER, NOTHING_TO_DO, or COST_UNKNOWN (no gate: all is loaded)."""
    bytes_per_second: float
    """The bandwidth that was used, over all tiers of the load; 0 when there is nothing to load."""
    split: Split
    tiers: tuple[TierPlan, ...] = ()
    """One a tier that has a part of the hit, or of what is loaded with it."""
