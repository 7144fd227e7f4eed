"""Writing: reserve, commit, abort, and the staging that writers fill.

Nothing of a reservation can be read before its commit, and all of it can after. A block of several
parts becomes READY when one write group has committed them all; what one rank gives up, loses or
lets expire, the whole write group loses.
"""

from __future__ import annotations

from kvstore.core.books import Books, Flight
from kvstore.core.leases import Session, WriteGroup, WriteLease, WriteState
from kvstore.core.moves import Moves
from kvstore.core.pools import Fill, Slot, release_holds
from kvstore.core.spaces import Space
from kvstore.core.staging import Staging
from kvstore.core.states import SlotState
from kvstore.core.through import Through
from kvstore.core.turns import Turns
from kvstore.model.layout import Part
from kvstore.model.reasons import Reason
from kvstore.model.values import STAGING, Before, CommitResult, Committed, Place, Reserved

READY = SlotState.READY
FILLING = SlotState.FILLING

SILENCE_NS = 10 * 10**9
"""After its deadline, in which a reservation's writer may still say that he has stopped."""
EXCHANGE_POLL_NS = 10**8


class Writes:
    """See the module's docstring."""

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves
        self.names = moves.names
        self.turns = Turns(books, moves)

    # ------------------------------------------------------------------ reserve

    def reserve(
        self,
        session: Session,
        space_id: int,
        chain: list[bytes],
        first: int,
        part_index: int,
        attempt: int,
        until_ns: int,
        before: Before,
        durable: bool,
        now_ns: int,
    ) -> Reserved:
        """Takes as many leading wanted blocks as staging and slots allow. What is present and to be
        durable is saved from now on: by the commit it might have made room.
        """
        space = self.books.space(session, space_id)
        if not isinstance(space, Space):
            return _refused(space)
        if not 0 <= part_index < len(space.layout.parts):
            return _refused(Reason.BAD_PART)
        part = space.layout.parts[part_index]
        if self.books.draining:
            return _refused(Reason.DRAINING, part)
        if part.length > self.books.limits.part_bytes_max:
            return _refused(Reason.PART_TOO_LARGE, part)
        if len(session.leases) >= self.books.limits.leases_per_session_max:
            return _refused(Reason.LIMIT_LEASES, part)
        mark = self.books.next_command(before.since)
        found = self._touch_chain(space, chain, now_ns)
        group = self._group(space, session, attempt)
        wanted, present, reserved = _offer(found, first, group, 1 << part_index)
        unsaved = self._unsaved(found) if durable else []
        if not wanted and not unsaved:
            return Reserved(0, [], [], 0, present, reserved, Reason.OK, part.length, mark)
        staging = self.turns.staging(session, part.length, now_ns)
        if not isinstance(staging, Staging):
            return Reserved(0, [], [], 0, present, reserved, staging, part.length, mark)
        lease = WriteLease(session, space, group, part_index, chain, staging, until_ns)
        reason = self._take(lease, wanted, found, before, now_ns)
        if wanted and not lease.slots:
            return Reserved(0, [], [], 0, present, reserved, reason, part.length, mark)
        self.books.leases.add(lease)
        if self._why_not_durable(space) is None:
            for slot in unsaved:
                self.moves.save_for(slot, lease)
        taken = wanted[: len(lease.slots)]
        return Reserved(
            lease.id,
            taken,
            lease.offsets,
            staging.region_id,
            present,
            reserved,
            reason,
            part.length,
            mark,
        )

    @staticmethod
    def _unsaved(found: list[Slot | None]) -> list[Slot]:
        return [slot for slot in found if slot and slot.state is READY and not slot.saved]

    def _why_not_durable(self, space: Space) -> Reason | None:
        if self.books.archive_below(self.books.ingest.tier) is None:
            return Reason.NO_DURABLE_TIER
        return None if space.may_be_saved else Reason.HELD_FOR_REVIEW

    def _touch_chain(self, space: Space, chain: list[bytes], now_ns: int) -> list[Slot | None]:
        """What there is of a chain. It was just used, and this command will not evict it."""
        command = self.books.command
        found = list(map(space.index.get, chain))
        ready = [slot for slot in found if slot is not None and slot.state is READY]
        for slot in ready:
            slot.command = command
        self.names.touch(ready, now_ns)
        return found

    def _group(self, space: Space, session: Session, attempt: int) -> WriteGroup:
        """The write group that is at work under this name, or a new one (not yet entered)."""
        key = (space.id, session.group, attempt)
        return space.groups.get(key) or WriteGroup(key)

    def _take(
        self,
        lease: WriteLease,
        wanted: list[int],
        found: list[Slot | None],
        before: Before,
        now_ns: int,
    ) -> Reason:
        """Slots and staging for the leading wanted blocks. OK, or why not for all."""
        space, group, chain = lease.space, lease.group, lease.chain
        extents = lease.staging.extents
        length = space.layout.parts[lease.part].length
        offsets, taken = extents.take(length, len(wanted))
        block_tokens = space.fingerprint.encoding.block_tokens
        prompt_tokens = (before.blocks + len(chain)) * block_tokens
        reason = Reason.OK if len(offsets) == len(wanted) else Reason.STAGING_BUSY
        pool = space.pools[self.books.ingest.tier]
        assert pool is not None
        self.moves.press_ahead(pool, len(offsets), now_ns)
        through = Through(self.books, self.moves, pool, found, before.blocks + len(chain))
        for index, _ in zip(wanted, offsets, strict=False):
            slot = found[index]
            if slot is None:
                slot = None if chain[index] in space.index else through.take(now_ns)
                if slot is None:
                    reason = Reason.NO_SPACE
                    break
                parent = chain[index - 1] if index else before.parent
                depth = before.blocks + index
                pool.begin(slot, space, chain[index], parent, depth, Fill(group))
                slot.command = self.books.command
                slot.prompt_tokens = prompt_tokens
                space.index[chain[index]] = slot
                group.fills[slot] = None
            assert slot.fill is not None
            slot.fill.reserved |= 1 << lease.part
            slot.fill.leases.append(lease)
            lease.slots.append(slot)
            lease.generations.append(slot.generation)
        if len(lease.slots) < len(offsets):
            for extent in taken:
                extents.give(extent)
            offsets, taken = extents.take(length, len(lease.slots)) if lease.slots else ([], [])
        lease.offsets, lease.extents = offsets, taken
        if lease.slots:
            space.groups[group.key] = group
            if len(space.layout.parts) > 1:
                group.sessions.add(lease.session)
                lease.session.groups.add(group)
        return reason

    def is_reserved(self, session: Session | None, lease_id: int) -> bool:
        """Whether a reservation may still be filled: its ranges may be another one's afterwards."""
        lease = self.books.leases.get(lease_id)
        return (
            isinstance(lease, WriteLease)
            and lease.session is session
            and lease.state is WriteState.RESERVED
        )

    # ------------------------------------------------------------------ staging

    def _give_back(self, lease: WriteLease, now_ns: int) -> None:
        """The lease's ranges are free: they were copied, or their writer has stopped."""
        staging = lease.staging
        for extent in lease.extents:
            staging.extents.give(extent)
        lease.extents = []
        if not staging.extents.used_bytes:
            staging.idle_ns = now_ns

    # ------------------------------------------------------------------ commit

    def commit(self, session: Session, lease_id: int, durable: bool, now_ns: int) -> Committed:
        """Starts the copies of what is left of the reservation."""
        lease = self.books.leases.get(lease_id)
        if not isinstance(lease, WriteLease) or lease.session is not session:
            return Committed(False, Reason.LEASE_UNKNOWN)
        if lease.state is WriteState.EXPIRED:
            self.abort(lease, Reason.LEASE_EXPIRED, now_ns)
            return Committed(False, Reason.LEASE_EXPIRED)
        if lease.state is not WriteState.RESERVED:
            lease.callers += 1
            return Committed(lease.told, Reason.OK)
        why = self._why_not_durable(lease.space) if durable else None
        if why is not None:
            return Committed(False, why)
        lease.durable = durable
        lease.callers = 1
        lease.state = WriteState.COPYING
        self._emit_copies(lease)
        if not lease.copies:
            lease.told = not lease.saves
            self._copied(lease, now_ns)
        return Committed(lease.told, Reason.OK)

    def _emit_copies(self, lease: WriteLease) -> None:
        space = lease.space
        part = space.layout.parts[lease.part]
        region = lease.staging.region_id
        for slot, generation, offset in zip(
            lease.slots, lease.generations, lease.offsets, strict=True
        ):
            if _alive(slot, generation):
                self.moves.fly(
                    "commit",
                    space,
                    slot.key,
                    Place(STAGING, region, 0, 0, offset),
                    slot.place(part.offset),
                    part.length,
                    None,
                    slot,
                    lease,
                )
                lease.copies += 1
        lease.staging.copies += lease.copies

    def landed(self, flight: Flight, ok: bool, reason: Reason, now_ns: int) -> None:
        """One copy of a commit is done."""
        slot, lease = flight.target, flight.lease
        assert slot is not None
        assert lease is not None
        alive = _alive(slot, flight.copy.target.generation)
        release_holds((slot,))
        if not ok and alive:
            self.names.drop(slot, reason, now_ns)
        lease.copies -= 1
        lease.staging.copies -= 1
        if not lease.copies:
            self._copied(lease, now_ns)
        self.turns.retire_if_unread(lease.staging, now_ns)

    def _copied(self, lease: WriteLease, now_ns: int) -> None:
        """All copies of the lease are done: what is complete now becomes READY at once."""
        lease.state = WriteState.COPIED
        self._give_back(lease, now_ns)
        complete: list[Slot] = []
        every_part = (1 << len(lease.space.layout.parts)) - 1
        for slot, generation in zip(lease.slots, lease.generations, strict=True):
            if _alive(slot, generation):
                assert slot.fill is not None
                slot.fill.done |= 1 << lease.part
                if slot.fill.done == every_part:
                    complete.append(slot)
        if complete:
            self._publish(lease, complete, now_ns)
        self.books.counters["commits"] += 1
        self.names.tell(lease)
        if lease.waiting and now_ns >= lease.until_ns:
            self.names.abort_group(lease.group, Reason.WRITE_GROUP_FAILED, now_ns)

    def _publish(self, lease: WriteLease, complete: list[Slot], now_ns: int) -> None:
        """Publishes head to tail given slots; the prompt's head ends up warmest of all of it."""
        self.names.publish(complete[::-1], now_ns)
        self.books.counters["blocks_stored"] += len(complete)
        found = map(lease.space.index.get, lease.chain)
        self.names.touch([s for s in found if s is not None and s.state is READY], now_ns)
        if lease.durable:
            for slot in complete:
                self.moves.save_for(slot, lease)

    def settle_commit(self, lease_id: int) -> CommitResult:
        """What became of a commit; what still waits goes on without the caller."""
        lease = self.books.leases.get(lease_id)
        if not isinstance(lease, WriteLease):
            return CommitResult(0, 0, 0, Reason.LEASE_UNKNOWN)
        if lease.state in (WriteState.RESERVED, WriteState.EXPIRED):
            return CommitResult(0, 0, len(lease.slots), Reason.LEASE_EXPIRED)
        result = CommitResult(lease.visible, lease.waiting, lease.failed, lease.reason)
        lease.callers = max(0, lease.callers - 1)
        self.names.drop_if_over(lease)
        return result

    # ------------------------------------------------------------------ abort, expiry

    def abort(self, lease: WriteLease, why: Reason, now_ns: int) -> None:
        """The writer has given the lease up. After the commit it only stops waiting for it."""
        if lease.state in (WriteState.RESERVED, WriteState.EXPIRED):
            self._give_back(lease, now_ns)
            self.books.leases.remove(lease)
            self._lose_blocks(lease, why, now_ns)
        else:
            lease.callers = 0
            self.names.drop_if_over(lease)

    def expire(self, lease: WriteLease, now_ns: int) -> None:
        """The deadline is over. Keys are free at once; staging ranges only when the writer is known
        to have stopped, because a slow copy of his may still go there: if he says nothing for long,
        the whole staging is exchanged. A commit that was given goes on, and its caller is told: he
        has a deadline of his own.
        """
        if lease.state is WriteState.RESERVED:
            lease.state = WriteState.EXPIRED
            self.books.counters["reservations_expired"] += 1
            self._lose_blocks(lease, Reason.LEASE_EXPIRED, now_ns)
            self.books.leases.prolong(lease, now_ns + SILENCE_NS)
        elif lease.state is WriteState.EXPIRED:
            self._exchange_staging(lease, now_ns)
        elif lease.state is WriteState.COPIED and lease.waiting:
            self._lose_blocks(lease, Reason.LEASE_EXPIRED, now_ns)

    def _exchange_staging(self, lease: WriteLease, now_ns: int) -> None:
        """Takes the staging away from under a writer who hangs, once nobody else of his session
        writes there: what he still writes goes into a region that is no more.
        """
        session, staging = lease.session, lease.staging
        users = [
            one
            for one in session.leases.values()
            if isinstance(one, WriteLease) and one.staging is staging and one.extents
        ]
        staging.stuck = True
        if any(one.state is not WriteState.EXPIRED for one in users):
            self.books.leases.prolong(lease, now_ns + EXCHANGE_POLL_NS)
            return
        for one in users:
            one.extents = []
            self.books.leases.remove(one)
        self.books.counters["staging_exchanged"] += 1
        self.turns.close(session, now_ns)

    def _lose_blocks(self, lease: WriteLease, why: Reason, now_ns: int) -> None:
        """Drops what is unfinished: of the lease, or of the whole write group if it has parts."""
        if len(lease.space.layout.parts) > 1:
            if lease.waiting:
                self.names.abort_group(lease.group, Reason.WRITE_GROUP_FAILED, now_ns)
            return
        for slot, generation in zip(lease.slots, lease.generations, strict=True):
            if _alive(slot, generation):
                self.names.drop(slot, why, now_ns)


def _alive(slot: Slot, generation: int) -> bool:
    """Whether the slot is still being filled for the lease that noted this generation."""
    return slot.state is FILLING and slot.generation == generation


def _refused(reason: Reason, part: Part | None = None) -> Reserved:
    return Reserved(0, [], [], 0, 0, 0, reason, 0 if part is None else part.length)


def _offer(
    found: list[Slot | None], first: int, group: WriteGroup, bit: int
) -> tuple[list[int], int, int]:
    """Which offered blocks this part is wanted for; how many are present, and being written."""
    wanted: list[int] = []
    present = reserved = 0
    for index in range(max(first, 0), len(found)):
        slot = found[index]
        if slot is None:
            wanted.append(index)
            continue
        fill = slot.fill
        if fill is None or fill.group is None:
            present += 1
        elif fill.group is group and not fill.reserved & bit:
            wanted.append(index)
        else:
            reserved += 1
    return wanted, present, reserved
