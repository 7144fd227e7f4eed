"""Copies run in order, in batches, and are all answered, whatever happens to one of them."""

from __future__ import annotations

import errno
import logging
import os
import queue
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvstore import gather, shm
from kvstore.core.effects import Copy, Forget
from kvstore.lanes import TURN_BYTES_MAX
from kvstore.model.reasons import BlockCorrupt, KVStoreError, Reason
from kvstore.model.values import STAGING, Place, Region
from kvstore.mover import (
    READ_BYTES_MAX,
    SAVE_BYTES_MAX,
    SAVES_MAX,
    STALL_NS,
    UNHASHED,
    Completion,
    Mover,
    patience_ns,
)
from kvstore.tiers.base import ArchiveStats, ArchiveUsage, Bytes, Saved, SavedBlock
from kvstore.tiers.host import HostTier

SLOT = 4096
SLOTS = 4
HOST, OTHER, DISK = 0, 1, 2
HUNG_S = 30


class StepExecutor(Executor):
    """Runs what it was given when told to, on the caller's thread."""

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, lambda: fn(*args, **kwargs)))
        self.submitted += 1
        return future

    def step(self) -> None:
        future, call = self.given.pop(0)
        try:
            future.set_result(call())
        except (ArithmeticError, ValueError) as error:
            future.set_exception(error)

    def run(self) -> None:
        while self.given:
            self.step()


class StepClock:
    """Every reading is one microsecond after the one before."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def wall_s(self) -> float:
        return 0.0


class MemoryArchive:
    """An archive in a dictionary, that fails when told to."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, bytes], bytes] = {}
        self.failure: Exception | None = None
        self.batches: list[list[bytes]] = []
        self.forgettings: list[list[tuple[int, bytes]]] = []
        self.on_dropped = lambda space_id, keys: None

    async def find(self, space_id: int, keys: Sequence[bytes]) -> Collection[bytes]:
        return [key for key in keys if (space_id, key) in self.held]

    def wanted(self, space_id: int, keys: Sequence[bytes]) -> None:
        raise AssertionError("a mover does not tell what is used")

    def save_batch(self, blocks: Sequence[SavedBlock]) -> list[Saved]:
        self.batches.append([block.key for block in blocks])
        if isinstance(self.failure, OSError | KVStoreError):
            return [self.failure] * len(blocks)
        self._fail()
        for block in blocks:
            self.held[block.space_id, block.key] = block.data.tobytes()
        return [gather.digest(block.data) for block in blocks]

    def load(self, space_id: int, key: bytes, into: Bytes) -> bytes:
        self._fail()
        if (space_id, key) not in self.held:
            raise KVStoreError(Reason.MISS_EVICTED, "gone")
        into[:] = np.frombuffer(self.held[space_id, key], np.uint8)
        return gather.digest(into)

    def forget(self, names: Sequence[tuple[int, bytes]]) -> None:
        self._fail()
        self.forgettings.append(list(names))
        for name in list(self.held):
            if name in names or (name[0], b"") in names:
                del self.held[name]

    def describe(
        self, space_id: int, tenant: str, fingerprint_digest: bytes, slot_bytes: int
    ) -> None:
        raise AssertionError("the store tells an archive of spaces, not the mover")

    def stats(self) -> ArchiveStats:
        raise AssertionError("the mover asks for no numbers")

    def usage(self) -> ArchiveUsage:
        return ArchiveUsage(1 << 30, sum(map(len, self.held.values())), len(self.held))

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


