"""Layout: where the bytes of one block lie inside its slot, by rank, layer and K or V.

A block's slot is cut into parts, one for each rank whose KV is its own; ranks that hold equal KV
(MLA, fewer KV heads than ranks) share one part, and one of them writes it. A part is one contiguous
array in the fingerprint's element order. It promises that the parts cover the block exactly,
without overlap. The daemon checks offers with it, the client fills and reads blocks by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.model.dtypes import ITEMSIZE_BYTES, itemsize_bytes
from kvstore.model.fingerprint import CANONICAL_ORDERS, Fingerprint, Geometry, Placement
from kvstore.model.reasons import BadRequest, Reason

__all__ = [
    "ITEMSIZE_BYTES",
    "SLOT_ALIGN_BYTES",
    "Layout",
    "Part",
    "Piece",
    "itemsize_bytes",
    "layout_of",
]

SLOT_ALIGN_BYTES = 4_096
"""Slots are page-aligned: arena pages are the buffers of direct I/O."""
PARTS_MAX = 4_096
"""Of a block. A stranger's offer decides how long the list of them is."""
BLOCK_BYTES_MAX = 1 << 40
"""No memory takes such a block, and its size still fits into every number that carries it."""


@dataclass(frozen=True)
class Part:
    """The range that one rank, or several with equal KV, fills: bytes within the slot."""

    index: int
    offset: int
    length: int
    first_layer: int
    layers: int
    first_head: int
    heads: int


@dataclass(frozen=True)
class Piece:
    """One layer's K or V (for MLA both in one): bytes within the part.

    shape: (heads, block_tokens, head_size), or (block_tokens, kv_latent_size + rope_size) for MLA;
        C order.
    """

    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """The byte geometry of the blocks of one fingerprint; all parts have one length."""

    kv_dtype: str
    element_order: str | None
    block_tokens: int
    bytes_per_token: int
    block_bytes: int
    slot_bytes: int
    tensor_parallel: int
    pipeline_parallel: int
    head_shards: int
    row_shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def part_bytes(self) -> int:
        """Bytes of each part."""
        return self.parts[0].length

    @property
    def piece_bytes(self) -> int | None:
        """Bytes of each layer's K or V in a part; None: only the engine knows where they are."""
        if self.element_order not in CANONICAL_ORDERS:
            return None
        return self.part_bytes // (self.parts[0].layers * len(self.sides))

    @property
    def replicas(self) -> int:
        """How many consecutive tensor-parallel ranks hold equal KV."""
        return self.tensor_parallel // self.head_shards

    @property
    def sides(self) -> tuple[str, ...]:
        """What a layer has: ("K", "V"), or ("KV",) for MLA."""
        return ("KV",) if len(self.row_shape) == 2 else ("K", "V")

    def part_index(self, tp_rank: int, pp_rank: int) -> int:
        """The part of a rank: pp_rank * tensor_parallel + tp_rank.

        Ranks of equal KV share one part and count once. BadRequest if there is no such rank.
        """
        if not 0 <= tp_rank < self.tensor_parallel or not 0 <= pp_rank < self.pipeline_parallel:
            raise BadRequest(
                Reason.BAD_PART,
                f"rank (tp {tp_rank}, pp {pp_rank}) is not in a placement of "
                f"{self.tensor_parallel} x {self.pipeline_parallel}",
            )
        return pp_rank * self.head_shards + tp_rank // self.replicas

    def is_writer(self, tp_rank: int) -> bool:
        """True for the first of the ranks that hold equal KV: it writes, the others only read."""
        return tp_rank % self.replicas == 0

    def part(self, index: int) -> Part:
        """The part with this index; BadRequest if there is none."""
        if not 0 <= index < len(self.parts):
            raise BadRequest(
                Reason.BAD_PART, f"part {index} is not in a layout of {len(self.parts)} parts"
            )
        return self.parts[index]

    def part_shape(self, index: int) -> tuple[int, ...]:
        """The part as one C-order array.

        (layers, 2, heads, block_tokens, head_size), or (layers, block_tokens, latent) for MLA.
        """
        self._check_canonical()
        part = self.part(index)
        if len(self.row_shape) == 2:
            return (part.layers, *self.row_shape)
        return (part.layers, 2, *self.row_shape)

    def piece(self, index: int, layer: int, side: str) -> Piece:
        """One layer's K or V within a part.

        layer: counted from 0 over the whole cache group. side: one of `sides`.

        BadRequest: no such part, layer or side, or an engine's own element order, whose inside only
        the engine knows.
        """
        self._check_canonical()
        part = self.part(index)
        if not part.first_layer <= layer < part.first_layer + part.layers:
            raise BadRequest(Reason.BAD_PART, f"layer {layer} is not in part {index}")
        if side not in self.sides:
            raise BadRequest(Reason.BAD_PART, f"side {side!r} is not one of {self.sides}")
        row = (layer - part.first_layer) * len(self.sides) + self.sides.index(side)
        length = part.length // (part.layers * len(self.sides))
        return Piece(row * length, length, self.row_shape, self.kv_dtype)

    def pieces(self, index: int) -> Iterator[tuple[tuple[int, str], Piece]]:
        """((layer, side), piece) of a part, in the order of their bytes."""
        part = self.part(index)
        for layer in range(part.first_layer, part.first_layer + part.layers):
            for side in self.sides:
                yield (layer, side), self.piece(index, layer, side)

    @property
    def layers(self) -> int:
        """Of all parts together."""
        return self.pipeline_parallel * self.parts[0].layers

    def layer_spans(self, layer: int, index: int | None = None) -> tuple[slice, ...]:
        """Where the K and V of one layer lie: bytes within the block, one span for each part that
        has the layer, in the order of the parts. With `index`: within this part alone, one span.

        All spans have one length, and those of all layers cover what they are cut from. BadRequest
        as for `piece`.
        """
        self._check_canonical()
        if index is not None:
            part = self.part(index)
            return (self._layer_span(part, layer, part.offset),)
        spans = tuple(
            self._layer_span(part, layer, 0)
            for part in self.parts
            if part.first_layer <= layer < part.first_layer + part.layers
        )
        if not spans:
            raise BadRequest(Reason.BAD_PART, f"layer {layer} is not one of {self.layers}")
        return spans

    def _layer_span(self, part: Part, layer: int, base: int) -> slice:
        if not part.first_layer <= layer < part.first_layer + part.layers:
            raise BadRequest(Reason.BAD_PART, f"layer {layer} is not in part {part.index}")
        length = part.length // part.layers
        first = part.offset - base + (layer - part.first_layer) * length
        return slice(first, first + length)

    def _check_canonical(self) -> None:
        if self.element_order not in CANONICAL_ORDERS:
            raise BadRequest(
                Reason.NOT_SUPPORTED,
                f"only the engine knows the inside of a part in the order {self.element_order!r}",
                "encoding.element_order",
            )


