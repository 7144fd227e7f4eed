"""Copies of 1 MiB blocks and lookups, against memcpy and Redis in the same process and run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Overlap
from kvstore.model.reasons import Reason
from kvstore_client import BlockKey, Client, ClientConfig, Space
from tests.bench.bare_grpc import BareGrpc
from tests.bench.harness import Results, compare, timed
from tests.bench.models import MIB_BLOCKS, PAGE_BLOCKS
from tests.bench.redis_server import RedisServer, find_redis

MIB = 1 << 20
STORED = 512
"""1 MiB blocks in the store: beyond the caches that one guest may hold for itself."""
ROUNDS = 24
LOOKUP_KEYS = 8192
LOOKUP_ROUNDS = 60
COST = PrefillCost(20.76, 3.926e-4)
"""Llama-3.1-8B on an H100."""

Blocks = NDArray[np.uint8]


@dataclass
class Setup:
    """A filled store beside a local buffer of the same size for the memcpy baseline."""

    target: str
    space: Space
    keys: list[BlockKey]
    local: Blocks
    out: Blocks

    def window(self, number: int, count: int) -> tuple[list[BlockKey], int]:
        """Another run of `count` blocks each round, so that none is warm from the last one."""
        start = (number * count) % max(1, STORED - count + 1)
        return self.keys[start : start + count], start

    def memcpy(self, count: int, number: int) -> float:
        """Copies as many local blocks into the same destination, one memcpy a block, one thread."""
        _, start = self.window(number, count)

        def copy() -> None:
            for row in range(count):
                np.copyto(self.out[row], self.local[start + row])

        return timed(copy)


@contextmanager
def filled(target: str) -> Iterator[Setup]:
    rng = np.random.default_rng(7)
    with Client(target, config=ClientConfig(deadline_ms=30_000)) as client:
        space = client.space(MIB_BLOCKS)
        keys = space.keys(rng.integers(0, 2**31, STORED * 16, dtype=np.uint32))
        local = rng.integers(0, 256, (STORED, MIB), dtype=np.uint8)
        pushed = space.push(keys, local)
        assert pushed.stored == STORED, pushed
        out = np.zeros((STORED, MIB), np.uint8)  # zeros are lazily mapped: touch each page
        out.fill(1)
        yield Setup(target, space, keys, local, out)


def measure_reads(setup: Setup, results: Results) -> None:
    for count, name in ((64, "get_64_blocks_over_memcpy"), (500, "get_500_blocks_over_memcpy")):
        ratio = compare(
            partial(fetch, setup, setup.space, count), partial(setup.memcpy, count), ROUNDS
        )
        results.add_ratio(name, ratio)
    ratio = compare(partial(views, setup, 64), partial(setup.memcpy, 64), ROUNDS)
    results.add_ratio("views_64_blocks_over_memcpy", ratio)


def measure_puts(setup: Setup, results: Results) -> None:
    rng = np.random.default_rng(11)
    ratio = compare(
        lambda n: push(setup, rng.integers(0, 2**31, 64 * 16, dtype=np.uint32), n),
        partial(setup.memcpy, 64),
        ROUNDS,
    )
    results.add_ratio("put_64_blocks_over_memcpy", ratio, "to committed and visible")


def measure_stream(setup: Setup, results: Results, folder: Path) -> None:
    config = ClientConfig(transport="stream", deadline_ms=30_000)
    with Client(setup.target, config=config) as client:
        space = client.space(MIB_BLOCKS)
        ratio = compare(partial(fetch, setup, space, 64), partial(setup.memcpy, 64), ROUNDS)
    results.add_ratio("fetch_stream_64_blocks_over_memcpy", ratio)
    with BareGrpc(folder) as bare:
        ratio = compare(
            lambda n: timed(lambda: bare.into(setup.out[:64])),
            partial(setup.memcpy, 64),
            ROUNDS,
        )
    about = "gRPC alone, from a server that does nothing else"
    results.add_ratio("bare_grpc_stream_64_blocks_over_memcpy", ratio, about)


def measure_redis(setup: Setup, results: Results, folder: Path) -> None:
    name = "get_64_blocks_over_redis_mget"
    server = find_redis()
    if server is None:
        results.add(
            name, None, "ratio", 0, "redis-server is not installed: apt-get install redis-server"
        )
        return
    with RedisServer(server, folder) as redis:
        for key, block in zip(setup.keys, setup.local, strict=True):
            redis.client.set(key, block.data)

        def mget(number: int) -> float:
            keys, _ = setup.window(number, 64)

            def run() -> None:
                for row, value in enumerate(redis.client.mget(keys)):
                    assert isinstance(value, bytes)
                    np.copyto(setup.out[row], np.frombuffer(value, np.uint8))

            return timed(run)

        version = redis.version
        ratio = compare(mget, partial(fetch, setup, setup.space, 64), ROUNDS)
    results.add_ratio(name, ratio, f"{version}; times faster")


def measure_lookup(target: str, results: Results) -> None:
    rng = np.random.default_rng(13)
    with Client(target, config=ClientConfig(deadline_ms=30_000)) as client:
        space = client.space(PAGE_BLOCKS)
        held = space.keys(rng.integers(0, 2**31, LOOKUP_KEYS * 16, dtype=np.uint32))
        data = rng.integers(0, 256, (LOOKUP_KEYS, 4096), dtype=np.uint8)
        pushed = space.push(held, data)
        assert pushed.stored == LOOKUP_KEYS, pushed
        absent = space.keys(rng.integers(0, 2**31, LOOKUP_KEYS * 16, dtype=np.uint32))
        half = held[: LOOKUP_KEYS // 2] + absent[LOOKUP_KEYS // 2 :]
        p50_ms: dict[str, float] = {}
        for case, keys, blocks in (
            ("all hit", held, LOOKUP_KEYS),
            ("half hit", half, LOOKUP_KEYS // 2),
            ("first absent", absent, 0),
        ):
            lookup = partial(space.lookup, keys)
            samples = [timed(lookup) * 1e3 for _ in range(LOOKUP_ROUNDS)]
            assert space.lookup(keys).blocks == blocks, case
            p50_ms[case] = statistics.median(samples)
        planned = {}
        for overlap in Overlap:
            lookup = partial(space.lookup, held, prefill=COST, overlap=overlap)
            assert lookup().plan.reason is Reason.OK, overlap
            samples = [timed(lookup) * 1e3 for _ in range(LOOKUP_ROUNDS)]
            planned[overlap.value] = statistics.median(samples)
    note = "worst of " + ", ".join(f"{case} {value:.2f}" for case, value in p50_ms.items())
    results.add("lookup_8192_keys_p50_ms", max(p50_ms.values()), "ms", LOOKUP_ROUNDS, note)
    note = "all hit, weighed against computing; worst of " + ", ".join(
        f"{name} {value:.2f}" for name, value in planned.items()
    )
    name = "lookup_8192_keys_with_plan_p50_ms"
    results.add(name, max(planned.values()), "ms", LOOKUP_ROUNDS, note)


def fetch(setup: Setup, space: Space, count: int, number: int) -> float:
    keys, start = setup.window(number, count)
    out = setup.out[:count]
    took = timed(lambda: _fetched(space.fetch(keys, out).blocks, count))
    assert np.array_equal(out[count - 1, :64], setup.local[start + count - 1, :64])
    return took


def views(setup: Setup, count: int, number: int) -> float:
    keys, _ = setup.window(number, count)

    def run() -> None:
        with setup.space.view(keys) as held:
            _fetched(held.blocks, count)

    return timed(run)


def push(setup: Setup, tokens: NDArray[np.uint32], number: int) -> float:
    keys = setup.space.keys(tokens)
    _, start = setup.window(number, 64)
    data = setup.local[start : start + 64]

    def run() -> None:
        pushed = setup.space.push(keys, data)
        _fetched(pushed.stored, 64)

    return timed(run)


def _fetched(got: int, wanted: int) -> None:
    if got != wanted:
        raise RuntimeError(f"{got} of {wanted} blocks: the figure would be of something else")
