"""Hugging Face transformers: the fingerprint of a live model and greedy decoding over a given
cache.

`fingerprint_of` says what has to agree before another process may use this model's KV;
`state_digest` names weights that exist only in memory; `generate` continues a cache and times the
first token. Blocks are cut and rebuilt by `kvstore_client.engines.kv_blocks`, and stored by
`kvstore_client.engines.prefix_cache`.

Promises: an unknown weights revision stays unknown (the daemon then holds what is pushed), it is
never replaced by a path or a name. Imports torch and transformers; `import kvstore_client` does not
import this module. For applications that run a model in their own process, batch size 1.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.cache_utils import DynamicCache

from kvstore.model.fingerprint import (
    NO_CPU_ISA,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    attention_kind,
)
from kvstore_client.effective_config import effective_config_digest
from kvstore_client.engines.arriving import LayersLostError
from kvstore_client.engines.kv_blocks import (
    ELEMENT_ORDER,
    BlockCutter,
    BlockShape,
    DroppedTokensError,
    UnsupportedCacheError,
    cut_blocks,
    first_kept_token,
    rebuild_cache,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ELEMENT_ORDER",
    "BlockCutter",
    "BlockShape",
    "DroppedTokensError",
    "Generation",
    "LayersLostError",
    "UnsupportedCacheError",
    "cut_blocks",
    "fingerprint_of",
    "first_kept_token",
    "generate",
    "rebuild_cache",
    "state_digest",
]

DEFAULT_BLOCK_TOKENS: Final = 16


def fingerprint_of(
    model: PreTrainedModel,
    *,
    model_name: str,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    weights_revision: str | None = None,
    weight_epoch: int = 0,
    adapter_name: str | None = None,
    adapter_digest: str | None = None,
) -> Fingerprint:
    """The fingerprint of the KV that `model` makes.

    `weights_revision`: a commit, `WeightsDigest.result_if_ready()` or `state_digest(...)`; None
    while it is unknown. `adapter_digest`: over the content of the adapter that is active. Windows
    count through the digest of the configuration: blocks hold every token of every layer. Token ids
    say nothing of images or sounds: name those in the keys' extras. Raises `UnsupportedCacheError`
    for a model without plain K and V, ValueError for a model in training mode or with an adapter
    that has no name here, BadRequest for a name that cannot be one.
    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if adapter_name is None and getattr(model, "peft_config", None):
        raise ValueError("the model has an adapter: name it and give its digest")
    shape = BlockShape.of_config(model.config, block_tokens=block_tokens, dtype=model.dtype)
    text = model.config.get_text_config(decoder=True)
    device: torch.device = model.device
    return Fingerprint(
        identity=Identity(
            model_name=model_name,
            weights_revision=weights_revision,
            weight_epoch=weight_epoch,
            adapter_name=adapter_name,
            adapter_digest=adapter_digest,
            config_digest=_config_digest(model),
        ),
        geometry=Geometry(
            attention=attention_kind(int(text.num_attention_heads), shape.kv_heads),
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
        ),
        encoding=Encoding(
            kv_dtype=str(model.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            element_order=ELEMENT_ORDER,
            attention_backend=f"transformers/{text._attn_implementation}",
            cpu_isa=_cpu_isa() if device.type == "cpu" else NO_CPU_ISA,
        ),
    )


def state_digest(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """`"state:sha256:" + hex` over name, type, shape and bytes of the tensors, in the order of
    their names.

    For a model that has no weight files: `state_digest(model.state_dict().items())`. Reads every
    byte (about a second per GB); tensors on a device are copied to the CPU one by one. Raises
    ValueError for a tensor that has no bytes of its own (meta, quantised wrapper, sparse).
    """
    digest = hashlib.sha256(b"kvstore/state/1")
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        if (
            tensor.is_meta
            or tensor.layout != torch.strided
            or type(tensor.data) is not torch.Tensor
        ):
            raise ValueError(f"{name} has no plain bytes: configure a weights revision")
        label = f"{tensor.dtype}{list(tensor.shape)}".encode()
        for field in (name.encode(), label):
            digest.update(struct.pack("<Q", len(field)) + field)
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(struct.pack("<Q", flat.nbytes))
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"state:sha256:{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` made. The cache holds all tokens but the last generated one."""

    token_ids: tuple[int, ...]
    cache: DynamicCache
    first_token_ns: int
    """From the call to the first token."""
    total_ns: int
    first_logits: torch.Tensor
    """Of the first token, `[vocabulary]`, as the model gave them."""


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    cache: DynamicCache | None,
    max_new_tokens: int,
    *,
    eos_token_ids: Sequence[int] = (),
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Generation:
    """Greedy continuation of `input_ids`, of which `cache` (changed in place) holds the first
    tokens.

    At least one token of the prompt must be left to compute; `cache` None computes them all. One
    whose layers are still on their way is waited for layer by layer; if the store loses some, it
    begins anew with those blocks that are there in all layers.
    """
    begun_ns = clock_ns()
    if max_new_tokens < 1:
        raise ValueError("max_new_tokens must be at least 1")
    cache = cache if cache is not None else DynamicCache(config=model.config)
    held = int(cache.get_seq_length())
    if held >= len(input_ids):
        raise ValueError(f"the cache holds {held} tokens of {len(input_ids)}: leave one to compute")
    forward = _forward(model)
    try:
        logits = forward(list(input_ids[held:]), cache)
    except LayersLostError as lost:
        salvaged = lost.arrival.salvage()
        cache = salvaged if salvaged is not None else DynamicCache(config=model.config)
        logits = forward(list(input_ids[int(cache.get_seq_length()) :]), cache)
    first_logits = logits
    made: list[int] = [int(logits.argmax())]
    first_token_ns = clock_ns() - begun_ns
    while len(made) < max_new_tokens and made[-1] not in eos_token_ids:
        logits = forward(made[-1:], cache)
        made.append(int(logits.argmax()))
    return Generation(tuple(made), cache, first_token_ns, clock_ns() - begun_ns, first_logits)


def _forward(model: PreTrainedModel) -> Callable[[list[int], DynamicCache], torch.Tensor]:
    """A call that appends tokens to a cache and gives the logits `[vocabulary]` after the last
    one."""
    parameters = inspect.signature(model.forward).parameters
    # transformers renamed the argument in 5.24.
    name = "cache" if "cache" in parameters else "past_key_values"
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1

    def call(token_ids: list[int], cache: DynamicCache) -> torch.Tensor:
        ids = torch.tensor([token_ids], device=model.device)
        output = model(input_ids=ids, **{name: cache}, **options)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    return call


def _config_digest(model: PreTrainedModel) -> str:
    """Of the configuration in effect, the base model's class and the type that it computes in."""
    config = model.config.get_text_config(decoder=True).to_dict()
    made_by = {
        "kvstore.model_class": type(model.base_model).__name__,
        "kvstore.compute_dtype": str(model.dtype),
    }
    return effective_config_digest({**config, **made_by})


def _cpu_isa() -> str:
    return str(torch.backends.cpu.get_cpu_capability())
