"""What prefill costs: the two numbers of a model on its accelerator, and times from them. Pure.

Formula: computing tokens `[cached, n)` of a prompt takes `a (n - cached) + b (n^2 - cached^2)`
microseconds: the linear term is the matrix products of each token, the square one attention to all
tokens before it. a and b are least-squares fits over measured prefills (1k to 128k tokens); the
client may send its own, which it calibrates from prefills that it sees.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

from kvstore.model.reasons import BadRequest, Reason

__all__ = ["COST_MAX", "PrefillCost", "check_cost"]

COST_MAX = 1e9
"""Bound of both numbers (a quarter of an hour a token): beyond it is a mistake, not a cost."""


class PrefillCost(NamedTuple):
    """Prefill time of a model on its accelerators."""

    a_us_per_token: float
    b_us_per_token2: float

    def valid(self) -> bool:
        """Neither negative, infinite or absurd, and not both 0: what a stranger sent is checked."""
        numbers: tuple[object, ...] = self  # whatever a caller made it of
        if not all(isinstance(number, Real) for number in numbers):
            return False
        a, b = self
        return 0 <= a <= COST_MAX and 0 <= b <= COST_MAX and a + b > 0

    def prefill_us(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Microseconds to compute tokens `[cached_tokens, prompt_tokens)`; 0 if there are none."""
        if prompt_tokens <= cached_tokens:
            return 0.0
        a, b = self
        return (prompt_tokens - cached_tokens) * (a + b * (prompt_tokens + cached_tokens))

    def next_token_us(self, position: int) -> float:
        """Microseconds that one more token costs at `position`: the derivative, a + 2 b x."""
        return self.a_us_per_token + 2.0 * self.b_us_per_token2 * position

    def doubling_tokens(self) -> float:
        """The position at which a token costs twice the first one: a / 2b (inf without b)."""
        if self.b_us_per_token2 == 0:
            return math.inf
        return self.a_us_per_token / (2.0 * self.b_us_per_token2)


def check_cost(value: object) -> None:
    """BadRequest(BAD_SIZE) unless `value` is a valid cost, or None: no cost is known."""
    if value is not None and not (isinstance(value, PrefillCost) and value.valid()):
        raise BadRequest(
            Reason.BAD_SIZE,
            "prefill is a PrefillCost: finite numbers, not negative and not both 0",
            "prefill",
        )
