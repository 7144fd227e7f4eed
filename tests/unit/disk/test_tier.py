"""The disk tier over a folder in memory: what it promises of blocks, restarts, damage and room."""

from __future__ import annotations

import errno
import threading

import pytest

from kvstore.model.reasons import BlockCorrupt, KVStoreError, Reason
from kvstore.testing.files import Injection, Op
from kvstore.testing.folder import MemoryFolder
from kvstore.tiers.disk.dictindex import CommitFault
from kvstore.tiers.disk.format import HEADER_BYTES
from kvstore.tiers.disk.rows import Unusable
from tests.unit.disk.bench import (
    BLOCK,
    KIB,
    RECORD,
    SECOND,
    SPACE,
    DiskBench,
    content,
    key,
    keys,
    room,
)

OTHER = 8


# ---------------------------------------------------------------- blocks


def test_what_is_saved_is_found_and_read_back() -> None:
    bench = DiskBench()
    chain = keys(5)
    assert bench.find(chain) == []
    assert bench.save(chain) == [True] * 5
    assert bench.find([*chain, key(99)]) == chain
    assert all(bench.reads(one) for one in chain)
    assert bench.tier.usage().blocks == 5
    assert bench.verify() == {(SPACE, one) for one in chain}


def test_the_digest_of_a_save_is_that_of_its_load() -> None:
    bench = DiskBench()
    (saved,) = bench.tier.save_batch([bench.block(key(0))])
    assert saved == bench.tier.load(SPACE, key(0), content(SPACE, key(1)))


def test_blocks_of_any_length_come_back_whole() -> None:
    bench = DiskBench()
    lengths = [64, 4 * KIB - 64, 4 * KIB, 4 * KIB + 64, 20 * KIB, 1 << 20]
    blocks = [bench.block(key(length), length=length) for length in lengths]
    assert all(isinstance(one, bytes) for one in bench.tier.save_batch(blocks))
    again = bench.again()
    for length in lengths:
        got = again.load(key(length), length=length)
        assert got.tobytes() == content(SPACE, key(length), 0, length).tobytes()


def test_a_batch_is_written_by_several_threads_and_ends_when_all_have() -> None:
    bench = DiskBench(parallel=True)
    both = threading.Barrier(2)

    def meet() -> None:
        both.wait(20)

    # The device answers the first write only when there is a second one.
    bench.folder.files.inject(Injection(Op.PWRITEV, times=2, pause=meet))
    chain = keys(64)
    assert bench.save(chain) == [True] * 64
    assert all(bench.reads(one) for one in chain)
    assert bench.again().find(chain) == chain
    bench.tier.close()


def test_the_next_segment_is_made_between_batches() -> None:
    bench = DiskBench(capacity_bytes=room(32 * 8))
    assert bench.save(keys(8)) == [True] * 8
    bench.tier.tend()
    made = len(bench.folder.files.list())
    assert made >= 2
    assert bench.save(keys(8, "other")) == [True] * 8
    assert len(bench.folder.files.list()) == made
    assert bench.verify() == {(SPACE, one) for one in [*keys(8), *keys(8, "other")]}


def test_a_segment_made_ahead_is_removed_if_a_crash_comes_before_it_is_used() -> None:
    bench = DiskBench(capacity_bytes=room(32 * 8))
    bench.save(keys(8))
    used = bench.folder.files.list().keys()
    bench.tier.tend()
    assert bench.folder.files.list().keys() > used
    again = bench.again()
    again.tier.tend()
    assert again.folder.files.list().keys() == used
    assert again.find(keys(8)) == keys(8)


def test_no_room_for_a_segment_ahead_is_no_trouble() -> None:
    bench = DiskBench(capacity_bytes=room(32 * 8))
    bench.save(keys(8))
    bench.folder.files.inject(Injection(Op.CREATE, error=errno.ENOSPC))
    bench.tier.tend()
    assert bench.tier.stats().state == "ok"
    assert bench.save(keys(8, "other")) == [True] * 8


def test_what_is_there_already_stays_as_it_is() -> None:
    bench = DiskBench()
    first = bench.tier.save_batch([bench.block(key(0))])
    writes = bench.count("saves")
    assert bench.tier.save_batch([bench.block(key(0), version=1)]) == first
    assert bench.count("saves") == writes
    assert bench.reads(key(0))


def test_a_block_of_an_unknown_space_is_neither_saved_nor_read() -> None:
    bench = DiskBench()
    (saved,) = bench.tier.save_batch([bench.block(key(0), space_id=OTHER)])
    assert isinstance(saved, KVStoreError)
    assert saved.reason is Reason.SPACE_CLOSED
    with pytest.raises(KVStoreError) as caught:
        bench.load(key(0), OTHER)
    assert caught.value.reason is Reason.MISS_EVICTED


