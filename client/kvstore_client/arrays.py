"""Users' buffers as rows of bytes: numpy arrays, torch tensors, buffers, lists of them.

Nothing is copied or converted here; a buffer that is not plain memory in C order is refused with
BadRequest. torch is never imported: a tensor can only come from a process that has loaded it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import gather
from kvstore.model.reasons import BadRequest, Reason

__all__ = ["Bytes", "Rows", "plain_tokens", "rows_of", "strided_of"]

Bytes = NDArray[np.uint8]
Rows = Bytes | list[Bytes]
"""uint8 [n, row_bytes], or n arrays of uint8 [row_bytes]."""


def rows_of(data: Any, count: int, row_bytes: int, *, name: str, writable: bool) -> Rows:
    """The first `count` rows of `data`, `row_bytes` each.

    data: an array or CPU tensor in C order whose first dimension counts rows and whose row has
        row_bytes bytes, of any type; one flat buffer of rows; or a list of at least `count` buffers
        of row_bytes.
    BadRequest(BAD_SIZE) naming `name` otherwise.
    """
    if isinstance(data, list | tuple):
        if len(data) < count:
            raise _bad(name, f"{name} has {len(data)} buffers for {count} blocks")
        return [_row(one, row_bytes, name, writable) for one in data[:count]]
    array = _array(data, name, writable)
    if array.ndim == 1 and array.nbytes % row_bytes == 0:
        array = _flat(array).reshape(-1, row_bytes)
    if array.ndim == 0 or array.shape[0] < count:
        raise _bad(name, f"{name} has the shape {array.shape}, too small for {count} blocks")
    if array.nbytes != array.shape[0] * row_bytes:
        held = array.nbytes // max(1, array.shape[0])
        raise _bad(name, f"a row of {name} has {held} bytes, a block's has {row_bytes}")
    return _flat(array).reshape(array.shape[0], row_bytes)[:count]


def strided_of(
    data: Any, count: int, spans: tuple[slice, ...], *, name: str, writable: bool
) -> NDArray[Any]:
    """`data` as an array whose first `count` rows have the bytes of `spans` each, in C order.

    data: an array or CPU tensor of any type and strides whose first dimension counts rows; with
        several spans, unless it is in C order, its second dimension counts them. A flat buffer of
        rows, too.
    BadRequest(BAD_SIZE) naming `name` otherwise.
    """
    torch: Any = sys.modules.get("torch")
    if isinstance(data, np.ndarray):
        array: NDArray[Any] = data
    elif torch is not None and isinstance(data, torch.Tensor) and data.device.type == "cpu":
        array = _bits(torch, data, name)
    else:
        array = _array(data, name, writable)
    row_bytes = sum(span.stop - span.start for span in spans)
    if array.ndim == 1 and array.flags.c_contiguous and array.nbytes % row_bytes == 0:
        array = _flat(array).reshape(-1, row_bytes)
    if array.dtype.hasobject or (writable and not array.flags.writeable):
        raise _bad(name, f"{name} must be plain memory{', and writable' if writable else ''}")
    if array.ndim == 0 or array.shape[0] < count:
        raise _bad(name, f"{name} has the shape {array.shape}, too small for {count} blocks")
    if (
        writable
        and array.size
        and any(
            not step and size > 1 for step, size in zip(array.strides, array.shape, strict=True)
        )
    ):
        raise _bad(name, f"{name} must not have several elements in one place")
    try:
        gather.pieces_of(array, spans)
    except ValueError as error:
        raise _bad(name, f"{name}: {error}") from None
    return array


def _bits(torch: Any, tensor: Any, name: str) -> NDArray[Any]:
    """A tensor's memory as integers of its size: numpy has no bfloat16."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    try:
        array: NDArray[Any] = tensor.detach().view(integers[tensor.element_size()]).numpy()
    except (KeyError, RuntimeError, TypeError) as error:  # complex, sparse, a conjugate
        raise _bad(name, f"{name} must be a plain tensor: {error}") from error
    return array


def plain_tokens(tokens: Any) -> Any:
    """A tensor's token ids as an array of the same type; anything else as it is.

    A tensor is no buffer: taken one by one, the ids of a long prompt would take seconds.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(tokens, torch.Tensor):
        return tokens
    try:
        return tokens.detach().cpu().numpy()
    except (RuntimeError, TypeError) as error:  # sparse, bfloat16, without memory
        raise BadRequest(
            Reason.BAD_TOKENS, f"a tensor that holds no token ids: {error}", "tokens"
        ) from error


def _row(data: Any, row_bytes: int, name: str, writable: bool) -> Bytes:
    flat = _flat(_array(data, name, writable))
    if flat.size != row_bytes:
        raise _bad(name, f"a buffer of {name} has {flat.size} bytes, not {row_bytes}")
    return flat


def _array(data: Any, name: str, writable: bool) -> NDArray[Any]:
    array = data if isinstance(data, np.ndarray) else _foreign(data, name)
    if not array.flags.c_contiguous or array.dtype.hasobject:
        raise _bad(name, f"{name} must be plain memory in C order")
    if writable and not array.flags.writeable:
        raise _bad(name, f"{name} must be writable")
    return array


def _foreign(data: Any, name: str) -> NDArray[Any]:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        if data.device.type != "cpu" or not data.is_contiguous():
            raise _bad(name, f"{name} must be a contiguous tensor in CPU memory")
        # As bytes: numpy has no bfloat16.
        try:
            flat = data.detach().reshape(data.shape or (1,)).view(torch.uint8)
            array: NDArray[Any] = flat.numpy()
        except RuntimeError as error:  # a conjugate: its memory is not what it says
            raise _bad(name, f"{name} must be a plain tensor: {error}") from error
        return array
    try:
        return np.frombuffer(memoryview(data).cast("B"), np.uint8)
    except (TypeError, ValueError) as error:
        raise _bad(name, f"{name} is no array, tensor or buffer in C order: {error}") from error


def _flat(array: NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _bad(name: str, detail: str) -> BadRequest:
    return BadRequest(Reason.BAD_SIZE, detail, name)
