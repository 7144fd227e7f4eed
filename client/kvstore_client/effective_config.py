"""A canonical digest of the configuration that is in effect for a model: what changes K or V.

Promises: equal configurations have equal digests whatever the order of their fields and whoever
wrote the file; two that differ in a field that is not known to be inert have different digests.
Pure. Used by the engine adapters.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["INERT_FIELDS", "effective_config_digest"]

# Fields of a model's configuration that change neither K nor V for given token ids. Whatever is not
# named here counts: an unknown field costs a miss at worst, a forgotten one would cost wrong bytes.
INERT_FIELDS: Final = frozenset(
    {
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attn_implementation",  # a field of its own in the fingerprint
        "_attn_implementation",
        "_attn_implementation_autoset",
        "bos_token_id",
        "dtype",  # a field of its own in the fingerprint
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)


def effective_config_digest(config: Mapping[str, object]) -> str:
    """`"sha256:" + hex` over the part of `config` that changes K or V, in a canonical form.

    `config` is the configuration *in effect* (RoPE and its scaling, windows, norms, overrides):
    mappings with string keys, sequences, str, bytes, bool, int, float (no NaN) and None, nested at
    will. Mappings are sorted, each field carries its type and length, an integral float equals the
    integer, `INERT_FIELDS` are left out at the top level. Raises TypeError or ValueError, naming
    the field, for anything else.
    """
    digest = hashlib.sha256(_frame(b"kvstore/config/1"))
    live = {name: value for name, value in config.items() if name not in INERT_FIELDS}
    for piece in _canonical(live, "config"):
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def _canonical(value: object, where: str) -> Iterator[bytes]:
    if value is None:
        yield b"n"
    elif isinstance(value, bool):
        yield b"t" if value else b"f"
    elif isinstance(value, int):
        yield b"i" + _frame(str(int(value)).encode())
    elif isinstance(value, float):
        yield from _canonical_float(value, where)
    elif isinstance(value, str):
        yield b"s" + _frame(value.encode())
    elif isinstance(value, bytes):
        yield b"b" + _frame(value)
    elif isinstance(value, Mapping):
        yield from _canonical_mapping(value, where)
    elif isinstance(value, list | tuple):
        yield b"l" + struct.pack("<Q", len(value))
        for index, item in enumerate(value):
            yield from _canonical(item, f"{where}[{index}]")
    else:
        raise TypeError(f"{where} is a {type(value).__name__}, which has no canonical form")


def _canonical_float(value: float, where: str) -> Iterator[bytes]:
    if math.isnan(value):
        raise ValueError(f"{where} is not a number, which equals nothing, itself included")
    if value.is_integer():
        # 10000 and 10000.0 are the same setting, written by two JSON writers.
        yield b"i" + _frame(str(int(value)).encode())
    else:
        yield b"d" + struct.pack("<d", value)


def _canonical_mapping(value: Mapping[object, object], where: str) -> Iterator[bytes]:
    fields: dict[str, object] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{where} has the key {key!r}, which is not a string")
        fields[key] = item
    yield b"m" + struct.pack("<Q", len(fields))
    for key in sorted(fields):
        yield _frame(key.encode())
        yield from _canonical(fields[key], f"{where}.{key}")


def _frame(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field
