"""KV blocks cut from a live transformers cache and rebuilt: the same bits, the same continuation.

Models are tiny with random weights. A restored cache is compared bit for bit with the live one; a
fresh prefill of the whole prompt only within rounding, since its matrix products have other shapes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.model.fingerprint import Fingerprint  # noqa: E402
from kvstore.model.layout import layout_of  # noqa: E402
from kvstore_client.engines.transformers import (  # noqa: E402
    BlockCutter,
    BlockShape,
    DroppedTokensError,
    UnsupportedCacheError,
    cut_blocks,
    fingerprint_of,
    first_kept_token,
    generate,
    rebuild_cache,
    state_digest,
)

pytestmark = pytest.mark.torch

SEED = 11
BLOCK_TOKENS = 16
VOCABULARY = 211
PREFIX_TOKENS = 6 * BLOCK_TOKENS
PROMPT_TOKENS = PREFIX_TOKENS + 21
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    # A random model with the usual 0.02 gives nearly the same logits for any KV.
    "initializer_range": 0.08,
}


def llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes})
    return made(transformers.LlamaForCausalLM, config)


def llama_mha() -> Any:
    return llama(num_key_value_heads=4)


def qwen2() -> Any:
    return made(
        transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES, num_key_value_heads=2)
    )


def qwen3() -> Any:
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=24)
    return made(transformers.Qwen3ForCausalLM, config)


def gemma3(window: int) -> Any:
    config = transformers.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return made(transformers.Gemma3ForCausalLM, config)


def made(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return kind(config).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama-gqa": llama,
    "llama-mha": llama_mha,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
DTYPES = ["float32", "bfloat16", "float16"]


def prompt_ids(seed: int = SEED) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]


def prefilled(model: Any, ids: list[int]) -> Any:
    return generate(model, ids, None, 1).cache


def blobs(cache: Any, count: int) -> list[bytes]:
    shape = BlockCutter(cache, BLOCK_TOKENS).shape
    out = np.zeros((count, shape.block_bytes), np.uint8)
    cut_blocks(cache, 0, count, BLOCK_TOKENS, out)
    return [row.tobytes() for row in out]


def assert_same_bits(left: Any, right: Any) -> None:
    assert len(left.layers) == len(right.layers)
    for one, other in zip(left.layers, right.layers, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        for a, b in ((one.keys, other.keys), (one.values, other.values)):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert bits(a) == bits(b)


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bit_exact_and_continues_equally(name: str, dtype: str) -> None:
    model = MODELS[name]().to(getattr(torch, dtype))
    ids = prompt_ids()
    live = prefilled(model, ids[:PREFIX_TOKENS])
    restored = rebuild_cache(
        model.config,
        blobs(live, PREFIX_TOKENS // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        dtype=model.dtype,
    )
    assert_same_bits(live, restored)
    from_live = generate(model, ids, live, 24)
    from_store = generate(model, ids, restored, 24)
    assert from_store.token_ids == from_live.token_ids
    assert bits(from_store.first_logits) == bits(from_live.first_logits)
    assert_same_bits(from_live.cache, from_store.cache)
    assert len(set(from_live.token_ids)) > 1  # else any KV would have done


@pytest.mark.parametrize("name", MODELS)
def test_restored_equals_a_fresh_prefill_within_rounding(name: str) -> None:
    model = MODELS[name]()
    ids = prompt_ids()
    live = prefilled(model, ids[:PREFIX_TOKENS])
    restored = rebuild_cache(
        model.config,
        blobs(live, PREFIX_TOKENS // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        dtype=model.dtype,
    )
    from_store = generate(model, ids, restored, 24)
    fresh = generate(model, ids, None, 24)
    torch.testing.assert_close(from_store.first_logits, fresh.first_logits, rtol=0, atol=2e-5)
    assert from_store.token_ids == fresh.token_ids


def test_wrong_kv_changes_the_logits() -> None:
    """The comparison above can fail: another prompt's blocks are seen at once."""
    model = llama()
    ids = prompt_ids()
    other = prefilled(model, prompt_ids(SEED + 1)[:PREFIX_TOKENS])
    wrong = rebuild_cache(
        model.config,
        blobs(other, PREFIX_TOKENS // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        dtype=model.dtype,
    )
    fresh = generate(model, ids, None, 1)
    difference = generate(model, ids, wrong, 1).first_logits - fresh.first_logits
    assert float(difference.abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_layer_side_head_token_dim(dtype: str) -> None:
    model = llama().to(getattr(torch, dtype))
    cache = prefilled(model, prompt_ids())
    shape = BlockCutter(cache, BLOCK_TOKENS).shape
    block = blobs(cache, 4)[3]
    size = model.dtype.itemsize
    chance = random.Random(SEED)
    for _ in range(50):
        layer, side = chance.randrange(shape.layers), chance.randrange(2)
        head, token = chance.randrange(shape.kv_heads), chance.randrange(BLOCK_TOKENS)
        dim = chance.randrange(shape.head_size)
        index = layer
        for extent, coordinate in zip(shape.elements[1:], (side, head, token, dim), strict=True):
            index = index * extent + coordinate
        tensor = (cache.layers[layer].keys, cache.layers[layer].values)[side]
        element = tensor[0, head, 3 * BLOCK_TOKENS + token, dim]
        assert block[index * size : (index + 1) * size] == bits(element)


def test_one_buffer_and_a_buffer_a_block_give_the_same_bytes() -> None:
    cache = prefilled(qwen3(), prompt_ids())
    shape = BlockCutter(cache, BLOCK_TOKENS).shape
    whole = bytearray(3 * shape.block_bytes)
    cut_blocks(cache, 2, 5, BLOCK_TOKENS, whole)
    single = [bytearray(shape.block_bytes) for _ in range(3)]
    cut_blocks(cache, 2, 5, BLOCK_TOKENS, single)
    assert bytes(whole) == b"".join(single) == b"".join(blobs(cache, 5)[2:])
    rebuilt = rebuild_cache(
        qwen3().config, memoryview(bytes(whole)), block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    assert blobs(rebuilt, 3) == blobs(cache, 5)[2:]


def test_nothing_to_restore_is_an_empty_cache() -> None:
    model = llama()
    nothings: list[Any] = [[], b"", np.empty((0, 64), np.uint8)]
    for nothing in nothings:
        empty = rebuild_cache(model.config, nothing, block_tokens=BLOCK_TOKENS, dtype=model.dtype)
        assert empty.get_seq_length() == 0
    with pytest.raises(UnsupportedCacheError, match="empty"):
        cut_blocks(empty, 0, 0, BLOCK_TOKENS, b"")


@pytest.mark.parametrize(
    ("start", "end", "size", "message"),
    [
        (0, 8, 8, "is not between"),  # 117 tokens hold 7 whole blocks
        (-1, 1, 2, "no range"),
        (3, 2, 0, "no range"),
        (0, 2, 3, "do not fit"),
    ],
)
def test_a_range_or_buffer_that_does_not_fit_is_refused(
    start: int, end: int, size: int, message: str
) -> None:
    cache = prefilled(llama(), prompt_ids())
    shape = BlockCutter(cache, BLOCK_TOKENS).shape
    with pytest.raises(ValueError, match=message):
        cut_blocks(cache, start, end, BLOCK_TOKENS, bytearray(size * shape.block_bytes))


def test_buffers_of_another_size_and_read_only_targets_are_refused() -> None:
    model = llama()
    cache = prefilled(model, prompt_ids())
    shape = BlockCutter(cache, BLOCK_TOKENS).shape
    with pytest.raises(ValueError, match="read-only"):
        cut_blocks(cache, 0, 1, BLOCK_TOKENS, bytes(shape.block_bytes))
    with pytest.raises(ValueError, match="a block has"):
        cut_blocks(cache, 0, 1, BLOCK_TOKENS, [bytearray(shape.block_bytes - 2)])
    with pytest.raises(ValueError, match="whole number"):
        rebuild_cache(model.config, bytes(10), block_tokens=BLOCK_TOKENS, dtype=model.dtype)


def test_sliding_window_that_dropped_nothing_round_trips() -> None:
    model = gemma3(window=256)
    ids = prompt_ids()
    live = prefilled(model, ids[:PREFIX_TOKENS])
    assert first_kept_token(live) == 0
    restored = rebuild_cache(
        model.config, blobs(live, 6), block_tokens=BLOCK_TOKENS, dtype=model.dtype
    )
    assert_same_bits(live, restored)
    assert generate(model, ids, restored, 24).token_ids == generate(model, ids, live, 24).token_ids


def test_sliding_window_that_dropped_tokens_is_refused_with_the_layer() -> None:
    model = gemma3(window=48)
    cache = prefilled(model, prompt_ids()[:PREFIX_TOKENS])
    dropped = PREFIX_TOKENS - 47
    assert first_kept_token(cache) == dropped
    shape_bytes = BlockCutter(cache, BLOCK_TOKENS, 5 * BLOCK_TOKENS).shape.block_bytes
    with pytest.raises(DroppedTokensError, match=f"layer 0.*window of 48.*first {dropped}"):
        cut_blocks(cache, 0, 1, BLOCK_TOKENS, bytearray(shape_bytes))


def test_sliding_window_blocks_saved_in_time_restore_past_the_window() -> None:
    """Blocks are cut turn by turn while they are complete; together they outlast the window."""
    model = gemma3(window=48)
    ids = prompt_ids()
    cache, saved = None, []
    for block in range(6):
        end = (block + 1) * BLOCK_TOKENS
        cache = generate(model, ids[:end], cache, 1).cache
        out = bytearray(BlockCutter(cache, BLOCK_TOKENS, block * BLOCK_TOKENS).shape.block_bytes)
        cut_blocks(cache, block, block + 1, BLOCK_TOKENS, out)
        saved.append(out)
    restored = rebuild_cache(model.config, saved, block_tokens=BLOCK_TOKENS, dtype=model.dtype)
    assert_same_bits(cache, restored)
    assert generate(model, ids, restored, 24).token_ids == generate(model, ids, cache, 24).token_ids


def test_caches_that_cannot_be_cut_are_refused_with_the_reason() -> None:
    model = llama()
    ids = torch.tensor([prompt_ids(), prompt_ids(3)])
    batch = transformers.DynamicCache(config=model.config)
    forward_argument = "cache" if "cache" in model.forward.__annotations__ else "past_key_values"
    with torch.inference_mode():
        model(input_ids=ids, **{forward_argument: batch})
    with pytest.raises(UnsupportedCacheError, match="batch of 2"):
        BlockCutter(batch, BLOCK_TOKENS)
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(UnsupportedCacheError, match="StaticLayer"):
        BlockCutter(static, BLOCK_TOKENS)
    latent = transformers.DeepseekV3Config(num_hidden_layers=2)
    with pytest.raises(UnsupportedCacheError, match="latent"):
        BlockShape.of_config(latent, block_tokens=BLOCK_TOKENS, dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_fingerprint_and_codec_agree_on_the_bytes(name: str) -> None:
    model = MODELS[name]().to(torch.bfloat16)
    layout = layout_of(fingerprint(model))
    cutter = BlockCutter(prefilled(model, prompt_ids()), BLOCK_TOKENS)
    assert layout.block_bytes == cutter.shape.block_bytes
    assert layout.part_shape(0) == cutter.shape.elements


def fingerprint(model: Any, **changes: Any) -> Fingerprint:
    options = {"model_name": "tiny", "weights_revision": "r1", **changes}
    return fingerprint_of(model, **options)


def test_fingerprint_names_what_differs() -> None:
    base = fingerprint(llama())
    assert base == fingerprint(llama())
    assert base.missing() == ()
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    cases: list[tuple[Fingerprint, set[str]]] = [
        (fingerprint(llama(rope_parameters=rope)), {"identity.config_digest"}),
        (fingerprint(llama(rms_norm_eps=1e-3)), {"identity.config_digest"}),
        (
            fingerprint(llama().to(torch.bfloat16)),
            {"identity.config_digest", "encoding.kv_dtype"},
        ),
        (fingerprint(llama(), weights_revision="r2"), {"identity.weights_revision"}),
        (fingerprint(llama(), weight_epoch=1), {"identity.weight_epoch"}),
        (fingerprint(llama(), block_tokens=32), {"encoding.block_tokens"}),
        (fingerprint(llama(), adapter_name="a"), {"identity.adapter_name"}),
        (
            fingerprint(llama(attn_implementation="eager")),
            {"encoding.attention_backend"},
        ),
    ]
    for offered, fields in cases:
        assert {d.field for d in base.differences(offered)} == fields


def test_fingerprint_is_blind_to_what_does_not_change_kv() -> None:
    model = llama()
    before = fingerprint(model)
    model.config.name_or_path = "/elsewhere/model"
    model.config.use_cache = False
    model.config.eos_token_id = 5
    assert fingerprint(model) == before


def test_an_unknown_revision_stays_unknown() -> None:
    offered = fingerprint_of(llama(), model_name="tiny")
    assert offered.missing() == ("identity.weights_revision",)
    with_adapter = fingerprint(llama(), adapter_name="a")
    assert with_adapter.missing() == ("identity.adapter_digest",)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode"):
        fingerprint(llama().train())
    model = llama()
    model.peft_config = {"default": object()}
    with pytest.raises(ValueError, match="adapter"):
        fingerprint(model)
    ids = prompt_ids()
    full = prefilled(model, ids)
    with pytest.raises(ValueError, match="leave one to compute"):
        generate(model, ids, full, 1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, ids, None, 0)


def test_state_digest_sees_every_name_type_shape_and_byte() -> None:
    chance = random.Random(SEED)
    state = dict(llama().to(torch.bfloat16).state_dict())
    base = state_digest(state.items())
    assert state_digest(reversed(state.items())) == base
    assert base.startswith("state:sha256:")
    for name in chance.sample(sorted(state), 5):
        flipped = state[name].clone()
        raw = flipped.reshape(-1).view(torch.uint8)
        raw[chance.randrange(raw.numel())] ^= 1
        assert state_digest({**state, name: flipped}.items()) != base
    first = sorted(state)[0]
    tensor = state.pop(first)
    assert state_digest({**state, first + "x": tensor}.items()) != base
    assert state_digest({**state, first: tensor.view(torch.float16)}.items()) != base
    assert state_digest({**state, first: tensor.reshape(-1)}.items()) != base
    assert state_digest(state.items()) != base


def test_state_digest_refuses_tensors_without_bytes() -> None:
    with pytest.raises(ValueError, match="w has no plain bytes"):
        state_digest([("w", torch.empty(3, device="meta"))])


def test_generate_stops_at_an_end_token_and_times_the_first() -> None:
    model = llama()
    ids = prompt_ids()
    ticks = iter(range(0, 1000, 10))
    free = generate(model, ids, None, 8, clock_ns=lambda: next(ticks))
    assert (free.first_token_ns, free.total_ns) == (10, 20)
    assert free.cache.get_seq_length() == len(ids) + 7
    stopped = generate(model, ids, None, 8, eos_token_ids=[free.token_ids[2]])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[2]) + 1]


def test_a_shape_has_only_positive_sizes() -> None:
    shape = BlockShape(3, 2, 16, BLOCK_TOKENS, torch.bfloat16)
    assert shape.block_bytes == 3 * 2 * 2 * 16 * 16 * 2
    with pytest.raises(ValueError, match="positive"):
        dataclasses.replace(shape, layers=0)
