"""What a call was granted, by its nonce: given back once, whenever the caller gives up."""

from __future__ import annotations

import pytest

from kvstore.model.reasons import KVStoreError, Reason
from kvstore.store.grants import CALLS_MAX, Grants


def test_what_was_granted_is_given_back_once() -> None:
    grants = Grants()
    grants.check(7)
    grants.note(7, 70)
    assert grants.give_up(7) == 70
    assert grants.give_up(7) == 0


def test_a_call_that_comes_after_it_was_given_up_is_refused() -> None:
    grants = Grants()
    assert grants.give_up(7) == 0
    with pytest.raises(KVStoreError) as refused:
        grants.check(7)
    assert refused.value.reason is Reason.CANCELLED
    grants.check(8)


def test_calls_without_a_nonce_are_not_remembered() -> None:
    grants = Grants()
    grants.note(0, 70)
    assert grants.give_up(0) == 0
    grants.check(0)


def test_as_many_calls_are_remembered_as_are_said() -> None:
    grants = Grants()
    for nonce in range(1, CALLS_MAX + 2):
        grants.note(nonce, 10 * nonce)
    assert grants.give_up(1) == 0
    assert grants.give_up(2) in (0, 20)
    assert grants.give_up(CALLS_MAX + 1) == 10 * (CALLS_MAX + 1)
