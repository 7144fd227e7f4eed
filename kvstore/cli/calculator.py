"""The arithmetic under `kvstore plan`: a prompt's KV, and what each link makes of it.

Pure. The answers come from the function that answers lookups (`kvstore.policy.plan`): one block is
one token, so that a cut may fall anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.cli import catalogue
from kvstore.model.cost import PrefillCost
from kvstore.model.kv_bytes import ModelShape, from_hf_config
from kvstore.model.plan import Overlap, Plan
from kvstore.model.reasons import BadRequest
from kvstore.policy.cost import break_even_prefix_tokens
from kvstore.policy.links import Link
from kvstore.policy.plan import FixedLoad, plan


@dataclass(frozen=True)
class Prompt:
    """The KV that is asked about."""

    model: str
    kind: str
    tokens: int
    """0: unknown, only the bytes are."""
    bytes_per_token: int
    """Of the layers that grow; 0: unknown."""
    fixed_bytes: int
    """Windows and recurrent state at this length."""
    total_bytes: int
    note: str


@dataclass(frozen=True)
class Row:
    """One link's answers."""

    speed: catalogue.LinkSpeed
    ideal_ms: float
    """bytes / the data sheet's rate: no transfer is faster."""
    usual: Plan
    """At the usable rate."""
    wins_from_tokens: float | None
    """Prefix length from which loading wins: 0 always, inf never, None without a cost."""


def prompt_of_bytes(total_bytes: int, tokens: int = 0) -> Prompt:
    """Bytes without a model: they are loaded whole or not at all."""
    return Prompt("", "", tokens, 0, 0, total_bytes, "")


def prompt_of_model(known: catalogue.Model, tokens: int, kv_dtype: str) -> Prompt:
    """A known model's. Raises BadRequest for an unknown type."""
    return _prompt(known.name, known.kind, known.shape, tokens, kv_dtype, known.note)


def prompt_of_config(name: str, config: Mapping[str, Any], tokens: int, kv_dtype: str) -> Prompt:
    """From a Hugging Face configuration. Raises BadRequest naming what it cannot read."""
    shape = from_hf_config(config)
    return _prompt(name, _kind(shape, config), shape, tokens, kv_dtype, "")


def _prompt(
    name: str, kind: str, shape: ModelShape, tokens: int, kv_dtype: str, note: str
) -> Prompt:
    growing = shape.bytes_per_token(kv_dtype)
    fixed = shape.window_bytes(tokens, kv_dtype)
    try:
        fixed += shape.fixed_bytes(kv_dtype)
    except BadRequest as error:
        note = f"not counted: {error.detail}"
    return Prompt(name, kind, tokens, growing, fixed, tokens * growing + fixed, note)


def _kind(shape: ModelShape, config: Mapping[str, Any]) -> str:
    if shape.recurrent is not None or any(a.window_tokens for a in shape.attention):
        return "hybrid"
    layers = shape.attention[0]
    if layers.latent_size:
        return "mla"
    heads = config.get("num_attention_heads")
    if heads == layers.kv_heads:
        return "mha"
    return "mqa" if layers.kv_heads == 1 else "gqa"


def row(
    prompt: Prompt,
    speed: catalogue.LinkSpeed,
    latency_us: float,
    cost: PrefillCost | None,
    overlap: Overlap,
) -> Row:
    """What a link makes of a prompt. A cost needs the prompt's tokens."""
    if prompt.bytes_per_token:
        runs, block_tokens, block_bytes = [(0, prompt.tokens)], 1, prompt.bytes_per_token
    else:
        runs, block_tokens, block_bytes = [(0, 1)], max(1, prompt.tokens), prompt.total_bytes
    usual = plan(
        runs,
        block_tokens,
        block_bytes,
        [Link(speed.name, bytes_per_second=speed.usable, latency_ns=latency_us * 1e3)],
        cost,
        prompt.tokens,
        overlap=overlap,
        fixed=[FixedLoad(0, prompt.fixed_bytes)] if prompt.fixed_bytes else (),
    )
    wins_from = None
    if cost is not None:
        per_token = prompt.bytes_per_token or prompt.total_bytes / prompt.tokens
        wins_from = break_even_prefix_tokens(per_token, speed.usable, cost)
    return Row(speed, prompt.total_bytes / speed.theory * 1e3, usual, wins_from)
