"""Tiny models with weights that make diverse tokens, written to a folder.

    python -m tests.engines.models FOLDER SEED

Random weights of the usual spread give flat logits, with which wrong KV would go unnoticed; these
are wide enough that every token depends on the whole prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 1024
CONTEXT_TOKENS = 2048


def make_model(folder: Path, seed: int) -> None:
    """A Llama of 4 layers, 4 heads, 2 KV heads of 64: 2 KiB of KV a token in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    """Arguments: see the module's docstring."""
    make_model(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
