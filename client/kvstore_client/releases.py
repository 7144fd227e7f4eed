"""Leases that are to end some time soon: nobody waits for that, so they go out in batches.

A view's lease and a reservation's staging end by nothing else while their session lives: what could
not be sent is kept and said again. What became of requests outlives sessions: the ones that an
outage hurt are those that have none. Such a report is said again only where it was certainly not
heard, so that none is counted twice; those of a call whose answer did not come are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvstore.model.values import REPORTS_PER_CALL_MAX
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.session import NS_PER_MS, Session

__all__ = ["Release", "Releases", "request_of"]

RELEASES_MAX = 100_000
OUTCOMES_MAX = 10_000
"""Kept while there is no session: some 200 bytes each."""
RELEASES_PER_CALL = 1_000
LINGER_NS = 5 * NS_PER_MS
"""Releases of calls that follow closely go together: each alone costs as much as the next call."""
AGAIN_NS = 100 * NS_PER_MS
"""After a call that the daemon refused for want of room."""


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a lease of either kind, and what was measured under it; or of what the call with
    this nonce was granted, whose answer was not heard. outcome: what became of a request, which
    goes the same way.
    """

    session: Session
    lease_id: int
    report: pb.LoadReport | None = None
    nonce: int = 0
    outcome: pb.RequestReport | None = None


class Releases:
    """See the module's docstring. Not locked: its owner is."""

    def __init__(self) -> None:
        self._waiting: deque[Release] = deque(maxlen=RELEASES_MAX)
        self._outcomes: deque[_Outcome] = deque(maxlen=OUTCOMES_MAX)
        self._due_ns = 0

    def add(self, release: Release, now_ns: int) -> bool:
        """True if it is the first that waits."""
        if release.outcome is not None:
            return self.report(release.session, release.outcome, now_ns)
        first = self._begin(now_ns)
        self._waiting.append(release)
        return first

    def report(self, session: Session | None, outcome: pb.RequestReport, now_ns: int) -> bool:
        """What became of a request. session: in which its space is known. True if it is the first
        that waits. The oldest give way where there are too many.
        """
        first = self._begin(now_ns)
        self._outcomes.append(_Outcome(session, outcome))
        return first

    def _begin(self, now_ns: int) -> bool:
        if self._waiting or self._outcomes:
            return False
        self._due_ns = now_ns + LINGER_NS
        return True

    def due_in_ns(self, now_ns: int, session: Session | None) -> int | None:
        """Until they are to be sent; None: there are none, or only what waits for a session."""
        if self._waiting or (self._outcomes and session is not None):
            return max(0, self._due_ns - now_ns)
        return None

    def take(self, session: Session | None) -> list[Release]:
        """The next ones of this session; leases of another one are void. None: all are."""
        batch: list[Release] = []
        while self._waiting and len(batch) < RELEASES_PER_CALL:
            release = self._waiting.popleft()
            if release.session is session:
                batch.append(release)
        most = min(RELEASES_PER_CALL, len(batch) + REPORTS_PER_CALL_MAX)
        while session is not None and self._outcomes and len(batch) < most:
            batch.append(self._outcomes.popleft().of(session))
        return batch

    def put_back(self, batch: Sequence[Release], now_ns: int, *, heard: bool) -> None:
        """They were not sent. heard: what was measured may have arrived: it is not said twice."""
        self._waiting.extendleft(
            replace(release, report=None) if heard else release
            for release in reversed(batch)
            if release.lease_id or release.nonce
        )
        if not heard:
            room = OUTCOMES_MAX - len(self._outcomes)
            again = [_Outcome(one.session, one.outcome) for one in batch if one.outcome is not None]
            self._outcomes.extendleft(reversed(again[max(0, len(again) - room) :]))
        self._due_ns = now_ns + AGAIN_NS

    def end(self, session: Session | None) -> list[Release]:
        """Forgets all; gives the last ones of this session that have something to report."""
        kept = [one for one in self._waiting if one.session is session and one.report]
        if session is not None:
            kept += [one.of(session) for one in list(self._outcomes)[-REPORTS_PER_CALL_MAX:]]
        self._waiting.clear()
        self._outcomes.clear()
        return kept[-RELEASES_PER_CALL:]

    def clear(self) -> None:
        """Another session begins: leases are void, what became of requests is not."""
        self._waiting.clear()


class _Outcome(NamedTuple):
    session: Session | None
    outcome: pb.RequestReport

    def of(self, session: Session) -> Release:
        """To be said in this session. In another one the number of its space is another's, and the
        daemon knows the request's side without it."""
        outcome = self.outcome
        if session is not self.session:
            outcome = pb.RequestReport()
            outcome.CopyFrom(self.outcome)
            outcome.space_id = 0
        return Release(session, 0, outcome=outcome)


def request_of(batch: Sequence[Release]) -> pb.ReleaseRequest:
    """The message for releases of one session."""
    return pb.ReleaseRequest(
        session=batch[0].session.secret,
        lease_ids=[release.lease_id for release in batch if release.lease_id],
        reports=[release.report for release in batch if release.report is not None],
        requests=[release.outcome for release in batch if release.outcome is not None],
        unheard=[release.nonce for release in batch if release.nonce],
    )
