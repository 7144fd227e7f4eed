"""Names and bytes on the move: taking slots, evicting, saving, demoting, loading, rising.

Names change at the moment of the command and bytes follow: a victim's name is gone (or points to
the slot below) before its bytes are copied, and the next fill of its slot waits for that copy. So
who is evicted hardly depends on when copies end. Past a bound of copies in flight a victim is
dropped unsaved, and counted; nothing ever waits in a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.core.arena import Arena
from kvstore.core.books import Books, Flight
from kvstore.core.effects import Assign, Copy, Forget, Unassign, Why
from kvstore.core.leases import WriteLease
from kvstore.core.names import Names
from kvstore.core.pools import Fill, Pool, RegionBook, Slot, release_holds
from kvstore.core.spaces import Space
from kvstore.core.states import SlotState
from kvstore.model.reasons import Reason
from kvstore.model.values import Place

FREE, FILLING, READY, DOOMED = SlotState

PASSED_MAX = 64
"""Blocks that are being saved are passed by for a victim whose slot is free at once."""


class Moves:
    """See the module's docstring. Used by the commands of `reads`, `writes` and `decisions`."""

    def __init__(self, books: Books, names: Names) -> None:
        self.books = books
        self.names = names

    # ------------------------------------------------------------------ slots

    def take(
        self, pool: Pool, now_ns: int, outweighs: Callable[[Slot], bool] | None = None
    ) -> Slot | None:
        """A FREE slot of the pool, by eviction if need be. None: everything is held, or was used by
        this very command, or by those that it spares; or the coldest is not outweighed.
        """
        if not pool.free and not self._grow(pool, now_ns):
            self._press(pool, now_ns)
            if not pool.free:
                if pool.spared and pool.spared_at != self.books.command:
                    pool.end_sparing(now_ns)
                pool.spared_at = self.books.command
                passes = PASSED_MAX if self._saves_ahead else 0
                victim = pool.victim(self.books.spared, pass_saves=passes)
                if victim is None or (outweighs is not None and not outweighs(victim)):
                    return None
                self.evict(victim, now_ns)
        return pool.free.popleft()

    def _arena(self, pool: Pool) -> Arena:
        arena = self.books.arenas[pool.tier]
        assert arena is not None, "a pool is in a pool tier"
        return arena

    def _grow(self, pool: Pool, now_ns: int) -> bool:
        arena = self._arena(pool)
        if arena.free_bytes < pool.slot_bytes:
            return False
        shape = arena.shape(pool.slot_bytes, arena.room_bytes(pool))
        if shape is None:
            return False
        region = arena.add_region(self.books.next_id("region"), pool, shape, now_ns)
        arena.claims.pop(pool, None)
        self.books.effects.append(Assign(region))
        return True

    def grant(self, pool: Pool, total_bytes: int, now_ns: int) -> None:
        """A pool's claim is met: it gets its region now, before another takes the bytes."""
        arena = self._arena(pool)
        while (shape := arena.shape(pool.slot_bytes, total_bytes)) is not None:
            region = arena.add_region(self.books.next_id("region"), pool, shape, now_ns)
            self.books.effects.append(Assign(region))
            total_bytes -= shape.total_bytes

    def _press(self, pool: Pool, now_ns: int) -> None:
        """Looks once a command whether another pool should give this one a region."""
        if pool.pressed_at == self.books.command:
            return
        pool.pressed_at = self.books.command
        for region in self._arena(pool).press(pool, now_ns):
            self.close_region(region, now_ns)

    def press_ahead(self, pool: Pool, slots: int, now_ns: int) -> None:
        """Before a command takes so many slots, and the next one perhaps as many."""
        lacking = 2 * slots - len(pool.free)
        if lacking > 0:
            for region in self._arena(pool).press_ahead(pool, lacking, now_ns):
                self.close_region(region, now_ns)

    def close_region(self, region: RegionBook, now_ns: int) -> None:
        """Evicts what is in it the ordinary way; it closes when nothing reads it any more."""
        arena = self._arena(region.pool)
        arena.retire(region)
        self.books.counters["regions_reclaimed"] += 1
        for slot in region.slots:
            if slot.state is READY:
                self.evict(slot, now_ns)
        self._close_if_left(region)

    def _close_if_left(self, region: RegionBook) -> None:
        if region.closing and not region.leaving:
            self._arena(region.pool).unassigned.add(region.info.id)
            self.books.effects.append(Unassign(region.info.id))

    # ------------------------------------------------------------------ down

    def evict(self, slot: Slot, now_ns: int) -> None:
        """READY, held by nobody but its own save -> FREE. The block goes down, or away."""
        space = slot.space
        assert space is not None
        assert slot.state is READY
        self._arena(slot.pool).evictions += 1
        space.blocks -= 1
        lower: Slot | None = None
        why = Reason.MISS_EVICTED
        if not slot.holds:
            lower = self._demote(slot, space, now_ns)
            why = self._save_victim(slot, space) if lower is None else Reason.OK
        if slot.holds:
            self._leave_by_running_save(slot, space)
        if lower is None:
            del space.index[slot.key]
            self.books.ghosts.add(space.id, slot.key, why, now_ns)
        slot.pool.policy.departed(slot, why, now_ns)
        slot.pool.leave(slot)

    def _leave_by_running_save(self, slot: Slot, space: Space) -> None:
        """A victim that is being saved as an ancestor, perhaps since its own demotion made room."""
        flight = self.books.saving[space.id, slot.key]
        assert (flight.source, slot.holds, slot.saves) == (slot, 1, 1), "a victim is not in use"
        slot.holds = slot.saves = 0
        self._begin_leaving(flight)

    def _demote(self, slot: Slot, space: Space, now_ns: int) -> Slot | None:
        arena = self.books.arena_below(slot.pool.tier)
        if arena is None or self.books.moves_full:
            return None
        return self._send(slot, space, arena, now_ns)

    def _send(self, slot: Slot, space: Space, arena: Arena, now_ns: int) -> Slot | None:
        """The name moves to a slot of another pool, the bytes follow."""
        pool = space.pools[arena.tier]
        assert pool is not None
        other = self.take(pool, now_ns)
        if other is None:
            return None
        pool.begin(other, space, slot.key, slot.parent, slot.depth, Fill(None))
        other.saved = slot.saved
        other.inherit(slot)
        space.index[slot.key] = other
        why: Why = "demote" if arena.tier > slot.pool.tier else "promote"
        self._begin_leaving(self._fly(why, space, slot.key, slot, other))
        return other

    def bring(self, slot: Slot, arena: Arena, now_ns: int) -> Slot | None:
        """Moves a READY block to another pool for a reader that cannot reach it where it is."""
        space = slot.space
        assert space is not None
        if slot.pins:
            return None
        slot.holds += 1  # making room there may send others to where it is
        other = self._send(slot, space, arena, now_ns)
        release_holds((slot,))
        if other is not None:
            space.blocks -= 1
            self.names.stop_rising(slot)
            slot.pool.policy.departed(slot, Reason.OK, now_ns)
            slot.pool.leave(slot)
        return other

    def _save_victim(self, slot: Slot, space: Space) -> Reason:
        """Saves a victim, with its ancestors first, if that is possible, worth it, and needed."""
        books = self.books
        archive = books.archive_below(slot.pool.tier)
        if archive is None or slot.saved:
            return Reason.MISS_EVICTED
        if not space.may_be_saved or not slot.pool.policy.admit(slot, books.admission[archive]):
            return Reason.MISS_NOT_ADMITTED
        if (space.id, slot.key) in books.saving:
            return Reason.MISS_EVICTED
        if self._saves_ahead:
            # The archive does not keep up: nobody who puts waits for it.
            books.counters["dropped_unsaved"] += 1
            return Reason.MISS_NOT_ADMITTED
        self._save_ancestors(slot, space, archive)
        if books.moves_full:
            books.counters["dropped_unsaved"] += 1
            return Reason.MISS_NOT_ADMITTED
        flight = self._fly_save(slot, space, archive)
        self._begin_leaving(flight)
        return Reason.MISS_EVICTED

    @property
    def _saves_ahead(self) -> bool:
        return self.books.limits.save_ahead_share > 0

    def _save_ancestors(self, slot: Slot, space: Space, archive: int) -> None:
        """Keeps the archive's set closed under parent, so that all of it can be reached later."""
        books = self.books
        missing: list[Slot] = []
        parent = space.index.get(slot.parent)
        while parent is not None and parent.state is READY and not parent.saved:
            if (space.id, parent.key) in books.saving:
                break
            missing.append(parent)
            parent = space.index.get(parent.parent)
        for ancestor in reversed(missing):
            if books.moves_full:
                break
            self._fly_save(ancestor, space, archive)
            _hold_for_save(ancestor)

    def save_for(self, slot: Slot, lease: WriteLease) -> None:
        """A durable commit waits until this READY block, and its ancestors, are in the archive."""
        space = lease.space
        archive = self.books.archive_below(slot.pool.tier)
        assert archive is not None
        if slot.saved:
            return
        flight = self.books.saving.get((space.id, slot.key))
        if flight is None:
            self._save_ancestors(slot, space, archive)
            flight = self._fly_save(slot, space, archive)
            _hold_for_save(slot)
        flight.durable.append(lease)
        lease.saves += 1

    def save(self, slot: Slot, archive: int) -> bool:
        """Saves a block that stays where it is, with its ancestors first. False: it cannot be saved
        now.
        """
        space = slot.space
        if (
            slot.state is not READY
            or slot.saved
            or space is None
            or not space.may_be_saved
            or (space.id, slot.key) in self.books.saving
        ):
            return False
        self._save_ancestors(slot, space, archive)
        if self.books.moves_full:
            return False
        self._fly_save(slot, space, archive)
        _hold_for_save(slot)
        return True

    def forget(self, space_id: int, key: bytes) -> None:
        """The archives drop the name; behind a running save of it."""
        if (space_id, key) in self.books.saving:
            self.books.forgetting.add((space_id, key))
        else:
            self.books.effects += [Forget(tier, space_id, key) for tier in self.books.archives]

    # ------------------------------------------------------------------ up

    def load(
        self,
        space: Space,
        key: bytes,
        parent: bytes,
        depth: int,
        prompt_tokens: int,
        archive: int,
        arena: Arena,
        now_ns: int,
    ) -> Slot | Reason:
        """Brings a block from an archive into a pool, for a prompt of so many tokens; the name is
        there at once, FILLING.
        """
        books = self.books
        if books.loads_full:
            return Reason.LIMIT_QUEUE
        pool = space.pools[arena.tier]
        assert pool is not None
        slot = self.take(pool, now_ns)
        if slot is None:
            return Reason.NO_SPACE
        pool.begin(slot, space, key, parent, depth, Fill(None))
        slot.saved = True
        slot.prompt_tokens = prompt_tokens
        space.index[key] = slot
        self._fly("load", space, key, None, slot, source=Place(archive, 0, 0, 0, 0))
        return slot

    def fly_up(self, slot: Slot) -> None:
        """Copies a READY, held block into the slot that it rises to; its name moves when the copy
        is done.
        """
        space = slot.space
        assert space is not None
        self._fly("promote", space, slot.key, slot, slot.rising)

    # ------------------------------------------------------------------ copies

    def _fly_save(self, slot: Slot, space: Space, archive: int) -> Flight:
        flight = self._fly("save", space, slot.key, slot, None, target=Place(archive, 0, 0, 0, 0))
        self.books.saving[space.id, slot.key] = flight
        return flight

    def _fly(
        self,
        why: Why,
        space: Space,
        key: bytes,
        source_slot: Slot | None,
        target_slot: Slot | None,
        *,
        source: Place | None = None,
        target: Place | None = None,
    ) -> Flight:
        """A copy of a whole block; it holds the slot that it fills."""
        if source is None:
            assert source_slot is not None
            source = source_slot.place()
        if target is None:
            assert target_slot is not None
            target = target_slot.place()
        return self.fly(
            why, space, key, source, target, space.layout.block_bytes, source_slot, target_slot
        )

    def fly(
        self,
        why: Why,
        space: Space,
        key: bytes,
        source: Place,
        target: Place,
        length: int,
        source_slot: Slot | None,
        target_slot: Slot | None,
        lease: WriteLease | None = None,
    ) -> Flight:
        """Emits a copy, behind the one that still reads what its target held before."""
        books = self.books
        copy = Copy(books.next_id("copy"), why, space.id, key, source, target, length)
        if why == "save":
            assert source_slot is not None
            copy = copy._replace(parent=source_slot.parent, depth=source_slot.depth)
        flight = Flight(copy, source_slot, target_slot, lease, False, [])
        books.flights[copy.copy_id] = flight
        if why == "load":
            books.loading += 1
            books.loading_bytes += length
        elif why != "commit":
            books.moving += 1
            books.moving_bytes += length
        if target_slot is not None:
            target_slot.holds += 1
            if target_slot.leaving:
                target_slot.queued.append(copy)
                return flight
        books.effects.append(copy)
        return flight

    def _begin_leaving(self, flight: Flight) -> None:
        slot = flight.source
        assert slot is not None, "what leaves was in a slot"
        assert not flight.leaves, "a copy leaves once"
        flight.leaves = True
        slot.leaving += 1
        slot.region.leaving += 1

    def _end_leaving(self, slot: Slot) -> None:
        slot.leaving -= 1
        slot.region.leaving -= 1
        if not slot.leaving:
            self.books.effects += slot.queued
            slot.queued.clear()
        self._close_if_left(slot.region)

    def _end_reading(self, flight: Flight) -> None:
        """The copy does not read its source slot any more."""
        source = flight.source
        assert source is not None
        if flight.leaves:
            self._end_leaving(source)
        else:
            source.saves -= flight.copy.why == "save"
            release_holds((source,))

    def landed(self, flight: Flight, ok: bool, reason: Reason, now_ns: int) -> None:
        """A copy other than a commit's is done."""
        why = flight.copy.why
        if why == "load":
            self.books.loading -= 1
            self.books.loading_bytes -= flight.copy.length
            self._loaded(flight, ok, reason, now_ns)
            return
        self.books.moving -= 1
        self.books.moving_bytes -= flight.copy.length
        self.books.counters["copies_failed"] += not ok
        if why == "save":
            self._saved(flight, ok, reason)
        elif flight.leaves:
            self._end_reading(flight)
            self._filled(flight, ok, reason, now_ns)
        else:
            self._promoted(flight, ok, now_ns)

    def _filled(self, flight: Flight, ok: bool, reason: Reason, now_ns: int) -> None:
        slot = flight.target
        assert slot is not None
        release_holds((slot,))
        if slot.state is not FILLING:
            return
        if ok:
            self.names.publish((slot,), now_ns, moved=flight.leaves)
        else:
            self.names.drop(slot, reason, now_ns)

    def _loaded(self, flight: Flight, ok: bool, reason: Reason, now_ns: int) -> None:
        self.books.counters["loads"] += 1
        if not ok:
            self.books.counters["loads_failed"] += 1
            if reason is Reason.MISS_CORRUPT:
                self.books.counters["loads_corrupt"] += 1
                self.forget(flight.copy.space_id, flight.copy.key)
        self._filled(flight, ok, reason, now_ns)

    def _promoted(self, flight: Flight, ok: bool, now_ns: int) -> None:
        source, target = flight.source, flight.target
        assert source is not None
        assert target is not None
        release_holds((source, target))
        if source.rising is not target:
            return
        if not ok or source.pins:
            self.names.stop_rising(source)
            return
        space = source.space
        assert space is not None
        source.rising = None
        target.saved = source.saved
        target.inherit(source)
        space.index[source.key] = target
        space.blocks -= 1
        source.pool.policy.departed(source, Reason.OK, now_ns)
        source.pool.leave(source)
        self.names.publish((target,), now_ns, moved=True)
        self.books.counters["promoted"] += 1

    def _saved(self, flight: Flight, ok: bool, reason: Reason) -> None:
        books, source = self.books, flight.source
        name = (flight.copy.space_id, flight.copy.key)
        assert source is not None
        del books.saving[name]
        space = books.spaces.get(name[0])
        same = not flight.leaves and source.state is READY
        self._end_reading(flight)
        forgotten = name in books.forgetting
        books.forgetting.discard(name)
        if forgotten or space is None:
            self.forget(*name)
        elif ok and same:
            source.saved = True
        books.counters["saved" if ok else "saves_failed"] += 1
        for lease in flight.durable:
            lease.saves -= 1
            again = space.index.get(name[1]) if forgotten and space is not None else None
            if again is not None and again.state is READY:
                self.save_for(again, lease)
            elif not ok or forgotten or space is None:
                lease.reason = reason if not ok else Reason.MISS_INVALIDATED
            self.names.tell(lease)

    # ------------------------------------------------------------------ facts from archives

    def unsaved(self, space: Space, keys: Iterable[bytes]) -> None:
        """An archive has aged these names out: evicting them is no longer free."""
        for key in keys:
            slot = space.index.get(key)
            if slot is not None:
                slot.saved = False
                slot.aged_ns = slot.touched_ns


def _hold_for_save(slot: Slot) -> None:
    """A save reads the slot under its name; it does not keep it from being evicted."""
    slot.holds += 1
    slot.saves += 1
