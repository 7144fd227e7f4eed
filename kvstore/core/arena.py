"""One pool tier's bytes: which region belongs to whom, who may have the next one, who gives one up.

A region is the only unit that moves between pools. Every byte of the capacity is free, in an open
region, in staging, or in a region that is closing; closing ones count as used until no process can
reach them. A claim keeps bytes that were freed for one claimant from being taken by another.
Decides only; `moves` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstore.core.pools import Pool, RegionBook, Slot
from kvstore.model.values import PAGE_BYTES, CoreLimits, Region, TenantSpec, TierSpec
from kvstore.policy.base import EvictionPolicy

EMPTY_GRACE_NS = 10**9
"""An empty region of another tenant is taken once it was left alone for so long, unless it is new
and that tenant's due.
"""

TRIM_SHARE = 32
"""A region keeps the ordinary size, which is in stock, unless that wastes more than 1/32 of it."""

GENERATION_BYTES = 8


def header_bytes(slots: int) -> int:
    """Bytes before the first slot: one generation a slot, in whole pages."""
    return -(-slots * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES


def slots_within(total_bytes: int, slot_bytes: int) -> int:
    """How many slots fit into a region of `total_bytes`, header included."""
    slots = max(total_bytes // slot_bytes, 0)
    while slots and header_bytes(slots) + slots * slot_bytes > total_bytes:
        slots -= 1
    return slots


def _rounded_up(total_bytes: int, granule_bytes: int) -> int:
    return -(-total_bytes // granule_bytes) * granule_bytes


class Shape(NamedTuple):
    """Size of a region to be."""

    slots: int
    total_bytes: int


class Claim:
    """Bytes that will be given to one claimant as soon as they are free.

    need_bytes: what it asks for. least_bytes: what it takes when no more is coming.
    """

    __slots__ = ("least_bytes", "need_bytes")

    def __init__(self, need_bytes: int, least_bytes: int) -> None:
        self.need_bytes = need_bytes
        self.least_bytes = least_bytes


Claimant = Pool | int
"""A pool that wants a region, or a session (its id) that wants staging."""


class Arena:
    """The regions of one pool tier."""

    def __init__(
        self,
        tier: int,
        spec: TierSpec,
        tenants: list[TenantSpec],
        limits: CoreLimits,
        policy: Callable[[str, int], EvictionPolicy[Slot]],
    ) -> None:
        """policy: makes that of a pool, by its tenant and slot size."""
        self.tier = tier
        self.spec = spec
        self.limits = limits
        self.capacity_bytes = spec.capacity_bytes
        self.region_bytes = limits.region_bytes(spec.capacity_bytes)
        self._tenants = tenants
        self.quota_bytes = self._quotas()
        self.tenant_bytes = dict.fromkeys(self.quota_bytes, 0)
        self.pools: dict[tuple[str, int], Pool] = {}
        self.regions: dict[int, RegionBook] = {}
        self.closing: dict[int, int] = {}
        self.unassigned: set[int] = set()
        self.staging: dict[int, int] = {}
        self.claims: dict[Claimant, Claim] = {}
        self.used_bytes = 0
        self.evictions = 0
        self.paused = False
        """Whether no memory is made for now: not even where others give theirs up."""
        self._policy = policy

    # ------------------------------------------------------------------ bytes

    def _quotas(self) -> dict[str, int]:
        share = max(self.capacity_bytes // len(self._tenants), 1)
        return {tenant.name: tenant.quota_bytes or share for tenant in self._tenants}

    def grow(self, capacity_bytes: int) -> None:
        """Raises the capacity; the size of an ordinary region stays, since a stock of it is made.

        Nothing is ever taken back: bytes that are given out cannot be.
        """
        self.capacity_bytes = max(self.capacity_bytes, capacity_bytes)
        self.quota_bytes = self._quotas()

    @property
    def free_bytes(self) -> int:
        """Bytes of no region; some may be claimed."""
        return self.capacity_bytes - self.used_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of open staging regions."""
        return sum(self.staging.values())

    def room_bytes(self, claimant: Claimant) -> int:
        """Free bytes that may be used now and that nobody else has claimed."""
        if self.paused:
            return 0
        claimed = sum(c.need_bytes for who, c in self.claims.items() if who != claimant)
        return max(self.free_bytes - claimed, 0)

    def pool(self, tenant: str, slot_bytes: int) -> Pool:
        """The pool of a tenant's slots of this size; made on first use."""
        slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        pool = self.pools.get((tenant, slot_bytes))
        if pool is None:
            pool = Pool(self.tier, tenant, slot_bytes, self._policy(tenant, slot_bytes))
            self.pools[tenant, slot_bytes] = pool
        return pool

    def shape(self, slot_bytes: int, room_bytes: int) -> Shape | None:
        """The region that `room_bytes` allow: an ordinary one, a smaller one, or None."""
        granule_bytes = self.spec.granule_bytes
        slots_min = self.limits.region_slots_min
        want = max(self.region_bytes, header_bytes(slots_min) + slots_min * slot_bytes)
        want = _rounded_up(want, granule_bytes)
        room_bytes = room_bytes // granule_bytes * granule_bytes
        slots = slots_within(min(want, room_bytes), slot_bytes)
        if not slots:
            return None
        total = _rounded_up(header_bytes(slots) + slots * slot_bytes, granule_bytes)
        if want <= room_bytes and want - total <= want // TRIM_SHARE:
            total = want
        return Shape(slots, total)

    def add_region(self, region_id: int, pool: Pool, shape: Shape, now_ns: int) -> Region:
        """Gives the pool a region; the caller has made sure that its bytes are free."""
        info = Region(
            id=region_id,
            tier=self.tier,
            tenant=pool.tenant,
            slot_bytes=pool.slot_bytes,
            slots=shape.slots,
            header_bytes=header_bytes(shape.slots),
            total_bytes=shape.total_bytes,
        )
        book = RegionBook(info, pool, now_ns)
        self.regions[region_id] = book
        self.used_bytes += shape.total_bytes
        self.tenant_bytes[pool.tenant] += shape.total_bytes
        pool.add(book)
        return info

    def retire(self, region: RegionBook) -> None:
        """The region closes: its slots are out of use, its bytes stay used until `gone`."""
        region.pool.retire(region)
        del self.regions[region.info.id]
        self.closing[region.info.id] = region.info.total_bytes
        self.tenant_bytes[region.info.tenant] -= region.info.total_bytes

    def add_staging(self, region_id: int, total_bytes: int) -> None:
        """Staging for a session, of bytes that are free."""
        self.staging[region_id] = total_bytes
        self.used_bytes += total_bytes

    def retire_staging(self, region_id: int) -> None:
        """The staging region closes."""
        self.closing[region_id] = self.staging.pop(region_id)

    def gone(self, region_id: int) -> bool:
        """Nobody can reach a closed region any more. False if it was not closing here."""
        if region_id not in self.unassigned:
            return False
        self.unassigned.remove(region_id)
        self.used_bytes -= self.closing.pop(region_id)
        return True

    # ------------------------------------------------------------------ who gives a region up

    def press(self, pool: Pool, now_ns: int) -> list[RegionBook]:
        """Regions to close so that `pool` gets one; a claim is put down for their bytes.

        In this order: empty ones, those of tenants over quota if this tenant stays under its own,
        those of this tenant's other pools that are colder than anything of this pool; each coldest
        first. A tenant that has nothing at all may also take from the tenant that is fullest.
        """
        if self.paused or pool in self.claims or len(self.regions) == len(pool.regions):
            return []
        tenant = pool.tenant
        left = self._due_bytes(tenant) - self.tenant_bytes[tenant]
        within = self.shape(pool.slot_bytes, left) if self._others_over(tenant) else None
        shape = within or self.shape(pool.slot_bytes, self.capacity_bytes)
        if shape is None:
            return []
        ranked = self._candidates(pool, within is not None, now_ns)
        least = _rounded_up(header_bytes(1) + pool.slot_bytes, self.spec.granule_bytes)
        return self._claim(pool, shape.total_bytes, least, ranked, tenant)

    def press_ahead(self, pool: Pool, slots: int, now_ns: int) -> list[RegionBook]:
        """Regions of tenants over quota to close so that `pool`, whose tenant stays under its own,
        has so many slots more when it needs them; a claim is put down for their bytes. Who waits
        for its due until then loses blocks of its own meanwhile.
        """
        if self.paused or pool in self.claims or not self._others_over(pool.tenant):
            return []
        left = self._due_bytes(pool.tenant) - self.tenant_bytes[pool.tenant]
        shape = self.shape(pool.slot_bytes, left)
        if shape is None:
            return []
        need = min(-(-slots // shape.slots), left // shape.total_bytes) * shape.total_bytes
        if self.room_bytes(pool) >= need:
            return []
        ranked = [one for one in self._candidates(pool, True, now_ns) if one[0] <= 1]
        return self._claim(pool, need, header_bytes(1) + pool.slot_bytes, ranked, pool.tenant)

    def press_for_staging(self, session: int, need: int, least: int) -> list[RegionBook]:
        """Regions to close for staging: of tenants over quota first, then the coldest of any."""
        if session in self.claims:
            return []
        ranked = [(self._share(r.info.tenant) <= 1, r.touched_ns, r) for r in self._unheld()]
        ranked.sort(key=lambda entry: entry[:2])
        return self._claim(session, need, least, [(1, r) for _, _, r in ranked], None)

    def _candidates(
        self, pool: Pool, within_quota: bool, now_ns: int
    ) -> list[tuple[int, RegionBook]]:
        coldest = pool.victim()
        starving = not self.tenant_bytes[pool.tenant]
        ranked: list[tuple[int, float, RegionBook]] = []
        for region in self.regions.values():
            if region.pool is pool:
                continue
            own = region.info.tenant == pool.tenant
            idle = now_ns - region.touched_ns >= EMPTY_GRACE_NS
            if idle and (own or not self._is_due(region)) and region.empty():
                ranked.append((0, region.touched_ns, region))
            elif within_quota and not own and self._share(region.info.tenant) > 1:
                ranked.append((1, region.touched_ns, region))
            elif own and (coldest is None or region.touched_ns < coldest.touched_ns):
                ranked.append((2, region.touched_ns, region))
            elif starving and not own:
                ranked.append((3, -self._share(region.info.tenant), region))
        ranked.sort(key=lambda entry: (entry[0], entry[1], entry[2].touched_ns))
        return [(rank, region) for rank, _, region in ranked if not region.held()]

    def _is_due(self, region: RegionBook) -> bool:
        """Whether a tenant under its quota asked for it and had no use for it yet: who asks rarely
        would lose it again each time, and never come to its quota.
        """
        return region.unused and self._share(region.info.tenant) <= 1

    def _unheld(self) -> list[RegionBook]:
        return [region for region in self.regions.values() if not region.held()]

    def _others_over(self, tenant: str) -> bool:
        return any(self._share(other) > 1 for other in self.tenant_bytes if other != tenant)

    def _share(self, tenant: str) -> float:
        return self.tenant_bytes[tenant] / max(self._due_bytes(tenant), 1)

    def _due_bytes(self, tenant: str) -> int:
        """The tenant's part of what staging leaves, by quota: more than its quota where quotas
        leave something over, since whoever asks most would have all of that; less where staging
        leaves less than all quotas.
        """
        left = self.capacity_bytes - self.staging_bytes
        return self.quota_bytes[tenant] * left // sum(self.quota_bytes.values())

    def _claim(
        self,
        claimant: Claimant,
        need: int,
        least: int,
        ranked: list[tuple[int, RegionBook]],
        tenant: str | None,
    ) -> list[RegionBook]:
        """As many of the ranked regions as `need` takes, and the claim; none if not even `least`
        would come of it. A tenant is brought down to its quota, not further.
        """
        room = self.room_bytes(claimant)
        left = dict(self.tenant_bytes)
        chosen: list[RegionBook] = []
        for rank, region in ranked:
            if room >= need:
                break
            owner = region.info.tenant
            if rank == 1 and tenant is not None and left[owner] <= self._due_bytes(owner):
                continue
            chosen.append(region)
            left[owner] -= region.info.total_bytes
            room += region.info.total_bytes
        if not chosen or room < least:
            return []
        self.claims[claimant] = Claim(need, least)
        return chosen

    def next_grant(self) -> tuple[Claimant, int] | None:
        """The first claim that can be met, with its bytes; it is struck off. Claims that nothing
        which is closing could meet are struck off too. None, too, while no memory is made.
        """
        if self.paused:
            return None
        free = self.free_bytes
        for claimant, claim in list(self.claims.items()):
            if free >= claim.need_bytes:
                del self.claims[claimant]
                return claimant, claim.need_bytes
            if not self.closing:
                del self.claims[claimant]
                if free >= claim.least_bytes:
                    return claimant, free
                continue
            free -= claim.need_bytes
        return None
