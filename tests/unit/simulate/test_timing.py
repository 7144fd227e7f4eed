"""Time against no cache: by hand on small cases, and never above computing where a plan decides."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.model.cost import PrefillCost
from kvstore.simulate.timing import ALWAYS, GATE, SPLIT, WAYS, TimeModel, Timing
from kvstore.simulate.trace import Request

HOST, DISK = 0, 1
US = 1e-3


def engine(disk_us_per_token: float = 20.0, *, a: float = 10.0, b: float = 0.0) -> Timing:
    """1 kB a token; memory takes 1 us a token."""
    rates = (1e9, 1_000 / disk_us_per_token * 1e6)
    return Timing(TimeModel("made", PrefillCost(a, b), 1_000, rates))


def request(*blocks: int) -> Request:
    return Request(0, sum(blocks), list(range(len(blocks))), list(blocks))


def test_a_disk_slower_than_computing_is_loaded_by_always_alone() -> None:
    timing = engine()
    timing.add(request(100, 100, 100, 50), [HOST, DISK])
    assert timing.compute_ms == pytest.approx(3_500 * US)
    # Memory 100 us, disk 2,000 us, 150 tokens computed; or 250 computed.
    assert timing.total_ms[ALWAYS] == pytest.approx((100 + 2_000 + 1_500) * US)
    assert timing.total_ms[GATE] == pytest.approx((100 + 2_500) * US)
    # The disk's tail takes as long as its head takes to compute: 20 x = 10 (100 - x).
    cut = (33 * 20, 67 * 10)
    assert timing.total_ms[SPLIT] == pytest.approx((100 + max(cut) + 1_500) * US)
    assert timing.slower == {ALWAYS: 1, GATE: 0, SPLIT: 0}
    assert timing.worst[ALWAYS] == pytest.approx(3_600 / 3_500)
    assert timing.loaded_tokens == {ALWAYS: 200, GATE: 100, SPLIT: 133}
    assert timing.against_no_cache(GATE) == pytest.approx(2_600 / 3_500)


def test_what_is_not_cached_is_computed() -> None:
    timing = engine(b=0.01)
    timing.add(request(64, 64), [])
    timing.add(request(), [])
    alone_ms = (10 * 128 + 0.01 * 128**2) * US
    assert timing.total_ms == pytest.approx(dict.fromkeys(WAYS, alone_ms))
    assert timing.requests == 2
    assert timing.as_fields()["ways"][GATE]["declined_tokens"] == 0


def test_a_plan_never_loses_whatever_the_hits() -> None:
    for seed in range(20):
        random = Random(seed)
        timing = engine(random.uniform(1, 60), a=random.uniform(0, 30), b=random.uniform(1e-4, 0.1))
        for _ in range(50):
            blocks = [random.randint(1, 512) for _ in range(random.randint(1, 30))]
            tiers = [random.choice((HOST, DISK)) for _ in range(random.randint(0, len(blocks)))]
            timing.add(request(*blocks), tiers)
        assert timing.slower[GATE] == timing.slower[SPLIT] == 0, seed
        assert timing.total_ms[GATE] <= timing.total_ms[ALWAYS] * (1 + 1e-12), seed
