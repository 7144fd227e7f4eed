"""Load or recompute: which part of a hit is worth loading, with the predicted milliseconds.

Pure, no side effect; may be called by anyone who has links. The daemon answers lookups with it, the
calculator (`kvstore plan`) and the simulator call the same function. It promises never to advise a
load that it predicts to be slower than computing the same tokens, and to say so when it could not
tell because no prefill cost was given.

The model. Blocks come from their tiers one tier after the other: a tier costs its fixed latency and
its queue once, then bytes / bandwidth. Computing costs `PrefillCost`. Within one tier the gain of
loading is convex in the number of blocks (a later token costs more to compute, as much to load), so
that the best serial cut lies at the end of a run of blocks of one tier: only those are tried. For
the overlapping kinds one side grows and the other falls with the cut, so that it is found by
bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.model.cost import PrefillCost
from kvstore.model.hits import leading_run
from kvstore.model.plan import Overlap, Plan, Split, TierPlan
from kvstore.model.reasons import Reason
from kvstore.policy.links import Link

__all__ = ["FixedLoad", "PrefillCost", "Runs", "plan", "run_table", "runs_of"]

Floats = NDArray[np.float64]
Runs = NDArray[np.int64]
"""[n, 2]: tier index, blocks."""

_NS_PER_MS = 1e6
_US_PER_MS = 1e3


class FixedLoad(NamedTuple):
    """Bytes that have to be loaded with the first block, however many follow: the blocks of window
    and state groups."""

    tier: int
    length_bytes: int


def runs_of(codes: bytes) -> list[tuple[int, int]]:
    """(tier index, blocks) runs of the leading present blocks, in prefix order.

    codes: a byte a block as in a lookup's reply: 1 + tier index; 0 (absent) or 255 (being written)
    ends the hit.
    """
    tiers, blocks = run_table(codes).T.tolist()
    return list(zip(tiers, blocks, strict=True))


def run_table(codes: bytes) -> Runs:
    """The same as an array: a hit may lie scattered over tiers block by block."""
    run = leading_run(codes)
    found = np.frombuffer(codes, np.uint8, run)
    cuts = np.flatnonzero(found[1:] != found[:-1]) + 1
    table = np.empty((len(cuts) + 1 if run else 0, 2), np.int64)
    if run:
        table[0, 0], table[1:, 0] = found[0], found[cuts]
        table[:-1, 1], table[-1, 1] = cuts, run
        table[:, 0] -= 1
        table[1:, 1] -= cuts
    return table


def plan(
    blocks_by_tier: Sequence[tuple[int, int]] | Runs,
    block_tokens: int,
    block_bytes: int,
    links: Sequence[Link],
    prefill: PrefillCost | None,
    prompt_tokens: int = 0,
    *,
    cached_tokens: int = 0,
    overlap: Overlap = Overlap.SERIAL,
    fixed: Sequence[FixedLoad] = (),
) -> Plan:
    """Advises on a hit.

    blocks_by_tier: (tier index, blocks) runs in prefix order (see `run_table`, `runs_of`), all
        beyond `cached_tokens`.
    block_bytes: bytes moved for one block (of all full-attention groups together).
    links: by tier index; the path from that tier to the engine.
    prefill: None, or a cost that is not `valid`, means that nobody knows what computing costs:
        everything is loaded, and the reason is COST_UNKNOWN.
    prompt_tokens: 0 means unknown.
    cached_tokens: tokens before the hit that the engine has already.
    fixed: loaded as soon as one block is.
    """
    if prefill is not None and not prefill.valid():
        prefill = None
    hit = _Hit(blocks_by_tier, block_tokens, block_bytes, links, cached_tokens, fixed)
    if hit.blocks == 0:
        left = max(0, prompt_tokens - cached_tokens)
        compute_ms = _compute_ms(prefill, cached_tokens, prompt_tokens)
        split = Split(overlap, 0, 0, 0, compute_ms, compute_ms)
        return Plan(0, left, 0.0, 0.0, 0.0, Reason.NOTHING_TO_DO, 0.0, split)
    if prefill is None:
        load = hit.load(0, hit.blocks)
        split = Split(overlap, hit.blocks, 0, 0, load.load_ms, 0.0)
        return _as_plan(hit, split, load, None, prompt_tokens, Reason.COST_UNKNOWN)
    end_tokens = max(prompt_tokens, hit.tokens_at(hit.blocks))
    split, load = _CUTS[overlap](hit, prefill, end_tokens)
    if split.head_blocks + split.tail_blocks == 0:
        whole = hit.load(0, hit.blocks)
        return _as_plan(hit, split, whole, prefill, prompt_tokens, Reason.DECLINED_RECOMPUTE_FASTER)
    return _as_plan(hit, split, load, prefill, prompt_tokens, Reason.OK)


class _Load(NamedTuple):
    """The predicted load of some blocks."""

    length_bytes: int
    load_ms: float
    ideal_ms: float

    def plus(self, other: _Load) -> _Load:
        return _Load(
            self.length_bytes + other.length_bytes,
            self.load_ms + other.load_ms,
            self.ideal_ms + other.ideal_ms,
        )


_NO_LOAD = _Load(0, 0.0, 0.0)
_HEADS_MAX = 8
"""Heads that `Overlap.TAIL` tries: a hit scattered over tiers in more runs gains nothing more."""


class _Hit:
    """The hit as numbers: what loading any range of it takes, in time that hardly grows with the
    number of runs: a prompt may lie scattered over tiers block by block.
    """

    __slots__ = (
        "_block_bytes",
        "_block_tokens",
        "_cached",
        "_fixed_bytes",
        "_links",
        "_tiers",
        "blocks",
        "cumulated",
        "ends",
    )

    def __init__(
        self,
        runs: Sequence[tuple[int, int]] | Runs,
        block_tokens: int,
        block_bytes: int,
        links: Sequence[Link],
        cached_tokens: int,
        fixed: Sequence[FixedLoad],
    ) -> None:
        assert block_tokens > 0
        assert block_bytes > 0
        table = np.asarray(runs, np.int64).reshape(-1, 2)
        if not table[:, 1].all():
            table = table[table[:, 1] > 0]
        self._tiers = table[:, 0]
        self.ends = np.cumsum(table[:, 1])
        self.blocks = int(self.ends[-1]) if len(table) else 0
        self._fixed_bytes: dict[int, int] = {}
        for tier, length_bytes in fixed:
            self._fixed_bytes[tier] = self._fixed_bytes.get(tier, 0) + length_bytes
        self.cumulated = {
            tier: np.cumsum(np.where(self._tiers == tier, table[:, 1], 0))
            for tier in np.unique(self._tiers).tolist()
        }
        """Blocks of a tier up to the end of each run."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._links = links
        self._cached = cached_tokens

    def tokens_at(self, blocks: int) -> int:
        """Position in the prompt behind so many blocks of the hit."""
        return self._cached + blocks * self._block_tokens

    def load(self, first: int, end: int, *, with_fixed: bool = True) -> _Load:
        """Blocks `[first, end)`, and what is fixed."""
        bytes_of = dict(self._fixed_bytes) if with_fixed else {}
        low, high = self._before(first), self._before(end)
        for tier, blocks in high.items():
            if blocks > low[tier]:
                moved = (blocks - low[tier]) * self._block_bytes
                bytes_of[tier] = bytes_of.get(tier, 0) + moved
        return self._cost(bytes_of)

    def _before(self, at: int) -> dict[int, int]:
        """Blocks of each tier among the first `at`."""
        run = int(np.searchsorted(self.ends, at, side="right"))
        found = {tier: int(sums[run - 1]) if run else 0 for tier, sums in self.cumulated.items()}
        begun = at - (int(self.ends[run - 1]) if run else 0)
        if begun:
            found[int(self._tiers[run])] += begun
        return found

    def load_ms_to_ends(self) -> Floats:
        """Of everything up to the end of each run, and what is fixed."""
        total_ns = np.zeros(len(self.ends))
        for tier in self.cumulated.keys() | self._fixed_bytes.keys():
            link, fixed_bytes = self._links[tier], self._fixed_bytes.get(tier, 0)
            blocks = self.cumulated.get(tier, 0)
            moved = np.broadcast_to(blocks * self._block_bytes + fixed_bytes, total_ns.shape)
            waits = (moved > 0) | (tier in self._fixed_bytes)
            total_ns += moved * link.ideal_ns(1) + np.where(waits, link.fixed_ns(), 0.0)
        return total_ns / _NS_PER_MS

    def compute_ms_to_ends(self, prefill: PrefillCost) -> Floats:
        """Of everything up to the end of each run."""
        a, b = prefill
        tokens = self.ends * float(self._block_tokens)
        compute_ms: Floats = tokens * (a + b * (tokens + 2.0 * self._cached)) / _US_PER_MS
        return compute_ms

    def by_tier(self, split: Split, prefill: PrefillCost | None) -> tuple[TierPlan, ...]:
        """What loading the head and the tail of `split` takes of each tier; the whole hit where
        neither has a block.
        """
        tail_from = split.head_blocks + split.computed_blocks
        loads = [(0, split.head_blocks), (tail_from, tail_from + split.tail_blocks)]
        declined = not split.head_blocks + split.tail_blocks
        if declined:
            loads = [(0, self.blocks)]
        plans = []
        for tier in sorted(self.cumulated.keys() | self._fixed_bytes.keys()):
            blocks, compute_ms, link = 0, 0.0, self._links[tier]
            for first, end in loads:
                count, spent_ms = self._of_tier(tier, first, end, prefill)
                blocks, compute_ms = blocks + count, compute_ms + spent_ms
            length_bytes = self._fixed_bytes.get(tier, 0) + blocks * self._block_bytes
            ideal_ns = link.ideal_ns(length_bytes)
            plans.append(
                TierPlan(
                    tier,
                    int(self.cumulated[tier][-1]) if tier in self.cumulated else 0,
                    0 if declined else blocks,
                    length_bytes,
                    1e9 / link.ideal_ns(1),
                    link.queued_bytes,
                    ideal_ns / _NS_PER_MS,
                    (ideal_ns + link.fixed_ns()) / _NS_PER_MS if length_bytes else 0.0,
                    compute_ms,
                )
            )
        return tuple(plans)

    def _of_tier(
        self, tier: int, first: int, end: int, prefill: PrefillCost | None
    ) -> tuple[int, float]:
        """(blocks of a tier in `[first, end)`, milliseconds to compute them)."""
        its = self._tiers == tier
        starts = np.concatenate(([0], self.ends[:-1]))[its] if its.any() else self.ends[:0]
        low = np.maximum(starts, first)
        blocks = np.maximum(np.minimum(self.ends[its], end) - low, 0)
        if prefill is None:
            return int(blocks.sum()), 0.0
        a, b = prefill
        tokens = blocks * float(self._block_tokens)
        before = self._cached + low * float(self._block_tokens)
        spent_us = float((tokens * (a + b * (tokens + 2.0 * before))).sum())
        return int(blocks.sum()), spent_us / _US_PER_MS

    def _cost(self, bytes_of: dict[int, int]) -> _Load:
        ideal_ns = fixed_ns = 0.0
        for tier, length_bytes in bytes_of.items():
            link = self._links[tier]
            ideal_ns += link.ideal_ns(length_bytes)
            fixed_ns += link.fixed_ns()
        ideal_ms = ideal_ns / _NS_PER_MS
        return _Load(sum(bytes_of.values()), ideal_ms + fixed_ns / _NS_PER_MS, ideal_ms)


