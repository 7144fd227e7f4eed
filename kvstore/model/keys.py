"""Block keys: 32 bytes that name a token prefix, the same in every process, Python version and
machine.

    root   = SHA-256(frame("kvstore/key/1", salt, cache group))
    key[i] = SHA-256(frame(key[i-1], tokens of block i as little-endian u32, extras of block i))

A key stands for the whole prefix that its block ends. Only full blocks have keys. Keys hold no
fingerprint and no
tenant: those are the space's. The client and the engine adapters compute keys; the daemon only
    compares them.
Standard library only, so that any interpreter can check the golden vectors.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import repeat
from struct import Struct, pack
from typing import Any, NewType, Protocol, cast

from kvstore.model.extras import (
    NO_EXTRAS,
    ContentItem,
    Extras,
    array_digest,
    check_digest,
)
from kvstore.model.framing import frame
from kvstore.model.reasons import BadRequest, Reason

__all__ = [
    "BLOCK_TOKENS_MAX",
    "KEY_BYTES",
    "BlockKey",
    "ContentItem",
    "Extras",
    "Tokens",
    "array_digest",
    "chain",
    "chain_digests",
    "frame",
    "pack_keys",
    "root_key",
    "short",
    "unpack_keys",
]

BlockKey = NewType("BlockKey", bytes)

KEY_BYTES = 32
BLOCK_TOKENS_MAX = 65_536
SALT_BYTES_MAX = 4_096
CACHE_GROUP_BYTES_MAX = 256

_RUN = Struct("32s" * 256)
"""Keys that are unpacked at once: seven times as fast as slices, in a format of one size."""

_TOKEN_DOMAIN = b"kvstore/key/1"
_DIGEST_DOMAIN = b"kvstore/key-of-digests/1"


class Tokens(Protocol):
    """A sequence of ints, or a one-dimensional buffer of integers (numpy, `array`): see `chain`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def root_key(salt: bytes, cache_group: str) -> BlockKey:
    """The parent of a prompt's first block.

    salt: the request's cache salt, at most 4,096 bytes. cache_group: at most 256 bytes of UTF-8.
    """
    return _root(_TOKEN_DOMAIN, salt, cache_group)


def chain(
    tokens: Tokens,
    block_tokens: int,
    *,
    salt: bytes = b"",
    cache_group: str = "",
    extras: Extras | None = None,
) -> list[BlockKey]:
    """The keys of a prompt's full blocks, first to last: `len(tokens) // block_tokens` of them.

    tokens: ids from 0 to 2^32-1, as a sequence of ints or a one-dimensional buffer of integers of
        16, 32 or 64 bits (a uint32 array in C order is taken as it is). Bytes are refused: they may
        be ids or packed ids.
    BadRequest: BAD_TOKENS, BAD_EXTRAS, UNCACHEABLE, BAD_SIZE (block_tokens not in 1..65,536),
    BAD_NAME.
    """
    if type(block_tokens) is not int or not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise BadRequest(
            Reason.BAD_SIZE,
            f"block_tokens must be an int from 1 to {BLOCK_TOKENS_MAX}",
            "block_tokens",
        )
    if extras is not None and type(extras) is not Extras:
        raise BadRequest(
            Reason.BAD_EXTRAS, f"extras must be Extras, not {type(extras).__name__}", "extras"
        )
    packed = _pack_tokens(tokens)
    step = 4 * block_tokens
    count = len(packed) // step
    root = _root(_TOKEN_DOMAIN, salt, cache_group)
    if extras is None or extras == NO_EXTRAS:
        tails: Iterable[bytes] = repeat(frame(b""))
    else:
        tails = map(frame, extras.encode(count, block_tokens))
    # frame(key, block, extra) with its constant prefixes made once: a third of the time.
    head = pack("<I", KEY_BYTES)
    middle = pack("<I", step)
    sha256 = hashlib.sha256
    key: bytes = root
    keys: list[bytes] = []
    for start, tail in zip(range(0, count * step, step), tails, strict=False):
        key = sha256(head + key + middle + packed[start : start + step] + tail).digest()
        keys.append(key)
    return cast("list[BlockKey]", keys)


