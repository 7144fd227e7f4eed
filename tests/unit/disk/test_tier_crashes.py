"""Crashes at every moment of a life of a disk tier, and every operation that fails once."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from kvstore.testing.files import Injection, Keep, Op
from kvstore.testing.folder import MemoryFolder
from kvstore.tiers.disk.dictindex import CommitFault
from tests.unit.disk.bench import BLOCK, SECOND, SPACE, DiskBench, key, keys, room

OTHER = 8
CAPACITY = room(40)
VERSIONS = range(4)


def live_a_life(bench: DiskBench) -> None:
    """Saves, evictions, names and spaces that are forgotten, saved anew, and tended between."""
    bench.save(keys(6, "first"))
    bench.save(keys(3, "second"))
    bench.tier.forget([(SPACE, key(1, "first"))])
    bench.tier.save_batch([bench.block(key(n), space_id=OTHER) for n in range(4)])
    bench.save([key(1, "first")], version=1)
    for number in range(10):
        bench.save(keys(5, f"filler {number}"), version=2)
    bench.pass_time(SECOND)
    for number in range(4):
        # Of another size: whole segments change hands.
        bench.tier.save_batch([bench.block(key(number, "long"), version=2, length=3 * BLOCK)])
    bench.tier.forget([(OTHER, b"")])
    bench.pass_time(SECOND)
    bench.save(keys(6, "first"), version=3)


def fresh() -> DiskBench:
    return DiskBench(capacity_bytes=CAPACITY, spaces=(SPACE, OTHER))


def check_restart(folder: MemoryFolder) -> set[tuple[int, bytes]]:
    """Starts on what a crash left: everything that is known must be right, and it must work."""
    again = DiskBench(folder, capacity_bytes=CAPACITY, spaces=(SPACE, OTHER))
    named = again.verify(VERSIONS)
    assert again.count("corrupt_dropped") == 0
    assert again.save(keys(6, "after")) == [True] * 6
    again.pass_time(SECOND)
    assert {(SPACE, one) for one in keys(6, "after")} <= again.verify(VERSIONS)
    assert again.tier.usage().used_bytes <= CAPACITY
    return named


@pytest.mark.parametrize(
    "keep", [pytest.param(Keep.ALL, marks=pytest.mark.slow), Keep.NONE, Keep.TORN, Keep.SECTORS]
)
def test_at_any_moment_what_was_committed_is_readable_and_the_rest_absent(keep: Keep) -> None:
    seed = 20_240_601
    chance = random.Random(seed)
    bench = fresh()
    live_a_life(bench)
    folder = bench.folder
    moments = list(folder.cuts())
    assert len(moments) > 100
    if keep is not Keep.ALL:
        moments = moments[chance.randrange(3) :: 3]
    for moment in moments:
        cut = folder.cut(moment, chance, keep)
        committed = {
            (row.space_id, row.key) for batch in cut.index.load() for row in batch.unpack()
        }
        gone = {
            int(name.removeprefix("gone-")) for name in cut.index.meta() if name.startswith("gone-")
        }
        named = check_restart(cut)
        expected = {name for name in committed if name[0] not in gone}
        assert named == expected, f"seed {seed}, moment {moment}"


def test_what_was_acknowledged_is_there_after_a_crash_right_then() -> None:
    bench = fresh()
    bench.save(keys(8))
    for number in range(8):
        restarted = DiskBench(
            bench.folder.cut(max(bench.folder.cuts()), random.Random(number), Keep.NONE),
            capacity_bytes=CAPACITY,
        )
        assert restarted.find(keys(8)) == keys(8)
        assert all(restarted.reads(one) for one in keys(8))


# ---------------------------------------------------------------- every n-th operation fails


def life_with(fault: Callable[[DiskBench], None]) -> DiskBench:
    """A life with a fault in it; whatever fails, nothing raises but a forgetting."""
    bench = fresh()
    fault(bench)
    for step in (live_a_life, live_a_life):
        try:
            step(bench)
        except OSError:
            # A forgetting that is not durable says so.
            bench.pass_time(5 * SECOND)
    bench.folder.files.heal()
    bench.folder.index.faults.clear()
    for _ in range(3):
        bench.pass_time(5 * SECOND)
    return bench


def assert_well(bench: DiskBench) -> None:
    bench.verify(VERSIONS)
    assert bench.save(keys(6, "well")) == [True] * 6
    assert bench.tier.stats().state == "ok"
    assert {(SPACE, one) for one in keys(6, "well")} <= bench.verify(VERSIONS)
    check_restart(bench.folder.restarted())


@pytest.mark.parametrize("op", [Op.CREATE, Op.PWRITEV, Op.FDATASYNC, Op.UNLINK, Op.STATVFS])
@pytest.mark.parametrize(
    "error", [pytest.param(errno.EIO, marks=pytest.mark.slow), errno.ENOSPC, errno.EROFS]
)
def test_any_operation_that_fails_once_costs_blocks_at_most(op: Op, error: int) -> None:
    for nth in range(1, 40, 1 if error == errno.EIO else 3):
        injection = Injection(op, nth, error=error, moved_bytes=512)
        bench = life_with(lambda one, injection=injection: one.folder.files.inject(injection))  # type: ignore[misc]
        assert_well(bench)
        if injection.times:
            break  # there is no n-th operation in a life
    assert nth > 1


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_any_commit_that_fails_costs_blocks_at_most(holds: bool, error: int) -> None:
    nth = 0
    while True:
        nth += 1

        def fault(bench: DiskBench, nth: int = nth) -> None:
            index = bench.folder.index
            index.faults[index.attempts + nth] = CommitFault(OSError(error, "broken"), holds)

        bench = life_with(fault)
        assert_well(bench)
        if nth > 30:
            break


def test_a_device_that_fails_for_long_costs_time_and_blocks_at_most() -> None:
    bench = fresh()
    bench.save(keys(6))
    bench.folder.files.inject(Injection(Op.PWRITEV, times=1 << 30, error=errno.EIO))
    for number in range(20):
        assert bench.save(keys(3, f"lost {number}")) == [False] * 3
        bench.pass_time(SECOND)
    assert bench.count("write_errors kind=io") <= 30, "of 60 blocks: it is tried now and then"
    assert bench.tier.stats().state != "ok"
    assert all(bench.reads(one) for one in keys(6)), "reads go on"
    bench.folder.files.heal()
    bench.pass_time(5 * SECOND)
    assert bench.save(keys(6, "again")) == [True] * 6, "within five seconds"
    assert_well(bench)


def test_a_failed_sync_loses_what_it_covered_and_no_more() -> None:
    bench = fresh()
    bench.save(keys(3))
    bench.folder.files.inject(Injection(Op.FDATASYNC, times=10, error=errno.EIO))
    assert bench.save(keys(3, "lost")) == [False] * 3
    assert bench.find(keys(3, "lost")) == []
    assert bench.find(keys(3)) == keys(3)
    bench.folder.files.heal()
    bench.pass_time(5 * SECOND)
    assert bench.save(keys(3, "lost")) == [True] * 3
    assert_well(bench)


def test_a_place_that_takes_no_bytes_is_not_used_again() -> None:
    bench = fresh()
    bench.save(keys(2))
    bench.folder.files.inject(Injection(Op.PWRITEV, 2, error=errno.EIO))
    assert bench.save(keys(3, "some")) == [True, False, True]
    assert bench.tier.stats().state == "ok", "one bad place does not stop the tier"
    assert bench.save([key(1, "some")]) == [True]
    assert_well(bench)
