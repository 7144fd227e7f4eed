"""Format 1: golden vectors, and that no damage, cut or exchange of a record goes unnoticed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import struct
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given

from kvstore.tiers.disk import folder
from kvstore.tiers.disk import format as fmt
from kvstore.tiers.disk.format import Fault, Finding, RecordHeader, Row

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "disk_format.json").read_text())


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_disk", GOLDEN / "generate_disk.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = _generator()

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
digests = st.binary(min_size=32, max_size=32)
parents = st.one_of(st.just(b""), digests.filter(any))
checksums = st.binary(min_size=16, max_size=16)
headers = st.builds(
    RecordHeader,
    tenant_digest=digests,
    fingerprint_digest=digests,
    space_id=u64,
    key=digests,
    parent=parents,
    depth=u32,
    generation=u64,
    length=u64,
    checksum=checksums,
    first_token=u64,
    token_count=u32,
    cache_group_digest=digests,
    part_count=u32,
)
rows = st.builds(Row, u32, u32, u64, u64, checksums, parents, u32)

PAYLOAD = bytes(at * 7 % 256 for at in range(5_000))
HEADER = RecordHeader(
    tenant_digest=fmt.tenant_digest("tenant"),
    fingerprint_digest=b"f" * 32,
    space_id=3,
    key=b"k" * 32,
    parent=b"p" * 32,
    depth=4,
    generation=9,
    length=len(PAYLOAD),
    checksum=fmt.payload_checksum(PAYLOAD),
)
ROW = Row(1, 2, HEADER.generation, HEADER.length, HEADER.checksum, HEADER.parent, HEADER.depth)


def check(page: fmt.Readable, payload: fmt.Readable = PAYLOAD) -> Fault | None:
    """The whole check of a record that was read for HEADER's block."""
    return fmt.check_record(
        page,
        payload,
        space_id=HEADER.space_id,
        key=HEADER.key,
        row=ROW,
        fingerprint_digest=HEADER.fingerprint_digest,
        tenant_digest=HEADER.tenant_digest,
    )


def reseal(page: bytes) -> bytes:
    """The page with a right checksum, as another build would have written it."""
    return page[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(page[:-8]))


# ---------------------------------------------------------------- golden vectors


def test_this_build_writes_the_golden_vectors() -> None:
    assert GENERATOR.vectors() == VECTORS


@pytest.mark.parametrize("name", sorted(VECTORS["headers"]))
def test_golden_headers_are_read(name: str) -> None:
    stored = VECTORS["headers"][name]
    fields, checksum = bytes.fromhex(stored["fields"]), bytes.fromhex(stored["checksum"])
    page = fields + bytes(4_096 - len(fields) - len(checksum)) + checksum
    assert fmt.decode(page) == GENERATOR.HEADERS[name]


@pytest.mark.parametrize("name", sorted(VECTORS["rows"]))
def test_golden_rows_are_read(name: str) -> None:
    packed = bytes.fromhex(VECTORS["rows"][name])
    row = GENERATOR.ROWS[name]
    assert fmt.unpack_row(packed) == row
    (many,) = np.frombuffer(packed, fmt.ROW_DTYPE)
    assert (many["format"], many["zero"]) == (1, 0)
    assert (many["segment"], many["slot"], many["depth"]) == (row.segment, row.slot, row.depth)
    assert (many["generation"], many["length"]) == (row.generation, row.length)
    assert many["checksum"].tobytes() == row.checksum
    assert many["parent"].tobytes() == (row.parent or bytes(32))


@pytest.mark.parametrize("name", sorted(VECTORS["segments"]))
def test_golden_segments_are_read(name: str) -> None:
    segment = GENERATOR.SEGMENTS[name]
    packed = bytes.fromhex(VECTORS["segments"][name])
    assert fmt.unpack_segment(segment.segment, packed) == segment


