"""The guard of held fingerprints: it counts as of the offer, not as of the last look."""

from __future__ import annotations

from kvstore.model.fingerprint import Verdict
from kvstore.model.reasons import Reason
from kvstore.policy.guards import GuardLimits
from kvstore.testing.workload import fingerprint
from tests.unit.store.stand import SECOND, Stand


def test_a_burst_of_offers_stops_at_the_line() -> None:
    with Stand() as stand:
        session, stop = stand.attach(), GuardLimits().held_stop
        offers = [fingerprint(revision=None, epoch=number) for number in range(stop + 10)]
        openings = [stand.store.open(session, offer) for offer in offers]
        held = [opening.verdict is Verdict.HELD for opening in openings]
        assert held == [True] * stop + [False] * 10, "the clock stands still"
        assert {opening.reason for opening in openings[stop:]} == {Reason.DECLINED_GUARD}
        assert stand.core.review_states()["held"] == len(stand.core.reviews()) == stop
        again = stand.store.open(session, offers[0])
        assert again.verdict is Verdict.HELD, "which is held already"
        stand.store.end_session(session.id)  # and what it had held is nobody's
        assert stand.core.review_states()["held"] == 0
        stand.pass_time(10 * SECOND)
        stand.pass_time(10 * SECOND)
        other = stand.attach()
        assert stand.store.open(other, offers[-1]).verdict is Verdict.HELD
