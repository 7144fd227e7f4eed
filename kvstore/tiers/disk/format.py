"""Format 1 of the disk tier: what is in a record's header and in an index row.

A record proves whose it is. Its header is one page: a little-endian struct, zeros, and the xxh3-64
of all before. Whatever is wrong with it is named by a `Finding`: no combination of flipped bytes,
short reads or swapped records gives back a header that belongs to another block. Every field of a
row is in the header, too, so a wrong row is found out by the record that it leads to.

Where magic, version and header checksum are is the same in every future version, so that damage is
never taken for one. Pure. The disk tier, its index and its verifier import it.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.model.framing import frame
from kvstore.model.values import PAGE_BYTES

Readable: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.uint8]"
Packed: TypeAlias = "bytes | memoryview"

VERSION = 1
MAGIC = b"KVSTORE\xb1"
HEADER_BYTES = PAGE_BYTES
KEY_BYTES = 32
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16

_NO_KEY = bytes(KEY_BYTES)
NO_DIGEST = bytes(DIGEST_BYTES)

# magic, version, header bytes | tenant, fingerprint, cache group | space, key, parent
# | generation, length, payload checksum | first token, token count, depth, part count
_HEADER = struct.Struct("<8sII 32s32s32s Q32s32s QQ16s QIII")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = HEADER_BYTES - _CHECKSUM.size
_PADDING = bytes(_CHECKSUM_AT - _HEADER.size)
_EMPTY = bytes(HEADER_BYTES)


class Finding(enum.Enum):
    """What is wrong with a record."""

    TRUNCATED = "truncated"
    EMPTY = "empty"
    FOREIGN = "foreign"
    FUTURE_VERSION = "future version"
    HEADER_DAMAGED = "header damaged"
    OTHER_BLOCK = "other block"
    PAYLOAD_DAMAGED = "payload damaged"


class Fault(NamedTuple):
    """Why bytes are not a record, or not the one that was asked for.

    field: for OTHER_BLOCK the first one that differs: space, key, generation, length, fingerprint,
    tenant, parent, depth or checksum. detail: for a person; shows 8 hex digits of a key at most.
    """

    finding: Finding
    field: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        """One line: "other block (generation): 7, expected 9"."""
        field = f" ({self.field})" if self.field else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.finding.value}{field}{detail}"


class RecordHeader(NamedTuple):
    """What a record says of itself.

    key: 32 bytes. parent: 32 bytes, or empty for the first block of a prompt. depth: index of the
    block in its prompt. generation: of the write, never used twice in a folder. length: payload
    bytes. checksum: xxh3-128 of the payload. The rest is for a person: token_count 0 is unknown.
    """

    tenant_digest: bytes
    fingerprint_digest: bytes
    space_id: int
    key: bytes
    parent: bytes
    depth: int
    generation: int
    length: int
    checksum: bytes
    first_token: int = 0
    token_count: int = 0
    cache_group_digest: bytes = NO_DIGEST
    part_count: int = 1


class Row(NamedTuple):
    """What the index knows of a block. parent: 32 bytes or empty; checksum: as in the header."""

    segment: int
    slot: int
    generation: int
    length: int
    checksum: bytes
    parent: bytes
    depth: int


class Promise(Protocol):
    """What has to be known of a block to tell its record from any other: a Row, or less."""

    @property
    def generation(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def checksum(self) -> bytes: ...


class Segment(NamedTuple):
    """What the index knows of a segment file. slot_bytes: of a whole record, header included."""

    segment: int
    slot_bytes: int
    slots: int
    tenant_digest: bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of its file."""
        return self.slots * self.slot_bytes


# ---------------------------------------------------------------- sizes and digests


def align(length: int) -> int:
    """`length` bytes in whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def record_bytes(block_bytes: int) -> int:
    """Bytes of the slot for a block's payload: header page and whole pages of payload."""
    return HEADER_BYTES + align(block_bytes)


def tenant_digest(tenant: str) -> bytes:
    """32 bytes that stand for a tenant in headers and segments."""
    return hashlib.sha256(frame(b"kvstore/disk-tenant/1", tenant.encode())).digest()


def payload_checksum(payload: Readable) -> bytes:
    """xxh3-128, 16 bytes: the checksum of headers, rows and the mover."""
    return xxhash.xxh3_128_digest(_view(payload))


# ---------------------------------------------------------------- record


def encode(header: RecordHeader) -> bytes:
    """The header page, 4096 bytes. struct.error or ValueError if a field does not fit."""
    for name, value, size in (
        ("tenant_digest", header.tenant_digest, DIGEST_BYTES),
        ("fingerprint_digest", header.fingerprint_digest, DIGEST_BYTES),
        ("cache_group_digest", header.cache_group_digest, DIGEST_BYTES),
        ("key", header.key, KEY_BYTES),
        ("checksum", header.checksum, CHECKSUM_BYTES),
    ):
        _check_size(name, value, size)
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        header.tenant_digest,
        header.fingerprint_digest,
        header.cache_group_digest,
        header.space_id,
        header.key,
        _pack_parent(header.parent),
        header.generation,
        header.length,
        header.checksum,
        header.first_token,
        header.token_count,
        header.depth,
        header.part_count,
    )
    checked = fields + _PADDING
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def encode_into(header: RecordHeader, page: NDArray[np.uint8]) -> None:
    """Writes the header page into uint8 [4096]."""
    page[:] = np.frombuffer(encode(header), np.uint8)


