"""What the policies' decisions cost the event loop: the core itself, no daemon, no bytes."""

from __future__ import annotations

import statistics
from random import Random

from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Overlap, Plan
from kvstore.policy.choice import NAMES, policy_maker
from kvstore.policy.links import Link
from kvstore.policy.plan import plan, runs_of
from kvstore.simulate.replay import Replay
from kvstore.simulate.trace import Request
from tests.bench.harness import Results, timed

BLOCKS = 20_000
PROMPT_BLOCKS = 100
EVICTED = 1_000
ROUNDS = 15
KEYS = 8_192


def measure(results: Results) -> None:
    """Adds, for the slower policy: microseconds a block to evict 1,000 (choosing, forgetting), and
    to use a prompt that is there; and what it takes to weigh a prompt of 8,192 blocks, in one tier
    and scattered over two block by block.
    """
    _measure_plans(results)
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


def _measure_plans(results: Results) -> None:
    memory = Link("host", bytes_per_second=4e9, latency_ns=5e5)
    links = [memory, Link("disk", bytes_per_second=1e9, latency_ns=1e6, then=memory)]
    cost = PrefillCost(20.76, 3.926e-4)
    for title, codes in (
        ("plan_8192_blocks_ms", bytes([1]) * KEYS),
        ("plan_8192_scattered_blocks_ms", bytes([1, 2]) * (KEYS // 2)),
    ):
        took_ms = {}
        for overlap in Overlap:

            def weigh(codes: bytes = codes, overlap: Overlap = overlap) -> Plan:
                return plan(runs_of(codes), 16, 4096, links, cost, 16 * KEYS, overlap=overlap)

            assert weigh().load_blocks
            took_ms[overlap.value] = statistics.median(timed(weigh) for _ in range(ROUNDS)) * 1e3
        note = "worst of " + ", ".join(f"{name} {value:.2f}" for name, value in took_ms.items())
        results.add(title, max(took_ms.values()), "ms", ROUNDS, note)


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