def _serial(hit: _Hit, prefill: PrefillCost, end_tokens: int) -> tuple[Split, _Load]:
    """Load a leading part, then compute the rest."""
    start = hit.tokens_at(0)
    compute_only_ms = _compute_ms(prefill, start, end_tokens)
    gains_ms = hit.compute_ms_to_ends(prefill) - hit.load_ms_to_ends()
    best = len(gains_ms) - 1 - int(np.argmax(gains_ms[::-1]))  # the last of equal ones
    if gains_ms[best] < 0:
        return Split(Overlap.SERIAL, 0, 0, 0, compute_only_ms, compute_only_ms), _NO_LOAD
    blocks = int(hit.ends[best])
    load = hit.load(0, blocks)
    total_ms = load.load_ms + _compute_ms(prefill, hit.tokens_at(blocks), end_tokens)
    # Two ways to the same sum may differ in their last digit.
    total_ms = min(total_ms, compute_only_ms)
    return Split(Overlap.SERIAL, blocks, 0, 0, total_ms, compute_only_ms), load


def _layerwise(hit: _Hit, prefill: PrefillCost, end_tokens: int) -> tuple[Split, _Load]:
    """Load a leading part while the rest is computed."""
    compute_only_ms = _compute_ms(prefill, hit.tokens_at(0), end_tokens)

    def rest_ms(blocks: int) -> float:
        return _compute_ms(prefill, hit.tokens_at(blocks), end_tokens)

    crossing = _first(1, hit.blocks, lambda n: hit.load(0, n).load_ms >= rest_ms(n))
    best, best_load, best_ms = 0, _NO_LOAD, compute_only_ms
    for blocks in (crossing - 1, crossing):
        if 1 <= blocks <= hit.blocks:
            load = hit.load(0, blocks)
            total_ms = max(load.load_ms, rest_ms(blocks))
            if total_ms <= best_ms:
                best, best_load, best_ms = blocks, load, total_ms
    return Split(Overlap.LAYERWISE, best, 0, 0, best_ms, compute_only_ms), best_load


