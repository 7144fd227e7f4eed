"""Reviews: held fingerprints, what a person decided about them, and until when that is open.

A fingerprint is held because a required field is missing, or because its blocks are doubted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason

ENDED_REVIEWS_MAX = 1_024
"""How many undecided reviews that ended are remembered; decided ones are kept for good."""

UNKNOWN_NS = -1


@dataclass(eq=False)
class Review:
    """One held fingerprint of a tenant. state: held, approved, rejected, expired, ended. cause,
    doubt: of a complete one, what its blocks are doubted for, and in words. created_ns: -1 until it
    is known by this run's clock.
    """

    id: int
    tenant: str
    fingerprint: Fingerprint
    created_ns: int
    state: str = "held"
    who: str = ""
    why: str = ""
    revision: str = ""
    cause: Reason = Reason.OK
    doubt: str = ""

    @property
    def doubts(self) -> bool:
        """Whether the blocks of a complete fingerprint are doubted."""
        return self.cause is not Reason.OK


class Reviews:
    """All reviews by id, and the one that holds for a fingerprint of a tenant."""

    def __init__(self) -> None:
        self._by_id: dict[int, Review] = {}
        self._by_name: dict[tuple[str, bytes], Review] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __iter__(self) -> Iterator[Review]:
        """Oldest first."""
        return iter(sorted(self._by_id.values(), key=lambda review: review.id))

    def get(self, review_id: int) -> Review | None:
        """The review with this id."""
        return self._by_id.get(review_id)

    def find(self, tenant: str, fingerprint: Fingerprint) -> Review | None:
        """The review that holds for this offer: undecided, approved or rejected."""
        return self._by_name.get((tenant, fingerprint.digest))

    def add(self, review: Review) -> Review:
        """A new one, or one of an earlier run."""
        self._by_id[review.id] = review
        self._by_name[review.tenant, review.fingerprint.digest] = review
        return review

    def held(self) -> list[Review]:
        """The undecided ones."""
        return [review for review in self._by_name.values() if review.state == "held"]

    def resolve(self, tenant: str, fingerprint: Fingerprint) -> Fingerprint:
        """The fingerprint, completed if an operator vouched for its weights."""
        review = self.find(tenant, fingerprint)
        if review is not None and review.state == "approved" and not review.doubts:
            return fingerprint.complete(review.revision)
        return fingerprint

    def doubted(self, tenant: str, fingerprint: Fingerprint) -> Review | None:
        """What keeps a complete fingerprint's blocks from everybody: undecided, or rejected where
        the model itself was doubted, not the device.
        """
        review = self.find(tenant, fingerprint)
        if review is None or not review.doubts:
            return None
        refused = review.state == "rejected" and review.cause is not Reason.MISS_CORRUPT
        return review if refused or review.state == "held" else None

    def end(self, review: Review, state: str) -> None:
        """Nobody decided it; a later offer begins a new one."""
        review.state = state
        del self._by_name[review.tenant, review.fingerprint.digest]
        self._ended[review.id] = None
        if len(self._ended) > ENDED_REVIEWS_MAX:
            oldest, _ = self._ended.popitem(last=False)
            del self._by_id[oldest]
