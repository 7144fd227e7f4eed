"""Cores with one planted bug each, of the kinds that stores of this field really had."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.core import Core
from kvstore.core.effects import Copy, Forget
from kvstore.core.leases import Session, WriteGroup, WriteLease, WriteState
from kvstore.core.moves import Moves
from kvstore.core.names import Names
from kvstore.core.pools import Pool, Slot
from kvstore.core.spaces import Space
from kvstore.core.states import SlotState
from kvstore.core.writes import Writes
from kvstore.model.reasons import Reason


class _PublishesEarly(Writes):
    def _emit_copies(self, lease: WriteLease) -> None:
        super()._emit_copies(lease)
        if len(lease.space.layout.parts) == 1:
            filling = [slot for slot in lease.slots if slot.state is SlotState.FILLING]
            if filling:
                self.names.publish(filling[::-1], lease.until_ns)


class PublishedBeforeTheCopy(Core):
    writes_type = _PublishesEarly


class _KeepsGenerations(Moves):
    def take(
        self, pool: Pool, now_ns: int, outweighs: Callable[[Slot], bool] | None = None
    ) -> Slot | None:
        slot = super().take(pool, now_ns, outweighs)
        if slot is not None and slot.generation:
            slot.generation -= 1
        return slot


class GenerationNotRaised(Core):
    moves_type = _KeepsGenerations


class _LosesStaging(Writes):
    def abort(self, lease: WriteLease, why: Reason, now_ns: int) -> None:
        lease.extents = []
        super().abort(lease, why, now_ns)


class StagingLostByAbort(Core):
    writes_type = _LosesStaging


class _GivesStagingBackEarly(Writes):
    def expire(self, lease: WriteLease, now_ns: int) -> None:
        super().expire(lease, now_ns)
        if lease.state is WriteState.EXPIRED:
            self._give_back(lease, now_ns)


class StagingReusedUnderASlowWriter(Core):
    writes_type = _GivesStagingBackEarly


class _GivesUpItsCallers(Writes):
    def expire(self, lease: WriteLease, now_ns: int) -> None:
        super().expire(lease, now_ns)
        if lease.state is WriteState.COPIED:
            lease.callers = 0
            self.names.drop_if_over(lease)


class CommitNeverTold(Core):
    writes_type = _GivesUpItsCallers


class _MixesGroups(Writes):
    def _group(self, space: Space, session: Session, attempt: int) -> WriteGroup:
        return next(iter(space.groups.values()), None) or super()._group(space, session, attempt)


class PartsOfTwoGroupsMixed(Core):
    writes_type = _MixesGroups


class _ReclaimsLeased(Moves):
    def _press(self, pool: Pool, now_ns: int) -> None:
        for region in list(self._arena(pool).regions.values()):
            states = {slot.state for slot in region.slots}
            if region.pool is not pool and states <= {SlotState.FREE, SlotState.READY}:
                for slot in region.slots:
                    slot.holds = 0
                self.close_region(region, now_ns)
                break


class RegionReclaimedUnderALease(Core):
    moves_type = _ReclaimsLeased


class _EvictsLeased(Moves):
    def take(
        self, pool: Pool, now_ns: int, outweighs: Callable[[Slot], bool] | None = None
    ) -> Slot | None:
        coldest = pool.policy.coldest()
        if not pool.free and coldest is not None and coldest.holds:
            coldest.holds = 0
        return super().take(pool, now_ns, outweighs)


class EvictedUnderALease(Core):
    moves_type = _EvictsLeased


class _FillsTooSoon(Moves):
    def fly(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        flight = super().fly(*args, **kwargs)
        if flight.target is not None and flight.copy in flight.target.queued:
            flight.target.queued.remove(flight.copy)
            self.books.effects.append(flight.copy)
        return flight


class SlotFilledWhileItsVictimIsSaved(Core):
    moves_type = _FillsTooSoon


class _ForgetsTooSoon(Moves):
    def forget(self, space_id: int, key: bytes) -> None:
        self.books.effects += [Forget(tier, space_id, key) for tier in self.books.archives]


class NameForgottenBeforeItIsSaved(Core):
    moves_type = _ForgetsTooSoon


class _SparesWriters(Names):
    def drop(self, slot: Slot, why: Reason, now_ns: int) -> None:
        if why is not Reason.MISS_INVALIDATED or slot.state is not SlotState.FILLING:
            super().drop(slot, why, now_ns)


class CommittedAfterInvalidation(Core):
    names_type = _SparesWriters


class _FreesDoomed(Names):
    def drop(self, slot: Slot, why: Reason, now_ns: int) -> None:
        holds, slot.holds = slot.holds, 0
        super().drop(slot, why, now_ns)
        slot.holds = holds


class SlotFreedUnderACopy(Core):
    names_type = _FreesDoomed


class _ForgetsWaiters(Names):
    def drop(self, slot: Slot, why: Reason, now_ns: int) -> None:
        if slot.fill is not None:
            slot.fill.waiters.clear()
        super().drop(slot, why, now_ns)


class WaiterNeverTold(Core):
    names_type = _ForgetsWaiters


class _LosesQueued(Moves):
    def _end_leaving(self, slot: Slot) -> None:
        queued: list[Copy] = slot.queued
        slot.queued = queued[1:]
        super()._end_leaving(slot)


class QueuedCopyLost(Core):
    moves_type = _LosesQueued


PLANTED: tuple[type[Core], ...] = (
    PublishedBeforeTheCopy,
    GenerationNotRaised,
    StagingLostByAbort,
    StagingReusedUnderASlowWriter,
    CommitNeverTold,
    PartsOfTwoGroupsMixed,
    RegionReclaimedUnderALease,
    EvictedUnderALease,
    SlotFilledWhileItsVictimIsSaved,
    NameForgottenBeforeItIsSaved,
    CommittedAfterInvalidation,
    SlotFreedUnderACopy,
    WaiterNeverTold,
    QueuedCopyLost,
)
