"""The core under random clients, faults and operators; a failure prints the seed."""

from __future__ import annotations

import pytest

from kvstore.testing.workload import Simulation

FAST_SEEDS = 40
FAST_STEPS = 250


def simulate(seed: int, steps: int) -> Simulation:
    print(f"seed {seed}")
    simulation = Simulation(seed)
    simulation.run(steps)
    simulation.recover()
    return simulation


@pytest.mark.parametrize("seed", range(FAST_SEEDS))
def test_seed(seed: int) -> None:
    simulate(seed, FAST_STEPS)
