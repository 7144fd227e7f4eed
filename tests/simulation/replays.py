"""`python -m tests.simulation.replays WHAT`: the long comparisons, of which tests do a part.

published: RAGPulse, LRU and the optimum at every published capacity, exactly. reference: every
point of the reference table, LRU and hit density by replay, the optimum computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvstore.policy.choice import policy_maker
from kvstore.simulate.curve import lru_hit_tokens
from kvstore.simulate.optimum import hit_tokens
from kvstore.simulate.replay import Replay
from tests.simulation.traces import published, ragpulse, reference, requests

COLUMNS = {"lru": "lru_tail_first", "hit_density": "hit_density", "optimum": "belady"}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("published", "reference"))
    parser.add_argument("traces", nargs="*", help="of the reference table; without: all")
    asked = parser.parse_args()
    lines = compare_published() if asked.what == "published" else compare_reference(asked.traces)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