def test_spaces_do_not_see_each_other() -> None:
    bench = DiskBench(spaces=(SPACE, OTHER))
    bench.tier.save_batch([bench.block(key(0)), bench.block(key(0), space_id=OTHER, version=3)])
    assert bench.reads(key(0))
    assert bench.reads(key(0), OTHER, versions=(3,))
    bench.tier.forget([(OTHER, key(0))])
    assert bench.find([key(0)], OTHER) == []
    assert bench.reads(key(0))


def test_what_pools_use_outlives_what_was_saved_with_it() -> None:
    bench = DiskBench(capacity_bytes=room(64))
    used, unused = keys(8, "used"), keys(8, "unused")
    bench.save(used)
    bench.save(unused)
    for number in range(40):
        bench.tier.wanted(SPACE, [*used, key(0, "nobody has it")])
        bench.save(keys(8, f"other {number}"))
        if not bench.find(unused):
            break
    assert bench.find(unused) == []
    assert bench.find(used) == used
    bench.tier.wanted(OTHER, used)
    assert all(bench.reads(one) for one in used)


def test_when_it_is_full_the_coldest_go_and_are_told() -> None:
    bench = DiskBench(capacity_bytes=room(64))
    for number in range(100):
        assert bench.save([key(number)]) == [True]
    found = bench.find(keys(100))
    assert 32 <= len(found) < 64
    assert found[-1] == key(99)
    gone = {one for _, one in bench.dropped}
    assert gone == set(keys(100)) - set(found)
    assert bench.tier.usage().used_bytes <= bench.capacity_bytes
    assert bench.tier.stats().evictions == len(bench.dropped)
    assert len(bench.verify()) == len(found)


def test_what_is_read_outlives_what_is_not() -> None:
    bench = DiskBench(capacity_bytes=room(64))
    hot = key(0, "hot")
    bench.save([hot])
    for number in range(200):
        bench.save([key(number)])
        assert bench.reads(hot)


@pytest.mark.parametrize("length", [BLOCK, 8 * BLOCK])
def test_what_made_room_for_its_own_batch_is_not_said_to_be_saved(length: int) -> None:
    """Of one size what was there before goes, of two what was just written for the batch, too."""
    bench = DiskBench(capacity_bytes=room(24))
    old = [bench.block(one) for one in keys(20, "old")]
    assert all(isinstance(one, bytes) for one in bench.tier.save_batch(old))
    small = [bench.block(one) for one in keys(2, "small")]
    batch = [*old, *small, *(bench.block(one, length=length) for one in keys(8, "new"))]
    answers = bench.tier.save_batch(batch)
    gone = {one for _, one in bench.dropped}
    assert gone & {block.key for block in batch}
    said = [b.key for b, one in zip(batch, answers, strict=True) if isinstance(one, bytes)]
    assert said == bench.find([block.key for block in batch]) == bench.again().find(said)
    refused = [one for one in answers if isinstance(one, KVStoreError)]
    assert {one.reason for one in refused} == {Reason.NO_SPACE}


# ---------------------------------------------------------------- restarts


def test_a_restart_finds_what_was_committed() -> None:
    bench = DiskBench()
    bench.save(keys(20))
    again = bench.again()
    assert again.find(keys(20)) == keys(20)
    assert len(again.verify()) == 20
    again.save(keys(20, "later"))
    third = again.again()
    assert len(third.verify()) == 40


def test_no_write_of_a_folder_has_the_generation_of_another() -> None:
    bench = DiskBench()
    seen: set[int] = set()
    for number in range(4):
        bench.save(keys(3, f"round {number}"))
        volume = bench.tier.volume
        assert volume is not None
        generations = [
            row.row.generation for batch in volume.index.load() for row in batch.unpack()
        ]
        fresh = set(generations) - seen
        assert len(fresh) == 3
        assert min(fresh) > max(seen, default=0)
        seen |= fresh
        bench = bench.again()


def test_rows_of_spaces_that_are_gone_are_removed_before_anything_is_written() -> None:
    bench = DiskBench(spaces=(SPACE, OTHER))
    bench.tier.save_batch([bench.block(key(n), space_id=OTHER) for n in range(5)])
    bench.save(keys(5))
    again = bench.again(spaces=(SPACE,))
    volume = again.tier.volume
    assert volume is not None
    assert volume.index.row_count() == 5
    assert again.find(keys(5)) == keys(5)
    again.describe(OTHER)
    assert again.find(keys(5), OTHER) == [], "also if its number were given again"


