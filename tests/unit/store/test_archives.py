"""Tiers below memory as the store sees them: found, loaded within a call's time, forgotten for
good, described before anything is saved there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from kvstore.core.effects import Copy, Forget, Wanted
from kvstore.gather import digest
from kvstore.model.hits import PENDING
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import CoreLimits
from kvstore.store.archives import Archives
from kvstore.store.guarded import GuardedArchive
from kvstore.testing.workload import fingerprint
from kvstore.tiers.base import ArchiveStats, ArchiveUsage, Bytes, Saved, SavedBlock
from tests.unit.store.stand import (
    BLOCK,
    MS,
    SECOND,
    STAGING_BLOCKS,
    FlakyLedger,
    Result,
    Stand,
    StepMover,
    block,
    keys,
)

DISK = 1
ON_DISK = 1 + DISK


class MemoryArchive:
    """An archive in a dictionary."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, bytes], bytes] = {}
        self.described: dict[int, tuple[str, bytes, int]] = {}
        self.on_dropped = lambda space_id, keys: None
        self.asked: list[list[bytes]] = []
        self.told: list[tuple[int, list[bytes]]] = []

    async def find(self, space_id: int, keys: Sequence[bytes]) -> Collection[bytes]:
        self.asked.append(list(keys))
        return [key for key in keys if (space_id, key) in self.held]

    def wanted(self, space_id: int, keys: Sequence[bytes]) -> None:
        self.told.append((space_id, list(keys)))

    def save_batch(self, blocks: Sequence[SavedBlock]) -> list[Saved]:
        for one in blocks:
            assert one.space_id in self.described, "told of before the first save"
            self.held[one.space_id, one.key] = one.data.tobytes()
        return [digest(one.data) for one in blocks]

    def load(self, space_id: int, key: bytes, into: Bytes) -> bytes:
        if (space_id, key) not in self.held:
            raise KVStoreError(Reason.MISS_EVICTED, "gone")
        into[:] = np.frombuffer(self.held[space_id, key], np.uint8)
        return digest(into)

    def forget(self, names: Sequence[tuple[int, bytes]]) -> None:
        for name in names:
            self.held.pop(name, None)

    def describe(
        self, space_id: int, tenant: str, fingerprint_digest: bytes, slot_bytes: int
    ) -> None:
        self.described[space_id] = (tenant, fingerprint_digest, slot_bytes)

    def usage(self) -> ArchiveUsage:
        return ArchiveUsage(1 << 30, len(self.held) * BLOCK, len(self.held))

    def stats(self) -> ArchiveStats:
        return ArchiveStats(1 << 30, len(self.held) * BLOCK, 0, len(self.held), 0, 1, 0, "ok")


class ArchiveMover(StepMover):
    """Moves to and from the archive too. `forgets`: those that have not ended. `load_ns`: what a
    load takes on the clock, one after the other.
    """

    def __init__(self, stand: Stand, archive: MemoryArchive) -> None:
        super().__init__(stand)
        self.archive = archive
        self.forgets: list[Forget] = []
        self.durable = True
        self.load_ns = MS

    def submit(self, moves: Sequence[Copy | Forget]) -> None:
        self.forgets += [move for move in moves if isinstance(move, Forget)]
        super().submit(moves)

    def step(self, count: int | None = None) -> None:
        store, host = self._stand.store, self._stand.host
        slow = [copy for copy in self.out if copy.why in ("load", "save")]
        self.out = [copy for copy in self.out if copy not in slow]
        for copy in slow:
            outcome: Saved
            try:
                if copy.why == "load":
                    into = host.view(copy.target, copy.length)
                    host.set_generation(
                        copy.target.region, copy.target.slot, copy.target.generation
                    )
                    outcome = self.archive.load(copy.space_id, copy.key, into)
                else:
                    data = host.view(copy.source, copy.length)
                    one = SavedBlock(copy.space_id, copy.key, copy.parent, copy.depth, data)
                    (outcome,) = self.archive.save_batch([one])
            except KVStoreError as error:
                outcome = error
            ok = isinstance(outcome, bytes)
            reason = Reason.OK if ok else Reason.MISS_EVICTED
            if copy.why == "load":
                self._stand.clock.advance_ns(self.load_ns)
            store.copies_done([(copy.copy_id, ok, reason, None, 1_000_000)])
        super().step(count)
        forgets, self.forgets = self.forgets, []
        if forgets:
            self.archive.forget([(one.space_id, one.key) for one in forgets])
            store.archives.forgotten(len(forgets), self.durable)


class Archived(Stand):
    """A stand above an archive that holds `old`, and a session."""

    def __init__(self, slots: int = 256, ledger: FlakyLedger | None = None) -> None:
        self.archive = MemoryArchive()
        limits = CoreLimits(staging_bytes=STAGING_BLOCKS * BLOCK)
        super().__init__(
            slots=slots,
            limits=limits,
            archives={DISK: self.archive},
            ledger=ledger or FlakyLedger(),
        )
        self.slow = ArchiveMover(self, self.archive)
        self.mover = self.slow
        self.store._mover = self.slow
        self.old = keys(5, "old")
        self.session = self.attach()
        self.space = self.run(self._opened())
        self.settle()
        self.archive.held.update({(self.space, key): block(key).tobytes() for key in self.old})

    def __enter__(self) -> Archived:
        return self

    async def _opened(self) -> int:
        return self.open(self.session)


