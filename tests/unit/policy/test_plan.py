"""`plan`: the gate, the split and the figures that it predicts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Overlap, Plan
from kvstore.model.reasons import Reason
from kvstore.policy.links import Link
from kvstore.policy.plan import FixedLoad, plan, run_table, runs_of

GIB = 1 << 30
LLAMA_8B_H100 = PrefillCost(20.76, 3.926e-4)
BLOCK_TOKENS = 512
BLOCK_BYTES = 512 * 131_072


def links(*gb_per_second: float, latency_us: float = 0.0) -> list[Link]:
    return [
        Link(f"tier{i}", bytes_per_second=rate * 1e9, latency_ns=latency_us * 1e3)
        for i, rate in enumerate(gb_per_second)
    ]


def test_8_gib_over_20_gib_a_second_take_400_ms() -> None:
    link = Link("pcie", bytes_per_second=20 * GIB)
    advice = plan([(0, 8192)], 16, 1 << 20, [link], None)
    assert advice.ideal_load_ms == pytest.approx(400.0)
    assert advice.load_ms == pytest.approx(400.0)
    assert advice.bytes_per_second == pytest.approx(20 * GIB)
    assert advice.load_blocks == 8192


def test_without_a_cost_all_is_loaded_and_the_plan_says_so() -> None:
    for unknown in (None, PrefillCost(0.0, 0.0), PrefillCost(float("nan"), 1.0)):
        advice = plan([(0, 10)], 512, BLOCK_BYTES, links(0.001), unknown, 6_000)
        assert advice.reason is Reason.COST_UNKNOWN
        assert (advice.load_blocks, advice.recompute_tokens) == (10, 6_000 - 5_120)
        assert advice.recompute_ms == 0


def test_no_hit_is_nothing_to_do() -> None:
    for runs in ([], [(0, 0)]):
        advice = plan(runs, 512, BLOCK_BYTES, links(10), LLAMA_8B_H100, 6_000)
        assert advice.reason is Reason.NOTHING_TO_DO
        assert (advice.load_blocks, advice.load_ms, advice.recompute_ms) == (0, 0, 0)
        assert advice.recompute_tokens == 6_000
        assert advice.split.total_ms == pytest.approx(LLAMA_8B_H100.prefill_us(6_000) / 1e3)


def test_a_slow_load_is_declined_and_shows_why() -> None:
    advice = plan([(0, 16)], 512, BLOCK_BYTES, links(1), LLAMA_8B_H100, 10_000)
    assert advice.reason is Reason.DECLINED_RECOMPUTE_FASTER
    assert (advice.load_blocks, advice.recompute_tokens) == (0, 10_000)
    assert advice.load_ms == pytest.approx(16 * BLOCK_BYTES / 1e9 * 1e3)
    assert advice.recompute_ms == pytest.approx(LLAMA_8B_H100.prefill_us(8_192) / 1e3)
    assert advice.load_ms > advice.recompute_ms


def test_the_fast_tier_is_loaded_though_the_slow_one_is_not_worth_it() -> None:
    advice = plan([(0, 10), (1, 10)], 512, BLOCK_BYTES, links(50, 1), LLAMA_8B_H100, 12_000)
    assert advice.reason is Reason.OK
    assert advice.load_blocks == 10
    assert advice.recompute_tokens == 12_000 - 5_120
    assert advice.bytes_per_second == pytest.approx(50e9)


def test_a_plan_tells_what_it_weighed_tier_by_tier() -> None:
    paths = links(50, 1, latency_us=100)
    paths[1].enqueue(10**9)
    hit = [(0, 10), (1, 10), (0, 4)]
    advice = plan(hit, 512, BLOCK_BYTES, paths, LLAMA_8B_H100, 13_000)
    host, disk = advice.tiers
    assert (host.tier, host.found_blocks, host.load_blocks) == (0, 14, 10)
    assert (disk.tier, disk.found_blocks, disk.load_blocks) == (1, 10, 0)
    assert host.length_bytes == 10 * BLOCK_BYTES
    assert host.bytes_per_second == pytest.approx(50e9)
    assert host.recompute_ms == pytest.approx(LLAMA_8B_H100.prefill_us(5_120) / 1e3)
    assert (disk.queued_bytes, disk.length_bytes, disk.load_ms) == (10**9, 0, 0)
    declined = plan(hit[1:2], 512, BLOCK_BYTES, paths, LLAMA_8B_H100, 13_000)
    (disk,) = declined.tiers
    assert (disk.found_blocks, disk.load_blocks) == (10, 0), "nothing is to be loaded"
    assert disk.length_bytes == 10 * BLOCK_BYTES, "what loading it all would take"
    assert disk.load_ms == pytest.approx(0.1 + (10**9 + 10 * BLOCK_BYTES) / 1e9 * 1e3)


def test_a_slow_head_is_loaded_if_what_follows_pays_for_it() -> None:
    long_tail = plan([(1, 4), (0, 400)], 512, BLOCK_BYTES, links(50, 1), LLAMA_8B_H100)
    assert (long_tail.reason, long_tail.load_blocks) == (Reason.OK, 404)
    short_tail = plan([(1, 4), (0, 1)], 512, BLOCK_BYTES, links(50, 1), LLAMA_8B_H100)
    assert short_tail.reason is Reason.DECLINED_RECOMPUTE_FASTER


def test_what_the_engine_has_already_makes_the_rest_dearer_to_compute() -> None:
    near = plan([(0, 8)], 512, BLOCK_BYTES, links(3), LLAMA_8B_H100)
    far = plan([(0, 8)], 512, BLOCK_BYTES, links(3), LLAMA_8B_H100, cached_tokens=60_000)
    assert near.reason is Reason.DECLINED_RECOMPUTE_FASTER
    assert far.reason is Reason.OK
    assert far.recompute_ms > near.recompute_ms


def test_queue_and_latency_are_paid_before_the_first_byte() -> None:
    free, busy = links(10, latency_us=200), links(10, latency_us=200)
    busy[0].enqueue(10 * GIB)
    idle = plan([(0, 10)], 512, BLOCK_BYTES, free, LLAMA_8B_H100)
    late = plan([(0, 10)], 512, BLOCK_BYTES, busy, LLAMA_8B_H100)
    assert idle.load_ms == pytest.approx(idle.ideal_load_ms + 0.2)
    assert idle.reason is Reason.OK
    assert late.reason is Reason.DECLINED_RECOMPUTE_FASTER
    assert late.load_ms == pytest.approx(idle.load_ms + 10 * GIB / 10e9 * 1e3)
    assert late.ideal_load_ms == pytest.approx(idle.ideal_load_ms)


def test_fixed_bytes_are_loaded_with_the_first_block_only() -> None:
    window = [FixedLoad(0, 3_000_000_000)]
    with_window = plan([(0, 10)], 512, BLOCK_BYTES, links(10), None, fixed=window)
    without = plan([(0, 10)], 512, BLOCK_BYTES, links(10), None)
    assert with_window.load_ms == pytest.approx(without.load_ms + 300)
    assert plan([], 512, BLOCK_BYTES, links(10), None, fixed=window).load_ms == 0
    gated = plan([(0, 10)], 512, BLOCK_BYTES, links(10), LLAMA_8B_H100, fixed=window)
    assert gated.reason is Reason.DECLINED_RECOMPUTE_FASTER


def test_runs_of_the_leading_present_blocks() -> None:
    assert runs_of(b"") == []
    assert runs_of(bytes([1, 1, 2, 2, 2, 1, 0, 1])) == [(0, 2), (1, 3), (0, 1)]
    assert runs_of(bytes([1, 255, 1])) == [(0, 1)]
    assert runs_of(bytes([0, 1])) == []
    scattered = bytes([1, 2] * 3 + [2, 0, 1])
    assert run_table(scattered).tolist() == [[0, 1], [1, 1], [0, 1], [1, 1], [0, 1], [1, 2]]
    assert run_table(b"").shape == (0, 2)


@dataclass(frozen=True)
class Case:
    runs: list[tuple[int, int]]
    rates: tuple[float, float, float]
    latency_us: float
    queued: int
    cost: PrefillCost
    extra_tokens: int
    cached: int
    fixed: int | None

    @property
    def blocks(self) -> int:
        return sum(n for _, n in self.runs)

    @property
    def prompt_tokens(self) -> int:
        return self.cached + self.blocks * BLOCK_TOKENS + self.extra_tokens

    def paths(self, scale: float = 1.0) -> list[Link]:
        paths = links(*(rate * scale for rate in self.rates), latency_us=self.latency_us)
        paths[1].enqueue(self.queued)
        return paths

    def plan(self, overlap: Overlap, scale: float = 1.0) -> Plan:
        return plan(
            self.runs,
            BLOCK_TOKENS,
            BLOCK_BYTES,
            self.paths(scale),
            self.cost,
            self.prompt_tokens,
            cached_tokens=self.cached,
            overlap=overlap,
            fixed=[] if self.fixed is None else [FixedLoad(0, self.fixed)],
        )


CASES = st.builds(
    Case,
    runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=5),
    rates=st.tuples(*[st.floats(0.05, 100)] * 3),
    latency_us=st.floats(0, 5_000),
    queued=st.integers(0, GIB),
    cost=st.builds(PrefillCost, st.floats(1, 300), st.floats(0, 5e-3)),
    extra_tokens=st.integers(0, 5_000),
    cached=st.integers(0, 50_000),
    fixed=st.one_of(st.none(), st.integers(1, GIB)),
)


@settings(max_examples=300, deadline=None)
@given(case=CASES, overlap=st.sampled_from(Overlap))
def test_a_plan_never_loses_against_computing(case: Case, overlap: Overlap) -> None:
    advice = case.plan(overlap)
    split = advice.split
    assert split.overlap is overlap
    assert split.total_ms <= split.compute_only_ms * (1 + 1e-12)
    assert advice.ideal_load_ms <= advice.load_ms
    assert 0 <= advice.load_blocks <= case.blocks
    assert advice.load_blocks == split.head_blocks + split.tail_blocks
    loaded = advice.load_blocks * BLOCK_TOKENS
    assert advice.recompute_tokens == case.prompt_tokens - case.cached - loaded
    computed_ms = case.cost.prefill_us(case.prompt_tokens, case.cached) / 1e3
    assert split.compute_only_ms == pytest.approx(computed_ms)
    by_tier = advice.tiers
    assert sum(one.found_blocks for one in by_tier) == case.blocks
    assert sum(one.load_blocks for one in by_tier) == advice.load_blocks
    assert sum(one.ideal_load_ms for one in by_tier) == pytest.approx(advice.ideal_load_ms)
    assert sum(one.recompute_ms for one in by_tier) == pytest.approx(advice.recompute_ms)
    if overlap is not Overlap.TAIL:  # whose head and tail each wait for the first byte of a tier
        assert sum(one.load_ms for one in by_tier) == pytest.approx(advice.load_ms)
    if advice.reason is Reason.OK:
        assert advice.load_blocks > 0
        if overlap is Overlap.SERIAL:
            assert advice.load_ms <= advice.recompute_ms
    elif advice.reason is Reason.DECLINED_RECOMPUTE_FASTER:
        assert advice.load_blocks == 0
        if overlap is Overlap.SERIAL:
            assert advice.load_ms > advice.recompute_ms
    else:
        assert case.blocks == 0


@settings(max_examples=200, deadline=None)
@given(case=CASES, faster=st.floats(1.0, 50.0))
def test_more_bandwidth_never_means_less_loading_or_a_later_end(case: Case, faster: float) -> None:
    for overlap in Overlap:
        slow, fast = case.plan(overlap), case.plan(overlap, faster)
        assert fast.split.total_ms <= slow.split.total_ms * (1 + 1e-12)
        if overlap is not Overlap.TAIL:
            assert fast.load_blocks >= slow.load_blocks


def brute_force_ms(case: Case, overlap: Overlap) -> float:
    """The best total over every cut there is, from the definition."""
    paths, blocks = case.paths(), case.blocks
    tiers = [tier for tier, n in case.runs for _ in range(n)]

    def load_ms(first: int, end: int, fixed: bool) -> float:
        moved = [0, 0, 0]
        for tier in tiers[first:end]:
            moved[tier] += BLOCK_BYTES
        if fixed and case.fixed is not None:
            moved[0] += case.fixed
        return sum(paths[tier].predict_ns(n) for tier, n in enumerate(moved) if n) / 1e6

    def position(block: int) -> int:
        return case.cached + block * BLOCK_TOKENS

    def compute_ms(first: int, end_token: int) -> float:
        return case.cost.prefill_us(end_token, position(first)) / 1e3

    totals = [compute_ms(0, case.prompt_tokens)]
    for end in range(1, blocks + 1):
        rest_ms = compute_ms(end, case.prompt_tokens)
        if overlap is Overlap.SERIAL:
            totals.append(load_ms(0, end, True) + rest_ms)
        elif overlap is Overlap.LAYERWISE:
            totals.append(max(load_ms(0, end, True), rest_ms))
    if overlap is Overlap.TAIL:
        after_ms = compute_ms(blocks, case.prompt_tokens)
        heads = {0, *accumulate(n for _, n in case.runs)}
        for head in heads:
            for cut in range(head, blocks + 1):
                if head or cut < blocks:
                    beside = max(compute_ms(head, position(cut)), load_ms(cut, blocks, True))
                    totals.append(load_ms(0, head, False) + beside + after_ms)
    return min(totals)


@settings(max_examples=150, deadline=None)
@given(case=CASES, overlap=st.sampled_from(Overlap))
def test_no_other_cut_is_better(case: Case, overlap: Overlap) -> None:
    best_ms = brute_force_ms(case, overlap)
    assert case.plan(overlap).split.total_ms == pytest.approx(best_ms, rel=1e-9)


def test_overlapping_beats_the_sum_on_a_slow_disk() -> None:
    hit = [(0, 20), (1, 100)]
    totals = [
        plan(hit, 512, BLOCK_BYTES, links(50, 3), LLAMA_8B_H100, 70_000, overlap=o).split.total_ms
        for o in (Overlap.SERIAL, Overlap.TAIL, Overlap.LAYERWISE)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] < 0.8 * totals[0]