def chain_digests(
    engine_digests: Iterable[bytes],
    *,
    salt: bytes = b"",
    cache_group: str = "",
    adapter_digest: bytes | None = None,
) -> list[BlockKey]:
    """Keys from an engine's own digests of its full blocks, one each; they never meet token keys.

    engine_digests: 16 to 256 bytes each, of an algorithm without a seed of the process (SHA-256
        over a canonical encoding).
    adapter_digest: digest of the adapter's content, for engines that fold in only its name.
    """
    extra = NO_EXTRAS if adapter_digest is None else Extras(adapter_digest=adapter_digest)
    tail = next(extra.encode(1, 1))
    key: bytes = _root(_DIGEST_DOMAIN, salt, cache_group)
    keys: list[bytes] = []
    for digest in engine_digests:
        key = hashlib.sha256(frame(key, check_digest(digest, "engine digest"), tail)).digest()
        keys.append(key)
    return cast("list[BlockKey]", keys)


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """The keys one after the other, n x 32 bytes. BadRequest if one of them is no key."""
    try:
        if not set(map(len, keys)) <= {KEY_BYTES}:
            raise BadRequest(Reason.BAD_KEY_LENGTH, f"a key does not have {KEY_BYTES} bytes")
        return b"".join(keys)
    except TypeError as error:
        raise BadRequest(Reason.BAD_KEY_LENGTH, f"a key is not bytes: {error}") from error


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Inverse of `pack_keys`; BadRequest unless the length is a multiple of 32."""
    if type(packed) is not bytes:
        raise BadRequest(
            Reason.BAD_KEY_LENGTH, f"packed keys must be bytes, not {type(packed).__name__}"
        )
    if len(packed) % KEY_BYTES:
        raise BadRequest(
            Reason.BAD_KEY_LENGTH, f"{len(packed)} bytes are no multiple of {KEY_BYTES}"
        )
    whole = len(packed) - len(packed) % _RUN.size
    parts: list[bytes] = []
    for at in range(0, whole, _RUN.size):
        parts += _RUN.unpack_from(packed, at)
    parts += [packed[at : at + KEY_BYTES] for at in range(whole, len(packed), KEY_BYTES)]
    return cast("list[BlockKey]", parts)


def short(key: bytes) -> str:
    """The first 8 hex digits: all that a log may hold of a key."""
    return key[:4].hex()


def _root(domain: bytes, salt: bytes, cache_group: str) -> BlockKey:
    if type(salt) is not bytes or len(salt) > SALT_BYTES_MAX:
        raise BadRequest(
            Reason.BAD_REQUEST, f"salt must be bytes, at most {SALT_BYTES_MAX}", "salt"
        )
    try:
        group = cache_group.encode("utf-8")
    except (AttributeError, UnicodeEncodeError) as error:
        raise BadRequest(
            Reason.BAD_NAME, "cache_group must be a str of valid Unicode", "cache_group"
        ) from error
    if len(group) > CACHE_GROUP_BYTES_MAX:
        raise BadRequest(
            Reason.BAD_NAME,
            f"cache_group has more than {CACHE_GROUP_BYTES_MAX} bytes",
            "cache_group",
        )
    return BlockKey(hashlib.sha256(frame(domain, salt, group)).digest())


def _pack_tokens(tokens: object) -> bytes:
    """Token ids as u32, little endian; BadRequest(BAD_TOKENS) for anything that is not a sequence
    of ids.
    """
    ids: object = tokens
    try:
        view = memoryview(cast("bytes", tokens))
    except (TypeError, ValueError, BufferError):
        if isinstance(tokens, str | Set | Mapping) or not hasattr(tokens, "__getitem__"):
            raise _bad_tokens(f"{type(tokens).__name__} is no sequence of token ids") from None
    else:
        if view.ndim != 1 or view.itemsize == 1:
            raise _bad_tokens(
                f"a buffer of {view.ndim} dimensions and {view.itemsize}-byte elements; "
                "give one dimension of 16, 32 or 64-bit integers"
            )
        code = view.format.removeprefix("@")
        if code in ("I", "L") and view.itemsize == 4:
            return _little_endian(view.tobytes())
        if code in ("h", "H", "i", "l", "L", "q", "Q"):
            ids = view.tolist()
    try:
        packed = array("I", cast("Iterable[int]", ids))
    except OverflowError as error:
        raise _bad_tokens("a token id is negative or 2^32 or more") from error
    except (TypeError, ValueError) as error:
        raise _bad_tokens(f"a token id is not a whole number: {error}") from error
    return _little_endian(packed.tobytes())


def _little_endian(packed: bytes) -> bytes:
    if sys.byteorder == "little":
        return packed
    swapped = array("I", packed)
    swapped.byteswap()
    return swapped.tobytes()


def _bad_tokens(detail: str) -> BadRequest:
    return BadRequest(Reason.BAD_TOKENS, detail, "tokens")
