"""`kvstore bench` without a daemon: what is measured, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.cli.bench import as_fields, bench_fingerprint, bytes_of
from kvstore.cli.measure import Refused, Result, measure, steps_of
from kvstore.model.reasons import Reason


@dataclass
class Answer:
    stored: int = 0
    blocks: int = 0
    reason: Reason = Reason.OK


@dataclass
class FakeSpace:
    """Keeps blocks in a dictionary; `lose` and `spoil` break it."""

    held: dict[bytes, NDArray[np.uint8]] = field(default_factory=dict)
    lose: int = 0
    spoil: bool = False
    full: bool = False

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        return [bytes(np.asarray(tokens[n : n + 16], "<u4")) for n in range(0, len(tokens), 16)]

    def push(self, keys: Sequence[bytes], data: NDArray[np.uint8], /) -> Answer:
        if self.full:
            return Answer(stored=len(keys) - 1, reason=Reason.NO_SPACE)
        self.held.update(zip(keys, data.copy(), strict=True))
        return Answer(stored=len(keys))

    def lookup(self, keys: Sequence[bytes], /) -> Answer:
        return Answer(blocks=len(keys) - self.lose, reason=Reason.MISS_EVICTED)

    def fetch(self, keys: Sequence[bytes], out: NDArray[np.uint8], /) -> Answer:
        for at, key in enumerate(keys):
            out[at] = self.held[key]
        if self.spoil:
            out[0, 0] ^= 1
        return Answer(blocks=len(keys))


def measured(space: FakeSpace, rounds: int = 3) -> tuple[int, Result | None]:
    ticks = itertools.count(0, 1_000_000)
    steps = list(
        measure(
            space, blocks=4, block_tokens=16, block_bytes=4_096, rounds=rounds,
            now_ns=lambda: next(ticks),
        )
    )  # fmt: skip
    return len(steps) - 1, steps[-1]


def test_every_round_is_a_prompt_of_its_own() -> None:
    space = FakeSpace()
    steps, result = measured(space)
    assert steps == steps_of(3)
    assert len(space.held) == 3 * 4
    assert result == Result(4, 4_096, 1e-3, 1e-3, 1e-3, 1e-3)
    fields = as_fields(result)
    assert fields["get_over_copy"] == 1.0
    assert fields["put_bytes_per_second"] == pytest.approx(4 * 4_096 / 1e-3)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (FakeSpace(full=True), "put 3 of 4 blocks: NO_SPACE"),
        (FakeSpace(lose=1), "found 3 of 4 blocks: MISS_EVICTED"),
        (FakeSpace(spoil=True), "not those that were stored"),
    ],
)
def test_a_store_that_does_not_do_it_is_told(space: FakeSpace, says: str) -> None:
    with pytest.raises(Refused, match=says):
        measured(space)


@pytest.mark.parametrize("kib", [1, 16, 64, 1_024, 1_500, 262_144])
def test_the_fingerprint_has_blocks_of_that_size(kib: int) -> None:
    first, second = bench_fingerprint(kib << 10), bench_fingerprint(kib << 10)
    assert kib << 10 <= bytes_of(first) < 2 * max(kib << 10, 2_048)
    assert first.missing() == ()
    assert first.identity.model_name != second.identity.model_name
