"""Durable rows: what decisions look like in the ledger, and the tickets that say when it has them.

Values are JSON. Tables: "epoch" (model name -> floor), "review" (tenant and digest -> decision)
and, where an archive outlives the daemon, "space" (id -> tenant and fingerprint; "next" -> a bound
of the ids that were ever given).
"""

from __future__ import annotations

import json
from typing import Any

from kvstore.core.books import Books
from kvstore.core.effects import Persist
from kvstore.core.reviews import UNKNOWN_NS, Review
from kvstore.core.spaces import Space
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason

NEXT_SPACE = b"next"


class Rows:
    """Emits `Persist` effects. A ticket may stand for several rows."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def ticket(self) -> int:
        """A new ticket."""
        return self.books.next_id("ticket")

    def emit(self, ticket: int, table: str, key: bytes, value: bytes | None) -> None:
        """One row; ticket 0: nobody waits for it."""
        ticket = ticket or self.ticket()
        self.books.tickets[ticket] += 1
        self.books.effects.append(Persist(ticket, table, key, value))

    def epoch(self, ticket: int, model_name: str, epoch: int, why: str) -> None:
        """The floor of a model."""
        self.emit(ticket, "epoch", model_name.encode(), _json({"epoch": epoch, "why": why}))

    def space(self, ticket: int, space: Space) -> None:
        """An OPEN space whose blocks an archive may hold."""
        row = {"tenant": space.tenant, "fingerprint": space.fingerprint.to_dict()}
        self.emit(ticket, "space", b"%d" % space.id, _json(row))

    def no_space(self, ticket: int, space: Space) -> None:
        """The space is closed for good."""
        self.emit(ticket, "space", b"%d" % space.id, None)

    def next_space(self, bound: int) -> None:
        """No space id beyond this one was given."""
        self.emit(0, "space", NEXT_SPACE, b"%d" % bound)

    def review(self, ticket: int, review: Review, wall_s: float) -> None:
        """A decision, or a doubt that waits for one, and since when by the wall clock."""
        row = {
            "tenant": review.tenant,
            "fingerprint": review.fingerprint.to_dict(),
            "state": review.state,
            "who": review.who,
            "why": review.why,
            "revision": review.revision,
            "cause": int(review.cause),
            "doubt": review.doubt,
            "wall_s": wall_s,
        }
        self.emit(ticket, "review", _review_key(review), _json(row))

    def no_review(self, ticket: int, review: Review) -> None:
        """Nothing is to be decided any more."""
        self.emit(ticket, "review", _review_key(review), None)


def read_epoch(value: bytes) -> int:
    """The floor in an "epoch" row."""
    return int(json.loads(value)["epoch"])


def read_space(value: bytes) -> tuple[str, Fingerprint]:
    """Tenant and fingerprint in a "space" row."""
    row = json.loads(value)
    return str(row["tenant"]), Fingerprint.from_dict(row["fingerprint"])


def read_review(value: bytes, review_id: int) -> Review:
    """The decision in a "review" row."""
    row = json.loads(value)
    return Review(
        id=review_id,
        tenant=str(row["tenant"]),
        fingerprint=Fingerprint.from_dict(row["fingerprint"]),
        created_ns=UNKNOWN_NS,
        state=str(row["state"]),
        who=str(row["who"]),
        why=str(row["why"]),
        revision=str(row["revision"]),
        cause=Reason.from_wire(int(row.get("cause", Reason.OK))),
        doubt=str(row.get("doubt", "")),
    )


def _review_key(review: Review) -> bytes:
    return review.tenant.encode() + b"/" + review.fingerprint.digest


def _json(row: dict[str, Any]) -> bytes:
    return json.dumps(row, sort_keys=True).encode()
