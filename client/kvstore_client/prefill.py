"""What prefill costs on this engine, from the prefills that it runs. Pure.

Model: computing tokens [p, n) takes a (n - p) + b (n^2 - p^2) microseconds (kvstore.model.cost).
a and b are found by least squares over the *relative* errors, since prefills span three orders of
magnitude, with the weights of outliers cut down (a queue, a compilation or a swap has nothing to do
with the cost), and neither below 0. Where the observed prompts are too alike to tell a from b, the
proportion of b to a is taken from the seed; without one, all is put down to a.
"""

from __future__ import annotations

from collections import deque
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from kvstore.model.cost import PrefillCost

__all__ = ["PrefillFit"]

SAMPLES_MIN = 8
SAMPLES_KEPT = 256
PROMPT_TOKENS_MAX = 2**32
ELAPSED_US_MIN, ELAPSED_US_MAX = 1e-3, 1e12
"""Beyond these it is no prefill, and the squares of such numbers would end the fit in an error."""
_ROUNDS = 10
_HUBER = 1.5  # in robust standard deviations
_CONDITION_MAX = 30.0
"""Of the scaled columns: beyond it (prompts within about 10 % of one length) noise would decide."""

Floats = NDArray[np.float64]


class PrefillFit:
    """Collects prefills and fits their cost. Not locked: tuples are appended, the fit is a value.

    seed: a cost to start from (and the proportion of b to a, see above). samples_min: prefills
    before the fit is believed.
    """

    def __init__(
        self,
        seed: PrefillCost | None = None,
        *,
        samples_min: int = SAMPLES_MIN,
        samples_kept: int = SAMPLES_KEPT,
    ) -> None:
        self._seed = seed if seed is not None and seed.valid() else None
        self._samples_min = samples_min
        self._samples: deque[tuple[int, int, float]] = deque(maxlen=samples_kept)
        self._fitted: PrefillCost | None = None
        self._stale = False

    def observe(self, prompt_tokens: int, cached_tokens: int, elapsed_us: float) -> None:
        """A prefill of tokens [cached_tokens, prompt_tokens) took so long. What cannot be one is
        ignored.
        """
        counts: tuple[object, ...] = (prompt_tokens, cached_tokens)  # whatever an engine passes
        measured: object = elapsed_us
        if not (all(isinstance(n, Integral) for n in counts) and isinstance(measured, Real)):
            return
        possible = 0 <= cached_tokens < prompt_tokens <= PROMPT_TOKENS_MAX
        if possible and ELAPSED_US_MIN <= elapsed_us <= ELAPSED_US_MAX:
            self._samples.append((int(prompt_tokens), int(cached_tokens), float(elapsed_us)))
            self._stale = True

    @property
    def samples(self) -> int:
        """Prefills that are remembered."""
        return len(self._samples)

    def cost(self) -> PrefillCost | None:
        """The fit; the seed while there are too few samples; None without either."""
        if len(self._samples) < self._samples_min:
            return self._seed
        if self._stale:
            self._stale = False
            self._fitted = self._fit()
        return self._fitted or self._seed

    def _fit(self) -> PrefillCost | None:
        n, p, elapsed_us = np.array(list(self._samples), np.float64).T
        # Divided by the measured time, each row asks for 1: relative errors, equal for all lengths.
        linear = (n - p) / elapsed_us
        square = (n * n - p * p) / elapsed_us
        weights = np.ones_like(linear)
        fit = (0.0, 0.0)
        for _ in range(_ROUNDS):
            fit = _least_squares(linear, square, weights, self._proportion())
            residuals = 1.0 - (fit[0] * linear + fit[1] * square)
            weights = _huber(residuals)
        cost = PrefillCost(*fit)
        return cost if cost.valid() else None

    def _proportion(self) -> float:
        """b / a of the seed; 0 without one."""
        if self._seed is None or self._seed.a_us_per_token == 0:
            return 0.0
        return self._seed.b_us_per_token2 / self._seed.a_us_per_token


def _huber(residuals: Floats) -> Floats:
    center = float(np.median(residuals))
    spread = 1.4826 * float(np.median(np.abs(residuals - center)))
    limit = max(_HUBER * spread, 1e-9)
    return np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-12))


def _least_squares(
    linear: Floats, square: Floats, weights: Floats, proportion: float
) -> tuple[float, float]:
    """a, b >= 0 that bring a * linear + b * square closest to 1."""
    scale = float(np.linalg.norm(linear)), float(np.linalg.norm(square))
    root = np.sqrt(weights)
    columns = np.stack([linear / scale[0], square / scale[1]], axis=1) * root[:, None]
    if np.linalg.cond(columns) > _CONDITION_MAX:
        a = _along(linear + proportion * square, weights)
        return a, a * proportion
    found = np.linalg.lstsq(columns, root, rcond=None)[0]
    a, b = float(found[0]) / scale[0], float(found[1]) / scale[1]
    if a < 0:
        return 0.0, _along(square, weights)
    if b < 0:
        return _along(linear, weights), 0.0
    return a, b


def _along(column: Floats, weights: Floats) -> float:
    """The factor that brings one column closest to 1."""
    return float(np.sum(weights * column) / np.sum(weights * column * column))
