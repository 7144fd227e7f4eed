"""`python -m tests.simulation.replays WHAT`: the long comparisons, of which tests do a part.

published: RAGPulse, LRU and the optimum at every published capacity, exactly. reference: every
point of the reference table, LRU and hit density by replay, the optimum computed. times: time
against no cache, of every policy. goals: what hit density has to reach, and whether it does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvstore.model.cost import PrefillCost
from kvstore.policy.choice import NAMES, policy_maker
from kvstore.simulate.curve import lru_hit_tokens
from kvstore.simulate.optimum import hit_tokens
from kvstore.simulate.replay import Replay
from kvstore.simulate.timing import GATE, SPLIT, WAYS, TimeModel, Timing
from tests.simulation.traces import published, ragpulse, reference, requests

COLUMNS = {"lru": "lru_tail_first", "hit_density": "hit_density", "optimum": "belady"}

ENGINE = TimeModel("Llama-3.1-8B 1xH100", PrefillCost(20.76, 3.926e-4), 131_072, (50e9, 3e9))
"""bf16; memory at 50 GB/s, an SSD at 3 GB/s: it loses below 58,000 tokens."""
GATED_MAX, SPLIT_MAX = 0.97, 0.90
"""Goals for conversations at 1,000 blocks of memory and 10,000 of disk."""

GOALS = (
    ("mooncake_conversation", (5_859, 0), 17.5, 0.0),
    ("mooncake_conversation", (10_000, 0), 23.0, 0.0),
    ("toolagent_standin", (3_000, 0), 41.5, 0.0),
    ("claude_code_a", (3_000, 0), 60.5, 0.0),
    ("claude_code_a", (6_000, 0), 85.3, 0.0),
    ("mooncake_conversation", (500, 5_000), 16.5, 0.35),
    ("claude_code_a", (1_000, 10_000), 91.5, 1.1),
)
"""Trace, blocks of memory and disk, percent of tokens that hit at least, and writes for each block
computed at most.
"""


def compare_published() -> Iterator[str]:
    """A line for each capacity that differs, and one that counts."""
    curve, trace = published(), ragpulse()
    warm = curve["warmup_requests"]
    longest = max(len(request.ids) for request in trace)
    wide = [row[0] for row in curve["rows"] if row[0] >= longest]
    lru = dict(zip(wide, lru_hit_tokens(trace, wide, warm), strict=True))
    exact = [0, 0]
    for capacity, _, lru_wanted, optimum_wanted in curve["rows"]:
        if capacity not in lru:
            replay = Replay(policy_maker("lru", capacity), capacity, first_counted=warm)
            lru[capacity] = sum(replay.serve(trace).hit_tokens)
        optimum = hit_tokens(trace, capacity, warm)
        exact[0] += lru[capacity] == lru_wanted
        exact[1] += optimum == optimum_wanted
        if (lru[capacity], optimum) != (lru_wanted, optimum_wanted):
            yield f"{capacity}: {lru[capacity]}/{lru_wanted} {optimum}/{optimum_wanted}"
    count = len(curve["rows"])
    yield f"exact of {count} capacities: LRU {exact[0]}, optimum {exact[1]}"


def compare_reference(traces: list[str]) -> Iterator[str]:
    """A line for each point and policy: points (percent of all tokens), ours against theirs."""
    for name, points in reference().items():
        if traces and name not in traces:
            continue
        trace = requests(name)
        total = sum(request.input_tokens for request in trace)
        for capacity, wanted in ((int(text), hits) for text, hits in points.items()):
            for policy, column in COLUMNS.items():
                if policy == "optimum":
                    got = hit_tokens(trace, capacity)
                else:
                    replay = Replay(policy_maker(policy, capacity), capacity)
                    got = sum(replay.serve(trace).hit_tokens)
                ours, theirs = 100 * got / total, 100 * wanted[column] / total
                yield f"{name} {capacity} {policy}: {ours:.2f} {theirs:.2f} {ours - theirs:+.2f}"


def compare_times(traces: list[str]) -> Iterator[str]:
    """A line for each trace and policy: time against no cache, requests slower than computed."""
    for name in traces or ["mooncake_conversation"]:
        for policy in NAMES:
            timing = Timing(ENGINE)
            replay = Replay(policy_maker(policy, 1_000, 10_000), 1_000, 10_000, observe=timing.add)
            replay.serve(requests(name))
            ways = " ".join(
                f"{way} {timing.against_no_cache(way):.3f} ({timing.slower[way]} slower)"
                for way in WAYS
            )
            reached = (
                timing.slower[GATE] == timing.slower[SPLIT] == 0
                and timing.against_no_cache(GATE) <= GATED_MAX
                and timing.against_no_cache(SPLIT) <= SPLIT_MAX
            )
            yield f"{name} {policy}: {ways}: goals {'reached' if reached else 'MISSED'}"


def compare_goals(traces: list[str]) -> Iterator[str]:
    """A line for each goal."""
    for name, size, percent_min, writes_max in GOALS:
        if traces and name not in traces:
            continue
        figures = Replay(policy_maker("hit_density", *size), *size).serve(requests(name))
        percent, writes = 100 * figures.prefix_token_hit_rate, figures.writes_per_computed
        reached = percent >= percent_min and writes <= writes_max
        yield (
            f"{name} {size[0]},{size[1]}: {percent:.2f} % (at least {percent_min}), "
            f"{writes:.3f} writes (at most {writes_max}): {'reached' if reached else 'MISSED'}"
        )


COMPARISONS = {"reference": compare_reference, "times": compare_times, "goals": compare_goals}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("published", *COMPARISONS))
    parser.add_argument(
        "traces", nargs="*", help="of reference, goals (without: all), times (conversation)"
    )
    asked = parser.parse_args()
    if asked.what == "published":
        lines = compare_published()
    else:
        lines = COMPARISONS[asked.what](asked.traces)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
