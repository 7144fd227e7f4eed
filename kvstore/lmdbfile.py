"""Whether a file of LMDB's is whole, before LMDB itself follows what it finds there.

LMDB has no checksums: it goes by page numbers, offsets and counts, and what is wrong with them ends
the process, gives an older state or writes over pages in use, at once or many commits later. So
`examine` reads the file itself: both roots, every page of every tree, every node, and the list of
free pages.

Promises. A file that passes has trees of sorted keys, each where a search looks for it, as many as
are said to be there; every page has one use or is free; its two roots are of commits that follow
each other. No input raises, loops, or is read beyond its end. Bytes of values are not looked at:
who stores them has checksums.

For format 1 (LMDB 0.9) on little-endian machines of 64 bits, without duplicate keys; of others it
says nothing. Pure, and without numpy, which takes longer to load than most files take to be read.
The disk tier's probe and the ledger use it.
"""

from __future__ import annotations

import operator
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

Readable: TypeAlias = "bytes | memoryview"

_META = struct.Struct("<IIQQ48s48sQQ")
_META_AT = 16
_TREE = struct.Struct("<IHHQQQQQ")
_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_MAGIC, _FORMAT = 0xBEEFC0DE, 1
_HEADER_BYTES, _NODE_BYTES, _NUMBER_BYTES = 16, 8, 8
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG, _SUBTREE = 1, 2
_NO_PAGE = (1 << 64) - 1
_INTEGER_KEYS = 0x08
_DEPTH_MAX = 32
_PAGE_SIZES = tuple(1 << bits for bits in range(9, 17))
_META_PAGES = 2
_KNOWN = sys.byteorder == "little" and struct.calcsize("P") == 8


class _Damaged(Exception):
    """The argument says what is wrong, in a word that fits a file name."""


class _Meta(NamedTuple):
    format: int
    page_bytes: int
    free: bytes
    main: bytes
    last_page: int
    transaction: int


class _Tree(NamedTuple):
    """What a root says of its tree."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Node(NamedTuple):
    """size: bytes of the value; of a branch's node the page below. begin: where the value is."""

    key: bytes
    size: int
    flags: int
    begin: int


_LookAt: TypeAlias = "Callable[[memoryview, Sequence[_Node]], int]"
"""Looks at a leaf's values; gives the number of pages outside of it that they take."""


def examine(data: Readable) -> str:
    """What is wrong with the bytes of a file, in a word; empty if nothing is that can be told."""
    if not _KNOWN:
        return ""
    try:
        _File(memoryview(data)).examine()
    except _Damaged as damaged:
        return str(damaged)
    return ""