def test_a_smaller_capacity_is_worked_off_and_a_larger_one_used() -> None:
    bench = DiskBench(capacity_bytes=room(256))
    for number in range(200):
        bench.save([key(number)])
    small = bench.again(capacity_bytes=room(80))
    small.pass_time(SECOND)
    assert small.tier.usage().used_bytes <= small.capacity_bytes
    kept = len(small.verify())
    assert 0 < kept < 80
    large = small.again(capacity_bytes=room(256))
    for number in range(150):
        large.save([key(number, "more")])
    assert len(large.verify()) > kept + 100


def test_a_segment_whose_file_is_gone_is_given_up() -> None:
    bench = DiskBench()
    bench.save(keys(3))
    folder = bench.folder.restarted()
    (segment,) = folder.files.list()
    folder.files.unlink(segment)
    again = DiskBench(folder)
    assert again.find(keys(3)) == []
    assert again.count("lost_segments") == 1
    assert again.save(keys(3)) == [True] * 3
    assert len(again.again().verify()) == 3


def test_files_that_no_commit_named_are_removed_later() -> None:
    bench = DiskBench()
    bench.save(keys(3))
    folder = bench.folder.restarted()
    orphan = max(folder.files.list()) + 5
    folder.files.create(orphan, 1 << 20)
    again = DiskBench(folder)
    assert orphan in folder.files.list(), "nothing is removed at the start"
    again.save(keys(3, "more"))
    again.pass_time(SECOND)
    assert orphan not in folder.files.list()
    assert len(again.verify()) == 6


def test_look_ups_see_the_index_grow_while_it_loads() -> None:
    bench = DiskBench()
    bench.save(keys(10))
    folder = bench.folder.restarted()
    again = DiskBench(folder, ready=False)
    assert again.find(keys(10)) == []
    assert again.tier.open()
    volume = again.tier.volume
    assert volume is not None
    load, seen = folder.index.load, []

    def in_steps() -> object:
        for batch in load(batch_rows=4):
            yield batch
            seen.append(len(again.find(keys(10))))

    folder.index.load = in_steps  # type: ignore[method-assign, assignment]
    assert again.tier.stats().state == "loading: 0 %"
    assert again.tier.load_index()
    assert seen == [4, 8, 10]
    assert again.tier.stats().state == "ok"


# ---------------------------------------------------------------- forgetting


def test_a_forgotten_name_is_gone_for_good() -> None:
    bench = DiskBench()
    bench.save(keys(4))
    bench.tier.forget([(SPACE, key(1)), (SPACE, key(77))])
    assert bench.find(keys(4)) == [key(0), key(2), key(3)]
    again = bench.again()
    assert again.find(keys(4)) == [key(0), key(2), key(3)]
    assert again.save([key(1)]) == [True], "it can be saved anew"


def test_a_forgotten_space_is_gone_at_once_and_for_good() -> None:
    bench = DiskBench(spaces=(SPACE, OTHER))
    bench.save(keys(300))
    bench.tier.save_batch([bench.block(key(0), space_id=OTHER)])
    bench.tier.forget([(SPACE, b"")])
    assert bench.find(keys(300)) == []
    for again in (bench.again(), bench.again(spaces=(OTHER,))):
        assert again.find(keys(300)) == [], "before its rows are swept, too"
        assert again.reads(key(0), OTHER)
    bench.pass_time(SECOND)
    volume = bench.tier.volume
    assert volume is not None
    assert volume.index.row_count() == 1
    assert not [name for name in volume.index.meta() if name.startswith("gone-")]


def test_what_could_not_be_forgotten_durably_is_not_found_and_forgotten_later() -> None:
    bench = DiskBench()
    bench.save(keys(2))
    index = bench.folder.index
    index.faults[index.attempts + 1] = CommitFault(OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="broken"):
        bench.tier.forget([(SPACE, key(0))])
    assert bench.find(keys(2)) == [key(1)]
    bench.pass_time(SECOND)
    volume = bench.tier.volume
    assert volume is not None
    assert volume.index.row_count() == 1
    bench.tier.forget([(SPACE, key(0))])


# ---------------------------------------------------------------- damage


@pytest.fixture
def damaged() -> DiskBench:
    """Ten blocks in one segment."""
    bench = DiskBench()
    bench.save(keys(10))
    return bench


