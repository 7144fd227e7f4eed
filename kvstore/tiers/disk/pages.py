"""Whole pages: what goes past the page cache begins at a page and is as long as some.

Promises. A payload that begins at a page, as the slots of a pool do, is read and written in place;
only its last, broken page takes the way over a page of its own. Pure, but for the memory that it
makes. The disk tier and its file layer use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.model.values import PAGE_BYTES
from kvstore.tiers.base import Bytes

_BUFFERS_MAX = 1024  # IOV_MAX of Linux
_STUCK_MAX = 3


def aligned_bytes(length: int) -> Bytes:
    """uint8 [length] of zeros that begins at a page."""
    spare = np.zeros(length + PAGE_BYTES, np.uint8)
    skip = -_address(spare) % PAGE_BYTES
    return spare[skip : skip + length]


def is_aligned(data: Bytes) -> bool:
    """Whether `data` is contiguous and begins at a page, or is empty; its length may be any."""
    if data.nbytes == 0:
        return True
    return bool(data.flags.c_contiguous) and _address(data) % PAGE_BYTES == 0


class ScratchPages(threading.local):
    """A thread's own two pages: for a record's header, and for the end of its payload."""

    def __init__(self) -> None:
        pages = aligned_bytes(2 * PAGE_BYTES)
        self.header = pages[:PAGE_BYTES]
        self.tail = pages[PAGE_BYTES:]


class RecordBuffers:
    """The whole pages that are a record: header, payload in place, and `tail` for its last part.

    Only a payload that begins at no page is copied as a whole. `buffers` go to preadv or pwritev.
    """

    def __init__(self, header: Bytes, payload: Bytes, tail: Bytes) -> None:
        """header, tail: uint8 [4096] that begin at a page. payload: uint8 [n], of any length."""
        self._payload = payload
        whole = len(payload) // PAGE_BYTES * PAGE_BYTES
        self._rest = payload[whole:]
        self._tail = tail
        self._body = payload[:whole]
        self._bounce = not is_aligned(payload)
        if self._bounce:
            self._body = aligned_bytes(whole)
        self._whole = whole
        self.buffers = [header, self._body] if whole else [header]
        if len(self._rest):
            self.buffers.append(tail)

    def fill(self) -> RecordBuffers:
        """Before a write: copies in what is not written in place. The last page ends in zeros."""
        if self._bounce:
            self._body[:] = self._payload[: self._whole]
        self._tail[: len(self._rest)] = self._rest
        self._tail[len(self._rest) :] = 0
        return self

    def take(self) -> None:
        """After a read: copies out what was not read in place."""
        if self._bounce:
            self._payload[: self._whole] = self._body
        self._rest[:] = self._tail[: len(self._rest)]


def _address(data: Bytes) -> int:
    address: int = data.__array_interface__["data"][0]
    return address


def check_transfer(offset: int, buffers: Sequence[Bytes]) -> int:
    """The bytes of a transfer. ValueError if anything is no whole number of pages."""
    if offset < 0 or offset % PAGE_BYTES:
        raise ValueError(f"offset {offset} is at no page")
    total = 0
    for data in buffers:
        if data.dtype != np.uint8 or data.ndim != 1 or data.nbytes % PAGE_BYTES:
            raise ValueError(f"a buffer {data.dtype}{list(data.shape)} is no whole pages of bytes")
        if not is_aligned(data):
            raise ValueError("a buffer begins at no page, or is not contiguous")
        total += data.nbytes
    return total


def check_size(size_bytes: int) -> None:
    """ValueError if no segment can have this size."""
    if size_bytes <= 0 or size_bytes % PAGE_BYTES:
        raise ValueError(f"a segment of {size_bytes} bytes is no whole number of pages")


def transfer(call: Callable[[Sequence[Bytes], int], int], buffers: Sequence[Bytes]) -> int:
    """Calls `call(rest of the buffers, bytes done)` until all is moved, or it moves nothing more.

    Returns bytes moved, in whole pages: past the cache only whole pages can follow, so what was
    moved of a broken page is moved again.
    """
    total = sum(data.nbytes for data in buffers)
    done = stuck = 0
    while done < total and stuck < _STUCK_MAX:
        moved = call(_rest(buffers, done), done)
        if moved <= 0:
            break
        done += moved // PAGE_BYTES * PAGE_BYTES
        stuck = 0 if moved >= PAGE_BYTES else stuck + 1
    return done


def _rest(buffers: Sequence[Bytes], done: int) -> Sequence[Bytes]:
    if done == 0 and len(buffers) <= _BUFFERS_MAX:
        return buffers
    rest: list[Bytes] = []
    for data in buffers:
        if done >= data.nbytes:
            done -= data.nbytes
            continue
        rest.append(data[done:])
        done = 0
        if len(rest) == _BUFFERS_MAX:
            break
    return rest
