"""Reads the facts of a vLLM 0.32 engine, in its scheduler's process.

A secondary tier is given neither vLLM's configuration nor its requests: only an excerpt in which
the model is a path. Both are at hand where the tier is made, in the frames that make it, and are
taken from there; where they are not found the tier stays off. No part of vLLM is replaced.

One such module for each minor version of vLLM, listed in `vllm_tier.VERSIONS`.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstore_client.engines.engine_facts import commit_of, plain, plain_mapping
from kvstore_client.engines.refused import Refused
from kvstore_client.engines.vllm_facts import CacheGroup, Facts

__all__ = ["facts_of"]

log = logging.getLogger(__name__)

FRAMES_MAX = 24
"""Between the tier's constructor and the connector's there are about eight."""


def facts_of(spec: Any, row_bytes: int) -> Facts:
    """The facts of the engine that is making this offloading spec's manager. Raises Refused."""
    config, caches = _from_frames()
    offloading = spec.config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    offloaded = [group.group_id for group in offloading.groups]
    if not offloaded or offloaded != list(range(len(caches.kv_cache_groups))):
        raise Refused(f"vLLM offloads {offloaded} of {len(caches.kv_cache_groups)} cache groups")
    copies = 1 if spec.replicated_layout else offloading.parallel.world_size
    on_cpu = config.device_config.device_type == "cpu"
    return Facts(
        vllm_version=vllm.__version__,
        model=str(model.model),
        commit=commit_of(model.hf_config),
        config_from=_config_from(model),
        load_format=str(config.load_config.load_format),
        config=plain_mapping(model.hf_config.to_dict()),
        settings=_settings(config),
        updates=_updates_of(config),
        draft=_draft_of(config),
        adapters=config.lora_config is not None,
        multimodal=bool(model.is_multimodal_model),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=get_none_hash_seed(),
        hash_tokens=offloading.cache.tokens_per_hash,
        blocks_per_row=offloading.cache.blocks_per_chunk,
        groups=tuple(
            _group_of(config, caches, group, on_cpu=on_cpu) for group in offloading.groups
        ),
        query_heads=int(model.hf_text_config.num_attention_heads),
        kv_dtype=str(offloading.model.dtype),
        dynamic_scales=bool(getattr(cache, "calculate_kv_scales", False)),
        copies=copies,
        content_bytes=(
            offloading.worker_kv_bytes_per_block * copies * offloading.cache.blocks_per_chunk
        ),
        row_bytes=row_bytes,
        tensor_parallel=offloading.parallel.tp_size,
        pipeline_parallel=offloading.parallel.pp_size,
        context_parallel=offloading.parallel.pcp_size * offloading.parallel.dcp_size,
        nodes=int(parallel.nnodes_within_dp),
        executor=str(parallel.distributed_executor_backend or "uni"),
        layout=str(offloading.kv_cache_layout or ""),
        canonical=bool(offloading.canonical_layout),
        on_cpu=on_cpu,
    )


def _from_frames() -> tuple[VllmConfig, KVCacheConfig]:
    """What the connector was made with: it is on the stack while it makes its tiers."""
    frame: FrameType | None = sys._getframe(1)
    try:
        for _ in range(FRAMES_MAX):
            if frame is None:
                break
            config = frame.f_locals.get("vllm_config")
            caches = frame.f_locals.get("kv_cache_config")
            if isinstance(config, VllmConfig) and isinstance(caches, KVCacheConfig):
                return config, caches
            frame = frame.f_back
    finally:
        del frame  # no circle with the frames that it names
    raise Refused("the tier was not made by vLLM's OffloadingConnector")


def _group_of(
    config: VllmConfig, caches: KVCacheConfig, offloaded: Any, *, on_cpu: bool
) -> CacheGroup:
    group = caches.kv_cache_groups[offloaded.group_id]
    kv_spec = group.kv_cache_spec
    kind, window_tokens = _kind_of(kv_spec)
    if len(caches.kv_cache_groups) > 1 and getattr(group, "is_eagle_group", False):
        kind = "draft"  # its last block is written again; vLLM treats it apart
    return CacheGroup(
        kind=kind,
        window_tokens=window_tokens,
        layers=tuple(offloaded.layer_names),
        block_tokens=offloaded.tokens_per_block,
        kv_heads_per_rank=int(getattr(kv_spec, "num_kv_heads", 0)),
        head_size=int(getattr(kv_spec, "head_size", 0)),
        value_head_size=int(getattr(kv_spec, "head_size_v", 0) or 0),
        page_bytes=int(kv_spec.page_size_bytes),
        dtype=str(getattr(kv_spec, "dtype", "")).removeprefix("torch."),
        backend=_backend_of(config, offloaded.layer_names, kv_spec),
        isa=_cpu_isa(config, kv_spec) if on_cpu else "",
    )


