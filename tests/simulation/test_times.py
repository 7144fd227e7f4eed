"""The gate on a part of a real trace; `python -m tests.simulation.replays times` has the whole."""

from __future__ import annotations

from kvstore.policy.choice import NAMES, policy_maker
from kvstore.simulate.replay import Replay
from kvstore.simulate.timing import ALWAYS, GATE, SPLIT, Timing
from tests.simulation.replays import ENGINE
from tests.simulation.traces import needs_traces, requests

PART = slice(0, 500)


@needs_traces
def test_the_gate_costs_no_request_anything_and_loading_always_does() -> None:
    trace = requests("mooncake_conversation")[PART]
    for policy in NAMES:
        timing = Timing(ENGINE)
        replay = Replay(policy_maker(policy, 1_000, 10_000), 1_000, 10_000, observe=timing.add)
        figures = replay.serve(trace)
        assert timing.requests == figures.requests == len(trace)
        assert timing.hit_tokens == sum(figures.hit_tokens)
        assert timing.slower[GATE] == timing.slower[SPLIT] == 0
        assert timing.slower[ALWAYS] > 0, "the disk is never slower: nothing was tried"
        assert timing.against_no_cache(GATE) < min(1.0, timing.against_no_cache(ALWAYS))
        assert timing.against_no_cache(SPLIT) < timing.against_no_cache(GATE)
