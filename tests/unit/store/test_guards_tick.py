"""A look at the guards that fails costs that look."""

from __future__ import annotations

import logging

import pytest

from kvstore.policy.guards import GuardLimits, State
from kvstore.store.guards import Guards

S = 1_000_000_000


def test_a_defect_in_a_look_is_logged_once_and_the_next_look_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = [True]

    def held() -> int:
        if broken[0]:
            raise RuntimeError("dictionary changed size during iteration")
        return 2

    guards = Guards(
        GuardLimits(held_warn=1),
        ["host"],
        {},
        reviews_held=held,
        hold=lambda space_id, reason, words: 0,
        pause_memory=lambda paused: None,
        set_admission=lambda tier, chance: None,
    )
    with caplog.at_level(logging.ERROR):
        for second in range(1, 20):
            guards.tick(second * S)
        assert len(caplog.records) == 1, "not five lines a second"
        assert caplog.records[0].exc_info, "with what it takes to mend it"
        broken[0] = False
        guards.tick(20 * S)
        (state,) = [one.state for one in guards.stats() if one.name.guard == "held"]
        assert state is State.WARN
        broken[0] = True
        guards.tick(21 * S)
        assert len(caplog.records) == 2, "another time is news"
