"""The element types of stored KV: names as torch and numpy spell them, and their sizes.

Any layer may use it. A name that is not here is refused, because its size would be a guess.
"""

from __future__ import annotations

from kvstore.model.reasons import BadRequest, Reason

ITEMSIZE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes of one element."""

QUANTISED: frozenset[str] = frozenset({"float8_e4m3fn", "float8_e5m2", "int8"})
"""Types whose values mean nothing without their scales."""


def itemsize_bytes(kv_dtype: str) -> int:
    """Bytes of one element of `kv_dtype`; BadRequest if the name is unknown."""
    try:
        return ITEMSIZE_BYTES[kv_dtype]
    except KeyError:
        known = ", ".join(ITEMSIZE_BYTES)
        raise BadRequest(
            Reason.BAD_FINGERPRINT, f"kv_dtype {kv_dtype!r} is not one of {known}", "kv_dtype"
        ) from None
