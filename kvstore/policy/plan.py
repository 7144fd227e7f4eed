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

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Overlap, Plan, Split, TierPlan
from kvstore.model.reasons import Reason
from kvstore.policy.links import Link

__all__ = ["FixedLoad", "PrefillCost", "plan", "runs_of"]

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
    runs: list[tuple[int, int]] = []
    at = 0
    while at < len(codes):
        code = codes[at]
        if code in (0, 255):
            break
        rest = codes[at:].lstrip(codes[at : at + 1])
        end = len(codes) - len(rest)
        runs.append((code - 1, end - at))
        at = end
    return runs


def plan(
    blocks_by_tier: Sequence[tuple[int, int]],
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

    blocks_by_tier: (tier index, blocks) runs in prefix order (see `runs_of`), all beyond
        `cached_tokens`.
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
    """The hit as numbers: what loading any range of it takes."""

    __slots__ = (
        "_block_bytes",
        "_block_tokens",
        "_cached",
        "_fixed",
        "_links",
        "blocks",
        "ends",
        "runs",
    )

    def __init__(
        self,
        runs: Sequence[tuple[int, int]],
        block_tokens: int,
        block_bytes: int,
        links: Sequence[Link],
        cached_tokens: int,
        fixed: Sequence[FixedLoad],
    ) -> None:
        assert block_tokens > 0
        assert block_bytes > 0
        self.runs = [run for run in runs if run[1] > 0]
        self.ends: list[int] = []
        self.blocks = 0
        for _, blocks in self.runs:
            self.blocks += blocks
            self.ends.append(self.blocks)
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._links = links
        self._cached = cached_tokens
        self._fixed = fixed

    def tokens_at(self, blocks: int) -> int:
        """Position in the prompt behind so many blocks of the hit."""
        return self._cached + blocks * self._block_tokens

    def load(self, first: int, end: int, *, with_fixed: bool = True) -> _Load:
        """Blocks `[first, end)`, and what is fixed."""
        bytes_of: dict[int, int] = {}
        if with_fixed:
            for tier, length_bytes in self._fixed:
                bytes_of[tier] = bytes_of.get(tier, 0) + length_bytes
        at = bisect_right(self.ends, first)
        while first < end:
            tier, run_end = self.runs[at][0], min(self.ends[at], end)
            moved = (run_end - first) * self._block_bytes
            bytes_of[tier] = bytes_of.get(tier, 0) + moved
            first, at = run_end, at + 1
        return self._cost(bytes_of)

    def prefixes(self) -> Iterator[tuple[int, _Load]]:
        """(blocks, load) of every cut at the end of a run of one tier."""
        bytes_of: dict[int, int] = {}
        for tier, length_bytes in self._fixed:
            bytes_of[tier] = bytes_of.get(tier, 0) + length_bytes
        for (tier, blocks), end in zip(self.runs, self.ends, strict=True):
            bytes_of[tier] = bytes_of.get(tier, 0) + blocks * self._block_bytes
            yield end, self._cost(bytes_of)

    def by_tier(self, split: Split, prefill: PrefillCost | None) -> tuple[TierPlan, ...]:
        """What loading the head and the tail of `split` takes of each tier; the whole hit where
        neither has a block.
        """
        tail_from = split.head_blocks + split.computed_blocks
        loads = ((0, split.head_blocks), (tail_from, tail_from + split.tail_blocks))
        declined = not split.head_blocks + split.tail_blocks
        if declined:
            loads = ((0, self.blocks), (0, 0))
        bytes_of = {tier: 0 for tier, _ in self._fixed}
        for tier, length_bytes in self._fixed:
            bytes_of[tier] += length_bytes
        found = dict.fromkeys(bytes_of, 0)
        loaded, compute_ms = dict(found), dict.fromkeys(bytes_of, 0.0)
        first = 0
        for (tier, blocks), end in zip(self.runs, self.ends, strict=True):
            found[tier] = found.get(tier, 0) + blocks
            for load_first, load_end in loads:
                low, high = max(load_first, first), min(load_end, end)
                if low < high:
                    loaded[tier] = loaded.get(tier, 0) + high - low
                    spent_ms = _compute_ms(prefill, self.tokens_at(low), self.tokens_at(high))
                    compute_ms[tier] = compute_ms.get(tier, 0.0) + spent_ms
            first = end
        plans = []
        for tier in sorted(found):
            blocks, link = loaded.get(tier, 0), self._links[tier]
            length_bytes = bytes_of.get(tier, 0) + blocks * self._block_bytes
            ideal_ns = link.ideal_ns(length_bytes)
            plans.append(
                TierPlan(
                    tier,
                    found[tier],
                    0 if declined else blocks,
                    length_bytes,
                    1e9 / link.ideal_ns(1),
                    link.queued_bytes,
                    ideal_ns / _NS_PER_MS,
                    (ideal_ns + link.fixed_ns()) / _NS_PER_MS if length_bytes else 0.0,
                    compute_ms.get(tier, 0.0),
                )
            )
        return tuple(plans)

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
    best, best_load, best_gain_ms = 0, _NO_LOAD, 0.0
    for blocks, load in hit.prefixes():
        gain_ms = _compute_ms(prefill, start, hit.tokens_at(blocks)) - load.load_ms
        if gain_ms >= best_gain_ms:
            best, best_load, best_gain_ms = blocks, load, gain_ms
    total_ms = compute_only_ms - best_gain_ms
    return Split(Overlap.SERIAL, best, 0, 0, total_ms, compute_only_ms), best_load


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
    for head in (0, *hit.ends[:_HEADS_MAX]):
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
