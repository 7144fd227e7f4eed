"""What the policies' decisions cost the event loop: the core itself, no daemon, no bytes."""

from __future__ import annotations

import statistics
from random import Random

from kvstore.policy.choice import NAMES, policy_maker
from kvstore.simulate.replay import Replay
from kvstore.simulate.trace import Request
from tests.bench.harness import Results, timed

BLOCKS = 20_000
PROMPT_BLOCKS = 100
EVICTED = 1_000
ROUNDS = 15


def measure(results: Results) -> None:
    """Adds, for the slower policy: microseconds a block to evict 1,000 (choosing, forgetting), and
    to use a prompt that is there.
    """
    evict_us: dict[str, float] = {}
    touch_us: dict[str, float] = {}
    for name in NAMES:
        evict_us[name], touch_us[name] = _measure(name)
    for title, values in (
        ("evict_1000_us_per_block", evict_us),
        ("touch_us_per_block", touch_us),
    ):
        note = "worst of " + ", ".join(f"{name} {value:.1f}" for name, value in values.items())
        results.add(title, max(values.values()), "us", ROUNDS, note)


def _measure(name: str) -> tuple[float, float]:
    replay = Replay(policy_maker(name, BLOCKS), BLOCKS)
    replay.serve(_prompts(Random(1)))
    core = replay.core
    (space,) = core.books.spaces
    pool = next(iter(core.books.ingest.pools.values()))
    assert pool.blocks == BLOCKS, "the pool is full"
    now_ns = 10**13
    keys = sorted(space.index, key=lambda key: space.index[key].touched_ns)[-8_192:]
    slots = [space.index[key] for key in keys]
    touched = [timed(lambda: pool.use(slots, now_ns)) / len(slots) for _ in range(ROUNDS)]

    def evict() -> None:
        for _ in range(EVICTED):
            victim = pool.victim()
            assert victim is not None
            core._moves.evict(victim, now_ns)

    evicted = [timed(evict) / EVICTED for _ in range(ROUNDS)]
    return statistics.median(evicted) * 1e6, statistics.median(touched) * 1e6


def _prompts(random: Random) -> list[Request]:
    """Prompts of many lengths, some asked for several times: every class has blocks."""
    made: list[Request] = []
    for number in range(4 * BLOCKS // PROMPT_BLOCKS):
        ids = list(range(number * 10**4, number * 10**4 + random.randint(1, 2 * PROMPT_BLOCKS)))
        if made and random.random() < 0.4:
            ids = list(random.choice(made[-50:]).ids)
        made.append(Request(number * 10**9, 512 * len(ids), ids, [512] * len(ids)))
    return made
