"""The whole LRU curve of a trace in one pass: which capacity each block would have needed.

A stack-distance algorithm (Mattson et al., 1970): a block of a prompt is a hit in every memory that
has at least so many blocks as were used since it was used last, itself included. A prompt is used
from its tail to its head, so a block's parent never needs more than the block. It holds for
memories of at least the longest prompt; smaller ones refuse a prompt's tail.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.simulate.trace import Request


def lru_hit_tokens(
    requests: Sequence[Request], capacities: Sequence[int], first_counted: int = 0
) -> list[int]:
    """Tokens in leading hits for each capacity, from request `first_counted` on. ValueError: a
    capacity is less than the longest prompt has blocks.
    """
    longest = max((len(request.ids) for request in requests), default=0)
    if min(capacities, default=longest) < longest:
        raise ValueError(f"a prompt has {longest} blocks: smaller capacities need a replay")
    uses = sum(len(request.ids) for request in requests)
    # Counts of blocks by the time of their last use, summed up in a Fenwick tree.
    tree = [0] * (uses + 1)
    last: dict[int, int] = {}
    needed: dict[int, int] = {}
    """Capacity to the tokens that hit from there on."""
    now = 0
    for number, request in enumerate(requests):
        for depth, one in enumerate(request.ids if request.asked else ()):
            before = last.get(one)
            if before is None:
                break
            distance = len(last) - _sum(tree, before - 1)
            if number >= first_counted:
                needed[distance] = needed.get(distance, 0) + request.block_tokens[depth]
        for one in reversed(request.ids):
            now += 1
            before = last.get(one)
            if before is not None:
                _add(tree, before, -1)
            last[one] = now
            _add(tree, now, 1)
    return [
        sum(tokens for capacity, tokens in needed.items() if capacity <= wanted)
        for wanted in capacities
    ]


def _add(tree: list[int], at: int, change: int) -> None:
    while at < len(tree):
        tree[at] += change
        at += at & -at


def _sum(tree: list[int], at: int) -> int:
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total
