"""The guard of measured loads: what it counts, and whom it lets try."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kvstore.policy.guards import GuardLimits, State
from kvstore.store.guards import Guards, GuardStats

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