def _kind_of(kv_spec: Any) -> tuple[str, int]:
    """Kind, and how many tokens of context. Exact types: a subclass keeps something else in its
    pages. Full attention has a window where vLLM keeps all blocks of layers that look back less.
    """
    if type(kv_spec) is FullAttentionSpec:
        window = kv_spec.sliding_window or kv_spec.attention_chunk_size
        return "full", int(window or 0)
    if type(kv_spec) is MLAAttentionSpec:
        return "mla", 0
    if type(kv_spec) is SlidingWindowSpec:
        return "window", int(kv_spec.sliding_window)
    if type(kv_spec) is ChunkedLocalAttentionSpec:
        return "chunk", int(kv_spec.attention_chunk_size)
    return type(kv_spec).__name__, 0


def _config_from(model: Any) -> str:
    """Where configuration and weights come from different places, that of the configuration."""
    other_revision = getattr(model, "_hf_config_revision", None)
    if model.hf_config_path and model.hf_config_path != model.model:
        return str(model.hf_config_path)
    if other_revision and other_revision != model.revision:
        return f"{model.model} at {other_revision}"
    if model.model_weights and model.model_weights != model.model:
        return str(model.model)
    return ""


def _updates_of(config: VllmConfig) -> str:
    """The settings that are there to change weights in place; see Facts."""
    named = {
        "weight_transfer_config": config.weight_transfer_config,
        "worker_extension_cls": config.parallel_config.worker_extension_cls,
    }
    return ", ".join(name for name, value in named.items() if value)


def _draft_of(config: VllmConfig) -> str:
    """The model that speculates, if its weights are others than those of the model: a part of
    the model's own files (MTP) and what needs no model name the model.
    """
    speculative = config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    model = config.model_config
    if draft is None or draft.model in (model.model, model.model_weights):
        return ""
    return str(draft.model)


def _settings(config: VllmConfig) -> dict[str, object]:
    """What changes K or V and is not in the model's own configuration."""
    model = config.model_config
    named: dict[str, object] = {
        "dtype": model.dtype,
        "quantization": model.quantization,
        "disable_sliding_window": getattr(model, "disable_sliding_window", None),
        "override_attention_dtype": getattr(model, "override_attention_dtype", None),
        "model_impl": getattr(model, "model_impl", None),
        "speculative": config.speculative_config is not None,
        "v2_runner": getattr(config, "use_v2_model_runner", None),
        "kv_dtype_skip_layers": getattr(config.cache_config, "kv_cache_dtype_skip_layers", None),
    }
    return {name: plain(value) for name, value in named.items()}


def _backend_of(config: VllmConfig, layer_names: tuple[str, ...], kv_spec: Any) -> str:
    """Of the layers themselves where they are in this process, else as vLLM's selector would
    choose; "" if neither can be told.
    """
    layers = config.compilation_config.static_forward_context
    try:
        names = {
            str(layers[name].get_attn_backend().get_name())
            for name in layer_names
            if name in layers
        }
        if not names:
            names = {_selected_backend(config, kv_spec)}
    except Exception:  # of vLLM's own; unknown is held, never guessed
        log.warning("kvstore: the attention backend cannot be told", exc_info=True)
        return ""
    return "+".join(sorted(names))


def _selected_backend(config: VllmConfig, kv_spec: Any) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(config):
        backend = get_attn_backend(
            kv_spec.head_size,
            config.model_config.dtype,
            config.cache_config.cache_dtype,
            use_mla=bool(config.model_config.use_mla),
        )
    return str(backend.get_name())


def _cpu_isa(config: VllmConfig, kv_spec: Any) -> str:
    """As the CPU kernels pack a block, and the instruction set that torch computes with."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        packing = _get_attn_isa(
            config.model_config.dtype,
            kv_spec.block_size,
            kv_spec.head_size,
            config.cache_config.cache_dtype,
        )
    except Exception:  # as above
        log.warning("kvstore: the packing of KV by the CPU cannot be told", exc_info=True)
        return ""
    return f"{packing}/{torch.backends.cpu.get_cpu_capability()}"
