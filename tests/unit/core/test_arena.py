"""Regions: how bytes are cut, who gets the next region, and who has to give one up."""

from __future__ import annotations

import pytest

from kvstore.core.arena import Arena, header_bytes, slots_within
from kvstore.core.effects import Assign, Copy, Unassign
from kvstore.model.reasons import Reason
from kvstore.model.values import (
    PAGE_BYTES,
    CoreLimits,
    Region,
    TenantSpec,
    TierKind,
    TierSpec,
)
from kvstore.policy.lru import Lru
from tests.unit.core.harness import BLOCK, KIB, SECOND, Bench, keys, pool_bytes

MIB = 1024 * KIB
TWO = (TenantSpec("a"), TenantSpec("b"))


def regions(bench: Bench) -> list[Region]:
    """The regions that were assigned, in order."""
    return [effect.region for effect in bench.assigned()]


# ---------------------------------------------------------------- geometry


def test_a_header_has_a_generation_a_slot_in_whole_pages() -> None:
    assert [header_bytes(slots) for slots in (1, 512, 513)] == [4096, 4096, 8192]


@pytest.mark.parametrize("slot_bytes", [4 * KIB, 12 * KIB, MIB])
@pytest.mark.parametrize("total_bytes", [0, 4 * KIB, 8 * KIB, 100 * KIB, 3 * MIB + 4096, 64 * MIB])
def test_slots_within_is_the_most_that_fits(slot_bytes: int, total_bytes: int) -> None:
    slots = slots_within(total_bytes, slot_bytes)
    assert header_bytes(slots) + slots * slot_bytes <= total_bytes or slots == 0
    assert header_bytes(slots + 1) + (slots + 1) * slot_bytes > total_bytes


def test_a_region_is_a_share_of_the_pool() -> None:
    bench = Bench(capacity_bytes=64 * MIB, limits=CoreLimits(staging_bytes=MIB))
    session = bench.session()
    bench.put(session, bench.space(session), keys(1))
    (region,) = regions(bench)
    assert (region.total_bytes, region.slots, region.header_bytes) == (MIB, 255, PAGE_BYTES)


def test_a_region_has_four_slots_even_if_they_are_large() -> None:
    bench = Bench(capacity_bytes=64 * MIB, limits=CoreLimits(staging_bytes=MIB))
    session = bench.session()
    space = bench.space(session, block_tokens=4096)
    bench.put(session, space, keys(1))
    (region,) = regions(bench)
    assert (region.slot_bytes, region.slots) == (MIB, 4)
    assert region.total_bytes == 4 * MIB + PAGE_BYTES


