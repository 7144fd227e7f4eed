"""Prefill costs to begin with, until an engine's own prefills were seen. Pure.

Least-squares fits over 1k to 128k tokens of points computed with aiconfigurator 0.12.0 (Apache-2.0)
from its kernel measurements for vLLM (0.24.0 on H100 and H200, 0.14.0 on A100): bf16, batch 1,
context phase only. A served model is slower, so that a seed declines rather too much than too
little; see `kvstore_client.Space.observe_prefill`.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from kvstore.model.cost import PrefillCost
from kvstore.model.reasons import BadRequest, Reason

__all__ = ["SEEDS", "Seed", "seed_named"]


class Seed(NamedTuple):
    """A fit. gpus: as "4xH100". max_error_percent: of the fit against its points."""

    model: str
    gpus: str
    cost: PrefillCost
    max_error_percent: float

    @property
    def name(self) -> str:
        """As a user writes it: "Llama-3.1-8B 1xH100"."""
        return f"{self.model} {self.gpus}"


SEEDS = (
    Seed("Llama-3.1-8B", "1xH100", PrefillCost(20.76, 3.926e-4), 2.0),
    Seed("Llama-3.1-8B", "1xH200", PrefillCost(20.62, 4.068e-4), 1.7),
    Seed("Llama-3.1-8B", "1xA100", PrefillCost(58.16, 1.444e-3), 5.6),
    Seed("Qwen3-8B", "1xH100", PrefillCost(20.96, 4.332e-4), 3.4),
    Seed("Qwen3-32B", "2xH100", PrefillCost(52.0, 7.725e-4), 2.6),
    Seed("Qwen3-32B", "2xA100", PrefillCost(134.16, 2.805e-3), 7.4),
    Seed("Llama-3.1-70B", "4xH100", PrefillCost(63.65, 4.723e-4), 4.1),
    Seed("Llama-3.1-70B", "8xH100", PrefillCost(40.82, 2.154e-4), 9.1),
    Seed("Llama-3.1-70B", "4xA100", PrefillCost(158.71, 1.721e-3), 9.9),
)


def seed_named(name: str) -> Seed:
    """The seed with this name, whatever its case and spaces. BadRequest (BAD_NAME): there is none;
    it tells the nearest ones.
    """
    plain = {_plain(seed.name): seed for seed in SEEDS}
    found = plain.get(_plain(name))
    if found is None:
        near = difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.5) or list(plain)
        names = ", ".join(plain[match].name for match in near)
        raise BadRequest(Reason.BAD_NAME, f"no prefill cost {name!r}; near: {names}", "prefill")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[\s_,-]+", "", name).lower()