def test_golden_header_follows_the_written_layout() -> None:
    """Taken apart here without the library, from the documented order of fields."""
    header = GENERATOR.HEADERS["later block"]
    page = fmt.encode(header)
    assert page[:8] == b"KVSTORE\xb1"
    assert struct.unpack_from("<II", page, 8) == (1, 4_096)
    at = 16
    for digest in (header.tenant_digest, header.fingerprint_digest, header.cache_group_digest):
        assert page[at : at + 32] == digest
        at += 32
    assert struct.unpack_from("<Q32s32s", page, at) == (header.space_id, header.key, header.parent)
    at += 72
    assert struct.unpack_from("<QQ16s", page, at) == header[6:9]
    at += 32
    tail = (header.first_token, header.token_count, header.depth, header.part_count)
    assert struct.unpack_from("<QIII", page, at) == tail
    at += 20
    assert page[at:-8] == bytes(4_096 - at - 8)
    assert page[-8:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(page[:-8]))


# ---------------------------------------------------------------- round trips


@given(headers)
def test_headers_come_back(header: RecordHeader) -> None:
    page = np.full(4_096, 0xEE, np.uint8)
    fmt.encode_into(header, page)
    assert fmt.decode(page) == fmt.decode(fmt.encode(header)) == header


@given(rows, u64, digests)
def test_rows_come_back(row: Row, space_id: int, key: bytes) -> None:
    packed = fmt.pack_row(row)
    assert len(packed) == fmt.ROW_BYTES == fmt.ROW_DTYPE.itemsize
    assert fmt.unpack_row(packed) == fmt.unpack_row(memoryview(packed)) == row


@given(st.integers(0, 2**62))
def test_a_record_is_a_header_and_whole_pages(length: int) -> None:
    total = fmt.record_bytes(length)
    assert total % 4_096 == 0
    assert 4_096 + length <= total < 4_096 + length + 4_096


def test_a_right_record_is_right() -> None:
    assert check(fmt.encode(HEADER)) is None
    assert check(fmt.encode(HEADER) + b"rest", PAYLOAD + b"the slot's rest") is None


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_of_a_header_is_found(mask: int) -> None:
    page = bytearray(fmt.encode(HEADER))
    for at in range(len(page)):
        page[at] ^= mask
        fault = fmt.decode(page)
        page[at] ^= mask
        expected = Finding.FOREIGN if at < len(fmt.MAGIC) else Finding.HEADER_DAMAGED
        assert isinstance(fault, Fault), at
        assert fault.finding is expected, at


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_of_a_payload_is_found(mask: int) -> None:
    payload = bytearray(PAYLOAD)
    for at in range(len(payload)):
        payload[at] ^= mask
        damage = fmt.check_payload(HEADER, payload)
        payload[at] ^= mask
        assert damage is not None
        assert damage.finding is Finding.PAYLOAD_DAMAGED, at
    assert fmt.check_payload(HEADER, payload) is None


def test_every_shorter_header_and_payload_is_truncated() -> None:
    page = fmt.encode(HEADER)
    for length in range(len(page)):
        fault = fmt.decode(page[:length])
        assert isinstance(fault, Fault)
        assert fault.finding is Finding.TRUNCATED
    for length in range(len(PAYLOAD)):
        short = check(page, PAYLOAD[:length])
        assert short is not None
        assert short.finding is Finding.TRUNCATED


def test_every_header_torn_between_two_writes_is_found() -> None:
    older = fmt.encode(HEADER._replace(generation=8, key=b"o" * 32))
    newer = fmt.encode(HEADER)
    states = range(1 << 8)
    for state in states:
        sectors = [
            (newer if state >> at & 1 else older)[at * 512 : at * 512 + 512] for at in range(8)
        ]
        fault = check(b"".join(sectors))
        # Only first and last sector differ; the rest is zeros in both.
        whole = (state & 1, state >> 7 & 1)
        if whole == (1, 1):
            assert fault is None
        else:
            expected = Finding.OTHER_BLOCK if whole == (0, 0) else Finding.HEADER_DAMAGED
            assert fault is not None
            assert fault.finding is expected


@given(st.binary(min_size=1, max_size=64).filter(lambda data: data[:8] != fmt.MAGIC))
def test_any_bytes_are_foreign(pattern: bytes) -> None:
    data = (pattern * 4_096)[:4_096]
    fault = fmt.decode(data)
    assert isinstance(fault, Fault)
    assert fault.finding is (Finding.FOREIGN if any(data) else Finding.EMPTY)


