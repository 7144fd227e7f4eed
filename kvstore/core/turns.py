"""Who has staging, and whose turn it is when there is not enough of it for everybody.

Staging is a share of the pool that commits go to. A session that is refused is put on a list, and
gets its own as soon as bytes are there, whether it asks again or not; nobody who comes later takes
them. While somebody waits, a session that has had its turn reserves nothing more, and its staging
closes once no range of it is out; so does staging that is not used.
"""

from __future__ import annotations

from kvstore.core.books import Books
from kvstore.core.effects import AssignStaging, UnassignStaging
from kvstore.core.leases import Session
from kvstore.core.moves import Moves
from kvstore.core.staging import EXTENT_ALIGN_BYTES, Staging
from kvstore.model.reasons import Reason
from kvstore.model.values import PAGE_BYTES

IDLE_NS = 10**9
"""Staging that was not used for so long may be closed for another session."""
UNUSED_NS = 10 * 10**9
"""As long, where it was waited for: its session may not have asked again yet."""
TURN_NS = 10**9
"""What a session has for itself before others who wait."""
COMING_NS = 10**9
"""So soon a region that closes is free, unless somebody who has it mapped was stopped."""
PARTS_MIN = 4
"""Free bytes for so many parts are taken as they are, rather than waiting for a region."""


class Turns:
    """See the module's docstring. Used by `writes`."""

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves

    # ------------------------------------------------------------------ giving

    def staging(self, session: Session, part_bytes: int, now_ns: int) -> Staging | Reason:
        """The session's staging, made on first use and made anew if its parts grow."""
        staging = session.staging
        least = _pages(part_bytes)
        if least > self._share_bytes():
            return Reason.PART_TOO_LARGE
        if staging is not None:
            large = staging.total_bytes >= part_bytes
            staging.begin_turn(now_ns)
            if large and not staging.stuck and not self._is_over(staging, now_ns):
                return staging
            if not staging.unused:
                return Reason.STAGING_BUSY
            self.close(session, now_ns)
        self.books.staging_waiting[session.id] = least
        self.serve(now_ns)
        if session.staging is None:
            return Reason.STAGING_BUSY
        session.staging.begin_turn(now_ns)
        return session.staging

    def serve(self, now_ns: int) -> None:
        """Gives staging to those who wait, in their order, and sees to it that more comes."""
        if self.books.ingest.paused:
            return
        waiting = self.books.staging_waiting
        left = self._left_bytes()
        for session_id, least in list(waiting.items()):
            session = self.books.sessions[session_id]
            if left >= least:
                self._open(session, least, left, now_ns)
            left -= least if session.staging is None else session.staging.total_bytes
        if waiting:
            self._close_idle(now_ns)

    def _open(self, session: Session, least: int, left: int, now_ns: int) -> None:
        """Opens staging, of `left` bytes of the share at most, or claims room for it."""
        arena, limits = self.books.ingest, self.books.limits
        want = min(limits.staging_bytes, arena.capacity_bytes // 8, left // 2)
        want = max(_pages(want), least)
        room = arena.room_bytes(session.id)
        if room < want and room < PARTS_MIN * least:
            for region in arena.press_for_staging(session.id, want, least):
                self.moves.close_region(region, now_ns)
            if session.id in arena.claims or room < least:
                return
        self.open(session, min(want, room), now_ns)

    def grant(self, session: Session, total_bytes: int, now_ns: int) -> None:
        """A session's claim is met, as far as other staging has not used the share meanwhile."""
        least = self.books.staging_waiting.get(session.id)
        total_bytes = min(total_bytes, self._left_bytes())
        if least is not None and total_bytes >= least:
            self.open(session, total_bytes, now_ns)

    def open(self, session: Session, total_bytes: int, now_ns: int) -> Staging:
        """Gives the session staging; its bytes are free."""
        total_bytes = total_bytes // PAGE_BYTES * PAGE_BYTES
        region_id = self.books.next_id("region")
        self._stop_waiting(session)
        self.books.ingest.add_staging(region_id, total_bytes)
        self.books.staging_sessions[region_id] = session
        self.books.effects.append(AssignStaging(region_id, session.id, total_bytes))
        session.staging = Staging(region_id, total_bytes, now_ns)
        return session.staging

    def _stop_waiting(self, session: Session) -> None:
        self.books.staging_waiting.pop(session.id, None)
        self.books.ingest.claims.pop(session.id, None)

    # ------------------------------------------------------------------ bytes

    def _share_bytes(self) -> int:
        return int(self.books.ingest.capacity_bytes * self.books.limits.staging_share)

    def _left_bytes(self) -> int:
        """Bytes that staging may still take; closing regions count until they are gone."""
        arena = self.books.ingest
        closing = sum(arena.closing[region] for region in self.books.staging_closing)
        return self._share_bytes() - arena.staging_bytes - closing

    def _missing_bytes(self, now_ns: int) -> int:
        """What those who wait need beyond what is there and what is coming."""
        books = self.books
        if not books.staging_waiting:
            return 0
        coming = sum(
            books.ingest.closing[region]
            for region, since_ns in books.staging_closing.items()
            if now_ns - since_ns < COMING_NS
        )
        return sum(books.staging_waiting.values()) - max(self._left_bytes(), 0) - coming

    # ------------------------------------------------------------------ taking

    def _is_over(self, staging: Staging, now_ns: int) -> bool:
        """Whether its session has had its turn, and somebody needs the bytes."""
        return now_ns - staging.turn_ns >= TURN_NS and self._missing_bytes(now_ns) > 0

    def _close_idle(self, now_ns: int) -> None:
        """Closes what is not used, the longest first, for those who wait."""
        unused = [
            (staging.idle_ns, session)
            for session in self.books.staging_sessions.values()
            if (staging := session.staging) is not None and staging.unused
        ]
        unused.sort(key=lambda entry: entry[0])
        for idle_ns, session in unused:
            staging = session.staging
            assert staging is not None
            patience = UNUSED_NS if staging.fresh else IDLE_NS
            had_turn = not staging.fresh and now_ns - staging.turn_ns >= TURN_NS
            if not had_turn and now_ns - idle_ns < patience:
                continue
            if self._missing_bytes(now_ns) <= 0:
                return
            self.close(session, now_ns)

    def close(self, session: Session, now_ns: int) -> None:
        """The session has no staging any more; the region closes when no copy reads it."""
        staging, session.staging = session.staging, None
        if staging is not None:
            staging.closed = True
            self.retire_if_unread(staging, now_ns)

    def end(self, session: Session, now_ns: int) -> None:
        """The session is over."""
        self._stop_waiting(session)
        self.close(session, now_ns)

    def retire_if_unread(self, staging: Staging, now_ns: int) -> None:
        """Closes the region of staging that was closed, after the last copy out of it."""
        if staging.closed and not staging.copies:
            self.books.ingest.retire_staging(staging.region_id)
            del self.books.staging_sessions[staging.region_id]
            self.books.staging_closing[staging.region_id] = now_ns
            self.books.ingest.unassigned.add(staging.region_id)
            self.books.effects.append(UnassignStaging(staging.region_id))


def _pages(size_bytes: int) -> int:
    return -(-max(size_bytes, EXTENT_ALIGN_BYTES) // PAGE_BYTES) * PAGE_BYTES
