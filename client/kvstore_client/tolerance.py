"""How far a block that was computed anew may be from the stored one. Pure, numpy alone.

Two honest computations of one prompt differ: other batch shapes and kernels add in another order.
The difference is bounded here in units of the element type's rounding, u = half the distance from 1
to the next number (2^-24 float32, 2^-11 float16, 2^-8 bfloat16, 2^-4 e4m3, 2^-3 e5m2; IEEE 754 and
the OCP 8-bit Floating Point Specification): an element may differ by `relative` times its size plus
`of_rms` times the root mean square of its slice, since an error of the hidden state reaches small
elements of a row as much as large ones.

A slice is one layer's K or V where the layout tells it: their sizes differ by orders of magnitude
from layer to layer, and K from V. Over the whole block the largest layer would set the scale, and a
small one could be anything within it. Where only the engine knows the order, a slice is
`SLICE_ELEMENTS` in a row: no longer than a layer's K or V of a block usually is, so that few of
them mix two, and long enough for a mean square. What is wrong all over one slice is more than the
stray share of a block of up to a thousand slices.

numpy has neither bfloat16 nor 8-bit floats: they are decoded, by a shift of the bits and by a
table.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.model.reasons import BadRequest, Reason

__all__ = ["TOLERANCES", "RowDifference", "Tolerance", "decode", "differences"]

STRAY_SHARE: Final = 1e-3
"""Share of a block's elements that may be beyond the tolerance: a sum of many roundings has tails,
and a million elements find them."""
STRAY_FACTOR: Final = 16.0
"""No element may be further off than so many times its tolerance."""


SLICE_ELEMENTS: Final = 4_096
"""Of which the root mean square is taken where the layout does not tell where a layer begins."""


class Tolerance(NamedTuple):
    """An element may differ by relative * |computed| + of_rms * rms(computed slice) + fixed, in the
    element's own units."""

    relative: float
    of_rms: float
    fixed: float = 0.0


TOLERANCES: Final[dict[str, Tolerance]] = {
    # torch.testing.assert_close takes 22 u (1.3e-6) for one operation; a model is some hundred in
    # a row, and engines may compute float32 products in TF32, whose u is 2^-11: 4 of those.
    "float32": Tolerance(2.0**-9, 2.0**-9),
    # assert_close takes 2 u for one operation; errors of n layers add like a random walk, by
    # sqrt(n), and sqrt(80) is 9: 16 u.
    "float16": Tolerance(16 * 2.0**-11, 16 * 2.0**-11),
    # assert_close takes 4 u; by the same walk it would be 36 u, but sums are kept in float32 and
    # only their results rounded: 16 u.
    "bfloat16": Tolerance(16 * 2.0**-8, 16 * 2.0**-8),
    # A value near the border of two neighbours falls to either: one step, 2 u of the larger
    # number, for the rounding, another for the difference of what was rounded.
    "float8_e4m3fn": Tolerance(4 * 2.0**-4, 2.0**-4),
    "float8_e5m2": Tolerance(4 * 2.0**-3, 2.0**-3),
    # One step, a whole number here, and what the 16-bit number that was quantised may differ by.
    "int8": Tolerance(16 * 2.0**-8, 16 * 2.0**-8, 1.0),
}
"""By element type. Check them against your engine: audit a known good run before you trust them."""


class RowDifference(NamedTuple):
    """Of one block. worst: its largest difference as a share of what is let pass; over 1 it is a
    mismatch, infinite where one side is no number and the other is."""

    worst: float

    @property
    def mismatch(self) -> bool:
        return not self.worst <= 1.0


def decode(rows: NDArray[np.uint8], kv_dtype: str) -> NDArray[np.float32]:
    """Rows of bytes, uint8 [n, row_bytes], as numbers, float32 [n, elements]. BadRequest for a type
    that is not known, or rows that are no whole number of elements.
    """
    rows = np.ascontiguousarray(rows)
    if kv_dtype in _TABLES:
        return _TABLES[kv_dtype][rows]
    if kv_dtype == "int8":
        return rows.view(np.int8).astype(np.float32)
    kind = _VIEWS.get(kv_dtype)
    if kind is None:
        raise BadRequest(Reason.NOT_SUPPORTED, f"no tolerance is known for {kv_dtype}", "kv_dtype")
    if rows.shape[-1] % np.dtype(kind).itemsize:
        raise BadRequest(Reason.BAD_SIZE, f"{rows.shape[-1]} bytes are no whole {kv_dtype} numbers")
    if kv_dtype == "bfloat16":
        # Its bits are the upper half of a float32's.
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(kind).astype(np.float32, copy=False)


