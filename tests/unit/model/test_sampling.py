"""Which side a request is on."""

from __future__ import annotations

import hashlib

import pytest

from kvstore.model.reasons import Reason
from kvstore.model.sampling import Arm, Sampling, share_point
from kvstore.wire.v1 import store_pb2 as pb

N = 20_000


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def test_the_same_request_is_always_on_the_same_side() -> None:
    one, again = Sampling(0.5, 0.5, b"salt"), Sampling(0.5, 0.5, b"salt")
    assert [one.arm(key(n)) for n in range(200)] == [again.arm(key(n)) for n in range(200)]
    assert [one.audited(key(n)) for n in range(200)] == [again.audited(key(n)) for n in range(200)]


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_the_share_is_kept(share: float) -> None:
    served = sum(Sampling(share).arm(key(n)) is Arm.APPLIED for n in range(N))
    audited = sum(Sampling(audit_share=share).audited(key(n)) for n in range(N))
    # Six standard deviations of a binomial: the keys are fixed, so this never comes and goes.
    slack = 6 * (share * (1 - share) * N) ** 0.5
    assert abs(served - share * N) < slack
    assert abs(audited - share * N) < slack


def test_growing_the_share_moves_nobody_back() -> None:
    before = {n for n in range(2_000) if Sampling(0.3).arm(key(n)) is Arm.APPLIED}
    after = {n for n in range(2_000) if Sampling(0.6).arm(key(n)) is Arm.APPLIED}
    assert before < after


def test_another_salt_is_another_split_and_the_audit_is_independent_of_the_side() -> None:
    first = [Sampling(0.5, salt=b"a").arm(key(n)) for n in range(2_000)]
    other = [Sampling(0.5, salt=b"b").arm(key(n)) for n in range(2_000)]
    same = sum(one is two for one, two in zip(first, other, strict=True))
    assert 850 < same < 1_150
    both = Sampling(0.5, 0.5)
    together = sum(both.arm(key(n)) is Arm.APPLIED and both.audited(key(n)) for n in range(N))
    assert abs(together - N / 4) < 6 * (N * 3 / 16) ** 0.5


def test_the_ends_are_exact() -> None:
    assert {Sampling(1.0).arm(key(n)) for n in range(500)} == {Arm.APPLIED}
    assert {Sampling(0.0).arm(key(n)) for n in range(500)} == {Arm.SHADOW}
    assert not any(Sampling().audited(key(n)) for n in range(500))
    assert all(Sampling(audit_share=1.0).audited(key(n)) for n in range(500))


def test_a_point_is_below_one_whatever_the_hash_says() -> None:
    assert all(0 <= share_point(key(n), b"", b"p") < 1 for n in range(2_000))
    assert ((2**64 - 1) >> 11) / (2**64 >> 11) < 1


def test_what_is_withheld_is_told_why() -> None:
    assert Arm.HELD_OUT.reason is Reason.DECLINED_HOLDOUT
    assert Arm.SHADOW.reason is Reason.DECLINED_SHADOW
    assert Arm.APPLIED.reason is Reason.OK
    assert [arm.withheld for arm in Arm] == [False, False, True, True]


def test_the_numbers_are_those_of_the_wire() -> None:
    assert {f"ARM_{arm.name}": arm.value for arm in Arm} == dict(pb.Arm.items())
