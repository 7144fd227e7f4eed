"""How long a cached prefix is: hit rules for cache groups, and the length on which several groups
agree.

Pure. An engine with several kinds of attention keeps each kind in a space of its own, with its own
presence: full attention needs every block of the prefix, a sliding window only the last ones. A
prefix of T tokens can be served if every group can serve T. Used by the daemon for a lookup and by
an adapter that combines lookups.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

ABSENT = 0
"""Presence code of a block that no tier holds; 1 + tier index is the code of one that is there."""

PENDING = 255
"""Presence code of a block that is being written or loaded: not there yet."""


class HitRule(enum.IntEnum):
    """Which blocks must be present for a prefix to be served (numbers as on the wire)."""

    PREFIX = 0
    TRAILING = 1
    BITMAP = 2


@dataclass(frozen=True, slots=True)
class GroupPresence:
    """What one cache group holds of a prompt.

    `codes` has one byte a block (see `ABSENT`); blocks beyond its end are absent. `window_blocks`
    counts the blocks before the end of the hit that a TRAILING group needs.
    """

    codes: bytes
    block_tokens: int
    rule: HitRule = HitRule.PREFIX
    window_blocks: int = 0


def leading_run(codes: bytes) -> int:
    """Blocks from the first on that are there now."""
    ends = [end for end in (codes.find(ABSENT), codes.find(PENDING)) if end >= 0]
    return min(ends, default=len(codes))


def trailing_run(codes: bytes, end: int) -> int:
    """Blocks just before index `end` that are there without a gap."""
    return end - 1 - max(codes.rfind(ABSENT, 0, end), codes.rfind(PENDING, 0, end))


def agreed_tokens(groups: Sequence[GroupPresence]) -> int:
    """The longest prefix in tokens that every group can serve; 0 when there is none.

    The length is a multiple of every group's block: groups with blocks of 16 and 64 tokens agree on
    multiples of 64.
    """
    if not groups:
        return 0
    step = math.lcm(*(group.block_tokens for group in groups))
    tokens = min(_limit_blocks(group) * group.block_tokens for group in groups)
    while tokens > 0:
        tokens -= tokens % step
        served = min(_served(group, tokens // group.block_tokens) for group in groups)
        if served >= tokens:
            return tokens
        tokens = served
    return 0


def _limit_blocks(group: GroupPresence) -> int:
    if group.rule is HitRule.TRAILING:
        return len(group.codes)
    return leading_run(group.codes)


_GAPS = bytes((ABSENT, PENDING))


def _served(group: GroupPresence, blocks: int) -> int:
    """`blocks` in tokens if the group serves so many, else the most that it may serve below: what
    ends before the gap that is in the way.
    """
    if group.rule is HitRule.TRAILING:
        run = trailing_run(group.codes, blocks)
        if run < min(group.window_blocks, blocks):
            blocks = len(group.codes[: blocks - run - 1].rstrip(_GAPS))
    return blocks * group.block_tokens  # `_limit_blocks` already capped it at the leading run
