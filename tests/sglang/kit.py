"""One rank of an SGLang engine without its model: SGLang's own configuration, device pool, host
pool, hash chain, controller and storage threads. What its scheduler does with the answers
(allocate what was found, hand it over, wait for the end) is done here in few lines.
"""

from __future__ import annotations

import json
import socket
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context, get_model, get_parallel
from sglang.srt.server_args import ServerArgs

__all__ = ["PAGE_TOKENS", "Handle", "Rank", "publish", "update_weights", "write_config"]

PAGE_TOKENS = 16
HOST_TOKENS = 320 * PAGE_TOKENS
LAYERS, HEADS, HEAD_SIZE, LATENT, ROPE = 4, 2, 64, 96, 32
WAIT_S = 30.0
MEMORY_BYTES = 1 << 30
"""SGLang wants 10 GiB left on the machine unless it is told what it may use."""


def write_config(folder: Path, **changed: Any) -> Path:
    """A model's folder with a configuration, and weights that nobody loads."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        **changed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def publish(model: Path, **settings: Any) -> None:
    """What a scheduler's process has settled before it makes its caches."""
    arguments = ServerArgs(model_path=str(model), device="cpu", **settings)
    arguments.resolve_once()
    get_context().set_server_args(arguments)


class Rank:
    """See the module's docstring. `options` go into the extra config of the backend."""

    def __init__(
        self,
        target: str,
        layout: str = "page_first",
        *,
        mla: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        page_tokens: int = PAGE_TOKENS,
        rank: int = 0,
        ranks: int = 1,
        v1: bool = True,
        backend: str = "kvstore_client.engines.sglang:KVStoreBackend",
        **options: Any,
    ) -> None:
        self.page_tokens = page_tokens
        device = self._device_pool(mla, dtype)
        with host_memory_budget_scope(MEMORY_BYTES):
            self.host = self._host_pool(device, layout, mla)
        module, _, name = backend.partition(":")
        extra = {
            "backend_name": "kvstore",
            "module_path": module,
            "class_name": name,
            "interface_v1": int(v1),
            "target": target,
            "weights_revision": "r1",
            "model_name": "m",
            # A machine that is slow decides no test.
            "lookup_deadline_ms": 8_000,
            "load_deadline_ms": 8_000,
            "store_deadline_ms": 8_000,
            **options,
        }
        extra = {name: value for name, value in extra.items() if value is not None}
        group = HostPoolGroup(
            [PoolEntry(PoolName.KV, self.host, device, lambda layer: layer, True)]
        )
        with get_parallel().override(
            tp_rank=rank,
            tp_size=ranks,
            pp_rank=0,
            pp_size=1,
            attn_tp_rank=rank,
            attn_tp_size=ranks,
            moe_tp_size=ranks,
            attn_dcp_size=1,
            attn_dcp_rank=0,
        ):
            self.controller = HybridCacheController(
                TokenToKVPoolAllocator(HOST_TOKENS, dtype, "cpu", device, False),
                group,
                page_tokens,
                None,
                threading.Event(),
                storage_backend="dynamic",
                prefetch_threshold=page_tokens,
                model_name="m",
                storage_backend_extra_config=extra,
            )

    def _device_pool(self, mla: bool, dtype: torch.dtype) -> Any:
        if mla:
            return MLATokenToKVPool(
                HOST_TOKENS, self.page_tokens, dtype, LATENT, ROPE, LAYERS, "cpu", False
            )
        return MHATokenToKVPool(
            HOST_TOKENS, self.page_tokens, dtype, HEADS, HEAD_SIZE, LAYERS, "cpu", False
        )

    def _host_pool(self, device: Any, layout: str, mla: bool) -> Any:
        (info,) = device.get_device_pool_infos()
        common: dict[str, Any] = {
            "pin_memory": False,
            "device_capacity_tokens": HOST_TOKENS,
            "start_layer": 0,
            "end_layer": LAYERS,
            "host_token_capacity": HOST_TOKENS,
        }
        if mla:
            return MLATokenToKVPoolHost(
                info.buffer_info,
                1.0,
                0,
                self.page_tokens,
                layout,
                target_layer_num=LAYERS,
                **common,
            )
        made = get_mha_host_pool_cls(info.buffer_info)
        return made(info.buffer_info, 1.0, 0, self.page_tokens, layout, **common)

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def key(self, tokens: Sequence[int], **namespace: Any) -> RadixKey:
        return RadixKey(array("q", tokens), **namespace)

    def keys(self, tokens: Sequence[int], **namespace: Any) -> list[str]:
        """SGLang's names for the pages of a prompt."""
        made = get_storage_hash_str(self.key(tokens, **namespace), None, self.page_tokens)
        return list(made)

    def fill(self, tokens: int, seed: int) -> torch.Tensor:
        """Slots of as many pages, with noise in them, as after a copy from the device."""
        slots: torch.Tensor = self.host.alloc(tokens)
        noise = torch.Generator().manual_seed(seed)
        for slot in slots[:: self.page_tokens].tolist():
            like = self.host.get_data_page(slot)
            size = like.numel() * like.element_size()
            page = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=noise)
            self.host.set_from_flat_data_page(slot, page.view(like.dtype))
        return slots

    def content(self, slots: torch.Tensor) -> list[bytes]:
        """Of each page, in the order of its flat form."""
        pages = [self.host.get_data_page(slot) for slot in slots[:: self.page_tokens].tolist()]
        return [page.contiguous().view(torch.uint8).numpy().tobytes() for page in pages]

    def back_up(self, tokens: Sequence[int], slots: torch.Tensor, **namespace: Any) -> int:
        """Tokens that SGLang's backup thread believes to be stored."""
        keys = self.keys(tokens, **namespace)
        self.controller.write_storage(slots, list(tokens), keys)
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        return int(done.completed_tokens)

    def prefetch(self, tokens: Sequence[int], **namespace: Any) -> tuple[int, torch.Tensor | None]:
        """(tokens that SGLang's prefetch threads believe to be loaded, their slots)."""
        handle = Handle("request")
        self.controller.prefetch(handle, self.key(tokens, **namespace))
        operation = self.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        if not operation.storage_hit_count:
            return 0, None
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=WAIT_S)
            if ack.completed_tokens is not None:
                loaded = ack.completed_tokens
            if ack.completed_req:
                return loaded, operation.host_indices[:loaded]

    def flush(self) -> None:
        """As SGLang's tree does it when it is reset, after an update of the weights too."""
        self.controller.reset()
        self.controller.mem_pool_host.clear()

    def close(self) -> None:
        self.controller.detach_storage_backend()


def update_weights(how: str) -> None:
    """What SGLang does in its scheduler's process when it is sent other weights: none are in it.
    The request had no version, and the flush after it is refused.
    """
    model = SimpleNamespace(load_weights=list, modules=list, named_modules=list)
    updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *args, **more: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    if how == "disk":
        was = get_model()
        runner = SimpleNamespace(is_draft_worker=False)
        again = {"model_path": was.model_path, "load_format": was.load_format}
        ModelRunner.update_model_fields(runner, model, **again, load_config=None)
        return
    if how == "ipc":
        # Without a device it comes as far as looking for one.
        updater.update_weights_from_ipc(SimpleNamespace(zmq_handles={}))
        return
    if how == "tensor":
        with get_parallel().override(tp_rank=0):
            done, why = updater.update_weights_from_tensor([])
    else:
        address = ("127.0.0.1", free_port(), 0, 1)
        done, why = updater.init_weights_update_group(*address, "weight_update_group", "gloo")
    assert done, why


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Handle:
    """Of a request."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
