"""Messages to model values and back. Pure; the daemon and the SDK both use it.

An absent optional string travels as "": no fingerprint field may be an empty string. What a peer
sends is checked by the model's own constructors, which raise BadRequest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.model.fingerprint import (
    Difference,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
    Verdict,
)
from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire.v1 import store_pb2 as pb

PLACE = struct.Struct("<IIQ")
"""One place of AcquireReply.places: region id, slot, generation."""

PLACE_DTYPE = np.dtype([("region", "<u4"), ("slot", "<u4"), ("generation", "<u8")])

VERDICTS: dict[Verdict, pb.Verdict.ValueType] = {
    Verdict.MATCH: pb.VERDICT_MATCH,
    Verdict.CONVERTIBLE: pb.VERDICT_CONVERTIBLE,
    Verdict.INCOMPATIBLE: pb.VERDICT_INCOMPATIBLE,
    Verdict.HELD: pb.VERDICT_HELD,
}
_VERDICT_OF = {number: verdict for verdict, number in VERDICTS.items()}


def verdict_from_wire(number: int) -> Verdict:
    """The verdict with this number; one that this version does not know is no match."""
    return _VERDICT_OF.get(number, Verdict.INCOMPATIBLE)  # type: ignore[call-overload, no-any-return]


def reason_to_wire(reason: Reason) -> pb.Reason.ValueType:
    return pb.Reason.ValueType(int(reason))


def fingerprint_to_wire(fingerprint: Fingerprint) -> pb.Fingerprint:
    message = pb.Fingerprint()
    for group in fingerprint.groups():
        target = getattr(message, group.GROUP)
        for name, value in group.values():
            if value is not None:
                setattr(target, name, value)
        target.SetInParent()
    return message


def fingerprint_from_wire(message: pb.Fingerprint) -> Fingerprint:
    """Raises BadRequest(BAD_FINGERPRINT, BAD_NAME) where the offer is malformed."""
    identity, geometry = message.identity, message.geometry
    encoding, placement = message.encoding, message.placement
    return Fingerprint(
        Identity(
            model_name=identity.model_name,
            weights_revision=identity.weights_revision or None,
            weight_epoch=identity.weight_epoch,
            adapter_name=identity.adapter_name or None,
            adapter_digest=identity.adapter_digest or None,
            config_digest=identity.config_digest or None,
        ),
        Geometry(
            attention=geometry.attention,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_size=geometry.head_size,
            kv_latent_size=geometry.kv_latent_size,
            rope_size=geometry.rope_size,
            cache_group=geometry.cache_group,
            window_tokens=geometry.window_tokens,
        ),
        Encoding(
            kv_dtype=encoding.kv_dtype,
            block_tokens=encoding.block_tokens,
            element_order=encoding.element_order or None,
            scales_digest=encoding.scales_digest or None,
            layout_version=encoding.layout_version or None,
            attention_backend=encoding.attention_backend or None,
            cpu_isa=encoding.cpu_isa or None,
            codec=encoding.codec or None,
        ),
        Placement(
            tensor_parallel=placement.tensor_parallel or 1,
            pipeline_parallel=placement.pipeline_parallel or 1,
            context_parallel=placement.context_parallel or 1,
        ),
    )


def differences_to_wire(differences: Iterable[Difference]) -> list[pb.Difference]:
    return [
        pb.Difference(field=d.field, stored=_text(d.stored), offered=_text(d.offered))
        for d in differences
    ]


def differences_from_wire(messages: Iterable[pb.Difference]) -> tuple[Difference, ...]:
    return tuple(
        Difference(m.field, m.stored or None, m.offered or None, m.field.partition(".")[0])
        for m in messages
    )


def pack_places(places: Iterable[tuple[int, int, int] | None]) -> bytes:
    """(region id, slot, generation) a block, None where it is absent."""
    pack = PLACE.pack
    absent = bytes(PLACE.size)
    return b"".join(absent if place is None else pack(*place) for place in places)


def unpack_places(data: bytes) -> NDArray[np.void]:
    """Structured array [n] of PLACE_DTYPE; BadRequest if the length is not a multiple of 16."""
    if len(data) % PLACE.size:
        raise BadRequest(Reason.BAD_SIZE, f"{len(data)} bytes are no whole number of places")
    return np.frombuffer(data, PLACE_DTYPE)


def pack_u32(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def pack_u64(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<u8").tobytes()


def unpack_u32(data: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(data, "<u4")


def unpack_u64(data: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(data, "<u8")


def encode_fetch_chunk(header: bytes, *payload: memoryview | bytes) -> bytes:
    """A FetchChunk, header first, with one copy of the payload, given in pieces. `header` is an
    encoded ChunkHeader.

    Field numbers and wire types of protos/kvstore/v1/store.proto: header = 1, payload = 2, both
    length-delimited.
    """
    length = sum(map(len, payload))
    return b"".join((b"\x0a", _varint(len(header)), header, b"\x12", _varint(length), *payload))


def decode_fetch_chunk(data: bytes) -> tuple[pb.ChunkHeader, memoryview]:
    """(header, payload as a view of `data`). Falls back to the general parser for another order of
    fields.

    Raises google.protobuf.message.DecodeError on garbage.
    """
    view = memoryview(data)
    parsed = _header_first(view)
    if parsed is not None:
        return parsed
    chunk = pb.FetchChunk.FromString(data)
    return chunk.header, memoryview(chunk.payload)


def _header_first(view: memoryview) -> tuple[pb.ChunkHeader, memoryview] | None:
    if len(view) < 2 or view[0] != 0x0A:
        return None
    length, start = _read_varint(view, 1)
    header, rest = view[start : start + length], start + length
    if len(header) != length or rest >= len(view) or view[rest] != 0x12:
        return None
    length, start = _read_varint(view, rest + 1)
    if start + length != len(view):
        return None
    return pb.ChunkHeader.FromString(bytes(header)), view[start:]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, start: int) -> tuple[int, int]:
    """(value, index after it); (-1, start) if there is none."""
    value = shift = 0
    for index in range(start, min(start + 10, len(view))):
        value |= (view[index] & 0x7F) << shift
        if view[index] < 0x80:
            return value, index + 1
        shift += 7
    return -1, start


def _text(value: str | int | None) -> str:
    return "" if value is None else str(value)
