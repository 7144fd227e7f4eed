"""Hit rules of cache groups, and the length on which groups agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.hits import (
    PENDING,
    GroupPresence,
    HitRule,
    agreed_tokens,
    leading_run,
    trailing_run,
)

CODES = st.lists(st.sampled_from([0, 1, 2, PENDING]), max_size=24).map(bytes)


def test_no_group_agrees_on_nothing() -> None:
    assert agreed_tokens([]) == 0


@pytest.mark.parametrize(
    ("codes", "run"), [(b"", 0), (b"\x01\x02", 2), (b"\x01\x00\x01", 1), (b"\x01\xff\x01", 1)]
)
def test_leading_run_ends_at_the_first_block_that_is_not_there(codes: bytes, run: int) -> None:
    assert leading_run(codes) == run


@given(CODES, st.integers(0, 24))
def test_trailing_run_counts_back_from_the_end(codes: bytes, end: int) -> None:
    end = min(end, len(codes))
    run = trailing_run(codes, end)
    held = codes[end - run : end]
    assert 0 not in held
    assert PENDING not in held
    assert run == end or codes[end - run - 1] in (0, PENDING)


def test_groups_with_other_block_sizes_agree_on_a_common_multiple() -> None:
    small = GroupPresence(b"\x01" * 7, 16)
    large = GroupPresence(b"\x01" * 2, 64)
    assert agreed_tokens([small, large]) == 64


def test_a_window_needs_only_its_last_blocks() -> None:
    full = GroupPresence(b"\x01" * 6, 16)
    window = GroupPresence(b"\x00\x00\x01\x01\x01\x00", 16, HitRule.TRAILING, window_blocks=2)
    assert agreed_tokens([full, window]) == 5 * 16


def test_a_window_longer_than_the_hit_needs_all_of_it() -> None:
    window = GroupPresence(b"\x01\x01", 16, HitRule.TRAILING, window_blocks=100)
    assert agreed_tokens([window]) == 32


@given(st.lists(st.tuples(CODES, st.sampled_from([16, 32]), st.booleans()), min_size=1, max_size=3))
def test_the_agreed_length_is_the_longest_that_every_group_serves(
    drawn: list[tuple[bytes, int, bool]],
) -> None:
    groups = [
        GroupPresence(codes, size, HitRule.TRAILING if window else HitRule.PREFIX, 2)
        for codes, size, window in drawn
    ]

    def serves(group: GroupPresence, tokens: int) -> bool:
        blocks, rest = divmod(tokens, group.block_tokens)
        if rest or blocks > len(group.codes):
            return False
        need = group.codes[:blocks]
        if group.rule is HitRule.TRAILING:
            need = need[max(0, blocks - group.window_blocks) :]
        return all(code not in (0, PENDING) for code in need)

    longest = max(t for t in range(0, 800, 16) if all(serves(g, t) for g in groups))
    assert agreed_tokens(groups) == longest