def decode(page: Readable) -> RecordHeader | Fault:
    """The header in the first 4096 bytes of `page`, or what is wrong with it."""
    view = _view(page)
    if len(view) < HEADER_BYTES:
        return Fault(Finding.TRUNCATED, detail=f"{len(view)} of {HEADER_BYTES} header bytes")
    view = view[:HEADER_BYTES]
    if view[: len(MAGIC)] != MAGIC:
        empty = bytes(view) == _EMPTY
        return Fault(Finding.EMPTY if empty else Finding.FOREIGN, detail="no record begins here")
    (checksum,) = _CHECKSUM.unpack_from(view, _CHECKSUM_AT)
    if xxhash.xxh3_64_intdigest(view[:_CHECKSUM_AT]) != checksum:
        return Fault(Finding.HEADER_DAMAGED, detail="its checksum differs")
    fields = _HEADER.unpack_from(view)
    _, version, header_bytes, tenant, fingerprint, group, space_id, key, parent = fields[:9]
    generation, length, payload, first_token, token_count, depth, part_count = fields[9:]
    if version > VERSION:
        detail = f"version {version}, this build reads {VERSION}"
        return Fault(Finding.FUTURE_VERSION, detail=detail)
    if version < VERSION or header_bytes != HEADER_BYTES:
        return Fault(Finding.HEADER_DAMAGED, detail=f"version {version}, {header_bytes} bytes")
    if bytes(view[_HEADER.size : _CHECKSUM_AT]) != _PADDING:
        return Fault(Finding.HEADER_DAMAGED, detail="padding is not zero")
    return RecordHeader(
        tenant_digest=tenant,
        fingerprint_digest=fingerprint,
        space_id=space_id,
        key=key,
        parent=_unpack_parent(parent),
        depth=depth,
        generation=generation,
        length=length,
        checksum=payload,
        first_token=first_token,
        token_count=token_count,
        cache_group_digest=group,
        part_count=part_count,
    )


def compare(
    header: RecordHeader,
    *,
    space_id: int,
    key: bytes,
    row: Promise,
    fingerprint_digest: bytes | None = None,
    tenant_digest: bytes | None = None,
) -> Fault | None:
    """Why `header` is not that of the block which `row` promises; None if it is.

    None for a digest: not known to the caller, not compared; likewise parent and depth of a promise
    that is no Row.
    """
    if header.space_id != space_id:
        return _other("space", header.space_id, space_id)
    if header.key != key:
        return _other("key", header.key[:4].hex(), key[:4].hex())
    if header.generation != row.generation:
        return _other("generation", header.generation, row.generation)
    if header.length != row.length:
        return _other("length", header.length, row.length)
    if fingerprint_digest is not None and header.fingerprint_digest != fingerprint_digest:
        found = header.fingerprint_digest[:4].hex()
        return _other("fingerprint", found, fingerprint_digest[:4].hex())
    if tenant_digest is not None and header.tenant_digest != tenant_digest:
        return _other("tenant", header.tenant_digest[:4].hex(), tenant_digest[:4].hex())
    if isinstance(row, Row):
        if header.parent != row.parent:
            found = header.parent[:4].hex() or "none"
            return _other("parent", found, row.parent[:4].hex() or "none")
        if header.depth != row.depth:
            return _other("depth", header.depth, row.depth)
    if header.checksum != row.checksum:
        return _other("checksum", header.checksum[:4].hex(), row.checksum[:4].hex())
    return None


def check_payload(header: RecordHeader, payload: Readable) -> Fault | None:
    """Whether the first `header.length` bytes of `payload` are those that the header promises."""
    view = _view(payload)
    if len(view) < header.length:
        return Fault(Finding.TRUNCATED, detail=f"{len(view)} of {header.length} payload bytes")
    if payload_checksum(view[: header.length]) != header.checksum:
        return Fault(Finding.PAYLOAD_DAMAGED, detail="its checksum differs")
    return None


def check_record(
    page: Readable,
    payload: Readable,
    *,
    space_id: int,
    key: bytes,
    row: Promise,
    fingerprint_digest: bytes | None = None,
    tenant_digest: bytes | None = None,
) -> Fault | None:
    """Everything about one record that was read: header, whose it is, payload. None: it is right.

    page: at least 4096 bytes; payload: at least `row.length`. As for `compare` otherwise.
    """
    header = decode(page)
    if isinstance(header, Fault):
        return header
    fault = compare(
        header,
        space_id=space_id,
        key=key,
        row=row,
        fingerprint_digest=fingerprint_digest,
        tenant_digest=tenant_digest,
    )
    return fault or check_payload(header, payload)


