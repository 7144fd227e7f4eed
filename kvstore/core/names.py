"""Names: a block appears, is used, disappears; and who is told.

The only code that publishes a slot and that takes a name away for good. It tells the write group,
the leases that wrote the block and those that wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.books import Books
from kvstore.core.effects import Ready
from kvstore.core.leases import ReadLease, WriteGroup, WriteLease
from kvstore.core.pools import Fill, Pool, Slot
from kvstore.core.spaces import Space
from kvstore.core.states import SlotState
from kvstore.model.reasons import Reason

READY = SlotState.READY


class Names:
    """See the module's docstring. Shared by `moves`, `reads`, `writes` and the operator's verbs."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def publish(self, slots: Sequence[Slot], now_ns: int, *, moved: bool = False) -> None:
        """FILLING slots of one pool become READY at once; given from tail to head. `moved`: they
        came from another pool.
        """
        fills = [slot.fill for slot in slots]
        slots[0].pool.publish(slots, now_ns, moved=moved)
        for slot, fill in zip(slots, fills, strict=True):
            assert fill is not None
            assert slot.space is not None
            slot.space.blocks += 1
            self._end_fill(slot, slot.space, fill, Reason.OK, now_ns)

    def drop(self, slot: Slot, why: Reason, now_ns: int) -> None:
        """The name and the block are gone; the slot is DOOMED until its last hold ends."""
        space, fill = slot.space, slot.fill
        assert space is not None, "a free slot has no name"
        del space.index[slot.key]
        if why.is_miss or self.books.ghosts.get(space.id, slot.key) is None:
            # A write that failed does not explain the absence better than what came before it.
            self.books.ghosts.add(space.id, slot.key, why, now_ns)
        if slot.state is READY:
            space.blocks -= 1
            slot.pool.policy.departed(slot, why, now_ns)
            self.books.counters["blocks_dropped"] += 1
        if slot.pins:
            self._unpin(slot)
        self.stop_rising(slot)
        slot.pool.leave(slot)
        if fill is not None:
            self._end_fill(slot, space, fill, why, now_ns)

    def _end_fill(self, slot: Slot, space: Space, fill: Fill, why: Reason, now_ns: int) -> None:
        """Tells the write group, its leases and those who wait."""
        group = fill.group
        if group is not None:
            del group.fills[slot]
            if not group.fills:
                self._end_group(space, group)
        for lease in fill.leases:
            if why is Reason.OK:
                lease.visible += 1
            else:
                lease.failed += 1
                lease.reason = why
            self.drop_if_over(lease)
        for waiter, index in fill.waiters:
            self._resolve(waiter, index, slot if why is Reason.OK else None, why, now_ns)

    def _end_group(self, space: Space, group: WriteGroup) -> None:
        del space.groups[group.key]
        for session in group.sessions:
            session.groups.discard(group)
        group.sessions.clear()

    def abort_group(self, group: WriteGroup, why: Reason, now_ns: int) -> None:
        """Drops all unfinished blocks of a write group."""
        for slot in list(group.fills):
            self.drop(slot, why, now_ns)

    def drop_if_over(self, lease: WriteLease) -> None:
        """A commit that nobody will settle is forgotten once nothing is left of it."""
        if not lease.callers and not lease.ended and lease.settled and not lease.waiting:
            self.books.leases.remove(lease)

    def _unpin(self, slot: Slot) -> None:
        """Pins do not outlive the block: else an invalidated block would keep its slot."""
        for pin in self.books.pins.values():
            for index, held in enumerate(pin.slots):
                if held is slot:
                    pin.slots[index] = None
                    slot.holds -= 1
                    slot.pins -= 1
        slot.pool.pinned_bytes -= slot.pool.slot_bytes
        assert slot.pins == 0, "pins are counted"

    # ------------------------------------------------------------------ use

    def touch(self, slots: Sequence[Slot], now_ns: int) -> None:
        """READY slots were used, given from head to tail; the head ends up warmest."""
        for pool, of_pool in self._by_pool(slots):
            pool.touch(of_pool, now_ns)

    def use(self, slots: Sequence[Slot], prompt_tokens: int, now_ns: int) -> None:
        """As `touch`, and a reader asked for them, with a prompt of so many tokens."""
        for slot in slots:
            slot.prompt_tokens = prompt_tokens
        for pool, of_pool in self._by_pool(slots):
            pool.use(of_pool, now_ns)

    def _by_pool(self, slots: Sequence[Slot]) -> Iterable[tuple[Pool, list[Slot]]]:
        """Each pool's own, from tail to head."""
        backwards = list(slots)[::-1]
        if len(self.books.pools) == 1:
            return [(slots[0].pool, backwards)] if slots else []
        by_pool: dict[Pool, list[Slot]] = {}
        for slot in backwards:
            by_pool.setdefault(slot.pool, []).append(slot)
        return by_pool.items()

    def _resolve(
        self, lease: ReadLease, index: int, slot: Slot | None, why: Reason, now_ns: int
    ) -> None:
        """What a read lease waited for is there, or will not come."""
        if lease.ended or not lease.pending:
            return
        lease.pending -= 1
        if slot is not None:
            slot.holds += 1
            slot.hits += 1
            lease.slots[index] = slot
        else:
            lease.reasons[index] = why
        if not lease.pending:
            self.touch([s for s in lease.slots if s is not None and s.state is READY], now_ns)
            self.books.effects.append(Ready(lease.id))

    def stop_rising(self, slot: Slot) -> None:
        target, slot.rising = slot.rising, None
        if target is not None:
            target.pool.leave(target)

    def tell(self, lease: WriteLease) -> None:
        """Says once that a commit can be settled."""
        if lease.settled and not lease.told and not lease.ended:
            lease.told = True
            if lease.callers:
                self.books.effects.append(Ready(lease.id))
        self.drop_if_over(lease)
