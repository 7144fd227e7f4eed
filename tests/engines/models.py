"""Tiny models with weights that make diverse tokens, written to a folder.

    python -m tests.engines.models FOLDER SEED llama|window|ragged|windows|adapter

Random weights of the usual spread give flat logits, with which wrong KV would go unnoticed; these
are wide enough that every token depends on the whole prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 1024
CONTEXT_TOKENS = 2048


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
"""2 KiB of KV a token in bfloat16."""
WINDOW_TOKENS = 128
ADAPTER_RANK = 8


def make_llama(folder: Path, seed: int) -> None:
    """Full attention in each layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.to(torch.bfloat16).save_pretrained(folder)


def make_window(folder: Path, seed: int, kinds: str = "wfwf") -> None:
    """A Gemma whose layers see WINDOW_TOKENS (w) or all (f): by default every second one."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    names = {"w": "sliding_attention", "f": "full_attention"}
    config = Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": len(kinds)},
        sliding_window=WINDOW_TOKENS,
        layer_types=[names[kind] for kind in kinds],
        query_pre_attn_scalar=64,
    )
    model: Any = Gemma3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def make_ragged(folder: Path, seed: int) -> None:
    """Three windows to two full layers: one cache group has fewer layers than the others."""
    make_window(folder, seed, "wfwfw")


def make_windows(folder: Path, seed: int) -> None:
    """No layer sees more than WINDOW_TOKENS."""
    make_window(folder, seed, "wwww")


def make_adapter(folder: Path, seed: int) -> None:
    """LoRA for the projections of `make_llama`'s models that decide K and V."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    hidden, kv = 256, 2 * 64
    weights = {}
    for layer in range(4):
        for name in ("k_proj", "v_proj"):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(ADAPTER_RANK, hidden) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(kv, ADAPTER_RANK) * 0.2
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": ["k_proj", "v_proj"],
        "base_model_name_or_path": "tiny",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


MAKERS = {
    "llama": make_llama,
    "window": make_window,
    "ragged": make_ragged,
    "windows": make_windows,
    "adapter": make_adapter,
}


def main() -> None:
    """Arguments: see the module's docstring."""
    folder, seed, kind = sys.argv[1:]
    MAKERS[kind](Path(folder), int(seed))


if __name__ == "__main__":
    main()
