"""Real segment files where the system does not go along: short transfers, refusals, removal."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.files import (
    FULL_BYTES,
    FileSystem,
    SegmentFiles,
    SystemCalls,
    Trouble,
    Truncated,
    classify,
)
from kvstore.tiers.disk.folder import segment_name
from kvstore.tiers.disk.pages import ScratchPages, aligned_bytes, is_aligned, transfer

PAGE = 4_096
REAL = SystemCalls()
Move = Callable[[int, Sequence[Bytes], int], int]


def pages(count: int, value: int = 1) -> Bytes:
    data = aligned_bytes(count * PAGE)
    data[:] = np.arange(len(data), dtype=np.uint32).view(np.uint8)[: len(data)] + value
    return data


def read(files: SegmentFiles, segment_id: int, count: int, offset: int = 0) -> Bytes:
    into = aligned_bytes(count * PAGE)
    files.preadv(segment_id, offset, [into])
    return into


def failing(number: int, times: int = 1) -> Callable[..., None]:
    """A system call that takes no effect and fails `times` times; then it does nothing, well."""
    left = [times]

    def call(*_: object) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))

    return call


def folder_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------- short transfers


def shortened(real: Move, limits: Iterator[int]) -> Move:
    """Moves at most so many bytes a call."""

    def call(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        left = next(limits)
        cut = []
        for data in buffers:
            cut.append(data[:left])
            left -= len(cut[-1])
        return real(fd, [data for data in cut if len(data)] or [buffers[0][:0]], offset)

    return call


@pytest.mark.parametrize("limits", [(PAGE,), (3 * PAGE, PAGE), (5_000, 9_000), (512, 20_000)])
def test_short_transfers_are_continued(tmp_path: Path, limits: tuple[int, ...]) -> None:
    def forever() -> Iterator[int]:
        while True:
            yield from limits

    def no_direct(path: str, flags: int, mode: int) -> int:
        # Past the cache only whole pages could be cut off.
        return os.open(path, flags & ~os.O_DIRECT, mode)

    calls = dataclasses.replace(
        REAL,
        open=no_direct,
        preadv=shortened(REAL.preadv, forever()),
        pwritev=shortened(REAL.pwritev, forever()),
    )
    files = SegmentFiles(str(tmp_path), calls=calls)
    files.create(1, 16 * PAGE)
    data = pages(7)
    files.pwritev(1, PAGE, [data[: 2 * PAGE], data[2 * PAGE : 3 * PAGE], data[3 * PAGE :]])
    into = aligned_bytes(7 * PAGE)
    files.preadv(1, PAGE, [into[: 4 * PAGE], into[4 * PAGE :]])
    assert np.array_equal(into, data)
    files.close()


@pytest.mark.parametrize("moved", [0, 1, 512, PAGE - 1])
def test_a_write_that_makes_no_progress_is_an_error(tmp_path: Path, moved: int) -> None:
    calls = dataclasses.replace(REAL, pwritev=lambda fd, buffers, offset: moved)
    files = SegmentFiles(str(tmp_path), calls=calls)
    files.create(1, PAGE)
    with pytest.raises(OSError, match="0 of 4096 bytes") as caught:
        files.pwritev(1, 0, [pages(1)])
    assert caught.value.errno == errno.EIO
    files.close()


def test_every_truncation_of_a_file_is_noticed(tmp_path: Path) -> None:
    files = SegmentFiles(str(tmp_path))
    files.create(1, 4 * PAGE)
    files.pwritev(1, 0, [pages(4)])
    files.fdatasync(1)
    for size_bytes in range(4 * PAGE - 1, -1, -61):
        os.truncate(tmp_path / segment_name(1), size_bytes)
        with pytest.raises(Truncated):
            read(files, 1, 4)
        whole = size_bytes // PAGE
        assert np.array_equal(read(files, 1, whole), pages(4)[: whole * PAGE])
    files.close()


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    files = SegmentFiles(str(tmp_path))
    files.create(1, 1_500 * PAGE)
    data = pages(1_500)
    files.pwritev(1, 0, list(data.reshape(1_500, PAGE)))
    into = aligned_bytes(1_500 * PAGE)
    files.preadv(1, 0, list(into.reshape(1_500, PAGE)))
    assert np.array_equal(into, data)
    files.close()


def test_a_transfer_goes_on_at_the_page_that_was_broken() -> None:
    seen: list[tuple[int, int]] = []

    def call(rest: Sequence[Bytes], done: int) -> int:
        seen.append((done, sum(map(len, rest))))
        return 3_000 if len(seen) == 1 else 5_000

    assert transfer(call, [pages(1), pages(2)]) == 3 * PAGE
    assert seen == [(0, 12_288), (0, 12_288), (4_096, 8_192), (8_192, 4_096)]


# ---------------------------------------------------------------- what is refused


def test_without_preallocation_zeros_are_written(tmp_path: Path) -> None:
    calls = dataclasses.replace(REAL, fallocate=failing(errno.EOPNOTSUPP, times=2))
    files = SegmentFiles(str(tmp_path), calls=calls)
    before = files.mode
    assert before.preallocated
    files.create(1, (3 << 20) + PAGE)
    assert not files.mode.preallocated
    assert "preallocate" in files.mode.reasons[0]
    assert files.list()[1].size_bytes == (3 << 20) + PAGE
    assert files.list()[1].allocated_bytes >= (3 << 20) + PAGE
    assert not read(files, 1, 769).any()
    files.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("at", ["fallocate", "fsync", "zeros"])
def test_a_failed_making_leaves_nothing(tmp_path: Path, number: int, at: str) -> None:
    failure = failing(number)
    calls = {
        "fallocate": dataclasses.replace(REAL, fallocate=failure),
        "fsync": dataclasses.replace(REAL, fsync=failure),
        "zeros": dataclasses.replace(
            REAL, fallocate=failing(errno.EOPNOTSUPP), pwritev=_write_then_fail(number)
        ),
    }[at]
    files = SegmentFiles(str(tmp_path), calls=calls)
    with pytest.raises(OSError, match=r".") as caught:
        files.create(1, 2 << 20)
    assert caught.value.errno == number
    assert folder_files(tmp_path) == []
    files.close()


def _write_then_fail(number: int) -> Move:
    def call(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if offset >= 1 << 20:
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    return call


def test_where_opening_for_direct_io_is_refused_the_cache_is_used(tmp_path: Path) -> None:
    refused: list[str] = []

    def no_direct(path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.open(path, flags, mode)

    files = SegmentFiles(str(tmp_path), calls=dataclasses.replace(REAL, open=no_direct))
    before = files.mode
    assert before.direct
    for number in range(3):
        files.create(number, 4 * PAGE)
        files.pwritev(number, 0, [pages(4)])
        files.fdatasync(number)
        assert np.array_equal(read(files, number, 4), pages(4))
    assert len(refused) == 1, "it is asked once"
    assert not files.mode.direct
    assert "refuses direct I/O" in files.mode.reasons[0]
    files.close()


@pytest.mark.parametrize("first", ["read", "write"])
def test_where_direct_transfers_are_refused_the_cache_is_used(tmp_path: Path, first: str) -> None:
    direct: set[int] = set()

    def opened(path: str, flags: int, mode: int) -> int:
        fd = os.open(path, flags, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def picky(real: Move) -> Move:
        def call(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
            if fd in direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, buffers, offset)

        return call

    calls = dataclasses.replace(
        REAL, open=opened, preadv=picky(REAL.preadv), pwritev=picky(REAL.pwritev)
    )
    files = SegmentFiles(str(tmp_path), calls=calls)
    files.create(1, 4 * PAGE)
    if first == "read":
        assert not read(files, 1, 4).any()
    files.pwritev(1, 0, [pages(4)])
    files.fdatasync(1)
    assert np.array_equal(read(files, 1, 4), pages(4))
    assert not files.mode.direct
    assert "4096-byte pages" in files.mode.reasons[0]
    files.close()


def test_an_invalid_argument_of_the_cached_file_is_an_error(tmp_path: Path) -> None:
    def refuse(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    files = SegmentFiles(str(tmp_path), calls=dataclasses.replace(REAL, preadv=refuse))
    files.create(1, PAGE)
    with pytest.raises(OSError, match="Invalid"):
        read(files, 1, 1)
    files.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_where_writing_is_refused_reads_go_on(tmp_path: Path, number: int) -> None:
    read_only = [False]

    def opened(path: str, flags: int, mode: int) -> int:
        if read_only[0] and flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(number, os.strerror(number))
        return os.open(path, flags, mode)

    files = SegmentFiles(
        str(tmp_path), calls=dataclasses.replace(REAL, open=opened), files_open_max=1
    )
    for segment_id in (1, 2):
        files.create(segment_id, PAGE)
        files.pwritev(segment_id, 0, [pages(1, segment_id)])
        files.fdatasync(segment_id)
    read_only[0] = True
    assert np.array_equal(read(files, 1, 1), pages(1, 1))
    refused: tuple[Callable[[], None], ...] = (
        lambda: files.pwritev(1, 0, [pages(1)]),
        lambda: files.create(3, PAGE),
    )
    for call in refused:
        with pytest.raises(OSError, match=r".") as caught:
            call()
        assert classify(caught.value, files.statvfs()) is Trouble.READ_ONLY
    read_only[0] = False
    files.pwritev(1, 0, [pages(1, 9)])
    assert np.array_equal(read(files, 1, 1), pages(1, 9)), "it resumes by itself"
    files.close()


@pytest.mark.root
def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    """ramfs knows none, nor preallocation."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"ramfs", str(tmp_path).encode(), b"ramfs", 0, None) != 0:
        pytest.skip(f"ramfs cannot be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        files = SegmentFiles(str(tmp_path))
        files.create(1, 8 * PAGE)
        files.pwritev(1, PAGE, [pages(4)])
        files.fdatasync(1)
        assert np.array_equal(read(files, 1, 4, PAGE), pages(4))
        assert (files.mode.direct, files.mode.preallocated) == (False, False)
        assert len(files.mode.reasons) == 2
        files.close()
    finally:
        assert libc.umount2(str(tmp_path).encode(), 2) == 0


@pytest.mark.root
def test_a_full_file_system(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(tmp_path).encode(), b"tmpfs", 0, b"size=4m") != 0:
        pytest.skip(f"tmpfs cannot be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        files = SegmentFiles(str(tmp_path))
        files.create(1, 3 << 20)
        with pytest.raises(OSError, match=r".") as caught:
            files.create(2, 2 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert set(files.list()) == {1}
        files.create(2, 1 << 20)
        assert files.statvfs().free_bytes == 0
        # What was allocated can be written though nothing is free.
        files.pwritev(1, 0, [pages(768)])
        assert np.array_equal(read(files, 1, 768), pages(768))
        files.close()
    finally:
        assert libc.umount2(str(tmp_path).encode(), 2) == 0


# ---------------------------------------------------------------- removal


def test_a_write_into_a_removed_folder_is_not_durable(tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    folder.mkdir()
    files = SegmentFiles(str(folder))
    files.create(1, PAGE)
    files.pwritev(1, 0, [pages(1)])
    shutil.rmtree(folder)
    files.pwritev(1, 0, [pages(1)])  # into a file without a name
    for call in (
        lambda: files.fdatasync(1),
        lambda: files.create(2, PAGE),
        files.list,
        files.statvfs,
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert classify(caught.value, None) is Trouble.GONE
    files.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(PAGE))
    (folder / segment_name(1)).symlink_to(outside)
    files = SegmentFiles(str(folder))
    assert files.list() == {}
    with pytest.raises(OSError, match=r".") as caught:
        files.pwritev(1, 0, [pages(1)])
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(FileExistsError):
        files.create(1, PAGE)
    assert outside.read_bytes() == bytes(PAGE)
    files.close()


def test_files_of_others_are_no_segments(tmp_path: Path) -> None:
    files = SegmentFiles(str(tmp_path))
    files.create(0xAB, PAGE)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "00000001.seg").mkdir()
    assert set(files.list()) == {0xAB}
    files.close()


# ---------------------------------------------------------------- errors of the device


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, Trouble.FULL),
        (errno.EDQUOT, Trouble.FULL),
        (errno.EFBIG, Trouble.FULL),
        (errno.EROFS, Trouble.READ_ONLY),
        (errno.EACCES, Trouble.READ_ONLY),
        (errno.EIO, Trouble.IO),
        (errno.EUCLEAN, Trouble.IO),
        (errno.ENOENT, Trouble.GONE),
        (errno.ESTALE, Trouble.GONE),
        (errno.ENXIO, Trouble.GONE),
        (errno.EMFILE, Trouble.OTHER),
        (errno.EINVAL, Trouble.OTHER),
    ],
)
def test_errors_are_classified(number: int, expected: Trouble) -> None:
    roomy = FileSystem(1 << 30, 1 << 29, read_only=False)
    assert classify(OSError(number, "x"), roomy) is expected
    assert classify(OSError(number, "x"), None) is expected