class Bench:
    """A mover over two pools, a staging region and an archive."""

    def __init__(self, executor: Executor, archive_executor: Executor) -> None:
        self.pools: dict[int, HostTier] = {}
        for tier in (HOST, OTHER):
            self.pools[tier] = HostTier(1 << 20, region_bytes=1 << 16, mlock="off")
            header = shm.header_bytes(SLOTS)
            region = Region(1, tier, "t", SLOT, SLOTS, header, header + SLOTS * SLOT)
            self.pools[tier].assign(region)
        self.host = self.pools[HOST]
        self.host.assign_staging(9, SLOTS * SLOT)
        for slot in range(SLOTS):
            self.host.staging_view(9, slot * SLOT, SLOT)[:] = 100 + slot
        self.archive = MemoryArchive()
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.batches: list[list[Completion]] = []
        self.forgotten: list[tuple[int, bool]] = []
        self.clock = StepClock()
        self.mover = Mover(
            {HOST: self.host, OTHER: self.pools[OTHER], STAGING: self.host},
            clock=self.clock,
            post=self.posted.put,
            on_done=lambda batch: self.batches.append(list(batch)),
            executor=executor,
            archives={DISK: self.archive},
            archive_executor=archive_executor,
            on_forgotten=lambda count, durable: self.forgotten.append((count, durable)),
        )

    def deliver(self) -> list[Completion]:
        """Runs what was posted; returns all completions so far."""
        while not self.posted.empty():
            self.posted.get()()
        return [completion for batch in self.batches for completion in batch]

    def wait_for(self, count: int) -> list[Completion]:
        while sum(map(len, self.batches)) < count:
            self.posted.get(timeout=HUNG_S)()
        return self.deliver()

    def wait_until_idle(self) -> None:
        """Forgettings are answered apart."""
        deadline = time.monotonic() + HUNG_S
        while self.mover.in_flight:
            assert time.monotonic() < deadline, "hung"
            os.sched_yield()

    def slot(self, tier: int, slot: int) -> Bytes:
        return self.pools[tier].view(Place(tier, 1, slot, 0, 0), SLOT)

    def close(self) -> None:
        self.mover.close()
        for pool in self.pools.values():
            pool.close()


@pytest.fixture
def steps() -> StepExecutor:
    return StepExecutor()


@pytest.fixture
def disk_steps() -> StepExecutor:
    return StepExecutor()


@pytest.fixture
def bench(steps: StepExecutor, disk_steps: StepExecutor) -> Iterator[Bench]:
    made = Bench(steps, disk_steps)
    yield made
    made.close()


def staged(window: int) -> Place:
    return Place(STAGING, 9, 0, 0, window * SLOT)


def slot(tier: int, number: int, generation: int = 1) -> Place:
    return Place(tier, 1, number, generation, 0)


ARCHIVED = Place(DISK, 0, 0, 0, 0)


def commit(copy_id: int, window: int, number: int, generation: int = 1) -> Copy:
    target = slot(HOST, number, generation)
    return Copy(copy_id, "commit", 1, b"k", staged(window), target, SLOT)


def save(copy_id: int, number: int, key: bytes = b"k") -> Copy:
    return Copy(copy_id, "save", 1, key, slot(HOST, number), ARCHIVED, SLOT)


def load(copy_id: int, number: int, key: bytes = b"k") -> Copy:
    return Copy(copy_id, "load", 1, key, ARCHIVED, slot(HOST, number), SLOT)


# ---------------------------------------------------------------- one copy


def test_a_commit_moves_and_tells(bench: Bench, steps: StepExecutor) -> None:
    bench.mover.submit([commit(7, 2, 3, generation=41)])
    assert bench.mover.in_flight == 1
    steps.run()
    (done,) = bench.deliver()
    assert done == Completion(7, True, Reason.OK, UNHASHED, 1000)
    assert (bench.slot(HOST, 3) == 102).all()
    assert bench.host.generation(1, 3) == 41
    assert bench.mover.in_flight == 0


def test_a_part_goes_to_its_place_in_the_slot(bench: Bench, steps: StepExecutor) -> None:
    target = Place(HOST, 1, 0, 5, 1024)
    bench.mover.submit([Copy(1, "commit", 1, b"k", staged(1), target, 512)])
    steps.run()
    bench.deliver()
    held = bench.slot(HOST, 0)
    assert (held[1024:1536] == 101).all()
    assert held.astype(int).sum() == 512 * 101


def test_pools_and_archives_in_every_direction(
    bench: Bench, steps: StepExecutor, disk_steps: StepExecutor
) -> None:
    demote = Copy(2, "demote", 1, b"k", slot(HOST, 0), slot(OTHER, 1, 8), SLOT)
    bench.mover.submit([commit(1, 3, 0), demote, save(3, 0), load(4, 2)])
    for _ in range(4):
        steps.run()
        disk_steps.run()
    done = {completion.copy_id: completion for completion in bench.deliver()}
    assert set(done) == {1, 2, 3, 4}
    assert done[1].checksum == done[2].checksum == UNHASHED
    assert done[3].checksum == done[4].checksum == gather.digest(bench.slot(HOST, 2))
    for tier, number in ((OTHER, 1), (HOST, 2)):
        assert (bench.slot(tier, number) == 103).all()
    assert bench.pools[OTHER].generation(1, 1) == 8
    assert bench.archive.held == {(1, b"k"): bytes([103]) * SLOT}