@pytest.mark.parametrize(
    ("capacity_bytes", "slot_bytes"),
    [
        (10 * 10**9, MIB),
        (1000 * MIB, MIB),
        (30 * 1024 * MIB, 3 * MIB),
        (200 * MIB, 36 * KIB),
        (7 * MIB, MIB),
    ],
)
def test_regions_of_whole_granules_have_room_for_what_they_hold(
    capacity_bytes: int, slot_bytes: int
) -> None:
    """The slots alone lie in memory that comes in granules, each region in granules of its own."""
    granule = 2 * MIB
    spec = TierSpec("device", TierKind.POOL, capacity_bytes, granule_bytes=granule)
    arena = Arena(0, spec, [TenantSpec("a")], CoreLimits(), lambda tenant, size: Lru())
    pool = arena.pool("a", slot_bytes)
    made_bytes = 0
    while (shape := arena.shape(slot_bytes, arena.room_bytes(pool))) is not None:
        region = arena.add_region(len(arena.regions) + 1, pool, shape, 0)
        assert region.total_bytes % granule == 0
        made_bytes += -(-region.slots * slot_bytes // granule) * granule
    assert made_bytes <= capacity_bytes
    assert arena.free_bytes < granule + slot_bytes + PAGE_BYTES
    if capacity_bytes > 100 * MIB:
        used_bytes = sum(len(one.slots) for one in arena.regions.values()) * slot_bytes
        assert used_bytes > 0.9 * capacity_bytes, "little is lost by it"


def test_the_last_region_is_smaller_so_that_the_capacity_is_used() -> None:
    bench = Bench(slots=11)
    session = bench.session()
    space = bench.space(session)
    assert bench.put(session, space, keys(11)) == 11
    assert [region.slots for region in regions(bench)] == [4, 4, 3]
    assert bench.core.stats().pools[0].used_bytes == bench.core.tiers[0].capacity_bytes


def test_one_slot_is_enough_where_four_do_not_fit() -> None:
    bench = Bench(capacity_bytes=6 * BLOCK)
    session = bench.session()
    space = bench.space(session, block_tokens=48)
    assert bench.put(session, space, keys(1)) == 0, "block and staging do not fit"
    assert bench.reserve(session, space, keys(1)).reason is Reason.NO_SPACE
    bench = Bench(capacity_bytes=8 * BLOCK)
    session = bench.session()
    space = bench.space(session, block_tokens=48)
    assert bench.put(session, space, keys(1)) == 1
    assert [region.slots for region in regions(bench)] == [1]


def test_the_header_of_a_region_starts_at_generation_zero() -> None:
    bench = Bench(slots=4)
    session = bench.session()
    bench.put(session, bench.space(session), keys(4))
    lease = bench.acquire(session, 1, keys(4)).lease_id
    places = bench.core.settle(lease, bench.now_ns).places
    assert [place.generation for place in places if place] == [1] * 4


# ---------------------------------------------------------------- tenants and quotas


def shared(slots: int = 16, tenants: tuple[TenantSpec, ...] = TWO) -> tuple[Bench, list[int]]:
    """A pool that tenant a has filled, and a session and space of each tenant."""
    bench = Bench(slots=slots, sessions=2, tenants=tenants)
    one, two = bench.session("a"), bench.session("b")
    first, second = bench.space(one), bench.space(two)
    bench.put(two, second, keys(1, "warm up staging"))
    bench.core.invalidate(space_id=second, keys=keys(1, "warm up staging"), now_ns=bench.now_ns)
    bench.put(one, first, keys(slots))
    return bench, [one, first, two, second]


def test_more_than_its_quota_is_used_while_nobody_else_needs_it() -> None:
    bench, (one, first, _, _) = shared()
    assert sum(bench.have(one, first, keys(16))) == 12, "all but the region of the other tenant"


def test_a_tenant_gets_its_quota_back_and_not_more() -> None:
    bench, (one, first, two, second) = shared()
    for index in range(30):
        bench.put(two, second, keys(1, f"block {index}"))
    used = {tenant.tenant: tenant for tenant in bench.core.stats().tenants}
    assert used["b"].used_bytes <= used["b"].quota_bytes
    assert used["a"].used_bytes >= used["a"].quota_bytes - 5 * BLOCK
    assert used["b"].blocks >= 8
    assert bench.use(one, first, keys(16)) >= 4


def test_within_its_quota_a_tenant_loses_nothing_to_another() -> None:
    bench, (_, _, two, second) = shared()
    for index in range(30):
        bench.put(two, second, keys(1, f"block {index}"))
    kept = bench.core.stats().tenants[0].used_bytes
    for index in range(60):
        bench.put(two, second, keys(1, f"more {index}"))
    assert bench.core.stats().tenants[0].used_bytes == kept


def flooded(rounds: int, wait_ns: int) -> tuple[Bench, list[int]]:
    """A pool that tenant a goes on flooding while tenant b puts a prompt now and then."""
    bench, (one, first, two, second) = shared(64)
    bench.checks = False
    for number in range(rounds):
        for flood in range(5):
            bench.put(one, first, keys(4, f"flood {number} {flood}"))
        bench.pass_time(wait_ns)
        for flood in range(5):
            bench.put(one, first, keys(4, f"more {number} {flood}"))
        bench.put(two, second, keys(4, f"prompt {number}"))
    bench.core.check()
    return bench, [two, second]


@pytest.mark.parametrize("wait_ns", [SECOND // 10, 2 * SECOND, 100 * SECOND])
def test_a_tenant_that_asks_rarely_comes_to_its_quota_beside_a_flood(wait_ns: int) -> None:
    bench, _ = flooded(20, wait_ns)
    used = {tenant.tenant: tenant for tenant in bench.core.stats().tenants}
    assert 28 <= used["b"].blocks <= 32
    assert used["b"].used_bytes <= used["b"].quota_bytes


@pytest.mark.parametrize("wait_ns", [SECOND // 10, 2 * SECOND])
def test_who_comes_to_its_quota_loses_nothing_meanwhile(wait_ns: int) -> None:
    bench, (two, second) = flooded(7, wait_ns)
    lost = [n for n in range(7) if not all(bench.have(two, second, keys(4, f"prompt {n}")))]
    assert lost in ([], [0]), "what came first may have gone before anything was asked for"


def test_a_put_asks_for_as_many_regions_as_it_fills() -> None:
    """Of four slots each; a put of ten blocks once had one of them, and lost blocks."""
    bench = Bench(
        capacity_bytes=pool_bytes(128) + 40 * BLOCK,
        tenants=TWO,
        limits=CoreLimits(staging_bytes=16 * BLOCK, staging_share=0.9),
    )
    one, two = bench.session("a"), bench.session("b")
    first, second = bench.space(one), bench.space(two)
    bench.put(two, second, keys(1, "its staging"))
    for number in range(20):
        bench.put(one, first, keys(10, f"flood {number}"))
    prompts = [keys(10, f"prompt {number}") for number in range(5)]
    bench.put(two, second, keys(10, "comes too early"))
    for prompt in prompts:
        bench.put(two, second, prompt)
    assert all(all(bench.have(two, second, prompt)) for prompt in prompts)


def test_the_coldest_region_without_a_hold_goes() -> None:
    bench, (one, first, two, second) = shared()
    warm = keys(16)[:4]
    held = bench.acquire(one, first, keys(16)[4:8]).lease_id
    bench.use(one, first, warm)
    for index in range(10):
        bench.put(two, second, keys(1, f"block {index}"))
    assert bench.have(one, first, keys(16)[:8]) == [True] * 8
    assert not all(bench.have(one, first, keys(16)[8:12]))
    assert bench.core.settle(held, bench.now_ns).leased == 4


def test_bytes_of_a_closing_region_count_until_nobody_can_reach_it() -> None:
    bench, (_, _, two, second) = shared()
    bench.hold_regions = True
    bench.put(two, second, keys(4, "fills its region"))
    bench.put(two, second, keys(1, "asks for more"))
    pool = bench.core.stats().pools[0]
    assert (len(bench.closing), pool.closing_regions) == (1, 1)
    assert pool.used_bytes == pool.capacity_bytes
    before = len(regions(bench))
    bench.put(two, second, keys(4, "still waits"))
    assert len(regions(bench)) == before
    assert len(bench.closing) == 1, "one region is asked for once"
    bench.let_go()
    assert len(regions(bench)) == before + 1
    assert regions(bench)[-1].tenant == "b", "the bytes go to who asked, not to who comes first"


def test_a_region_that_is_asked_for_is_not_taken_by_who_comes_first() -> None:
    bench, (one, first, two, second) = shared()
    bench.hold_regions = True
    bench.put(two, second, keys(5, "asks"))
    assert len(bench.closing) == 1
    bench.put(one, first, keys(8, "greedy"))
    bench.let_go()
    bench.put(one, first, keys(8, "greedier"))
    assert regions(bench)[-1].tenant == "b"


def test_a_region_is_closed_when_no_copy_reads_it_any_more() -> None:
    bench = Bench(slots=16, sessions=2, tenants=TWO, disk=True)
    one, two = bench.session("a"), bench.session("b")
    first, second = bench.space(one), bench.space(two)
    bench.put(two, second, keys(4, "first region"))
    bench.put(one, first, keys(12))
    bench.hold_copies = bench.hold_regions = True
    bench.reserve(two, second, keys(1, "asks"))
    bench.run()
    saves = bench.out("save")
    assert saves, "what is in the region is evicted the ordinary way"
    assert bench.closing == []
    bench.finish_all("save")
    bench.run()
    assert len(bench.closing) == 1
    assert bench.core.region(bench.closing[0]) is None


def test_a_first_tenant_and_model_cannot_keep_an_arena_for_ever() -> None:
    """64 KiB slots everywhere; 1 MiB slots of another tenant reach their quota within 200 puts."""
    limits = CoreLimits(staging_bytes=2 * MIB)
    bench = Bench(capacity_bytes=64 * MIB, tenants=TWO, limits=limits)
    one, two = bench.session("a"), bench.session("b")
    small, large = bench.space(one, block_tokens=256), bench.space(two, block_tokens=4096)
    bench.checks = False
    for prompt in range(40):
        bench.put(one, small, keys(32, f"prompt {prompt}"))
    stats = bench.core.stats()
    assert stats.tenants[0].block_bytes > 58 * MIB, "the arena is full"
    bench.hold_regions = True
    for index in range(200):
        bench.put(one, small, keys(1, f"goes on {index}"))
        bench.put(two, large, keys(1, f"large {index}"))
        if index % 3 == 0:
            bench.let_go()
    bench.let_go()
    bench.core.check()
    used = {tenant.tenant: tenant for tenant in bench.core.stats().tenants}
    assert used["b"].block_bytes >= 28 * MIB
    assert used["b"].used_bytes <= 32 * MIB
    assert used["a"].used_bytes >= 27 * MIB, "staging is taken from the rest"
    regions_a = [region for region in bench.core.regions("a") if region.slot_bytes == 64 * KIB]
    assert len(regions_a) < 40


def test_another_size_of_the_same_tenant_takes_what_is_colder() -> None:
    bench = Bench(slots=32, sessions=1)
    session = bench.session()
    small, large = bench.space(session), bench.space(session, block_tokens=48)
    bench.put(session, small, keys(32))
    for index in range(12):
        bench.put(session, large, keys(1, f"large {index}"))
        bench.use(session, small, keys(8))
    assert bench.have(session, small, keys(8)) == [True] * 8
    assert bench.core.spaces()[1].blocks >= 4


def test_a_tenant_that_has_nothing_gets_something_whatever_the_quotas() -> None:
    tenants = (TenantSpec("a", quota_bytes=10 * MIB), TenantSpec("b", quota_bytes=10 * MIB))
    bench = Bench(slots=16, sessions=2, tenants=tenants)
    one, two = bench.session("a"), bench.session("b")
    first, second = bench.space(one), bench.space(two)
    bench.put(one, first, keys(17))
    for _ in range(4):
        stored = bench.put(two, second, keys(1, "small"))
    assert stored or bench.have(two, second, keys(1, "small")) == [True]


def test_what_quotas_leave_over_is_parted_as_quotas_are() -> None:
    """Not by who asks most: a flood had all of it, and who comes later had its quota alone."""
    for quotas, least in (((1, 1), 8), ((1, 3), 12), ((3, 1), 4)):
        a, b = (
            TenantSpec(name, quota_bytes=4 * BLOCK * n)
            for name, n in zip("ab", quotas, strict=True)
        )
        bench, (_, _, two, second) = shared(32, (a, b))
        for index in range(60):
            bench.put(two, second, keys(1, f"block {index}"))
        used = {tenant.tenant: tenant for tenant in bench.core.stats().tenants}
        assert used["b"].blocks >= least, quotas
        assert used["a"].used_bytes >= used["a"].quota_bytes


def test_an_empty_region_is_taken_once_it_was_left_alone() -> None:
    tenants = (TenantSpec("a", quota_bytes=10 * MIB), TenantSpec("b", quota_bytes=10 * MIB))
    bench, (one, first, _, _) = shared(tenants=tenants)
    assert sum(bench.have(one, first, keys(16))) == 12
    bench.pass_time(2 * SECOND)
    bench.put(one, first, keys(4, "again"))
    bench.put(one, first, keys(4, "and again"))
    assert bench.core.stats().tenants[0].blocks == 16


# ---------------------------------------------------------------- staging


def test_staging_comes_out_of_the_pool_that_commits_go_to() -> None:
    bench = Bench(capacity_bytes=64 * MIB)
    session = bench.session()
    bench.put(session, bench.space(session), keys(1))
    (pool,) = bench.core.stats().pools
    assert pool.staging_bytes == bench.window * BLOCK
    assert pool.used_bytes == pool.staging_bytes + regions(bench)[0].total_bytes


def test_staging_of_a_session_is_an_eighth_of_the_pool_at_most() -> None:
    bench = Bench(capacity_bytes=64 * MIB, limits=CoreLimits())
    session = bench.session()
    bench.put(session, bench.space(session), keys(1))
    assert bench.core.stats().pools[0].staging_bytes == 8 * MIB


def test_later_sessions_get_less_and_none_takes_more_than_the_share() -> None:
    bench = Bench(capacity_bytes=64 * MIB, limits=CoreLimits(sessions_max=64))
    granted = []
    for index in range(24):
        session = bench.session(group=b"%d" % index)
        space = bench.space(session)
        before = bench.core.stats().pools[0].staging_bytes
        bench.put(session, space, keys(1, str(index)))
        granted.append(bench.core.stats().pools[0].staging_bytes - before)
    assert granted[:4] == [8 * MIB, 8 * MIB, 8 * MIB, 4 * MIB]
    assert sum(granted) <= 32 * MIB
    assert all(size > 0 for size in granted[:12])


def test_staging_that_is_not_used_is_closed_for_who_needs_it() -> None:
    limits = CoreLimits(staging_bytes=4 * BLOCK, staging_share=0.2)
    bench = Bench(capacity_bytes=48 * BLOCK, limits=limits)
    sessions = [bench.session(group=b"%d" % index) for index in range(4)]
    space = bench.space(sessions[0])
    served = [bench.put(s, space, keys(1, str(s))) for s in sessions]
    assert served[-1] == 0, "the share is used up"
    bench.pass_time(2 * SECOND)
    assert bench.core.staging_of(sessions[-1]) is not None, "also if it does not ask again"
    assert bench.put(sessions[-1], space, keys(1, "later")) == 1
    assert bench.put(sessions[0], space, keys(1, "comes back")) in (0, 1)


def test_staging_takes_regions_of_a_full_pool_and_says_busy_meanwhile() -> None:
    bench = Bench(slots=32, sessions=1)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(32))
    late = bench.session(group=b"late")
    bench.hold_regions = True
    assert bench.reserve(late, space, keys(1, "late")).reason is Reason.STAGING_BUSY
    bench.run()
    assert len(bench.closing) == 1
    assert bench.reserve(late, space, keys(1, "late")).reason is Reason.STAGING_BUSY
    bench.run()
    assert len(bench.closing) == 1
    bench.let_go()
    assert bench.core.staging_of(late) is not None
    assert bench.put(late, space, keys(1, "late")) == 1


def test_a_claim_ends_with_its_session() -> None:
    bench = Bench(slots=32, sessions=1)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(32))
    late = bench.session(group=b"late")
    bench.hold_regions = True
    bench.reserve(late, space, keys(1, "late"))
    bench.run()
    bench.core.end_session(late, bench.now_ns)
    bench.let_go()
    assert bench.core.stats().pools[0].staging_bytes == bench.window * BLOCK
    bench.put(session, space, keys(8, "more"))
    assert bench.core.stats().pools[0].free_slots == 0, "the bytes are used again"


def test_a_part_that_no_staging_can_hold_is_refused() -> None:
    bench = Bench(capacity_bytes=16 * BLOCK, limits=CoreLimits(staging_share=0.1))
    session = bench.session()
    space = bench.space(session, block_tokens=48)
    assert bench.reserve(session, space, keys(1)).reason is Reason.PART_TOO_LARGE


def test_staging_grows_with_the_parts_of_a_session() -> None:
    bench = Bench(capacity_bytes=256 * BLOCK, limits=CoreLimits(staging_bytes=BLOCK))
    session = bench.session()
    small, large = bench.space(session), bench.space(session, block_tokens=48)
    first = bench.reserve(session, small, keys(1))
    assert bench.reserve(session, large, keys(1)).reason is Reason.STAGING_BUSY
    bench.commit(session, first.lease_id)
    second = bench.reserve(session, large, keys(1))
    assert second.wanted == [0]
    assert second.staging_region != first.staging_region


def test_effects_name_regions_before_copies_use_them() -> None:
    bench, (_, _, two, second) = shared()
    bench.put(two, second, keys(9, "more"))
    known: set[int] = set()
    for effect in bench.seen:
        if isinstance(effect, Assign):
            known.add(effect.region.id)
        elif isinstance(effect, Unassign):
            known.remove(effect.region_id)
        elif isinstance(effect, Copy):
            assert effect.target.region in known


def test_pool_bytes_of_the_bench_are_exact() -> None:
    assert pool_bytes(8) == 10 * BLOCK
    assert pool_bytes(6) == 8 * BLOCK


def test_only_what_was_closed_can_be_gone() -> None:
    bench, (_, _, two, second) = shared()
    core = bench.core
    before = core.stats().pools[0].used_bytes
    for region_id in (core.regions("a")[0].id, core.staging_of(two) or 0, 999):
        core.region_gone(region_id, bench.now_ns)
    assert core.stats().pools[0].used_bytes == before
    assert bench.put(two, second, keys(4, "goes on")) == 4


def test_a_pool_that_grows_gives_out_what_is_claimed_first() -> None:
    bench, (one, first, two, second) = shared()
    bench.hold_regions = True
    bench.put(two, second, keys(5, "asks"))
    assert len(bench.closing) == 1
    capacity = bench.core.tiers[bench.host].capacity_bytes
    bench.core.grow(bench.host, capacity + pool_bytes(8), bench.now_ns)
    bench.run()
    assert regions(bench)[-1].tenant == "b"
    bench.let_go()
    bench.put(one, first, keys(16, "more"))
    pool = bench.core.stats().pools[0]
    assert pool.capacity_bytes == capacity + pool_bytes(8)
    assert pool.used_bytes == pool.capacity_bytes
    bench.core.grow(bench.host, 1, bench.now_ns)
    assert bench.core.stats().pools[0].capacity_bytes == pool.capacity_bytes, "it never shrinks"
