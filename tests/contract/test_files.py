"""What both kinds of segment files promise: those in a folder, and those in memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvstore.testing.files import MemoryFiles
from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.files import Files, SegmentFiles, Trouble, Truncated, classify
from kvstore.tiers.disk.format import Finding
from kvstore.tiers.disk.pages import RecordBuffers, ScratchPages, aligned_bytes

PAGE = 4_096
PAGES = 16


@pytest.fixture(params=["folder", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    made: Files = SegmentFiles(str(tmp_path)) if request.param == "folder" else MemoryFiles()
    yield made
    made.close()


def pages(count: int, seed: int = 1) -> Bytes:
    """Aligned bytes that differ from page to page and from seed to seed."""
    data = aligned_bytes(count * PAGE)
    data[:] = np.random.default_rng(seed).integers(0, 256, len(data), np.uint8)
    return data


def read(files: Files, segment_id: int, offset: int = 0, count: int = PAGES) -> Bytes:
    into = aligned_bytes(count * PAGE)
    files.preadv(segment_id, offset, [into])
    return into


def test_a_folder_without_segments_lists_none(files: Files) -> None:
    assert files.list() == {}


def test_a_new_segment_is_allocated_and_zero(files: Files) -> None:
    files.create(7, PAGES * PAGE)
    files.create(2**32 - 1, PAGE)
    listed = files.list()
    assert {number: file.size_bytes for number, file in listed.items()} == {
        7: PAGES * PAGE,
        2**32 - 1: PAGE,
    }
    assert all(file.allocated_bytes >= file.size_bytes for file in listed.values())
    assert not read(files, 7).any()


def test_what_was_written_is_read(files: Files) -> None:
    files.create(1, PAGES * PAGE)
    one, two, three = pages(1, 1), pages(3, 2), pages(2, 3)
    files.pwritev(1, 2 * PAGE, [one, two, three])
    files.fdatasync(1)
    into = [aligned_bytes(4 * PAGE), aligned_bytes(0), aligned_bytes(2 * PAGE)]
    files.preadv(1, 2 * PAGE, into)
    assert np.array_equal(np.concatenate(into), np.concatenate([one, two, three]))
    assert not read(files, 1, 0, 2).any()
    assert not read(files, 1, 8 * PAGE, PAGES - 8).any()


def test_segments_do_not_meet(files: Files) -> None:
    for number in range(3):
        files.create(number, PAGES * PAGE)
        files.pwritev(number, 0, [pages(PAGES, number)])
    for number in range(3):
        assert np.array_equal(read(files, number), pages(PAGES, number))


@pytest.mark.parametrize("first_page", range(PAGES - 3, PAGES + 4))
def test_a_read_beyond_the_end_is_truncated(files: Files, first_page: int) -> None:
    files.create(1, PAGES * PAGE)
    if first_page + 4 <= PAGES:
        read(files, 1, first_page * PAGE, 4)
        return
    with pytest.raises(Truncated) as caught:
        read(files, 1, first_page * PAGE, 4)
    got = max(PAGES - first_page, 0) * PAGE
    assert caught.value.fault.finding is Finding.TRUNCATED
    assert f"{got} of {4 * PAGE} bytes" in str(caught.value)


def test_an_empty_transfer_moves_nothing(files: Files) -> None:
    files.create(1, PAGE)
    files.pwritev(1, 0, [])
    files.preadv(1, 0, [])


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 100])
@pytest.mark.parametrize("aligned", [True, False])
def test_records_of_any_length_come_back(files: Files, length: int, aligned: bool) -> None:
    files.create(1, PAGES * PAGE)
    scratch = ScratchPages()
    payload = pages(4)[:length] if aligned else pages(5)[7 : 7 + length]
    scratch.header[:] = 0xAB
    scratch.tail[:] = 0xCD
    files.pwritev(1, PAGE, RecordBuffers(scratch.header, payload, scratch.tail).fill().buffers)
    scratch.header[:] = 0
    into = np.full(length + 9, 0xEE, np.uint8)
    landing = RecordBuffers(scratch.header, into[4 : 4 + length], scratch.tail)
    files.preadv(1, PAGE, landing.buffers)
    landing.take()
    assert np.array_equal(into[4 : 4 + length], payload)
    assert set(into[:4]) == set(into[4 + length :]) == {0xEE}
    assert set(scratch.header) == {0xAB}
    rest = read(files, 1, 2 * PAGE, 4)[length:]
    assert not rest.any(), "nothing but the payload is written"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, PAGES - 1), st.lists(st.integers(0, 4), max_size=4)), max_size=8
    )
)
def test_any_sequence_of_writes_is_what_is_read(
    files: Files, writes: list[tuple[int, list[int]]]
) -> None:
    """Against a plain array."""
    if 1 in files.list():
        files.unlink(1)
    files.create(1, (PAGES + 16) * PAGE)
    expected = np.zeros((PAGES + 16) * PAGE, np.uint8)
    for seed, (at, counts) in enumerate(writes):
        buffers = [pages(count, seed * 10 + number) for number, count in enumerate(counts)]
        files.pwritev(1, at * PAGE, buffers)
        whole = np.concatenate([*buffers, np.zeros(0, np.uint8)])
        expected[at * PAGE : at * PAGE + len(whole)] = whole
    assert np.array_equal(read(files, 1, 0, PAGES + 16), expected)


def test_a_removed_segment_is_gone(files: Files) -> None:
    files.create(1, PAGE)
    files.create(2, PAGE)
    files.pwritev(1, 0, [pages(1)])
    files.unlink(1)
    assert set(files.list()) == {2}
    for call in (
        lambda: read(files, 1, 0, 1),
        lambda: files.pwritev(1, 0, [pages(1)]),
        lambda: files.fdatasync(1),
        lambda: files.unlink(1),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert classify(caught.value, files.statvfs()) is Trouble.GONE
    files.create(1, PAGE)
    assert not read(files, 1, 0, 1).any(), "an id that is used again begins anew"


def test_a_segment_is_not_made_twice(files: Files) -> None:
    files.create(1, PAGE)
    files.pwritev(1, 0, [pages(1)])
    with pytest.raises(FileExistsError):
        files.create(1, PAGE)
    assert np.array_equal(read(files, 1, 0, 1), pages(1))


def test_a_segment_that_does_not_fit_is_not_there(files: Files) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        files.create(1, 1 << 60)
    assert classify(caught.value, files.statvfs()) is Trouble.FULL
    assert files.list() == {}
    files.create(1, PAGE)


def test_what_is_no_whole_page_is_refused(files: Files) -> None:
    files.create(1, PAGES * PAGE)
    whole = aligned_bytes(2 * PAGE)
    frozen: list[tuple[int, Bytes]] = [
        (1, whole),
        (-PAGE, whole),
        (0, whole[: PAGE - 1]),
        (0, whole[1 : PAGE + 1]),
        (0, aligned_bytes(4 * PAGE)[::2]),
        (0, whole.reshape(2, PAGE)),
    ]
    for offset, data in frozen:
        for call in (files.preadv, files.pwritev):
            with pytest.raises(ValueError, match=r"page|contiguous"):
                call(1, offset, [whole, data])
    for size_bytes in (0, -PAGE, PAGE + 1):
        with pytest.raises(ValueError, match="page"):
            files.create(2, size_bytes)
    assert not read(files, 1).any()


def test_the_file_system_tells_what_is_left(files: Files) -> None:
    stat = files.statvfs()
    assert 0 < stat.free_bytes <= stat.total_bytes
    assert not stat.read_only


def test_closing_ends_it_and_twice_is_fine(files: Files) -> None:
    files.create(1, PAGE)
    read(files, 1, 0, 1)
    files.close()
    files.close()
    with pytest.raises(OSError, match=r".") as caught:
        read(files, 1, 0, 1)
    assert caught.value.errno == errno.EBADF


def test_threads_read_and_write_side_by_side(files: Files) -> None:
    """Each its own slots, over more segments than there are threads, while one segment comes and
    goes."""
    for number in range(6):
        files.create(number, PAGES * PAGE)
    wrong: list[str] = []

    def work(me: int) -> None:
        for turn in range(30):
            number, slot = turn % 6, me * 2
            data = pages(2, me * 100 + turn)
            files.pwritev(number, slot * PAGE, [data])
            if turn % 10 == 9:
                files.fdatasync(number)
            if not np.array_equal(read(files, number, slot * PAGE, 2), data):
                wrong.append(f"thread {me}, turn {turn}")

    def churn() -> None:
        for _ in range(20):
            files.create(99, PAGE)
            files.unlink(99)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    threads.append(threading.Thread(target=churn))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
