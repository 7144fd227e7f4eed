"""Settings: every field is documented, and a wrong one is named."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import kvstore_client
from kvstore.model.cost import PrefillCost
from kvstore.model.reasons import BadRequest
from kvstore_client import ClientConfig


def test_every_field_is_documented_with_when_to_change_it() -> None:
    text = inspect.getdoc(ClientConfig) or ""
    fields = dataclasses.fields(ClientConfig)
    assert len(fields) <= 14  # five of them for TCP alone
    for field in fields:
        assert f"\n{field.name}: " in text, field.name
    described = " ".join(text.split()).split("Change it:")
    assert len(described) - 1 >= len(fields) - 1  # None of the prefill cost is said in words


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("deadline_ms", 0),
        ("deadline_ms", 1.5),
        ("transport", "tcp"),
        ("connect_timeout_ms", -1),
        ("breaker_failures", 0),
        ("breaker_retry_ms", 9),
        ("populate", 1),
        ("copy_threads", 3),
        ("async_threads", 0),
        ("prefill", PrefillCost(-1.0, 0.0)),
        ("prefill", "Llama-3.1-8B 1xH1000"),
        ("tls_ca_file", None),
        ("tls_cert_file", b"x"),
        ("tls_key_file", "a\0"),
        ("token_file", 1),
        ("tls_server_name", None),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        ClientConfig(**{field: wrong})
    assert caught.value.setting == field


def test_a_prefill_cost_may_be_named() -> None:
    cost = ClientConfig(prefill="llama-3.1-8b 1xH100").prefill_cost
    assert cost == PrefillCost(20.76, 3.926e-4)
    assert ClientConfig(prefill=PrefillCost(1.0, 0.0)).prefill_cost == PrefillCost(1.0, 0.0)
    assert ClientConfig().prefill_cost is None


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClientConfig().deadline_ms = 5  # type: ignore[misc]


def test_the_public_names_are_those_of_all() -> None:
    names = kvstore_client.__all__
    assert names == sorted(names)
    assert all(hasattr(kvstore_client, name) for name in names)
    modules = {"aio", "client", "calls", "link", "regions", "steps"}
    assert not modules & set(names)
