"""What results say of themselves: hit, partial, miss, declined; and what a split loads when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore.model.record import Outcome
from kvstore_client.results import NO_ADVICE, Fetched, Hit, LoadAdvice

KEYS = tuple(BlockKey(bytes([n]) * 32) for n in range(10))
ADVICE = LoadAdvice(8, 0, 1.0, 1.0, 2.0, Reason.OK, 1e9)
HIT = Hit(8, 128, bytes(8), KEYS, ADVICE, Reason.MISS_EVICTED)
DECLINED = Reason.DECLINED_RECOMPUTE_FASTER


@pytest.mark.parametrize(
    ("hit", "outcome"),
    [
        (HIT, Outcome.PARTIAL),
        (replace(HIT, keys=KEYS[:8], reason=Reason.OK), Outcome.HIT),
        (replace(HIT, plan=ADVICE._replace(load_blocks=0, reason=DECLINED)), Outcome.DECLINED),
        (replace(HIT, blocks=0, plan=NO_ADVICE), Outcome.MISS),
        (replace(HIT, blocks=0, reason=Reason.UNAVAILABLE), Outcome.FAILED),
        (replace(HIT, blocks=0, reason=Reason.HELD_FOR_REVIEW), Outcome.REFUSED),
    ],
)
def test_a_look_up_is_one_thing(hit: Hit, outcome: Outcome) -> None:
    assert hit.outcome is outcome


@pytest.mark.parametrize(
    ("blocks", "reason", "outcome"),
    [
        (4, Reason.OK, Outcome.HIT),
        (3, Reason.MISS_EVICTED, Outcome.PARTIAL),
        (0, Reason.MISS_EVICTED, Outcome.MISS),
        (0, DECLINED, Outcome.DECLINED),
        (0, Reason.DECLINED_GUARD, Outcome.DECLINED),
        (0, Reason.BREAKER_OPEN, Outcome.FAILED),
    ],
)
def test_a_fetch_is_one_thing(blocks: int, reason: Reason, outcome: Outcome) -> None:
    assert Fetched(blocks, blocks * 16, None, reason).outcome is outcome


def test_a_split_loads_its_head_first_and_its_tail_meanwhile() -> None:
    split = replace(HIT, plan=ADVICE._replace(load_blocks=2, computed_blocks=3, tail_blocks=3))
    assert split.keys_to_load == KEYS[:2]
    assert split.tail_keys == KEYS[5:8]
    assert HIT.tail_keys == ()
    more = replace(HIT, plan=ADVICE._replace(load_blocks=2, computed_blocks=3, tail_blocks=30))
    assert more.tail_keys == KEYS[5:8], "no more than is there"