def offset_of(bench: DiskBench, block_key: bytes) -> tuple[int, int]:
    volume = bench.tier.volume
    assert volume is not None
    entry = volume.entry(SPACE, block_key)
    assert entry is not None
    return entry.segment, entry.slot * RECORD


def assert_dropped(bench: DiskBench, block_key: bytes, dropped: int = 1) -> None:
    with pytest.raises(BlockCorrupt) as caught:
        bench.load(block_key)
    assert caught.value.reason is Reason.MISS_CORRUPT
    assert block_key.hex() not in str(caught.value)
    assert bench.find([block_key]) == []
    assert bench.count("corrupt_dropped") == dropped
    bench.tier.tend()
    assert bench.again().find([block_key]) == [], "durably"
    assert bench.save([block_key]) == [True]
    assert bench.reads(block_key)


@pytest.mark.parametrize("at", [0, 8, 100, 4088, HEADER_BYTES, HEADER_BYTES + BLOCK - 1])
def test_a_flipped_bit_is_found_dropped_and_counted(damaged: DiskBench, at: int) -> None:
    segment, offset = offset_of(damaged, key(3))
    damaged.folder.files.content(segment)[offset + at] ^= 0x10
    assert_dropped(damaged, key(3))
    assert len(damaged.verify()) == 10


def test_swapped_records_are_found(damaged: DiskBench) -> None:
    segment, one = offset_of(damaged, key(3))
    _, other = offset_of(damaged, key(4))
    damaged.folder.files.swap(segment, one, other, RECORD)
    assert_dropped(damaged, key(3))
    with pytest.raises(BlockCorrupt, match="other block"):
        damaged.load(key(4))


def test_a_stale_record_is_found(damaged: DiskBench) -> None:
    segment, offset = offset_of(damaged, key(3))
    data = damaged.folder.files.content(segment)
    old = bytes(data[offset : offset + RECORD])
    damaged.tier.forget([(SPACE, key(3))])
    damaged.save([key(3)], version=1)
    segment, offset = offset_of(damaged, key(3))
    damaged.folder.files.content(segment)[offset : offset + RECORD] = old
    with pytest.raises(BlockCorrupt, match="generation"):
        damaged.load(key(3))


def test_a_cut_file_is_found(damaged: DiskBench) -> None:
    segment, offset = offset_of(damaged, key(9))
    damaged.folder.files.truncate(segment, offset + HEADER_BYTES)
    with pytest.raises(BlockCorrupt, match="truncated"):
        damaged.load(key(9))
    assert len(damaged.verify()) == 9


def test_another_models_record_is_not_given(damaged: DiskBench) -> None:
    damaged.tier.describe(SPACE, "a", b"other fingerprint".ljust(32, b"."), BLOCK)
    with pytest.raises(BlockCorrupt, match="fingerprint"):
        damaged.load(key(3))


def test_a_damaged_row_is_dropped_and_counted() -> None:
    bench = DiskBench()
    bench.save(keys(10))
    folder = bench.folder.restarted()
    row = next(folder.index.load()).unpack()[4]
    folder.index.damage(row.place)
    again = DiskBench(folder)
    assert len(again.verify()) == 9
    assert again.tier.stats().counters["rows_dropped"] == 1
    assert again.save([row.key]) == [True]


def test_much_damage_is_said() -> None:
    bench = DiskBench()
    bench.save(keys(10))
    segment, _ = offset_of(bench, key(0))
    content_of = bench.folder.files.content(segment)
    content_of[:] = bytes(len(content_of))
    for number in range(3):
        with pytest.raises(BlockCorrupt, match="empty"):
            bench.load(key(number))
    assert "3 damaged records" in bench.tier.stats().state


def test_an_index_that_cannot_be_used_is_set_aside_and_the_tier_begins_cold() -> None:
    bench = DiskBench()
    bench.save(keys(5))
    folder = bench.folder.restarted()
    again = DiskBench(folder, ready=False)
    assert again.tier.open()

    def unusable() -> object:
        yield from ()
        raise Unusable("damaged-index")

    folder.index.load = unusable  # type: ignore[method-assign, assignment]
    assert not again.tier.load_index()
    assert folder.asides == ["damaged-index"]
    assert again.tier.open()
    assert again.tier.load_index()
    assert again.find(keys(5)) == []
    assert again.save(keys(5)) == [True] * 5
    assert again.count("set_aside") == 1
    assert "damaged-index" in again.tier.stats().state


def test_what_was_set_aside_goes_first_when_room_is_needed() -> None:
    folder = MemoryFolder()
    folder.aside = 60 * RECORD
    bench = DiskBench(folder, capacity_bytes=room(128))
    assert bench.tier.usage().used_bytes >= 60 * RECORD
    for number in range(100):
        bench.save([key(number)])
    assert folder.aside == 0
    assert len(bench.verify()) >= 90


