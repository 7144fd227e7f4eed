"""Layouts: sizes, parts, pieces, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.model.fingerprint import (
    ORDER_HEADS,
    ORDER_LATENT,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
)
from kvstore.model.layout import PARTS_MAX, Layout, layout_of
from kvstore.model.reasons import BadRequest, Reason

IDENTITY = Identity("m", "r", config_digest="c")


def heads(
    layers: int = 4, kv_heads: int = 8, tp: int = 1, pp: int = 1, cp: int = 1, **encoding: Any
) -> Layout:
    fields: dict[str, Any] = {
        "kv_dtype": "bfloat16",
        "block_tokens": 16,
        "element_order": ORDER_HEADS,
    }
    kind = "mha" if kv_heads > 1 else "mqa"
    return layout_of(
        Fingerprint(
            IDENTITY,
            Geometry(kind, layers, kv_heads, 64),
            Encoding(**(fields | encoding)),
            Placement(tp, pp, cp),
        )
    )


def latent(tp: int = 1, pp: int = 1, layers: int = 4) -> Layout:
    return layout_of(
        Fingerprint(
            IDENTITY,
            Geometry("mla", layers, 1, 0, kv_latent_size=512, rope_size=64),
            Encoding("bfloat16", 16, ORDER_LATENT),
            Placement(tp, pp),
        )
    )


def refused(call: Any, *args: Any, **kwargs: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call(*args, **kwargs)
    return caught.value


def test_sizes() -> None:
    layout = heads()
    assert layout.bytes_per_token == 2 * 4 * 8 * 64 * 2
    assert layout.block_bytes == 16 * layout.bytes_per_token
    assert layout.slot_bytes == layout.block_bytes
    assert latent().bytes_per_token == 4 * 576 * 2
    small = heads(layers=1, kv_heads=1, block_tokens=1)
    assert (small.block_bytes, small.slot_bytes) == (256, 4096)
    assert heads(layers=1, kv_heads=1, block_tokens=17).slot_bytes == 8192


@pytest.mark.parametrize(
    ("kv_dtype", "itemsize"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
        ("int8", 1),
    ],
)
def test_itemsizes(kv_dtype: str, itemsize: int) -> None:
    assert heads(kv_dtype=kv_dtype).block_bytes == itemsize * 2 * 4 * 8 * 64 * 16


@pytest.mark.parametrize(
    "layout",
    [heads(), heads(tp=2), heads(tp=4, pp=2), heads(kv_heads=2, tp=8), latent(), latent(4, 2)],
    ids=["plain", "tp2", "tp4pp2", "replicated", "mla", "mla-tp4pp2"],
)
def test_parts_and_pieces_cover_the_block_exactly(layout: Layout) -> None:
    covered = np.zeros(layout.block_bytes, np.uint8)
    for part in layout.parts:
        assert part.length == layout.part_bytes
        assert layout.part(part.index) is part
        inside = 0
        for _, piece in layout.pieces(part.index):
            assert piece.offset == inside
            assert piece.length == int(np.prod(piece.shape)) * 2
            inside += piece.length
            start = part.offset + piece.offset
            covered[start : start + piece.length] += 1
        assert inside == part.length
        assert int(np.prod(layout.part_shape(part.index))) * 2 == part.length
    assert (covered == 1).all()


def test_part_index_follows_ranks() -> None:
    layout = heads(tp=4, pp=2)
    assert len(layout.parts) == 8
    for pp_rank in range(2):
        for tp_rank in range(4):
            index = layout.part_index(tp_rank, pp_rank)
            part = layout.part(index)
            assert index == pp_rank * 4 + tp_rank
            assert (part.first_layer, part.layers) == (2 * pp_rank, 2)
            assert (part.first_head, part.heads) == (2 * tp_rank, 2)
            assert layout.is_writer(tp_rank)


def test_ranks_with_equal_kv_share_a_part() -> None:
    layout = heads(kv_heads=2, tp=8)
    assert (layout.replicas, len(layout.parts)) == (4, 2)
    assert [layout.part_index(rank, 0) for rank in range(8)] == [0] * 4 + [1] * 4
    assert [rank for rank in range(8) if layout.is_writer(rank)] == [0, 4]
    mla = latent(tp=4, pp=2)
    assert [mla.part_index(tp, pp) for pp in range(2) for tp in range(4)] == [0] * 4 + [1] * 4
    assert [rank for rank in range(4) if mla.is_writer(rank)] == [0]
    assert latent(tp=8).block_bytes == latent().block_bytes


def test_pieces_are_where_the_element_order_says() -> None:
    """[layer][K,V][kv_head][token][dim], seen through numpy."""
    layout = heads(tp=2, pp=2, layers=4, kv_heads=8)
    index = layout.part_index(1, 1)
    array = np.arange(layout.part_bytes // 2, dtype=np.uint16).reshape(layout.part_shape(index))
    raw = array.tobytes()
    assert [key for key, _ in layout.pieces(index)] == [(2, "K"), (2, "V"), (3, "K"), (3, "V")]
    for (layer, side), piece in layout.pieces(index):
        assert piece == layout.piece(index, layer, side)
        assert piece.shape == (4, 16, 64)
        assert piece.dtype == "bfloat16"
        found = np.frombuffer(raw, np.uint16, piece.length // 2, piece.offset)
        expected = array[layer - 2, "KV".index(side)]
        assert (found.reshape(piece.shape) == expected).all()


def test_pieces_of_mla() -> None:
    layout = latent(pp=2)
    assert layout.sides == ("KV",)
    assert layout.part_shape(1) == (2, 16, 576)
    piece = layout.piece(1, 3, "KV")
    assert (piece.offset, piece.length, piece.shape) == (16 * 576 * 2, 16 * 576 * 2, (16, 576))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_heads": 8, "tp": 3}, "placement.tensor_parallel"),
        ({"kv_heads": 8, "tp": 12}, "placement.tensor_parallel"),
        ({"layers": 5, "pp": 2}, "placement.pipeline_parallel"),
        ({"layers": 1, "pp": 2}, "placement.pipeline_parallel"),
        ({"cp": 2}, "placement.context_parallel"),
        ({"codec": "zstd"}, "encoding.codec"),
        # At once: sixteen million parts would hold up the daemon's one loop for minutes.
        (
            {"layers": 4_096, "kv_heads": 4_096, "tp": 4_096, "pp": 4_096},
            "placement.tensor_parallel",
        ),
        ({"layers": 65_536, "kv_heads": 65_536, "tp": 4_096}, "geometry.layers"),
    ],
    ids=str,
)
def test_what_has_no_layout_is_refused_by_field(options: dict[str, Any], field: str) -> None:
    error = refused(heads, **options)
    assert error.setting == field
    assert error.reason is Reason.NOT_SUPPORTED


def test_as_many_parts_as_are_allowed() -> None:
    layout = heads(layers=64, kv_heads=64, tp=64, pp=64)
    assert len(layout.parts) == PARTS_MAX
    assert layout.block_bytes == PARTS_MAX * layout.part_bytes


@pytest.mark.parametrize("layout", [heads(), heads(tp=4, pp=2)])
def test_every_piece_has_the_same_length(layout: Layout) -> None:
    for part in layout.parts:
        assert {piece.length for _, piece in layout.pieces(part.index)} == {layout.piece_bytes}


def test_an_engines_own_order_has_parts_but_no_pieces() -> None:
    layout = heads(element_order="LBNHC", tp=2)
    assert [(p.offset, p.length) for p in layout.parts] == [
        (p.offset, p.length) for p in heads(tp=2).parts
    ]
    for call in (lambda: layout.piece(0, 0, "K"), lambda: layout.part_shape(0)):
        assert refused(call).setting == "encoding.element_order"
    assert layout.piece_bytes is None
    assert refused(lambda: list(layout.pieces(0))).reason is Reason.NOT_SUPPORTED


def test_parts_that_do_not_exist_are_refused() -> None:
    layout = heads(tp=2, pp=2)
    for call in (
        lambda: layout.part(4),
        lambda: layout.part(-1),
        lambda: layout.part_index(2, 0),
        lambda: layout.part_index(0, 2),
        lambda: layout.part_index(-1, 0),
        lambda: layout.piece(0, 2, "K"),
        lambda: layout.piece(2, 0, "K"),
        lambda: layout.piece(0, 0, "KV"),
        lambda: latent().piece(0, 0, "K"),
    ):
        assert refused(call).reason is Reason.BAD_PART


@pytest.mark.parametrize(
    "layout", [heads(), heads(tp=2, pp=2), heads(tp=16), latent(), latent(tp=2, pp=2)]
)
def test_the_spans_of_all_layers_cover_the_block_exactly(layout: Layout) -> None:
    hits = np.zeros(layout.block_bytes, np.int64)
    for layer in range(layout.layers):
        spans = layout.layer_spans(layer)
        assert len(spans) == layout.head_shards
        assert len({span.stop - span.start for span in spans}) == 1
        for span in spans:
            hits[span] += 1
    assert (hits == 1).all()


def test_the_span_of_a_layer_is_its_pieces_one_after_the_other() -> None:
    layout = heads(tp=2, pp=2)
    for part in layout.parts:
        for layer in range(part.first_layer, part.first_layer + part.layers):
            (span,) = layout.layer_spans(layer, part.index)
            keys, values = (layout.piece(part.index, layer, side) for side in layout.sides)
            assert (span.start, span.stop) == (keys.offset, values.offset + values.length)
            inside = slice(span.start + part.offset, span.stop + part.offset)
            assert inside in layout.layer_spans(layer)


def test_layers_that_do_not_exist_have_no_span() -> None:
    layout = heads(pp=2)
    assert refused(layout.layer_spans, 4).reason is Reason.BAD_PART
    assert refused(layout.layer_spans, -1).reason is Reason.BAD_PART
    assert refused(layout.layer_spans, 3, 0).reason is Reason.BAD_PART
    assert refused(layout.layer_spans, 0, 2).reason is Reason.BAD_PART
    own = heads(element_order="engine/1")
    assert refused(own.layer_spans, 0).reason is Reason.NOT_SUPPORTED