def layout_of(fingerprint: Fingerprint) -> Layout:
    """The layout of a fingerprint's blocks.

    Sizes: 2 * layers * kv_heads * head_size elements a token, or layers * (kv_latent_size +
    rope_size) for MLA. BadRequest, naming the field: layers or KV heads that the ranks do not
    divide evenly, context parallelism, a codec (its sizes vary), more than PARTS_MAX parts or
    BLOCK_BYTES_MAX bytes.
    """
    geometry, encoding, placement = (
        fingerprint.geometry,
        fingerprint.encoding,
        fingerprint.placement,
    )
    if encoding.codec is not None:
        raise _refused("encoding.codec", f"blocks of codec {encoding.codec!r} have no fixed layout")
    shards = _head_shards(geometry, placement)
    stages = placement.pipeline_parallel
    layers = geometry.layers // stages
    heads = geometry.kv_heads // shards
    itemsize = itemsize_bytes(encoding.kv_dtype)
    row_shape: tuple[int, ...]
    if geometry.attention == "mla":
        row_shape = (encoding.block_tokens, geometry.kv_latent_size + geometry.rope_size)
        part_elements = layers * row_shape[0] * row_shape[1]
    else:
        row_shape = (heads, encoding.block_tokens, geometry.head_size)
        part_elements = 2 * layers * heads * encoding.block_tokens * geometry.head_size
    length = part_elements * itemsize
    block_bytes = length * stages * shards
    if block_bytes > BLOCK_BYTES_MAX:
        raise _refused("geometry.layers", f"a block of {block_bytes} bytes is more than 1 TiB")
    parts = tuple(
        Part(index, index * length, length, stage * layers, layers, shard * heads, heads)
        for index, (stage, shard) in enumerate(
            (stage, shard) for stage in range(stages) for shard in range(shards)
        )
    )
    return Layout(
        kv_dtype=encoding.kv_dtype,
        element_order=encoding.element_order,
        block_tokens=encoding.block_tokens,
        bytes_per_token=block_bytes // encoding.block_tokens,
        block_bytes=block_bytes,
        slot_bytes=-(-block_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES,
        tensor_parallel=placement.tensor_parallel,
        pipeline_parallel=stages,
        head_shards=shards,
        row_shape=row_shape,
        parts=parts,
    )


def _head_shards(geometry: Geometry, placement: Placement) -> int:
    """How many different slices of heads there are; checks that the ranks divide the block."""
    if placement.context_parallel != 1:
        raise _refused(
            "placement.context_parallel", "blocks whose tokens are spread over ranks have no layout"
        )
    if geometry.layers % placement.pipeline_parallel:
        raise _refused(
            "placement.pipeline_parallel",
            f"{geometry.layers} layers do not divide by {placement.pipeline_parallel}",
        )
    ranks, heads = placement.tensor_parallel, geometry.kv_heads
    shards = min(ranks, heads)
    if ranks % shards or heads % shards:
        raise _refused(
            "placement.tensor_parallel",
            f"{heads} KV heads do not divide evenly over {ranks} ranks, nor ranks over heads",
        )
    if shards * placement.pipeline_parallel > PARTS_MAX:
        raise _refused(
            "placement.tensor_parallel",
            f"a block of {shards} x {placement.pipeline_parallel} parts has more than {PARTS_MAX}",
        )
    return shards


def _refused(field: str, detail: str) -> BadRequest:
    return BadRequest(Reason.NOT_SUPPORTED, detail, field)
