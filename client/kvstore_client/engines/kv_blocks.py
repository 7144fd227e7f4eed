"""Blocks of KV bytes cut out of a transformers cache, and a cache rebuilt from them.

The bytes of one block are `[layer][K, V][kv_head][block_tokens][head_size]`, contiguous, in the
element type of the cache (`ELEMENT_ORDER`). Both ways move bits: no arithmetic, no conversion.

Promises: cutting and rebuilding gives the same bits for every floating type; a cache whose bytes
could not be told (a window that dropped tokens, quantised or latent layers, a batch) is refused
with the reason, never cut wrongly. Imports torch and transformers; `import kvstore_client` does not
import this module. Used by `kvstore_client.engines.transformers` and by applications.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvstore.model.fingerprint import ORDER_HEADS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = [
    "ELEMENT_ORDER",
    "BlockCutter",
    "BlockShape",
    "DroppedTokensError",
    "UnsupportedCacheError",
    "bits_of",
    "cut_blocks",
    "first_kept_token",
    "place_layer",
    "rebuild_cache",
]


ELEMENT_ORDER: Final = ORDER_HEADS

Bytes: TypeAlias = "npt.NDArray[np.uint8] | memoryview | bytearray | bytes"
# Bits of an element as an integer of its size: numpy knows no bfloat16, and integers are never
# rounded.
_BITS: Final[dict[int, tuple[torch.dtype, type[np.generic]]]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}


class UnsupportedCacheError(ValueError):
    """This model's or this cache's KV cannot be cut into blocks; the message says why."""


class DroppedTokensError(UnsupportedCacheError):
    """A sliding-window layer has already dropped tokens of the blocks that were asked for."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of one block: `[layers, 2, kv_heads, block_tokens, head_size]` elements of
    `dtype`."""

    layers: int
    kv_heads: int
    head_size: int
    block_tokens: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_size, self.block_tokens) < 1:
            raise ValueError(f"a block shape has only positive sizes, not {self}")

    @classmethod
    def of_config(
        cls, config: PreTrainedConfig, *, block_tokens: int, dtype: torch.dtype
    ) -> BlockShape:
        """The shape for a model's configuration. Raises `UnsupportedCacheError`."""
        text = config.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None):
            raise UnsupportedCacheError("latent attention (MLA) caches K and V of different sizes")
        if getattr(text, "num_kv_shared_layers", 0):
            raise UnsupportedCacheError("layers that share the KV of another layer are not cut")
        layers = _layers(DynamicCache(config=config))
        heads = int(text.num_attention_heads)
        return cls(
            layers=len(layers) or int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_size=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            block_tokens=block_tokens,
            dtype=dtype,
        )

    @property
    def elements(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_size)

    @property
    def block_bytes(self) -> int:
        return (
            2 * self.layers * self.kv_heads * self.block_tokens * self.head_size
        ) * self.dtype.itemsize


class BlockCutter:
    """Copies single blocks out of a cache, for writers that hand out one buffer a block.

    The cache has batch size 1 and may lie on any device (tokens `start_token` on are brought to the
    CPU here, once). It must not be changed while the cutter is used. Raises `DroppedTokensError` if
    a window has dropped `start_token`, `UnsupportedCacheError` for other caches that cannot be cut.
    """

    def __init__(self, cache: DynamicCache, block_tokens: int, start_token: int = 0) -> None:
        if block_tokens < 1 or start_token % block_tokens:
            raise ValueError(f"token {start_token} does not begin a block of {block_tokens} tokens")
        layers = _layers(cache)
        if not layers:
            raise UnsupportedCacheError("the cache is empty")
        for index, layer in enumerate(layers):
            _require_kept(index, layer, start_token)
        self._start_token = start_token
        self._rows = [_rows_from(layer, start_token) for layer in layers]
        keys = layers[0].keys
        self.shape = BlockShape(len(layers), keys.shape[1], keys.shape[3], block_tokens, keys.dtype)
        self.tokens = int(cache.get_seq_length())

    @property
    def end_block(self) -> int:
        """The number of whole blocks that the cache holds, dropped ones included."""
        return self.tokens // self.shape.block_tokens

    def cut(self, block: int, out: Bytes) -> None:
        """Copies block `block` (counted from the prompt's start) into `out`, `block_bytes` long."""
        first = block * self.shape.block_tokens - self._start_token
        if first < 0 or block >= self.end_block:
            raise ValueError(
                f"block {block} of {self.shape.block_tokens} tokens is not between token "
                f"{self._start_token} and token {self.tokens}"
            )
        target = _as_block(out, self.shape)
        if not target.flags.writeable:
            raise ValueError("the buffer to cut into is read-only")
        for layer, sides in enumerate(self._rows):
            for side, rows in enumerate(sides):
                target[layer, side] = rows[:, first : first + self.shape.block_tokens]


def cut_blocks(
    cache: DynamicCache,
    start_block: int,
    end_block: int,
    block_tokens: int,
    out: Bytes | Sequence[Bytes],
) -> BlockShape:
    """Copies blocks `start_block <= i < end_block` of the cache into `out`.

    `out`: one writable buffer of `(end_block - start_block) * block_bytes` bytes, or one of
    `block_bytes` for each block. Errors as of `BlockCutter`; also ValueError for a range that the
    cache does not fill and for buffers of another size. Returns the shape of the blocks.
    """
    if not 0 <= start_block <= end_block:
        raise ValueError(f"{start_block} to {end_block} is no range of blocks")
    cutter = BlockCutter(cache, block_tokens, start_block * block_tokens)
    targets = _split(out, cutter.shape)
    if len(targets) != end_block - start_block:
        raise ValueError(f"{end_block - start_block} blocks do not fit {len(targets)} buffers")
    for block, target in enumerate(targets, start_block):
        cutter.cut(block, target)
    return cutter.shape


