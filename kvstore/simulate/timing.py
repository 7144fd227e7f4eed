"""What a replay's hits are worth in time: prefill plus load, against computing every prompt whole.

The decision is the daemon's own (`kvstore.policy.plan`), for each request as it comes. Three ways:
`always` loads every hit and computes the rest; `gate` loads what is predicted to be faster loaded
(`Overlap.SERIAL`); `split` computes the head of what is slow to load while its tail loads
(`Overlap.TAIL`). Prefill takes `a (n - p) + b (n^2 - p^2)`, a load bytes / bandwidth of its tier:
one request at a time, no queues, no fixed latency, as in the study that the reference figures are
of. What memory and disk hold does not depend on the way: what is not loaded is computed and put,
and so is in memory afterwards as well. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Overlap
from kvstore.policy.links import Link
from kvstore.policy.plan import plan
from kvstore.simulate.trace import Request

ALWAYS, GATE, SPLIT = "always", "gate", "split"
WAYS = (ALWAYS, GATE, SPLIT)
ROUNDING = 1e-9
"""Relative: sums of floats in another order are not slower."""


class TimeModel(NamedTuple):
    """An engine and its paths. name: of model and accelerators, for people. bytes_per_token: KV.
    bytes_per_second: of the path from each tier to the engine.
    """

    name: str
    prefill: PrefillCost
    bytes_per_token: int
    bytes_per_second: tuple[float, float]


class Timing:
    """Adds up requests. Milliseconds; a dict has a value a way."""

    def __init__(self, model: TimeModel) -> None:
        self.model = model
        self.requests = 0
        self.compute_ms = 0.0
        """If nothing were cached."""
        self.total_ms = dict.fromkeys(WAYS, 0.0)
        self.slower = dict.fromkeys(WAYS, 0)
        """Requests that take longer than computing them."""
        self.worst = dict.fromkeys(WAYS, 0.0)
        """The highest time of one request against computing it."""
        self.hit_tokens = 0
        self.loaded_tokens = dict.fromkeys(WAYS, 0)
        self._links = [
            Link(f"tier {tier}", bytes_per_second=rate)
            for tier, rate in enumerate(model.bytes_per_second)
        ]

    def add(self, request: Request, tiers: Sequence[int]) -> None:
        """One request; tiers: of the blocks of its leading hit, in order."""
        prefill, end = self.model.prefill, request.input_tokens
        compute_ms = prefill.prefill_us(end) / 1e3
        self.requests += 1
        self.compute_ms += compute_ms
        runs = [
            (tier, sum(tokens for _, tokens in blocks))
            for tier, blocks in groupby(
                zip(tiers, request.block_tokens, strict=False), key=lambda block: block[0]
            )
        ]
        hit = sum(tokens for _, tokens in runs)
        self.hit_tokens += hit
        if not hit:
            for way in WAYS:
                self._add(way, compute_ms, compute_ms, 0)
            return
        load_ms = (
            sum(self._links[tier].ideal_ns(self._bytes(tokens)) for tier, tokens in runs) / 1e6
        )
        self._add(ALWAYS, load_ms + prefill.prefill_us(end, hit) / 1e3, compute_ms, hit)
        for way, overlap in ((GATE, Overlap.SERIAL), (SPLIT, Overlap.TAIL)):
            # A block of one token each: traces have blocks of several lengths.
            advice = plan(
                runs, 1, self.model.bytes_per_token, self._links, prefill, end, overlap=overlap
            )
            self._add(way, advice.split.total_ms, compute_ms, advice.load_blocks)

    def _bytes(self, tokens: int) -> int:
        return tokens * self.model.bytes_per_token

    def _add(self, way: str, total_ms: float, compute_ms: float, loaded_tokens: int) -> None:
        self.total_ms[way] += total_ms
        self.loaded_tokens[way] += loaded_tokens
        if compute_ms > 0:
            self.worst[way] = max(self.worst[way], total_ms / compute_ms)
            self.slower[way] += total_ms > compute_ms * (1 + ROUNDING)

    def against_no_cache(self, way: str) -> float:
        """Mean time against the mean without a cache: a fraction, lower is better."""
        return self.total_ms[way] / self.compute_ms if self.compute_ms else 1.0

    def as_fields(self) -> dict[str, Any]:
        """As JSON has it."""
        rates = self.model.bytes_per_second
        return {
            "engine": self.model.name,
            "a_us_per_token": self.model.prefill.a_us_per_token,
            "b_us_per_token2": self.model.prefill.b_us_per_token2,
            "kv_bytes_per_token": self.model.bytes_per_token,
            "memory_bytes_per_second": rates[0],
            "disk_bytes_per_second": rates[1],
            "mean_ms_without_cache": self.compute_ms / max(self.requests, 1),
            "ways": {
                way: {
                    "against_no_cache": self.against_no_cache(way),
                    "mean_ms": self.total_ms[way] / max(self.requests, 1),
                    "slower_requests": self.slower[way],
                    "worst_against_computing": self.worst[way],
                    "loaded_tokens": self.loaded_tokens[way],
                    "declined_tokens": self.hit_tokens - self.loaded_tokens[way],
                }
                for way in WAYS
            },
        }
