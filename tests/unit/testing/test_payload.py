"""Self-describing payloads tell damage, misplacement and mixtures apart."""

from __future__ import annotations

import numpy as np

from kvstore.testing.payload import Finding, check, payload, tag_of

A = tag_of("t", b"f", b"a" * 32, 1)
B = tag_of("t", b"f", b"b" * 32, 1)


def test_right_bytes_are_right() -> None:
    assert check(payload(A, 4096), [B, A]) is Finding.RIGHT


def test_a_version_is_part_of_the_tag() -> None:
    older = payload(tag_of("t", b"f", b"a" * 32, 0), 4096)
    assert check(older, [A]) is Finding.OTHER_BLOCK


def test_every_flipped_byte_is_found() -> None:
    for at in range(256):
        data = payload(A, 256)
        data[at] ^= 1
        assert check(data, [A], [B]) is not Finding.RIGHT


def test_swapped_lines_are_misplaced() -> None:
    data = payload(A, 256).reshape(-1, 64)[[1, 0, 2, 3]].reshape(-1)
    assert check(data, [A]) is Finding.MISPLACED


def test_half_of_another_block_is_a_mixture() -> None:
    data = np.concatenate([payload(A, 256)[:128], payload(B, 256)[128:]])
    assert check(data, [A], [B]) is Finding.MIXED


def test_zeros_are_damage() -> None:
    assert check(np.zeros(256, np.uint8), [A], [B]) is Finding.DAMAGED