def _tail(hit: _Hit, prefill: PrefillCost, end_tokens: int) -> tuple[Split, _Load]:
    """Load a head, then compute what follows it while the tail of the hit loads."""
    compute_only_ms = _compute_ms(prefill, hit.tokens_at(0), end_tokens)
    after_ms = _compute_ms(prefill, hit.tokens_at(hit.blocks), end_tokens)
    best, best_load = (
        Split(Overlap.TAIL, 0, hit.blocks, 0, compute_only_ms, compute_only_ms),
        _NO_LOAD,
    )
    for head in (0, *hit.ends[:_HEADS_MAX].tolist()):
        head_load = hit.load(0, head, with_fixed=False) if head else _NO_LOAD

        def middle_ms(cut: int, head: int = head) -> float:
            return _compute_ms(prefill, hit.tokens_at(head), hit.tokens_at(cut))

        crossing = _first(
            head, hit.blocks, lambda cut: middle_ms(cut) >= hit.load(cut, hit.blocks).load_ms
        )
        for cut in (crossing - 1, crossing):
            if not head <= cut <= hit.blocks or (head == 0 and cut == hit.blocks):
                continue
            tail_load = hit.load(cut, hit.blocks)
            total_ms = head_load.load_ms + max(middle_ms(cut), tail_load.load_ms) + after_ms
            if total_ms <= best.total_ms:
                tail = hit.blocks - cut
                best = Split(Overlap.TAIL, head, cut - head, tail, total_ms, compute_only_ms)
                best_load = head_load.plus(tail_load)
    return best, best_load