def differences(
    stored: NDArray[np.uint8],
    computed: NDArray[np.uint8],
    kv_dtype: str,
    tolerance: Tolerance | None = None,
    slice_bytes: int | None = None,
) -> list[RowDifference]:
    """Compares blocks, uint8 [n, row_bytes] each, row by row; equal bytes are equal, whatever they
    are. tolerance: None takes that of the type. slice_bytes: of one layer's K or V, of which a row
    is a whole number; None: it is not known.
    """
    if stored.shape != computed.shape:
        raise BadRequest(Reason.BAD_SIZE, f"{computed.shape} bytes against {stored.shape}")
    bound = TOLERANCES.get(kv_dtype) if tolerance is None else tolerance
    if bound is None:
        raise BadRequest(Reason.NOT_SUPPORTED, f"no tolerance is known for {kv_dtype}", "kv_dtype")
    found = []
    for one, other in zip(stored, computed, strict=True):
        equal = np.array_equal(one, other)
        found.append(
            RowDifference(0.0 if equal else _worst(one, other, kv_dtype, bound, slice_bytes))
        )
    return found


def _worst(
    stored: NDArray[np.uint8],
    computed: NDArray[np.uint8],
    kv_dtype: str,
    bound: Tolerance,
    slice_bytes: int | None,
) -> float:
    ours, theirs = decode(stored[None], kv_dtype)[0], decode(computed[None], kv_dtype)[0]
    finite = np.isfinite(ours)
    if not np.array_equal(finite, np.isfinite(theirs)):
        return float("inf")
    same = np.isnan(ours) == np.isnan(theirs)
    if not same.all() or not np.array_equal(ours[np.isinf(ours)], theirs[np.isinf(theirs)]):
        return float("inf")
    if not finite.any():
        return 0.0
    slice_elements = SLICE_ELEMENTS
    if slice_bytes is not None:
        slice_elements = slice_bytes * ours.size // stored.size
    # By what was computed, which is what is trusted here.
    scale = _scale(theirs, finite, slice_elements)[finite]
    ours, theirs = ours[finite].astype(np.float64), theirs[finite].astype(np.float64)
    allowed = bound.relative * np.abs(theirs) + bound.of_rms * scale + bound.fixed
    off = np.abs(ours - theirs)
    beyond = off > allowed
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(off == 0, 0.0, off / allowed)
    furthest = float(ratios.max()) / STRAY_FACTOR
    return max(furthest, float(beyond.mean()) / STRAY_SHARE)


def _scale(
    values: NDArray[np.float32], finite: NDArray[np.bool_], slice_elements: int
) -> NDArray[np.float64]:
    """For each element the root mean square of its slice's finite ones, float64 [elements]."""
    starts = np.arange(0, values.size, slice_elements)
    squares = np.square(np.where(finite, values, 0), dtype=np.float64)
    counts = np.maximum(1, np.add.reduceat(finite, starts, dtype=np.int64))
    scales = np.sqrt(np.add.reduceat(squares, starts) / counts)
    return np.repeat(scales, np.diff(starts, append=values.size))


def _table(
    exponent_bits: int, mantissa_bits: int, *, bias: int, infinities: bool
) -> NDArray[np.float32]:
    """The 256 values of an 8-bit float, by their bits."""
    values = np.zeros(256, np.float32)
    top = (1 << exponent_bits) - 1
    for bits in range(256):
        sign = -1.0 if bits & 0x80 else 1.0
        exponent = bits >> mantissa_bits & top
        mantissa = bits & ((1 << mantissa_bits) - 1)
        if exponent == top and infinities:
            value = float("nan") if mantissa else float("inf")
        elif exponent == top and mantissa == (1 << mantissa_bits) - 1:
            value = float("nan")
        elif exponent:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        else:
            value = mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
        values[bits] = sign * value
    values.flags.writeable = False
    return values


_VIEWS: Final[dict[str, type[np.generic]]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
_TABLES: Final = {
    # e4m3fn has no infinities, and one number of each sign that is none ("fn": finite, nan).
    "float8_e4m3fn": _table(4, 3, bias=7, infinities=False),
    "float8_e5m2": _table(5, 2, bias=15, infinities=True),
}
