"""Every invariant of the books. Slow and complete: for tests, the simulation and `debug` runs."""

from __future__ import annotations

from collections import Counter

from kvstore.core.arena import Arena, header_bytes
from kvstore.core.books import Books
from kvstore.core.leases import ReadLease, WriteLease, WriteState
from kvstore.core.pools import Pool, RegionBook, Slot
from kvstore.core.states import SlotState, SpaceState
from kvstore.model.hits import ABSENT, PENDING
from kvstore.model.values import PAGE_BYTES

FREE, FILLING, READY, DOOMED = SlotState


def check(books: Books) -> None:
    """AssertionError names what does not hold."""
    for arena in books.pools:
        _check_bytes(books, arena)
        for pool in arena.pools.values():
            _check_pool(pool)
    _check_quota_sums(books)
    _check_holds(books)
    _check_spaces(books)
    _check_writes(books)
    _check_staging(books)
    _check_flights(books)
    _check_leases(books)


def slots(books: Books) -> list[Slot]:
    """Every slot of every region that is open, or closing and still read."""
    return [
        slot for arena in books.pools for region in arena.regions.values() for slot in region.slots
    ]


def _check_bytes(books: Books, arena: Arena) -> None:
    open_bytes = sum(region.info.total_bytes for region in arena.regions.values())
    used = open_bytes + arena.staging_bytes + sum(arena.closing.values())
    assert used == arena.used_bytes, "used bytes are the sum of regions, staging and closing ones"
    assert 0 <= arena.used_bytes <= arena.capacity_bytes, "used + free = capacity"
    of_pools = [region for pool in arena.pools.values() for region in pool.regions.values()]
    assert len(of_pools) == len(arena.regions), "every region belongs to one pool"
    for region in arena.regions.values():
        _check_region(region)
    assert arena.unassigned <= set(arena.closing), "what was closed is closing"
    ids = [*arena.regions, *arena.staging, *arena.closing]
    assert len(ids) == len(set(ids)), "a region is open, staging or closing, never two of them"


def _check_region(region: RegionBook) -> None:
    info, pool = region.info, region.pool
    assert pool.regions[info.id] is region
    assert not region.closing
    assert (info.tenant, info.slot_bytes, info.tier) == (pool.tenant, pool.slot_bytes, pool.tier)
    assert len(region.slots) == info.slots
    assert info.slot_bytes % PAGE_BYTES == info.header_bytes % PAGE_BYTES == 0
    assert info.header_bytes == header_bytes(info.slots)
    assert info.header_bytes + info.slots * info.slot_bytes <= info.total_bytes
    leaving = sum(slot.leaving for slot in region.slots)
    assert leaving == region.leaving, "a region counts the copies that leave it"
    for slot in region.slots:
        if slot.state is READY:
            assert slot.touched_ns <= region.touched_ns, "a region's touch is its youngest"


def _check_pool(pool: Pool) -> None:
    free = set(pool.free)
    assert len(free) == len(pool.free), "no slot is free twice"
    ready = 0
    for slot in pool.inner:
        assert slot.state is READY, "what has left is not kept among those that others hang on"
    for region in pool.regions.values():
        for slot in region.slots:
            assert (slot.state is FREE) == (slot in free), "the free list holds the FREE slots"
            assert slot.code == _code(slot), "the presence code follows the state"
            if slot.state is READY:
                ready += 1
                candidate = slot in pool.policy
                inner = slot.children and slot in pool.inner
                shelved = inner or (slot.marked and slot.holds) or slot in pool.spared
                assert candidate or shelved, "a shelved slot is held, or others hang on it"
            else:
                assert slot not in pool.policy, "only READY slots are candidates"
            if slot.state is FREE:
                uses = (slot.holds, slot.saves, slot.pins, slot.marked)
                assert uses == (0, 0, 0, False), "FREE is free"
                assert slot.space is None
                assert slot.fill is None
                assert slot.rising is None
            if slot.state is DOOMED:
                assert slot.holds, "DOOMED only until the last hold"
                assert slot.marked
            assert (slot.fill is not None) == (slot.state is FILLING)
            assert slot.leaving or not slot.queued, "fills wait only for a copy that leaves"
    assert ready == pool.blocks, "READY blocks are counted"
    _check_children(pool)
    candidates = list(pool.policy)
    assert len(candidates) == len(pool.policy) == len(set(candidates))
    for slot in candidates:
        assert slot.pool is pool
        assert slot.region.info.id in pool.regions


def _check_children(pool: Pool) -> None:
    hanging = Counter[Slot]()
    arena_slots = [slot for region in pool.regions.values() for slot in region.slots]
    for slot in arena_slots:
        above = slot.above
        if above is not None and above.generation == slot.above_generation:
            assert slot.state in (FILLING, READY), "what has gone hangs on nothing"
            hanging[above] += 1
    for slot in arena_slots:
        if slot.state in (FILLING, READY):
            assert slot.children == hanging[slot], "what hangs on a block is counted"


