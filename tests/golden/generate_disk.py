"""Computes the golden vectors of the disk tier's format 1: `python tests/golden/generate_disk.py
[--write]`.

Without --write it prints them as JSON. The file changes only together with a new format number:
folders of the old one are then set aside.
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvstore.tiers.disk.folder import format_text, segment_name  # noqa: E402
from kvstore.tiers.disk.format import (  # noqa: E402
    RecordHeader,
    Row,
    Segment,
    encode,
    pack_row,
    pack_segment,
    payload_checksum,
    record_bytes,
    tenant_digest,
)

FILE = Path(__file__).parent / "disk_format.json"
FOLDER_ID = uuid.UUID(int=0x0123456789ABCDEF0123456789ABCDEF)


def digest(start: int) -> bytes:
    """32 bytes that say where a field begins and ends."""
    return bytes((start + at) % 256 for at in range(32))


HEADERS = {
    "first block": RecordHeader(
        tenant_digest=tenant_digest("default"),
        fingerprint_digest=digest(1),
        space_id=1,
        key=digest(40),
        parent=b"",
        depth=0,
        generation=1,
        length=5,
        checksum=payload_checksum(b"block"),
    ),
    "later block": RecordHeader(
        tenant_digest=tenant_digest("mod\u00e8le"),
        fingerprint_digest=digest(2),
        space_id=0x0102030405060708,
        key=digest(80),
        parent=digest(40),
        depth=0x11121314,
        generation=0x2122232425262728,
        length=1 << 20,
        checksum=payload_checksum(bytes(1 << 20)),
        first_token=0x3132333435363738,
        token_count=16,
        cache_group_digest=digest(120),
        part_count=8,
    ),
    "largest": RecordHeader(
        tenant_digest=b"\xff" * 32,
        fingerprint_digest=b"\xff" * 32,
        space_id=2**64 - 1,
        key=b"\xff" * 32,
        parent=b"\xff" * 32,
        depth=2**32 - 1,
        generation=2**64 - 1,
        length=2**64 - 1,
        checksum=b"\xff" * 16,
        first_token=2**64 - 1,
        token_count=2**32 - 1,
        cache_group_digest=b"\xff" * 32,
        part_count=2**32 - 1,
    ),
}

ROWS = {
    "first block": Row(0, 0, 1, 5, payload_checksum(b"block"), b"", 0),
    "later block": Row(
        0x01020304, 0x05060708, 0x2122232425262728, 1 << 20, digest(7)[:16], digest(40), 0x11121314
    ),
    "largest": Row(
        2**32 - 1, 2**32 - 1, 2**64 - 1, 2**64 - 1, b"\xff" * 16, b"\xff" * 32, 2**32 - 1
    ),
}

SEGMENTS = {
    "small": Segment(0, 8_192, 1, tenant_digest("default")),
    "usual": Segment(0x01020304, record_bytes(1 << 20), 255, digest(3)),
}


def page(header: RecordHeader) -> dict[str, str]:
    """The header page: its fields, and its last eight bytes. What is between is zero."""
    encoded = encode(header)
    fields, rest = encoded[:512], encoded[512:]
    assert rest[:-8] == bytes(len(rest) - 8)
    return {"fields": fields.hex(), "checksum": rest[-8:].hex()}


def vectors() -> dict[str, Any]:
    """All of the format, as hex."""
    return {
        "format_file": format_text(FOLDER_ID).decode("ascii"),
        "headers": {name: page(header) for name, header in HEADERS.items()},
        "payload_checksums": {
            str(length): payload_checksum(bytes(at % 251 for at in range(length))).hex()
            for length in (0, 1, 4_095, 4_096, 100_000)
        },
        "record_bytes": {
            str(length): record_bytes(length) for length in (1, 4_096, 4_097, 1 << 20)
        },
        "rows": {name: pack_row(row).hex() for name, row in ROWS.items()},
        "segment_names": {str(number): segment_name(number) for number in (0, 255, 2**32 - 1)},
        "segments": {name: pack_segment(segment).hex() for name, segment in SEGMENTS.items()},
        "tenants": {
            name: tenant_digest(name).hex() for name in ("default", "mod\u00e8le", "a" * 256)
        },
    }


def main() -> None:
    """Prints the vectors as one JSON object, or writes them."""
    made = vectors()
    if sys.argv[1:] == ["--write"]:
        text = json.dumps(made, indent=1, sort_keys=True, ensure_ascii=True)
        FILE.write_text(text + "\n", encoding="ascii")
    else:
        print(json.dumps(made, sort_keys=True))


if __name__ == "__main__":
    main()
