"""Opening and closing: what a fingerprint is bound to, and how a space ends.

An offer matches, is held, or is refused with the reason and the fields. Closing drops every name of
the space at once; its id is never given again.
"""

from __future__ import annotations

import contextlib

from kvstore.core.books import Books
from kvstore.core.leases import GroupKey, Session
from kvstore.core.moves import Moves
from kvstore.core.reviews import Review, Reviews
from kvstore.core.rows import Rows
from kvstore.core.spaces import Space
from kvstore.core.states import SpaceState
from kvstore.model.fingerprint import FIELDS, Difference, Fingerprint, Verdict
from kvstore.model.layout import Layout, layout_of
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.values import Opening

OPEN, HELD, CLOSED = SpaceState

SPACE_IDS_AHEAD = 1_024
"""Space ids are set aside on disk in such steps, so that none is used twice over restarts."""


class Openings:
    """See the module's docstring. floors: weight epoch floor by model name."""

    def __init__(self, books: Books, moves: Moves, rows: Rows, reviews: Reviews) -> None:
        self.books = books
        self.moves = moves
        self.rows = rows
        self.reviews = reviews
        self.floors: dict[str, int] = {}
        self._space_ids_until = 0

    # ------------------------------------------------------------------ open

    def open(self, session: Session, fingerprint: Fingerprint, now_ns: int) -> Opening:
        """Binds a fingerprint to a space, which is made if it is new."""
        offer = self.judge(session.tenant, session.group, fingerprint)
        if offer.layout is None:
            return offer
        known = self.books.spaces.get(offer.space_id)
        if known is not None:
            known.used_ns = now_ns
            return offer
        if len(self.books.spaces) >= self.books.limits.spaces_max and not self._close_unused(
            now_ns
        ):
            detail = "as many spaces as allowed are open; use fewer fingerprints"
            return _refused(offer.digest, offer.missing, Reason.LIMIT_QUEUE, (), detail)
        held = offer.verdict is Verdict.HELD
        resolved = self.reviews.resolve(session.tenant, fingerprint)
        group = session.group if held else b""
        space_id = self._new_space_id()
        space = self._add(space_id, session.tenant, group, resolved, offer.layout, now_ns)
        if held:
            space.review_id = self._review_of(session.tenant, fingerprint, now_ns).id
        elif self.books.archives:
            self.rows.space(0, space)
        return offer._replace(space_id=space.id, review_id=space.review_id)

    def judge(self, tenant: str, group: bytes, fingerprint: Fingerprint) -> Opening:
        """The answer to an offer, without opening. space_id 0 with a layout: a new space."""
        resolved = self.reviews.resolve(tenant, fingerprint)
        digest, missing = resolved.digest, resolved.missing()
        try:
            layout = layout_of(resolved)
        except BadRequest as error:
            field = error.setting
            if field not in FIELDS:
                return _refused(digest, missing, error.reason, (), str(error))
            differs = Difference(field, None, resolved.value(field), field.partition(".")[0])
            return _refused(digest, missing, error.reason, (differs,), str(error))
        identity = resolved.identity
        floor = self.floors.get(identity.model_name, 0)
        if identity.weight_epoch < floor:
            stale = Difference("identity.weight_epoch", floor, identity.weight_epoch, "identity")
            return _refused(digest, missing, Reason.MISS_EPOCH_STALE, (stale,))
        if missing:
            return self._judge_incomplete(tenant, group, resolved, layout)
        doubt = self.reviews.doubted(tenant, resolved)
        if doubt is not None:
            return _doubted(digest, doubt)
        known = self.books.spaces.find(tenant, digest, b"")
        if known is not None:
            return Opening(known.id, Verdict.MATCH, Reason.OK, (), digest, 0, (), layout)
        nearest = self.books.spaces.nearest(tenant, resolved)
        differences = () if nearest is None else nearest[1]
        return Opening(0, Verdict.MATCH, Reason.OK, differences, digest, 0, (), layout)

    def _judge_incomplete(
        self, tenant: str, group: bytes, fingerprint: Fingerprint, layout: Layout
    ) -> Opening:
        digest, missing = fingerprint.digest, fingerprint.missing()
        review = self.reviews.find(tenant, fingerprint)
        if review is not None and review.state == "rejected":
            detail = f"review {review.id} by {review.who}: {review.why}"
            return _refused(digest, missing, Reason.REJECTED_BY_REVIEW, (), detail)
        held = self.books.spaces.find(tenant, digest, group)
        return Opening(
            0 if held is None else held.id,
            Verdict.HELD,
            Reason.HELD_FOR_REVIEW,
            (),
            digest,
            0 if review is None else review.id,
            missing,
            layout,
        )

    def _review_of(self, tenant: str, fingerprint: Fingerprint, now_ns: int) -> Review:
        review = self.reviews.find(tenant, fingerprint)
        if review is None:
            review_id = self.books.next_id("review")
            review = self.reviews.add(Review(review_id, tenant, fingerprint, now_ns))
        return review

    def _add(
        self,
        space_id: int,
        tenant: str,
        group: bytes,
        fingerprint: Fingerprint,
        layout: Layout,
        now_ns: int,
    ) -> Space:
        pools = [
            None if arena is None else arena.pool(tenant, layout.slot_bytes)
            for arena in self.books.arenas
        ]
        state = HELD if group else OPEN
        space = Space(space_id, tenant, group, fingerprint, layout, state, pools, now_ns)
        self.books.spaces.add(space)
        return space

    def _new_space_id(self) -> int:
        space_id = self.books.next_id("space")
        if self.books.archives and space_id >= self._space_ids_until:
            self._space_ids_until = space_id + SPACE_IDS_AHEAD
            self.rows.next_space(self._space_ids_until)
        return space_id

    def _close_unused(self, now_ns: int) -> bool:
        """Makes room for a space: closes the one without blocks that was opened longest ago. Not
        with an archive, which may hold blocks of it.
        """
        unused = [space for space in self.books.spaces if not space.index and space.state is OPEN]
        if self.books.archives or not unused:
            return False
        self.close(min(unused, key=lambda s: s.used_ns), Reason.MISS_EVICTED, 0, now_ns)
        return True

    def restore(self, space_id: int, tenant: str, fingerprint: Fingerprint) -> None:
        """A space of an earlier run whose blocks an archive may hold. Not that of a tenant that is
        gone, nor one that an epoch has closed, nor one with a layout that is refused by now.
        """
        self.books.skip_ids("space", space_id)
        identity = fingerprint.identity
        stale = identity.weight_epoch < self.floors.get(identity.model_name, 0)
        if tenant in self.books.tenants and not stale and self.books.archives:
            with contextlib.suppress(BadRequest):
                space = self._add(space_id, tenant, b"", fingerprint, layout_of(fingerprint), 0)
                doubt = self.reviews.doubted(tenant, fingerprint)
                if doubt is not None:
                    space.doubted, space.review_id = True, doubt.id

    def restore_bound(self, bound: int) -> None:
        """Space ids up to this one may have been given by earlier runs."""
        self._space_ids_until = bound
        self.books.skip_ids("space", bound)

    # ------------------------------------------------------------------ doubt

    def doubt(self, space: Space, cause: Reason, words: str, now_ns: int) -> Review:
        """The space is nobody's until a person decides. What is leased is read to its end."""
        review_id = self.books.next_id("review")
        review = Review(
            review_id, space.tenant, space.fingerprint, now_ns, cause=cause, doubt=words
        )
        space.doubted, space.review_id = True, review.id
        for group in list(space.groups.values()):
            self.moves.names.abort_group(group, Reason.WRITE_GROUP_FAILED, now_ns)
        return self.reviews.add(review)

    # ------------------------------------------------------------------ close

    def close(self, space: Space, why: Reason, ticket: int, now_ns: int) -> int:
        """OPEN | HELD -> CLOSED: every block of it is invisible from now on. Returns READY ones."""
        blocks = space.blocks
        was_open = space.state is OPEN
        self.books.spaces.remove(space, why)
        for slot in list(space.index.values()):
            self.moves.names.drop(slot, why, now_ns)
        if was_open and self.books.archives:
            self.moves.forget(space.id, b"")
            self.rows.no_space(ticket, space)
        review = self.reviews.get(space.review_id)
        if review is not None and review.state == "held" and not self.held_spaces(review):
            self.reviews.end(review, "ended")
            if review.doubts:
                self.rows.no_review(ticket, review)
        return blocks

    def end_group(self, group_key: GroupKey, now_ns: int) -> None:
        """The last session of a group has ended: its held spaces die with it."""
        for space in self.books.spaces.held_by(group_key):
            self.close(space, Reason.MISS_INVALIDATED, 0, now_ns)

    def held_spaces(self, review: Review) -> list[Space]:
        """The spaces that wait for this review, one a group."""
        return [
            space
            for space in self.books.spaces.of_tenant(review.tenant)
            if (space.state is HELD or space.doubted) and space.review_id == review.id
        ]


def _doubted(digest: bytes, review: Review) -> Opening:
    if review.state == "rejected":
        detail = f"review {review.id} by {review.who}: {review.why}"
        return _refused(digest, (), Reason.REJECTED_BY_REVIEW, (), detail)
    reason = review.cause if review.cause is Reason.HELD_BY_AUDIT else Reason.HELD_FOR_REVIEW
    refused = _refused(digest, (), reason, (), f"review {review.id}: {review.doubt}")
    return refused._replace(review_id=review.id)


def _refused(
    digest: bytes,
    missing: tuple[str, ...],
    reason: Reason,
    differences: tuple[Difference, ...],
    detail: str = "",
) -> Opening:
    return Opening(0, Verdict.INCOMPATIBLE, reason, differences, digest, 0, missing, None, detail)
