"""What people decide: invalidation, weight epochs, reviews.

A decision takes hold at once and for good. Its durable rows are emitted under a ticket; the shell
answers the operator when they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.books import Books
from kvstore.core.openings import Openings
from kvstore.core.reviews import UNKNOWN_NS, Review, Reviews
from kvstore.core.rows import NEXT_SPACE, Rows, read_epoch, read_review, read_space
from kvstore.core.spaces import Space
from kvstore.core.states import SlotState, SpaceState
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.values import Dropped, EpochSet, Reviewed, ReviewRow

READY = SlotState.READY
HELD = SpaceState.HELD


class Decisions:
    """See the module's docstring."""

    def __init__(self, books: Books, openings: Openings, rows: Rows, reviews: Reviews) -> None:
        self.books = books
        self.openings = openings
        self.rows = rows
        self.reviews = reviews

    # ------------------------------------------------------------------ invalidation, epochs

    def invalidate(
        self,
        *,
        tenant: str | None,
        space_id: int | None,
        model_name: str | None,
        everything: bool,
        keys: Sequence[bytes] | None,
        now_ns: int,
    ) -> Dropped:
        """Drops named keys of one space, or closes the spaces that are selected."""
        if space_id is None and model_name is None and tenant is None and not everything:
            raise BadRequest(Reason.BAD_REQUEST, "name a tenant, a space, a model, or everything")
        if keys is not None and space_id is None:
            raise BadRequest(Reason.BAD_REQUEST, "keys need a space", "space_id")
        chosen = [
            space
            for space in self.books.spaces
            if (tenant is None or space.tenant == tenant)
            and (space_id is None or space.id == space_id)
            and (model_name is None or space.fingerprint.identity.model_name == model_name)
        ]
        if keys is not None:
            return Dropped(sum(self._drop_keys(s, keys, now_ns) for s in chosen), len(chosen), 0)
        ticket = self.rows.ticket()
        blocks = self._close_all(chosen, Reason.MISS_INVALIDATED, ticket, now_ns)
        return Dropped(blocks, len(chosen), ticket if ticket in self.books.tickets else 0)

    def _close_all(self, spaces: Iterable[Space], why: Reason, ticket: int, now_ns: int) -> int:
        return sum(self.openings.close(space, why, ticket, now_ns) for space in spaces)

    def _drop_keys(self, space: Space, keys: Sequence[bytes], now_ns: int) -> int:
        dropped = 0
        for key in keys:
            slot = space.index.get(key)
            if slot is not None:
                dropped += slot.state is READY
                self.openings.moves.names.drop(slot, Reason.MISS_INVALIDATED, now_ns)
            else:
                self.books.ghosts.add(space.id, key, Reason.MISS_INVALIDATED, now_ns)
            self.openings.moves.forget(space.id, key)
        return dropped

    def set_epoch(self, model_name: str, epoch: int, why: str, now_ns: int) -> EpochSet:
        """Raises the floor of a model; older spaces are closed."""
        floors = self.openings.floors
        current = floors.get(model_name, 0)
        if epoch <= current:
            return EpochSet(current, 0, 0, 0)
        floors[model_name] = epoch
        ticket = self.rows.ticket()
        self.rows.epoch(ticket, model_name, epoch, why)
        stale = [
            space
            for space in self.books.spaces
            if space.fingerprint.identity.model_name == model_name
            and space.fingerprint.identity.weight_epoch < epoch
        ]
        blocks = self._close_all(stale, Reason.MISS_EPOCH_STALE, ticket, now_ns)
        return EpochSet(epoch, len(stale), blocks, ticket)

    # ------------------------------------------------------------------ reviews

    def review(
        self,
        review_id: int,
        approve: bool,
        revision: str,
        who: str,
        why: str,
        now_ns: int,
        wall_s: float,
    ) -> Reviewed:
        """Decides a held fingerprint, for good and for later offers of it too. A doubt that was
        rejected may be approved later: the model begins anew then.
        """
        review = self.reviews.get(review_id)
        again = approve and review is not None and self._still_rejected(review)
        if review is None or (review.state != "held" and not again):
            state = "unknown" if review is None else review.state
            return Reviewed(Reason.BAD_REQUEST, 0, 0, f"review {review_id} is {state}")
        if review.doubts:
            return self._settle_doubt(review, approve, who, why, now_ns, wall_s)
        completed = _completed(review.fingerprint, revision) if approve else None
        if isinstance(completed, Reviewed):
            return completed
        review.state = "rejected" if completed is None else "approved"
        review.who, review.why = who, why
        review.revision = "" if completed is None else revision
        ticket = self.rows.ticket()
        self.rows.review(ticket, review, wall_s)
        held = sorted(self.openings.held_spaces(review), key=lambda space: -space.blocks)
        space_id = 0 if completed is None else self._complete(review, held, completed, ticket)
        rest = [space for space in held if space.state is HELD]
        self._close_all(rest, Reason.REJECTED_BY_REVIEW, ticket, now_ns)
        return Reviewed(Reason.OK, space_id, ticket)

    def _still_rejected(self, review: Review) -> bool:
        known = self.reviews.doubted(review.tenant, review.fingerprint)
        return known is review and review.state == "rejected"

    def _settle_doubt(
        self, review: Review, approve: bool, who: str, why: str, now_ns: int, wall_s: float
    ) -> Reviewed:
        """Approved: its blocks are everybody's again. Rejected: they are dropped on all tiers, and
        what an audit doubts is refused from now on. Damage was the device's: the model begins anew.
        """
        spaces = self.openings.held_spaces(review)
        ticket = self.rows.ticket()
        if not approve and review.cause is Reason.MISS_CORRUPT:
            self._close_all(spaces, Reason.REJECTED_BY_REVIEW, ticket, now_ns)
            if review.state == "held":  # closing ends it, with its row, unless no space is left
                self.reviews.end(review, "ended")
                self.rows.no_review(ticket, review)
            review.state, review.who, review.why = "rejected", who, why
            return Reviewed(Reason.OK, 0, ticket)
        review.state = "approved" if approve else "rejected"
        review.who, review.why = who, why
        self.rows.review(ticket, review, wall_s)
        if not approve:
            self._close_all(spaces, Reason.REJECTED_BY_REVIEW, ticket, now_ns)
            return Reviewed(Reason.OK, 0, ticket)
        for space in spaces:
            space.doubted, space.review_id = False, 0
        return Reviewed(Reason.OK, spaces[0].id if spaces else 0, ticket)

    def hold(self, space_id: int, cause: Reason, words: str, now_ns: int, wall_s: float) -> int:
        """Keeps the blocks of a complete fingerprint from everybody until a person decides; offers
        of it are refused. cause: MISS_CORRUPT or HELD_BY_AUDIT; words: what was seen, for people.
        The review's id; 0: there is no such space, or nobody reads it anyway.
        """
        space = self.books.spaces.get(space_id)
        if space is None or not space.may_be_saved:
            return 0
        review = self.openings.doubt(space, cause, words, now_ns)
        self.rows.review(0, review, wall_s)
        self.books.counters["spaces_doubted"] += 1
        return review.id

    def _complete(
        self, review: Review, held: list[Space], completed: Fingerprint, ticket: int
    ) -> int:
        """The fullest held space becomes the one that readers of the complete fingerprint find,
        unless there is one; they find it by the id that is returned (0: none yet).
        """
        known = self.books.spaces.find(review.tenant, completed.digest, b"")
        if known is not None:
            return known.id
        if not held:
            return 0
        self.books.spaces.complete(held[0], completed)
        if self.books.archives:
            self.rows.space(ticket, held[0])
        return held[0].id

    def rows_of_reviews(self, include_decided: bool) -> list[ReviewRow]:
        """The reviews for people, oldest first."""
        return [
            ReviewRow(
                review.id,
                review.tenant,
                review.fingerprint,
                review.fingerprint.missing(),
                review.state,
                sum(space.blocks for space in self.openings.held_spaces(review)),
                review.created_ns,
                review.who,
                review.why,
                review.revision,
                review.doubt,
            )
            for review in self.reviews
            if include_decided or review.state == "held"
        ]

    def expire_reviews(self, now_ns: int) -> int | None:
        """Drops what nobody decided in time; returns when the next one is due."""
        next_ns: int | None = None
        for review in self.reviews.held():
            if review.created_ns == UNKNOWN_NS:  # of an earlier run: it waits anew
                review.created_ns = now_ns
            due_ns = review.created_ns + self.books.limits.review_ttl_ns
            if due_ns > now_ns:
                next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
                continue
            held = self.openings.held_spaces(review)
            self._close_all(held, Reason.MISS_INVALIDATED, 0, now_ns)
            if review.doubts and not held:
                self.rows.no_review(0, review)
            review.state = "expired"
        return next_ns

    # ------------------------------------------------------------------ earlier runs

    def restore(self, rows: Iterable[tuple[str, bytes, bytes]]) -> None:
        """Takes the durable rows back, before anything else. KeyError, ValueError or BadRequest: a
        row that no version of this code has written.
        """
        spaces: list[tuple[int, bytes]] = []
        for table, key, value in rows:
            if table == "epoch":
                self.openings.floors[key.decode()] = read_epoch(value)
            elif table == "review":
                self.reviews.add(read_review(value, self.books.next_id("review")))
            elif table == "space" and key == NEXT_SPACE:
                self.openings.restore_bound(int(value))
            elif table == "space":
                spaces.append((int(key), value))
        for space_id, value in spaces:
            self.openings.restore(space_id, *read_space(value))


def _completed(fingerprint: Fingerprint, revision: str) -> Fingerprint | Reviewed:
    """The fingerprint with the revision that was vouched for, or why it is not complete then."""
    try:
        completed = fingerprint.complete(revision)
    except BadRequest as error:
        return Reviewed(error.reason, 0, 0, error.detail)
    if completed.missing():
        fields = ", ".join(completed.missing())
        return Reviewed(Reason.HELD_FOR_REVIEW, 0, 0, f"still missing: {fields}")
    return completed
