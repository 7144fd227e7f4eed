"""The fields of a fingerprint: what each means, its range, and when it may be absent.

`fingerprint.py` puts the four groups together and is what others import. Each group promises
canonical bytes in which no two different values meet. A None that has no definite meaning is named
by `missing`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvstore.model.dtypes import ITEMSIZE_BYTES, QUANTISED
from kvstore.model.framing import frame
from kvstore.model.reasons import BadRequest, Reason

Value = str | int | None

NAME_BYTES_MAX = 256
WEIGHT_EPOCH_MAX = 2**63 - 1

ATTENTION_KINDS = ("mha", "gqa", "mqa", "mla")

ORDER_HEADS = "layer_kv_head_token_dim"
"""Element order of a part for separate keys and values: [layer][K,V][kv_head][token][head_size]."""
ORDER_LATENT = "layer_token_latent"
"""Element order of a part for MLA: [layer][token][latent then rope]."""
CANONICAL_ORDERS = (ORDER_HEADS, ORDER_LATENT)

UNIT_SCALES = "unit"
"""`scales_digest` of a quantised type whose scales are all 1."""
NO_CPU_ISA = "none"
"""`cpu_isa` of an engine-native order that does not depend on a CPU's instruction set."""


class Group:
    """What the four groups share: canonical bytes, digest, dictionary form."""

    GROUP: ClassVar[str]

    def values(self) -> Iterator[tuple[str, Value]]:
        """(field name, value) in the order of definition."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            yield field.name, getattr(self, field.name)

    def canonical(self) -> bytes:
        """frame(domain tag, then each field's name and tagged value)."""
        fields = [f"kvstore/fingerprint/{self.GROUP}/1".encode()]
        for name, value in self.values():
            fields += (name.encode(), _tagged(value))
        return frame(*fields)

    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.canonical()).digest()

    def to_dict(self) -> dict[str, str | int]:
        """Present fields only: TOML has no null."""
        return {name: value for name, value in self.values() if value is not None}

    def _text(self, name: str, value: object) -> None:
        check_name(value, f"{self.GROUP}.{name}")

    def _texts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None:
                self._text(name, value)

    def _number(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise bad_field(f"{self.GROUP}.{name}", f"must be an int from {low} to {high}")


@dataclass(frozen=True)
class Identity(Group):
    """Which model made the values.

    weights_revision: commit or content digest of the weights; a path or a served name is none.
        None: unknown, held.
    weight_epoch: counter of online weight updates.
    adapter_name, adapter_digest: both None: no adapter. A name without a digest of the content is
        held.
    config_digest: digest of the effective config: RoPE and its scaling, windows, overrides,
        anything that changes K or V. None: held.
    """

    GROUP: ClassVar[str] = "identity"

    model_name: str
    weights_revision: str | None = None
    weight_epoch: int = 0
    adapter_name: str | None = None
    adapter_digest: str | None = None
    config_digest: str | None = None

    def __post_init__(self) -> None:
        self._text("model_name", self.model_name)
        self._texts("weights_revision", "adapter_name", "adapter_digest", "config_digest")
        self._number("weight_epoch", 0, WEIGHT_EPOCH_MAX)
        if self.adapter_digest is not None and self.adapter_name is None:
            raise bad_field(
                "identity.adapter_name", "is absent although an adapter digest is given"
            )

    def missing(self) -> Iterator[str]:
        """Names of required fields that are absent."""
        if self.weights_revision is None:
            yield "weights_revision"
        if self.adapter_name is not None and self.adapter_digest is None:
            yield "adapter_digest"
        if self.config_digest is None:
            yield "config_digest"


@dataclass(frozen=True)
class Geometry(Group):
    """The shape of one cache group's KV.

    attention: "mha", "gqa", "mqa" (kv_heads is 1) or "mla" (kv_heads is 1, head_size 0, latent
        sizes given); see `attention_kind`.
    layers: layers of this cache group. kv_heads: of the whole model, not of a rank. head_size:
        elements.
    kv_latent_size, rope_size: elements of MLA's compressed vector and of its rotary key; 0 for the
        other kinds.
    cache_group: name of the group in engines that have several; "" for the only one.
    window_tokens: sliding window; 0: none.
    """

    GROUP: ClassVar[str] = "geometry"

    attention: str
    layers: int
    kv_heads: int
    head_size: int
    kv_latent_size: int = 0
    rope_size: int = 0
    cache_group: str = ""
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_KINDS:
            raise bad_field("geometry.attention", f"must be one of {', '.join(ATTENTION_KINDS)}")
        self._number("layers", 1, 65_536)
        self._number("kv_heads", 1, 65_536)
        self._number("window_tokens", 0, 2**31 - 1)
        if self.cache_group != "":
            self._text("cache_group", self.cache_group)
        latent = self.attention == "mla"
        self._number("head_size", 0 if latent else 1, 0 if latent else 65_536)
        self._number("kv_latent_size", 1 if latent else 0, 65_536 if latent else 0)
        self._number("rope_size", 0, 65_536 if latent else 0)
        if self.attention in ("mqa", "mla") and self.kv_heads != 1:
            raise bad_field("geometry.kv_heads", f"must be 1 for {self.attention}")

    def missing(self) -> Iterator[str]:
        """Nothing: a geometry without a size is refused when it is built."""
        return iter(())


@dataclass(frozen=True)
class Encoding(Group):
    """How values became bytes.

    kv_dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
    block_tokens: tokens of a block.
    element_order: ORDER_HEADS, ORDER_LATENT, or an engine's own name for bytes that only it
        understands. None: held.
    scales_digest: of the quantisation scales; UNIT_SCALES if they are 1. None: no scales; held for
        a quantised type.
    layout_version, attention_backend, cpu_isa: of the engine. They decide bytes of an engine's own
        order, so None is held there; in a canonical order None means that they do not matter.
        cpu_isa: NO_CPU_ISA where no CPU kernel packs the bytes.
    codec: name of the compression; None: raw.
    """

    GROUP: ClassVar[str] = "encoding"

    kv_dtype: str
    block_tokens: int
    element_order: str | None = None
    scales_digest: str | None = None
    layout_version: str | None = None
    attention_backend: str | None = None
    cpu_isa: str | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        if type(self.kv_dtype) is not str or self.kv_dtype not in ITEMSIZE_BYTES:
            raise bad_field("encoding.kv_dtype", f"must be one of {', '.join(ITEMSIZE_BYTES)}")
        self._number("block_tokens", 1, 65_536)
        self._texts("element_order", "scales_digest", "layout_version")
        self._texts("attention_backend", "cpu_isa", "codec")

    def missing(self) -> Iterator[str]:
        """Names of required fields that are absent."""
        if self.element_order is None:
            yield "element_order"
        if self.kv_dtype in QUANTISED and self.scales_digest is None:
            yield "scales_digest"
        if self.element_order not in CANONICAL_ORDERS:
            for name in ("layout_version", "attention_backend", "cpu_isa"):
                if getattr(self, name) is None:
                    yield name


@dataclass(frozen=True)
class Placement(Group):
    """How ranks share a block: sizes only.

    Data-parallel ranks and engine ids are no part of it: replicas share.
    """

    GROUP: ClassVar[str] = "placement"

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
            self._number(name, 1, 4_096)

    def missing(self) -> Iterator[str]:
        """Nothing: one rank is the definite default."""
        return iter(())


def attention_kind(query_heads: int, kv_heads: int) -> str:
    """The kind of attention with these heads, in the one spelling that every engine must use."""
    both_ints = type(query_heads) is int and type(kv_heads) is int
    if not both_ints or not 1 <= kv_heads <= query_heads:
        raise bad_field("geometry.kv_heads", "must be an int from 1 to the number of query heads")
    if query_heads == kv_heads:
        return "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def check_name(value: object, field: str) -> str:
    """`value` if it is a name, else BadRequest(BAD_NAME).

    A name has 1 to 256 bytes of UTF-8 and no control characters or line separators.
    """
    if type(value) is not str:
        raise _bad_name(field, f"must be a str, not {type(value).__name__}")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise _bad_name(field, "is not valid Unicode") from error
    if not 1 <= size <= NAME_BYTES_MAX:
        raise _bad_name(field, f"has {size} bytes, not 1 to {NAME_BYTES_MAX}")
    if not value.isascii() or not value.isprintable():
        for character in value:
            if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
                raise _bad_name(field, f"holds the control character U+{ord(character):04X}")
    return value


def _bad_name(field: str, detail: str) -> BadRequest:
    return BadRequest(Reason.BAD_NAME, f"{field} {detail}", field)


def _tagged(value: Value) -> bytes:
    """One byte for the type, so that absent, "7" and 7 are three values."""
    if value is None:
        return b"0"
    if isinstance(value, str):
        return b"s" + value.encode("utf-8")
    return b"i%d" % value


def bad_field(field: str, detail: str) -> BadRequest:
    """The error for a field that is malformed; `field` is dotted."""
    return BadRequest(Reason.BAD_FINGERPRINT, f"{field} {detail}", field)
