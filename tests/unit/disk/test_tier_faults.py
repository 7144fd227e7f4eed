"""A disk tier on a device that is full, slow, failing or worn: it misses, says so, and resumes."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import ItemsView
from typing import Any

import pytest

from kvstore.model.reasons import KVStoreError, Reason
from kvstore.store.guarded import GuardedArchive
from kvstore.testing.clock import ManualClock
from kvstore.testing.files import Injection, Op
from kvstore.testing.folder import MemoryFolder
from kvstore.tiers.base import ArchiveStats
from kvstore.tiers.disk.guard import (
    FAILURES_IN_A_ROW,
    PROBE_BLOCKS,
    RETRY_NS_MAX,
    STALL_NS,
    Ages,
    Endurance,
    Path,
)
from tests.unit.disk.bench import (
    BLOCK,
    MS,
    RECORD,
    SECOND,
    SPACE,
    DiskBench,
    content,
    key,
    keys,
    room,
)

MIB = 1 << 20
DAY_S = 86_400


# ---------------------------------------------------------------- full


def test_a_small_file_system_is_filled_and_no_more() -> None:
    bench = DiskBench(MemoryFolder(capacity_bytes=8 * MIB), capacity_bytes=64 * MIB)
    for number in range(100):
        bench.save(keys(10, f"prompt {number}"))
        bench.pass_time(100 * MS)
    assert bench.folder.files.statvfs_now().free_bytes > 0
    found = bench.verify()
    assert len(found) * RECORD > 4 * MIB, "most of it is used"
    assert bench.find(keys(10, "prompt 99")) == keys(10, "prompt 99"), "what came last is there"
    assert bench.tier.stats().state == "ok"


@pytest.mark.slow
def test_room_that_others_take_is_given_and_used_again_when_it_returns() -> None:
    bench = DiskBench(MemoryFolder(capacity_bytes=16 * MIB), capacity_bytes=14 * MIB)
    for turn in range(20):
        for number in range(40):
            bench.save(keys(10, f"turn {turn} prompt {number}"))
        before = len(bench.verify())
        bench.folder.files.others_bytes = 10 * MIB
        for _ in range(6):
            bench.pass_time(SECOND)
            bench.save(keys(2, f"meanwhile {turn}"))
        files = bench.folder.files
        taken = sum(one.allocated_bytes for one in files.list().values())
        assert taken <= 6 * MIB, f"turn {turn}: it evicts to make room"
        assert len(bench.verify()) < before
        files.others_bytes = 0
        bench.pass_time(5 * SECOND)
        assert bench.save(keys(10, f"back {turn}")) == [True] * 10, f"turn {turn}: it resumes"
    assert taken <= bench.capacity_bytes


def test_an_index_without_room_is_helped_by_giving_up_segments() -> None:
    bench = DiskBench(MemoryFolder(capacity_bytes=8 * MIB), capacity_bytes=64 * MIB)
    for number in range(30):
        bench.save(keys(10, f"prompt {number}"))
    index, files = bench.folder.index, bench.folder.files
    files.others_bytes = 8 * MIB - sum(one.allocated_bytes for one in files.list().values())
    commit = index.commit

    def short_of_room(**change: object) -> None:
        if files.statvfs_now().free_bytes < 64 * 1024:
            raise OSError(errno.ENOSPC, "no space left on device")
        commit(**change)  # type: ignore[arg-type]

    index.commit = short_of_room  # type: ignore[method-assign]
    assert bench.save(keys(2, "refused")) == [False] * 2
    for _ in range(5):
        bench.pass_time(SECOND)
    assert bench.save(keys(2, "taken")) == [True] * 2
    assert bench.verify()


# ---------------------------------------------------------------- reading


def test_a_record_that_cannot_be_read_is_dropped() -> None:
    bench = DiskBench()
    bench.save(keys(3))
    bench.folder.files.inject(Injection(Op.PREADV, error=errno.EIO))
    with pytest.raises(OSError, match="error"):
        bench.load(key(0))
    assert bench.find(keys(3)) == keys(3)[1:]
    assert bench.count("read_errors kind=io") == 1
    assert bench.tier.usage().blocks == 3, "it may be the device"
    assert bench.reads(key(1))
    assert bench.tier.usage().blocks == 2, "the device works"
    assert bench.find(keys(3)) == keys(3)[1:]
    assert bench.tier.stats().state == "ok"


def test_a_record_that_cannot_be_read_is_written_anew() -> None:
    bench = DiskBench()
    bench.save(keys(1))
    bench.folder.files.inject(Injection(Op.PREADV, error=errno.EIO))
    assert not bench.reads(key(0))
    with pytest.raises(KVStoreError):
        bench.load(key(0))
    assert bench.save(keys(1)) == [True]
    assert bench.find(keys(1)) == keys(1)
    assert bench.reads(key(0))
    assert len(bench.verify()) == 1


def test_a_device_that_cannot_be_read_is_bypassed_and_tried_again() -> None:
    bench = DiskBench()
    bench.save(keys(20))
    bench.folder.files.inject(Injection(Op.PREADV, times=1 << 30, error=errno.ENODEV))
    for number in range(FAILURES_IN_A_ROW):
        assert bench.find(keys(20)) == keys(20), "one that is away is no block that is damaged"
        assert not bench.reads(key(number))
    assert bench.find(keys(20)) == []
    with pytest.raises(KVStoreError) as caught:
        bench.load(key(0))
    assert caught.value.reason is Reason.DECLINED_GUARD
    assert "reading bypassed" in bench.tier.stats().state
    bench.pass_time(SECOND)
    assert bench.find(keys(20)) == [], "the tier itself tries it"
    bench.folder.files.heal()
    bench.pass_time(RETRY_NS_MAX)
    assert bench.find(keys(20)) == keys(20)
    assert bench.reads(key(0))
    assert bench.tier.stats().state == "ok"


def test_a_device_that_fails_for_long_costs_no_block() -> None:
    bench = DiskBench()
    bench.save(keys(20))
    bench.folder.files.inject(Injection(Op.PREADV, times=1 << 30, error=errno.EIO))
    for turn in range(100):
        for one in bench.find(keys(20)):
            assert not bench.reads(one)
        bench.pass_time(SECOND)
        assert "reading bypassed" in bench.tier.stats().state, turn
    assert bench.count("read_errors kind=io") == FAILURES_IN_A_ROW
    bench.folder.files.heal()
    bench.pass_time(RETRY_NS_MAX)
    assert bench.find(keys(20)) == keys(20)
    assert all(bench.reads(one) for one in keys(20))
    assert bench.tier.stats().state == "ok"


def test_a_place_that_fails_is_not_the_device() -> None:
    bench = DiskBench()
    bench.save(keys(8))
    failing = Injection(Op.PREADV, times=FAILURES_IN_A_ROW + 2, error=errno.EIO)
    bench.folder.files.inject(failing)
    for one in keys(FAILURES_IN_A_ROW):
        assert not bench.reads(one)
    assert bench.find(keys(8)) == []
    bench.pass_time(SECOND)
    assert bench.find(keys(8)) == keys(8), "two tries failed, the third did not"


def test_nobody_is_sent_after_reads_that_hang() -> None:
    bench = DiskBench()
    bench.save(keys(5))
    go_on = threading.Event()
    hanging = threading.Barrier(3)

    def pause() -> None:
        hanging.wait(30)
        go_on.wait(30)

    bench.folder.files.inject(Injection(Op.PREADV, times=2, pause=pause))
    readers = [threading.Thread(target=bench.reads, args=(key(n),)) for n in range(2)]
    for reader in readers:
        reader.start()
    hanging.wait(30)
    assert bench.find(keys(5)) == keys(5)
    bench.clock.advance_ns(STALL_NS)
    assert bench.find(keys(5)) == []
    assert "does not answer" in bench.tier.stats().state
    go_on.set()
    for reader in readers:
        reader.join(30)
    assert bench.find(keys(5)) == keys(5)
    assert bench.reads(key(0))


def test_a_block_that_ages_out_while_it_is_read_is_a_miss_not_damage() -> None:
    bench = DiskBench()
    bench.save(keys(3))

    def forget_and_replace() -> None:
        bench.tier.forget([(SPACE, key(0))])
        bench.save(keys(40, "others"))

    bench.folder.files.inject(Injection(Op.PREADV, pause=forget_and_replace))
    with pytest.raises(KVStoreError) as caught:
        bench.tier.load(SPACE, key(0), content(SPACE, key(9)))
    assert caught.value.reason is Reason.MISS_EVICTED
    assert bench.count("corrupt_dropped") == 0


# ---------------------------------------------------------------- writing


def test_a_stop_is_told_once_and_tried_with_a_few_blocks() -> None:
    bench = DiskBench()
    bench.folder.files.inject(Injection(Op.CREATE, error=errno.EROFS))
    assert bench.save(keys(20)) == [False] * 20
    saved = bench.tier.save_batch(bench.chain(keys(2)))
    assert all(isinstance(one, KVStoreError) for one in saved)
    assert "read-only" in bench.tier.stats().state
    bench.clock.advance_ns(SECOND)
    assert bench.save(keys(20)) == [True] * PROBE_BLOCKS + [False] * (20 - PROBE_BLOCKS)
    assert bench.save(keys(20)) == [True] * 20
    assert bench.tier.stats().state == "ok"


def test_each_line_of_the_budget_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = DiskBench(endurance_bytes_per_day=10 * RECORD)
    for day in range(2):
        caplog.clear()
        for number in range(14):
            bench.save([key(100 * day + number)])
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2, said
        assert "80%" in said[0]
        assert "disk.endurance_bytes_per_day" in said[1]
        assert bench.tier.stats().gauges["writing_stopped"]
        bench.clock.advance_ns(DAY_S * SECOND)
        assert not bench.tier.stats().gauges["writing_stopped"]


def test_a_budget_of_writes_is_kept_and_comes_back() -> None:
    clock = ManualClock()
    bench = DiskBench(endurance_bytes_per_day=10 * RECORD, clock=clock)
    assert bench.save(keys(2)) == [True] * 2
    guarded = GuardedArchive(bench.tier)
    assert guarded.stats().gauges["save_chance_wanted"] == 0, "as foreseen half is used"
    assert guarded.stats().state == "ok"
    assert bench.save(keys(7)) == [True] * 7
    assert guarded.stats().gauges["save_chance_wanted"] == 1, "in so short a time"
    assert guarded.stats().state.startswith("ok (writes are short")
    assert bench.tier.stats().state == "ok"
    assert bench.save(keys(8)) == [True] * 8
    assert "80%" in bench.tier.stats().state
    assert bench.save(keys(12)) == [True] * 12, "the line is looked at before a batch"
    (refused,) = bench.tier.save_batch([bench.block(key(99))])
    assert isinstance(refused, KVStoreError)
    assert refused.reason is Reason.DECLINED_GUARD
    assert "disk.endurance_bytes_per_day" in str(refused)
    assert "budget" in bench.tier.stats().state
    assert all(bench.reads(one) for one in keys(12))
    assert bench.tier.stats().gauges["written_day_bytes"] == 12 * RECORD
    again = DiskBench(bench.folder.restarted(), endurance_bytes_per_day=10 * RECORD, clock=clock)
    assert again.save([key(99)]) == [False], "a restart does not bring it back"
    clock.advance_ns(DAY_S * SECOND)
    assert again.save([key(99)]) == [True]


# ---------------------------------------------------------------- numbers


def test_the_numbers_are_those_of_the_folder() -> None:
    bench = DiskBench()
    empty = bench.tier.stats()
    assert isinstance(empty, ArchiveStats)
    assert (empty.blocks, empty.used_bytes > 0) == (0, True)
    bench.save(keys(10))
    for one in keys(4):
        bench.load(one)
    stats = bench.tier.stats()
    assert (stats.blocks, stats.block_bytes) == (10, 10 * RECORD)
    assert stats.capacity_bytes == bench.capacity_bytes
    assert stats.regions == len(bench.folder.files.list())
    assert stats.counters["saves"] == 10
    assert stats.counters["saved_bytes"] == 10 * BLOCK
    assert stats.counters["loads"] == 4
    assert stats.counters["loaded_bytes"] == 4 * BLOCK
    assert stats.gauges["slots"] == stats.blocks + stats.free_slots
    assert bench.tier.usage().used_bytes == stats.used_bytes
    assert set(empty.counters) == set(stats.counters)


def test_the_age_of_what_makes_room_is_told() -> None:
    bench = DiskBench(capacity_bytes=room(64))
    for number in range(200):
        bench.save([key(number)])
        bench.clock.advance_ns(20 * SECOND)
    age_s = bench.tier.stats().gauges["eviction_age_seconds"]
    held = len(bench.find(keys(200)))
    assert 20 * held * 0.5 <= age_s <= 20 * held * 2


# ---------------------------------------------------------------- the guards alone


def test_a_path_is_tried_ever_more_seldom_but_within_five_seconds() -> None:
    path = Path()
    now_ns = 0
    assert path.failed("broken", now_ns)
    pauses = []
    for _ in range(8):
        before = now_ns
        while not path.allowed(now_ns):
            now_ns += 100 * MS
        pauses.append((now_ns - before) / SECOND)
        assert not path.failed("broken", now_ns), "told once"
    assert pauses == sorted(pauses)
    assert pauses[0] < 1
    assert pauses[-1] <= 5
    assert path.succeeded()
    assert not path.succeeded()
    assert path.failed("again", now_ns)


def test_a_trial_that_fails_is_no_new_stop_but_a_longer_pause() -> None:
    path = Path()
    path.failed("broken", 0)
    first_s = path.retry_in_s(0)
    path.seems_well()
    assert path.allowed(0) == PROBE_BLOCKS
    assert not path.failed("broken", 0)
    assert path.retry_in_s(0) > first_s
    path.seems_well()
    assert path.succeeded()
    assert path.allowed(0) > PROBE_BLOCKS


class Grown(Counter[Any]):
    """Counts to which another thread adds a name whenever they are gone through in Python."""

    def items(self) -> ItemsView[Any, int]:  # type: ignore[override]
        return ItemsView(self)

    def __getitem__(self, name: Any) -> int:
        self.setdefault(f"after {name}", 0)
        return super().__getitem__(name)


def test_numbers_are_told_while_threads_count_what_they_had_not_counted_before() -> None:
    bench = DiskBench()
    bench.save(keys(2))
    bench.tier.counts = Grown(bench.tier.counts)
    assert bench.tier.stats().counters["saves"] == 2
    endurance = Endurance(100)
    endurance.wrote(60, 0.0)
    endurance.wrote(30, 3_600.0)
    endurance._hours = Grown(endurance._hours)
    assert endurance.day_bytes(3_600.0) == 90
    assert Endurance(100, endurance.pack()).day_bytes(3_600.0) == 90


def test_written_bytes_are_counted_by_the_hour_and_survive_nonsense() -> None:
    hour_s = 3_600.0
    endurance = Endurance(100)
    endurance.wrote(60, 10 * hour_s)
    endurance.wrote(30, 20 * hour_s)
    assert endurance.day_bytes(20 * hour_s) == 90
    assert endurance.warns(20 * hour_s)
    assert not endurance.stop_reason(20 * hour_s)
    restored = Endurance(100, endurance.pack())
    assert restored.day_bytes(20 * hour_s) == 90
    assert restored.day_bytes(5 * hour_s) == 0, "a clock that was set back"
    assert restored.day_bytes(34.5 * hour_s) == 30
    assert endurance.bytes_per_s(20.5 * hour_s) == 30 / (1.5 * hour_s)
    assert endurance.bytes_per_s(21.5 * hour_s) == 30 / (1.5 * hour_s), "the hour before counts"
    assert endurance.bytes_per_s(22.5 * hour_s) == 0
    for nonsense in (b"", b"{", b"[]", b'{"a": 1}', b'{"1": "x"}', b"\xff"):
        assert Endurance(100, nonsense).day_bytes(0) == 0


def test_ages_reach_back_as_far_as_they_are_noted() -> None:
    ages = Ages()
    for step in range(100):
        ages.note(step * 10, step * 20 * SECOND)
    now_ns = 100 * 20 * SECOND
    assert ages.age_s(500, now_ns) == 1_000
    assert ages.age_s(0, now_ns) == 2_000
    assert ages.age_s(10_000, now_ns) == 0
