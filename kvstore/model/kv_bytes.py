"""How many bytes of KV a model needs: the formulas, and a model's shape from its configuration.

With s bytes an element, one token of one layer takes `2 * kv_heads * head_size * s` (keys and
values of MHA, GQA, MQA) or `(kv_lora_rank + qk_rope_head_dim) * s` (MLA: one copy, not split over
tensor-parallel ranks), plus an index key of 1 byte an element where sparse attention has one.
Layers of full attention grow with the tokens, window layers stop at the window, recurrent layers
have a fixed state.

For planning and capacity (`kvstore plan`, the simulator, the docs); what is stored is measured by
`layout.py`. It promises an answer from the configuration alone, or BadRequest naming the field that
it cannot read; never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.model.dtypes import itemsize_bytes
from kvstore.model.layer_kinds import FULL, RECURRENT, WINDOW, layer_kinds
from kvstore.model.reasons import BadRequest, Reason

__all__ = ["AttentionLayers", "ModelShape", "RecurrentLayers", "from_hf_config"]

SPARSE_INDEX_ITEMSIZE_BYTES = 1
"""Index keys of sparse attention are kept in fp8, whatever the type of the KV."""


@dataclass(frozen=True)
class AttentionLayers:
    """Layers with equal attention.

    Either kv_heads and head_size (elements), or latent_size (elements of MLA's vector, rotary key
    included).
    window_tokens: the layers keep at most so many tokens; 0: all. index_size: elements of the
        sparse index key; 0: none.
    """

    layers: int
    kv_heads: int = 0
    head_size: int = 0
    latent_size: int = 0
    window_tokens: int = 0
    index_size: int = 0

    def __post_init__(self) -> None:
        heads = self.kv_heads > 0 and self.head_size > 0 and self.latent_size == 0
        latent = self.kv_heads == 0 and self.head_size == 0 and self.latent_size > 0
        if self.layers < 1 or not (heads or latent) or min(self.window_tokens, self.index_size) < 0:
            raise BadRequest(Reason.BAD_SIZE, f"no attention has the sizes of {self}")

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of one token over these layers."""
        elements = self.latent_size or 2 * self.kv_heads * self.head_size
        layer_bytes = elements * itemsize_bytes(kv_dtype)
        return self.layers * (layer_bytes + self.index_size * SPARSE_INDEX_ITEMSIZE_BYTES)


@dataclass(frozen=True)
class RecurrentLayers:
    """Layers whose state does not grow: state-space and linear attention.

    state_size: elements of a layer's recurrent state, kept in `state_dtype`.
    conv_size: elements of its convolution state, kept in the type of the KV.
    None: the configuration does not tell.
    """

    layers: int
    state_size: int | None
    conv_size: int | None
    state_dtype: str = "float32"

    def fixed_bytes(self, kv_dtype: str) -> int:
        """Bytes of the state of one sequence; BadRequest if the configuration does not tell."""
        if self.state_size is None or self.conv_size is None:
            raise BadRequest(
                Reason.NOT_SUPPORTED, "the size of the recurrent state is not in the configuration"
            )
        state = self.state_size * itemsize_bytes(self.state_dtype)
        return self.layers * (state + self.conv_size * itemsize_bytes(kv_dtype))


@dataclass(frozen=True)
class ModelShape:
    """A model as far as its KV is concerned."""

    attention: tuple[AttentionLayers, ...]
    recurrent: RecurrentLayers | None = None

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes that a further token adds once all windows are full: full attention only."""
        return sum(a.bytes_per_token(kv_dtype) for a in self.attention if not a.window_tokens)

    def window_bytes(self, tokens: int, kv_dtype: str) -> int:
        """Bytes of the window layers of a sequence of `tokens`: min(tokens, window) each."""
        return sum(
            min(tokens, a.window_tokens) * a.bytes_per_token(kv_dtype)
            for a in self.attention
            if a.window_tokens
        )

    def fixed_bytes(self, kv_dtype: str) -> int:
        """Bytes of the recurrent state of one sequence, 0 without recurrent layers."""
        return 0 if self.recurrent is None else self.recurrent.fixed_bytes(kv_dtype)

    def sequence_bytes(self, tokens: int, kv_dtype: str) -> int:
        """All KV and state of a sequence of `tokens`."""
        if tokens < 0:
            raise BadRequest(Reason.BAD_SIZE, f"tokens is {tokens}", "tokens")
        growing = tokens * self.bytes_per_token(kv_dtype)
        return growing + self.window_bytes(tokens, kv_dtype) + self.fixed_bytes(kv_dtype)


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape from the dictionary of a Hugging Face `config.json`, or of its nested text model.

    Drafting layers (multi-token prediction) are not counted. BadRequest names the field that is
    absent, malformed or not understood.
    """
    text = _text_config(config)
    kinds = layer_kinds(text)
    full, window = kinds.of(FULL), kinds.of(WINDOW)
    attention: list[AttentionLayers] = []
    if full:
        attention.append(_attention(text, full, window_tokens=0))
    if window:
        attention.append(_attention(text, window, window_tokens=kinds.window_tokens))
    recurrent = kinds.of(RECURRENT)
    return ModelShape(tuple(attention), _recurrent(text, recurrent) if recurrent else None)


