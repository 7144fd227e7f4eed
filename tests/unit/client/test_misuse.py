"""What only a wrong program passes raises BadRequest, naming the argument, before any call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.keys import BlockKey
from kvstore.model.reasons import BadRequest, Reason
from kvstore_client import AsyncClient, Client, ClientConfig, Fetched, Rank
from tests.client_kit import model, rows, tokens

NOBODY: Any = "/nobody-listens-here.sock"


def wrong(value: Any) -> Any:
    """Of a type that no annotation allows."""
    return value


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize("config", [{}, {"deadline_ms": 5}, "stream", 0])
def test_a_config_is_a_client_config(make: Callable[..., Any], config: object) -> None:
    with pytest.raises(BadRequest, match="config"):
        make(NOBODY, config=config)


@pytest.mark.parametrize(
    "prefill", [(20.0, 1e-4), "cheap", 5.0, PrefillCost(wrong("a"), wrong("b"))], ids=str
)
def test_a_prefill_cost_is_one(prefill: Any) -> None:
    with Client(NOBODY) as client, pytest.raises(BadRequest, match="prefill"):
        client.space(model()).lookup(tokens(2), prefill=prefill)
    with pytest.raises(BadRequest, match="prefill"):
        ClientConfig(prefill=prefill)


def test_a_prefill_cost_may_come_from_numpy() -> None:
    cost = PrefillCost(wrong(np.float32(20.0)), wrong(np.float64(1e-4)))
    assert ClientConfig(prefill=cost).prefill is cost


@pytest.mark.parametrize("rank", [Rank(wrong("0"), 0), Rank(wrong(0.0), 0), Rank(0, wrong(True))])
def test_a_rank_is_of_whole_numbers(rank: Rank) -> None:
    with Client(NOBODY) as client, pytest.raises(BadRequest, match="rank"):
        client.space(model(), rank)


def test_a_prompt_has_no_key_twice() -> None:
    with Client(NOBODY) as client:
        space = client.space(model())
        twice = [*space.keys(tokens(2)), *space.keys(tokens(2))]
        with pytest.raises(BadRequest, match="keys"):
            space.push(twice, rows(4, space.part_bytes))


def test_no_memory_for_the_answer_is_a_miss() -> None:
    """Not raised: how long a prompt is decides it, and no program knows what fits."""
    wide = model(layers=65_536, heads=64, head_size=256)
    with Client(NOBODY) as client:
        space = client.space(wide)
        keys = [BlockKey(bytes([n % 256, n // 256]) * 16) for n in range(1 << 16)]
        fetched = space.fetch(keys)  # a PiB: more than there are addresses
        assert (fetched.blocks, fetched.reason) == (0, Reason.NO_SPACE)
        assert fetched.data.shape == (0, space.block_bytes)
        assert "give `out`" in fetched.detail


def test_no_memory_for_a_coroutines_answer_is_a_miss() -> None:
    async def fetch() -> Fetched:
        async with AsyncClient(NOBODY) as client:
            space = client.space(model(layers=65_536, heads=64, head_size=256))
            return await space.fetch([BlockKey(bytes(32))] * (1 << 16))

    assert asyncio.run(fetch()).reason is Reason.NO_SPACE
