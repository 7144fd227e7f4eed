"""Caches that arrive layer by layer: the same bits and answers as whole ones, waited for no earlier
than the model needs them, and begun anew where the store loses some.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.model.reasons import Reason  # noqa: E402
from kvstore_client import Client  # noqa: E402
from kvstore_client.engines.arriving import Arrival, LayersLostError  # noqa: E402
from kvstore_client.engines.prefix_cache import PrefixCache, Restored  # noqa: E402
from kvstore_client.engines.transformers import fingerprint_of, generate  # noqa: E402
from kvstore_client.results import Fetched  # noqa: E402
from kvstore_client.testing import FakeStore  # noqa: E402

pytestmark = pytest.mark.torch

LAYERS = 3
BLOCK_TOKENS = 16
VOCABULARY = 97
NEW = 8


def tiny(dtype: Any = None, **changes: Any) -> Any:
    kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.08,
    }
    if "sliding_window" in changes:
        kind, config = transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig
        changes = {"head_dim": 8, "layer_types": ["sliding_attention"] * LAYERS, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return kind(config(**{**sizes, **changes})).to(dtype or torch.float32).eval()


def tokens(count: int, seed: int = 5) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture
def store() -> Iterator[FakeStore]:
    fake = FakeStore(capacity_blocks=64)
    yield fake
    fake.close()


@pytest.fixture
def client(store: FakeStore) -> Iterator[Client]:
    with Client("/fake", transport=store.transport) as client:
        yield client


def opened(client: Client, model: Any) -> PrefixCache:
    offered = fingerprint_of(
        model, model_name="tiny", block_tokens=BLOCK_TOKENS, weights_revision="r1"
    )
    return PrefixCache(client, model, offered)


def saved(cache: PrefixCache, model: Any, ids: list[int]) -> None:
    assert cache.save(ids, generate(model, ids, None, 1).cache).pushed is not None


def cache_of(restored: Restored) -> Any:
    assert restored.cache is not None
    return restored.cache


@dataclasses.dataclass
class Watched:
    """A fetch of which layers from `lost` on have only `kept` blocks. Writes down what is asked."""

    inner: Any
    seen: list[str]
    lost: int = 99
    kept: int = 0

    @property
    def blocks(self) -> int:
        return int(self.inner.blocks)

    def wait(self, layer: int) -> int:
        self.seen.append(f"wait {layer}")
        arrived = int(self.inner.wait(layer))
        return min(arrived, self.kept) if layer >= self.lost else arrived

    def result(self) -> Fetched:
        fetched: Fetched = self.inner.result()
        kept = self.kept if self.lost < LAYERS else fetched.blocks
        return dataclasses.replace(fetched, blocks=kept)


def watched(restored: Restored, **how: Any) -> tuple[Arrival, list[str]]:
    assert restored.arrival is not None
    seen: list[str] = []
    fetch: Any = Watched(restored.arrival.fetch, seen, **how)
    return dataclasses.replace(restored.arrival, fetch=fetch), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_arrives_has_the_bits_and_the_answers_of_a_whole_one(
    client: Client, dtype: Any
) -> None:
    model = tiny(dtype)
    cache, ids = opened(client, model), tokens(150)
    saved(cache, model, ids)
    following = [*ids, *tokens(9, 6)]
    whole = cache.restore(following)
    arriving = cache.restore(following, layerwise=True)
    assert arriving.tokens == whole.tokens == 144
    assert cache_of(arriving).get_seq_length() == 144
    first = generate(model, following, cache_of(whole), NEW)
    second = generate(model, following, cache_of(arriving), NEW)
    assert torch.equal(first.first_logits, second.first_logits)
    assert first.token_ids == second.token_ids
    pairs: Any = zip(first.cache.layers, second.cache.layers, strict=True)
    for one, other in pairs:
        assert type(other) is type(one)
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert arriving.arrival is not None
    fetched = arriving.arrival.result()
    assert (fetched.blocks, fetched.reason, fetched.bytes) == (9, Reason.OK, whole.size_bytes)
    grown = cache.save([*following, *second.token_ids], second.cache, from_token=arriving.tokens)
    assert grown.pushed is not None
    assert grown.pushed.stored == 1


def test_a_layer_is_waited_for_when_the_model_reads_it_and_no_earlier(client: Client) -> None:
    model = tiny()
    cache, ids = opened(client, model), tokens(70)
    saved(cache, model, ids)
    arrival, seen = watched(cache.restore(ids, layerwise=True))
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: seen.append(f"computed {number}"))
    generate(model, ids, arrival.cache(), 1)
    assert seen == [
        step for layer in range(LAYERS) for step in (f"wait {layer}", f"computed {layer}")
    ]


@pytest.mark.parametrize(("lost", "kept"), [(0, 2), (1, 3), (2, 0)])
def test_a_cache_that_loses_layers_is_begun_anew_with_what_is_there(
    client: Client, lost: int, kept: int
) -> None:
    model = tiny()
    cache, ids = opened(client, model), tokens(70)
    saved(cache, model, ids)
    arrival, seen = watched(cache.restore(ids, layerwise=True), lost=lost, kept=kept)
    made = generate(model, ids, arrival.cache(), NEW)
    assert seen == [f"wait {layer}" for layer in range(lost + 1)]
    whole = cache_of(cache.restore(ids[: kept * BLOCK_TOKENS + 1])) if kept else None
    expected = generate(model, ids, whole, NEW)
    assert made.token_ids == expected.token_ids
    assert torch.equal(made.first_logits, expected.first_logits)


def test_whoever_reads_a_layer_waits_or_is_told_that_it_is_lost(client: Client) -> None:
    model = tiny()
    cache, ids = opened(client, model), tokens(70)
    saved(cache, model, ids)
    arrival, _ = watched(cache.restore(ids, layerwise=True), lost=1, kept=1)
    layers: list[Any] = list(arrival.cache().layers)
    assert [layer.get_seq_length() for layer in layers] == [64] * LAYERS
    whole = cache_of(cache.restore(ids)).layers
    assert torch.equal(layers[0].keys, whole[0].keys)
    assert torch.equal(layers[0].values, whole[0].values)
    for read in (lambda: layers[1].values, lambda: layers[2].crop(-1), layers[1].arrive):
        with pytest.raises(LayersLostError, match="did not arrive"):
            read()
    salvaged = arrival.salvage()
    assert salvaged is not None
    assert salvaged.get_seq_length() == BLOCK_TOKENS
    last: Any = salvaged.layers[2]
    assert torch.equal(last.keys, whole[2].keys[:, :, :BLOCK_TOKENS])


def test_a_dropped_arrival_gives_its_lease_back(client: Client, store: FakeStore) -> None:
    model = tiny()
    cache, ids = opened(client, model), tokens(70)
    saved(cache, model, ids)
    restored = cache.restore(ids, layerwise=True)
    assert restored.tokens == 64
    del restored
    assert store.wait(lambda s: not s.leases)


def test_a_miss_says_why_and_windows_are_restored_whole(client: Client) -> None:
    model = tiny()
    cache, ids = opened(client, model), tokens(70)
    missed = cache.restore(ids, layerwise=True)
    assert (missed.cache, missed.why) == (None, "MISS_NEVER_STORED")
    windowed = tiny(sliding_window=32)
    other = opened(client, windowed)
    other.save(ids, generate(windowed, ids[:30], None, 1).cache)
    restored = other.restore(ids[:20], layerwise=True)
    assert restored.tokens == 16
    assert restored.arrival is None
    assert restored.fetched is not None


def test_what_became_of_an_arrival_is_reported_with_what_it_loaded(
    client: Client, store: FakeStore
) -> None:
    model = tiny()
    cache, ids = opened(client, model), tokens(70)
    saved(cache, model, ids)
    restored = cache.restore(ids, layerwise=True)
    made = generate(model, ids, restored.cache, 1)
    assert cache.report(restored, made, prompt_tokens=len(ids), request_id="r-9")
    assert store.wait(lambda s: bool(s.outcomes))
    outcome = store.outcomes[0]
    assert (outcome.loaded_tokens, outcome.computed_tokens) == (64, 6)
    assert outcome.loaded_bytes == restored.size_bytes
    assert outcome.prefill_us == 0


def test_what_was_lost_on_its_way_is_saved_again(client: Client, store: FakeStore) -> None:
    """Else the prompt would have a hole there for as long as its blocks behind are found."""
    model = tiny()
    cache, ids = opened(client, model), tokens(150)
    saved(cache, model, ids[:70])
    restored = cache.restore(ids, layerwise=True)
    arrival, _ = watched(restored, lost=1, kept=3)
    restored = dataclasses.replace(restored, arrival=arrival)
    assert restored.tokens == 64
    made = generate(model, ids, arrival.cache(), 1)
    store.drop(client.space(cache.fingerprint).keys(ids[:64])[3:])
    assert restored.tokens == 48
    grown = cache.save(ids, made.cache, from_token=restored.tokens)
    assert grown.pushed is not None
    assert grown.pushed.stored == 9 - 3
    assert cache.restore(ids).tokens == 144
