"""A pool that may use more: growth is taken at once, and never taken back."""

from __future__ import annotations

from kvstore.core.core import Core
from kvstore.core.effects import Copy
from kvstore.model.fingerprint import Encoding, Fingerprint, Geometry, Identity
from kvstore.model.reasons import Reason
from kvstore.model.values import TenantSpec, TierKind, TierSpec

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
