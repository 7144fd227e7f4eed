"""Many runs of one trace: every policy at every capacity, and the optimum for each capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.policy.choice import policy_maker
from kvstore.simulate.optimum import hit_tokens
from kvstore.simulate.replay import Figures, Replay
from kvstore.simulate.timing import TimeModel, Timing
from kvstore.simulate.trace import Request

OPTIMUM = "optimum"
CHUNK = 64
"""Requests between two steps of progress."""


class Size(NamedTuple):
    """Blocks of memory, and of disk below it: 0 is none."""

    memory_blocks: int
    disk_blocks: int

    def __str__(self) -> str:
        return f"{self.memory_blocks}" + (f",{self.disk_blocks}" if self.disk_blocks else "")


class Row(NamedTuple):
    """One run. optimum_hit_rate: fraction, of one pool as large as memory and disk together.
    timing: where a time model was given.
    """

    trace: str
    policy: str
    size: Size
    figures: Figures
    optimum_hit_rate: float
    timing: Timing | None = None

    def as_fields(self) -> dict[str, Any]:
        """As JSON has it; rates are fractions of all prompt tokens."""
        figures = self.figures
        tokens = max(figures.input_tokens, 1)
        host, disk = figures.hit_tokens
        return {
            "trace": self.trace,
            "policy": self.policy,
            "capacity_blocks": self.size.memory_blocks,
            "disk_capacity_blocks": self.size.disk_blocks,
            "requests": figures.requests,
            "blocks": figures.blocks,
            "input_tokens": figures.input_tokens,
            "hit_tokens": host + disk,
            "prefix_token_hit_rate": figures.prefix_token_hit_rate,
            "memory_hit_rate": host / tokens,
            "disk_hit_rate": disk / tokens,
            "memory_hit_blocks": figures.hit_blocks[0],
            "disk_hit_blocks": figures.hit_blocks[1],
            "computed_blocks": figures.computed,
            "evictions": figures.evictions,
            "disk_block_writes": figures.disk_writes,
            "disk_block_reads": figures.disk_reads,
            "disk_writes_per_computed_block": figures.writes_per_computed,
            "disk_writes_per_disk_hit": figures.writes_per_hit,
            "optimum_prefix_token_hit_rate": self.optimum_hit_rate,
            **({} if self.timing is None else {"time": self.timing.as_fields()}),
        }


def run_all(
    trace: str,
    requests: Sequence[Request],
    policies: Sequence[str],
    sizes: Sequence[Size],
    *,
    first_counted: int = 0,
    time_model: TimeModel | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Iterator[Row]:
    """Every run, one after the other. progress: told what is at work, and of requests served."""
    told = progress or _tell_nobody
    for size in sizes:
        ceiling = _optimum(requests, sum(size), first_counted, told)
        for policy in policies:
            maker = policy_maker(policy, *size)
            timing = None if time_model is None else Timing(time_model)
            observe = None if timing is None else timing.add
            replay = Replay(maker, *size, first_counted=first_counted, observe=observe)
            for start in range(0, len(requests), CHUNK):
                chunk = requests[start : start + CHUNK]
                replay.serve(chunk)
                told(f"{trace} {policy} {size}", len(chunk))
            figures = replay.figures
            share = ceiling / figures.input_tokens if figures.input_tokens else 0.0
            yield Row(trace, policy, size, figures, share, timing)


def steps_of(requests: int, policies: int, sizes: int) -> int:
    """Requests that `run_all` serves in all."""
    return requests * (policies + 1) * sizes


def _optimum(
    requests: Sequence[Request],
    blocks: int,
    first_counted: int,
    told: Callable[[str, int], None],
) -> int:
    return hit_tokens(
        requests, blocks, first_counted, lambda number: told(f"{OPTIMUM} of {blocks}", 1)
    )


def _tell_nobody(what: str, steps: int) -> None:
    pass
