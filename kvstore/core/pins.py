"""Pins: the operator's read leases, without a session and without a deadline."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.books import Books
from kvstore.core.leases import LeaseKind, ReadLease
from kvstore.core.pools import Slot, release_holds
from kvstore.core.states import SlotState
from kvstore.model.reasons import Reason
from kvstore.model.values import Pinned

READY = SlotState.READY


class Pins:
    """See the module's docstring."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def pin(self, tenant: str | None, space_id: int, keys: Sequence[bytes]) -> Pinned:
        """Holds the leading READY keys until unpinned, or until the blocks are invalidated."""
        space = self.books.spaces.get(space_id)
        if space is None or space.doubted or (tenant is not None and space.tenant != tenant):
            return Pinned(0, 0, Reason.SPACE_UNKNOWN)
        pin = ReadLease(LeaseKind.PIN, None, space, None)
        reason = Reason.OK
        for key in keys:
            slot = space.index.get(key)
            if slot is None or slot.state is not READY:
                reason = Reason.MISS_NEVER_STORED if slot is None else Reason.MISS_IN_PROGRESS
                break
            if not slot.pins and not self._may_pin(slot):
                reason = Reason.PIN_LIMIT
                break
            slot.pool.pinned_bytes += 0 if slot.pins else slot.pool.slot_bytes
            slot.pins += 1
            slot.holds += 1
            pin.slots.append(slot)
        if not pin.slots:
            return Pinned(0, 0, reason)
        self.books.pins[self.books.leases.add(pin)] = pin
        return Pinned(pin.id, len(pin.slots), reason)

    def _may_pin(self, slot: Slot) -> bool:
        arena = self.books.arenas[slot.pool.tier]
        assert arena is not None, "slots are in pools"
        pinned = sum(pool.pinned_bytes for pool in arena.pools.values())
        allowed = arena.capacity_bytes * self.books.limits.pinned_share
        return pinned + slot.pool.slot_bytes <= allowed

    def unpin(self, pin_id: int) -> bool:
        """Ends a pin; False if there is none."""
        pin = self.books.pins.pop(pin_id, None)
        if pin is None:
            return False
        for slot in pin.slots:
            if slot is not None:
                slot.pins -= 1
                if not slot.pins:
                    slot.pool.pinned_bytes -= slot.pool.slot_bytes
        self.books.leases.remove(pin)
        release_holds(pin.slots)
        return True
