"""Which requests of a session are remembered to be held out."""

from __future__ import annotations

from kvstore.model.reasons import Reason
from kvstore.store.withheld import REQUESTS_MAX, Withheld

HELD = Reason.DECLINED_HOLDOUT


def test_what_was_held_out_stays_so_until_it_is_served() -> None:
    withheld = Withheld()
    withheld.note("a", HELD)
    assert (withheld.why("a"), withheld.why("b")) == (HELD, None)
    withheld.served("a")
    withheld.served("never seen")
    assert withheld.why("a") is None


def test_a_request_without_a_name_is_not_remembered() -> None:
    withheld = Withheld()
    withheld.note("", HELD)
    assert withheld.why("") is None


def test_only_the_latest_are_remembered() -> None:
    withheld = Withheld()
    withheld.note("again", HELD)
    for number in range(REQUESTS_MAX - 1):
        withheld.note(str(number), HELD)
    withheld.note("again", HELD)
    withheld.note("one more", HELD)
    assert withheld.why("0") is None
    assert withheld.why("again") is HELD
