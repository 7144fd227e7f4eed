"""The guard of measured loads: what it counts, and whom it lets try."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kvstore.policy.guards import GuardLimits, State
from kvstore.store.guards import Guards, GuardStats

MS = 1_000_000
S = 1_000_000_000
HOST, DISK = 0, 1
TENANT = "a"


def guards(loads_min: int = 4) -> Guards:
    return Guards(
        GuardLimits(loads_min=loads_min),
        ["host", "disk"],
        {},
        reviews_held=lambda: 0,
        hold=lambda space_id, reason, words: 0,
        pause_memory=lambda paused: None,
        set_admission=lambda tier, chance: None,
    )


def of_loads(one: Guards) -> GuardStats:
    (stats,) = [stats for stats in one.stats() if stats.name.guard == "load"]
    return stats


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -math.inf, -1.0, 0.0])
@pytest.mark.parametrize(
    "report",
    [lambda absurd: (3.0, absurd), lambda absurd: (absurd, 1.0)],
    ids=["prefill", "load"],
)
def test_no_absurd_report_blinds_the_guard(
    absurd: float, report: Callable[[float], tuple[float, float]]
) -> None:
    one = guards()
    for _ in range(4):
        one.loaded(TENANT, DISK, *report(absurd), now_ns=0)
        one.loaded(TENANT, DISK, 3.0, 1.0, now_ns=0)
    one.tick(S)
    assert (of_loads(one).state, of_loads(one).value) == (State.STOP, 3.0)


def test_a_tier_that_always_loses_is_hardly_loaded_from() -> None:
    """Ten requests a second for two minutes, each of which takes three times its prefill."""
    one = guards(loads_min=16)
    loaded = 0
    for turn in range(1_200):
        now_ns = turn * 100 * MS
        one.tick(now_ns)
        if not one.declines(TENANT, [DISK], now_ns, trying=True):
            one.loaded(TENANT, DISK, 3.0, 1.0, now_ns)
            loaded += 1
    assert 16 <= loaded <= 26
    # It is fast again: that is found out in the time that it was slow, and half as long again.
    now_ns = 120 * S
    while of_loads(one).state > State.WARN:
        now_ns += 100 * MS
        one.tick(now_ns)
        if not one.declines(TENANT, [DISK], now_ns, trying=True):
            one.loaded(TENANT, DISK, 0.5, 1.0, now_ns)
    assert now_ns <= 240 * S


def stopped(one: Guards, now_ns: int = 0) -> None:
    for _ in range(16):
        one.loaded(TENANT, DISK, 3.0, 1.0, now_ns)
    one.tick(now_ns + S)
    assert of_loads(one).state is State.STOP


def test_only_the_tenant_and_the_tier_that_lose_are_stopped() -> None:
    one = guards()
    stopped(one)
    assert one.declines(TENANT, [HOST, DISK], S, trying=True) == {DISK}
    assert one.declines(TENANT, [HOST], S, trying=True) == frozenset()
    assert one.declines("b", [HOST, DISK], S, trying=True) == frozenset()


def test_who_would_not_load_takes_no_trial() -> None:
    one = guards()
    stopped(one)
    one.tick(4 * S)
    assert of_loads(one).state is State.PROBE
    for _ in range(100):
        assert one.declines(TENANT, [DISK], 4 * S, trying=False) == {DISK}
        assert one.declines(TENANT, [HOST], 4 * S, trying=True) == frozenset()
    assert one.declines(TENANT, [DISK], 4 * S, trying=True) == frozenset()
    assert one.declines(TENANT, [DISK], 4 * S, trying=True) == {DISK}
