"""What two honest computations may differ by, and what nobody computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.model.dtypes import ITEMSIZE_BYTES
from kvstore.model.reasons import BadRequest
from kvstore_client.tolerance import SLICE_ELEMENTS, TOLERANCES, Tolerance, decode, differences

ELEMENTS = 4_096
SEED = 20_261_130
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def numbers(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(SEED + seed).standard_normal(ELEMENTS).astype(np.float32)


def encode(values: NDArray[np.float32], kv_dtype: str) -> NDArray[np.uint8]:
    """One row. To bfloat16 by rounding to the nearest; to 8-bit floats by the nearest of the
    table."""
    if kv_dtype in ("float32", "float16"):
        return values.astype(kv_dtype).view(np.uint8)[None]
    if kv_dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return rounded.astype(np.uint16).view(np.uint8)[None]
    if kv_dtype == "int8":
        return np.clip(np.rint(values * 40), -128, 127).astype(np.int8).view(np.uint8)[None]
    table = decode(np.arange(256, dtype=np.uint8)[None], kv_dtype)[0]
    known = np.where(np.isfinite(table), table, np.inf)
    nearest: NDArray[np.uint8] = (
        np.abs(known[None, :] - values[:, None]).argmin(axis=1).astype(np.uint8)
    )
    return nearest[None]


@pytest.mark.parametrize("kv_dtype", ITEMSIZE_BYTES)
def test_every_type_that_is_stored_has_a_tolerance(kv_dtype: str) -> None:
    assert kv_dtype in TOLERANCES
    row = encode(numbers(), kv_dtype)
    assert row.shape == (1, ELEMENTS * ITEMSIZE_BYTES[kv_dtype])
    assert decode(row, kv_dtype).shape == (1, ELEMENTS)


def test_the_8_bit_tables_are_those_of_the_specification() -> None:
    """Values of the OCP 8-bit Floating Point Specification, table 2."""
    e4m3 = decode(np.arange(256, dtype=np.uint8)[None], "float8_e4m3fn")[0]
    e5m2 = decode(np.arange(256, dtype=np.uint8)[None], "float8_e5m2")[0]
    assert (e4m3[0x7E], e4m3[0x08], e4m3[0x07], e4m3[0x01]) == (448, 2**-6, 0.875 * 2**-6, 2**-9)
    assert (e5m2[0x7B], e5m2[0x04], e5m2[0x03], e5m2[0x01]) == (
        57_344, 2**-14, 0.75 * 2**-14, 2**-16,
    )  # fmt: skip
    assert math.isnan(e4m3[0x7F])
    assert np.isfinite(e4m3[:0x7F]).all()
    assert (e5m2[0x7C], e5m2[0xFC]) == (math.inf, -math.inf)
    assert np.isnan(e5m2[0x7D:0x80]).all()
    assert np.array_equal(e4m3[0x80:0xFF], -e4m3[:0x7F])


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    values = np.array([1.0, -2.5, 3.0e38, 1e-40, np.inf], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    back = decode(bits.view(np.uint8)[None], "bfloat16")[0]
    assert np.allclose(back[:3], values[:3], rtol=2.0**-7)
    assert back[4] == np.inf


@pytest.mark.parametrize("kv_dtype", ITEMSIZE_BYTES)
def test_rounding_alone_is_no_mismatch(kv_dtype: str) -> None:
    """The difference that a random walk through eighty layers leaves, and a rounding after it."""
    clean = numbers()
    unit = UNIT.get(kv_dtype, 2.0**-8)
    noise = np.random.default_rng(SEED + 1).standard_normal(ELEMENTS) * unit * math.sqrt(80) / 3
    stored = encode(clean, kv_dtype)
    computed = encode((clean * (1 + noise)).astype(np.float32), kv_dtype)
    assert not np.array_equal(stored, computed)
    (found,) = differences(stored, computed, kv_dtype)
    assert not found.mismatch, found


@pytest.mark.parametrize("kv_dtype", ITEMSIZE_BYTES)
@pytest.mark.parametrize("kind", ["another prompt", "shuffled", "zeros", "scaled"])
def test_what_nobody_computed_is_a_mismatch(kv_dtype: str, kind: str) -> None:
    clean = numbers()
    wrong = {
        "another prompt": numbers(7),
        "shuffled": np.roll(clean, 1),
        "zeros": np.zeros_like(clean),
        "scaled": clean * np.float32(2.5),
    }[kind]
    (found,) = differences(encode(wrong, kv_dtype), encode(clean, kv_dtype), kv_dtype)
    assert found.mismatch, found


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_one_flipped_high_bit_is_found(kv_dtype: str) -> None:
    stored = encode(numbers(), kv_dtype)
    broken = stored.copy()
    broken[0, 5 * ITEMSIZE_BYTES[kv_dtype] - 1] ^= 0x40  # the exponent's highest bit
    (found,) = differences(broken, stored, kv_dtype)
    assert found.mismatch


def test_no_number_against_a_number_is_infinitely_far() -> None:
    stored = encode(numbers(), "float32")
    broken = stored.copy()
    broken.view(np.float32)[0, 3] = np.nan
    assert differences(broken, stored, "float32")[0].worst == math.inf
    assert differences(stored, broken, "float32")[0].mismatch
    assert differences(broken, broken.copy(), "float32")[0].worst == 0
    other = broken.copy()
    other.view(np.float32)[0, 3] = np.inf
    assert differences(broken, other, "float32")[0].worst == math.inf
    minus = other.copy()
    minus.view(np.float32)[0, 3] = -np.inf
    assert differences(minus, other, "float32")[0].worst == math.inf
    elsewhere = stored.copy()
    elsewhere.view(np.float32)[0, 4] = np.inf
    assert differences(elsewhere, other, "float32")[0].worst == math.inf


def test_blocks_are_told_apart_and_a_given_tolerance_holds() -> None:
    stored = np.concatenate([encode(numbers(n), "float32") for n in range(3)])
    computed = stored.copy()
    computed.view(np.float32)[1] *= np.float32(1.01)
    found = differences(stored, computed, "float32")
    assert [one.mismatch for one in found] == [False, True, False]
    wide = differences(stored, computed, "float32", Tolerance(0.02, 0.0))
    assert not any(one.mismatch for one in wide)
    exact = differences(stored, stored + np.uint8(0), "float32", Tolerance(0.0, 0.0))
    assert [one.worst for one in exact] == [0, 0, 0]
    assert differences(stored, computed, "float32", Tolerance(0.0, 0.0))[1].worst == math.inf


def test_what_cannot_be_compared_is_refused() -> None:
    row = np.zeros((1, 8), np.uint8)
    with pytest.raises(BadRequest, match="float4"):
        differences(row, row.copy(), "float4")
    with pytest.raises(BadRequest):
        differences(row, np.zeros((1, 4), np.uint8), "float32")
    with pytest.raises(BadRequest):
        decode(np.zeros((1, 3), np.uint8), "bfloat16")
    assert differences(row, row.copy(), "float4", Tolerance(0.0, 0.0))[0].worst == 0


LAYERS = 8
SIDES = 2


def uneven() -> NDArray[np.float32]:
    """[layers, K or V, elements]: a deep layer's K is 1,000 times the first one's V."""
    values = numbers(7).reshape(LAYERS, SIDES, -1)
    sizes = np.logspace(-1.5, 0, LAYERS)[:, None] * np.array([1.0, 0.03])
    found: NDArray[np.float32] = (values * sizes[:, :, None]).astype(np.float32)
    return found


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_a_small_layer_is_not_measured_by_a_large_one(kv_dtype: str) -> None:
    clean = uneven()
    wrong = clean.copy()
    wrong[0, 1] = np.random.default_rng(SEED).permutation(clean[0, 1])
    stored, computed = encode(wrong.reshape(-1), kv_dtype), encode(clean.reshape(-1), kv_dtype)
    slice_bytes = computed.shape[1] // (LAYERS * SIDES)
    (found,) = differences(stored, computed, kv_dtype, slice_bytes=slice_bytes)
    assert found.mismatch
    noise = np.random.default_rng(SEED).standard_normal(clean.shape) * UNIT[kv_dtype]
    honest = (clean * (1 + noise)).astype(np.float32)
    (found,) = differences(
        encode(honest.reshape(-1), kv_dtype), computed, kv_dtype, slice_bytes=slice_bytes
    )
    assert not found.mismatch


def test_without_a_layout_a_slice_is_some_elements_in_a_row() -> None:
    """The last one may be shorter; what is no number counts for none."""
    clean = np.concatenate([np.full(SLICE_ELEMENTS, 1e3), np.full(100, 1.0)]).astype(np.float32)
    clean[::7] = np.nan
    wrong = clean.copy()
    wrong[SLICE_ELEMENTS:] *= 1.5
    stored, computed = encode(wrong, "float32"), encode(clean, "float32")
    for of_rms, mismatch in ((0.4999, True), (0.5001, False)):
        (found,) = differences(stored, computed, "float32", Tolerance(0.0, of_rms))
        assert found.mismatch == mismatch
