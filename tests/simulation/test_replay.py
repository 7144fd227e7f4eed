"""The replay against what others have published, and the LRU curve against the replay."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvstore.mover import SAVES_MAX
from kvstore.policy.choice import NAMES, policy_maker
from kvstore.simulate.archive import SimulatedArchive
from kvstore.simulate.curve import lru_hit_tokens
from kvstore.simulate.optimum import hit_tokens
from kvstore.simulate.replay import Replay
from kvstore.simulate.trace import BLOCK_TOKENS, Request
from tests.simulation.traces import needs_traces, published, ragpulse, reference, requests

PART = slice(0, 300)
"""Requests of a trace that the fast suite replays."""


def chats(seed: int, count: int = 150) -> list[Request]:
    """Conversations that grow and come back, on a few shared prompts."""
    random = Random(seed)
    grown: list[list[int]] = []
    fresh = iter(range(10**6))
    made = []
    for number in range(count):
        if not grown or random.random() < 0.4:
            grown.append([-(1 + random.randrange(3))])
        ids = random.choice(grown[-20:])
        ids += [next(fresh) for _ in range(random.randint(1, 4))]
        named = [10**7 - one if one < 0 else one for one in ids[:12]]
        made.append(Request(number * 10**9, 512 * len(named), named, [512] * len(named)))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [12, 25, 60, 200])
def test_the_curve_is_the_replay(seed: int, capacity: int) -> None:
    trace = chats(seed)
    replay = Replay(policy_maker("lru", capacity), capacity, first_counted=50)
    hits = sum(replay.serve(trace).hit_tokens)
    assert lru_hit_tokens(trace, [capacity], 50) == [hits]
    replay.core.check()


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("disk", [0, 80])
def test_nothing_beats_the_optimum_and_the_core_stays_sound(policy: str, disk: int) -> None:
    for seed in range(2):
        trace = chats(seed)
        replay = Replay(policy_maker(policy, 20, disk), 20, disk)
        for start in range(0, len(trace), 50):
            figures = replay.serve(trace[start : start + 50])
            replay.core.check()
        assert 0 < sum(figures.hit_tokens) <= hit_tokens(trace, 20 + disk)
        assert figures.computed + sum(figures.hit_blocks) == figures.blocks
        assert bool(figures.hit_tokens[1]) == bool(disk)
        assert figures.disk_reads <= figures.blocks
        if replay.archive is not None:
            assert len(replay.archive) <= disk


@pytest.mark.parametrize("policy", NAMES)
def test_what_is_left_of_a_prompt_is_its_beginning(policy: str) -> None:
    for seed in range(3):
        trace = chats(seed)
        replay = Replay(policy_maker(policy, 40), 40)
        parents = {
            replay._key(one): replay._key(above)
            for request in trace
            for above, one in zip(request.ids, request.ids[1:], strict=False)
        }
        for request in trace:
            replay.serve([request])
            (space,) = replay.core.books.spaces
            assert all(parents.get(key, key) in space.index for key in space.index)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("blocks", [100, 161])
def test_a_prompt_longer_than_memory_comes_back_unless_it_takes_a_quarter_of_the_disk(
    policy: str, blocks: int
) -> None:
    memory, disk = 64, 640
    tokens = [BLOCK_TOKENS] * blocks
    hits: list[int] = []
    replay = Replay(
        policy_maker(policy, memory, disk),
        memory,
        disk,
        observe=lambda _, got: hits.append(len(got)),
    )
    replay.serve(Request(at * 10**9, sum(tokens), range(blocks), tokens) for at in range(4))
    assert hits == [0, *([blocks if blocks <= disk // 4 else memory] * 3)]
    replay.core.check()


@needs_traces
@pytest.mark.parametrize("row", [0, 60])
def test_published_integers(row: int) -> None:
    curve, trace = published(), ragpulse()
    capacity, _, lru, optimum = curve["rows"][row]
    warm = curve["warmup_requests"]
    assert hit_tokens(trace, capacity, warm) == optimum
    if row:
        assert lru_hit_tokens(trace, [capacity], warm) == [lru]


@needs_traces
def test_published_lru_integers_at_every_capacity_from_the_longest_prompt_on() -> None:
    curve = published()
    rows = [row for row in curve["rows"] if row[0] >= 20]
    assert len(rows) == 200
    got = lru_hit_tokens(ragpulse(), [row[0] for row in rows], curve["warmup_requests"])
    assert got == [row[2] for row in rows]


@needs_traces
def test_reference_points() -> None:
    trace = requests("mooncake_conversation")
    points = reference()["mooncake_conversation"]
    capacities = [int(text) for text in points]
    got = lru_hit_tokens(trace, capacities)
    assert got == [points[str(one)]["lru_tail_first"] for one in capacities]
    assert hit_tokens(trace, 5_859) == points["5859"]["belady"]


@needs_traces
def test_the_replay_of_a_part_is_the_curve() -> None:
    trace = requests("mooncake_conversation")[PART]
    hits = {
        policy: sum(Replay(policy_maker(policy, 1_000), 1_000).serve(trace).hit_tokens)
        for policy in NAMES
    }
    assert [hits["lru"]] == lru_hit_tokens(trace, [1_000])
    assert hits["hit_density"] >= hits["lru"]


class Batches(SimulatedArchive):
    """Remembers how many blocks each batch of saves had."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.sizes: list[int] = []

    def save(self, blocks: Sequence[tuple[bytes, bytes, int]]) -> list[bytes]:
        self.sizes.append(len(blocks))
        return super().save(blocks)


def test_a_burst_of_saves_goes_to_disk_in_the_batches_of_a_mover() -> None:
    """In one batch the disk would make room for all of it at once, and age out other blocks."""
    memory = 6 * SAVES_MAX
    archive = Batches(2 * memory)
    replay = Replay(policy_maker("lru", memory, 2 * memory), memory, archive=archive)
    ids = range(memory - SAVES_MAX // 4)
    tokens = [BLOCK_TOKENS] * len(ids)
    figures = replay.serve([Request(0, sum(tokens), ids, tokens), Request(1, 16, [memory], [16])])
    assert figures.disk_writes == sum(archive.sizes) > SAVES_MAX
    assert max(archive.sizes) == SAVES_MAX