def test_a_space_is_described_when_it_is_opened_and_when_it_is_restored() -> None:
    ledger = FlakyLedger()
    with Archived(ledger=ledger) as stand:
        offered = fingerprint()
        assert stand.archive.described == {stand.space: ("a", offered.digest, BLOCK)}
        space = stand.space
    fresh = MemoryArchive()
    with Stand(archives={DISK: fresh}, ledger=ledger) as again:
        again.run(_restored(again))
        assert fresh.described == {space: ("a", offered.digest, BLOCK)}


async def _restored(stand: Stand) -> None:
    stand.store.restore()


def test_a_look_up_sees_both_tiers_and_asks_from_the_first_absent_on() -> None:
    with Archived() as stand:
        chain = [*keys(2, "new"), *stand.old, *keys(1, "nowhere")]
        stand.put(stand.session, stand.space, chain[:2])
        assert stand.codes(stand.session, stand.space, chain) == bytes([1, 1, *[ON_DISK] * 5, 0])
        assert stand.archive.asked[-1] == chain[2:]


def test_an_archive_is_told_what_memory_uses_of_it() -> None:
    with Archived() as stand:
        guarded = GuardedArchive(stand.archive)
        archives = Archives(stand.store.core, {DISK: guarded}, stand.store.links, stand.clock)
        archives.told(Wanted(DISK, stand.space, stand.old))
        assert stand.archive.told == [(stand.space, stand.old)]


def test_a_call_that_has_time_gets_what_is_loaded_in_it() -> None:
    with Archived() as stand:
        without = stand.run(stand.acquire(stand.session, stand.space, stand.old))
        assert without.leased == 0, "no time, no load"
        leased = stand.run(stand.acquire(stand.session, stand.space, stand.old, load_ns=SECOND))
        assert leased.leased == 5
        stand.assert_right(leased, stand.old)
        assert stand.codes(stand.session, stand.space, stand.old) == bytes([1] * 5)


def test_an_answer_tells_the_slowest_tier_that_it_came_from() -> None:
    with Archived() as stand:
        new = keys(2, "new")
        stand.put(stand.session, stand.space, new)
        for chain, slowest in ((new, 0), ([*new, *stand.old], DISK), (stand.old, 0)):
            leased = stand.run(stand.acquire(stand.session, stand.space, chain, load_ns=SECOND))
            assert (leased.leased, leased.slowest) == (len(chain), slowest)


def test_each_measured_load_is_held_against_what_was_predicted_for_it() -> None:
    with Archived() as stand:
        link = stand.store.links[DISK]
        first_s = link.predict_ns(BLOCK) / 1e9
        stand.run(stand.acquire(stand.session, stand.space, stand.old[:1], load_ns=SECOND))
        stats = {one.tier: one for one in stand.store.stats().links}
        disk = stats[stand.store.tiers[DISK].name]
        assert (disk.samples, disk.moved_bytes, disk.moving_s) == (1, BLOCK, 0.001)
        assert disk.predicted_s == pytest.approx(first_s, abs=2e-9)
        assert disk.latency_s * 1e9 == link.latency_ns
        assert stats["host"].samples == 0


def test_what_lies_behind_a_hole_is_not_loaded() -> None:
    with Archived() as stand:
        chain = [*stand.old[:2], *keys(1, "nowhere"), *stand.old[2:]]
        leased = stand.run(stand.acquire(stand.session, stand.space, chain, load_ns=SECOND))
        assert leased.leased == 2
        codes = stand.codes(stand.session, stand.space, chain)
        assert codes == bytes([1, 1, 0, ON_DISK, ON_DISK, ON_DISK])


def test_a_load_that_is_late_is_a_miss_in_time_and_there_for_the_next() -> None:
    with Archived() as stand:
        stand.slow.held = True
        began_ns = stand.clock.monotonic_ns()
        late = stand.run(stand.acquire(stand.session, stand.space, stand.old, load_ns=200 * MS))
        assert (late.leased, late.reason) == (0, Reason.MISS_IN_PROGRESS)
        assert stand.clock.monotonic_ns() - began_ns <= 250 * MS
        assert stand.codes(stand.session, stand.space, stand.old) == bytes([PENDING] * 5)
        joined = stand.begin(stand.acquire(stand.session, stand.space, stand.old, load_ns=SECOND))
        assert len(stand.slow.out) == 5, "one load for both"
        stand.slow.held = False
        stand.slow.step()
        assert stand.run(_result(joined)).leased == 5
        assert stand.held[0] == 1


async def _result(task: asyncio.Task[Result]) -> Result:
    return await task


