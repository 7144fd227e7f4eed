"""A transformers cache whose layers arrive while the model computes.

Each layer's keys and values are waited for when somebody reads them first, which a model does just
before it uses them: the layers before are computed meanwhile. From then on the layer is an ordinary
`DynamicLayer`. Promise: nobody sees bytes that have not arrived and been verified. A layer that
does not come raises `LayersLostError`, since a forward pass that has begun cannot go on without it;
`generate` of `kvstore_client.engines.transformers` then begins anew with what there is.

For models on the CPU whose layers keep every token, batch size 1. Imports torch and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvstore_client.engines.kv_blocks import BlockShape, bits_of, place_layer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from kvstore.model.reasons import Reason
    from kvstore_client.client import Space
    from kvstore_client.layers import LayerFetch
    from kvstore_client.results import Fetched, Hit

__all__ = ["Arrival", "ArrivingLayer", "LayersLostError", "begin_arrival", "can_arrive"]


class LayersLostError(RuntimeError):
    """The rest of a cache did not come: the store is away, too slow, or its blocks changed."""

    def __init__(self, arrival: Arrival, layer: int) -> None:
        super().__init__(f"layer {layer} of the cache did not arrive")
        self.arrival = arrival


@dataclass(slots=True, eq=False)
class Arrival:
    """One cache on its way. `whole`: [layers, 2, kv_heads, tokens, head_size], being filled.
    `salvaged_tokens`: what was left of it, None while nobody had to ask.
    """

    fetch: LayerFetch
    whole: torch.Tensor
    config: PreTrainedConfig
    block_tokens: int
    salvaged_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return int(self.whole.shape[3])

    def cache(self) -> DynamicCache:
        """The cache, whose layers may still be on their way."""
        cache = DynamicCache(config=self.config)
        cache.layers = [ArrivingLayer(self, number) for number in range(self.whole.shape[0])]
        return cache

    def result(self) -> Fetched:
        """Waits until the last layer is there, at most until the fetch's deadline."""
        return self.fetch.result()

    def salvage(self) -> DynamicCache | None:
        """An ordinary cache of the leading blocks that are there in all layers; None: there is
        none. Waits as `result` does.
        """
        tokens = self.result().blocks * self.block_tokens
        self.salvaged_tokens = tokens
        if not tokens:
            return None
        cache = DynamicCache(config=self.config)
        for layer, kv in zip(cache.layers, self.whole[:, :, None, :, :tokens], strict=True):
            place_layer(layer, kv[0], kv[1])
        return cache


class ArrivingLayer(DynamicLayer):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """A layer that waits for its keys and values when they are read, and then is a DynamicLayer."""

    def __init__(self, arrival: Arrival, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._arrival = arrival
        self._number = number
        kv = arrival.whole[number, :, None]
        self.lazy_initialization(kv[0], kv[1])
        self.keys, self.values = kv[0], kv[1]

    def get_seq_length(self) -> int:
        """Known before the layer is there: masks and positions are made of it."""
        return self._arrival.tokens

    def arrive(self) -> None:
        """Waits for the layer. Raises LayersLostError."""
        fetch = self._arrival.fetch
        if fetch.wait(self._number) < fetch.blocks:
            raise LayersLostError(self._arrival, self._number)
        del self.__dict__["_arrival"], self.__dict__["_number"]
        self.__class__ = DynamicLayer  # type: ignore[assignment,unused-ignore]

    @property
    def keys(self) -> Any:
        return self._read("keys")

    @keys.setter
    def keys(self, tensor: Any) -> None:
        self.__dict__["keys"] = tensor

    @property
    def values(self) -> Any:
        return self._read("values")

    @values.setter
    def values(self, tensor: Any) -> None:
        self.__dict__["values"] = tensor

    def _read(self, name: str) -> Any:
        self.arrive()
        return self.__dict__[name]


def can_arrive(model: PreTrainedModel) -> bool:
    """Whether this model's cache can be filled layer by layer: on the CPU, without windows."""
    layers = DynamicCache(config=model.config).layers
    plain = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
    return plain and torch.device(model.device).type == "cpu"


def begin_arrival(
    space: Space, model: PreTrainedModel, hit: Hit, *, request_id: str = ""
) -> Arrival | Reason:
    """Begins to fetch what a plan advises of a prompt into a cache of `model`; or why nothing is
    there.
    """
    blocks = len(hit.keys_to_load)
    shape = BlockShape.of_config(model.config, block_tokens=space.block_tokens, dtype=model.dtype)
    size = (shape.layers, 2, shape.kv_heads, blocks * shape.block_tokens, shape.head_size)
    whole = torch.empty(size, dtype=model.dtype)
    # Where block b of a layer is: [blocks, 2, kv_heads, block_tokens, head_size], not in C order.
    places = bits_of(whole).reshape(
        (shape.layers, 2, shape.kv_heads, blocks, shape.block_tokens, shape.head_size)
    )
    fetch = space.fetch_layers(hit, places.transpose(0, 3, 1, 2, 4, 5), request_id=request_id)
    if not fetch.blocks:
        return fetch.result().reason
    tokens = fetch.blocks * shape.block_tokens
    return Arrival(fetch, whole[:, :, :, :tokens], model.config, shape.block_tokens)
