"""Tensors in and out, bit for bit, in the fingerprint's type and shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore_client import Client
from kvstore_client.testing import FakeStore
from tests.client_kit import model, tokens

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_tensors_come_back_as_they_went_in() -> None:
    store = FakeStore()
    fingerprint = model(layers=3, heads=2, head_size=32)
    with Client("/fake", transport=store.transport) as client:
        space = client.space(fingerprint)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(5, 3, 2, 2, 4, 32, generator=generator).to(torch.bfloat16)
        assert space.push(tokens(5), data).stored == 5
        fetched = space.fetch_tensors(space.lookup(tokens(5)))
        assert fetched.blocks == 5
        assert fetched.data.dtype is torch.bfloat16
        assert fetched.data.shape == data.shape
        assert torch.equal(fetched.data.view(torch.int16), data.view(torch.int16))
        out = torch.empty_like(data)
        assert space.fetch(space.keys(tokens(5)), out).data is out
        assert torch.equal(out.view(torch.int16), data.view(torch.int16))
        with space.view(space.keys(tokens(5))) as views:
            raw = data[2].view(torch.uint8).numpy().reshape(-1)
            assert np.array_equal(views.arrays[2], raw)
    store.close()


def test_a_miss_is_a_tensor_without_blocks() -> None:
    store = FakeStore()
    with Client("/fake", transport=store.transport) as client:
        space = client.space(model(layers=3, heads=2, head_size=32))
        for prompt in (tokens(5), tokens(0)):
            fetched = space.fetch_tensors(space.lookup(prompt))
            assert (fetched.blocks, fetched.data.dtype) == (0, torch.bfloat16)
            assert fetched.data.shape == (0, 3, 2, 2, 4, 32)
    store.close()


def test_parts_have_a_dimension_of_their_own() -> None:
    store = FakeStore()
    fingerprint = model(layers=2, heads=2, head_size=32, ranks=2)
    with Client("/fake", transport=store.transport) as client:
        parts = [torch.full((3, 2, 2, 1, 4, 32), float(rank + 1)).bfloat16() for rank in range(2)]
        for rank, part in enumerate(parts):
            client.space(fingerprint, rank=rank).push(tokens(3), part)
        space = client.space(fingerprint)
        fetched = space.fetch_tensors(space.keys(tokens(3)))
        assert fetched.data.shape == (3, 2, 2, 2, 1, 4, 32)
        for rank, part in enumerate(parts):
            assert torch.equal(fetched.data[:, rank], part)
    store.close()


def test_tokens_may_be_a_tensor_and_are_not_taken_one_by_one() -> None:
    class Whole(torch.Tensor):  # type: ignore[misc]
        def __iter__(self) -> Any:
            raise AssertionError("a long prompt would take seconds")

    ids = torch.arange(40, dtype=torch.int64)
    with Client("/nobody-listens-here.sock") as client:
        space = client.space(model())
        assert space.keys(ids.as_subclass(Whole)) == space.keys(ids.tolist())
