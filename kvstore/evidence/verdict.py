"""The verdict: keep, roll back or inconclusive, by criteria that were fixed beforehand. Pure.

In this order: criteria that are not fixed give none. A bound that is broken rolls back, however few
the requests. Too few requests, too few reports or sides of different traffic are inconclusive. Then
one criterion that is broken rolls back, all that are met keep, and anything else is inconclusive.
Requests that failed have no time to the first token, so that a store which fails the slow ones
would look fast: where no criterion is about failures, more of them are inconclusive, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.evidence.compare import Change
from kvstore.evidence.criteria import Bound, Criteria, Criterion

__all__ = ["INCONCLUSIVE", "KEEP", "NONE", "ROLL_BACK", "Judged", "Verdict", "decide"]

KEEP, ROLL_BACK, INCONCLUSIVE, NONE = "keep", "roll back", "inconclusive", "no verdict"
BALANCE_MAX = 0.10
"""By how much the sides' mean prompt may differ, with all of its interval, before they are taken to
have different traffic."""


class Judged(NamedTuple):
    """What one criterion or bound came to. state: met, broken, undecided."""

    what: str
    state: str
    why: str


class Verdict(NamedTuple):
    """word: keep, roll back, inconclusive, no verdict. reasons: what decided it, for people."""

    word: str
    reasons: tuple[str, ...]
    judged: tuple[Judged, ...]


def decide(
    criteria: Criteria,
    problem: str,
    changes: Mapping[str, Change],
    figures: Mapping[str, float],
    balance: Change,
    coverage: Mapping[str, float],
) -> Verdict:
    """problem: why the criteria are not fixed, or empty. changes: by metric, of all requests; those
    of the criteria and failed.mean.
    figures: of the daemons, by bound. balance: of the prompts' lengths. coverage: by side, the
    share of look-ups that were reported.
    """
    judged = [
        *(
            _judge(one, changes[one.metric], criteria.sample.requests_min)
            for one in criteria.criterion
        ),
        *(_judge_bound(one, figures) for one in criteria.bound),
    ]
    if problem:
        return Verdict(NONE, (problem,), tuple(judged))
    bounds = {one.metric for one in criteria.bound}
    over = [one for one in judged if one.state == "broken" and one.what in bounds]
    if over:
        return Verdict(ROLL_BACK, _told(over), tuple(judged))
    weak = _weak(criteria, changes, balance, coverage)
    if weak:
        return Verdict(INCONCLUSIVE, tuple(weak), tuple(judged))
    broken = [one for one in judged if one.state == "broken"]
    if broken:
        return Verdict(ROLL_BACK, _told(broken), tuple(judged))
    open_ = [one for one in judged if one.state != "met"]
    if open_:
        return Verdict(INCONCLUSIVE, _told(open_), tuple(judged))
    failed = changes["failed.mean"]
    if failed.worse and not any(one.metric == failed.metric for one in criteria.criterion):
        why = f"failed.mean: {failed.interval} more fail, and no criterion says how many may"
        return Verdict(INCONCLUSIVE, (why,), tuple(judged))
    return Verdict(KEEP, ("every criterion is met",), tuple(judged))


def _told(judged: Sequence[Judged]) -> tuple[str, ...]:
    return tuple(f"{one.what}: {one.why}" for one in judged)


def _weak(
    criteria: Criteria,
    changes: Mapping[str, Change],
    balance: Change,
    coverage: Mapping[str, float],
) -> list[str]:
    found = []
    least = criteria.sample.requests_min
    for one in criteria.criterion:
        change = changes[one.metric]
        if min(change.baseline_requests, change.applied_requests) < least:
            found.append(
                f"{one.metric}: {change.baseline_requests} and {change.applied_requests} requests, "
                f"{least} on each side are needed"
            )
    for side, share in coverage.items():
        if share < criteria.sample.coverage_min:
            found.append(
                f"{share:.0%} of the {side} look-ups were reported, "
                f"{criteria.sample.coverage_min:.0%} are needed"
            )
    off = balance.change is not None and abs(balance.change) > BALANCE_MAX
    if off and (balance.improved or balance.worse):
        found.append(
            f"the sides have other traffic: prompts of {balance.baseline:.0f} and "
            f"{balance.applied:.0f} tokens in the mean"
        )
    return found


def _judge(one: Criterion, change: Change, requests_min: int) -> Judged:
    if min(change.baseline_requests, change.applied_requests) < requests_min:
        return Judged(one.metric, "undecided", "too few requests")
    if change.low is None or change.high is None:
        return Judged(one.metric, "undecided", change.why)
    seen, limit = change.interval, change.shown(one.keep_at_most)
    if change.low > one.roll_back_above:
        limit = change.shown(one.roll_back_above)
        return Judged(one.metric, "broken", f"{seen} is above {limit}")
    if change.high <= one.keep_at_most:
        return Judged(one.metric, "met", f"{seen} is at most {limit}")
    return Judged(one.metric, "undecided", f"{seen}, {limit} is asked for")


def _judge_bound(one: Bound, figures: Mapping[str, float]) -> Judged:
    if one.metric not in figures:
        return Judged(one.metric, "undecided", "no daemon recorded it")
    value = figures[one.metric]
    if value > one.at_most:
        return Judged(one.metric, "broken", f"{value:g} is above {one.at_most:g}")
    return Judged(one.metric, "met", f"{value:g} is at most {one.at_most:g}")
