"""Reasons: stable numbers, a fact for each, the error tree."""

from __future__ import annotations

import pytest

from kvstore.model import reasons
from kvstore.model.fingerprint import Difference
from kvstore.model.reasons import FingerprintMismatch, KVStoreError, Origin, Reason

NUMBERS = {
    0: "UNSPECIFIED",
    1: "OK",
    2: "HIT",
    5: "NOTHING_TO_DO",
    20: "MISS_NEVER_STORED",
    27: "MISS_IN_PROGRESS",
    40: "DECLINED_RECOMPUTE_FASTER",
    43: "HELD_FOR_REVIEW",
    60: "LEASE_EXPIRED",
    65: "GENERATION_CHANGED",
    80: "NO_SPACE",
    88: "LIMIT_QUEUE",
    100: "COPY_FAILED",
    106: "NO_DURABLE_TIER",
    120: "BAD_REQUEST",
    133: "NOT_SUPPORTED",
    150: "START_MEMORY",
    154: "START_SOCKET",
    255: "INTERNAL",
}


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.name)
def test_each_reason_says_what_and_whose(reason: Reason) -> None:
    assert isinstance(reason.origin, Origin)
    assert reason.text.endswith(".")
    assert "\n" not in reason.text
    assert len(reason.text) <= 100
    assert Reason.from_wire(int(reason)) is reason
    assert reason.is_miss == reason.name.startswith("MISS_")


def test_numbers_are_stable_and_unique() -> None:
    assert {number: Reason(number).name for number in NUMBERS} == NUMBERS
    assert len(Reason.__members__) == len(set(Reason))


def test_numbers_of_a_newer_peer_are_unspecified() -> None:
    for number in (9, 254, 10_000, -1):
        assert Reason.from_wire(number) is Reason.UNSPECIFIED


def test_what_a_person_must_change_is_not_retried() -> None:
    for reason in Reason:
        if reason.name.startswith(("BAD_", "START_", "MISS_N", "REJECTED")):
            assert not reason.is_retryable
    assert Reason.STAGING_BUSY.is_retryable
    assert Reason.UNAVAILABLE.is_retryable


def test_only_internal_and_unspecified_are_defects() -> None:
    defects = {reason for reason in Reason if reason.origin is Origin.DEFECT}
    assert defects == {Reason.INTERNAL, Reason.UNSPECIFIED}


def test_the_tree_is_the_one_that_is_drawn() -> None:
    drawn = {
        line.split("-", 1)[1].split()[0]
        for line in (reasons.__doc__ or "").splitlines()
        if line.strip().startswith(("|-", "`-"))
    }
    classes = {
        name
        for name, value in vars(reasons).items()
        if isinstance(value, type) and issubclass(value, KVStoreError) and value is not KVStoreError
    }
    assert drawn == classes


def test_errors_name_the_setting() -> None:
    error = reasons.StartError(Reason.START_MEMORY, "needs 5 MiB, has 4", "tiers.host")
    assert str(error) == "START_MEMORY: needs 5 MiB, has 4 (setting: tiers.host)"
    assert (error.reason, error.detail, error.setting) == (
        Reason.START_MEMORY,
        "needs 5 MiB, has 4",
        "tiers.host",
    )
    assert str(reasons.NoSpace(Reason.NO_SPACE, "full")) == "NO_SPACE: full"


def test_a_mismatch_carries_its_differences() -> None:
    difference = Difference("geometry.layers", 1, 2, "geometry")
    error = FingerprintMismatch(
        Reason.MISS_INCOMPATIBLE, "another model", differences=(difference,)
    )
    assert error.differences == (difference,)
    assert FingerprintMismatch(Reason.MISS_INCOMPATIBLE, "x").differences == ()
