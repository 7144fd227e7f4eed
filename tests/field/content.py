"""Block bytes of the field cases, by key: they say tenant, fingerprint, key and version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.testing.payload import Finding, check, payload, tag_of

Bytes = NDArray[np.uint8]


def tags_of(
    fingerprint: Fingerprint,
    keys: Sequence[bytes],
    *,
    tenant: str = "default",
    version: int = 0,
) -> list[bytes]:
    return [tag_of(tenant, fingerprint.digest, key, version) for key in keys]


def rows_of(fingerprint: Fingerprint, keys: Sequence[bytes], **more: Any) -> Bytes:
    """What a model's blocks hold: uint8 [n, block_bytes]."""
    length = layout_of(fingerprint).block_bytes
    tags = tags_of(fingerprint, keys, **more)
    return np.stack([payload(tag, length) for tag in tags]) if tags else np.empty((0, length), "u1")


def assert_right(
    rows: Any, fingerprint: Fingerprint, keys: Sequence[bytes], blocks: int, **more: Any
) -> None:
    """The first `blocks` rows are what was written for these keys."""
    for index, tag in enumerate(tags_of(fingerprint, keys[:blocks], **more)):
        finding = check(np.asarray(rows[index]).reshape(-1), [tag])
        assert finding is Finding.RIGHT, (index, finding)


def push(space: Any, fingerprint: Fingerprint, keys: Sequence[bytes], **more: Any) -> int:
    """Stores a prompt; how many blocks of it are readable now that were not."""
    return int(space.push(list(keys), rows_of(fingerprint, keys), **more).stored)


def hit(space: Any, fingerprint: Fingerprint, keys: Sequence[bytes], **more: Any) -> int:
    """How many blocks a lookup finds; a fetch gives as many, and they are right."""
    found = space.lookup(list(keys))
    fetched = space.fetch(list(keys))
    assert fetched.blocks == found.blocks, (fetched, found)
    assert_right(fetched.data, fingerprint, keys, fetched.blocks, **more)
    return int(found.blocks)
