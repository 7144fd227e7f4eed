"""Exact LRU, tail first: the core against a model of a few lines, eviction by eviction."""

from __future__ import annotations

from random import Random

import pytest

from tests.unit.core.harness import Bench, keys

SLOTS = 32
PROMPTS = 12


class Model:
    """A list, coldest first."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.order: list[bytes] = []

    def touch(self, chain: list[bytes]) -> None:
        """What there is of a prompt becomes the warmest, its head warmest of all."""
        for key in reversed(chain):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def put(self, chain: list[bytes], window: int) -> None:
        """Stores what is missing of a prompt, some blocks at a time, for what is coldest."""
        while missing := [key for key in chain if key not in self.order][:window]:
            self.touch(chain)
            room = self.slots - len(self.order)
            victims = [key for key in self.order if key not in chain][: max(len(missing) - room, 0)]
            stored = missing[: room + len(victims)]
            if not stored:
                return
            self.order = [key for key in self.order if key not in victims] + stored
            self.touch(chain)
        self.touch(chain)


@pytest.mark.parametrize("seed", range(12))
def test_the_core_evicts_what_the_model_evicts(seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    bench = Bench(slots=SLOTS)
    model = Model(SLOTS)
    session = bench.session()
    space = bench.space(session)
    prompts = [keys(4, f"shared {i // 3}") + keys(12, f"own {i}") for i in range(PROMPTS)]
    for _ in range(150):
        chain = random.choice(prompts)[: random.randint(1, 16)]
        if random.random() < 0.6:
            bench.put(session, space, chain)
            model.put(chain, bench.window)
        else:
            bench.use(session, space, chain)
            model.touch(chain)
        everything = [key for prompt in prompts for key in prompt]
        there = {
            key
            for key, has in zip(everything, bench.have(session, space, everything), strict=True)
            if has
        }
        assert there == set(model.order)
