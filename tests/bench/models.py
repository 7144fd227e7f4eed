"""Fingerprints of the sizes that the benchmarks use."""

from __future__ import annotations

from kvstore.model.fingerprint import Encoding, Fingerprint, Geometry, Identity
from kvstore.model.layout import layout_of


def fingerprint(name: str, layers: int, kv_heads: int, head_size: int) -> Fingerprint:
    """bfloat16, 16 tokens a block: a block has layers x 2 x kv_heads x head_size x 32 bytes."""
    return Fingerprint(
        Identity(model_name=name, weights_revision="bench", config_digest="bench"),
        Geometry(attention="gqa", layers=layers, kv_heads=kv_heads, head_size=head_size),
        Encoding(kv_dtype="bfloat16", block_tokens=16, element_order="layer_kv_head_token_dim"),
    )


MIB_BLOCKS = fingerprint("bench-1MiB", layers=16, kv_heads=8, head_size=128)
PAGE_BLOCKS = fingerprint("bench-4KiB", layers=1, kv_heads=1, head_size=64)

assert layout_of(MIB_BLOCKS).block_bytes == 1 << 20
assert layout_of(PAGE_BLOCKS).block_bytes == 4096