def test_a_slot_that_was_never_written_is_empty() -> None:
    fault = fmt.decode(bytes(4_096))
    assert isinstance(fault, Fault)
    assert fault.finding is Finding.EMPTY


@given(st.integers(2, 2**32 - 1))
def test_a_header_of_a_later_version_is_named(version: int) -> None:
    page = bytearray(fmt.encode(HEADER))
    struct.pack_into("<I", page, 8, version)
    page[300:310] = b"new fields"
    fault = fmt.decode(reseal(bytes(page)))
    assert isinstance(fault, Fault)
    assert fault.finding is Finding.FUTURE_VERSION
    assert str(version) in fault.text


@pytest.mark.parametrize(
    ("offset", "data"), [(8, bytes(4)), (12, bytes(4)), (300, b"\x01"), (4_087, b"\x01")]
)
def test_a_sealed_header_that_no_build_writes_is_damaged(offset: int, data: bytes) -> None:
    page = bytearray(fmt.encode(HEADER))
    page[offset : offset + len(data)] = data
    fault = fmt.decode(reseal(bytes(page)))
    assert isinstance(fault, Fault)
    assert fault.finding is Finding.HEADER_DAMAGED


# ---------------------------------------------------------------- whose it is

OTHERS: dict[str, dict[str, Any]] = {
    "space": {"space_id": 4},
    "key": {"key": b"K" * 32},
    "generation": {"generation": 8},
    "length": {"length": 4_999},
    "fingerprint": {"fingerprint_digest": b"F" * 32},
    "tenant": {"tenant_digest": b"t" * 32},
    "parent": {"parent": b""},
    "depth": {"depth": 5},
    "checksum": {"checksum": b"c" * 16},
}


@pytest.mark.parametrize("field", sorted(OTHERS))
def test_a_record_of_another_block_is_named_by_the_field_that_differs(field: str) -> None:
    fault = check(fmt.encode(HEADER._replace(**OTHERS[field])))
    assert fault is not None
    assert (fault.finding, fault.field) == (Finding.OTHER_BLOCK, field)
    assert fault.text.startswith(f"other block ({field}): ")


def test_text_shows_no_whole_key() -> None:
    other = HEADER._replace(key=bytes(range(32)))
    fault = check(fmt.encode(other))
    assert fault is not None
    assert fault.text == "other block (key): 00010203, expected 6b6b6b6b"


@given(headers, headers)
def test_swapped_records_are_named(one: RecordHeader, other: RecordHeader) -> None:
    """The header of one block, read for another: never right, unless the two are the same."""
    row = Row(0, 0, one.generation, one.length, one.checksum, one.parent, one.depth)
    decoded = fmt.decode(fmt.encode(other))
    assert isinstance(decoded, RecordHeader)
    fault = fmt.compare(
        decoded,
        space_id=one.space_id,
        key=one.key,
        row=row,
        fingerprint_digest=one.fingerprint_digest,
        tenant_digest=one.tenant_digest,
    )
    same = one[:9] == other[:9]
    assert (fault is None) == same
    if fault is not None:
        assert fault.finding is Finding.OTHER_BLOCK


@dataclasses.dataclass(frozen=True)
class _Promise:
    generation: int = HEADER.generation
    length: int = HEADER.length
    checksum: bytes = HEADER.checksum


@pytest.mark.parametrize(
    ("promise", "field"),
    [
        (_Promise(), None),
        (_Promise(generation=1), "generation"),
        (_Promise(length=1), "length"),
        (_Promise(checksum=b"c" * 16), "checksum"),
    ],
)
def test_what_the_caller_does_not_know_is_not_compared(
    promise: _Promise, field: str | None
) -> None:
    fault = fmt.compare(HEADER, space_id=HEADER.space_id, key=HEADER.key, row=promise)
    assert (fault and fault.field) == field


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("field", ["tenant_digest", "fingerprint_digest", "cache_group_digest",
                                   "key", "checksum", "parent"])  # fmt: skip
def test_a_header_field_of_another_size_is_refused(field: str) -> None:
    for wrong in (b"x" * 31, b"x" * 33):
        changed: dict[str, Any] = {field: wrong}
        with pytest.raises(ValueError, match=field):
            fmt.encode(HEADER._replace(**changed))


