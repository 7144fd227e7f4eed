"""Two tenants of a real daemon, and one of them asks ten times as much: the other's hit rate falls
by a twentieth of itself at most. `python -m tests.simulation.fairness` tries more of it, faster.

The daemon's clock is the test's, and what it moves is awaited: the figures are the same each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvstore.simulate.trace import Request
from tests.simulation.same_hits import Clock, Driver, clocked_daemon

pytestmark = [pytest.mark.process, pytest.mark.slow]

BLOCKS = 8
OWN = 6
"""Prompts that the first tenant comes back to: three quarters of its quota. With what is new they
take more than that, of which half of all memory is the first tenant's however much another asks.
"""
REQUESTS = 45
WARM = 10
"""Of the first tenant, before hits are counted: it is not at its quota yet."""
ROUND_NS = 5 * 10**9
"""Between two requests of the first tenant: longer than a region may be left alone."""
LOSS_MAX = 0.05
NEW_SHARE = 0.25


def asked(seed: int, *, again: bool) -> Iterator[list[int]]:
    """What a tenant's engine asks for, as ids of blocks: mostly what it comes back to, or only what
    is new.
    """
    rng, new = random.Random(seed), OWN
    while True:
        chosen = rng.randrange(OWN) if again and rng.random() > NEW_SHARE else new
        new += 1
        first = (seed << 32) + chosen * BLOCKS
        yield list(range(first, first + BLOCKS))


def hit_rate(folder: Path, policy: str, flood: int, disk_bytes: int) -> float:
    """Of the first tenant, with so many requests of the other beside each of its own."""
    disk = {"disk__path": str(folder / "disk"), "disk__capacity_bytes": disk_bytes}
    daemon = clocked_daemon(
        folder,
        host__capacity_bytes="768KiB",
        host__staging_bytes="64KiB",
        policy__eviction=policy,
        tenants__a__quota_bytes="256KiB",
        tenants__b__quota_bytes="256KiB",
        **(disk if disk_bytes else {}),
    )
    own, others = asked(1, again=True), asked(2, again=False)
    now_ns = found = 0
    with daemon.start(), ExitStack() as open_ones:
        clock = open_ones.enter_context(closing(Clock(folder / "clock")))
        one, other = (
            open_ones.enter_context(closing(Driver(daemon.data_sockets[tenant], clock)))
            for tenant in "ab"
        )
        for number in range(REQUESTS):
            for driver, prompts in (*[(other, others)] * flood, (one, own)):
                now_ns += ROUND_NS // (flood + 1)
                hits = driver.serve(Request(now_ns, 0, next(prompts), []))
            found += len(hits) if number >= WARM else 0
        open_ones.close()
        assert daemon.stop() == 0, daemon.log()
    return found / ((REQUESTS - WARM) * BLOCKS)


@pytest.mark.parametrize(
    ("policy", "disk_bytes"),
    [("lru", 0), ("hit_density", 0), ("hit_density", 6 << 20)],
    ids=["lru-host", "hit_density-host", "hit_density-disk"],
)
def test_a_flood_costs_another_tenant_a_twentieth_of_its_hits_at_most(
    tmp_path: Path, policy: str, disk_bytes: int
) -> None:
    rates = []
    for flood in (1, 10):
        folder = tmp_path / f"x{flood}"
        folder.mkdir()
        rates.append(hit_rate(folder, policy, flood, disk_bytes))
    alike, flooded = rates
    print(f"{policy}, {disk_bytes} on disk: {alike:.1%} beside an equal, {flooded:.1%}")
    assert alike > 0.5, "there is something to lose"
    assert flooded >= (1 - LOSS_MAX) * alike
