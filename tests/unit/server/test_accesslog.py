"""The access log's folder: rotation, its bound, its rights, and what a failing disk costs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.model.accesses import Space
from kvstore.model.reasons import Reason, StartError
from kvstore.model.record import Record, RecordBuilder
from kvstore_server.accesslog import FILES, AccessLog, LogFolder
from kvstore_server.linefile import Write, append_whole, open_to_append

MIB = 1 << 20
SPACE = Space(b"d" * 32, 4096)


def record(number: int, space: int = 1) -> Record:
    builder = RecordBuilder("lookup", "", "default", number, float(number))
    builder.prompt(space, number.to_bytes(32, "big") * 2, 16)
    builder.count("tokens", 32, 16)
    return builder.finish(Reason.HIT, number + 1)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name != "salt")


def content(folder: Path) -> list[bytes]:
    return [line for name in names(folder) for line in (folder / name).read_bytes().splitlines()]


def log_at(folder: Path, write: Write = os.write) -> AccessLog:
    spaces = {1: SPACE}
    return AccessLog(str(folder), MIB, spaces.get, SystemClock(), write)


class Disk:
    """Writes in part, then not at all, until it is told otherwise."""

    def __init__(self) -> None:
        self.left: int | None = None

    def write(self, fd: int, data: memoryview) -> int:
        if self.left is None:
            return os.write(fd, data)
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = os.write(fd, data[: self.left])
        self.left -= done
        return done


def test_lines_of_the_traces_format_that_nobody_else_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = log_at(folder)
    for number in range(300):
        log.append(record(number))
    log.append(record(1, space=7))  # of a space that was closed
    log.close()
    lines = [json.loads(one) for one in content(folder)]
    assert [one["timestamp"] for one in lines] == [1_000 * n for n in range(300)]
    assert len({tuple(one["hash_ids"]) for one in lines}) == 300
    assert log.counts() == (300, 0, (folder / "access-00000001.jsonl").stat().st_size)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o600}


def test_a_start_begins_a_file_and_ids_stay(tmp_path: Path) -> None:
    for _ in range(2):
        log = log_at(tmp_path)
        log.append(record(5))
        log.close()
    assert names(tmp_path) == ["access-00000001.jsonl", "access-00000002.jsonl"]
    first, second = content(tmp_path)
    assert first == second


def test_a_log_elsewhere_has_other_ids(tmp_path: Path) -> None:
    for name in "ab":
        log = log_at(tmp_path / name)
        log.append(record(5))
        log.close()
    (first,), (second,) = content(tmp_path / "a"), content(tmp_path / "b")
    assert not set(json.loads(first)["hash_ids"]) & set(json.loads(second)["hash_ids"])


def test_files_are_rotated_and_the_oldest_go(tmp_path: Path) -> None:
    folder = LogFolder(str(tmp_path), 8_000)
    for number in range(500):
        assert folder.write([b"%06d" % number + b"." * 93 + b"\n"] * 3) == 3
        sizes = [(tmp_path / name).stat().st_size for name in names(tmp_path)]
        assert sum(sizes) <= 8_000
        assert max(sizes) <= 8_000 // FILES
        assert folder.bytes == sum(sizes)
    lines = content(tmp_path)
    assert len(lines) >= 60, "no more room is made than is needed"
    numbers = [int(one[:6]) for one in lines]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 499
    folder.close()
    again = LogFolder(str(tmp_path), 8_000)
    again.write([b"last\n"])
    assert content(tmp_path)[-1] == b"last"
    assert sum((tmp_path / name).stat().st_size for name in names(tmp_path)) <= 8_000
    again.close()


def test_a_long_line_has_a_file_of_its_own_and_a_too_long_one_is_left_out(tmp_path: Path) -> None:
    folder = LogFolder(str(tmp_path), 8_000)
    assert folder.write([b"a\n", b"b" * 5_000 + b"\n", b"c" * 9_000, b"d\n"]) == 3
    assert [len(one) for one in content(tmp_path)] == [1, 5_000, 1]
    assert len(names(tmp_path)) == 3
    folder.close()


@pytest.mark.parametrize("left", [0, 150, 301])
def test_a_full_disk_costs_lines_is_counted_and_recovers(tmp_path: Path, left: int) -> None:
    disk = Disk()
    folder = LogFolder(str(tmp_path), MIB, disk.write)
    lines = [b"%05d" % n + b"." * 94 + b"\n" for n in range(20)]
    assert folder.write(lines[:5]) == 5
    disk.left = left
    with pytest.raises(OSError, match="No space left"):
        folder.write(lines[5:10])
    disk.left = None
    assert folder.write(lines[10:]) == 10
    assert [int(one[:5]) for one in content(tmp_path)] == [*range(5), *range(10, 20)]
    assert {len(one) for one in content(tmp_path)} == {99}
    folder.close()


def test_what_was_lost_is_counted(tmp_path: Path) -> None:
    disk = Disk()
    log = log_at(tmp_path, disk.write)
    disk.left = 0
    for number in range(10):
        log.append(record(number))
    log.close()
    assert log.counts()[:2] == (0, 10)


@pytest.mark.parametrize(
    "take", [shutil.rmtree, lambda folder: (folder / names(folder)[0]).unlink()]
)
def test_what_was_taken_away_is_made_anew(tmp_path: Path, take: Callable[[Path], None]) -> None:
    folder = tmp_path / "log"
    log = LogFolder(str(folder), MIB)
    log.write([b"1\n"])
    take(folder)
    log.write([b"2\n"])
    assert content(folder) == [b"2"]
    log.close()


def test_a_folder_that_cannot_be_used_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    everybody = tmp_path / "open"
    everybody.mkdir()
    everybody.chmod(0o777)
    for path in (tmp_path / "file", everybody):
        with pytest.raises(StartError) as caught:
            log_at(path)
        assert caught.value.setting == "record.path"


def test_what_was_written_in_part_is_cut_off_again(tmp_path: Path) -> None:
    disk = Disk()
    fd = open_to_append(str(tmp_path / "x"))
    append_whole(fd, b"whole\n", disk.write)
    disk.left = 3
    with pytest.raises(OSError, match="No space left"):
        append_whole(fd, b"part\n", disk.write)
    os.close(fd)
    assert (tmp_path / "x").read_bytes() == b"whole\n"
