"""What is asked for of a prompt says how long the prompt is: the store keeps by that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore_client import Client
from kvstore_client.testing import FakeStore, FakeTransport
from tests.client_kit import model, rows, tokens

BLOCK_BYTES = 4096
TOKENS = model().encoding.block_tokens


class Listener:
    """A store's answers, and the prompt lengths that it was told, by call."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.told: list[tuple[str, int]] = []

    def __call__(self, method: str, request: Any) -> Any:
        if method in ("Acquire", "Fetch"):
            self.told.append((method, request.prompt_tokens))
        return self._store.answer(method, request)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_load_after_a_lookup_tells_the_length_of_the_whole_prompt(shared_memory: bool) -> None:
    store = FakeStore(capacity_blocks=64, shared_memory=shared_memory)
    listener = Listener(store)
    with Client("/fake", transport=FakeTransport.factory(listener, store.dial)) as client:
        space = client.space(model())
        space.push(tokens(4), rows(4, BLOCK_BYTES))
        prompt = np.concatenate([tokens(4), tokens(3, seed=9)])[:-1]
        hit = space.lookup(prompt)
        assert hit.blocks == 4
        assert space.fetch(hit).blocks == 4
        assert space.fetch(space.lookup(space.keys(prompt))).blocks == 4
        assert space.fetch(space.keys(tokens(4))).blocks == 4
        if shared_memory:
            with space.view(hit) as views:
                assert views.blocks == 4
    store.close()
    how = "Acquire" if shared_memory else "Fetch"
    # By tokens; by keys, which are whole blocks; by keys alone, which do not tell.
    wanted = [7 * TOKENS - 1, 6 * TOKENS, 0, *([7 * TOKENS - 1] if shared_memory else [])]
    assert listener.told == [(how, length) for length in wanted]
