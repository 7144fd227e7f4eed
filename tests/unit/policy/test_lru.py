"""LRU: the order that evictions come in, and whom it admits and promotes."""

from __future__ import annotations

from kvstore.policy.lru import Lru
from tests.policy_kit import Block


def order(lru: Lru[Block]) -> list[bytes]:
    return [entry.key for entry in lru]


def test_the_first_of_a_batch_is_the_coldest() -> None:
    lru: Lru[Block] = Lru()
    tail, middle, head = (Block(name) for name in (b"tail", b"middle", b"head"))
    lru.insert([tail, middle, head], 1)
    assert lru.coldest() is tail
    lru.touch([tail, middle], 2)
    assert order(lru) == [b"head", b"tail", b"middle"]


def test_a_shelved_entry_returns_to_the_cold_end() -> None:
    lru: Lru[Block] = Lru()
    one, two, three = (Block(name) for name in (b"1", b"2", b"3"))
    lru.insert([one, two, three], 1)
    lru.shelve(one)
    assert lru.coldest() is two
    lru.unshelve(one)
    lru.unshelve(one)
    assert order(lru) == [b"1", b"2", b"3"]


def test_a_shelved_entry_that_is_touched_is_warm() -> None:
    lru: Lru[Block] = Lru()
    one, two = Block(b"1"), Block(b"2")
    lru.insert([one, two], 1)
    lru.shelve(one)
    lru.touch([two, one], 2)
    lru.unshelve(one)
    assert order(lru) == [b"2", b"1"]


def test_what_was_used_later_is_promoted_and_everything_admitted() -> None:
    lru: Lru[Block] = Lru()
    one, two = Block(b"1", touched_ns=1), Block(b"2", touched_ns=2)
    assert lru.promote(two, one, 2)
    assert not lru.promote(one, two, 2)
    assert lru.promote(one, None, 2), "a place is free"
    assert lru.admit(Block(b"1"))
