"""The LMDB index: damage found before it is trusted, devices that refuse, files that stay small."""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import lmdb
import pytest

from kvstore.tiers.disk import probe
from kvstore.tiers.disk.dictindex import CommitFault, DictIndex
from kvstore.tiers.disk.format import Row, Segment
from kvstore.tiers.disk.index import LmdbIndex, Unusable
from kvstore.tiers.disk.rows import Index, IndexRow, index_bytes, pack_row, seal, unpack_rows

TENANT = b"\x07" * 32
PAGE = 4_096
SLOTS = 1_000


def row(number: int, *, generation: int = 1) -> IndexRow:
    key = hashlib.sha256(str(number).encode()).digest()
    where = Row(number // SLOTS, number % SLOTS, generation, 4096, key[16:], b"", 0)
    return IndexRow(1, key, where)


def rows(index: Index) -> list[IndexRow]:
    return [row for batch in index.load() for row in batch.unpack()]


def make(folder: Path, count: int = 300) -> list[IndexRow]:
    """An index with rows, closed."""
    index = LmdbIndex(str(folder))
    added = [row(number) for number in range(count)]
    for start in range(0, count, 100):
        segments = [Segment(start // SLOTS, 8192, SLOTS, TENANT)]
        index.commit(add=added[start : start + 100], add_segments=segments)
    index.commit(meta={"generation": b"1"})
    index.close()
    return added


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def data(folder: Path) -> Path:
    return folder / probe.DATA_FILE


def read(folder: Path) -> tuple[list[IndexRow], int]:
    """The rows of the index and how many it dropped. Unusable."""
    index = LmdbIndex(str(folder))
    try:
        found = rows(index)
        index.segments()
        index.meta()
        return found, index.dropped_rows
    finally:
        index.close()


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (0, "empty"),
        (1, "truncated"),
        (PAGE, "truncated"),
        (2 * PAGE, "truncated"),
        (-1, "truncated"),
    ],
)
def test_a_file_that_was_cut_is_refused(folder: Path, data: Path, size: int, reason: str) -> None:
    make(folder)
    os.truncate(data, size % data.stat().st_size)
    with pytest.raises(Unusable, match=reason):
        LmdbIndex(str(folder))
    folder.rename(folder.with_name("aside"))
    assert read(folder) == ([], 0), "after setting it aside it starts empty"


def test_the_cut_is_found_without_a_child_as_well(folder: Path, data: Path) -> None:
    make(folder)
    index = LmdbIndex(str(folder))
    rows(index)
    os.truncate(data, data.stat().st_size - PAGE)
    with pytest.raises(Unusable, match="truncated"):
        rows(index)
    with pytest.raises(OSError, match="truncated") as raised:
        index.commit(add=[row(1)])
    assert raised.value.errno == errno.EIO
    index.close()


def test_a_foreign_file_is_refused(folder: Path, data: Path) -> None:
    make(folder)
    size = data.stat().st_size
    data.write_bytes(Random(1).randbytes(size))
    with pytest.raises(Unusable, match="damaged-"):
        LmdbIndex(str(folder))
    data.write_bytes(bytes(size))
    with pytest.raises(Unusable, match=r"damaged-|no-format"):
        LmdbIndex(str(folder))


def test_an_lmdb_file_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir()
    with (
        lmdb.open(str(folder), max_dbs=1) as env,
        env.begin(write=True, db=env.open_db(b"theirs")) as transaction,
    ):
        transaction.put(b"key", b"value")
    with pytest.raises(Unusable, match="damaged-NotFoundError"):
        LmdbIndex(str(folder))


def test_a_later_format_is_refused_by_name(folder: Path) -> None:
    make(folder)
    with (
        lmdb.open(str(folder), max_dbs=3) as env,
        env.begin(write=True, db=env.open_db(b"meta")) as transaction,
    ):
        transaction.put(b"format", seal(b"format", (2).to_bytes(4, "little")))
    with pytest.raises(Unusable, match="format-2"):
        LmdbIndex(str(folder))


def test_a_damaged_row_is_dropped_and_the_next_commit_removes_it(folder: Path, data: Path) -> None:
    added = make(folder)
    content = bytearray(data.read_bytes())
    damaged = [17, 150]
    for number in damaged:
        # The newest copy of a page is the one in use; flip them all.
        at = -1
        while (at := content.find(added[number].key, at + 1)) >= 0:
            content[at + 5] ^= 0x20
    data.write_bytes(content)
    found, dropped = read(folder)
    assert found == [row for index, row in enumerate(added) if index not in damaged]
    assert dropped == len(damaged)
    index = LmdbIndex(str(folder))
    rows(index)
    index.commit()
    index.close()
    assert read(folder) == (found, 0)


def test_every_bit_of_a_stored_row_is_covered() -> None:
    name, value = pack_row(row(7))
    whole = name + value
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        pair = (bytes(flipped[: len(name)]), bytes(flipped[len(name) :]))
        batch, bad = unpack_rows([pair], {0: SLOTS})
        assert (len(batch.rows), bad) == (0, [pair[0]])
    for length in range(len(value)):
        assert unpack_rows([(name, value[:length])], {0: SLOTS})[1] == [name]
    batch, bad = unpack_rows([(name, value)], {0: SLOTS})
    assert (batch.unpack(), bad) == ([row(7)], [])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_flipped_byte_ends_the_process_or_gives_a_wrong_row(
    folder: Path, data: Path, seed: int
) -> None:
    added = set(make(folder))
    whole = data.read_bytes()
    random = Random(seed)
    reasons: list[str] = []
    lost = 0
    for _ in range(12):
        content = bytearray(whole)
        for _ in range(random.choice([1, 1, 30])):
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        data.write_bytes(content)
        (folder / "lock.mdb").unlink(missing_ok=True)
        try:
            found, _ = read(folder)
        except Unusable as unusable:
            reasons.append(str(unusable))
        else:
            assert set(found) <= added
            assert len(set(found)) == len(found)
            lost += len(found) < len(added)
    assert all(reason.replace("-", "").isalnum() for reason in reasons), "they fit file names"
    print(f"seed {seed}: {len(reasons)} of 12 refused, {lost} with rows lost")


def test_a_child_that_dies_of_the_file_is_a_verdict(folder: Path, data: Path) -> None:
    make(folder)
    # Pages beyond the end of the file under a map: what a walk of such a tree meets.
    content = bytearray(data.read_bytes())
    for page in range(2, len(content) // PAGE):
        flags = int.from_bytes(content[page * PAGE + 10 : page * PAGE + 12], "little")
        if flags & 2:  # a leaf: its first node begins far outside
            content[page * PAGE + 16 : page * PAGE + 18] = (0xFFF0).to_bytes(2, "little")
    data.write_bytes(content)
    reason = probe.examine(str(folder))
    assert reason.startswith("damaged-"), reason


@pytest.mark.parametrize("why", ["no interpreter", "killed"])
def test_no_verdict_without_a_child(
    folder: Path, why: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    added = make(folder)
    interpreter = tmp_path / "python"
    if why == "killed":
        interpreter.write_text("#!/bin/sh\nkill -9 $$\n")
        interpreter.chmod(0o700)
    was, sys.executable = sys.executable, str(interpreter)
    try:
        with caplog.at_level(logging.WARNING):
            found, _ = read(folder)
    finally:
        sys.executable = was
    assert found == added
    assert "unexamined" in caplog.text


# ---------------------------------------------------------------- start and end


def test_what_a_crash_left_of_making_an_index_is_made_anew(folder: Path) -> None:
    scratch = folder.with_name("index.new")
    scratch.mkdir()
    (scratch / probe.DATA_FILE).write_bytes(b"half")
    folder.mkdir()
    assert read(folder) == ([], 0)
    assert not scratch.exists()
    assert sorted(entry.name for entry in folder.iterdir()) == ["data.mdb", "lock.mdb", "spare"]


def test_what_a_crash_left_of_copying_an_index_is_removed_at_the_start(folder: Path) -> None:
    committed = make(folder)
    scratch = folder.with_name("index.new")
    scratch.mkdir()
    (scratch / probe.DATA_FILE).write_bytes((folder / probe.DATA_FILE).read_bytes())
    assert read(folder) == (committed, 0)
    assert not scratch.exists(), "nobody counts its bytes"


def test_a_reader_that_died_does_not_keep_pages(folder: Path) -> None:
    make(folder)
    program = (
        "import lmdb, os, sys\n"
        "env = lmdb.open(sys.argv[1], max_dbs=3)\n"
        "transaction = env.begin()\n"
        "print(transaction.id(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    died = subprocess.run(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, check=False
    )
    assert died.returncode == -signal.SIGKILL
    assert died.stdout.strip().isdigit(), "it had a reader"
    index = LmdbIndex(str(folder))
    before = index.used_bytes()
    for generation in range(2, 60):
        index.commit(add=[row(number, generation=generation) for number in range(0, 300, 3)])
    assert index.used_bytes() < before + 64 * PAGE
    index.close()


def test_a_forked_child_is_refused(folder: Path) -> None:
    index = LmdbIndex(str(folder))
    child = os.fork()
    if child == 0:  # no assertion, no fixture, no cleanup of the parent's
        code = 1
        try:
            index.commit(meta={"a": b"1"})
        except OSError as error:
            code = 0 if error.errno == errno.EBADF else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    index.commit(meta={"b": b"1"})
    assert index.meta() == {"b": b"1"}
    index.close()
    with pytest.raises(OSError, match="closed"):
        index.commit()


@pytest.mark.process
def test_what_was_acknowledged_outlives_a_kill(folder: Path) -> None:
    make(folder, 0)
    program = (
        "import sys\n"
        "from tests.unit.disk.test_index import LmdbIndex, Segment, TENANT, SLOTS, row\n"
        "index = LmdbIndex(sys.argv[1])\n"
        "index.commit(add_segments=[Segment(0, 8192, SLOTS, TENANT)])\n"
        "for number in range(SLOTS):\n"
        "    index.commit(add=[row(number)], remove=[(0, number - 20)] if number >= 20 else [])\n"
        "    print(number, flush=True)\n"
    )
    for trial in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        ) as writer:
            assert writer.stdout is not None
            last = -1
            for line in itertools.islice(writer.stdout, 15 + 20 * trial):
                last = int(line)
            writer.kill()
            later = [int(line) for line in writer.stdout]
        last = max([last, *later])
        found, dropped = read(folder)
        numbers = [row.row.slot for row in found]
        assert dropped == 0
        assert last in numbers, "acknowledged is there"
        assert set(numbers) <= set(range(max(last - 20, 0), last + 2)), "removed is not"
        index = LmdbIndex(str(folder))
        index.commit(remove_segments=[0])
        index.close()


# ---------------------------------------------------------------- devices that refuse


def test_a_full_disk_is_told_as_such_and_what_was_there_stays(folder: Path, data: Path) -> None:
    added = make(folder)
    index = LmdbIndex(str(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (data.stat().st_size, hard))
    try:
        with pytest.raises(OSError, match=r"\w") as raised:
            index.commit(add=[row(number) for number in range(300, 900)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno in (errno.EFBIG, errno.EIO)
    assert rows(index) == added
    index.commit(add=[row(number) for number in range(300, 900)])
    assert len(rows(index)) == index.row_count() == 900
    index.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB that are a file system of its own."""
    mounted = tmp_path / "tiny"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mounted)]
    if os.geteuid() or subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting needs root")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.root
def test_a_file_system_without_room_is_enospc_and_removal_gives_room(tiny_disk: Path) -> None:
    index = LmdbIndex(str(tiny_disk / "index"))
    index.commit(add_segments=[Segment(number, 8192, SLOTS, TENANT) for number in range(40)])
    saved = 0

    def fill() -> None:
        nonlocal saved
        while True:
            index.commit(add=[row(number) for number in range(saved, saved + 200)])
            saved += 200

    with pytest.raises(OSError, match=r"\w") as raised:
        fill()
    assert raised.value.errno == errno.ENOSPC
    assert saved > 4_000
    assert index.row_count() == len(rows(index)) == saved
    for generation, first in enumerate(range(0, 4_000, 400), 2):
        index.commit(remove=[row(number).place for number in range(first, first + 400)])
        index.commit(add=[row(n, generation=generation) for n in range(first, first + 100)])
    assert len(rows(index)) == saved - 10 * 300
    index.close()


@pytest.mark.parametrize("how", ["removed", "replaced", "folder"])
@pytest.mark.parametrize("unmapped", [False, True])
def test_nothing_is_acknowledged_into_a_file_that_nobody_would_find(
    folder: Path, data: Path, how: str, unmapped: bool
) -> None:
    make(folder)
    older = folder.with_name("older")
    older.write_bytes(data.read_bytes())
    index = LmdbIndex(str(folder))
    index.commit(meta={"a": b"1"})
    if unmapped:
        assert len(rows(index)) == 300
    if how == "folder":
        folder.rename(folder.with_name("moved"))
    elif how == "replaced":
        older.rename(data)
    else:
        data.unlink()
    for _ in range(3):
        with pytest.raises(OSError, match="removed or replaced"):
            index.commit(meta={"b": b"2"})
    index.close()


def test_a_folder_that_went_is_an_os_error(folder: Path) -> None:
    index = LmdbIndex(str(folder))
    index.commit(add_segments=[Segment(0, 8192, SLOTS, TENANT)])
    rows(index)
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(OSError, match=r"\w") as raised:
        index.commit(add=[row(1)])
    assert raised.value.errno == errno.ENOENT
    folder.with_name("elsewhere").rename(folder)
    index.commit(add=[row(1)])
    assert rows(index) == [row(1)]
    index.close()


# ---------------------------------------------------------------- size


def test_the_map_grows_with_the_rows(folder: Path) -> None:
    index = LmdbIndex(str(folder))
    count = 115_000
    segments = [Segment(number, 8192, SLOTS, TENANT) for number in range(count // SLOTS)]
    index.commit(add=[row(number) for number in range(count)], add_segments=segments)
    assert index.row_count() == count
    assert index.used_bytes() > 16 << 20, "more than the first map"
    assert index.used_bytes() <= index_bytes(count)
    assert sum(len(batch.rows) for batch in index.load()) == count
    index.commit(remove_segments=range(count // SLOTS))
    assert index.row_count() == 0
    index.close()


@pytest.mark.parametrize("pattern", ["hand", "scattered", "classes"])
def test_the_allowance_holds_through_churn(folder: Path, pattern: str) -> None:
    random = Random(3)
    slots = 4_000
    index = LmdbIndex(str(folder))
    index.commit(add_segments=[Segment(number, 8192, SLOTS, TENANT) for number in range(4)])
    if pattern == "classes":
        # Four segments filled side by side: pages in the middle of the file are split half full.
        for start in range(0, SLOTS, 50):
            for segment in range(4):
                first = segment * SLOTS + start
                index.commit(add=[row(number) for number in range(first, first + 50)])
    else:
        for start in range(0, slots, 500):
            index.commit(add=[row(number) for number in range(start, start + 500)])
    leaving: list[IndexRow] = []
    hand = 0
    for generation in range(2, 80):
        if pattern == "hand":
            chosen = [(hand + step) % slots for step in range(0, 128, 2)]
            hand += 128
        else:
            chosen = random.sample(range(slots), 64)
        removed = [row(number) for number in chosen]
        places = [one.place for one in removed]
        added = [one for one in leaving if one.place not in places]
        index.commit(remove=places, add=added)
        leaving = [one._replace(row=one.row._replace(generation=generation)) for one in removed]
    assert index.used_bytes() <= index_bytes(slots)
    assert index.allowance_bytes(0) == max(index_bytes(0), index.used_bytes())
    index.close()


def test_an_index_that_became_small_gives_its_space_back(folder: Path, data: Path) -> None:
    program = (
        "import sys, lmdb\n"
        "from tests.unit.disk.test_index import *\n"
        "index = LmdbIndex(sys.argv[1])\n"
        "index.commit(add=[row(1), row(2)], add_segments=[Segment(0, 8192, SLOTS, TENANT)])\n"
        "index.close()\n"
        "with lmdb.open(sys.argv[1], max_dbs=4, map_size=1 << 28, sync=False) as env:\n"
        "    for change in ('put', 'drop'):\n"
        "        with env.begin(write=True) as transaction:\n"
        "            bulk = env.open_db(b'bulk', txn=transaction)\n"
        "            if change == 'drop':\n"
        "                transaction.drop(bulk, delete=True)\n"
        "            else:\n"
        "                transaction.put(b'x', bytes(70 << 20), db=bulk)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert data.stat().st_size > 64 << 20
    assert read(folder) == ([row(1), row(2)], 0)
    assert data.stat().st_size < 1 << 20
    assert not folder.with_name("index.new").exists()


# ---------------------------------------------------------------- the dictionary's faults


def test_the_dictionary_keeps_a_log_and_its_past() -> None:
    index = DictIndex()
    index.commit(add_segments=[Segment(0, 8192, SLOTS, TENANT)])
    index.commit(add=[row(1)], meta={"a": b"1"})
    index.commit(remove=[row(1).place], add=[row(2)])
    assert [len(commit.add) for commit in index.log] == [0, 1, 1]
    assert [rows(index.at(count)) for count in range(4)] == [[], [], [row(1)], [row(2)]]
    assert index.at(1).meta() == {}
    assert index.at(2).meta() == {"a": b"1"}
    assert index.at(3).attempts == 0


@pytest.mark.parametrize("holds", [False, True])
def test_the_dictionary_fails_the_commit_that_it_is_told(holds: bool) -> None:
    index = DictIndex()
    index.commit(add_segments=[Segment(0, 8192, SLOTS, TENANT)])
    index.faults[2] = CommitFault(OSError(errno.ENOSPC, "full"), holds)
    with pytest.raises(OSError, match="full"):
        index.commit(add=[row(1)])
    assert rows(index) == ([row(1)] if holds else [])
    index.commit(add=[row(2)])
    assert len(index.log) == (3 if holds else 2)


def test_the_dictionary_shows_each_commit_before_it_holds() -> None:
    index = DictIndex()
    seen: list[int] = []
    index.before = lambda commit: seen.append(index.row_count())
    index.commit(add_segments=[Segment(0, 8192, SLOTS, TENANT)], add=[row(1)])
    index.commit(add=[row(2)])
    assert seen == [0, 1]


def test_the_dictionary_drops_a_damaged_row() -> None:
    index = DictIndex()
    index.commit(add_segments=[Segment(0, 8192, SLOTS, TENANT)], add=[row(1), row(2)])
    index.damage(row(1).place)
    assert rows(index) == [row(2)]
    assert index.dropped_rows == 1
