"""Reviews: decided ones are kept, and what nobody decided does not pile up."""

from __future__ import annotations

from kvstore.core.reviews import ENDED_REVIEWS_MAX, Review, Reviews
from kvstore.core.stats import review_states
from kvstore.testing.workload import fingerprint


def held(reviews: Reviews, number: int) -> Review:
    offered = fingerprint(revision=None, epoch=number)
    return reviews.add(Review(number, "a", offered, created_ns=number))


def test_undecided_reviews_that_ended_are_forgotten_in_time() -> None:
    reviews = Reviews()
    decided = held(reviews, 0)
    decided.state = "approved"
    for number in range(1, ENDED_REVIEWS_MAX + 10):
        reviews.end(held(reviews, number), "ended")
    assert len(list(reviews)) == ENDED_REVIEWS_MAX + 1
    assert reviews.get(0) is decided
    assert reviews.get(1) is None
    assert reviews.held() == []


def test_an_approved_fingerprint_resolves_to_the_complete_one() -> None:
    reviews = Reviews()
    review = held(reviews, 0)
    assert reviews.resolve("a", review.fingerprint) == review.fingerprint
    review.state, review.revision = "approved", "r1"
    assert reviews.resolve("a", review.fingerprint) == fingerprint(revision="r1")
    assert reviews.resolve("b", review.fingerprint) == review.fingerprint, "tenants decide apart"


def test_reviews_are_counted_by_their_states() -> None:
    reviews = Reviews()
    assert review_states(reviews)["held"] == 0
    for number, state in enumerate(("held", "held", "approved", "ended")):
        review = held(reviews, number)
        review.state = state
        if state == "ended":
            reviews.end(review, state)
    assert review_states(reviews) == {"held": 2, "approved": 1, "ended": 1}
    assert review_states(reviews)["held"] == len(reviews.held())
