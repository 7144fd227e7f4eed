"""Time to first token of a transformers model on the CPU whose prefix comes out of the store: layer
by layer against whole, in the same process and run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstore_client import Client, ClientConfig
from kvstore_client.demo.document import DOCUMENT
from kvstore_client.demo.model import DemoModel, ensure_model, load_real, make_random_llama
from tests.bench.harness import Results, compare, timed

MODELS = Path("build/model")
"""Where the demo has its model, too."""
STORED_TOKENS = 1_024
NEW_TOKENS = 16
ROUNDS = 16
CAPACITY = "512MiB"


@dataclass(frozen=True)
class Setup:
    """A model, its prefixes in a store, and a prompt of which all but the last tokens are there."""

    made: DemoModel
    cache: Any
    ids: list[int]

    def first_token(self, *, layerwise: bool, awaited: bool = False) -> list[int]:
        """Restores and computes the first token. awaited: no layer is computed before all came."""
        from kvstore_client.engines.transformers import generate

        restored = self.cache.restore(self.ids, layerwise=layerwise)
        assert restored.tokens == STORED_TOKENS, restored.why
        if awaited:
            restored.arrival.result()
        return list(generate(self.made.model, self.ids, restored.cache, 1).token_ids)


def measure(results: Results, data_socket: str, models: Path = MODELS) -> None:
    """Adds the time to first token with layers on their way against the same with a whole fetch,
    with two torch threads and with one; and against the same copies awaited before computing, which
    is what overlapping alone gives.
    """
    import torch

    with _prepared(data_socket, models) as setup:
        threads = torch.get_num_threads()
        try:
            for count, suffix in ((2, ""), (1, "_1_thread")):
                torch.set_num_threads(count)
                _measure(results, setup, suffix, f"{setup.made.name}, {count} torch threads")
        finally:
            torch.set_num_threads(threads)


def _measure(results: Results, setup: Setup, suffix: str, about: str) -> None:
    layerwise = partial(setup.first_token, layerwise=True)
    whole = partial(setup.first_token, layerwise=False)
    awaited = partial(setup.first_token, layerwise=True, awaited=True)
    assert layerwise() == whole() == awaited()
    about = f"{about}, {STORED_TOKENS} tokens restored, {NEW_TOKENS} computed"
    for name, baseline in (("whole_fetch", whole), ("awaited_layers", awaited)):
        ratio = compare(
            lambda _: timed(layerwise),
            lambda _, baseline=baseline: timed(baseline),  # type: ignore[misc]
            ROUNDS,
        )
        results.add_ratio(f"layerwise_over_{name}{suffix}", ratio, about)


@contextmanager
def _prepared(data_socket: str, models: Path) -> Iterator[Setup]:
    import torch

    from kvstore_client.engines.prefix_cache import PrefixCache
    from kvstore_client.engines.transformers import fingerprint_of

    models.mkdir(parents=True, exist_ok=True)
    made = load_real(models) if ensure_model(models, say=print) else make_random_llama(models)
    fingerprint = fingerprint_of(made.model, model_name=made.name, weights_revision="bench")
    text = made.encode(DOCUMENT)
    ids = (text * (STORED_TOKENS // len(text) + 1))[: STORED_TOKENS + NEW_TOKENS]
    with Client(f"unix:{data_socket}", config=ClientConfig(deadline_ms=60_000)) as client:
        cache = PrefixCache(client, made.model, fingerprint)
        # What is in the blocks makes no difference to the time; computing it would take a minute.
        space = client.space(fingerprint)
        keys = space.keys(ids[:STORED_TOKENS])
        elements = len(keys) * space.block_bytes // made.model.dtype.itemsize
        values = torch.randn(elements, generator=torch.Generator().manual_seed(1)) / 2
        blocks = values.to(made.model.dtype).view(len(keys), -1)
        assert space.push(keys, blocks).stored == len(keys)
        yield Setup(made, cache, ids)