def _code(slot: Slot) -> int:
    if slot.state is READY:
        return 1 + slot.pool.tier
    return PENDING if slot.state is FILLING else ABSENT


def _check_quota_sums(books: Books) -> None:
    for arena in books.pools:
        of_tenant = Counter[str]()
        for region in arena.regions.values():
            of_tenant[region.info.tenant] += region.info.total_bytes
        assert of_tenant == Counter(arena.tenant_bytes), "a tenant's bytes are those of its regions"
        for pool in arena.pools.values():
            pinned = sum(
                pool.slot_bytes
                for region in pool.regions.values()
                for slot in region.slots
                if slot.pins
            )
            assert pinned == pool.pinned_bytes, "pinned bytes are counted"
            assert pool.block_bytes == sum(
                slot.space.layout.block_bytes
                for region in pool.regions.values()
                for slot in region.slots
                if slot.state is READY and slot.space is not None
            ), "block bytes are counted"


def _check_holds(books: Books) -> None:
    held = Counter[Slot]()
    pinned = Counter[Slot]()
    for lease in books.leases:
        if isinstance(lease, ReadLease):
            of_lease = [slot for slot in lease.slots if slot is not None]
            held.update(of_lease)
            if lease.session is None:
                pinned.update(of_lease)
    leaving = Counter[Slot]()
    saves = Counter[Slot]()
    for flight in books.flights.values():
        if flight.target is not None:
            held[flight.target] += 1
        if flight.leaves:
            assert flight.source is not None
            leaving[flight.source] += 1
        elif flight.source is not None:
            held[flight.source] += 1
            saves[flight.source] += flight.copy.why == "save"
    for slot in slots(books):
        assert slot.holds == held[slot], "holds are live leases and copies"
        assert slot.saves == saves[slot], "saves of a named slot are counted"
        assert slot.pins == pinned[slot], "pins are counted"
        assert slot.leaving == leaving[slot], "copies that leave a slot are counted"


def _check_spaces(books: Books) -> None:
    named = Counter[int]()
    for space in books.spaces:
        assert space.state is not SpaceState.CLOSED, "closed spaces are gone"
        assert (space.state is SpaceState.HELD) == bool(space.group)
        assert not space.doubted or space.state is SpaceState.OPEN, "only complete ones are doubted"
        ready = 0
        for key, slot in space.index.items():
            assert (slot.space, slot.key) == (space, key), "index and slots agree"
            assert slot.state in (READY, FILLING), "a name has a block, or one on its way"
            assert slot.pool is space.pools[slot.pool.tier]
            ready += slot.state is READY
            named[id(slot)] += 1
        assert ready == space.blocks, "a space's READY blocks are counted"
    rising = Counter(id(slot.rising) for slot in slots(books) if slot.rising is not None)
    for slot in slots(books):
        if slot.state is READY:
            assert named[id(slot)] == 1, "every READY slot has one name"
            assert not slot.leaving, "a slot was filled when its former content had left"
        elif slot.state is FILLING:
            assert named[id(slot)] + rising[id(slot)] == 1, "a FILLING slot has one name"
        else:
            assert not named[id(slot)], "a FREE or DOOMED slot has none"
        if slot.state is not FREE:
            assert slot.space is not None
            if slot.space.state is SpaceState.CLOSED:
                assert slot.state is DOOMED, "closed spaces hold nothing"
        if slot.rising is not None:
            assert slot.state is READY
            assert slot.rising.state is FILLING


def _check_writes(books: Books) -> None:
    for space in books.spaces:
        every_part = (1 << len(space.layout.parts)) - 1
        filling = {slot for slot in space.index.values() if slot.state is FILLING}
        of_groups: set[Slot] = set()
        for key, group in space.groups.items():
            assert group.key == key
            assert group.fills, "a write group has unfinished blocks"
            of_groups.update(group.fills)
            for slot in group.fills:
                fill = slot.fill
                assert fill is not None
                assert fill.group is group, "a block has one write group"
                assert not fill.done & ~fill.reserved, "only reserved parts are done"
                assert fill.done != every_part, "a block with all parts is READY"
                parts = [lease.part for lease in fill.leases]
                assert len(parts) == len(set(parts)), "a part has one writer"
                assert sum(1 << part for part in parts) == fill.reserved
        assert of_groups == {s for s in filling if s.fill is not None and s.fill.group is not None}
    for lease in books.leases:
        if isinstance(lease, WriteLease):
            _check_write_lease(lease)


