"""What `kvstore bench` measures: put, get and lookup through the SDK, against a plain memory copy.

The copy is the machine's own bound: a get cannot be faster, and "1.3 copies" says more than a rate
in GB/s that another machine does not reach. The space and the clock are arguments. Times are
medians, so that one stall does not speak for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.model.reasons import Reason


class Stored(Protocol):
    """Of a push."""

    @property
    def stored(self) -> int: ...
    @property
    def reason(self) -> Reason: ...


class Found(Protocol):
    """Of a lookup or a fetch."""

    @property
    def blocks(self) -> int: ...
    @property
    def reason(self) -> Reason: ...


class Space(Protocol):
    """As much of the SDK's space as is measured."""

    def keys(self, tokens: Sequence[int]) -> Sequence[bytes]: ...
    def push(self, keys: Sequence[bytes], data: NDArray[np.uint8], /) -> Stored: ...
    def lookup(self, keys: Sequence[bytes], /) -> Found: ...
    def fetch(self, keys: Sequence[bytes], out: NDArray[np.uint8], /) -> Found: ...


class Refused(Exception):
    """The store did not do what was asked; the text says why."""


@dataclass(frozen=True)
class Result:
    """Medians over the rounds."""

    blocks: int
    block_bytes: int
    copy_s: float
    put_s: float
    get_s: float
    lookup_s: float

    @property
    def total_bytes(self) -> int:
        return self.blocks * self.block_bytes


def measure(
    space: Space,
    *,
    blocks: int,
    block_tokens: int,
    block_bytes: int,
    rounds: int,
    now_ns: Callable[[], int],
    seed: int = 0,
) -> Iterator[Result | None]:
    """Yields None after each step (`steps_of` counts them), at last the result.

    Every round puts a prompt of its own and gets it back, comparing every byte. Raises Refused.
    """
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (blocks, block_bytes), np.uint8)
    out = np.empty_like(data)
    out[:] = 0  # first touch is not part of any copy

    def timed(act: Callable[[], object]) -> float:
        begin_ns = now_ns()
        act()
        return (now_ns() - begin_ns) / 1e9

    copies: list[float] = []
    for _ in range(rounds):
        copies.append(timed(lambda: np.copyto(out, data)))
        yield None
    puts: list[float] = []
    gets: list[float] = []
    lookups: list[float] = []
    for _ in range(rounds):
        keys = space.keys(rng.integers(0, 1 << 17, blocks * block_tokens).tolist())
        puts.append(timed(lambda keys=keys: _put(space, keys, data)))  # type: ignore[misc]
        yield None
        lookups.append(timed(lambda keys=keys: _look(space, keys)))  # type: ignore[misc]
        out[:] = 0
        gets.append(timed(lambda keys=keys: _get(space, keys, out)))  # type: ignore[misc]
        if not np.array_equal(out, data):
            raise Refused("the bytes that came back are not those that were stored")
        yield None
    median = statistics.median
    yield Result(blocks, block_bytes, median(copies), median(puts), median(gets), median(lookups))


def steps_of(rounds: int) -> int:
    """How many steps `measure` has."""
    return 3 * rounds


def _put(space: Space, keys: Sequence[bytes], data: NDArray[np.uint8]) -> None:
    pushed = space.push(keys, data)
    if pushed.stored != len(keys):
        raise Refused(_why("put", pushed.stored, len(keys), pushed.reason))


def _look(space: Space, keys: Sequence[bytes]) -> None:
    hit = space.lookup(keys)
    if hit.blocks != len(keys):
        raise Refused(_why("found", hit.blocks, len(keys), hit.reason))


def _get(space: Space, keys: Sequence[bytes], out: NDArray[np.uint8]) -> None:
    fetched = space.fetch(keys, out)
    if fetched.blocks != len(keys):
        raise Refused(_why("got", fetched.blocks, len(keys), fetched.reason))


def _why(verb: str, done: int, asked: int, reason: Reason) -> str:
    return f"{verb} {done} of {asked} blocks: {reason.name}: {reason.text}"
