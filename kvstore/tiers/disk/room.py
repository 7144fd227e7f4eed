"""What fits into a folder, and which class of slots has more than its share of it.

Capacity is everything in the folder: segments, also retired ones whose files are still there, the
index's allowance, what was set aside. For the ring alone; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.tiers.disk.format import Segment
from kvstore.tiers.disk.slots import SlotClass

SEGMENT_BYTES_MAX = 256 << 20
SEGMENTS_MIN = 32
"""Into how many segments the capacity is cut at least, if records are not larger than that."""
_PARTIAL_SHARE = 4
"""A segment that has to be smaller than usual has at least this part of the slots."""


class Room:
    """Classes by (tenant digest, record bytes), retired segments by id.

    capacity_bytes and aside_bytes may be set. sized_for_bytes: the capacity that segments are cut
    from. quota_bytes: by tenant digest; who is not in it has none. written_bytes: of records, since
    the start; the ring's clock. allowance: slots to bytes of the index.
    """

    def __init__(
        self,
        capacity_bytes: int,
        aside_bytes: int,
        index_bytes: Callable[[int], int],
        quota_bytes: Mapping[bytes, int],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.aside_bytes = aside_bytes
        self.sized_for_bytes = capacity_bytes
        self.written_bytes = 0
        self.classes: dict[tuple[bytes, int], SlotClass] = {}
        self.retired: dict[int, Segment] = {}
        self.allowance = index_bytes
        self.quota_bytes = dict(quota_bytes)

    def room_slots(self, owner: SlotClass) -> int:
        """Slots of a segment that fits into the capacity now; 0 if none does."""
        usual = segment_slots(self.sized_for_bytes, owner.record_bytes)
        for count in (usual, -(-usual // 2), -(-usual // _PARTIAL_SHARE)):
            if self.total_bytes(count, count * owner.record_bytes) <= self.capacity_bytes:
                return count
        return 0

    def total_bytes(self, more_slots: int = 0, more_bytes: int = 0) -> int:
        """Of all that is in the folder, with so many more slots in files of `more_bytes`."""
        index_bytes = self.allowance(self.slots + more_slots)
        return self.segment_bytes + more_bytes + index_bytes + self.aside_bytes

    @property
    def segment_bytes(self) -> int:
        """Of all files that are there."""
        return sum(owner.bytes for owner in self.classes.values()) + self.retired_bytes

    @property
    def retired_bytes(self) -> int:
        """Of the files that are about to go."""
        return sum(segment.file_bytes for segment in self.retired.values())

    @property
    def slots(self) -> int:
        """Of all segments but retired ones."""
        return sum(owner.slots for owner in self.classes.values())

    def donors(self, owner: SlotClass, size: int) -> list[SlotClass]:
        """Whose segments `owner` may have, best first: those of a class of which one was not hit
        for a whole turnover, of this tenant or of one that is idle; while `owner` is below its
        share, those of classes over their own; if it has nothing at all, anybody's.
        """
        others = [other for other in self.classes.values() if other is not owner and other.extents]
        others.sort(key=self.over_share_bytes, reverse=True)
        stale = [
            other
            for other in others
            if self._is_stale(other)
            and (other.tenant == owner.tenant or self._is_idle(other.tenant))
        ]
        if stale or not owner.extents:
            return stale or others
        if self.over_share_bytes(owner) + size > 0:
            return []
        return [
            other
            for other in others
            if self.over_share_bytes(other)
            >= max(one.segment.file_bytes for one in other.extents.values())
        ]

    def _is_idle(self, tenant: bytes) -> bool:
        """Whether a tenant hit and wrote nothing for a whole turnover. One that did keeps its
        share: a flood turns all over so fast that what others will ask for again looks forgotten.
        """
        ticks = (
            extent.used_tick
            for one in self.classes.values()
            if one.tenant == tenant
            for extent in one.extents.values()
        )
        return self.written_bytes - max([0, *ticks]) > self.capacity_bytes

    def _is_stale(self, owner: SlotClass) -> bool:
        coldest = min(extent.used_tick for extent in owner.extents.values())
        return self.written_bytes - max(coldest, 0) > self.capacity_bytes

    def over_share_bytes(self, owner: SlotClass) -> float:
        """How much more than its share a class has: an equal one of its tenant's."""
        tenants = [tenant for tenant, _ in self.classes]
        of_tenant = self._share_bytes(owner.tenant, set(tenants))
        return owner.bytes - of_tenant / tenants.count(owner.tenant)

    def _share_bytes(self, tenant: bytes, present: set[bytes]) -> float:
        """What a tenant keeps when others need room: its quota, or an equal part of what the quotas
        of those who have one leave. Quotas that do not fit are cut alike.
        """
        room = self.capacity_bytes - self.aside_bytes - self.allowance(self.slots)
        quotas = {one: self.quota_bytes[one] for one in present if self.quota_bytes.get(one)}
        fits = min(1.0, room / max(sum(quotas.values()), 1))
        if tenant in quotas:
            return quotas[tenant] * fits
        return max(room - sum(quotas.values()), 0) / (len(present) - len(quotas))


def segment_slots(capacity_bytes: int, record_bytes: int) -> int:
    """Slots of a new segment: as many records as fit into min(256 MiB, capacity / 32), at least
    one.
    """
    return max(1, min(SEGMENT_BYTES_MAX, capacity_bytes // SEGMENTS_MIN) // record_bytes)
