"""Self-describing block bytes: any range of them proves whose it is, which write it came from and
where it belongs.

Each 64-byte line holds a 32-byte tag of (tenant, fingerprint digest, key, version), its own index,
and that of the part. So damage, misplacement, staleness and mixtures are told apart by name, never
just as "not equal".
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstore.model.framing import frame

LINE_BYTES = 64
TAG_BYTES = 32

Bytes = NDArray[np.uint8]


class Finding(enum.Enum):
    """What a check found."""

    RIGHT = "right"
    OTHER_BLOCK = "a whole block, of another key or version"
    MISPLACED = "lines of the right block in the wrong place"
    MIXED = "lines of several blocks"
    DAMAGED = "lines that are no block's"


def tag_of(tenant: str, fingerprint: bytes, key: bytes, version: int) -> bytes:
    """32 bytes that name one write of one block."""
    fields = frame(tenant.encode(), fingerprint, key, version.to_bytes(8, "little"))
    return hashlib.sha256(fields).digest()


def payload(tag: bytes, length: int) -> Bytes:
    """The bytes of a block: uint8 [length]; `length` is a multiple of 64."""
    if length % LINE_BYTES:
        raise ValueError(f"{length} bytes are no whole number of {LINE_BYTES}-byte lines")
    lines = np.empty((length // LINE_BYTES, LINE_BYTES), np.uint8)
    lines[:, :TAG_BYTES] = np.frombuffer(tag, np.uint8)
    index = np.arange(len(lines), dtype="<u8")
    lines[:, 32:40] = index.view(np.uint8).reshape(-1, 8)
    lines[:, 40:48] = (index * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8).reshape(-1, 8)
    lines[:, 48:] = np.frombuffer(tag[:16], np.uint8)
    return lines.reshape(-1)


def check(data: Bytes, tags: Iterable[bytes], known: Iterable[bytes] = ()) -> Finding:
    """What `data` is, when any of `tags` is right. `known` are tags of other blocks that it may be
    instead."""
    tags = list(tags)
    data = np.ascontiguousarray(data)
    for tag in tags:
        if np.array_equal(data, payload(tag, len(data))):
            return Finding.RIGHT
    lines = data.reshape(-1, LINE_BYTES)
    seen = {bytes(row) for row in np.unique(lines[:, :TAG_BYTES], axis=0)}
    if len(seen) > 1:
        return Finding.MIXED if seen <= {*tags, *known} else Finding.DAMAGED
    (tag,) = seen
    whole = np.array_equal(data, payload(tag, len(data)))
    if tag in set(tags):
        rows = {bytes(row) for row in payload(tag, len(data)).reshape(-1, LINE_BYTES)}
        return Finding.MISPLACED if {bytes(row) for row in lines} <= rows else Finding.DAMAGED
    return Finding.OTHER_BLOCK if whole else Finding.DAMAGED