def test_a_reader_does_not_wait_for_writers_because_he_loads() -> None:
    with Archived() as stand:
        chain = [*stand.old, *keys(1, "unwritten")]
        stand.put(stand.session, stand.space, keys(1))
        reserved = stand.reserve(stand.session, stand.space, [*keys(1), *keys(1, "unwritten")])
        assert reserved.lease_id
        began_ns = stand.clock.monotonic_ns()
        leased = stand.run(stand.acquire(stand.session, stand.space, chain, load_ns=SECOND))
        assert leased.leased == 5
        assert stand.clock.monotonic_ns() - began_ns < SECOND


def test_an_invalidation_waits_until_the_archive_has_forgotten() -> None:
    with Archived() as stand:
        stand.slow.held = True
        stand.decide(
            lambda: stand.core.invalidate(
                space_id=stand.space, keys=stand.old, now_ns=stand.clock.monotonic_ns()
            )
        )
        assert not stand.run(stand.store.archives.until_forgotten(50 * MS))
        waiting = stand.begin(stand.store.archives.until_forgotten(SECOND))
        assert not waiting.done()
        stand.slow.held = False
        stand.slow.step()
        assert stand.run(_result(waiting)) is True
        assert stand.archive.held == {}
        assert stand.run(stand.store.archives.until_forgotten(0)) is True


def test_an_archive_that_could_not_record_it_is_told_so() -> None:
    with Archived() as stand:
        stand.slow.held = True
        stand.slow.durable = False
        stand.decide(
            lambda: stand.core.invalidate(
                space_id=stand.space, keys=stand.old[:1], now_ns=stand.clock.monotonic_ns()
            )
        )
        waiting = stand.begin(stand.store.archives.until_forgotten(SECOND))
        stand.slow.step()
        assert stand.run(_result(waiting)) is False
        assert stand.run(stand.store.archives.until_forgotten(SECOND)) is True


@pytest.mark.parametrize("broken", [False, True])
def test_a_durable_commit_is_told_durable_only_with_the_row_of_its_space(broken: bool) -> None:
    ledger = FlakyLedger()
    with Archived(ledger=ledger) as stand:
        ledger.broken = broken
        other = stand.run(_open_other(stand))
        chain = keys(3)
        reserved = stand.reserve(stand.session, other, chain)
        stand.fill(reserved, chain)
        result = stand.run(stand.commit(stand.session, reserved.lease_id, durable=True))
        assert result.visible == 3
        assert result.reason is (Reason.IO_ERROR if broken else Reason.OK)
        assert {(other, key) for key in chain} <= set(stand.archive.held)
        ledger.broken = False


def test_a_durable_commit_outlasts_its_reservations_deadline() -> None:
    with Archived() as stand:
        chain = keys(3)
        reserved = stand.reserve(stand.session, stand.space, chain, ttl_ns=SECOND)
        stand.fill(reserved, chain)
        stand.slow.held = True
        committing = stand.begin(stand.commit(stand.session, reserved.lease_id, durable=True))
        stand.slow.step()
        assert stand.core.stats().saves_in_flight == 3
        stand.pass_time(2 * SECOND)
        assert not committing.done()
        stand.slow.held = False
        stand.slow.step()
        result = stand.run(_result(committing))
        assert (result.visible, result.reason) == (3, Reason.OK)
        assert {(stand.space, key) for key in chain} <= set(stand.archive.held)


async def _open_other(stand: Archived) -> int:
    return stand.open(stand.session, fingerprint(model="other"))


def test_the_speed_of_loads_is_learnt() -> None:
    with Archived() as stand:
        link = stand.store.links[DISK]
        before = link.bytes_per_second
        stand.slow.held = True
        waiting = stand.begin(stand.acquire(stand.session, stand.space, stand.old, load_ns=SECOND))
        assert link.queued_bytes == 5 * BLOCK, "a plan sees the queue"
        stand.slow.held = False
        stand.slow.step()
        stand.run(_result(waiting))
        assert link.queued_bytes == 0
        assert (link.samples, link.moved_bytes) == (1, 5 * BLOCK), "five that shared the path"
        assert link.bytes_per_second < before


def test_what_goes_next_is_saved_from_a_tick() -> None:
    with Archived() as stand:
        assert stand.store.save_warmest() == 0
        stand.put(stand.session, stand.space, keys(6))
        stand.slow.held = True
        assert stand.store.save_warmest() == 6
        stand.slow.held = False
        stand.slow.step()
        assert stand.store.save_warmest() == 0
        assert {(stand.space, key) for key in keys(6)} <= set(stand.archive.held)


def test_what_an_archive_has_is_told_to_its_own_tenant_alone() -> None:
    with Archived() as stand:
        held_for = stand.store.archives.held_for
        assert set(stand.run(held_for("a", stand.space, stand.old))) == set(stand.old)
        assert stand.run(held_for("b", stand.space, stand.old)) == {}
        assert stand.run(held_for("a", stand.space + 1, stand.old)) == {}


def test_the_archives_numbers_are_among_the_stores() -> None:
    with Archived() as stand:
        stats = stand.store.stats()
        assert stats.archives["disk"].blocks == 5
        assert stats.tier_states["disk"] == "ok"
