"""Pins: the operator's read leases, without a session and without a deadline."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.books import Books
from kvstore.core.leases import LeaseKind, ReadLease
from kvstore.core.moves import Moves
from kvstore.core.pools import Slot, release_holds
from kvstore.core.spaces import Space
from kvstore.core.states import SlotState
from kvstore.model.reasons import Reason
from kvstore.model.values import Pinned

READY = SlotState.READY


class Pins:
    """See the module's docstring. What is pinned is in the ingest pool, which every reader reaches:
    a pinned block moves nowhere.
    """

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves

    def pin(self, tenant: str | None, space_id: int, keys: Sequence[bytes], now_ns: int) -> Pinned:
        """Holds the leading READY keys until unpinned, or until the blocks are invalidated."""
        space = self.books.spaces.get(space_id)
        if space is None or space.doubted or (tenant is not None and space.tenant != tenant):
            return Pinned(0, 0, Reason.SPACE_UNKNOWN)
        self.books.next_command()
        pin = ReadLease(LeaseKind.PIN, None, space, None)
        leading, reason = self._leading(space, keys)
        for slot in leading:
            slot.holds += 1  # what makes room for one evicts no other
        for key in keys[: len(leading)]:
            why = self._pin_one(pin, space.index[key], now_ns)
            if why is not None:
                reason = why
                break
        release_holds(leading)
        if not pin.slots:
            return Pinned(0, 0, reason)
        self.books.pins[self.books.leases.add(pin)] = pin
        return Pinned(pin.id, len(pin.slots), reason)

    @staticmethod
    def _leading(space: Space, keys: Sequence[bytes]) -> tuple[list[Slot], Reason]:
        """The leading READY keys' slots, and why there are no more."""
        slots: list[Slot] = []
        for key in keys:
            slot = space.index.get(key)
            if slot is None or slot.state is not READY:
                missing = Reason.MISS_NEVER_STORED if slot is None else Reason.MISS_IN_PROGRESS
                return slots, missing
            slots.append(slot)
        return slots, Reason.OK

    def _pin_one(self, pin: ReadLease, slot: Slot, now_ns: int) -> Reason | None:
        """Adds one block to the pin, from wherever it is; why not."""
        if not slot.pins and not self._may_pin(slot):
            return Reason.PIN_LIMIT
        ingest = self.books.ingest
        there = slot if slot.pool.tier == ingest.tier else self.moves.bring(slot, ingest, now_ns)
        if there is None:
            return Reason.NO_SPACE
        there.pool.pinned_bytes += 0 if there.pins else there.pool.slot_bytes
        there.pins += 1
        there.holds += 1
        pin.slots.append(there)
        return None

    def _may_pin(self, slot: Slot) -> bool:
        ingest = self.books.ingest
        pinned = sum(pool.pinned_bytes for pool in ingest.pools.values())
        return (
            pinned + slot.pool.slot_bytes <= ingest.capacity_bytes * self.books.limits.pinned_share
        )

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
