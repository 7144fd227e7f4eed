"""Messages to values and back, and the table of statuses."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.fingerprint import Fingerprint, Verdict
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.wire import convert, status
from kvstore.wire.v1 import store_pb2 as pb

GOLDEN = Path(__file__).parents[2] / "golden" / "fingerprints.json"


def golden_fingerprints() -> list[Fingerprint]:
    cases = json.loads(GOLDEN.read_text())
    return [Fingerprint.from_dict(cases[name]["fields"]) for name in ("plain", "held", "latent")]


@pytest.mark.parametrize("fingerprint", golden_fingerprints())
def test_a_fingerprint_survives_the_wire(fingerprint: Fingerprint) -> None:
    data = convert.fingerprint_to_wire(fingerprint).SerializeToString()
    back = convert.fingerprint_from_wire(pb.Fingerprint.FromString(data))
    assert back == fingerprint
    assert back.digest == fingerprint.digest


def test_an_empty_fingerprint_is_refused() -> None:
    with pytest.raises(BadRequest):
        convert.fingerprint_from_wire(pb.Fingerprint())


def test_reasons_have_the_same_numbers_on_the_wire() -> None:
    ours = {reason.name: int(reason) for reason in Reason}
    wire = {name.removeprefix("REASON_"): number for name, number in pb.Reason.items()}
    assert ours == wire


def test_every_verdict_travels() -> None:
    for verdict in Verdict:
        assert convert.verdict_from_wire(convert.VERDICTS[verdict]) is verdict


def test_a_verdict_of_a_newer_peer_is_no_match() -> None:
    assert convert.verdict_from_wire(99) is Verdict.INCOMPATIBLE


PLACES = st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))


@given(st.lists(st.none() | PLACES))
def test_places_survive_the_wire(places: list[tuple[int, int, int] | None]) -> None:
    back = convert.unpack_places(convert.pack_places(places)).tolist()
    assert back == [place or (0, 0, 0) for place in places]


def test_a_cut_place_is_refused() -> None:
    with pytest.raises(BadRequest):
        convert.unpack_places(bytes(17))


@given(st.binary(max_size=300), st.integers(0, 2**31))
def test_a_chunk_encoded_by_hand_is_the_generated_one(payload: bytes, block: int) -> None:
    header = pb.ChunkHeader(block=block, offset=7)
    pieces = memoryview(payload)[:100], memoryview(payload)[100:]
    data = convert.encode_fetch_chunk(header.SerializeToString(), *pieces)
    assert pb.FetchChunk.FromString(data) == pb.FetchChunk(header=header, payload=payload)
    parsed, view = convert.decode_fetch_chunk(data)
    assert parsed == header
    assert bytes(view) == payload


def test_a_chunk_in_another_order_is_read_by_the_general_parser() -> None:
    header = pb.ChunkHeader(block=3).SerializeToString()
    data = b"\x12\x02ab" + b"\x0a" + bytes([len(header)]) + header
    parsed, view = convert.decode_fetch_chunk(data)
    assert (parsed.block, bytes(view)) == (3, b"ab")


@given(st.binary(max_size=64))
def test_garbage_is_an_error_of_the_parser_or_a_chunk(data: bytes) -> None:
    try:
        convert.decode_fetch_chunk(data)
    except DecodeError:
        return


@pytest.mark.parametrize("reason", list(Reason))
def test_an_error_comes_back_with_its_reason(reason: Reason) -> None:
    error = KVStoreError(reason, "what happened", "host.capacity_bytes")
    metadata = (("other", "x"), (status.DETAIL_KEY, status.detail_of(error)))
    assert status.reason_of(status.code_of(reason), metadata) == (reason, "what happened")


def test_a_status_without_detail_is_told_by_its_code() -> None:
    assert status.reason_of(grpc.StatusCode.UNAVAILABLE, None)[0] is Reason.UNAVAILABLE
    assert status.reason_of(grpc.StatusCode.DATA_LOSS, ())[0] is Reason.UNAVAILABLE


def test_a_damaged_detail_falls_back_to_the_code() -> None:
    metadata = ((status.DETAIL_KEY, b"\xff\xff"),)
    reason, _ = status.reason_of(grpc.StatusCode.DEADLINE_EXCEEDED, metadata)
    assert reason is Reason.DEADLINE_EXCEEDED
