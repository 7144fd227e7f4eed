"""What a look-up counts: of a hit, the part that its plan loads, and from where."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.hits import GroupPresence, HitRule
from kvstore.model.plan import Plan
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.record import RecordBuilder
from kvstore.model.values import REPORTS_PER_CALL_MAX
from kvstore.policy.links import Link
from kvstore.policy.plan import plan, runs_of
from kvstore.testing.clock import ManualClock
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Call
from kvstore_server.metrics import Metrics
from kvstore_server.reading import ReadCalls

BLOCK_TOKENS, BLOCK_BYTES = 16, 1 << 20
CODES = bytes([1] * 6 + [2] * 2)
"""Six blocks in memory, two on disk."""
TOKENS = len(CODES) * BLOCK_TOKENS
COST = PrefillCost(100.0, 0.0)


def looked_up(disk_bytes_per_second: float, cost: PrefillCost | None) -> tuple[Metrics, Call]:
    """A look-up that found all of `CODES`, weighed and counted."""
    metrics = Metrics()
    tiers = [SimpleNamespace(name="host"), SimpleNamespace(name="disk")]
    links = [
        Link("host", bytes_per_second=1e11),
        Link("disk", bytes_per_second=disk_bytes_per_second),
    ]
    reads = ReadCalls(
        cast(Any, SimpleNamespace(tiers=tiers)),
        cast(Any, SimpleNamespace(metrics=metrics)),
        cast(Any, None),
        "default",
    )
    call = Call(0, RecordBuilder("lookup", "", "default", 0, 0.0), cast(Any, None))
    advice = plan(runs_of(CODES), BLOCK_TOKENS, BLOCK_BYTES, links, cost, TOKENS)
    presence = GroupPresence(CODES, BLOCK_TOKENS, HitRule.PREFIX, 0)
    reads._note(call, [presence], TOKENS, advice)
    return metrics, call


@pytest.mark.parametrize(
    ("disk_bytes_per_second", "cost", "hit", "declined", "tier"),
    [
        pytest.param(1e11, COST, TOKENS, 0, "disk", id="all is fast"),
        pytest.param(1e6, COST, 6 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, "host", id="a slow disk"),
        pytest.param(1e6, None, TOKENS, 0, "disk", id="nothing is weighed"),
    ],
)
def test_only_what_is_worth_loading_is_a_hit(
    disk_bytes_per_second: float, cost: PrefillCost | None, hit: int, declined: int, tier: str
) -> None:
    metrics, call = looked_up(disk_bytes_per_second, cost)
    flat = metrics.flat()
    assert (call.reason, call.tier) == (Reason.HIT, tier)
    assert metrics.hit_tokens("default") == hit
    assert flat[f'kvstore_hit_tokens_total{{tenant="default",tier="{tier}"}}'] == hit
    assert flat.get('kvstore_declined_tokens_total{tenant="default"}', 0) == declined


class Leasing:
    """A store with one read lease a session: the session's own number."""

    clock = ManualClock()

    def leased_bytes(self, session: Any, lease_id: int, blocks: int) -> int:
        return blocks * BLOCK_BYTES if lease_id == session.lease_id else 0

    def release(self, session: Any, lease_ids: Sequence[int]) -> tuple[int, int]:
        return lease_ids.count(session.lease_id), 0


def reading(store: object) -> ReadCalls:
    metrics = Metrics()
    boundary = SimpleNamespace(metrics=metrics)
    limits = SimpleNamespace(leases_per_session_max=10_000)
    return ReadCalls(cast(Any, store), cast(Any, boundary), cast(Any, limits), "default")


def call_of(lease_id: int) -> Call:
    call = Call(0, RecordBuilder("release", "", "default", 0, 0.0), cast(Any, None))
    grants = SimpleNamespace(give_up=lambda nonce: 0)
    call.session = cast(Any, SimpleNamespace(lease_id=lease_id, grants=grants))
    return call


def test_a_session_cannot_make_another_ones_lease_unknown() -> None:
    reads = reading(Leasing())
    for lease_id in (1, 2):
        reads._loads.granted(lease_id, 0, 0)
    asyncio.run(reads.release(pb.ReleaseRequest(lease_ids=[1, 2]), call_of(1)))
    assert list(reads._loads._granted) == [2]


KEY = bytes(32)
REPORTS: dict[str, Any] = {
    "requests": pb.RequestReport(last_key=KEY),
    "audits": pb.AuditReport(key=KEY, blocks=1),
}


@pytest.mark.parametrize("name", REPORTS)
def test_one_release_makes_a_bounded_number_of_records(name: str) -> None:
    reads = reading(Leasing())
    fits = pb.ReleaseRequest()
    getattr(fits, name).extend([REPORTS[name]] * REPORTS_PER_CALL_MAX)
    reads.evidence.check(fits)
    getattr(fits, name).append(REPORTS[name])
    with pytest.raises(BadRequest, match=name) as caught:
        asyncio.run(reads.release(fits, call_of(1)))
    assert (caught.value.reason, caught.value.setting) == (Reason.BAD_SIZE, name)


class Declining:
    """Guards that decline some tiers, and note what they are asked."""

    def __init__(self, *tiers: int) -> None:
        self.tiers = frozenset(tiers)
        self.asked: list[tuple[set[int], bool]] = []

    def declines(
        self, tenant: str, tiers: set[int], now_ns: int, *, trying: bool
    ) -> frozenset[int]:
        self.asked.append((set(tiers), trying))
        return self.tiers & tiers


def guarded(
    guards: Declining, cost: PrefillCost | None, codes: bytes = CODES, *, disk: float = 1e11
) -> Plan:
    reads = reading(SimpleNamespace(guards=guards, clock=ManualClock()))
    links = [Link("host", bytes_per_second=1e11), Link("disk", bytes_per_second=disk)]

    def weigh(tokens: int) -> Plan:
        end = tokens // BLOCK_TOKENS
        return plan(runs_of(codes[:end]), BLOCK_TOKENS, BLOCK_BYTES, links, cost, TOKENS)

    presence = GroupPresence(codes, BLOCK_TOKENS, HitRule.PREFIX, 0)
    return reads._guarded([presence], TOKENS, weigh, trying=True)


def test_guards_are_asked_of_what_a_plan_loads_only() -> None:
    guards = Declining()
    assert guarded(guards, PrefillCost(1e-6, 0.0)).load_blocks == 0
    assert guards.asked == []
    assert guarded(guards, COST, disk=1e6).load_blocks == 6
    assert guards.asked == [({0}, True)], "the disk is not loaded from anyway"
    assert guarded(guards, COST).load_blocks == 8
    assert guards.asked[1:] == [({0, 1}, True)]


def test_what_comes_before_a_tier_that_is_declined_is_loaded() -> None:
    advice = guarded(Declining(1), COST)
    assert (advice.load_blocks, advice.reason) == (6, Reason.OK)
    advice = guarded(Declining(0), COST)
    assert (advice.load_blocks, advice.reason) == (0, Reason.DECLINED_GUARD)


def test_a_hit_that_is_declined_is_none() -> None:
    metrics, call = looked_up(1e11, PrefillCost(1e-6, 0.0))
    assert call.reason is Reason.DECLINED_RECOMPUTE_FASTER
    assert metrics.hit_tokens("default") == 0
    assert metrics.flat()['kvstore_declined_tokens_total{tenant="default"}'] == TOKENS
