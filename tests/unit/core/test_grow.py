"""A pool that may use more: growth is taken at once, and never taken back."""

from __future__ import annotations

from kvstore.core.core import Core
from kvstore.core.effects import Copy
from kvstore.model.fingerprint import Encoding, Fingerprint, Geometry, Identity
from kvstore.model.reasons import Reason
from kvstore.model.values import TenantSpec, TierKind, TierSpec
from tests.unit.core.harness import SECOND, Bench, keys

MIB = 1 << 20
MODEL = Fingerprint(
    Identity("m", weights_revision="r", config_digest="c"),
    Geometry("gqa", layers=16, kv_heads=1, head_size=64),
    Encoding("bfloat16", block_tokens=16, element_order="layer_kv_head_token_dim"),
)
"""64 KiB a block."""


def put(core: Core, session: int, space_id: int, count: int, salt: int) -> int:
    """Puts `count` fresh blocks; returns how many became visible."""
    keys = [bytes([salt]) + number.to_bytes(31, "big") for number in range(count)]
    stored = 0
    while True:
        reserved = core.reserve(session, space_id, keys, 0, 0, 0, 10**12, 0)
        if not reserved.lease_id:
            return stored
        core.commit(session, reserved.lease_id, False, 0)
        for effect in core.effects():
            if isinstance(effect, Copy):
                core.done(effect.copy_id, True, Reason.OK, b"", 1, 0)
        stored += core.settle_commit(reserved.lease_id, 0).visible


def test_a_grown_pool_keeps_more_blocks() -> None:
    core = Core(
        [TierSpec("host", TierKind.POOL, 4 * MIB, ingest=True)], [TenantSpec("a"), TenantSpec("b")]
    )
    session = core.begin_session("a", b"g", 0)
    space_id = core.open(session, MODEL, 0).space_id
    put(core, session, space_id, 200, 1)
    (before,) = core.stats().pools
    assert before.blocks * 65_536 <= 4 * MIB

    core.grow(0, 16 * MIB, 0)
    core.check()
    put(core, session, space_id, 200, 2)
    core.check()
    (after,) = core.stats().pools
    assert after.capacity_bytes == 16 * MIB
    assert after.blocks > 2 * before.blocks
    assert core.stats().tenants[0].quota_bytes == 8 * MIB


def test_a_pool_never_shrinks() -> None:
    core = Core([TierSpec("host", TierKind.POOL, 4 * MIB, ingest=True)], [TenantSpec("a")])
    core.grow(0, MIB, 0)
    assert core.stats().pools[0].capacity_bytes == 4 * MIB


def test_while_growth_is_paused_loads_use_the_slots_of_what_is_evicted() -> None:
    bench = Bench(slots=16, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4, "first"))
    regions = len(bench.assigned())
    bench.core.pause_growth(bench.host, True, bench.now_ns)
    prompt = keys(4, "on disk")
    below = dict.fromkeys(prompt, bench.disk)
    lease = bench.acquire(session, space, prompt, below=below, wait=True).lease_id
    bench.settle_all()
    bench.core.release(session, [lease], bench.now_ns)
    assert bench.have(session, space, prompt) == [True] * 4
    assert bench.have(session, space, keys(4, "first")) == [False] * 4
    other = bench.session(group=b"another")
    reserved = bench.reserve(other, space, keys(2, "second"))
    bench.run()
    assert reserved.reason is Reason.STAGING_BUSY, "staging is memory too"
    assert bench.have(session, space, prompt) == [True] * 4, "nobody gives memory up for it"
    assert len(bench.assigned()) == regions
    bench.core.pause_growth(bench.host, False, bench.now_ns)
    bench.pass_time(SECOND)
    assert bench.put(other, space, keys(2, "second")) == 2
    assert len(bench.assigned()) > regions


def test_what_was_claimed_before_a_pause_is_given_after_it() -> None:
    bench = Bench(slots=16, tenants=(TenantSpec("a"), TenantSpec("b")), sessions=2)
    rich, poor = bench.session("a"), bench.session("b")
    bench.put(rich, bench.space(rich), keys(16))
    bench.hold_regions = True
    space = bench.space(poor)
    bench.put(poor, space, keys(2, "b"))
    bench.run()
    assert bench.closing, "the rich one gives a region up"
    regions = len(bench.assigned())
    bench.core.pause_growth(bench.host, True, bench.now_ns)
    bench.let_go()
    bench.let_go()
    assert len(bench.assigned()) == regions
    bench.core.pause_growth(bench.host, False, bench.now_ns)
    bench.run()
    assert len(bench.assigned()) > regions
