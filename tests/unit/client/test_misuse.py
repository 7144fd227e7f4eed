"""What only a wrong program passes raises BadRequest, naming the argument, before any call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.reasons import BadRequest
from kvstore_client import AsyncClient, Client, ClientConfig, Rank
from tests.client_kit import model, tokens

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