def rebuild_cache(
    model_config: PreTrainedConfig,
    buffers: Bytes | Sequence[Bytes],
    *,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> DynamicCache:
    """A cache that holds the blocks in `buffers`, the first block being the prompt's first tokens.

    `buffers`: one buffer of whole blocks, or one buffer a block; they may be read-only and are not
    kept. Sliding-window layers keep what the window leaves of them, as after a prefill. Raises
    `UnsupportedCacheError` for a model without plain K and V, ValueError for a buffer of another
    size.
    """
    shape = BlockShape.of_config(model_config, block_tokens=block_tokens, dtype=dtype)
    sources = [_as_block(buffer, shape) for buffer in _split(buffers, shape)]
    tokens = len(sources) * block_tokens
    whole = torch.empty((shape.layers, 2, shape.kv_heads, tokens, shape.head_size), dtype=dtype)
    bits = bits_of(whole)
    for index, source in enumerate(sources):
        bits[:, :, :, index * block_tokens : (index + 1) * block_tokens] = source
    cache = DynamicCache(config=model_config)
    if tokens:
        whole = whole.to(device)
        for index, layer in enumerate(_layers(cache)):
            place_layer(layer, whole[index, 0][None], whole[index, 1][None])
    return cache


def place_layer(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Gives an empty layer its K and V, `[1, kv_heads, tokens, head_size]` each, without a copy."""
    if type(layer) is DynamicSlidingWindowLayer:
        layer.update(keys, values)  # keeps what the window leaves, and counts the rest
        return
    # `update` would append to nothing by copying all of it: into fresh memory, whose page faults
    # took five times as long as everything else here.
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


def first_kept_token(cache: DynamicCache) -> int:
    """The first token whose K and V every layer still holds: 0 unless a window dropped some."""
    return max((_dropped_tokens(layer) for layer in _layers(cache)), default=0)


def _layers(cache: DynamicCache) -> list[Any]:
    """The layers, which all keep plain K and V."""
    for index, layer in enumerate(cache.layers):
        # Exact types: a subclass (quantised, indexed) keeps something else in its tensors.
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedCacheError(
                f"layer {index} of the cache is a {type(layer).__name__}; blocks are cut from "
                "DynamicLayer and DynamicSlidingWindowLayer"
            )
    layers: list[Any] = list(cache.layers)
    return layers


def _dropped_tokens(layer: Any) -> int:
    held = int(layer.get_seq_length())
    return held - int(layer.keys.shape[-2]) if held else 0


def _require_kept(index: int, layer: Any, start_token: int) -> None:
    dropped = _dropped_tokens(layer)
    if start_token < dropped:
        raise DroppedTokensError(
            f"layer {index} has a window of {layer.sliding_window} tokens and has dropped the "
            f"first {dropped}: blocks from token {start_token} on can no longer be cut; save "
            "earlier, or prefill into a cache made without a config"
        )


def _rows_from(layer: Any, start_token: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Bits of K and V from `start_token` on: `[kv_heads, tokens, head_size]` each, on the CPU."""
    held = int(layer.get_seq_length())
    if not held:
        raise UnsupportedCacheError("a layer of the cache is empty")
    keys, values = layer.keys, layer.values
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise UnsupportedCacheError("the cache has K and V of different shapes or types")
    if keys.shape[0] != 1:
        raise UnsupportedCacheError(f"the cache holds a batch of {keys.shape[0]}, not of 1")
    first = start_token - _dropped_tokens(layer)
    return (
        bits_of(keys[0, :, first:].detach().to("cpu")),
        bits_of(values[0, :, first:].detach().to("cpu")),
    )


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A numpy view of a CPU tensor's bits, sharing its memory, in the same shape."""
    integer, _ = _BITS[tensor.dtype.itemsize]
    view: npt.NDArray[Any] = tensor.view(integer).numpy()
    return view


def _split(buffers: Any, shape: BlockShape) -> Sequence[Any]:
    """One buffer a block."""
    if not isinstance(buffers, memoryview | bytearray | bytes | np.ndarray):
        return list(buffers)
    if not len(buffers):
        return []
    flat = np.frombuffer(buffers, dtype=np.uint8)
    if flat.nbytes % shape.block_bytes:
        raise ValueError(
            f"{flat.nbytes} bytes are no whole number of {shape.block_bytes}-byte blocks"
        )
    return list(flat.reshape(-1, shape.block_bytes))


def _as_block(buffer: Any, shape: BlockShape) -> npt.NDArray[Any]:
    """The caller's memory as integers in the shape `elements`."""
    _, element = _BITS[shape.dtype.itemsize]
    size = memoryview(buffer).nbytes
    if size != shape.block_bytes:
        raise ValueError(f"a block has {shape.block_bytes} bytes, not {size}")
    array: npt.NDArray[Any] = np.frombuffer(buffer, dtype=element)
    return array.reshape(shape.elements)
