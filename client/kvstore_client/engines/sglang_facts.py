"""What decides the KV bytes of one rank of an SGLang engine, as plain values, and the fingerprint
of them.

`Facts` are read out of a running rank by the module of its version (`sglang_0_5_23`); here is what
follows from them: whether the store may be used at all (`refusal`), the fingerprint, where the
weights' identity comes from. Pure, and imports no SGLang.

Each rank is a model of its own: it stores its own layers and heads, and which they are is in
`encoding.layout_version`. Ranks of MLA hold equal bytes, so they are one; SGLang lets one of them
write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.model.dtypes import ITEMSIZE_BYTES, QUANTISED
from kvstore.model.fingerprint import (
    NO_CPU_ISA,
    Encoding,
    Fingerprint,
    Geometry,
    attention_kind,
)
from kvstore.model.keys import BlockKey, chain_digests
from kvstore.model.layout import layout_of
from kvstore.model.reasons import BadRequest
from kvstore_client.engines.engine_facts import GGUF, identity_of
from kvstore_client.engines.refused import Refused

__all__ = [
    "LAYOUTS",
    "Facts",
    "fingerprint_of",
    "key_of",
    "refusal",
    "weights_folder",
    "why_unnamed",
]

ADAPTER_FORMAT: Final = 1
"""Of keys and pages as this adapter makes them."""
LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
}
"""Layouts of SGLang's host memory, by the kind of its pool."""
CHECKPOINT_SCALES: Final = "checkpoint"
"""`scales_digest` of quantised KV whose scales are in the weight files."""
FOLDER_FORMATS: Final = frozenset({"auto", "safetensors", "pt", "npcache", "gguf", "mistral"})
"""Load formats that read the weight files of the model's folder as they are."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank. Sizes in bytes; layers and heads are those that the rank holds.

    model: path or id. commit: the hub's commit of the configuration, "" if it is not from there.
    config: the model's configuration in effect, as nested plain values. settings: further settings
    that change K or V. pool: of the host memory: "mha", "mla", or its class. other_pools: further
    ones that belong to a page. draft: layers of a model that speculates which lie in the same
    pages. flat: pages come as SGLang's flat pages, not as pieces of its memory. scales: a file of
    KV scales beside the weights, "" if there is none. attention_backend "", cpu_isa "": unknown.
    loader: a setting by which weights come another way than from their files, "" if there is none.
    updated: what tells that other weights took the place of the first ones, "" if nothing does.
    """

    sglang_version: str
    model: str
    commit: str
    load_format: str
    loader: str
    updated: str
    config: Mapping[str, object]
    settings: Mapping[str, object]
    adapters: bool
    multimodal: bool
    pool: str
    other_pools: tuple[str, ...]
    layout: str
    flat: bool
    page_tokens: int
    first_layer: int
    layers: int
    draft_layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    page_bytes: int
    kv_dtype: str
    scales: str
    tensor_rank: int
    tensor_parallel: int
    pipeline_rank: int
    pipeline_parallel: int
    context_parallel: int
    attention_backend: str
    cpu_isa: str
    on_cpu: bool


def refusal(facts: Facts) -> str:
    """Why this rank may not use the store, and what to change; "" if it may."""
    if facts.adapters:
        return (
            "LoRA is enabled, and a key tells an adapter's name but not its content: start the "
            "engine without enable_lora and lora_paths"
        )
    if facts.multimodal:
        return "the model takes images or sounds, of which a key holds a short hash only"
    if facts.pool not in LAYOUTS:
        return f"the host memory is a {facts.pool}; stored are full attention (MHA) and MLA"
    if facts.other_pools:
        return (
            f"a page has more than K and V ({', '.join(facts.other_pools)}): stored are models of "
            "full attention or MLA alone"
        )
    if facts.draft_layers:
        return (
            f"{facts.draft_layers} layers of a model that speculates lie in the same pages, and "
            "nothing names its weights: start the engine without a draft model"
        )
    if facts.layout not in LAYOUTS[facts.pool]:
        known = ", ".join(LAYOUTS[facts.pool])
        return f"hicache_mem_layout is {facts.layout}, not one of {known}"
    if facts.context_parallel > 1:
        return "tokens of a page are spread over ranks (context parallelism)"
    if facts.kv_dtype not in ITEMSIZE_BYTES:
        return f"the KV type {facts.kv_dtype} is not one of {', '.join(ITEMSIZE_BYTES)}"
    if facts.scales:
        return (
            f"KV scales come from {facts.scales}, which nothing names: use those of the checkpoint"
        )
    return ""


