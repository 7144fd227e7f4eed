"""Leases that are to end some time soon: nobody waits for that, so they go out in batches.

A view's lease and a reservation's staging end by nothing else while their session lives: what could
not be sent is kept and said again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.model.values import REPORTS_PER_CALL_MAX
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.session import NS_PER_MS, Session

__all__ = ["Release", "Releases", "request_of"]

RELEASES_MAX = 100_000
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
        self._due_ns = 0

    def add(self, release: Release, now_ns: int) -> bool:
        """True if it is the first that waits."""
        first = not self._waiting
        if first:
            self._due_ns = now_ns + LINGER_NS
        self._waiting.append(release)
        return first

    def due_in_ns(self, now_ns: int) -> int | None:
        """Until they are to be sent; None: there are none."""
        return max(0, self._due_ns - now_ns) if self._waiting else None

    def take(self, session: Session | None) -> list[Release]:
        """The next ones of this session; leases of another one are void."""
        batch: list[Release] = []
        outcomes = 0
        while self._waiting and len(batch) < RELEASES_PER_CALL and outcomes < REPORTS_PER_CALL_MAX:
            release = self._waiting.popleft()
            if release.session is session:
                batch.append(release)
                outcomes += release.outcome is not None
        return batch

    def put_back(self, batch: Sequence[Release], now_ns: int) -> None:
        """They were not sent. What was measured may have arrived: it is not said twice."""
        self._waiting.extendleft(
            replace(release, report=None, outcome=None)
            for release in reversed(batch)
            if release.lease_id or release.nonce
        )
        self._due_ns = now_ns + AGAIN_NS

    def end(self, session: Session | None) -> list[Release]:
        """Forgets all; gives the last ones of this session that have something to report."""
        kept = Releases()
        for one in reversed(self._waiting):
            if one.report or one.outcome:
                kept._waiting.append(one)
        self._waiting.clear()
        return kept.take(session)[::-1]

    def clear(self) -> None:
        self._waiting.clear()


def request_of(batch: Sequence[Release]) -> pb.ReleaseRequest:
    """The message for releases of one session."""
    return pb.ReleaseRequest(
        session=batch[0].session.secret,
        lease_ids=[release.lease_id for release in batch if release.lease_id],
        reports=[release.report for release in batch if release.report is not None],
        requests=[release.outcome for release in batch if release.outcome is not None],
        unheard=[release.nonce for release in batch if release.nonce],
    )
