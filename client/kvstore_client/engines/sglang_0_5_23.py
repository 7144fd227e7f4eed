"""Reads the facts of one rank of an SGLang 0.5.23 engine, in its scheduler's process.

A dynamic backend is given ranks, sizes and the host memory, but not the model: the configuration
in effect is what SGLang has published in this process (`sglang.srt.runtime_context`). No part of
SGLang is replaced.

One such module for each version of SGLang that was tried, listed in `sglang.VERSIONS`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.runtime_context import (
    attention_backends,
    get_device,
    get_lora,
    get_model,
    get_server_args,
    get_serving,
    process_model_config,
)

from kvstore_client.engines.refused import Refused
from kvstore_client.engines.sglang_facts import Facts

__all__ = ["facts_of", "weights_version"]

log = logging.getLogger(__name__)

POOLS = {"MHATokenToKVPoolHost": "mha", "MLATokenToKVPoolHost": "mla"}
"""Exact classes: a subclass keeps something else in its pages."""
COMMIT_DIGITS = 40
QUANTISED_AS = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
LOADERS = (
    "custom_weight_loader",
    "rl_quant_profile",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "modelexpress_config",
    "checkpoint_engine_wait_weights_before_ready",
)
"""Settings by which weights are made, changed or fetched another way than from the files."""
SETTINGS = (
    "quantization",
    "kv_cache_dtype",
    "model_impl",
    "json_model_override_args",
    "torchao_config",
    "dllm_algorithm",
)
FORMATS = (
    "storage_format_tag",
    "stores_page_envelope",
    "dsa_kv_cache_store_fp8",
    "_layer_shard_enabled",
)
"""Of a pool, where they are set: its pages have a form of their own."""


def weights_version() -> str:
    """SGLang's name for the weights in use now; it changes with an update that gives one."""
    return str(get_serving().weight_version)


def facts_of(
    version: str, config: Any, pool: Any, other_pools: tuple[str, ...], *, flat: bool
) -> Facts:
    """config: SGLang's HiCacheStorageConfig. pool: its host memory. flat: see Facts. Raises Refused
    where something has not been published, AttributeError where SGLang is another.
    """
    try:
        model = process_model_config()
        named = get_model()
    except ValueError as error:
        raise Refused(f"SGLang has published no configuration here: {error}") from error
    for name in FORMATS:
        if getattr(pool, name, None):
            raise Refused(f"the host memory has pages in a form of its own ({name})")
    kind = POOLS.get(type(pool).__name__, type(pool).__name__)
    page_tokens = int(pool.page_size)
    layers = int(pool.layer_num)
    on_cpu = str(get_device().device) == "cpu"
    return Facts(
        sglang_version=version,
        model=str(named.model_path),
        commit=_commit_of(model.hf_config),
        load_format=str(named.load_format),
        loader=", ".join(name for name in LOADERS if _setting(name)),
        updated=_updated(),
        config=_plain_mapping(model.hf_config.to_dict()),
        settings={
            **{name: _plain(_setting(name)) for name in SETTINGS},
            "dtype": str(model.dtype),
            "speculative": str(_setting("speculative_algorithm")),
            "dcp": config.dcp_size,
        },
        adapters=bool(get_lora().enable_lora or get_lora().lora_paths or _setting("uno_lora_path")),
        multimodal=bool(model.is_multimodal),
        pool=kind,
        other_pools=other_pools,
        layout=str(pool.layout),
        flat=flat,
        page_tokens=page_tokens,
        first_layer=int(pool.start_layer or 0),
        layers=layers,
        draft_layers=layers - int(pool.target_layer_num),
        query_heads=int(model.num_attention_heads),
        kv_heads=int(getattr(pool, "head_num", 1)),
        head_size=int(pool.kv_cache_dim if kind == "mla" else getattr(pool, "head_dim", 0)),
        page_bytes=int(pool.get_size_per_token()) * page_tokens,
        kv_dtype=_kv_dtype(pool),
        scales=str(_setting("quantization_param_path") or ""),
        tensor_rank=config.tp_rank,
        tensor_parallel=config.tp_size,
        pipeline_rank=config.pp_rank,
        pipeline_parallel=config.pp_size,
        context_parallel=config.attn_cp_size * config.dcp_size,
        attention_backend="+".join(str(name) for name in attention_backends() if name),
        cpu_isa=str(torch.backends.cpu.get_cpu_capability()) if on_cpu else "",
        on_cpu=on_cpu,
    )


def _setting(name: str) -> Any:
    """As it was resolved at start."""
    return resolution_result(get_server_args(), name)


def _updated() -> str:
    """The version of the weights if it is not the one that they were started with."""
    now = weights_version()
    return "" if now == str(_setting("weight_version")) else now


def _commit_of(hf_config: Any) -> str:
    """The hub's commit that the configuration is of, "" if it is none of the hub's."""
    commit = getattr(hf_config, "_commit_hash", None)
    known = isinstance(commit, str) and len(commit) == COMMIT_DIGITS
    return str(commit) if known else ""


def _kv_dtype(pool: Any) -> str:
    """SGLang keeps 8-bit floats as bytes: which they are is in its settings."""
    name = str(pool.dtype).removeprefix("torch.")
    if name != "uint8":
        return name
    asked = str(get_model().kv_cache_dtype)
    return QUANTISED_AS.get(asked, asked)


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, object]:
    return {str(name): _plain(item) for name, item in value.items()}


def _plain(value: Any) -> object:
    """As effective_config_digest takes it; what it does not know, by its text."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
