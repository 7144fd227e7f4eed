"""Extras: what changes the KV of a block besides its token ids, in one canonical encoding.

Placeholder tokens are the same for every image, and an adapter leaves the token ids alone; so
whatever else the KV depends on has to be named by a digest of its *content*. It promises that two
requests with different extras in a block never share its key, that absent and empty extras are the
same, and that malformed extras are refused, never taken for absent. The client and the engine
adapters make these values; `keys.chain` reads them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import pack
from typing import cast

from kvstore.model.framing import frame
from kvstore.model.reasons import BadRequest, Reason

DIGEST_BYTES_MIN = 16
DIGEST_BYTES_MAX = 256
TOKEN_POSITION_MAX = 2**31 - 1
LABEL_BYTES_MAX = 256


def check_digest(value: object, what: str) -> bytes:
    """`value` if it is a digest of 16 to 256 bytes; shorter ones collide too easily."""
    if type(value) is not bytes:
        raise BadRequest(
            Reason.BAD_EXTRAS, f"{what} must be bytes, not {type(value).__name__}", what
        )
    if not DIGEST_BYTES_MIN <= len(value) <= DIGEST_BYTES_MAX:
        raise BadRequest(
            Reason.BAD_EXTRAS,
            f"{what} has {len(value)} bytes, not {DIGEST_BYTES_MIN} to {DIGEST_BYTES_MAX}",
            what,
        )
    return value


def _check_position(value: object, what: str, low: int) -> None:
    if type(value) is not int or not low <= value <= TOKEN_POSITION_MAX:
        raise BadRequest(
            Reason.BAD_EXTRAS, f"{what} must be an int from {low} to {TOKEN_POSITION_MAX}", what
        )


@dataclass(frozen=True)
class ContentItem:
    """Content behind the `token_count` token ids from `first_token` on: an image, embeddings.

    digest: 16 to 256 bytes over everything that decides the content (`array_digest` makes one).
    """

    digest: bytes
    first_token: int
    token_count: int

    def __post_init__(self) -> None:
        check_digest(self.digest, "digest")
        _check_position(self.first_token, "first_token", 0)
        _check_position(self.token_count, "token_count", 1)

    @property
    def end_token(self) -> int:
        """First token after the item."""
        return self.first_token + self.token_count


@dataclass(frozen=True)
class Extras:
    """The extras of one request.

    adapter_digest: digest of the adapter's content (never its name or path); None: no adapter.
    items: content behind placeholder tokens, in any order; they may overlap.
    content_in_tokens: False says that the token ids alone do not decide the content (prompt
        embeddings). Items then have to cover all tokens of the full blocks, else the request is
        uncacheable.
    """

    adapter_digest: bytes | None = None
    items: tuple[ContentItem, ...] = ()
    content_in_tokens: bool = True

    def __post_init__(self) -> None:
        if self.adapter_digest is not None:
            check_digest(self.adapter_digest, "adapter_digest")
        if type(self.items) is not tuple or any(type(i) is not ContentItem for i in self.items):
            raise BadRequest(Reason.BAD_EXTRAS, "items must be a tuple of ContentItem", "items")
        if type(self.content_in_tokens) is not bool:
            raise BadRequest(
                Reason.BAD_EXTRAS, "content_in_tokens must be a bool", "content_in_tokens"
            )

    def encode(self, block_count: int, block_tokens: int) -> Iterator[bytes]:
        """The canonical bytes of each of the first `block_count` blocks; empty for tokens alone.

        Fields, framed: "adapter", its digest; then for each item that overlaps the block, sorted:
        "item", its digest, its start relative to the block (i64, may be negative), its length in
        tokens (u32). BadRequest(UNCACHEABLE) if content has no digest.
        """
        if not self.content_in_tokens:
            self._check_covered(block_count * block_tokens)
        common = () if self.adapter_digest is None else (b"adapter", self.adapter_digest)
        plain = frame(*common)
        of_block = self._items_of_blocks(block_count, block_tokens)
        for index in range(block_count):
            items = of_block.get(index)
            if items is None:
                yield plain
                continue
            first = index * block_tokens
            fields = list(common)
            for item in items:
                start = pack("<q", item.first_token - first)
                fields += (b"item", item.digest, start, pack("<I", item.token_count))
            yield frame(*fields)

    def _items_of_blocks(self, block_count: int, block_tokens: int) -> dict[int, list[ContentItem]]:
        of_block: dict[int, list[ContentItem]] = {}
        for item in _sorted(self.items):
            last = min((item.end_token - 1) // block_tokens, block_count - 1)
            for index in range(item.first_token // block_tokens, last + 1):
                of_block.setdefault(index, []).append(item)
        return of_block

    def _check_covered(self, tokens: int) -> None:
        covered = 0
        for item in _sorted(self.items):
            if item.first_token > covered:
                break
            covered = max(covered, item.end_token)
        if covered < tokens:
            raise BadRequest(
                Reason.UNCACHEABLE,
                f"content is not in the token ids and no item covers token {covered}",
                "items",
            )


def _sorted(items: Iterable[ContentItem]) -> list[ContentItem]:
    return sorted(items, key=lambda item: (item.first_token, item.token_count, item.digest))


NO_EXTRAS = Extras()

_KINDS = {"?": "bool", "e": "float16", "f": "float32", "d": "float64"}
_SIGNED = frozenset("bhilqn")
_UNSIGNED = frozenset("BHILQN")


def array_digest(array: object, label: str = "") -> bytes:
    """SHA-256 over shape, element type and content (C order) of an array, and `label`.

    array: anything with the buffer protocol (numpy, `array`, memoryview, bytes) of bool, integer or
        float elements in this machine's byte order; any strides. A view and its copy have one
        digest; (30, 100) and (100, 30) have two.
    label: what the bytes do not say and the content depends on, such as an image mode or the name
        of an element type that the buffer protocol lacks (view bfloat16 as uint16, label
        "bfloat16").
    BadRequest: no such buffer (arrays of objects have none), another byte order, label over 256
    bytes.
    """
    try:
        view = memoryview(cast("bytes", array))
    except (TypeError, ValueError, BufferError) as error:
        raise BadRequest(Reason.BAD_EXTRAS, f"not an array with a buffer: {error}") from error
    if type(label) is not str or len(label.encode("utf-8", "replace")) > LABEL_BYTES_MAX:
        raise BadRequest(
            Reason.BAD_EXTRAS, f"label must be a str of at most {LABEL_BYTES_MAX} bytes", "label"
        )
    shape = b"".join(pack("<Q", size) for size in view.shape or ())
    header = frame(
        b"kvstore/array/1",
        label.encode("utf-8", "surrogatepass"),
        _element_type(view).encode(),
        shape,
    )
    digest = hashlib.sha256(header)
    # Casting avoids a copy of what may be a large image; it needs C order and no zero in the shape.
    digest.update(view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes())
    return digest.digest()


def _element_type(view: memoryview) -> str:
    """A name that is the same for C types of equal meaning: `l` and `q` are both int64 here."""
    code = view.format.removeprefix("@")
    if code.startswith(("=", "<" if sys.byteorder == "little" else ">")):
        code = code[1:]
    if code in _KINDS:
        name = _KINDS[code]
    elif code in _SIGNED:
        name = f"int{8 * view.itemsize}"
    elif code in _UNSIGNED:
        name = f"uint{8 * view.itemsize}"
    else:
        raise BadRequest(
            Reason.BAD_EXTRAS,
            f"arrays of format {view.format!r} have no portable content; convert to a native type",
        )
    return f"{name}/{sys.byteorder}"
