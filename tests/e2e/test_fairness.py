"""Two tenants of a real daemon, and one of them asks ten times as much: the other's hit rate falls
by a twentieth of itself at most. `python -m tests.simulation.fairness` tries more of it, faster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, model

pytestmark = [pytest.mark.process, pytest.mark.slow]

BLOCK = 16 << 10
MODEL = model(BLOCK)
BLOCKS = 8
CONFIG = ClientConfig(deadline_ms=20_000)
OWN = 6
"""Prompts that the first tenant comes back to: three quarters of its quota. With what is new they
take more than that, of which half of all memory is the first tenant's however much another asks.
"""
REQUESTS = 60
WARM = 20
LOSS_MAX = 0.05
NEW_SHARE = 0.25


def asked(tenant: str, seed: int, *, again: bool) -> Iterator[Prompt]:
    """What a tenant's engine asks for: mostly what it comes back to, or only what is new."""
    rng, new = random.Random(seed), 10_000 * seed
    while True:
        new += 1
        chosen = rng.randrange(OWN) if again and rng.random() > NEW_SHARE else new
        yield Prompt(MODEL, chosen, BLOCKS, tenant=tenant)


def serve(space: Any, prompt: Prompt) -> int:
    """Fetches what is there and stores the rest; the leading blocks that were there."""
    got = space.fetch(prompt.keys)
    shorter = Prompt(prompt.fingerprint, 0, 0, tenant=prompt.tenant)
    shorter.keys = prompt.keys[: got.blocks]
    shorter.assert_right(list(got.data[: got.blocks]))
    if got.blocks < len(prompt.keys):
        space.push(prompt.keys, np.stack(prompt.rows()))
    return int(got.blocks)


def hit_rate(daemon: Daemon, flood: int) -> float:
    """Of the first tenant, with so many requests of the other beside each of its own."""
    sockets = daemon.data_sockets
    found = 0
    with (
        Client(sockets["a"], config=CONFIG) as own_client,
        Client(sockets["b"], config=CONFIG) as other_client,
    ):
        own, other = own_client.space(MODEL), other_client.space(MODEL)
        own_prompts, others = asked("a", 1, again=True), asked("b", 2, again=False)
        for number in range(REQUESTS):
            for _ in range(flood):
                serve(other, next(others))
            hits = serve(own, next(own_prompts))
            found += hits if number >= WARM else 0
    return found / ((REQUESTS - WARM) * BLOCKS)


@pytest.mark.parametrize(
    ("policy", "disk"),
    [("lru", False), ("hit_density", False), ("hit_density", True)],
    ids=["lru-host", "hit_density-host", "hit_density-disk"],
)
def test_a_flood_costs_another_tenant_a_twentieth_of_its_hits_at_most(
    tmp_path: Path, daemons: Callable[..., Daemon], disk: bool, policy: str
) -> None:
    rates = []
    for flood in (1, 10):
        folder = tmp_path / f"x{flood}"
        folder.mkdir()
        on_disk = {"disk__path": str(folder / "disk"), "disk__capacity_bytes": "16MiB"}
        daemon = daemons(
            folder=folder,
            host__capacity_bytes="3MiB",
            host__staging_bytes="256KiB",
            policy__eviction=policy,
            tenants__a__quota_bytes="1MiB",
            tenants__b__quota_bytes="1MiB",
            **(on_disk if disk else {}),
        )
        rates.append(hit_rate(daemon, flood))
        assert daemon.stop() == 0
    alike, flooded = rates
    print(f"{policy} {'disk' if disk else 'host'}: {alike:.1%} beside an equal, {flooded:.1%}")
    assert alike > 0.5, "there is something to lose"
    assert flooded >= (1 - LOSS_MAX) * alike