class WatchedPool(HostTier):
    """Notes the slot's bytes at the moment its generation is written."""

    def __init__(self) -> None:
        super().__init__(1 << 20, region_bytes=1 << 16, mlock="off")
        self.seen: list[bytes] = []

    def set_generation(self, region_id: int, slot: int, generation: int) -> None:
        self.seen.append(self.view(Place(HOST, region_id, slot, 0, 0), SLOT).tobytes())
        super().set_generation(region_id, slot, generation)


@pytest.mark.parametrize("source", [staged(0), ARCHIVED])
def test_the_generation_is_written_before_the_first_byte(
    bench: Bench, steps: StepExecutor, disk_steps: StepExecutor, source: Place
) -> None:
    pool = WatchedPool()
    pool.assign(Region(1, HOST, "t", SLOT, 1, 4096, 4096 + SLOT))
    pool.view(slot(HOST, 0), SLOT)[:] = 50
    bench.archive.held[1, b"k"] = bytes([60]) * SLOT
    mover = Mover(
        {HOST: pool, STAGING: bench.host},
        clock=StepClock(),
        post=bench.posted.put,
        on_done=lambda batch: bench.batches.append(list(batch)),
        executor=steps,
        archives={DISK: bench.archive},
        archive_executor=disk_steps,
    )
    mover.submit([Copy(1, "load", 1, b"k", source, slot(HOST, 0, 2), SLOT)])
    steps.run()
    disk_steps.run()
    assert pool.seen == [bytes([50]) * SLOT]
    assert pool.view(slot(HOST, 0), SLOT)[0] != 50
    assert pool.generation(1, 0) == 2
    pool.close()


# ---------------------------------------------------------------- batches


def test_a_batch_costs_a_future_a_worker_and_one_wake_up(bench: Bench, steps: StepExecutor) -> None:
    copies = [commit(number, number % SLOTS, number % SLOTS) for number in range(64)]
    bench.mover.submit(copies)
    assert steps.submitted == 2
    steps.run()
    assert bench.posted.qsize() == 1
    assert len(bench.deliver()) == 64
    assert len(bench.batches) == 1
    assert steps.submitted == 2


def test_a_single_copy_starts_a_single_worker(bench: Bench, steps: StepExecutor) -> None:
    bench.mover.submit([commit(1, 0, 0)])
    bench.mover.submit([])
    assert steps.submitted == 1


def test_both_workers_share_a_batch(bench: Bench, steps: StepExecutor) -> None:
    turns = []
    bench.mover.submit([commit(number, 0, number) for number in range(SLOTS)])
    lane = bench.mover._pool_lane
    while lane.ready:
        turns.append([task.effect for task in bench.mover._next_turn(lane)])
    assert [len(turn) for turn in turns] == [2, 1, 1]