_TEXT_FIELDS = ("text_config", "llm_config", "language_config", "thinker_config")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise BadRequest(Reason.BAD_REQUEST, "the configuration is no table", "config")
    if _first_int(config, _LAYERS) is not None:
        return config
    for name in _TEXT_FIELDS:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return _text_config(nested)
    raise _unreadable("num_hidden_layers", "is absent")


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZE = ("head_dim", "attention_head_dim", "kv_channels")


def _attention(text: Mapping[str, Any], layers: int, window_tokens: int) -> AttentionLayers:
    latent = _int(text, "kv_lora_rank")
    if latent is not None:
        rope = _int(text, "qk_rope_head_dim")
        if rope is None:
            raise _unreadable("qk_rope_head_dim", "is absent although kv_lora_rank is given")
        index = _int(text, "index_head_dim") or 0
        return AttentionLayers(
            layers, latent_size=latent + rope, window_tokens=window_tokens, index_size=index
        )
    kv_heads, head_size = _kv_heads(text), _head_size(text)
    if window_tokens == 0:
        # Gemma 4: the layers of full attention have sizes of their own.
        head_size = _int(text, "global_head_dim") or head_size
        if text.get("attention_k_eq_v") is True:
            kv_heads = _int(text, "num_global_key_value_heads") or kv_heads
    return AttentionLayers(layers, kv_heads, head_size, window_tokens=window_tokens)


def _kv_heads(text: Mapping[str, Any]) -> int:
    # Falcon's first generation and ChatGLM switch to shared heads by a flag.
    if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        return 1
    if text.get("multi_query_attention") is False:
        return _required(text, _HEADS)
    kv_heads = _first_int(text, _KV_HEADS)
    return _required(text, _HEADS) if kv_heads is None else kv_heads


def _head_size(text: Mapping[str, Any]) -> int:
    head_size = _first_int(text, _HEAD_SIZE)
    if head_size is not None:
        return head_size
    hidden, heads = _required(text, _HIDDEN), _required(text, _HEADS)
    if hidden % heads:
        raise _unreadable("head_dim", f"is absent and {hidden} does not divide by {heads} heads")
    return hidden // heads


def _recurrent(text: Mapping[str, Any], layers: int) -> RecurrentLayers:
    """State sizes of gated delta networks and Mamba 2; None where the fields are others."""
    kernel = _first_int(text, ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"))
    state_dtype = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or "float32"
    delta = [
        _int(text, f"linear_{name}")
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    ]
    mamba = [
        _first_int(text, names)
        for names in (
            ("mamba_num_heads", "mamba_n_heads"),
            ("mamba_head_dim", "mamba_d_head"),
            ("ssm_state_size", "mamba_d_state"),
            ("n_groups", "mamba_n_groups"),
        )
    ]
    known_delta, known_mamba = _all_ints(delta), _all_ints(mamba)
    state_size = conv_size = None
    if kernel is not None and known_delta:
        key_heads, key_size, value_heads, value_size = known_delta
        state_size = value_heads * key_size * value_size
        conv_size = (kernel - 1) * (2 * key_heads * key_size + value_heads * value_size)
    elif kernel is not None and known_mamba:
        heads, head_size, state, groups = known_mamba
        state_size = heads * head_size * state
        conv_size = (kernel - 1) * (heads * head_size + 2 * groups * state)
    if not isinstance(state_dtype, str):
        raise _unreadable("mamba_ssm_dtype", "must be a str")
    return RecurrentLayers(layers, state_size, conv_size, state_dtype)


def _all_ints(values: Sequence[int | None]) -> list[int]:
    """The values, or nothing if one of them is absent."""
    present = [value for value in values if value is not None]
    return present if len(present) == len(values) else []


def _int(text: Mapping[str, Any], name: str) -> int | None:
    """A positive int, or None if absent or null."""
    value = text.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise _unreadable(name, f"is {str(value)[:64]!a}, not one positive int")
    return value


def _first_int(text: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((value for value in (_int(text, name) for name in names) if value), None)


def _required(text: Mapping[str, Any], names: Sequence[str]) -> int:
    value = _first_int(text, names)
    if value is None:
        raise _unreadable(names[0], "is absent")
    return value


def _unreadable(field: str, detail: str) -> BadRequest:
    return BadRequest(Reason.NOT_SUPPORTED, f"{field} {detail}", field)