# ---------------------------------------------------------------- index rows

_ROW = struct.Struct("<HHIIIQQ16s32s")
ROW_BYTES = _ROW.size
ROW_DTYPE = np.dtype(
    [
        ("format", "<u2"),
        ("zero", "<u2"),
        ("depth", "<u4"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("generation", "<u8"),
        ("length", "<u8"),
        ("checksum", "V16"),
        ("parent", "V32"),
    ]
)
"""A packed row, to read many at once: np.frombuffer(b"".join(values), ROW_DTYPE)."""

_ROW_KEY = struct.Struct(">Q32s")
ROW_KEY_BYTES = _ROW_KEY.size

_SEGMENT = struct.Struct("<HHIQ32s")
_SEGMENT_KEY = struct.Struct(">I")


def pack_row(row: Row) -> bytes:
    """ROW_BYTES bytes. struct.error or ValueError if a field does not fit."""
    _check_size("checksum", row.checksum, CHECKSUM_BYTES)
    parent = _pack_parent(row.parent)
    return _ROW.pack(
        VERSION, 0, row.depth, row.segment, row.slot, row.generation, row.length,
        row.checksum, parent,
    )  # fmt: skip


def unpack_row(packed: Packed) -> Row | Fault:
    """The row, or why the bytes are none."""
    fault = _check_packed(packed, ROW_BYTES)
    if fault is not None:
        return fault
    _, _, depth, segment, slot, generation, length, checksum, parent = _ROW.unpack(packed)
    return Row(segment, slot, generation, length, checksum, _unpack_parent(parent), depth)


def pack_row_key(space_id: int, key: bytes) -> bytes:
    """The row's name: a space's rows are neighbours, in order of their keys."""
    _check_size("key", key, KEY_BYTES)
    return _ROW_KEY.pack(space_id, key)


def pack_segment(segment: Segment) -> bytes:
    """Without its id, which is its name."""
    _check_size("tenant_digest", segment.tenant_digest, DIGEST_BYTES)
    return _SEGMENT.pack(VERSION, 0, segment.slots, segment.slot_bytes, segment.tenant_digest)


def unpack_segment(segment_id: int, packed: Packed) -> Segment | Fault:
    """The segment, or why the bytes are none. Its size is one that a segment can have."""
    fault = _check_packed(packed, _SEGMENT.size)
    if fault is not None:
        return fault
    _, _, slots, slot_bytes, tenant = _SEGMENT.unpack(packed)
    if slots < 1 or slot_bytes <= HEADER_BYTES or slot_bytes % PAGE_BYTES:
        return Fault(Finding.HEADER_DAMAGED, detail=f"{slots} slots of {slot_bytes} bytes")
    return Segment(segment_id, slot_bytes, slots, tenant)


def pack_segment_key(segment_id: int) -> bytes:
    """The segment's name: 4 bytes, in order of ids."""
    return _SEGMENT_KEY.pack(segment_id)


def unpack_segment_key(packed: Packed) -> int | Fault:
    """The segment's id, or why the bytes are none."""
    if len(packed) != _SEGMENT_KEY.size:
        return Fault(Finding.TRUNCATED, detail=f"{len(packed)} of {_SEGMENT_KEY.size} bytes")
    (segment_id,) = _SEGMENT_KEY.unpack(packed)
    return int(segment_id)


# ---------------------------------------------------------------- parts


def _other(field: str, found: object, expected: object) -> Fault:
    return Fault(Finding.OTHER_BLOCK, field, f"{found}, expected {expected}")


def _check_size(name: str, value: bytes, size: int) -> None:
    # struct would cut or pad silently.
    if len(value) != size:
        raise ValueError(f"{name} has {len(value)} bytes, not {size}")


def _check_packed(packed: Packed, size: int) -> Fault | None:
    if len(packed) != size:
        return Fault(Finding.TRUNCATED, detail=f"{len(packed)} of {size} bytes")
    version, zero = struct.unpack_from("<HH", packed)
    if version > VERSION:
        detail = f"version {version}, this build reads {VERSION}"
        return Fault(Finding.FUTURE_VERSION, detail=detail)
    if version != VERSION or zero != 0:
        return Fault(Finding.HEADER_DAMAGED, detail=f"version {version}, {zero} where zero is")
    return None


def _view(data: Readable) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


def _pack_parent(parent: bytes) -> bytes:
    if not parent:
        return _NO_KEY
    _check_size("parent", parent, KEY_BYTES)
    if parent == _NO_KEY:
        raise ValueError("a parent of zeros stands for none; pass an empty one")
    return parent


def _unpack_parent(packed: bytes) -> bytes:
    return b"" if packed == _NO_KEY else packed