def test_a_number_that_does_not_fit_is_refused() -> None:
    for field in ("space_id", "generation", "length", "depth", "part_count"):
        for wrong in (-1, 2**64):
            changed: dict[str, Any] = {field: wrong}
            with pytest.raises(struct.error):
                fmt.encode(HEADER._replace(**changed))


def test_a_parent_of_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match="zeros"):
        fmt.encode(HEADER._replace(parent=bytes(32)))
    with pytest.raises(ValueError, match="zeros"):
        fmt.pack_row(ROW._replace(parent=bytes(32)))


@pytest.mark.parametrize(
    ("packed", "finding"),
    [
        (b"", Finding.TRUNCATED),
        (fmt.pack_row(ROW)[:-1], Finding.TRUNCATED),
        (fmt.pack_row(ROW) + b"x", Finding.TRUNCATED),
        (b"\x02\x00" + fmt.pack_row(ROW)[2:], Finding.FUTURE_VERSION),
        (b"\x00\x00" + fmt.pack_row(ROW)[2:], Finding.HEADER_DAMAGED),
        (b"\x01\x00\x01" + fmt.pack_row(ROW)[3:], Finding.HEADER_DAMAGED),
    ],
)
def test_bytes_that_are_no_row_are_named(packed: bytes, finding: Finding) -> None:
    fault = fmt.unpack_row(packed)
    assert isinstance(fault, Fault)
    assert fault.finding is finding


@pytest.mark.parametrize(("slot_bytes", "slots"), [(4_096, 1), (8_193, 1), (8_192, 0), (0, 0)])
def test_a_segment_of_no_possible_size_is_damaged(slot_bytes: int, slots: int) -> None:
    packed = fmt.pack_segment(fmt.Segment(1, slot_bytes, slots, bytes(32)))
    fault = fmt.unpack_segment(1, packed)
    assert isinstance(fault, Fault)
    assert fault.finding is Finding.HEADER_DAMAGED
    assert isinstance(fmt.unpack_segment(1, packed[:-1]), Fault)


# ---------------------------------------------------------------- folder


@given(st.uuids())
def test_the_format_file_comes_back(folder_id: uuid.UUID) -> None:
    assert folder.read_format_text(folder.format_text(folder_id)) == folder_id


RIGHT = folder.format_text(uuid.UUID(int=1))


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (b"", Finding.EMPTY),
        (b"something else\n", Finding.FOREIGN),
        (b"kvstore-disk 0\n" + RIGHT.split(b"\n")[1], Finding.FOREIGN),
        (b"kvstore-disk 1", Finding.FOREIGN),
        (b"kvstore-disk 2\nanything\xff\n", Finding.FUTURE_VERSION),
        (b"kvstore-disk 12\n", Finding.FUTURE_VERSION),
        (b"kvstore-disk 1\n", Finding.HEADER_DAMAGED),
        (b"kvstore-disk 1\n\xff\n", Finding.HEADER_DAMAGED),
        (RIGHT[:-1], Finding.HEADER_DAMAGED),
        (RIGHT + b"\n", Finding.HEADER_DAMAGED),
    ],
)
def test_another_format_file_is_named(text: bytes, finding: Finding) -> None:
    fault = folder.read_format_text(text)
    assert isinstance(fault, Fault)
    assert fault.finding is finding


@given(u32)
def test_segment_names_come_back_and_sort(number: int) -> None:
    name = folder.segment_name(number)
    assert folder.segment_of(name) == number
    assert (name < folder.segment_name(2**32 - 1)) == (number < 2**32 - 1)


@pytest.mark.parametrize(
    "name", ["1.seg", "0000000A.seg", "00000001.seg.tmp", "00000001", "../00000001.seg", ""]
)
def test_other_names_are_no_segments(name: str) -> None:
    assert folder.segment_of(name) is None


@pytest.mark.parametrize("number", [-1, 2**32])
def test_an_id_that_is_no_u32_has_no_name(number: int) -> None:
    with pytest.raises(ValueError, match="u32"):
        folder.segment_name(number)
