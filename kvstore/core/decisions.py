"""What people decide: opening and closing spaces, weight epochs, reviews, invalidation, pins.

A decision takes hold at once and for good. Its durable row is emitted with a ticket; the shell
answers the operator when the row is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core.books import Books
from kvstore.core.effects import Persist
from kvstore.core.leases import GroupKey, LeaseKind, ReadLease, Session
from kvstore.core.moves import Moves
from kvstore.core.pools import Slot, release_holds
from kvstore.core.spaces import Space
from kvstore.core.states import SlotState, SpaceState
from kvstore.model.fingerprint import Difference, Fingerprint, Verdict
from kvstore.model.layout import Layout, layout_of
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.values import (
    Dropped,
    EpochSet,
    Opening,
    Pinned,
    Reviewed,
    ReviewRow,
)

READY = SlotState.READY
OPEN, HELD, CLOSED = SpaceState

SPACE_IDS_AHEAD = 1_024
"""Space ids are set aside on disk in such steps, so that none is used twice over restarts."""


@dataclass(eq=False)
class Review:
    """One held fingerprint of a tenant. state: held, approved, rejected, expired, ended."""

    id: int
    tenant: str
    fingerprint: Fingerprint
    created_ns: int
    state: str = "held"
    who: str = ""
    why: str = ""
    revision: str = ""

    @property
    def name(self) -> tuple[str, bytes]:
        """What later offers are matched by."""
        return self.tenant, self.fingerprint.digest


class Decisions:
    """See the module's docstring."""

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves
        self.floors: dict[str, int] = {}
        self.all_reviews: dict[int, Review] = {}
        self.by_name: dict[tuple[str, bytes], Review] = {}
        self._space_ids_until = 0

    # ------------------------------------------------------------------ open

    def open(self, session: Session, fingerprint: Fingerprint, now_ns: int) -> Opening:
        """Binds a fingerprint to a space, which is made if it is new."""
        offer = self.judge(session.tenant, session.group, fingerprint)
        if offer.layout is None or offer.space_id:
            if offer.space_id:
                self._space(offer.space_id).used_ns = now_ns
            return offer
        if len(self.books.spaces) >= self.books.limits.spaces_max and not self._evict_space():
            return offer._replace(
                verdict=Verdict.INCOMPATIBLE,
                reason=Reason.LIMIT_QUEUE,
                layout=None,
                detail="as many spaces as allowed are in use; use fewer fingerprints",
            )
        held = offer.verdict is Verdict.HELD
        resolved = self._resolved(session.tenant, fingerprint)
        space = self._add_space(
            self._new_space_id(),
            session.tenant,
            session.group if held else b"",
            resolved,
            offer.layout,
            now_ns,
        )
        if held:
            space.review_id = self._review_of(session.tenant, fingerprint, now_ns).id
        elif self.books.archives:
            self._persist_space(space, 0)
        return offer._replace(space_id=space.id, review_id=space.review_id)

    def judge(self, tenant: str, group: bytes, fingerprint: Fingerprint) -> Opening:
        """The answer to an offer, without opening anything. space_id 0 with a layout: a new one."""
        resolved = self._resolved(tenant, fingerprint)
        digest, missing = resolved.digest, resolved.missing()
        try:
            layout = layout_of(resolved)
        except BadRequest as error:
            return _refused(digest, missing, error.reason, (), str(error))
        identity = resolved.identity
        floor = self.floors.get(identity.model_name, 0)
        if identity.weight_epoch < floor:
            stale = Difference("identity.weight_epoch", floor, identity.weight_epoch, "identity")
            return _refused(digest, missing, Reason.MISS_EPOCH_STALE, (stale,))
        if not missing:
            known = self.books.spaces.find(tenant, digest, b"")
            if known is not None:
                return Opening(known.id, Verdict.MATCH, Reason.OK, (), digest, 0, (), layout)
            nearest = self.books.spaces.nearest(tenant, resolved)
            differences = () if nearest is None else nearest[1]
            return Opening(0, Verdict.MATCH, Reason.OK, differences, digest, 0, (), layout)
        review = self.by_name.get((tenant, digest))
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

    def _resolved(self, tenant: str, fingerprint: Fingerprint) -> Fingerprint:
        """The fingerprint, completed if an operator vouched for it."""
        review = self.by_name.get((tenant, fingerprint.digest))
        if review is not None and review.state == "approved":
            return fingerprint.complete(review.revision)
        return fingerprint

    def _add_space(
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
            self._persist(0, "space", b"next", str(self._space_ids_until).encode())
        return space_id

    def _space(self, space_id: int) -> Space:
        space = self.books.spaces.get(space_id)
        assert space is not None
        return space

    def _evict_space(self) -> bool:
        """Closes the space that is empty and was opened longest ago; not with an archive, which may
        hold blocks of it.
        """
        if self.books.archives:
            return False
        empty = [s for s in self.books.spaces if not s.index and s.state is OPEN]
        if empty:
            self.close(min(empty, key=lambda s: s.used_ns), Reason.MISS_EVICTED, 0, 0)
        return bool(empty)

    # ------------------------------------------------------------------ close, drop

    def close(self, space: Space, why: Reason, ticket: int, now_ns: int) -> int:
        """OPEN | HELD -> CLOSED: every block of it is invisible from now on. Returns READY ones."""
        blocks = space.blocks
        was_open = space.state is OPEN
        self.books.spaces.remove(space, why)
        for slot in list(space.index.values()):
            self.moves.drop(slot, why, now_ns)
        if was_open and self.books.archives:
            self.moves.forget(space.id, b"")
            self._persist(ticket, "space", b"%d" % space.id, None)
        return blocks

    def end_group(self, group_key: GroupKey, now_ns: int) -> None:
        """The last session of a group has ended: its held spaces die with it."""
        for space in self.books.spaces.held_by(group_key):
            self.close(space, Reason.MISS_INVALIDATED, 0, now_ns)
            self._end_review(space.review_id, "ended")

    def _end_review(self, review_id: int, state: str) -> None:
        review = self.all_reviews.get(review_id)
        if review is not None and review.state == "held" and not self._held_spaces(review):
            review.state = state
            del self.by_name[review.name]

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
        chosen = [
            space
            for space in self.books.spaces
            if (tenant is None or space.tenant == tenant)
            and (space_id is None or space.id == space_id)
            and (model_name is None or space.fingerprint.identity.model_name == model_name)
        ]
        if keys is not None:
            if space_id is None:
                raise BadRequest(Reason.BAD_REQUEST, "keys need a space", "space_id")
            return Dropped(sum(self._drop_keys(s, keys, now_ns) for s in chosen), len(chosen), 0)
        ticket = self._new_ticket() if self.books.archives and chosen else 0
        blocks = sum(self.close(s, Reason.MISS_INVALIDATED, ticket, now_ns) for s in chosen)
        for space in chosen:
            self._end_review(space.review_id, "ended")
        if not self.books.tickets[ticket]:
            ticket = 0
        return Dropped(blocks, len(chosen), ticket)

    def _drop_keys(self, space: Space, keys: Sequence[bytes], now_ns: int) -> int:
        dropped = 0
        for key in keys:
            slot = space.index.get(key)
            if slot is not None:
                dropped += slot.state is READY
                self.moves.drop(slot, Reason.MISS_INVALIDATED, now_ns)
            else:
                self.books.ghosts.add(space.id, key, Reason.MISS_INVALIDATED, now_ns)
            self.moves.forget(space.id, key)
        return dropped

    def set_epoch(self, model_name: str, epoch: int, why: str, now_ns: int) -> EpochSet:
        """Raises the floor of a model; older spaces are closed."""
        current = self.floors.get(model_name, 0)
        if epoch <= current:
            return EpochSet(current, 0, 0, 0)
        self.floors[model_name] = epoch
        ticket = self._new_ticket()
        row = json.dumps({"epoch": epoch, "why": why}).encode()
        self._persist(ticket, "epoch", model_name.encode(), row)
        stale = [
            space
            for space in self.books.spaces
            if space.fingerprint.identity.model_name == model_name
            and space.fingerprint.identity.weight_epoch < epoch
        ]
        blocks = sum(self.close(s, Reason.MISS_EPOCH_STALE, ticket, now_ns) for s in stale)
        for space in stale:
            self._end_review(space.review_id, "ended")
        return EpochSet(epoch, len(stale), blocks, ticket)

    # ------------------------------------------------------------------ reviews

    def _review_of(self, tenant: str, fingerprint: Fingerprint, now_ns: int) -> Review:
        review = self.by_name.get((tenant, fingerprint.digest))
        if review is None:
            review = Review(self.books.next_id("review"), tenant, fingerprint, now_ns)
            self.all_reviews[review.id] = review
            self.by_name[review.name] = review
        return review

    def _held_spaces(self, review: Review) -> list[Space]:
        return [
            space
            for space in self.books.spaces.of_tenant(review.tenant)
            if space.state is HELD and space.review_id == review.id
        ]

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
        """Decides a held fingerprint, for good and for later offers of it too."""
        review = self.all_reviews.get(review_id)
        if review is None or review.state != "held":
            state = "unknown" if review is None else review.state
            return Reviewed(Reason.BAD_REQUEST, 0, 0, f"review {review_id} is {state}")
        completed = None
        if approve:
            try:
                completed = review.fingerprint.complete(revision)
            except BadRequest as error:
                return Reviewed(error.reason, 0, 0, error.detail)
            if completed.missing():
                fields = ", ".join(completed.missing())
                return Reviewed(Reason.HELD_FOR_REVIEW, 0, 0, f"still missing: {fields}")
        review.state = "approved" if approve else "rejected"
        review.who, review.why, review.revision = who, why, revision if approve else ""
        ticket = self._new_ticket()
        self._persist_review(review, wall_s, ticket)
        held = sorted(self._held_spaces(review), key=lambda space: -space.blocks)
        space_id = 0
        if completed is not None:
            space_id = self._complete(held, completed, ticket)
        for space in held:
            if space.state is HELD:
                self.close(space, Reason.REJECTED_BY_REVIEW, ticket, now_ns)
        return Reviewed(Reason.OK, space_id, ticket)

    def _complete(self, held: list[Space], completed: Fingerprint, ticket: int) -> int:
        """The fullest held space becomes the one that readers of the complete fingerprint find,
        unless there is one.
        """
        if not held:
            return 0
        known = self.books.spaces.find(held[0].tenant, completed.digest, b"")
        if known is not None:
            return known.id
        if completed.identity.weight_epoch < self.floors.get(completed.identity.model_name, 0):
            return 0
        self.books.spaces.complete(held[0], completed)
        if self.books.archives:
            self._persist_space(held[0], ticket)
        return held[0].id

    def reviews(self, include_decided: bool) -> list[ReviewRow]:
        """The reviews, oldest first."""
        return [
            ReviewRow(
                review.id,
                review.tenant,
                review.fingerprint,
                review.fingerprint.missing(),
                review.state,
                sum(space.blocks for space in self._held_spaces(review)),
                review.created_ns,
                review.who,
                review.why,
                review.revision,
            )
            for review in self.all_reviews.values()
            if include_decided or review.state == "held"
        ]

    def expire_reviews(self, now_ns: int) -> int | None:
        """Drops what nobody decided in time; returns when the next one is due."""
        ttl_ns = self.books.limits.review_ttl_ns
        next_ns: int | None = None
        for review in list(self.by_name.values()):
            if review.state != "held":
                continue
            due_ns = review.created_ns + ttl_ns
            if due_ns > now_ns:
                next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
                continue
            for space in self._held_spaces(review):
                self.close(space, Reason.MISS_INVALIDATED, 0, now_ns)
            self._end_review(review.id, "expired")
        return next_ns

    # ------------------------------------------------------------------ pins

    def pin(self, tenant: str | None, space_id: int, keys: Sequence[bytes], now_ns: int) -> Pinned:
        """Holds the leading READY keys until unpinned, or until the blocks are invalidated."""
        space = self.books.spaces.get(space_id)
        if space is None or (tenant is not None and space.tenant != tenant):
            return Pinned(0, 0, Reason.SPACE_UNKNOWN)
        pin = ReadLease(LeaseKind.PIN, None, space, None)
        reason = Reason.OK
        for key in keys:
            slot = space.index.get(key)
            if slot is None or slot.state is not READY:
                reason = Reason.MISS_NEVER_STORED if slot is None else Reason.MISS_IN_PROGRESS
                break
            if not slot.pins and not self._may_pin(slot):
                reason = Reason.PIN_LIMIT
                break
            slot.pool.pinned_bytes += 0 if slot.pins else slot.pool.slot_bytes
            slot.pins += 1
            slot.holds += 1
            pin.slots.append(slot)
        if not pin.slots:
            return Pinned(0, 0, reason)
        self.books.pins[self.books.leases.add(pin)] = pin
        return Pinned(pin.id, len(pin.slots), reason)

    def _may_pin(self, slot: Slot) -> bool:
        arena = self.books.arenas[slot.pool.tier]
        assert arena is not None
        pinned = sum(pool.pinned_bytes for pool in arena.pools.values())
        allowed = arena.capacity_bytes * self.books.limits.pinned_share
        return pinned + slot.pool.slot_bytes <= allowed

    def unpin(self, pin_id: int) -> bool:
        """Ends a pin; False if there is none."""
        pin = self.books.pins.pop(pin_id, None)
        if pin is None:
            return False
        for slot in pin.slots:
            if slot is not None:
                slot.pins -= 1
                if not slot.pins:
                    slot.pool.pinned_bytes -= slot.pool.slot_bytes
        self.books.leases.remove(pin)
        release_holds(pin.slots)
        return True

    # ------------------------------------------------------------------ durable rows

    def _new_ticket(self) -> int:
        return self.books.next_id("ticket")

    def _persist(self, ticket: int, table: str, key: bytes, value: bytes | None) -> None:
        ticket = ticket or self._new_ticket()
        self.books.tickets[ticket] += 1
        self.books.effects.append(Persist(ticket, table, key, value))

    def _persist_space(self, space: Space, ticket: int) -> None:
        row = {"tenant": space.tenant, "fingerprint": space.fingerprint.to_dict()}
        self._persist(ticket, "space", b"%d" % space.id, json.dumps(row).encode())

    def _persist_review(self, review: Review, wall_s: float, ticket: int) -> None:
        row = {
            "tenant": review.tenant,
            "fingerprint": review.fingerprint.to_dict(),
            "state": review.state,
            "who": review.who,
            "why": review.why,
            "revision": review.revision,
            "wall_s": wall_s,
        }
        key = review.tenant.encode() + b"/" + review.fingerprint.digest
        self._persist(ticket, "review", key, json.dumps(row).encode())

    def restore(self, rows: Iterable[tuple[str, bytes, bytes]]) -> None:
        """Takes the durable rows back, before anything else. KeyError, ValueError or BadRequest: a
        row that no version of this code has written.
        """
        spaces: list[tuple[int, dict[str, Any]]] = []
        for table, key, value in rows:
            if table == "epoch":
                self.floors[key.decode()] = int(json.loads(value)["epoch"])
            elif table == "review":
                self._restore_review(json.loads(value))
            elif table == "space" and key == b"next":
                self._space_ids_until = int(value)
                self.books.skip_ids("space", self._space_ids_until)
            elif table == "space":
                spaces.append((int(key), json.loads(value)))
        for space_id, row in spaces:
            self.books.skip_ids("space", space_id)
            self._restore_space(space_id, row)

    def _restore_review(self, row: dict[str, Any]) -> None:
        fingerprint = Fingerprint.from_dict(row["fingerprint"])
        review = Review(self.books.next_id("review"), row["tenant"], fingerprint, 0, row["state"])
        review.who, review.why, review.revision = row["who"], row["why"], row["revision"]
        self.all_reviews[review.id] = review
        self.by_name[review.name] = review

    def _restore_space(self, space_id: int, row: dict[str, Any]) -> None:
        """A space whose blocks an archive may hold. Not that of a tenant that is gone, nor one that
        an epoch has closed.
        """
        fingerprint = Fingerprint.from_dict(row["fingerprint"])
        identity = fingerprint.identity
        stale = identity.weight_epoch < self.floors.get(identity.model_name, 0)
        if row["tenant"] in self.books.tenants and not stale and self.books.archives:
            self._add_space(space_id, row["tenant"], b"", fingerprint, layout_of(fingerprint), 0)


def _refused(
    digest: bytes,
    missing: tuple[str, ...],
    reason: Reason,
    differences: tuple[Difference, ...],
    detail: str = "",
) -> Opening:
    return Opening(0, Verdict.INCOMPATIBLE, reason, differences, digest, 0, missing, None, detail)