class Unmovable(MemoryFolder):
    """What was set aside cannot be removed: by anybody, or only not all of it."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.aside = 60 * RECORD

    def tidy(self) -> None:
        if self.fails:
            raise PermissionError(errno.EPERM, "not permitted")
        self.aside = 50 * RECORD

    def drop_aside(self) -> None:
        if self.fails:
            raise PermissionError(errno.EPERM, "not permitted")


@pytest.mark.parametrize("fails", [True, False])
def test_what_was_set_aside_and_cannot_be_removed_stops_nobody(fails: bool) -> None:
    bench = DiskBench(Unmovable(fails=fails), capacity_bytes=room(128))
    bench.pass_time(SECOND)
    for number in range(200):
        assert bench.save([key(number)]) == [True]
        bench.pass_time(SECOND)
    stats = bench.tier.stats()
    assert stats.state == "ok"
    assert stats.gauges["aside_bytes"] == bench.folder.aside
    assert stats.used_bytes <= bench.capacity_bytes
    assert 40 <= len(bench.verify()) <= 80


def test_a_file_of_any_number_is_no_reason_not_to_save() -> None:
    folder = MemoryFolder()
    for number in (1, (1 << 32) - 1):
        folder.files.create(number, RECORD)
    bench = DiskBench(folder, capacity_bytes=room(128))
    assert bench.save(keys(100)) == [True] * 100
    bench.pass_time(SECOND)
    assert not {1, (1 << 32) - 1} & folder.files.list().keys(), "nobody needs them"
    assert len(bench.verify()) == 100


# ---------------------------------------------------------------- a folder that is away


def test_a_folder_that_cannot_be_opened_is_tried_again() -> None:
    folder = MemoryFolder()
    folder.failure = OSError(errno.EIO, "input/output error")
    bench = DiskBench(folder, ready=False)
    assert not bench.tier.open()
    assert "cannot open" in bench.tier.stats().state
    assert bench.find(keys(1)) == []
    with pytest.raises(OSError, match="opening"):
        bench.tier.forget([(SPACE, key(0))])
    folder.failure = None
    assert bench.tier.open()
    assert bench.tier.load_index()
    assert bench.save(keys(2)) == [True] * 2
    assert bench.tier.stats().state == "ok"


def test_a_name_that_was_forgotten_meanwhile_stays_forgotten() -> None:
    first = DiskBench()
    first.save(keys(2))
    folder = first.folder.restarted()
    folder.failure = OSError(errno.EIO, "input/output error")
    bench = DiskBench(folder, ready=False)
    assert not bench.tier.open()
    with pytest.raises(OSError, match="opening"):
        bench.tier.forget([(SPACE, key(0))])
    folder.failure = None
    assert bench.tier.open()
    assert bench.tier.load_index()
    assert bench.find(keys(2)) == [key(1)]
    assert bench.again().find(keys(2)) == [key(1)]


def test_a_folder_that_was_removed_is_begun_anew_and_told() -> None:
    bench = DiskBench()
    bench.save(keys(3))
    bench.folder.files.gone = True
    bench.pass_time(SECOND)
    assert bench.tier.phase == "opening"
    assert {one for _, one in bench.dropped} == set(keys(3)), "so that they are saved again"
    assert bench.find(keys(3)) == []
    bench.folder.set_aside("removed")
    assert bench.tier.open()
    assert bench.tier.load_index()
    assert bench.save(keys(3)) == [True] * 3
    assert len(bench.verify()) == 3


def test_a_closed_tier_answers_nothing() -> None:
    bench = DiskBench()
    bench.save(keys(2))
    bench.tier.close()
    bench.tier.close()
    assert bench.folder.closed
    assert bench.find(keys(2)) == []
    assert bench.save(keys(2)) == [False] * 2
    with pytest.raises(KVStoreError):
        bench.load(key(0))
    with pytest.raises(OSError, match="closed"):
        bench.tier.forget([(SPACE, key(0))])


def test_a_tier_that_runs_by_itself_is_ready_soon_and_ends() -> None:
    first = DiskBench()
    first.save(keys(3))
    bench = DiskBench(first.folder.restarted(), ready=False)
    bench.tier.start()
    assert bench.save(keys(3, "more")) == [True] * 3, "a save waits for the index"
    assert bench.find(keys(3)) == keys(3)
    bench.tier.close()
    assert bench.folder.closed