def fingerprint_of(
    facts: Facts,
    *,
    model_name: str = "",
    weights_revision: str = "",
    weight_epoch: int = 0,
) -> Fingerprint:
    """The fingerprint of a rank that is not refused. Raises Refused.

    model_name: default: the hub's id, or the last part of the path; equal for engines that share.
    weights_revision: what the operator vouches for; default: the hub's commit if its files are what
    was loaded, else unknown.
    """
    why = refusal(facts)
    if why:
        raise Refused(why)
    try:
        fingerprint = Fingerprint(
            identity=identity_of(
                "sglang",
                facts,
                commit_names_weights=_commit_names_weights(facts),
                model_name=model_name,
                weights_revision=weights_revision,
                weight_epoch=weight_epoch,
            ),
            geometry=_geometry(facts),
            encoding=_encoding(facts),
        )
        block_bytes = layout_of(fingerprint).block_bytes
    except BadRequest as error:
        raise Refused(error.detail) from error
    if block_bytes != facts.page_bytes:
        raise Refused(
            f"a page has {facts.page_bytes} bytes where {block_bytes} are expected: this model's "
            "pages have something in them that is not known here"
        )
    return fingerprint


def _as_loaded(facts: Facts) -> bool:
    """Whether the weights in use are files, read as they are, that nobody has updated since."""
    return facts.load_format in FOLDER_FORMATS and not facts.loader and not facts.updated


def _commit_names_weights(facts: Facts) -> bool:
    several = GGUF in (facts.load_format, facts.settings.get("quantization"))
    return bool(facts.commit) and _as_loaded(facts) and not several


def _geometry(facts: Facts) -> Geometry:
    if facts.pool == "mla":
        return Geometry(
            attention="mla",
            layers=facts.layers,
            kv_heads=1,
            head_size=0,
            kv_latent_size=facts.head_size,
        )
    query_heads = max(facts.query_heads // facts.tensor_parallel, facts.kv_heads)
    return Geometry(
        attention=attention_kind(query_heads, facts.kv_heads),
        layers=facts.layers,
        kv_heads=facts.kv_heads,
        head_size=facts.head_size,
    )


def _encoding(facts: Facts) -> Encoding:
    # A flat page has all K before all V; pieces have K and V of a layer side by side. In the other
    # layouts, and where there is no V, both are one order.
    flat = facts.flat and facts.layout == "layer_first" and facts.pool == "mha"
    return Encoding(
        kv_dtype=facts.kv_dtype,
        block_tokens=facts.page_tokens,
        element_order=f"sglang/{facts.layout}{'/flat' if flat else ''}",
        scales_digest=CHECKPOINT_SCALES if facts.kv_dtype in QUANTISED else None,
        layout_version=_layout_version(facts),
        attention_backend=facts.attention_backend or None,
        cpu_isa=(facts.cpu_isa or None) if facts.on_cpu else NO_CPU_ISA,
    )


def _layout_version(facts: Facts) -> str:
    """In words, since it is what an operator reads when two engines do not share."""
    rank = "*" if facts.pool == "mla" else str(facts.tensor_rank)
    last = facts.first_layer + facts.layers
    return (
        f"kvstore-sglang/{ADAPTER_FORMAT} sglang={facts.sglang_version} "
        f"tp={rank}/{facts.tensor_parallel} pp={facts.pipeline_rank}/{facts.pipeline_parallel} "
        f"layers={facts.first_layer}-{last}"
    )


def weights_folder(facts: Facts) -> Path | None:
    """The folder whose files are the weights; None if they come from elsewhere, are made up, or
    have been updated.
    """
    folder = Path(facts.model)
    return folder if _as_loaded(facts) and folder.is_dir() else None


def why_unnamed(facts: Facts) -> str:
    """Why neither a commit nor a digest of files names the weights."""
    if facts.updated:
        return f"the weights have been updated since the engine's start ({facts.updated})"
    if facts.loader:
        return f"{facts.loader} is set, and weights do not come from the model's files alone"
    return f"the weights of {facts.model} (load_format {facts.load_format}) cannot be told"


def key_of(engine_key: str) -> BlockKey:
    """The store's key for a page's key: SGLang's hash of the whole prefix, in hex. ValueError or
    BadRequest for what is none.
    """
    return chain_digests([bytes.fromhex(engine_key)])[0]
