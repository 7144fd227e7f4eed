"""Users' buffers as rows: what is taken, that nothing is copied, what is refused."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from kvstore.model.keys import chain
from kvstore.model.reasons import BadRequest
from kvstore_client.arrays import plain_tokens, rows_of

ROW = 64


def written(data: Any, count: int) -> None:
    """Marks each row through the view."""
    rows = rows_of(data, count, ROW, name="out", writable=True)
    assert len(rows) == count
    for number in range(count):
        rows[number][:] = number + 1


@pytest.mark.parametrize(
    "shape_and_type",
    [((3, ROW), np.uint8), ((3, 4, 8), np.uint16), ((5, 2, 2, 4), np.float32), ((3, 8), np.int64)],
)
def test_arrays_of_any_type_are_written_in_place(shape_and_type: tuple[Any, Any]) -> None:
    shape, kind = shape_and_type
    data = np.zeros(shape, kind)
    written(data, 3)
    seen = data.view(np.uint8).reshape(shape[0], ROW)
    assert [int(row[0]) for row in seen[:3]] == [1, 2, 3]
    assert not seen[3:].any()


def test_buffers_and_lists_of_them() -> None:
    flat = bytearray(3 * ROW)
    written(flat, 3)
    assert flat[ROW] == 2
    mixed: list[Any] = [bytearray(ROW), np.zeros((4, 16), np.uint8), array("Q", [0] * 8)]
    written(mixed, 3)
    assert (mixed[0][0], int(mixed[1][0, 0]), mixed[2].tobytes()[0]) == (1, 2, 3)


def test_a_tensor_is_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 2, 16, dtype=torch.bfloat16)
    written(tensor, 3)
    assert tensor.view(torch.uint8)[2].unique().tolist() == [3]
    with pytest.raises(BadRequest, match="contiguous"):
        rows_of(tensor.transpose(1, 2), 3, ROW, name="out", writable=True)
    with pytest.raises(BadRequest, match="CPU"):
        rows_of(torch.zeros(3, ROW, device="meta"), 3, ROW, name="out", writable=True)
    conjugate = torch.zeros(3, ROW // 8, dtype=torch.complex64).conj()
    with pytest.raises(BadRequest, match="plain tensor"):
        rows_of(conjugate, 3, ROW, name="out", writable=True)


def test_tokens_of_a_tensor_are_taken_as_one_buffer() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.arange(7, dtype=torch.int64)
    plain = plain_tokens(ids)
    assert isinstance(plain, np.ndarray)
    assert (plain.dtype, plain.tolist()) == (np.int64, list(range(7)))
    assert chain(plain, 2) == chain(list(range(7)), 2)
    assert plain_tokens(ids.to_sparse().to_dense()).tolist() == plain.tolist()
    listed = [1, 2, 3]
    assert plain_tokens(listed) is listed
    for none in (ids.to_sparse(), torch.zeros(4, device="meta"), ids.bfloat16()):
        with pytest.raises(BadRequest, match="tokens"):
            plain_tokens(none)


def test_what_cannot_be_rows_is_refused() -> None:
    readonly = np.zeros((3, ROW), np.uint8)
    readonly.flags.writeable = False
    wrong: list[Any] = [
        np.zeros((2, ROW), np.uint8),
        np.zeros((3, ROW - 1), np.uint8),
        np.zeros((3, ROW), np.uint16),
        np.zeros((ROW, 3), np.uint8).T,
        np.zeros((3, 2 * ROW), np.uint8)[:, ::2],
        np.zeros(3 * ROW - 1, np.uint8),
        np.array(7),
        np.array([[object()]] * 3),
        readonly,
        [np.zeros(ROW, np.uint8)] * 2,
        [np.zeros(ROW + 1, np.uint8)] * 3,
        bytes(3 * ROW),
        None,
        "text",
        7,
    ]
    for data in wrong:
        with pytest.raises(BadRequest, match="out"):
            rows_of(data, 3, ROW, name="out", writable=True)
    assert len(rows_of(readonly, 3, ROW, name="data", writable=False)) == 3
    assert len(rows_of(bytes(3 * ROW), 3, ROW, name="data", writable=False)) == 3
