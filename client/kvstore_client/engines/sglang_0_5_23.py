"""Reads the facts of one rank of an SGLang 0.5.23 engine, in its scheduler's process.

A dynamic backend is given ranks, sizes and the host memory, but not the model: the configuration
in effect is what SGLang has published in this process (`sglang.srt.runtime_context`). No part of
SGLang is replaced.

One such module for each version of SGLang that was tried, listed in `sglang.VERSIONS`.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.runtime_context import (
    attention_backends,
    get_context,
    get_device,
    get_lora,
    get_model,
    get_server_args,
    get_serving,
    process_model_config,
)

from kvstore_client.engines.engine_facts import commit_of, plain, plain_mapping
from kvstore_client.engines.refused import Refused
from kvstore_client.engines.sglang_facts import Facts

__all__ = ["facts_of", "updates"]

log = logging.getLogger(__name__)

POOLS = {"MHATokenToKVPoolHost": "mha", "MLATokenToKVPoolHost": "mla"}
"""Exact classes: a subclass keeps something else in its pages."""
QUANTISED_AS = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
LOADERS = (
    "custom_weight_loader",
    "rl_quant_profile",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "modelexpress_config",
    "checkpoint_engine_wait_weights_before_ready",
    "remote_instance_weight_loader_start_seed_via_transfer_engine",
)
"""Settings by which weights are made, changed or fetched another way than from the files, or may be
written from another machine while the engine runs."""
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


FROM_DISK: Final = "model_runner.update_model_fields"
"""Who SGLang's log of changed settings says it was, after each update of the weights from disk."""
FROM_TENSORS: Final = (
    ("torch.multiprocessing.reductions", "_reduce_tensor_original"),
    ("torch_npu.multiprocessing.reductions", "_rebuild_npu_tensor_original"),
)
"""What SGLang leaves in a module before a scheduler takes weights out of tensors sent to it."""
FROM_IPC: Final = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
"""Imported by a scheduler when it takes weights out of another process' memory, never before."""
OWN_GROUP: Final = re.compile(r"[0-9]+|[0-9a-f]{40}|default_pg")
"""Names that torch gives to process groups. One for weights has the name that a request gave it."""


def updates() -> tuple[str, ...]:
    """What tells that the weights in use are not those of the start; () while nothing does.

    No hook tells a backend. It is another value after each change of SGLang's version of the
    weights, after each update from disk, and after the first update of any other kind: from tensors
    and from another process' memory for good, from a process group as long as there is the group.
    """
    marks = []
    version = str(get_serving().weight_version)
    if version != str(_setting("weight_version")):
        marks.append(f"version {version}")
    for source, fields in get_context().overrides_log():
        if source == FROM_DISK:
            marks.append(f"files of {fields.get('model_path')}")
    if any(hasattr(sys.modules.get(module), name) for module, name in FROM_TENSORS):
        marks.append("tensors")
    if FROM_IPC in sys.modules:
        marks.append("another process' memory")
    groups = [str(name) for name in list(c10d._world.pg_names.values())]
    marks += sorted(f"group {name}" for name in groups if not OWN_GROUP.fullmatch(name))
    return tuple(marks)


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
        commit=commit_of(model.hf_config),
        load_format=str(named.load_format),
        loader=", ".join(name for name in LOADERS if _setting(name)),
        updated=", ".join(updates()),
        config=plain_mapping(model.hf_config.to_dict()),
        settings={
            **{name: plain(_setting(name)) for name in SETTINGS},
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


def _kv_dtype(pool: Any) -> str:
    """SGLang keeps 8-bit floats as bytes: which they are is in its settings."""
    name = str(pool.dtype).removeprefix("torch.")
    if name != "uint8":
        return name
    asked = str(get_model().kv_cache_dtype)
    return QUANTISED_AS.get(asked, asked)