_CUTS: dict[Overlap, Callable[[_Hit, PrefillCost, int], tuple[Split, _Load]]] = {
    Overlap.SERIAL: _serial,
    Overlap.LAYERWISE: _layerwise,
    Overlap.TAIL: _tail,
}


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least n of `[low, high]` for which `holds`, which once true stays true; else high + 1."""
    high += 1
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _compute_ms(prefill: PrefillCost | None, first_token: int, end_token: int) -> float:
    if prefill is None:
        return 0.0
    return prefill.prefill_us(end_token, first_token) / _US_PER_MS


def _as_plan(
    hit: _Hit,
    split: Split,
    load: _Load,
    prefill: PrefillCost | None,
    prompt_tokens: int,
    reason: Reason,
) -> Plan:
    loaded = split.head_blocks + split.tail_blocks
    at = split.head_blocks + split.computed_blocks if loaded else 0
    counted = split.tail_blocks if loaded else hit.blocks
    recompute_ms = _compute_ms(prefill, hit.tokens_at(at), hit.tokens_at(at + counted))
    if loaded:
        recompute_ms += _compute_ms(prefill, hit.tokens_at(0), hit.tokens_at(split.head_blocks))
    left = max(0, prompt_tokens - hit.tokens_at(loaded))
    return Plan(
        load_blocks=loaded,
        recompute_tokens=left,
        load_ms=load.load_ms,
        ideal_load_ms=load.ideal_ms,
        recompute_ms=recompute_ms,
        reason=reason,
        bytes_per_second=load.length_bytes / load.ideal_ms * 1e3,
        split=split,
        tiers=hit.by_tier(split, prefill),
    )
