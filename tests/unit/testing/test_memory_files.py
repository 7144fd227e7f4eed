"""The segment files in memory: their faults strike as planned, their power cuts keep what was
synced and of the rest only what was written."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvstore.testing.files import SECTOR_BYTES, Injection, Keep, MemoryFiles, Op
from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.files import SegmentFiles, Trouble, Truncated, classify
from kvstore.tiers.disk.pages import aligned_bytes

PAGE = 4_096
SECTORS = PAGE // SECTOR_BYTES


def page(value: int, count: int = 1) -> Bytes:
    data = aligned_bytes(count * PAGE)
    data[:] = value
    return data


def read(files: MemoryFiles, segment_id: int = 1, count: int = 1) -> Bytes:
    into = aligned_bytes(count * PAGE)
    files.preadv(segment_id, 0, [into])
    return into


def made(count: int = 1) -> MemoryFiles:
    files = MemoryFiles()
    files.create(1, count * PAGE)
    return files


def sectors(data: bytes | bytearray | Bytes) -> list[int]:
    """First byte of each sector; each sector must be of one value."""
    rows = np.frombuffer(bytes(data), np.uint8).reshape(-1, SECTOR_BYTES)
    assert (rows == rows[:, :1]).all()
    return [int(value) for value in rows[:, 0]]


# ---------------------------------------------------------------- faults


def test_the_nth_operation_fails_and_has_no_effect() -> None:
    files = made()
    files.inject(Injection(Op.PWRITEV, nth=2, times=2, error=errno.EIO))
    files.pwritev(1, 0, [page(1)])
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            files.pwritev(1, 0, [page(2)])
    assert set(read(files)) == {1}
    files.pwritev(1, 0, [page(3)])
    assert set(read(files)) == {3}
    assert (files.operations[Op.PWRITEV], files.operations[Op.PREADV]) == (4, 2)


@pytest.mark.parametrize("op", list(Op))
def test_every_operation_can_fail(op: Op) -> None:
    files = made()
    files.inject(Injection(op, error=errno.EDQUOT))
    calls = {
        Op.CREATE: lambda: files.create(2, PAGE),
        Op.PREADV: lambda: files.preadv(1, 0, [page(0)]),
        Op.PWRITEV: lambda: files.pwritev(1, 0, [page(0)]),
        Op.FDATASYNC: lambda: files.fdatasync(1),
        Op.UNLINK: lambda: files.unlink(1),
        Op.LIST: files.list,
        Op.STATVFS: files.statvfs,
    }
    with pytest.raises(OSError, match=r".") as caught:
        calls[op]()
    assert caught.value.errno == errno.EDQUOT
    calls[op]()


@pytest.mark.parametrize("moved", [0, 1, SECTOR_BYTES, 5_000, 2 * PAGE])
def test_a_torn_write_leaves_its_beginning(moved: int) -> None:
    files = made(2)
    files.pwritev(1, 0, [page(1, 2)])
    files.inject(Injection(Op.PWRITEV, error=errno.EIO, moved_bytes=moved))
    with pytest.raises(OSError, match="Input/output"):
        files.pwritev(1, 0, [page(2), page(3)])
    written = np.concatenate([page(2), page(3)])[:moved]
    expected = np.concatenate([written, page(1, 2)[moved:]])
    assert np.array_equal(read(files, 1, 2), expected)


def test_short_transfers_are_continued() -> None:
    files = made(4)
    for moved in (1, 4_096, 5_000, 12_288):
        files.inject(Injection(Op.PWRITEV, moved_bytes=moved))
        files.inject(Injection(Op.PREADV, moved_bytes=moved))
        files.pwritev(1, 0, [page(moved % 251), page(7, 3)])
        assert np.array_equal(read(files, 1, 4), np.concatenate([page(moved % 251), page(7, 3)]))


def test_a_lost_write_is_reported_as_done() -> None:
    files = made()
    files.inject(Injection(Op.PWRITEV, lost=True))
    files.pwritev(1, 0, [page(1)])
    assert set(read(files)) == {0}
    assert len(files.cuts()) == 3  # nothing, and the two of `create`


def test_a_lost_sync_makes_nothing_durable() -> None:
    files = made()
    files.pwritev(1, 0, [page(1)])
    files.inject(Injection(Op.FDATASYNC, lost=True))
    files.fdatasync(1)
    image = files.image(files.cuts()[-1], random.Random(1), Keep.NONE)
    assert set(image.content(1)) == {0}


def test_a_paused_operation_waits_and_lets_others_pass() -> None:
    files = made()
    entered, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        entered.set()
        assert go_on.wait(60)

    files.inject(Injection(Op.PREADV, pause=pause))
    got: list[Bytes] = []
    reader = threading.Thread(target=lambda: got.append(read(files)))
    reader.start()
    assert entered.wait(60)
    files.pwritev(1, 0, [page(5)])
    assert set(read(files)) == {5}
    assert got == []
    go_on.set()
    reader.join(60)
    assert set(got[0]) == {5}


def test_a_full_file_system() -> None:
    files = MemoryFiles(capacity_bytes=4 * PAGE)
    files.create(1, 3 * PAGE)
    with pytest.raises(OSError, match="No space"):
        files.create(2, 2 * PAGE)
    files.others_bytes = PAGE
    assert files.statvfs().free_bytes == 0
    with pytest.raises(OSError, match="No space") as caught:
        files.create(2, PAGE)
    assert classify(caught.value, files.statvfs()) is Trouble.FULL
    files.pwritev(1, 0, [page(1)])
    files.unlink(1)
    files.create(2, 3 * PAGE)


def test_a_read_only_and_a_removed_file_system() -> None:
    files = made()
    files.pwritev(1, 0, [page(4)])
    files.read_only = True
    assert files.statvfs().read_only
    assert set(read(files)) == {4}
    with pytest.raises(OSError, match="Read-only"):
        files.create(2, PAGE)
    with pytest.raises(OSError, match="Read-only"):
        files.pwritev(1, 0, [page(0)])
    files.gone = True
    with pytest.raises(FileNotFoundError):
        read(files)
    files.heal()
    assert set(read(files)) == {4}


def test_damage_by_hand_is_what_is_read() -> None:
    files = made(2)
    files.pwritev(1, 0, [page(1), page(2)])
    files.swap(1, 0, PAGE, PAGE)
    assert np.array_equal(read(files, 1, 2), np.concatenate([page(2), page(1)]))
    files.content(1)[7] ^= 1
    assert read(files)[7] == 3
    files.truncate(1, PAGE)
    with pytest.raises(Truncated):
        read(files, 1, 2)


# ---------------------------------------------------------------- power cuts


@pytest.mark.parametrize("keep", list(Keep))
def test_what_was_synced_is_kept(keep: Keep) -> None:
    files = made(2)
    files.pwritev(1, 0, [page(1, 2)])
    files.fdatasync(1)
    for seed in range(50):
        image = files.image(files.cuts()[-1], random.Random(seed), keep)
        assert np.array_equal(read(image, 1, 2), page(1, 2)), seed


def test_what_was_not_synced_is_kept_in_every_way() -> None:
    """All that a device may do to three writes of one page is done by some image, nothing else."""
    files = made()
    for value in (1, 2, 3):
        files.pwritev(1, 0, [page(value)])
    seen: dict[Keep, set[tuple[int, ...]]] = {keep: set() for keep in Keep}
    for keep, seed in itertools.product(Keep, range(300)):
        image = files.image(files.cuts()[-1], random.Random(seed), keep)
        seen[keep].add(tuple(sectors(image.content(1))))
    assert seen[Keep.ALL] == {(3,) * SECTORS}
    assert seen[Keep.NONE] == {(0,) * SECTORS}
    assert seen[Keep.WRITES] == {(value,) * SECTORS for value in range(4)}
    torn = {(3,) * cut + (2,) * (SECTORS - cut) for cut in range(SECTORS + 1)}
    assert seen[Keep.TORN] == torn
    mixed = seen[Keep.SECTORS]
    assert len(mixed) > 200
    assert {value for state in mixed for value in state} == {0, 1, 2, 3}
    assert len(seen[Keep.ANY]) > 50


def test_a_failed_sync_leaves_its_writes_in_doubt_for_ever() -> None:
    files = made(2)
    files.pwritev(1, 0, [page(1)])
    files.inject(Injection(Op.FDATASYNC, error=errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        files.fdatasync(1)
    files.pwritev(1, PAGE, [page(2)])
    files.fdatasync(1)
    image = files.image(files.cuts()[-1], random.Random(1), Keep.NONE)
    assert set(read(image, 1, 1)) == {0}
    assert set(read(image, 1, 2)[PAGE:]) == {2}
    # Written once more and synced, it is sure.
    files.pwritev(1, 0, [page(1)])
    files.fdatasync(1)
    image = files.image(files.cuts()[-1], random.Random(1), Keep.NONE)
    assert np.array_equal(read(image, 1, 2), np.concatenate([page(1), page(2)]))


def test_a_sync_does_not_cover_what_is_written_while_it_runs() -> None:
    files = made(2)
    files.pwritev(1, 0, [page(1)])
    files.inject(Injection(Op.FDATASYNC, pause=lambda: files.pwritev(1, PAGE, [page(2)])))
    files.fdatasync(1)
    image = files.image(files.cuts()[-1], random.Random(1), Keep.NONE)
    assert np.array_equal(read(image, 1, 2), np.concatenate([page(1), page(0)]))


def test_making_and_removing_files_may_be_cut() -> None:
    files = made(4)
    files.unlink(1)
    create, named, unlinking, unlinked = files.cuts()[1:]

    def states(cut: int) -> set[int]:
        """Sizes of the file in many images; -1 where it is not there."""
        images = [files.image(cut, random.Random(seed)) for seed in range(200)]
        return {image.list()[1].size_bytes if image.list() else -1 for image in images}

    assert states(0) == {-1}
    assert states(create) == {-1, 0, PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE}
    assert states(named) == {4 * PAGE}
    assert states(unlinking) == {-1, 4 * PAGE}
    assert states(unlinked) == {-1}


def test_an_id_that_is_used_again_begins_anew() -> None:
    files = made()
    files.pwritev(1, 0, [page(1)])
    files.fdatasync(1)
    files.unlink(1)
    files.create(1, 2 * PAGE)
    image = files.image(files.cuts()[-1], random.Random(1))
    assert np.array_equal(read(image, 1, 2), page(0, 2))


def test_one_counter_for_several_logs() -> None:
    counter = itertools.count(10)
    files = MemoryFiles(ordinal=counter.__next__)
    files.create(1, PAGE)
    other = next(counter)
    files.pwritev(1, 0, [page(1)])
    assert files.cuts() == [0, 10, 11, 13]
    assert set(files.image(other, random.Random(1), Keep.ALL).content(1)) == {0}
    assert set(files.image(13, random.Random(1), Keep.ALL).content(1)) == {1}


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "sync", "bad sync"]),
        st.integers(0, 3),
        st.integers(1, 2),
    ),
    max_size=12,
)


@given(steps, st.integers(0, 2**32), st.sampled_from(list(Keep)), st.data())
def test_every_image_is_one_that_the_device_may_leave(
    script: list[Step], seed: int, keep: Keep, data: st.DataObject
) -> None:
    """Each sector by itself: its last sure value, or a later one that was never made sure."""
    files = made(6)
    allowed: list[list[set[int]]] = []  # by cut, by page
    now = [{0} for _ in range(6)]
    pending: list[tuple[int, int]] = []

    def note() -> None:
        while len(allowed) < len(files.cuts()):
            allowed.append([set(values) for values in now])

    note()
    for number, (what, at, count) in enumerate(script, start=1):
        if what == "write":
            files.pwritev(1, at * PAGE, [page(number, count)])
            for one in range(at, at + count):
                now[one].add(number)
                pending.append((one, number))
        elif what == "sync":
            files.fdatasync(1)
            for one, value in pending:
                now[one] = {later for later in now[one] if later >= value}
            pending.clear()
        else:
            files.inject(Injection(Op.FDATASYNC, error=errno.EIO))
            with pytest.raises(OSError, match="Input/output"):
                files.fdatasync(1)
            pending.clear()
        note()
    at = data.draw(st.integers(2, len(files.cuts()) - 1))
    image = files.image(files.cuts()[at], random.Random(seed), keep)
    values = np.array(sectors(image.content(1))).reshape(6, SECTORS)
    for one in range(6):
        assert set(map(int, values[one])) <= allowed[at][one]


def test_an_image_is_usable_and_leaves_the_original_alone(tmp_path: Path) -> None:
    files = made(2)
    files.pwritev(1, 0, [page(1)])
    files.inject(Injection(Op.PREADV, error=errno.EIO, times=100))
    image = files.image(files.cuts()[-1], random.Random(1), Keep.ALL)
    image.pwritev(1, 0, [page(9)])
    image.create(2, PAGE)
    assert set(files.content(1)[:PAGE]) == {1}
    image.write_to(str(tmp_path))
    real = SegmentFiles(str(tmp_path))
    assert set(real.list()) == {1, 2}
    into = aligned_bytes(2 * PAGE)
    real.preadv(1, 0, [into])
    assert np.array_equal(into, np.concatenate([page(9), page(0)]))
    real.close()