def test_a_turn_is_bounded_in_bytes(bench: Bench, steps: StepExecutor) -> None:
    big = [commit(n, 0, n)._replace(length=TURN_BYTES_MAX // 2 + 1) for n in range(SLOTS)]
    bench.mover.submit(big * 4)
    assert len(bench.mover._next_turn(bench.mover._pool_lane)) == 2


def test_wake_ups_follow_deliveries(bench: Bench, steps: StepExecutor) -> None:
    bench.mover.submit([commit(1, 0, 0)])
    steps.run()
    bench.deliver()
    bench.mover.submit([commit(2, 1, 0)])
    steps.run()
    assert [completion.copy_id for completion in bench.deliver()] == [1, 2]
    assert len(bench.batches) == 2


# ---------------------------------------------------------------- order


def test_a_slot_is_filled_after_its_save(
    bench: Bench, steps: StepExecutor, disk_steps: StepExecutor
) -> None:
    bench.slot(HOST, 0)[:] = 1
    bench.mover.submit([save(1, 0), commit(2, 3, 0)])
    steps.run()
    assert bench.deliver() == []
    assert (bench.slot(HOST, 0) == 1).all()
    disk_steps.run()
    steps.run()
    assert [completion.copy_id for completion in bench.deliver()] == [1, 2]
    assert bench.archive.held[1, b"k"] == bytes([1]) * SLOT
    assert (bench.slot(HOST, 0) == 103).all()


def test_a_slot_waits_for_copies_of_earlier_submissions(
    bench: Bench, steps: StepExecutor, disk_steps: StepExecutor
) -> None:
    bench.mover.submit([save(1, 0)])
    bench.mover.submit([commit(2, 3, 0)])
    assert steps.submitted == 0
    disk_steps.run()
    assert steps.submitted == 1


def test_other_slots_do_not_wait(bench: Bench, steps: StepExecutor) -> None:
    bench.mover.submit([save(1, 0), commit(2, 1, 1)])
    steps.run()
    assert [completion.copy_id for completion in bench.deliver()] == [2]


@pytest.mark.parametrize("key", [b"k", b""])
def test_a_name_is_forgotten_after_its_running_save(
    bench: Bench, disk_steps: StepExecutor, key: bytes
) -> None:
    bench.mover.submit([save(1, 0), save(2, 1, b"l")])
    bench.mover.forget(Forget(DISK, 1, key))
    bench.mover.submit([save(3, 2)])
    assert bench.mover.in_flight == 4
    disk_steps.run()
    assert [completion.copy_id for completion in bench.deliver()] == [1, 2, 3]
    assert set(bench.archive.held) == ({(1, b"k"), (1, b"l")} if key else {(1, b"k")})
    assert bench.mover.in_flight == 0


def test_order_leaves_nothing_behind(
    bench: Bench, steps: StepExecutor, disk_steps: StepExecutor
) -> None:
    bench.mover.submit([save(1, 0), commit(2, 3, 0), load(3, 1), Forget(DISK, 1, b"")])
    for _ in range(4):
        steps.run()
        disk_steps.run()
    assert bench.mover.in_flight == 0
    assert bench.mover._order._exclusive == {}
    assert bench.mover._order._shared == {}


# ---------------------------------------------------------------- saves in batches


def test_saves_of_a_submit_are_one_batch(bench: Bench, disk_steps: StepExecutor) -> None:
    bench.mover.submit([save(n, n, bytes([n])) for n in range(3)])
    bench.mover.submit([save(3, 3, b"later")])
    assert disk_steps.submitted == 1, "one thread writes to an archive"
    disk_steps.run()
    assert bench.archive.batches == [[bytes([0]), bytes([1]), bytes([2]), b"later"]]
    assert [done.ok for done in bench.deliver()] == [True] * 4
    assert len(bench.batches) == 1


def test_a_batch_of_saves_is_bounded_in_number_and_bytes(
    bench: Bench, disk_steps: StepExecutor
) -> None:
    bench.mover.submit([save(n, n, b"%d" % n) for n in range(SAVES_MAX + 2)])
    lane = bench.mover._write_lane
    lane.bytes_max = 10 * SLOT
    assert len(bench.mover._next_turn(lane)) == 10
    lane.bytes_max = SAVES_MAX * SLOT * 2
    assert len(bench.mover._next_turn(lane)) == SAVES_MAX - 8


@pytest.mark.parametrize(("length", "blocks"), [(READ_BYTES_MAX, 1), (READ_BYTES_MAX // 4, 4)])
def test_a_reader_takes_large_blocks_one_by_one(
    bench: Bench, disk_steps: StepExecutor, length: int, blocks: int
) -> None:
    loads = [load(n, n, b"%d" % n)._replace(length=length) for n in range(64)]
    bench.mover.submit(loads)
    assert len(bench.mover._next_turn(bench.mover._read_lane)) == blocks


def test_a_save_of_many_does_not_hold_up_loads(bench: Bench, disk_steps: StepExecutor) -> None:
    bench.archive.held[1, b"old"] = bytes([60]) * SLOT
    bench.mover.submit([save(1, 0), load(2, 1, b"old")])
    assert disk_steps.submitted == 2
    disk_steps.step()
    assert [done.copy_id for done in bench.deliver()] == [2]


def test_a_large_batch_of_saves_is_given_the_time_that_a_slow_disk_takes() -> None:
    assert patience_ns(0) == patience_ns(64 << 20) == STALL_NS
    assert patience_ns(SAVE_BYTES_MAX) == SAVE_BYTES_MAX * 10**9 // (64 << 20)


def test_forgettings_are_one_batch_and_are_told(bench: Bench, disk_steps: StepExecutor) -> None:
    bench.mover.submit([save(1, 0), Forget(DISK, 1, b"a"), Forget(DISK, 2, b"")])
    disk_steps.run()
    bench.deliver()
    assert bench.archive.forgettings == [[(1, b"a"), (2, b"")]]
    assert bench.forgotten == [(2, True)]
    bench.archive.failure = OSError(errno.EIO, "broken")
    bench.mover.submit([Forget(DISK, 1, b"k")])
    disk_steps.run()
    bench.deliver()
    assert bench.forgotten == [(2, True), (1, False)]


def test_saves_behind_a_stalled_one_are_given_up(bench: Bench, disk_steps: StepExecutor) -> None:
    bench.mover._write_lane.copies_max = 1
    stalled: list[list[int]] = []

    class Stalling(MemoryArchive):
        def save_batch(self, blocks: Sequence[SavedBlock]) -> list[Saved]:
            bench.mover.submit([save(2, 1, b"queued"), commit(3, 0, 1)])
            bench.deliver()
            bench.clock.now_ns += STALL_NS
            bench.mover.relieve()
            bench.mover.submit([save(4, 2, b"refused"), Forget(DISK, 1, b"queued")])
            stalled.append([done.copy_id for done in bench.deliver()])
            return super().save_batch(blocks)

    bench.mover._archives[DISK] = archive = Stalling()
    bench.mover.submit([save(1, 0)])
    disk_steps.run()
    assert stalled == [[2, 4]], "given up at once; their slots can be filled"
    assert bench.archive.forgettings == []
    done = {one.copy_id: one.reason for one in bench.deliver()}
    assert done == {1: Reason.OK, 2: Reason.LIMIT_QUEUE, 4: Reason.LIMIT_QUEUE}
    assert archive.forgettings == [[(1, b"queued")]]
    assert [task.effect for task in bench.mover._pool_lane.ready] == [commit(3, 0, 1)]


SLOT_OF_ANY = st.tuples(st.sampled_from([HOST, OTHER]), st.integers(0, SLOTS - 1))
KEYS = st.sampled_from([b"a", b"b"])


@st.composite
def effects(draw: st.DrawFn) -> Copy | Forget:
    kind = draw(st.sampled_from(["commit", "move", "save", "load", "forget"]))
    place, key = slot(*draw(SLOT_OF_ANY)), draw(KEYS)
    if kind == "commit":
        return Copy(0, "commit", 1, key, staged(draw(st.integers(0, SLOTS - 1))), place, SLOT)
    if kind == "move":
        return Copy(0, "demote", 1, key, slot(*draw(SLOT_OF_ANY)), place, SLOT)
    if kind == "save":
        return Copy(0, "save", 1, key, place, ARCHIVED, SLOT)
    if kind == "load":
        return Copy(0, "load", 1, key, ARCHIVED, place, SLOT)
    return Forget(DISK, 1, draw(st.sampled_from([b"a", b"b", b""])))


def outcome(bench: Bench, done: list[Completion]) -> tuple[object, ...]:
    slots = [bench.slot(tier, n).tobytes() for tier in (HOST, OTHER) for n in range(SLOTS)]
    facts = [(d.copy_id, d.ok, d.reason, d.checksum) for d in done]
    return slots, bench.archive.held, sorted(facts, key=lambda fact: fact[0])


@given(batches=st.lists(st.lists(effects(), max_size=8), max_size=4))
def test_many_threads_end_as_one_would(batches: list[list[Copy | Forget]]) -> None:
    """Whatever is submitted, the end is that of running one effect after the other."""
    numbered = [
        [e._replace(copy_id=100 * i + j) if isinstance(e, Copy) else e for j, e in enumerate(batch)]
        for i, batch in enumerate(batches)
    ]
    copies = sum(isinstance(effect, Copy) for batch in numbered for effect in batch)
    alone = Bench(step := StepExecutor(), step)
    for batch in numbered:
        for effect in batch:
            alone.mover.submit([effect])
            step.run()
    expected = outcome(alone, alone.deliver())
    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(5) as disk:
        crowd = Bench(pool, disk)
        for batch in numbered:
            crowd.mover.submit(batch)
        done = crowd.wait_for(copies)
        crowd.wait_until_idle()
    assert outcome(crowd, done) == expected
    alone.close()
    crowd.close()


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (OSError(errno.ENOSPC, "no space"), Reason.DISK_FULL),
        (OSError(errno.EIO, "broken"), Reason.IO_ERROR),
        (BlockCorrupt(Reason.MISS_CORRUPT, "bad checksum"), Reason.MISS_CORRUPT),
    ],
)
def test_a_failed_copy_is_answered_with_its_reason(
    bench: Bench, disk_steps: StepExecutor, failure: Exception, reason: Reason
) -> None:
    bench.archive.failure = failure
    bench.mover.submit([load(1, 0), Forget(DISK, 1, b"k")])
    disk_steps.run()
    (done,) = bench.deliver()
    assert (done.ok, done.reason, done.checksum) == (False, reason, None)
    bench.archive.failure = None
    bench.mover.submit([save(2, 0)])
    disk_steps.run()
    assert bench.deliver()[1].ok


def test_a_closed_region_fails_its_copies_alone(bench: Bench, steps: StepExecutor) -> None:
    gone = Copy(1, "commit", 1, b"k", staged(0), Place(HOST, 77, 0, 1, 0), SLOT)
    bench.mover.submit([gone, commit(2, 1, 1)])
    steps.run()
    facts = {done.copy_id: (done.ok, done.reason) for done in bench.deliver()}
    assert facts == {1: (False, Reason.REGION_UNKNOWN), 2: (True, Reason.OK)}


def test_a_defect_is_answered_logged_and_stops_nobody_else(
    bench: Bench, disk_steps: StepExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    bench.archive.failure = ZeroDivisionError("a defect")
    bench.mover.submit([save(number, number % SLOTS, bytes([number])) for number in range(12)])
    with caplog.at_level(logging.ERROR):
        disk_steps.run()
    done = bench.deliver()
    assert sorted(completion.copy_id for completion in done) == list(range(12))
    assert {completion.reason for completion in done} == {Reason.INTERNAL}
    assert "a defect" in caplog.text
    assert bench.mover.in_flight == 0
    bench.archive.failure = None
    bench.mover.submit([save(99, 0)])
    disk_steps.run()
    assert bench.deliver()[-1].ok


def test_the_rest_of_a_turn_outlives_a_defect(bench: Bench, steps: StepExecutor) -> None:
    good = [commit(number, 0, number) for number in range(SLOTS)]
    outside = [commit(100 + number, 0, SLOTS + number) for number in range(8)]
    bench.mover.submit([*outside[:6], *good, *outside[6:]])
    steps.run()
    facts = {done.copy_id: done.reason for done in bench.deliver()}
    assert facts == {
        **{copy.copy_id: Reason.OK for copy in good},
        **{copy.copy_id: Reason.INTERNAL for copy in outside},
    }
    assert bench.mover._pool_lane.active == 0


def test_logs_show_no_whole_key(
    bench: Bench, disk_steps: StepExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    bench.archive.failure = OSError(5, "Input/output error")
    bench.mover.submit([load(1, 0, bytes(range(32)))])
    with caplog.at_level(logging.DEBUG):
        disk_steps.run()
    assert "00010203" in caplog.text
    assert "0001020304" not in caplog.text


@pytest.mark.parametrize(
    ("failure", "lines"),
    [
        (KVStoreError(Reason.DECLINED_GUARD, "a guard has stopped reading"), 0),
        (KVStoreError(Reason.MISS_EVICTED, "aged out"), 0),
        (OSError(5, "Input/output error"), 8),
    ],
    ids=["refused", "aged out", "failed"],
)
def test_loads_that_a_guard_refuses_or_that_came_too_late_are_counted_not_told(
    bench: Bench,
    disk_steps: StepExecutor,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    lines: int,
) -> None:
    bench.archive.failure = failure
    bench.mover.submit([load(number, number % SLOTS, bytes([number])) for number in range(8)])
    with caplog.at_level(logging.DEBUG):
        disk_steps.run()
    assert len(bench.deliver()) == 8
    assert len([one for one in caplog.records if one.name == "kvstore.mover"]) == lines


def test_a_closed_mover_answers_nothing(bench: Bench, steps: StepExecutor) -> None:
    bench.mover.submit([commit(1, 0, 0), commit(2, 1, 0)])
    steps.step()
    bench.mover.close()
    steps.run()
    assert bench.deliver() == []
    with pytest.raises(RuntimeError, match="closed"):
        bench.mover.submit([commit(3, 0, 0)])


def test_archives_need_an_executor(bench: Bench, steps: StepExecutor) -> None:
    with pytest.raises(ValueError, match="executor"):
        Mover(
            {},
            clock=StepClock(),
            post=bench.posted.put,
            on_done=lambda batch: None,
            executor=steps,
            archives={DISK: bench.archive},
        )
