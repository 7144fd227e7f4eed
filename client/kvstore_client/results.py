"""What the calls answer: plain values. `reason` says why, for every outcome.

The data path does not raise: an outage, a deadline, a refusal is a result with no blocks and its
reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstore.model.fingerprint import Difference, Verdict
from kvstore.model.keys import BlockKey
from kvstore.model.plan import TierPlan
from kvstore.model.reasons import Reason
from kvstore.model.record import Outcome, outcome_without_blocks
from kvstore.model.sampling import Arm

__all__ = [
    "Compared",
    "Connection",
    "Fetched",
    "Hit",
    "KeyExplanation",
    "LoadAdvice",
    "PoolUse",
    "Presence",
    "Pushed",
    "Rank",
    "SpaceStatus",
]


class Rank(NamedTuple):
    """One process of an engine that is spread over several: which part of each block it fills."""

    tensor: int = 0
    pipeline: int = 0


class LoadAdvice(NamedTuple):
    """What the daemon advises to do with a hit; milliseconds are predictions.

    load_blocks: how many of the leading blocks to load; the rest is computed faster. With
        `Overlap.TAIL` computed_blocks after them are computed while the tail_blocks that follow
        are loaded (see Hit.tail_keys); load_ms, ideal_load_ms and recompute_ms are of both.
    recompute_tokens: tokens of the prompt left to compute; 0 when its length is unknown.
    ideal_load_ms: bytes / bandwidth, the bound that no load beats.
    recompute_ms: prefill time of what would be loaded; 0 when the cost is unknown.
    reason: OK, DECLINED_RECOMPUTE_FASTER, NOTHING_TO_DO, or COST_UNKNOWN (no gate: all is loaded).
    bytes_per_second: the estimate that was used.
    total_ms: until the whole prompt is there (the hit, where the prompt's length is unknown).
    compute_only_ms: the same if nothing were loaded; 0 when the cost is unknown.
    tiers: the same tier by tier, with bytes, bandwidth and queue; of prompts that go in several
        calls, call by call.
    """

    load_blocks: int
    recompute_tokens: int
    load_ms: float
    ideal_load_ms: float
    recompute_ms: float
    reason: Reason
    bytes_per_second: float
    computed_blocks: int = 0
    tail_blocks: int = 0
    total_ms: float = 0.0
    compute_only_ms: float = 0.0
    tiers: tuple[TierPlan, ...] = ()


class Presence(NamedTuple):
    """Which keys are there, each for itself.

    there: one answer a key. reason: OK if all are, else why the first absent one is absent;
    `differences` as in a Hit. A hint, not a lease.
    """

    there: tuple[bool, ...]
    reason: Reason
    differences: tuple[Difference, ...] = ()
    detail: str = ""


NO_ADVICE = LoadAdvice(0, 0, 0.0, 0.0, 0.0, Reason.NOTHING_TO_DO, 0.0)


@dataclass(frozen=True, slots=True)
class Hit:
    """How much of a prompt is stored.

    blocks, tokens: the leading run that is there. tiers: a byte a block of it, the index into
    `Connection.tiers`. keys: of the whole prompt. reason: OK if all is there, else why the first
    absent block is absent; `differences`: the fields in which the nearest stored fingerprint
    differs. prompt_tokens: of the whole prompt, 0: unknown. arm: the side of a comparison that the
    request is on; a withheld one loads nothing, and its plan says why. audit: the daemon asks that
    this prompt be computed all the same, and compared (`Space.compare`). A hit is a hint, not a
    lease: what is gone by the time of the fetch is a miss there.
    """

    blocks: int
    tokens: int
    tiers: bytes
    keys: tuple[BlockKey, ...]
    plan: LoadAdvice
    reason: Reason
    differences: tuple[Difference, ...] = ()
    detail: str = ""
    prompt_tokens: int = 0
    arm: Arm = Arm.APPLIED
    audit: bool = False

    @property
    def keys_to_load(self) -> tuple[BlockKey, ...]:
        """What the plan advises to fetch; `fetch(hit)` fetches these."""
        return self.keys[: min(self.blocks, self.plan.load_blocks)]

    @property
    def tail_keys(self) -> tuple[BlockKey, ...]:
        """With `Overlap.TAIL`: what to fetch while the blocks before it are computed."""
        first = self.plan.load_blocks + self.plan.computed_blocks
        return self.keys[first : min(self.blocks, first + self.plan.tail_blocks)]

    @property
    def outcome(self) -> Outcome:
        """HIT: all of the prompt's blocks are there. PARTIAL: some. MISS. DECLINED: they are, and
        none is to be loaded: neither hit nor miss. FAILED, REFUSED: no answer.
        """
        if not self.blocks:
            return outcome_without_blocks(self.reason)
        if self.plan.reason.is_declined:
            return Outcome.DECLINED
        return Outcome.HIT if self.blocks == len(self.keys) else Outcome.PARTIAL


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch copied.

    blocks: the leading run that was copied and verified.
    data: these blocks and nothing else, if the memory was made for them; the caller's own `out` as
    it was given, of which only the first `blocks` rows mean something.
    reason: OK if that is all that was asked for, else why it ended.
    copy_ms: the copies alone. total_ms: the whole call. load_ms: from asking for the leases until
    the last byte was verified. predicted_ms: what the plan of the Hit had predicted for that; 0:
    nothing was, or less was loaded than it advised.
    """

    blocks: int
    tokens: int
    data: Any
    reason: Reason
    bytes: int = 0
    copy_ms: float = 0.0
    total_ms: float = 0.0
    detail: str = ""
    load_ms: float = 0.0
    predicted_ms: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """HIT: all that was asked for. PARTIAL. MISS. DECLINED: the plan advised to load nothing,
        which is neither. FAILED, REFUSED: no answer.
        """
        if self.blocks:
            return Outcome.HIT if self.reason is Reason.OK else Outcome.PARTIAL
        return outcome_without_blocks(self.reason)


@dataclass(frozen=True, slots=True)
class Compared:
    """What an audit found.

    blocks: compared, the leading run that is stored. mismatched: of them, beyond the tolerance.
    worst: the largest difference as a share of what is let pass. first: index of the first block
    that differs, None: none does. reason: OK, or why not all were compared. review_id: of the
    fingerprint that is held for it from now on, 0: none.
    """

    blocks: int
    mismatched: int
    worst: float
    first: int | None
    reason: Reason
    review_id: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of the blocks of a push; the numbers add up to the blocks that were offered.

    stored: readable now. waiting: stored when the other ranks have committed their parts.
    present: were stored before. reserved: another writer is storing them. failed: given to the
    daemon and dropped. skipped: not taken. reason: OK, or why not all.
    """

    stored: int
    present: int
    reserved: int
    failed: int
    skipped: int
    waiting: int
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SpaceStatus:
    """What the daemon says to a fingerprint.

    verdict: MATCH: in use. HELD: only this engine reads what it writes, until an operator decides
    on `review_id`; `missing` names the fields. INCOMPATIBLE: refused, or no answer; see reason.
    differences: against the nearest fingerprint that is known.
    """

    verdict: Verdict
    reason: Reason
    differences: tuple[Difference, ...] = ()
    missing: tuple[str, ...] = ()
    review_id: int = 0
    digest: bytes = b""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class KeyExplanation:
    """Why a key hits or misses. `key`: 8 hex digits. age_s: since its last event, None: unknown."""

    key: str
    reason: Reason
    tier: str
    generation: int
    leases: int
    age_s: float | None
    differences: tuple[Difference, ...]
    detail: str


class PoolUse(NamedTuple):
    """What fetches into CUDA tensors did with pools of GPU memory.

    gpus: whose pools the daemon lends, as NVML spells them; none: it lends none. blocks: that came
    out of pools, and were right. refused: how often it turned out that pools cannot be used, and
    detail why the last time; blocks come by way of CPU memory then.
    """

    gpus: tuple[str, ...] = ()
    blocks: int = 0
    refused: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Connection:
    """How a client is connected. transport: "shm", "stream", or "" while it is not connected.
    pools: of GPU memory that the daemon lends, in this session.
    """

    transport: str
    reason: Reason
    instance_id: bytes = b""
    daemon_version: str = ""
    tiers: tuple[str, ...] = ()
    detail: str = ""
    pools: PoolUse = field(default_factory=PoolUse)
