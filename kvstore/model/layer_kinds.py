"""Which layers of a model grow, slide or stay: the many spellings of it in Hugging Face
configurations.

Part of `kv_bytes.py`. It promises one kind for each layer, or BadRequest naming the field: a
spelling that it does not know is never taken for full attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.model.reasons import BadRequest, Reason

FULL = "full"
WINDOW = "window"
RECURRENT = "recurrent"
NONE = "none"

_KIND_OF_NAME = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": WINDOW,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "mlp": NONE,
    "moe": NONE,
}

_KIND_OF_LETTER = {"*": FULL, "M": RECURRENT, "-": NONE, "E": NONE}

_SLIDING_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""One layer in so many is full, in models whose older configurations do not say so."""

_NOT_UNDERSTOOD = ("block_types", "compress_ratios", "attention_layers", "attn_config")
"""Fields that change which layers grow, in ways that are not covered here."""


@dataclass(frozen=True)
class LayerKinds:
    """The kind of each layer that stores KV of its own, and the window of those that slide (0: none
    do).
    """

    kinds: tuple[str, ...]
    window_tokens: int

    def of(self, kind: str) -> int:
        """How many layers are of this kind."""
        return self.kinds.count(kind)


def layer_kinds(text: Mapping[str, Any]) -> LayerKinds:
    """The kinds of the layers of a text model's configuration."""
    for name in _NOT_UNDERSTOOD:
        if text.get(name) is not None:
            raise _unreadable(name, "is not understood")
    kinds = _listed(text)
    if kinds is None:
        kinds = _periodic(text, _layer_count(text))
    shared = _count(text, "num_kv_shared_layers") or 0
    if shared >= len(kinds):
        raise _unreadable("num_kv_shared_layers", f"is {shared} of {len(kinds)} layers")
    kinds = kinds[: len(kinds) - shared]
    window = _window(text) if WINDOW in kinds else 0
    return LayerKinds(tuple(kinds), window)


def _listed(text: Mapping[str, Any]) -> list[str] | None:
    """Kinds from a field that lists every layer; None if there is no such field."""
    for name in ("layer_types", "layers_block_type"):
        names = text.get(name)
        if names is not None:
            return _checked(text, name, [_named(name, entry) for entry in _sequence(name, names)])
    pattern = text.get("hybrid_override_pattern")
    if pattern is not None:
        name = "hybrid_override_pattern"
        if not isinstance(pattern, str) or not set(pattern) <= set(_KIND_OF_LETTER):
            raise _unreadable(name, "has a letter that is not understood")
        return _checked(text, name, [_KIND_OF_LETTER[letter] for letter in pattern])
    flags = text.get("attn_type_list")
    if flags is not None:
        name = "attn_type_list"
        kinds = [FULL if flag == 1 else RECURRENT for flag in _sequence(name, flags)]
        if not set(flags) <= {0, 1}:
            raise _unreadable(name, "has an entry that is neither 0 nor 1")
        return _checked(text, name, kinds)
    return None


def _periodic(text: Mapping[str, Any], layers: int) -> list[str]:
    """Kinds from a period, an index list or a window; all full if there is none of these."""
    indices = text.get("attn_layer_indices")
    if indices is not None:
        full = set(_sequence("attn_layer_indices", indices))
        if not full <= set(range(layers)):
            raise _unreadable("attn_layer_indices", f"has an entry that is none of {layers} layers")
        return [FULL if layer in full else RECURRENT for layer in range(layers)]
    interval = _count(text, "full_attention_interval")
    if interval:
        return _every(layers, interval, interval - 1, RECURRENT)
    period = _count(text, "attn_layer_period")
    if period:
        return _every(layers, period, _count(text, "attn_layer_offset") or 0, RECURRENT)
    if text.get("attention_chunk_size") is not None:
        raise _unreadable("layer_types", "is absent although attention_chunk_size is given")
    return _sliding(text, layers)


def _sliding(text: Mapping[str, Any], layers: int) -> list[str]:
    model_type = str(text.get("model_type", ""))
    # Qwen's configurations carry a window that is off unless it is switched on.
    default = not model_type.startswith(("qwen2", "qwen3"))
    if not _count(text, "sliding_window") or not text.get("use_sliding_window", default):
        return [FULL] * layers
    first = _count(text, "max_window_layers")
    if first is not None and model_type.startswith(("qwen2", "qwen3")):
        return [FULL if layer < first else WINDOW for layer in range(layers)]
    period = _count(text, "sliding_window_pattern") or _SLIDING_PERIOD.get(model_type)
    if period:
        return _every(layers, period, period - 1, WINDOW)
    return [WINDOW] * layers


def _every(layers: int, period: int, offset: int, other: str) -> list[str]:
    if offset >= period:
        raise _unreadable("attn_layer_offset", f"is {offset} of a period of {period}")
    return [FULL if layer % period == offset else other for layer in range(layers)]


def _window(text: Mapping[str, Any]) -> int:
    window = _count(text, "sliding_window") or _count(text, "attention_chunk_size")
    if not window:
        raise _unreadable("sliding_window", "is absent although some layers slide")
    return window


def _checked(text: Mapping[str, Any], name: str, kinds: list[str]) -> list[str]:
    if len(kinds) != _layer_count(text):
        raise _unreadable(name, f"lists {len(kinds)} layers, not {_layer_count(text)}")
    return kinds


def _layer_count(text: Mapping[str, Any]) -> int:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        count = _count(text, name)
        if count:
            return count
    raise _unreadable("num_hidden_layers", "is absent")


def _named(field: str, name: object) -> str:
    kind = _KIND_OF_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        raise _unreadable(field, f"has the entry {str(name)[:64]!a}, which is not understood")
    return kind


def _sequence(field: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, int | str) for v in value):
        raise _unreadable(field, "is no list of names or numbers")
    return value


def _count(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise _unreadable(name, f"is {str(value)[:64]!a}, not a whole number")
    return value


def _unreadable(field: str, detail: str) -> BadRequest:
    return BadRequest(Reason.NOT_SUPPORTED, f"{field} {detail}", field)
