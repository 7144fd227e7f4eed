"""SGLang's host memory as pages of pieces, and a way to see that SGLang has emptied it.

A page lies in its pool as one piece, as a piece of K and one of V, or as two for each layer: that
is the layout's business, and SGLang names the addresses. Each is checked to lie in the pool's own
buffer before a byte is moved. Imports no SGLang, and torch only where there is a pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HostPages"]

Bytes = npt.NDArray[np.uint8]


class HostPages:
    """`pool`: a HostKVCache of SGLang. ValueError if its buffer is not one plain piece of memory on
    the host."""

    def __init__(self, pool: Any) -> None:
        buffer = pool.kv_buffer
        if buffer is None or not hasattr(buffer, "is_contiguous"):
            raise ValueError("the host memory is not one buffer")
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError("the host memory is not plain memory of the host")
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        self._first = int(buffer.data_ptr())
        size = int(buffer.numel()) * int(buffer.element_size())
        self._memory = _memory_of(buffer)
        if self._memory.size != size or self._memory.ctypes.data != self._first:
            raise ValueError("the host memory cannot be looked at as bytes")
        self._emptied = self._mark()

    def pieces(self, host_indices: Any, pages: int) -> list[list[Bytes]]:
        """For each page its pieces, as writable views of the pool's memory.

        host_indices: the slots of the pages' tokens, page after page. ValueError for what does not
        describe so many pages, IndexError for a slot or an address outside of the pool.
        """
        if len(host_indices) != pages * self.page_tokens:
            raise ValueError(f"{len(host_indices)} slots for {pages} pages of {self.page_tokens}")
        if not pages:
            return []
        low, high = int(host_indices.min()), int(host_indices.max())
        if low < 0 or high >= int(self._pool.size):
            raise IndexError(f"slots {low} to {high} are not in a pool of {self._pool.size}")
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        if len(addresses) != len(sizes) or not addresses or len(addresses) % pages:
            raise ValueError(f"{len(addresses)} addresses for {pages} pages")
        views = [self._piece(*piece) for piece in zip(addresses, sizes, strict=True)]
        each = len(views) // pages
        return [views[first : first + each] for first in range(0, len(views), each)]

    def _piece(self, address: int, size: int) -> Bytes:
        begin = address - self._first
        if begin < 0 or size <= 0 or begin + size > self._memory.size:
            raise IndexError(f"{size} bytes at {begin} are not in a pool of {self._memory.size}")
        return self._memory[begin : begin + size]

    def emptied(self) -> bool:
        """Whether SGLang has emptied the pool since the last call: it has flushed its caches, as it
        does when the weights were updated. No hook tells a backend.
        """
        mark, self._emptied = self._emptied, self._mark()
        return mark is not self._emptied

    def _mark(self) -> object:
        """What the pool makes anew when it is emptied, and never otherwise. It is kept, so that
        nothing else comes to be at its place.
        """
        mark: object = self._pool.slot_used
        return mark


def _memory_of(buffer: Any) -> Bytes:
    """A tensor's bytes, the same memory: [n] uint8. Flat first, since numpy has no bfloat16."""
    import torch

    memory: Bytes = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    return memory
