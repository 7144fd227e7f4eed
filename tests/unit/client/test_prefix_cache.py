"""PrefixCache against a store in memory: what it asks for, what it makes of each answer."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.model.fingerprint import Fingerprint  # noqa: E402
from kvstore.model.keys import BlockKey, chain  # noqa: E402
from kvstore.model.reasons import Reason  # noqa: E402
from kvstore_client.engines.prefix_cache import PrefixCache, Restored  # noqa: E402
from kvstore_client.engines.transformers import fingerprint_of, generate  # noqa: E402
from kvstore_client.results import Fetched, Hit, LoadAdvice, Pushed  # noqa: E402
from kvstore_client.weights import DigestMemory, WeightsDigest  # noqa: E402

pytestmark = pytest.mark.torch

SEED = 5
BLOCK_TOKENS = 16
VOCABULARY = 97


@dataclass
class MemorySpace:
    """A space in this process. `advise` caps the plan, `lose` makes fetches fall short."""

    fingerprint: Fingerprint
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    advise: int = 1 << 30
    lose: int = 0

    def keys(self, tokens: Sequence[int], *, salt: bytes = b"") -> list[Any]:
        return list(chain(tokens, self.fingerprint.encoding.block_tokens, salt=salt))

    def lookup(self, keys: list[BlockKey], *, prefill: Any, request_id: str) -> Hit:
        count = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        reason = Reason.OK if count == len(keys) else Reason.MISS_NEVER_STORED
        plan = LoadAdvice(min(count, self.advise), 0, 0.0, 0.0, 0.0, Reason.COST_UNKNOWN, 0.0)
        return Hit(count, count * BLOCK_TOKENS, bytes(count), tuple(keys), plan, reason)

    def fetch(self, hit: Hit, out: Any, *, request_id: str) -> Fetched:
        keys = hit.keys_to_load
        count = max(0, len(keys) - self.lose)
        out[...] = 255
        for row, key in zip(out, keys[:count], strict=False):
            row[:] = np.frombuffer(self.blocks[key], np.uint8)
        reason = Reason.OK if count else Reason.GENERATION_CHANGED
        return Fetched(count, count * BLOCK_TOKENS, out, reason)

    def push(
        self,
        keys: list[BlockKey],
        fill: Callable[[int, Any], None],
        *,
        first_block: int,
        durable: bool,
        request_id: str,
    ) -> Pushed:
        stored = 0
        for index, key in enumerate(keys[first_block:], first_block):
            if key not in self.blocks:
                row = np.zeros(row_bytes(self.fingerprint), np.uint8)
                fill(index, row)
                self.blocks[key] = row.tobytes()
                stored += 1
        return pushed(stored, len(keys) - first_block - stored)


class MemoryClient:
    def __init__(self) -> None:
        self.spaces: dict[bytes, MemorySpace] = {}

    def space(self, fingerprint: Fingerprint) -> MemorySpace:
        return self.spaces.setdefault(fingerprint.digest, MemorySpace(fingerprint))


def pushed(stored: int, present: int) -> Pushed:
    return Pushed(stored, present, 0, 0, 0, 0, Reason.OK)


def row_bytes(fingerprint: Fingerprint) -> int:
    shape = fingerprint.geometry
    return 2 * shape.layers * shape.kv_heads * shape.head_size * BLOCK_TOKENS * 4


def tiny(**changes: Any) -> Any:
    kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.08,
    }
    if "sliding_window" in changes:
        kind, config = transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig
        changes = {"head_dim": 8, "layer_types": ["sliding_attention"] * 2, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return kind(config(**{**sizes, **changes})).eval()


def tokens(count: int, seed: int = SEED) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def layers(restored: Restored) -> list[Any]:
    assert restored.cache is not None
    return list(restored.cache.layers)


def opened(model: Any, client: MemoryClient, **options: Any) -> PrefixCache:
    revision = options.pop("weights_revision", "r1")
    offered = fingerprint_of(
        model, model_name="tiny", block_tokens=BLOCK_TOKENS, weights_revision=revision
    )
    as_client: Any = client
    return PrefixCache(as_client, model, offered, **options)


def test_a_conversation_is_restored_turn_by_turn_and_answers_as_the_live_cache() -> None:
    model, client = tiny(), MemoryClient()
    cache = opened(model, client)
    ids = tokens(100)
    assert cache.restore(ids).why == "MISS_NEVER_STORED"
    first = generate(model, ids, None, 8)
    assert cache.save([*ids, *first.token_ids], first.cache).pushed == pushed(6, 0)
    following = [*ids, *first.token_ids, *tokens(30, SEED + 1)]
    restored = opened(model, client).restore(following)
    assert restored.tokens == 96
    assert restored.size_bytes == 6 * row_bytes(cache.fingerprint)
    second = generate(model, following, restored.cache, 8)
    assert second.token_ids == generate(model, following, None, 8).token_ids
    saved = cache.save([*following, *second.token_ids], second.cache, from_token=restored.tokens)
    assert saved.pushed == pushed(3, 0)  # 145 tokens in the cache: blocks 6, 7 and 8
    again = cache.save([*following, *second.token_ids], second.cache)
    assert again.pushed == pushed(0, 9)


def test_a_whole_prompt_that_is_stored_leaves_a_token_to_compute() -> None:
    model, client = tiny(), MemoryClient()
    cache = opened(model, client)
    ids = tokens(64)
    cache.save(ids, generate(model, ids, None, 1).cache)
    restored = cache.restore(ids)
    assert restored.tokens == 48
    assert generate(model, ids, restored.cache, 1).token_ids


def test_prompts_of_one_block_or_less_ask_nothing() -> None:
    cache = opened(tiny(), MemoryClient())
    for count in (0, 1, BLOCK_TOKENS):
        restored = cache.restore(tokens(count))
        assert (restored.cache, restored.tokens, restored.hit) == (None, 0, None)


def test_only_what_the_plan_advises_and_the_fetch_delivers_is_used() -> None:
    model, client = tiny(), MemoryClient()
    cache = opened(model, client)
    ids = tokens(100)
    cache.save(ids, generate(model, ids, None, 1).cache)
    space = client.space(cache.fingerprint)
    full = cache.restore(ids)
    space.advise = 4
    advised = cache.restore(ids)
    assert advised.tokens == 64
    space.lose = 1  # the last row of the buffer holds rubbish now
    short = cache.restore(ids)
    assert short.tokens == 48
    for layer, whole in zip(layers(short), layers(full), strict=True):
        assert torch.equal(layer.keys, whole.keys[:, :, :48])
        assert torch.equal(layer.values, whole.values[:, :, :48])
    space.lose = 4
    lost = cache.restore(ids)
    assert (lost.cache, lost.tokens, lost.why) == (None, 0, "GENERATION_CHANGED")
    space.advise = 0
    declined = cache.restore(ids)
    assert (declined.cache, declined.tokens) == (None, 0)


def test_a_restored_cache_does_not_share_memory_with_the_next() -> None:
    model, client = tiny(), MemoryClient()
    cache = opened(model, client)
    for seed in (1, 2):
        ids = tokens(80, seed)
        cache.save(ids, generate(model, ids, None, 1).cache)
    first = cache.restore(tokens(80, 1))
    before = layers(first)[0].keys.clone()
    cache.restore(tokens(80, 2))
    assert torch.equal(layers(first)[0].keys, before)


def test_salts_do_not_meet() -> None:
    model, client = tiny(), MemoryClient()
    ids = tokens(80)
    opened(model, client, salt=b"one").save(ids, generate(model, ids, None, 1).cache)
    assert opened(model, client, salt=b"one").restore(ids).tokens == 64
    assert opened(model, client, salt=b"two").restore(ids).tokens == 0


def test_a_window_that_dropped_tokens_is_a_skipped_save_with_the_reason() -> None:
    model, client = tiny(sliding_window=32), MemoryClient()
    cache = opened(model, client)
    ids = tokens(100)
    made = generate(model, ids, None, 1)
    skipped = cache.save(ids, made.cache)
    assert skipped.pushed is None
    assert "window of 32" in skipped.why
    assert cache.save(ids, made.cache, from_token=80).pushed == pushed(1, 0)
    assert cache.save(ids[:90], made.cache, from_token=90).why == "no new whole block"


def test_unnamed_weights_are_of_one_cache() -> None:
    """Another model under the same name may be quite another: an approval must not join them."""
    client, ids = MemoryClient(), tokens(80)
    one, other = (opened(tiny(), client, weights_revision=None) for _ in range(2))
    one.save(ids, generate(tiny(), ids, None, 1).cache)
    assert one.restore(ids).tokens == 64
    assert other.restore(ids).tokens == 0
    assert one.fingerprint.complete("v1") != other.fingerprint.complete("v1")


def test_the_fingerprint_is_completed_when_the_weights_are_known(tmp_path: Path) -> None:
    model, client = tiny(), MemoryClient()
    model.save_pretrained(tmp_path / "model")
    weights = WeightsDigest(tmp_path / "model", memory=DigestMemory(tmp_path / "memory"))
    cache = opened(model, client, weights=weights, weights_revision=None)
    ids = tokens(80)
    made = generate(model, ids, None, 1)
    cache.save(ids, made.cache)
    assert cache.fingerprint.missing() == ("identity.weights_revision",)
    assert cache.restore(ids).tokens == 64  # the group's own, held
    revision = weights.start().wait(30.0)
    assert revision is not None
    assert cache.restore(ids).tokens == 0  # nothing was stored for the complete fingerprint yet
    assert cache.fingerprint.identity.weights_revision == revision
    cache.save(ids, made.cache)
    known = opened(model, client, weights_revision=revision)
    assert known.restore(ids).tokens == 64
    assert dataclasses.replace(known.fingerprint) == cache.fingerprint
    weights.close()
