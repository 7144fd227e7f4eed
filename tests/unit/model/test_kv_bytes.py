"""Bytes of KV: the formulas, and configurations of public models."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.model.kv_bytes import AttentionLayers, ModelShape, RecurrentLayers, from_hf_config
from kvstore.model.reasons import BadRequest

MIB = 2**20


def dense(layers: int, heads: int, kv_heads: int, size: int, /, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * size,
        **more,
    }


def latent(layers: int, heads: int, **more: Any) -> dict[str, Any]:
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": heads}
    return {"num_hidden_layers": layers, "num_attention_heads": heads, **mla, **more}


def alternating(layers: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (layers // 2)


def interval(layers: int, other: str, every: int) -> list[str]:
    return ["full_attention" if i % every == every - 1 else other for i in range(layers)]


QWEN25 = {"model_type": "qwen2", "sliding_window": 131_072, "use_sliding_window": False}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
}
# 118 layers, 10 of them attention; the counts matter here, not the places.
NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*" + "-M-M-M-M*" * 7 + "-M" * 12 + "-"
OSS = {"head_dim": 64, "sliding_window": 128, "model_type": "gpt_oss"}

ROWS: list[tuple[str, dict[str, Any], int, float]] = [
    (
        "Llama-2-7B",
        {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
        524_288,
        256,
    ),
    ("Llama-3.2-1B", dense(16, 32, 8, 64), 32_768, 16),
    ("Llama-3.2-3B", dense(28, 24, 8, 128), 114_688, 56),
    ("Llama-3.1-8B", dense(32, 32, 8, 128), 131_072, 64),
    ("Mistral-7B", dense(32, 32, 8, 128, model_type="mistral", sliding_window=None), 131_072, 64),
    ("Mixtral-8x7B", dense(32, 32, 8, 128, num_local_experts=8), 131_072, 64),
    ("Llama-3.1-70B", dense(80, 64, 8, 128), 327_680, 160),
    ("Qwen2.5-72B", dense(80, 64, 8, 128, max_window_layers=80, **QWEN25), 327_680, 160),
    ("Llama-3.1-405B", dense(126, 128, 8, 128), 516_096, 252),
    ("Mixtral-8x22B", dense(56, 48, 8, 128), 229_376, 112),
    ("Qwen2.5-7B", dense(28, 28, 4, 128, max_window_layers=28, **QWEN25), 57_344, 28),
    ("Qwen2.5-14B", dense(48, 40, 8, 128, max_window_layers=48, **QWEN25), 196_608, 96),
    ("Qwen2.5-32B", dense(64, 40, 8, 128, max_window_layers=64, **QWEN25), 262_144, 128),
    ("Qwen3-0.6B", dense(28, 16, 8, 64, head_dim=128), 114_688, 56),
    ("Qwen3-8B", dense(36, 32, 8, 128, head_dim=128), 147_456, 72),
    ("Qwen3-32B", dense(64, 64, 8, 80, head_dim=128), 262_144, 128),
    ("Qwen3-30B-A3B", dense(48, 32, 4, 64, head_dim=128), 98_304, 48),
    ("Qwen3-235B-A22B", dense(94, 64, 4, 64, head_dim=128), 192_512, 94),
    ("Qwen3-Coder-480B", dense(62, 96, 8, 64, head_dim=128), 253_952, 124),
    (
        "MiniMax-M2.5",
        dense(62, 48, 8, 64, head_dim=128, attn_type_list=[1] * 62),
        253_952,
        124,
    ),
    ("Phi-4-14B", dense(40, 40, 10, 128, sliding_window=None, model_type="phi3"), 204_800, 100),
    ("DeepSeek-V2-Lite", latent(27, 16, hidden_size=2048), 31_104, 15.2),
    ("DeepSeek-V3", latent(61, 128, num_nextn_predict_layers=1), 70_272, 34.3),
    ("DeepSeek-R1", latent(61, 128), 70_272, 34.3),
    ("Kimi-K2", {"text_config": latent(61, 64)}, 70_272, 34.3),
    ("DeepSeek-V3.2", latent(61, 128, index_head_dim=128, index_topk=2048), 78_080, 38.1),
    ("GLM-5", latent(78, 64, index_head_dim=128), 99_840, 48.8),
    ("gpt-oss-20b", dense(24, 64, 8, 45, layer_types=alternating(24), **OSS), 24_576, 12),
    ("gpt-oss-120b", dense(36, 64, 8, 45, layer_types=alternating(36), **OSS), 36_864, 18),
    (
        "Qwen3.5-27B",
        {
            "text_config": dense(
                64, 24, 4, 213, head_dim=256, layer_types=interval(64, "linear_attention", 4)
            )
            | DELTA
        },
        65_536,
        32,
    ),
    (
        "Qwen3.5-397B",
        {"text_config": dense(60, 32, 2, 128, head_dim=256, full_attention_interval=4) | DELTA},
        30_720,
        15,
    ),
    (
        "Nemotron-H-56B",
        dense(118, 64, 8, 128, head_dim=128, hybrid_override_pattern=NEMOTRON_PATTERN),
        40_960,
        20,
    ),
    (
        "Gemma-4-26B-A4B",
        {
            "text_config": dense(
                30,
                16,
                8,
                176,
                head_dim=256,
                global_head_dim=512,
                num_global_key_value_heads=2,
                attention_k_eq_v=True,
                sliding_window=1024,
                layer_types=interval(30, "sliding_attention", 6),
            )
        },
        20_480,
        10,
    ),
]


@pytest.mark.parametrize(
    ("config", "bytes_per_token", "block_mib"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_public_models(config: dict[str, Any], bytes_per_token: int, block_mib: float) -> None:
    shape = from_hf_config(config)
    assert shape.bytes_per_token("bfloat16") == bytes_per_token
    assert shape.bytes_per_token("float16") == bytes_per_token
    assert 512 * bytes_per_token / MIB == pytest.approx(block_mib, abs=0.06)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_fp8_halves_the_kv_but_not_the_index_keys(
    row: tuple[str, dict[str, Any], int, float],
) -> None:
    config = row[1]
    shape = from_hf_config(config)
    text = config.get("text_config", config)
    index = text.get("index_head_dim", 0) * text["num_hidden_layers"]
    assert 2 * shape.bytes_per_token("float8_e4m3fn") - index == row[2]


# ---------------------------------------------------------------- formulas


def test_windows_stop_growing() -> None:
    shape = from_hf_config(dense(24, 64, 8, 45, layer_types=alternating(24), **OSS))
    layer_bytes = 12 * 2 * 8 * 64 * 2
    assert shape.sequence_bytes(100, "bfloat16") == 200 * layer_bytes
    assert shape.sequence_bytes(128, "bfloat16") == 256 * layer_bytes
    assert shape.sequence_bytes(1_000, "bfloat16") == 1_128 * layer_bytes
    assert shape.sequence_bytes(0, "bfloat16") == 0
    assert shape.fixed_bytes("bfloat16") == 0


def test_window_and_full_layers_may_have_other_sizes() -> None:
    shape = from_hf_config(ROWS[-1][1])
    assert shape.attention == (
        AttentionLayers(5, 2, 512),
        AttentionLayers(25, 8, 256, window_tokens=1024),
    )


def test_recurrent_state_is_fixed() -> None:
    shape = from_hf_config(next(row[1] for row in ROWS if row[0] == "Qwen3.5-27B"))
    state = 48 * 128 * 128
    conv = 3 * (2 * 16 * 128 + 48 * 128)
    assert shape.recurrent == RecurrentLayers(48, state, conv)
    fixed = 48 * (state * 4 + conv * 2)
    assert shape.fixed_bytes("bfloat16") == fixed
    assert shape.sequence_bytes(10, "bfloat16") == 10 * 65_536 + fixed


def test_mamba_state() -> None:
    sizes = {
        "mamba_num_heads": 64,
        "mamba_head_dim": 32,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    }
    config = dense(3, 32, 2, 128, hybrid_override_pattern="ME*", mamba_ssm_dtype="bfloat16")
    shape = from_hf_config(config | sizes)
    assert shape.recurrent == RecurrentLayers(
        1, 64 * 32 * 128, 3 * (64 * 32 + 2 * 8 * 128), "bfloat16"
    )


def test_an_unknown_state_is_never_guessed() -> None:
    shape = from_hf_config(dense(4, 8, 2, 64, full_attention_interval=4))
    assert shape.bytes_per_token("bfloat16") == 2 * 2 * 64 * 2
    with pytest.raises(BadRequest):
        shape.sequence_bytes(1, "bfloat16")


@pytest.mark.parametrize(
    ("config", "full", "window"),
    [
        (dense(8, 8, 2, 64, model_type="mistral", sliding_window=4096), 0, 8),
        (dense(8, 8, 2, 64, model_type="qwen2", sliding_window=4096), 8, 0),
        (
            dense(
                8,
                8,
                2,
                64,
                model_type="qwen2",
                sliding_window=4096,
                use_sliding_window=True,
                max_window_layers=6,
            ),
            6,
            2,
        ),
        (dense(8, 8, 2, 64, model_type="gemma2", sliding_window=4096), 4, 4),
        (dense(12, 8, 2, 64, model_type="gemma3_text", sliding_window=512), 2, 10),
        (dense(8, 8, 2, 64, sliding_window=512, sliding_window_pattern=4), 2, 6),
        (
            dense(
                8,
                8,
                2,
                64,
                layer_types=interval(8, "chunked_attention", 4),
                attention_chunk_size=8192,
            ),
            2,
            6,
        ),
        (
            dense(
                8,
                8,
                2,
                64,
                layer_types=interval(8, "sliding_attention", 4),
                sliding_window=512,
                num_kv_shared_layers=3,
            ),
            1,
            4,
        ),
        (dense(8, 8, 2, 64, attn_layer_period=4, attn_layer_offset=2), 2, 0),
        (dense(8, 8, 2, 64, attn_layer_indices=[1, 5]), 2, 0),
        (dense(4, 8, 2, 64, layers_block_type=["mamba", "attention", "moe", "mlp"]), 1, 0),
        (dense(4, 8, 2, 64, attn_type_list=[0, 0, 1, 0]), 1, 0),
    ],
)
def test_spellings_of_layer_kinds(config: dict[str, Any], full: int, window: int) -> None:
    shape = from_hf_config(config)
    assert sum(a.layers for a in shape.attention if not a.window_tokens) == full
    assert sum(a.layers for a in shape.attention if a.window_tokens) == window


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, AttentionLayers(12, 12, 64)),
        (
            {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
            | {"multi_query": True, "new_decoder_architecture": False},
            AttentionLayers(32, 1, 64),
        ),
        (
            {"num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192}
            | {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8},
            AttentionLayers(60, 8, 64),
        ),
        (
            {"num_layers": 28, "num_attention_heads": 32, "kv_channels": 128}
            | {"multi_query_attention": True, "multi_query_group_num": 2},
            AttentionLayers(28, 2, 128),
        ),
    ],
)
def test_older_spellings(config: dict[str, Any], expected: AttentionLayers) -> None:
    assert from_hf_config(config) == ModelShape((expected,))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "num_hidden_layers"),
        ({"text_config": {}}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 7}, "head_dim"),
        (dense(2, 8, 2, 64, num_kv_heads=[1, 2]) | {"num_key_value_heads": None}, "num_kv_heads"),
        (dense(2, 8, 2, 64, layer_types=["full_attention"]), "layer_types"),
        (dense(2, 8, 2, 64, layer_types=["full_attention", "hyena"]), "layer_types"),
        (dense(2, 8, 2, 64, layer_types="full_attention"), "layer_types"),
        (dense(2, 8, 2, 64, layer_types=["sliding_attention"] * 2), "sliding_window"),
        (dense(2, 8, 2, 64, hybrid_override_pattern="M?"), "hybrid_override_pattern"),
        (dense(2, 8, 2, 64, attn_type_list=[1, 2]), "attn_type_list"),
        (dense(2, 8, 2, 64, attn_layer_indices=[2]), "attn_layer_indices"),
        (dense(2, 8, 2, 64, attn_layer_period=2, attn_layer_offset=2), "attn_layer_offset"),
        (dense(2, 8, 2, 64, attention_chunk_size=8192), "layer_types"),
        (dense(2, 8, 2, 64, num_kv_shared_layers=2), "num_kv_shared_layers"),
        (dense(2, 8, 2, 64, block_types=["recurrent"]), "block_types"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512}, "qk_rope_head_dim"),
        ([], "config"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_field(config: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        from_hf_config(config)
    assert caught.value.setting == field


@pytest.mark.parametrize(
    "sizes",
    [
        {"layers": 0, "kv_heads": 1, "head_size": 1},
        {"layers": 1},
        {"layers": 1, "kv_heads": 1},
        {"layers": 1, "kv_heads": 1, "head_size": 1, "latent_size": 1},
        {"layers": 1, "latent_size": 1, "window_tokens": -1},
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(BadRequest):
        AttentionLayers(**sizes)


def test_unknown_types_and_negative_lengths_are_refused() -> None:
    shape = from_hf_config(dense(2, 8, 2, 64))
    with pytest.raises(BadRequest):
        shape.bytes_per_token("bf16")
    with pytest.raises(BadRequest):
        shape.sequence_bytes(-1, "bfloat16")
