"""Load against recompute, in closed form: from which bandwidth, from which prefix on. Pure.

Used by the calculator (`kvstore plan`) and by tests of the planner, which must agree with it.
k is the KV of one token in bytes, B a path's bandwidth in bytes a second, a and b the model's
`PrefillCost`. Loading a whole prefix of n tokens wins when `k/B < a + b n`, loading the next token
at position x when `k/B < a + 2 b x`.
"""

from __future__ import annotations

import math

from kvstore.model.cost import PrefillCost

__all__ = [
    "PrefillCost",
    "always_faster_bytes_per_second",
    "break_even_position_tokens",
    "break_even_prefix_tokens",
]


def always_faster_bytes_per_second(bytes_per_token: float, prefill: PrefillCost) -> float:
    """B* = k / a: at this bandwidth and above loading wins for any length (inf when a is 0)."""
    if prefill.a_us_per_token == 0:
        return math.inf
    return bytes_per_token / prefill.a_us_per_token * 1e6


def break_even_prefix_tokens(
    bytes_per_token: float, bytes_per_second: float, prefill: PrefillCost
) -> float:
    """Length from which loading a whole prefix wins: (k/B - a) / b; 0 always, inf never."""
    return _crossing(bytes_per_token, bytes_per_second, prefill, prefill.b_us_per_token2)


def break_even_position_tokens(
    bytes_per_token: float, bytes_per_second: float, prefill: PrefillCost
) -> float:
    """Position from which loading the next token wins: (k/B - a) / 2b; 0 always, inf never."""
    return _crossing(bytes_per_token, bytes_per_second, prefill, 2.0 * prefill.b_us_per_token2)


def _crossing(
    bytes_per_token: float, bytes_per_second: float, prefill: PrefillCost, growth: float
) -> float:
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second is {bytes_per_second}, not above 0")
    gap_us = bytes_per_token / bytes_per_second * 1e6 - prefill.a_us_per_token
    if gap_us <= 0:
        return 0.0
    return gap_us / growth if growth > 0 else math.inf
