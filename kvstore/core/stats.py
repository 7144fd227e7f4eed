"""Numbers and explanations, read from the books. No side effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvstore.core.arena import Arena
from kvstore.core.books import Books
from kvstore.core.leases import LeaseKind
from kvstore.core.reviews import Review
from kvstore.core.states import SlotState, SpaceState
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreStats, KeyExplanation, PoolStats, Region, SpaceRow, TenantStats


def space_rows(books: Books) -> list[SpaceRow]:
    """All spaces that are not closed."""
    return [
        SpaceRow(
            space.id,
            space.tenant,
            space.state_word,
            space.fingerprint,
            space.blocks,
            space.block_bytes,
            space.review_id,
        )
        for space in books.spaces
    ]


def regions(books: Books, tenant: str) -> list[Region]:
    """Open regions of a tenant, in all pools."""
    return [
        book.info
        for arena in books.pools
        for book in arena.regions.values()
        if book.info.tenant == tenant
    ]


def region(books: Books, region_id: int) -> Region | None:
    """An open region."""
    for arena in books.pools:
        if region_id in arena.regions:
            return arena.regions[region_id].info
    return None


def review_states(reviews: Iterable[Review]) -> Counter[str]:
    """How many there are, by state. Their spaces are not looked at: it is asked often."""
    return Counter(review.state for review in reviews)


def snapshot(books: Books, reviews_held: int) -> CoreStats:
    """All gauges and counters as of now."""
    counts = books.leases.counts
    states = Counter(space.state_word for space in books.spaces)
    return CoreStats(
        pools=tuple(_pool(arena) for arena in books.pools),
        tenants=tuple(_tenant(books, name) for name in books.tenants),
        sessions=len(books.sessions),
        read_leases=counts[LeaseKind.COPY],
        view_leases=counts[LeaseKind.VIEW],
        write_leases=counts[LeaseKind.WRITE],
        pins=counts[LeaseKind.PIN],
        copies_in_flight=len(books.flights),
        saves_in_flight=len(books.saving),
        spaces_open=states[SpaceState.OPEN.value],
        spaces_held=states[SpaceState.HELD.value],
        reviews_held=reviews_held,
        counters=dict(books.counters),
    )


def _pool(arena: Arena) -> PoolStats:
    pools = arena.pools.values()
    return PoolStats(
        name=arena.spec.name,
        tier=arena.tier,
        capacity_bytes=arena.capacity_bytes,
        used_bytes=arena.used_bytes,
        staging_bytes=arena.staging_bytes,
        closing_bytes=sum(arena.closing.values()),
        regions=len(arena.regions),
        closing_regions=len(arena.closing),
        free_slots=sum(len(pool.free) for pool in pools),
        blocks=sum(pool.blocks for pool in pools),
        block_bytes=sum(pool.block_bytes for pool in pools),
        pinned_bytes=sum(pool.pinned_bytes for pool in pools),
        evictions=arena.evictions,
    )


def _tenant(books: Books, name: str) -> TenantStats:
    pools = [pool for a in books.pools for pool in a.pools.values() if pool.tenant == name]
    return TenantStats(
        tenant=name,
        used_bytes=sum(arena.tenant_bytes[name] for arena in books.pools),
        quota_bytes=sum(arena.quota_bytes[name] for arena in books.pools),
        blocks=sum(pool.blocks for pool in pools),
        block_bytes=sum(pool.block_bytes for pool in pools),
    )


def explain(books: Books, tenant: str, space_id: int, key: bytes, now_ns: int) -> KeyExplanation:
    """What is known of a key of one tenant; another tenant's looks like never stored."""
    space = books.spaces.get(space_id)
    if space is None or space.tenant != tenant:
        closed = books.spaces.closed_why(space_id, tenant)
        return KeyExplanation(closed or Reason.MISS_NEVER_STORED, -1, 0, 0, -1)
    if space.doubted:
        return KeyExplanation(Reason.HELD_FOR_REVIEW, -1, 0, 0, -1)
    slot = space.index.get(key)
    if slot is not None:
        ready = slot.state is SlotState.READY
        return KeyExplanation(
            Reason.HIT if ready else Reason.MISS_IN_PROGRESS,
            slot.pool.tier if ready else -1,
            slot.generation,
            slot.holds,
            max(now_ns - slot.touched_ns, 0) if ready else -1,
        )
    ghost = books.ghosts.get(space_id, key)
    if ghost is not None:
        return KeyExplanation(ghost.why, -1, 0, 0, max(now_ns - ghost.at_ns, 0))
    nearest = books.spaces.nearest(tenant, space.fingerprint, key)
    if nearest is None:
        return KeyExplanation(Reason.MISS_NEVER_STORED, -1, 0, 0, -1)
    other, differences = nearest
    detail = f"held by space {other.id}"
    return KeyExplanation(Reason.MISS_INCOMPATIBLE, -1, 0, 0, -1, differences, detail)