def _check_write_lease(lease: WriteLease) -> None:
    assert lease.visible + lease.failed <= len(lease.slots)
    alive = sum(
        slot.state is FILLING and slot.generation == generation
        for slot, generation in zip(lease.slots, lease.generations, strict=True)
    )
    assert alive == lease.waiting, "a write lease waits for the blocks that are not resolved"
    if lease.state is WriteState.EXPIRED:
        assert not alive, "an expired reservation holds no key"
    filling = bool(lease.slots) and lease.state is not WriteState.COPIED
    assert bool(lease.extents) == filling, "a reservation of nothing has no staging"
    assert (lease.copies > 0) == (lease.state is WriteState.COPYING)
    if lease.state is not WriteState.COPIED:
        assert not lease.visible, "nothing is visible before all of it can be"
    elif len(lease.space.layout.parts) == 1:
        assert not lease.waiting, "all of a commit is visible at once"


def _check_staging(books: Books) -> None:
    used: dict[int, list[tuple[int, int]]] = {}
    for lease in books.leases:
        if isinstance(lease, WriteLease):
            ranges = used.setdefault(lease.staging.region_id, [])
            ranges += [(e.offset, e.offset + e.length) for e in lease.extents]
    copies = Counter(
        flight.lease.staging.region_id for flight in books.flights.values() if flight.lease
    )
    arena = books.ingest
    assert set(books.staging_sessions) == set(arena.staging), "open staging has an owner"
    assert set(books.staging_closing) <= set(arena.closing)
    for session_id in books.staging_waiting:
        assert books.sessions[session_id].staging is None, "who waits for staging has none"
    for region_id, session in books.staging_sessions.items():
        staging = session.staging
        if staging is None or staging.region_id != region_id:
            assert copies[region_id], "closed staging lives as long as copies read it"
            continue
        assert session.id in books.sessions, "staging of a session that ended"
        assert staging.copies == copies[region_id]
        assert staging.total_bytes == arena.staging[region_id]
        ranges = sorted(
            used.get(region_id, [])
            + [(h.offset, h.offset + h.length) for h in staging.extents.holes()]
        )
        ends = [0, *(end for _, end in ranges)]
        assert [start for start, _ in ranges] == ends[:-1], (
            "staging ranges are disjoint, none is lost"
        )
        assert ends[-1] == staging.total_bytes
    limit = arena.capacity_bytes * books.limits.staging_share
    closing = sum(arena.closing[region] for region in books.staging_closing)
    assert arena.staging_bytes + closing <= limit, "staging keeps to its share"


def _check_flights(books: Books) -> None:
    whys = Counter(flight.copy.why for flight in books.flights.values())
    assert books.loading == whys["load"]
    assert books.moving == whys["save"] + whys["demote"] + whys["promote"]
    loading = [flight.copy.length for flight in books.flights.values() if flight.copy.why == "load"]
    moved = sum(f.copy.length for f in books.flights.values() if f.copy.why != "commit")
    assert books.loading_bytes == sum(loading)
    assert books.moving_bytes == moved - sum(loading), "bytes in flight are counted"
    saving = {flight.copy.copy_id for flight in books.saving.values()}
    assert saving == {i for i, f in books.flights.items() if f.copy.why == "save"}
    assert books.forgetting <= set(books.saving), "a forget waits only for a save"
    for flight in books.flights.values():
        if flight.target is not None:
            assert flight.target.state in (FILLING, DOOMED), "a copy fills a slot that is not READY"
            assert flight.target.generation == flight.copy.target.generation


def _check_leases(books: Books) -> None:
    dated = books.leases.dated()
    counts = Counter(lease.kind for lease in books.leases)
    assert counts == Counter(books.leases.counts), "leases are counted by kind"
    for lease in books.leases:
        assert not lease.ended
        if lease.session is not None:
            assert lease.session.leases[lease.id] is lease, "a lease is known to its session"
            if isinstance(lease, ReadLease):
                assert lease.session.id in books.sessions, "a lease of a session that ended"
        if isinstance(lease, ReadLease):
            assert (lease.until_ns is None) or lease.id in dated, "a deadline is in the heap"
        elif lease.state in (WriteState.RESERVED, WriteState.EXPIRED):
            assert lease.id in dated, "a reservation ends by itself, and so does what is left of it"
        if isinstance(lease, WriteLease) and lease.session.id not in books.sessions:
            assert not lease.callers, "a reservation outlives its session only while it is copied"
    for session in books.sessions.values():
        view_bytes = sum(
            lease.view_bytes for lease in session.leases.values() if isinstance(lease, ReadLease)
        )
        assert session.view_bytes == view_bytes, "view bytes are counted"
        for group in session.groups:
            assert session in group.sessions
            assert group.fills
    waiting = Counter(
        waiter.id
        for space in books.spaces
        for slot in space.index.values()
        if slot.fill is not None
        for waiter, _ in slot.fill.waiters
    )
    for lease in books.leases:
        if isinstance(lease, ReadLease) and lease.pending:
            assert lease.pending == waiting[lease.id], "whoever waits will be told"
    members = {i for ids in books.group_sessions.values() for i in ids}
    assert members == set(books.sessions), "every session is in one group"
    assert set(books.pins) == {lease.id for lease in books.leases if lease.session is None}
