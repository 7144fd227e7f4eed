"""Row numbers by name: open addressing in one numpy array, probed for many names at once.

A name is five u64: the space and the key's four. Positions come from a multilinear hash over 32-bit
digits with secret multipliers (strongly universal: Lemire and Kaser, "Strongly universal string
hashing is fast", 2014), so that clients, who choose keys, cannot make them collide.

One thread changes a table; others may probe it meanwhile. Used by the catalog alone.
"""

from __future__ import annotations

import mmap
import operator
import struct
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

NAME_WORDS = 5
_DIGITS = 2 * NAME_WORDS
_EMPTY = np.uint32(0xFFFFFFFF)
_GONE = np.uint32(0xFFFFFFFE)
ROWS_MAX = int(_GONE)
_NAME_DIGITS = struct.Struct(f"={_DIGITS}I")
_HASH_MAX = (1 << 64) - 1

SIZE_MIN = 1 << 10
FILL_MAX = 0.6
"""Rebuilt when more of it is in use or was."""
_FILL_NEW_MAX = 0.5

Names = NDArray[np.uint64]
Rows = NDArray[np.int64]
Positions = NDArray[np.int64]


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Zeroed, in pages of its own: untouched ones take no memory, and all go back to the system
    when the array does, where an allocator would keep what a smaller array left.
    """
    count = int(np.prod(shape))
    size = max(count, 1) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype, count).reshape(shape)


class Hash:
    """A hash function: 64 bits of each name."""

    __slots__ = ("_factors", "_multipliers")

    def __init__(self, secret: bytes) -> None:
        """secret: 80 random bytes."""
        self._multipliers = np.frombuffer(secret, "<u8", count=_DIGITS).astype(np.uint64)
        self._factors: list[int] = self._multipliers.tolist()

    def one(self, name: bytes) -> int:
        """The same of one name, as it lies in memory."""
        hashed: int = sum(map(operator.mul, _NAME_DIGITS.unpack(name), self._factors))
        return hashed & _HASH_MAX

    def __call__(self, names: Names) -> NDArray[np.uint64]:
        """u64 [n] of u64 [n, 5]; the high bits are the good ones."""
        digits = np.ascontiguousarray(names).view(np.uint32).reshape(-1, _DIGITS)
        hashed: NDArray[np.uint64] = digits.astype(np.uint64) @ self._multipliers
        return hashed


class HashTable:
    """One array of row numbers. `names` maps row numbers to names and only grows at its end."""

    __slots__ = ("_mask", "_shift", "_shift_bits", "gone", "size", "slots", "used")

    def __init__(self, rows: int) -> None:
        """Room for `rows` rows before it has to be rebuilt."""
        self.size = SIZE_MIN
        while rows > self.size * _FILL_NEW_MAX:
            self.size *= 2
        self._mask = self.size - 1
        self._shift_bits = 64 - (self.size.bit_length() - 1)
        self._shift = np.uint64(self._shift_bits)
        self.slots: NDArray[np.uint32] = zeros(self.size, np.uint32)
        self.slots.fill(_EMPTY)
        self.used = 0
        self.gone = 0

    def has_room(self, rows: int) -> bool:
        """Whether so many more fit."""
        return self.used + self.gone + rows <= self.size * FILL_MAX

    def find(self, wanted: Names, hashed: NDArray[np.uint64], names: Names) -> Rows:
        """i64 [n]: row number of each name, -1 where it is not there."""
        found = np.full(len(wanted), -1, np.int64)
        left = np.arange(len(wanted))
        position = self._home(hashed)
        while len(left):
            row = self.slots[position]
            live = row < _GONE
            candidate = np.where(live, row, 0).astype(np.int64)
            same = live & (names[candidate] == wanted).all(axis=1)
            found[left[same]] = candidate[same]
            onward = ~same & (row != _EMPTY)
            left, wanted = left[onward], wanted[onward]
            position = (position[onward] + 1) & self._mask
        return found

    def find_one(self, name: bytes, hashed: int, names: Names) -> int:
        """The same for one name, as it lies in memory: a quarter of the time."""
        slots, position = self.slots, hashed >> self._shift_bits
        while (row := int(slots[position])) != _EMPTY:
            if row < _GONE and names[row].tobytes() == name:
                return row
            position = (position + 1) & self._mask
        return -1

    def add(self, rows: Rows, hashed: NDArray[np.uint64]) -> None:
        """Enters rows whose names are not there, all different; `has_room` for them."""
        self.used += len(rows)
        packed = rows.astype(np.uint32)
        position = self._home(hashed)
        while len(packed):
            free = self.slots[position] == _EMPTY
            # Several may want one position: the last one written has it, the others go on.
            self.slots[position[free]] = packed[free]
            onward = self.slots[position] != packed
            packed = packed[onward]
            position = (position[onward] + 1) & self._mask

    def remove(self, rows: Rows, hashed: NDArray[np.uint64]) -> None:
        """Takes out rows that are there, all different."""
        packed = rows.astype(np.uint32)
        position = self._home(hashed)
        while len(packed):
            here = self.slots[position] == packed
            self._vacate(position[here])
            packed = packed[~here]
            position = (position[~here] + 1) & self._mask
        self.used -= len(rows)

    def _vacate(self, position: Positions) -> None:
        # Before an empty position nothing has to be probed past.
        ends = self.slots[(position + 1) & self._mask] == _EMPTY
        self.slots[position] = np.where(ends, _EMPTY, _GONE)
        self.gone += int(len(position) - np.count_nonzero(ends))

    def _home(self, hashed: NDArray[np.uint64]) -> Positions:
        home: Positions = (hashed >> self._shift).astype(np.int64)
        return home
