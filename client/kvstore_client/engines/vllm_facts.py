"""What decides a vLLM engine's KV bytes, as plain values, and the fingerprint of them.

`Facts` are read out of a running engine by the module of its version (`vllm_0_32`); here is what
follows from them: whether the store may be used at all (`refusal`), the fingerprint, where the
weights' identity comes from. Pure, and imports no vLLM.

A row is opaque: what a block's bytes mean is vLLM's business, and everything that decides them is
in the fingerprint. How vLLM's processes share a row is in `encoding.layout_version`, not in the
placement: one process writes whole rows for all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
    "CacheGroup",
    "Facts",
    "fingerprint_of",
    "group_of",
    "key_of",
    "leading_group",
    "refusal",
    "weights_folder",
    "why_unnamed",
]

ADAPTER_FORMAT: Final = 1
"""Of keys and rows as this adapter makes them."""

KV_DTYPES: Final[Mapping[str, str]] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
CHECKPOINT_SCALES: Final = "checkpoint"
"""`scales_digest` of quantised KV whose scales are in the weight files."""
HASH_ALGORITHMS: Final = ("sha256", "sha256_cbor")
FOLDER_FORMATS: Final = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "gguf", "mistral"}
)
"""Load formats that read the weight files of the model's folder as they are."""

WHOLE: Final = ("full", "mla")
"""Kinds of groups that need each block of a prompt."""
RECENT: Final = ("window", "chunk")
"""Kinds that need the last blocks only. Of both vLLM restores blocks as they are; a recurrent state
or what a decoder keeps of an encoder is no such block.
"""
NO_GROUP: Final = -1
GROUP_BYTES: Final = 4
"""Of an engine's key: the group's index, in the order of Facts.groups."""
WORDS_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one kind, whose blocks vLLM keeps and looks up beside those of other groups.

    kind: one of WHOLE or RECENT, or the name of what it is. window_tokens: that a layer looks back,
    or of the chunk that it stays in; 0: all. layers: their names. page_bytes: of one layer's part
    of a block, on one rank. backend, isa "": unknown; isa is of an engine on a CPU.
    """

    kind: str
    window_tokens: int
    layers: tuple[str, ...]
    block_tokens: int
    kv_heads_per_rank: int
    head_size: int
    value_head_size: int
    page_bytes: int
    dtype: str
    backend: str
    isa: str

    @property
    def rank_block_bytes(self) -> int:
        return self.page_bytes * len(self.layers)

    @property
    def page_numbers(self) -> int:
        """Numbers of K and V in a page if there is nothing else in it."""
        both = self.head_size if self.kind == "mla" else self.head_size + self.value_head_size
        return self.block_tokens * self.kv_heads_per_rank * both

    def words(self) -> str:
        window = f"/{self.window_tokens}" if self.window_tokens else ""
        heads = f"{len(self.layers)}x{self.kv_heads_per_rank}x{self.head_size}"
        return f"{self.kind}{window}:{heads}:{self.dtype}:{self.backend}:{self.isa}"


@dataclass(frozen=True, slots=True)
class Facts:
    """One engine. Sizes in bytes, counts over all ranks unless it says otherwise.

    model: path or id. commit: the hub's commit of the configuration, "" if it is not from there.
    config_from: where the configuration is from if it is not beside the weights, else "".
    config: the model's configuration in effect, as nested plain values. settings: further settings
    that change K or V. groups: all of them, by index; a row holds a block of any one of them.
    copies: how many ranks' bytes a row holds, one after the other. row_bytes: of a row with its
    padding. adapters: LoRA is enabled. multimodal: the model takes more than tokens. updates:
    settings by which other code may change the weights while the engine runs, "" if there are none.
    draft: a model of its own that speculates, "" if there is none.
    """

    vllm_version: str
    model: str
    commit: str
    config_from: str
    load_format: str
    config: Mapping[str, object]
    settings: Mapping[str, object]
    updates: str
    draft: str
    adapters: bool
    multimodal: bool
    hash_algorithm: str
    hash_seed: str
    hash_tokens: int
    blocks_per_row: int
    groups: tuple[CacheGroup, ...]
    query_heads: int
    kv_dtype: str
    dynamic_scales: bool
    copies: int
    content_bytes: int
    row_bytes: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    nodes: int
    executor: str
    layout: str
    canonical: bool
    on_cpu: bool

    @property
    def widest(self) -> CacheGroup:
        """The group whose blocks fill a row; those of others may leave some of it."""
        return max(self.groups, key=lambda group: group.rank_block_bytes)


def refusal(facts: Facts) -> str:
    """Why this engine may not use the store, and what to change; "" if it may."""
    if facts.hash_algorithm not in HASH_ALGORITHMS:
        return (
            f"prefix_caching_hash_algo is {facts.hash_algorithm}, whose keys collide and differ "
            "between processes: use sha256_cbor"
        )
    if facts.nodes > 1 or facts.executor == "ray":
        return (
            "the ranks are on several nodes, or on such that Ray chooses, and vLLM's host rows are "
            "those of one: use the mp executor on one node"
        )
    if facts.adapters:
        return (
            "LoRA is enabled, and a key tells an adapter's name and path but not its content: "
            "start the engine without enable_lora"
        )
    if facts.multimodal:
        return "the model takes images or sounds, which applications may name as they like"
    if facts.draft:
        return (
            f"{facts.draft} speculates, and its layers may lie in the same rows, while nothing "
            "names its weights: start the engine without a draft model of its own"
        )
    why = _refusal_of_groups(facts)
    if why:
        return why
    if facts.context_parallel > 1:
        return "tokens of a block are spread over ranks (context parallelism)"
    if facts.kv_dtype not in KV_DTYPES:
        return f"the KV type {facts.kv_dtype} is not one of {', '.join(sorted(KV_DTYPES))}"
    if facts.dynamic_scales:
        return "KV scales are calculated from the first requests: set calculate_kv_scales=False"
    if not 0 < facts.content_bytes <= facts.row_bytes:
        return f"a row has {facts.row_bytes} bytes, its blocks {facts.content_bytes}"
    return ""


def _refusal_of_groups(facts: Facts) -> str:
    groups = facts.groups
    for index, group in enumerate(groups):
        if group.kind not in (*WHOLE, *RECENT):
            return (
                f"cache group {index} of {len(groups)} is of the kind {group.kind}; "
                "stored are full attention, MLA, sliding windows and local chunks"
            )
        if group.value_head_size != group.head_size and group.kind != "mla":
            return "K and V have heads of different sizes"
    if len(groups) == 1:
        return ""
    sizes = sorted({group.block_tokens for group in groups})
    if len(sizes) > 1:
        return f"cache groups have blocks of different sizes: {sizes} tokens"
    if facts.pipeline_parallel > 1:
        return "the model has several cache groups, and pipeline stages share them out"
    one = groups[0]
    if any(one.page_bytes * g.page_numbers != g.page_bytes * one.page_numbers for g in groups):
        pages = [group.page_bytes for group in groups]
        return f"pages of cache groups have {pages} bytes: not K and V alone are in them"
    return ""


def leading_group(facts: Facts) -> int:
    """The index of the first group that needs each block of a prompt; NO_GROUP if none does."""
    whole = (index for index, group in enumerate(facts.groups) if group.kind in WHOLE)
    return next(whole, NO_GROUP)


def fingerprint_of(
    facts: Facts,
    *,
    model_name: str = "",
    weights_revision: str = "",
    weight_epoch: int = 0,
) -> Fingerprint:
    """The fingerprint of an engine that is not refused. Raises Refused.

    model_name: default: the hub's id, or the last part of the path; equal for engines that share.
    weights_revision: what the operator vouches for; default: the hub's commit if its files are what
    was loaded and nothing but the engine changes them, else unknown.
    """
    why = refusal(facts)
    if why:
        raise Refused(why)
    try:
        fingerprint = Fingerprint(
            identity=identity_of(
                "vllm",
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
    if block_bytes != facts.content_bytes:
        raise Refused(
            f"a row holds {facts.content_bytes} bytes of KV where {block_bytes} are expected: "
            "this model's rows have something in them that is not known here"
        )
    return fingerprint


def _commit_names_weights(facts: Facts) -> bool:
    """Whether what was loaded are the files of the commit, and stays so."""
    loaded = facts.load_format in FOLDER_FORMATS and not facts.config_from
    several = GGUF in (facts.load_format, facts.settings.get("quantization"))
    return bool(facts.commit) and loaded and not several and not facts.updates


def _geometry(facts: Facts) -> Geometry:
    """Of the group that fills a row, which tells how many bytes a block has; the others are in
    `cache_group`, in words.
    """
    group = facts.widest
    if group.kind == "mla":
        return Geometry(
            attention="mla",
            layers=len(group.layers) * facts.copies,
            kv_heads=1,
            head_size=0,
            kv_latent_size=group.head_size,
            cache_group=_groups_in_words(facts),
        )
    kv_heads = group.kv_heads_per_rank * facts.copies // facts.pipeline_parallel
    return Geometry(
        attention=attention_kind(max(facts.query_heads, kv_heads), kv_heads),
        layers=len(group.layers) * facts.pipeline_parallel,
        kv_heads=kv_heads,
        head_size=group.head_size,
        cache_group=_groups_in_words(facts),
        window_tokens=group.window_tokens,
    )


def _groups_in_words(facts: Facts) -> str:
    """All groups in their order, equal ones that follow each other as one, and a digest with the
    names of their layers; "" for the only group of a model that looks back to its first token.
    """
    if len(facts.groups) == 1 and not facts.groups[0].window_tokens:
        return ""
    exact = "\n".join(f"{group.words()} {','.join(group.layers)}" for group in facts.groups)
    digest = hashlib.sha256(exact.encode()).hexdigest()[:16]
    runs = [
        (words, sum(1 for _ in run))
        for words, run in itertools.groupby(group.words() for group in facts.groups)
    ]
    words = " ".join(f"{count}*{words}" if count > 1 else words for words, count in runs)
    return f"{words[: WORDS_BYTES_MAX - len(digest) - 2]} #{digest}"


def _encoding(facts: Facts) -> Encoding:
    quantised = KV_DTYPES[facts.kv_dtype].startswith("float8")
    return Encoding(
        kv_dtype=KV_DTYPES[facts.kv_dtype],
        block_tokens=facts.widest.block_tokens * facts.blocks_per_row,
        element_order=f"vllm/{facts.layout}{'/canonical' if facts.canonical else ''}",
        scales_digest=CHECKPOINT_SCALES if quantised else None,
        layout_version=_layout_version(facts),
        attention_backend=_of_all(group.backend for group in facts.groups),
        cpu_isa=_of_all(group.isa for group in facts.groups) if facts.on_cpu else NO_CPU_ISA,
    )


def _of_all(names: Iterable[str]) -> str | None:
    """None if one is unknown."""
    different = set(names)
    return "+".join(sorted(different)) if all(different) else None


def _layout_version(facts: Facts) -> str:
    """In words, since it is what an operator reads when two engines do not share."""
    seed = facts.hash_seed if facts.hash_seed.isprintable() else ascii(facts.hash_seed)
    algorithm = facts.hash_algorithm
    if algorithm == "sha256":
        # Keys of pickled values: another Python may pickle otherwise.
        algorithm += f"/py{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"kvstore-vllm/{ADAPTER_FORMAT} vllm={facts.vllm_version} "
        f"tp={facts.tensor_parallel} pp={facts.pipeline_parallel} copies={facts.copies} "
        f"block={facts.widest.block_tokens}x{facts.blocks_per_row} "
        f"hash={algorithm}/{facts.hash_tokens}/{seed[:64]}"
    )


def weights_folder(facts: Facts) -> Path | None:
    """The folder whose files are the weights; None if they come from elsewhere, are made up, or may
    be changed without a word to the tier.
    """
    folder = Path(facts.model)
    told = facts.load_format in FOLDER_FORMATS and not facts.updates
    return folder if told and folder.is_dir() else None


def why_unnamed(facts: Facts) -> str:
    """Why neither a commit nor a digest of files names the weights."""
    if facts.updates:
        return f"{facts.updates} is set, by which weights are changed without a word to the tier"
    return f"the weights of {facts.model} (load_format {facts.load_format}) cannot be told"


def key_of(engine_key: bytes) -> BlockKey:
    """The store's key for an OffloadKey: vLLM's hash of the whole prefix, and the group's index.
    BadRequest if it is too short to be one.
    """
    return chain_digests([engine_key])[0]


def group_of(engine_key: bytes) -> int:
    """The index of the group whose block an OffloadKey names."""
    return int.from_bytes(engine_key[-GROUP_BYTES:], "big")