def test_an_io_error_of_a_full_or_read_only_file_system_is_none() -> None:
    error = OSError(errno.EIO, "Input/output error")
    full = FileSystem(1 << 30, FULL_BYTES - 1, read_only=False)
    assert classify(error, full) is Trouble.FULL
    assert classify(error, full._replace(free_bytes=FULL_BYTES)) is Trouble.IO
    assert classify(error, full._replace(read_only=True)) is Trouble.READ_ONLY
    assert classify(OSError("no number"), full) is Trouble.OTHER


def test_device_errors_come_through(tmp_path: Path) -> None:
    def broken(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    calls = dataclasses.replace(
        REAL, preadv=broken, pwritev=broken, fdatasync=failing(errno.EIO, times=1)
    )
    files = SegmentFiles(str(tmp_path), calls=calls)
    files.create(1, PAGE)
    for call in (
        lambda: read(files, 1, 1),
        lambda: files.pwritev(1, 0, [pages(1)]),
        lambda: files.fdatasync(1),
    ):
        with pytest.raises(OSError, match=r".") as caught:
            call()
        assert caught.value.errno == errno.EIO
    files.fdatasync(1)
    files.close()


# ---------------------------------------------------------------- open files


def open_segments(folder: Path) -> list[str]:
    """Names of this process's open files below `folder`."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith(str(folder) + "/"):
            names.append(os.path.basename(target))
    return sorted(names)


def test_open_files_are_bounded(tmp_path: Path) -> None:
    files = SegmentFiles(str(tmp_path), files_open_max=3)
    for number in range(8):
        files.create(number, PAGE)
        read(files, number, 1)
    assert open_segments(tmp_path) == [segment_name(number) for number in (5, 6, 7)]
    read(files, 5, 1)
    read(files, 0, 1)
    assert open_segments(tmp_path) == [segment_name(number) for number in (0, 5, 7)]
    files.close()
    assert open_segments(tmp_path) == []


def test_unsynced_files_stay_open(tmp_path: Path) -> None:
    """An error of writing back is told to the descriptors that were open."""
    files = SegmentFiles(str(tmp_path), files_open_max=2)
    for number in range(5):
        files.create(number, PAGE)
        files.pwritev(number, 0, [pages(1)])
    assert len(open_segments(tmp_path)) == 5
    for number in range(5):
        files.fdatasync(number)
    files.create(9, PAGE)
    read(files, 9, 1)
    assert len(open_segments(tmp_path)) == 2
    files.close()


def test_a_file_in_use_is_closed_when_its_reader_is_done(tmp_path: Path) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        reading.set()
        assert go_on.wait(60)
        return REAL.preadv(fd, buffers, offset)

    files = SegmentFiles(str(tmp_path), calls=dataclasses.replace(REAL, preadv=slow))
    files.create(1, PAGE)
    files.pwritev(1, 0, [pages(1)])
    got: list[Bytes] = []
    reader = threading.Thread(target=lambda: got.append(read(files, 1, 1)))
    reader.start()
    assert reading.wait(60)
    files.unlink(1)
    files.close()
    assert len(open_segments(tmp_path)) == 1
    go_on.set()
    reader.join(60)
    assert np.array_equal(got[0], pages(1)), "a read that runs ends as if the file were there"
    assert open_segments(tmp_path) == []


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("length", [0, 1, PAGE, 3 * PAGE + 5])
def test_pages_begin_at_a_page(length: int) -> None:
    for _ in range(20):
        data = aligned_bytes(length)
        assert len(data) == length
        assert is_aligned(data)
        assert not data.any()
    assert not is_aligned(aligned_bytes(2 * PAGE)[1:])
    assert not is_aligned(aligned_bytes(2 * PAGE)[::2])


def test_each_thread_has_its_own_pages() -> None:
    scratch = ScratchPages()
    scratch.header[:] = 1
    seen: list[int] = []

    def other() -> None:
        scratch.header[:] = 2
        scratch.tail[:] = 3
        seen.append(int(scratch.header[0]))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert seen == [2]
    assert set(scratch.header) == {1}
    assert set(scratch.tail) == {0}
    assert is_aligned(scratch.header)
    assert is_aligned(scratch.tail)