class _File:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._used = bytearray()
        self._page_bytes = 0

    def examine(self) -> None:
        metas = [self._read_meta(number) for number in range(_META_PAGES)]
        formats = {meta.format for meta in metas}
        if len(formats) > 1:
            raise _Damaged("no-root")
        if formats != {_FORMAT}:
            return  # LMDB knows it, or refuses it
        numbers = [meta.transaction for meta in metas]
        # Roots take turns: of two that do not follow each other one is not what was written.
        in_turn = all(number % 2 == at for at, number in enumerate(numbers))
        if numbers != [0, 0] and not (in_turn and abs(numbers[0] - numbers[1]) == 1):
            raise _Damaged("roots")
        meta = max(metas, key=lambda one: one.transaction)
        # Each commit frees pages and says so under its number: by that a number is known as right.
        # Not that of the older root: after a write of a root that failed, LMDB puts the older
        # number over the newer trees, and goes by the other root.
        if meta.transaction > 1 and self._freed_last(meta) != meta.transaction:
            raise _Damaged("roots")
        self._used = bytearray(meta.last_page + 1)
        self._used[:_META_PAGES] = b"\1" * _META_PAGES
        self._walk(_tree(meta.main), self._main_values)
        self._walk(_tree(meta.free), self._free_values)
        if not all(self._used):
            raise _Damaged("lost-pages")

    # ------------------------------------------------------------------ pages

    def _read_meta(self, number: int) -> _Meta:
        # Where the second one is follows from the first one's page size.
        begin = number * self._page_bytes
        if begin + _META_AT + _META.size > len(self._data):
            raise _Damaged("truncated")
        own, _, kind, _, _ = _PAGE.unpack_from(self._data, begin)
        fields = _META.unpack_from(self._data, begin + _META_AT)
        magic, version, _, _, free, main, last_page, transaction = fields
        page_bytes = _TREE.unpack(free)[0]
        if (own, kind, magic) != (number, _META_PAGE, _MAGIC):
            raise _Damaged("no-root")
        if page_bytes not in _PAGE_SIZES or self._page_bytes not in (0, page_bytes):
            raise _Damaged("page-size")
        if last_page < _META_PAGES - 1 or last_page >= len(self._data) // page_bytes:
            raise _Damaged("truncated")
        self._page_bytes = page_bytes
        return _Meta(version, page_bytes, free, main, last_page, transaction)

    def _freed_last(self, meta: _Meta) -> int:
        """The last commit that freed pages, as a state has it; 0 if none did."""
        tree = _tree(meta.free)
        if tree.root == _NO_PAGE or not 0 < tree.depth <= _DEPTH_MAX:
            return 0
        number, key = tree.root, b""
        for depth in range(1, tree.depth + 1):
            if not _META_PAGES <= number <= meta.last_page:
                raise _Damaged("page-number")
            _, nodes = self._nodes(number, _LEAF if depth == tree.depth else _BRANCH)
            number, key = nodes[-1].size, nodes[-1].key
        return int.from_bytes(key, "little")

    def _use(self, first: int, count: int = 1) -> None:
        """These pages have a use now."""
        if first < _META_PAGES or first + count > len(self._used):
            raise _Damaged("page-number")
        if any(self._used[first : first + count]):
            raise _Damaged("page-used-twice")
        self._used[first : first + count] = b"\1" * count

    def _nodes(self, number: int, flags: int) -> tuple[memoryview, list[_Node]]:
        """A page of that kind with its nodes, in order."""
        page, places, upper = self._page(number, flags)
        size = self._page_bytes
        nodes, lengths = [], {}
        is_leaf = flags == _LEAF
        for at in places:
            if at < upper or at > size - _NODE_BYTES:
                raise _Damaged("node")
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
            begin = at + _NODE_BYTES + key_bytes
            if is_leaf:
                value = low | high << 16
                end = begin + (_NUMBER_BYTES if node_flags & _BIG else value)
            else:
                value, node_flags, end = low | high << 16 | node_flags << 32, 0, begin
            key = bytes(page[at + _NODE_BYTES : begin])
            nodes.append(_Node(key, value, node_flags, begin))
            lengths[at] = end + (end & 1)
        # They lie back to back, up to the page's end.
        at = upper
        for _ in nodes:
            at = lengths.get(at, 0)
        if at != size:
            raise _Damaged("node")
        return page, nodes

    def _page(self, number: int, flags: int) -> tuple[memoryview, tuple[int, ...], int]:
        """A page of that kind, where its nodes begin, and the first of them as they lie."""
        size = self._page_bytes
        page = self._data[number * size : (number + 1) * size]
        own, _, kind, lower, upper = _PAGE.unpack_from(page)
        if own != number or kind != flags or not _HEADER_BYTES < lower <= upper <= size:
            raise _Damaged("page-header")
        if lower % 2:
            raise _Damaged("node")
        count = (lower - _HEADER_BYTES) // 2
        return page, struct.unpack_from(f"<{count}H", page, _HEADER_BYTES), upper

    def _equal_keys(self, number: int) -> list[bytes] | None:
        """The keys of a leaf, in order, if all its nodes are of one size with plain values, as most
        are; else None, and nothing is said of the page. A tenth of the time of `_nodes`.
        """
        page, places, upper = self._page(number, _LEAF)
        if upper > self._page_bytes - _NODE_BYTES:
            return None
        head = _NODE.unpack_from(page, upper)
        low, high, node_flags, key_bytes = head
        step = _NODE_BYTES + key_bytes + (low | high << 16)
        step += step & 1
        lying = range(upper, self._page_bytes, step)
        if node_flags or len(lying) * step != self._page_bytes - upper:
            return None
        in_order = places == tuple(reversed(lying))  # as rows that came in order lie
        if not in_order and sorted(places) != list(lying):
            return None
        filler = step - _NODE_BYTES - key_bytes
        found = struct.iter_unpack(f"<{_NODE_BYTES}s{key_bytes}s{filler}x", page[upper:])
        heads, keys = zip(*found, strict=True)
        if heads.count(_NODE.pack(*head)) != len(heads):
            return None
        return list(keys[::-1]) if in_order else [keys[(at - upper) // step] for at in places]

    # ------------------------------------------------------------------ trees

    def _walk(self, tree: _Tree, look_at: _LookAt) -> None:
        """Every page of a tree, each key where a search goes."""
        if tree.root == _NO_PAGE:
            if any(tree[1:6]):
                raise _Damaged("tree")
            return
        if not 0 < tree.depth <= _DEPTH_MAX:
            raise _Damaged("tree")
        branches = leaves = entries = overflow = 0
        flip = -1 if tree.flags & _INTEGER_KEYS else 1
        left: list[tuple[int, int, bytes, bytes]] = [(tree.root, 1, b"", b"")]
        while left:
            number, depth, first, after = left.pop()
            self._use(number)
            is_leaf = depth == tree.depth
            equal = self._equal_keys(number) if is_leaf and look_at == self._values else None
            if equal is None:
                page, nodes = self._nodes(number, _LEAF if is_leaf else _BRANCH)
                equal = [node.key for node in nodes]
            else:
                page, nodes = self._data[:0], []  # none has a value outside of it
            # Integers of one size are in order if their bytes are, from the last one on.
            keys = equal if flip > 0 else [key[::-1] for key in equal]
            if not is_leaf:
                keys[0] = first  # which is not stored
            bounds = [*keys, after] if after else keys
            if keys[0] < first or not all(map(operator.lt, bounds, bounds[1:])):
                raise _Damaged("key-order")
            if is_leaf:
                leaves += 1
                entries += len(keys)
                overflow += look_at(page, nodes)
                continue
            branches += 1
            bounds = [*keys, after]
            for index, node in enumerate(nodes):
                left.append((node.size, depth + 1, bounds[index], bounds[index + 1]))
        if tree[2:6] != (branches, leaves, overflow, entries):
            raise _Damaged("counts")

    def _values(self, page: memoryview, nodes: Sequence[_Node]) -> int:
        """Plain values, which may lie outside of the leaf."""
        pages = 0
        for node in nodes:
            if node.flags:
                pages += len(self._big(page, node)) // self._page_bytes
        return pages

    def _big(self, page: memoryview, node: _Node) -> memoryview:
        """The pages of a value that lies outside of its leaf."""
        if node.flags != _BIG:
            raise _Damaged("node")
        (first,) = struct.unpack_from("<Q", page, node.begin)
        size = self._page_bytes
        if not _META_PAGES <= first < len(self._used):
            raise _Damaged("page-number")
        own, _, kind, low, high = _PAGE.unpack_from(self._data, first * size)
        # More than are needed if an earlier value was longer.
        count = low | high << 16
        if own != first or kind != _OVERFLOW or count * size < _HEADER_BYTES + node.size:
            raise _Damaged("page-header")
        self._use(first, count)
        return self._data[first * size : (first + count) * size]

    def _main_values(self, page: memoryview, nodes: Sequence[_Node]) -> int:
        """Of the main tree, whose values may be trees of their own."""
        for node in nodes:
            if node.flags == _SUBTREE:
                if node.size != _TREE.size:
                    raise _Damaged("node")
                packed = page[node.begin : node.begin + _TREE.size]
                self._walk(_tree(packed), self._values)
        return self._values(page, [node for node in nodes if node.flags != _SUBTREE])

    def _free_values(self, page: memoryview, nodes: Sequence[_Node]) -> int:
        """Of the list of free pages: by transaction how many, then which, the last one first."""
        pages = 0
        for node in nodes:
            value = page[node.begin : node.begin + node.size]
            if node.flags:
                outside = self._big(page, node)
                pages += len(outside) // self._page_bytes
                value = outside[_HEADER_BYTES : _HEADER_BYTES + node.size]
            words = len(value) // _NUMBER_BYTES
            if len(node.key) != _NUMBER_BYTES or words < 1:
                raise _Damaged("free-pages")
            count, *free = struct.unpack_from(f"<{words}Q", value)
            if count > len(free):
                raise _Damaged("free-pages")
            for number in free[:count]:
                self._use(number)
        return pages


def _tree(packed: Readable) -> _Tree:
    return _Tree(*_TREE.unpack(packed)[1:])
