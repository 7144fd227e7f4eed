"""Guards on a virtual clock: lines, hysteresis, half-open trials; and that a guard always comes
back when its cause has gone, and stops no more often than once in its hold time, which grows while
what is tried fails.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy.guards import BUCKETS, HOLD_MAX_NS, TRIALS, Guard, GuardLimits, RateGuard, State

S = 1_000_000_000
HOLD = 2 * S
WINDOW = 60 * S
OK, WARN, PROBE, STOP = State


def level(warn: float = 0.8, stop: float = 0.9, *, falling: bool = False) -> Guard:
    return Guard(warn, stop, hold_ns=HOLD, falling=falling)


def rate(samples_min: int = 20) -> RateGuard:
    return RateGuard(0.01, 0.5, hold_ns=HOLD, window_ns=WINDOW, samples_min=samples_min)


def states(guard: Guard, values: list[float], step_ns: int = S) -> list[State]:
    seen = []
    for turn, value in enumerate(values):
        guard.see(value, turn * step_ns)
        seen.append(guard.state)
    return seen


# ---------------------------------------------------------------------- levels


def test_a_level_warns_at_its_line_and_stops_at_the_next() -> None:
    assert states(level(), [0.79, 0.8, 0.89, 0.9]) == [OK, WARN, WARN, STOP]


def test_a_change_tells_where_from_where_to_and_at_what() -> None:
    guard = level()
    assert guard.see(0.5, 0) is None
    change = guard.see(0.95, 1)
    assert change is not None
    assert tuple(change) == (OK, STOP, 0.95)
    assert guard.see(0.96, 2) is None
    assert (guard.stops, guard.warnings, guard.value) == (1, 0, 0.96)


def test_a_warning_ends_only_well_below_its_line() -> None:
    assert states(level(), [0.8, 0.79, 0.77, 0.75, 0.79]) == [WARN, WARN, WARN, OK, OK]


def test_a_stop_lasts_its_hold_time_then_a_few_may_try() -> None:
    guard = level()
    guard.see(0.95, 0)
    assert (guard.state, guard.take(100, 0)) == (STOP, 0)
    guard.see(0.1, HOLD - 1)
    assert guard.state is STOP, "however soon the level is back"
    guard.see(0.1, HOLD)
    assert (guard.state, guard.stopped) == (PROBE, False)
    assert [guard.take(5, HOLD), guard.take(5, HOLD)] == [5, TRIALS - 5]
    assert guard.take(1, 2 * HOLD - 1) == 0
    assert guard.take(1, 2 * HOLD) == 1, "anew in each hold time"
    guard.see(0.1, 2 * HOLD)
    assert guard.state is OK
    assert guard.take(10**6, 2 * HOLD) == 10**6


def test_a_level_that_stays_stays_stopped_and_one_that_returns_stops_again() -> None:
    guard = level()
    for turn in range(20):
        guard.see(0.95, turn * S)
        assert guard.state is STOP
    guard.see(0.5, 20 * S)
    assert guard.state is PROBE
    guard.see(0.91, 20 * S + 1)
    assert guard.state is STOP
    assert guard.stops == 2
    guard.see(0.5, 20 * S + 2)
    assert guard.state is STOP, "a new hold time has begun"


def test_a_level_just_below_its_stop_line_is_not_back() -> None:
    guard = level()
    guard.see(0.9, 0)
    guard.see(0.89, HOLD)
    assert guard.state is STOP
    guard.see(0.85, HOLD)
    assert guard.state is PROBE
    guard.see(0.85, 2 * HOLD)
    assert guard.state is WARN, "past the warn line it is still"


def test_a_falling_level_has_its_lines_below() -> None:
    guard = level(100.0, 50.0, falling=True)
    assert states(guard, [101, 100, 102, 50, 51, 200, 200, 200, 200]) == [
        OK, WARN, WARN, STOP, STOP, PROBE, PROBE, OK, OK,
    ]  # fmt: skip


@pytest.mark.parametrize("falling", [False, True])
def test_a_line_of_zero_is_none(falling: bool) -> None:
    assert states(level(0, 0, falling=falling), [0.0, 1e9, -1e9]) == [OK, OK, OK]
    assert states(level(0, 0.9), [0.89, 0.95]) == [OK, STOP]
    assert states(level(0.8, 0), [0.89, 0.95]) == [WARN, WARN]


def test_a_level_that_is_not_known_stops_nothing_and_ends_what_was() -> None:
    guard = level()
    guard.see(0.85, 0)
    guard.see(None, S)
    assert guard.state is OK
    guard.see(0.95, S)
    guard.see(None, S + HOLD)
    guard.see(None, S + 2 * HOLD)
    assert guard.state is OK


# ---------------------------------------------------------------------- rates


def note(guard: RateGuard, good: int, bad: int, now_ns: int) -> None:
    for outcome in [0] * good + [1] * bad:
        guard.note(outcome, 1, now_ns)
    guard.look(now_ns)


def test_a_rate_of_too_few_outcomes_is_none() -> None:
    guard = rate()
    note(guard, 0, 19, 0)
    assert guard.state is OK
    note(guard, 0, 1, 0)
    assert guard.state is STOP


def test_a_rate_warns_and_stops_at_its_lines() -> None:
    guard = rate()
    note(guard, 199, 1, 0)
    assert guard.state is OK
    note(guard, 0, 2, 0)
    assert guard.state is WARN
    note(guard, 0, 199, 0)
    assert (guard.state, guard.stops) == (STOP, 1)


def test_a_rate_is_of_its_window() -> None:
    guard = rate()
    note(guard, 10, 9, 0)
    note(guard, 1, 0, WINDOW - WINDOW // BUCKETS)
    assert (guard.state, guard.value) == (WARN, 0.45)
    guard.look(WINDOW)
    assert (guard.state, guard.samples) == (OK, 1)


def test_a_warning_does_not_end_because_outcomes_are_few() -> None:
    guard = rate()
    note(guard, 19, 1, 0)
    assert (guard.state, guard.warnings) == (WARN, 1)
    for turn in range(1, 20):
        note(guard, 17, 2, turn * WINDOW)
        assert (guard.state, guard.samples) == (WARN, 19)
        note(guard, 1, 0, turn * WINDOW)
        assert (guard.state, guard.samples) == (WARN, 20)
    assert guard.warnings == 1
    guard.look(20 * WINDOW)
    assert (guard.state, guard.samples) == (OK, 0), "nor does it outlast them"


def test_few_outcomes_that_are_fine_end_a_warning() -> None:
    guard = rate()
    note(guard, 19, 1, 0)
    note(guard, 3, 0, WINDOW)
    assert (guard.state, guard.samples) == (OK, 3)


def test_what_was_under_way_when_it_stopped_does_not_count_half_open() -> None:
    guard = rate()
    note(guard, 0, 20, 0)
    note(guard, 0, 50, S)
    guard.look(HOLD)
    assert (guard.state, guard.samples) == (PROBE, 0)


def test_half_open_trials_decide() -> None:
    guard = rate()
    note(guard, 0, 20, 0)
    guard.look(HOLD)
    note(guard, TRIALS - 1, 0, HOLD + S)
    assert guard.state is PROBE, "one is missing"
    guard.look(HOLD + 20 * S)
    assert guard.state is PROBE, "time alone tells nothing of a path that nobody used"
    guard.look(HOLD + 3 * WINDOW)
    assert guard.samples == TRIALS - 1, "nor does it make anything of what was tried untold"
    note(guard, 1, 0, HOLD + 3 * WINDOW)
    assert guard.state is OK
    note(guard, 0, 20, HOLD + 3 * WINDOW)
    guard.look(2 * HOLD + 3 * WINDOW)
    note(guard, TRIALS // 2, TRIALS // 2, 2 * HOLD + 3 * WINDOW + S)
    assert (guard.state, guard.stops) == (STOP, 3), "half of them failed"


def test_each_trial_that_fails_doubles_the_hold_time_until_one_goes_well() -> None:
    guard = RateGuard(0.01, 0.5, hold_ns=HOLD, window_ns=WINDOW, samples_min=20, trials=1)
    now_ns, holds = 0, []
    note(guard, 0, 20, now_ns)
    for _ in range(12):
        holds.append(guard.hold_ns)
        guard.look(now_ns + guard.hold_ns - 1)
        assert guard.state is STOP
        now_ns += guard.hold_ns
        guard.look(now_ns)
        assert (guard.state, guard.take(10, now_ns)) == (PROBE, 1), "one trial is enough"
        assert guard.take(10, now_ns + guard.hold_ns - 1) == 0
        note(guard, 0, 1, now_ns)
    assert holds == [min(HOLD << turn, HOLD_MAX_NS) for turn in range(12)]
    guard.look(now_ns + HOLD_MAX_NS)
    note(guard, 1, 0, now_ns + HOLD_MAX_NS)
    assert (guard.state, guard.hold_ns) == (OK, HOLD)


def test_a_hold_time_beyond_the_longest_stays_what_it_is() -> None:
    hold_ns = 2 * HOLD_MAX_NS
    guard = RateGuard(0.01, 0.5, hold_ns=hold_ns, window_ns=WINDOW, samples_min=1, trials=1)
    note(guard, 0, 1, 0)
    guard.look(hold_ns)
    note(guard, 0, 1, hold_ns)
    assert (guard.state, guard.hold_ns) == (STOP, hold_ns)


def test_a_ratio_is_of_the_sums() -> None:
    guard = RateGuard(1.0, 2.0, hold_ns=HOLD, window_ns=WINDOW, samples_min=2)
    guard.note(3.0, 1.0, 0)
    guard.note(1.0, 3.0, 0)
    guard.look(0)
    assert (guard.state, guard.value) == (WARN, 1.0)
    guard.note(0.0, 0.0, 0)
    guard.note(10.0, 1.0, 0)
    guard.look(0)
    assert (guard.state, guard.value) == (STOP, 14 / 5)


# ---------------------------------------------------------------------- what always holds

STEPS_NS = st.sampled_from([1, S // 4, S, HOLD - 1, HOLD, 3 * HOLD, WINDOW])


@given(
    st.lists(st.tuples(STEPS_NS, st.floats(0, 1.2))),
    st.floats(0, 0.5),
    st.booleans(),
)
def test_a_level_recovers_and_stops_no_more_often_than_its_hold_time(
    history: list[tuple[int, float]], fine: float, falling: bool
) -> None:
    guard = level(0.8, 0.9) if not falling else level(-0.8, -0.9, falling=True)
    sign = -1 if falling else 1
    now_ns, entered = 0, []
    for step_ns, value in history:
        now_ns += step_ns
        before = guard.stops
        guard.see(sign * value, now_ns)
        entered += [now_ns] * (guard.stops - before)
        assert (guard.take(1, now_ns) == 0) or not guard.stopped
    assert all(later - sooner >= HOLD for sooner, later in pairwise(entered))
    for _ in range(3):
        guard.see(sign * fine, now_ns)
        now_ns += HOLD
    assert guard.state is OK
    assert guard.take(1_000, now_ns) == 1_000


@given(
    st.lists(st.tuples(STEPS_NS, st.integers(0, 30), st.integers(0, 30))),
    st.integers(1, 200),
)
def test_a_rate_recovers_and_stops_no_more_often_than_its_hold_time(
    history: list[tuple[int, int, int]], samples_min: int
) -> None:
    guard = rate(samples_min)
    now_ns = 0
    entered: list[tuple[int, int]] = []
    for step_ns, good, bad in history:
        now_ns += step_ns
        allowed = guard.take(good + bad, now_ns)
        for index in range(allowed):
            guard.note(index < bad, 1, now_ns)
        before = guard.stops
        guard.look(now_ns)
        entered += [(now_ns, guard.hold_ns)] * (guard.stops - before)
        assert HOLD <= guard.hold_ns <= HOLD_MAX_NS
        assert guard.hold_ns == HOLD or guard.state > WARN
    assert all(later - sooner >= hold for (sooner, hold), (later, _) in pairwise(entered))
    # The cause has gone: all that is let through goes well.
    for _ in range(WINDOW // HOLD + 6):
        now_ns += guard.hold_ns
        guard.look(now_ns)
        for _ in range(guard.take(50, now_ns)):
            guard.note(0, 1, now_ns)
        guard.look(now_ns)
    assert guard.state is OK
    assert guard.take(1_000, now_ns) == 1_000


def test_the_defaults_stop_nothing_that_is_in_order() -> None:
    limits = GuardLimits()
    assert limits.memory_free_warn_bytes == limits.memory_free_stop_bytes == 0
    assert limits.disk_free_warn_bytes == limits.disk_free_stop_bytes == 0
    assert limits.errors_warn_share < limits.errors_stop_share
    assert limits.corrupt_warn_share < limits.corrupt_stop_share
    assert 1 <= limits.load_warn_ratio < limits.load_stop_ratio
    assert (limits.hold_ns, limits.window_ns) == (2 * S, 60 * S)
