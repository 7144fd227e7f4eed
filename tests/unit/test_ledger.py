"""The durable ledger: it survives, it is exclusive, it never guesses from damage."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvstore import ledger as module
from kvstore.ledger import FILE, LateLedger, LmdbLedger, open_ledger
from kvstore.model.reasons import Reason, StartError

ROWS = [("epoch", b"model", b"7"), ("review", b"r", bytes(range(256)))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ledger's folder with ROWS in it."""
    written = LmdbLedger(str(tmp_path / "state"))
    written.put_many(ROWS)
    written.close()
    return tmp_path / "state"


def rows_of(folder: Path) -> list[tuple[str, bytes, bytes]]:
    opened = LmdbLedger(str(folder))
    try:
        return opened.rows()
    finally:
        opened.close()


def raw(folder: Path) -> lmdb.Environment:
    return lmdb.open(str(folder / FILE), subdir=False, lock=False)


def test_rows_outlive_the_ledger(folder: Path) -> None:
    assert rows_of(folder) == ROWS
    assert sorted(os.listdir(folder)) == ["ledger.lock", FILE]


def test_files_are_the_owners_alone(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.process
def test_rows_outlive_a_kill(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        from kvstore.ledger import LmdbLedger
        ledger = LmdbLedger(sys.argv[1])
        ledger.put_many([("epoch", b"model", b"7")])
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    assert rows_of(tmp_path) == [("epoch", b"model", b"7")]


def test_one_daemon_a_folder(folder: Path) -> None:
    first = LmdbLedger(str(folder))
    with pytest.raises(StartError) as refused:
        LmdbLedger(str(folder))
    assert refused.value.reason is Reason.START_LOCKED
    assert refused.value.setting == "state.path"
    first.put_many([("epoch", b"more", b"1")])
    first.close()
    assert len(rows_of(folder)) == 3


def test_a_folder_that_cannot_be_used_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StartError) as refused:
            open_ledger(str(path))
        assert refused.value.reason is Reason.START_DISK
        assert refused.value.setting == "state.path"


def test_a_file_that_cannot_be_opened_is_not_set_aside(folder: Path) -> None:
    (folder / FILE).rename(folder / "kept")
    (folder / FILE).mkdir()
    with pytest.raises(StartError) as refused:
        LmdbLedger(str(folder))
    assert refused.value.reason is Reason.START_DISK
    assert sorted(os.listdir(folder)) == ["kept", "ledger.lock", FILE]
    (folder / FILE).rmdir()
    (folder / "kept").rename(folder / FILE)
    assert rows_of(folder) == ROWS  # and the lock was given back


# ---------------------------------------------------------------- damage


def truncate(folder: Path) -> None:
    os.truncate(folder / FILE, 2 * 4096)


def cut_in_the_header(folder: Path) -> None:
    os.truncate(folder / FILE, 100)


def empty(folder: Path) -> None:
    os.truncate(folder / FILE, 0)


def zero_a_page(folder: Path) -> None:
    # LMDB itself ends the process over this one.
    data = bytearray((folder / FILE).read_bytes())
    root = int.from_bytes(max(data[128:152], data[4_224:4_248], key=lambda m: m[16:])[:8], "little")
    data[root * 4_096 : (root + 1) * 4_096] = bytes(4_096)
    (folder / FILE).write_bytes(data)


def overwrite_header(folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.write(b"not a ledger" * 1000)


def flip_a_value(folder: Path) -> None:
    data = bytearray((folder / FILE).read_bytes())
    at = data.index(bytes(range(256))) + 17
    data[at] ^= 1
    (folder / FILE).write_bytes(data)


def swap_rows(folder: Path) -> None:
    with raw(folder) as env, env.begin(write=True) as transaction:
        stored = transaction.get(b"epoch\0model")
        assert stored is not None
        transaction.put(b"epoch\0other", stored)


def future_format(folder: Path) -> None:
    name = b"\0format"
    with raw(folder) as env, env.begin(write=True) as transaction:
        transaction.put(name, module._seal(name, (module.FORMAT + 1).to_bytes(4, "little")))


def no_format(folder: Path) -> None:
    with raw(folder) as env, env.begin(write=True) as transaction:
        transaction.delete(b"\0format")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated"),
        (zero_a_page, "page-header"),
        (empty, "empty"),
        (cut_in_the_header, "truncated"),
        (overwrite_header, "no-root"),
        (flip_a_value, "bad-checksum"),
        (swap_rows, "bad-checksum"),
        (future_format, "format-2"),
        (no_format, "no-format"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_cannot_be_trusted_is_set_aside_whole(folder: Path, damage, reason) -> None:  # type: ignore[no-untyped-def]
    damage(folder)
    before = (folder / FILE).read_bytes()
    opened = LmdbLedger(str(folder))
    assert opened.rows() == []
    assert reason in opened.set_aside
    aside = folder / f"{FILE}.aside-1-{reason}"
    assert str(aside) in opened.set_aside
    assert aside.read_bytes() == before
    opened.put_many(ROWS[:1])
    opened.close()
    again = LmdbLedger(str(folder))
    assert (again.rows(), again.set_aside) == (ROWS[:1], "")
    again.close()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_set_aside_and_not_followed(folder: Path, tmp_path: Path, there: bool) -> None:
    outside = tmp_path / "outside"
    if there:
        (folder / FILE).rename(outside)
    else:
        (folder / FILE).unlink()
    (folder / FILE).symlink_to(outside)
    before = outside.read_bytes() if there else b""
    opened = LmdbLedger(str(folder))
    opened.put_many(ROWS[:1])
    assert (opened.rows(), "strange" in opened.set_aside) == (ROWS[:1], True)
    opened.close()
    assert (outside.read_bytes() if outside.exists() else b"") == before


def test_a_pipe_in_its_place_is_not_waited_for(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    opened = LmdbLedger(str(folder))
    assert (opened.rows(), "strange" in opened.set_aside) == ([], True)
    opened.close()


def test_every_file_set_aside_is_kept(folder: Path) -> None:
    for _ in range(3):
        future_format(folder)
        LmdbLedger(str(folder)).close()
    kept = [name for name in os.listdir(folder) if "aside" in name]
    assert sorted(kept) == [f"{FILE}.aside-{n}-format-2" for n in (1, 2, 3)]


# ---------------------------------------------------------------- room


@contextlib.contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_writes_nothing_and_the_next_one_works(folder: Path) -> None:
    opened = LmdbLedger(str(folder))
    big = [("space", bytes([number]), bytes(4096)) for number in range(100)]
    with (
        files_no_larger_than(64 << 10),
        pytest.raises(OSError, match="Input/output error") as failed,
    ):
        opened.put_many([("epoch", b"model", b"8"), *big])
    assert failed.value.errno == errno.EIO
    assert opened.rows() == ROWS
    opened.put_many([("epoch", b"model", b"8"), *big])
    assert len(opened.rows()) == 102
    opened.close()
    assert len(rows_of(folder)) == 102


def test_the_file_grows_beyond_its_first_size(tmp_path: Path) -> None:
    opened = LmdbLedger(str(tmp_path))
    size = module._MAP_BYTES // 2
    for number in range(4):
        opened.put_many([("space", bytes([number]), bytes([number]) * size)])
    opened.close()
    rows = rows_of(tmp_path)
    assert [(key, len(value), set(value)) for _, key, value in rows] == [
        (bytes([number]), size, {number}) for number in range(4)
    ]


def test_a_closed_ledger_says_so(folder: Path) -> None:
    closed = LmdbLedger(str(folder))
    closed.close()
    with pytest.raises(OSError, match="closed"):
        closed.put_many(ROWS)


# ---------------------------------------------------------------- a file that goes, or comes late


def make_anew(folder: Path, *, lock: bool) -> None:
    """Removes the file under the daemon, with its lock or without."""
    (folder / FILE).unlink()
    if lock:
        (folder / "ledger.lock").unlink()


@pytest.mark.parametrize("lock", [False, True])
def test_a_file_that_is_removed_is_made_anew_with_all_rows(folder: Path, lock: bool) -> None:
    ledger = LmdbLedger(str(folder))
    make_anew(folder, lock=lock)
    ledger.put_many([])
    ledger.put_many([("epoch", b"more", b"1")])
    assert ledger.rows() == sorted([*ROWS, ("epoch", b"more", b"1")])
    ledger.close()
    assert rows_of(folder) == sorted([*ROWS, ("epoch", b"more", b"1")])


def test_a_folder_that_is_removed_is_made_anew_and_locked(folder: Path) -> None:
    ledger = LmdbLedger(str(folder))
    shutil.rmtree(folder)
    ledger.put_many([("epoch", b"more", b"1")])
    with pytest.raises(StartError):
        LmdbLedger(str(folder))
    ledger.close()
    assert rows_of(folder) == sorted([*ROWS, ("epoch", b"more", b"1")])


def test_a_file_that_is_replaced_is_set_aside(folder: Path, tmp_path: Path) -> None:
    other = LmdbLedger(str(tmp_path / "other"))
    other.put_many([("epoch", b"theirs", b"1")])
    other.close()
    ledger = LmdbLedger(str(folder))
    os.replace(tmp_path / "other" / FILE, folder / FILE)
    ledger.put_many([])
    assert "replaced" in ledger.set_aside
    ledger.close()
    assert rows_of(folder) == ROWS


def test_a_folder_that_cannot_be_made_anew_is_tried_again(folder: Path) -> None:
    ledger = LmdbLedger(str(folder))
    shutil.rmtree(folder)
    folder.write_text("in the way", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(OSError, match="state"):
            ledger.put_many([("epoch", b"more", b"1")])
    folder.unlink()
    ledger.put_many([])
    assert ledger.rows() == ROWS, "what was refused is the caller's to give again"
    ledger.close()


def test_another_daemon_that_took_the_folder_meanwhile_keeps_it(folder: Path) -> None:
    ledger = LmdbLedger(str(folder))
    shutil.rmtree(folder)
    other = LmdbLedger(str(folder))
    with pytest.raises(OSError, match="another daemon"):
        ledger.put_many([])
    other.close()
    ledger.close()
    assert rows_of(folder) == []


def test_a_late_folder_gets_the_rows_once_it_can_be_used(folder: Path) -> None:
    earlier = LmdbLedger(str(folder))
    earlier.put_many([("space", b"1", b"old"), ("epoch", b"a", b"old")])
    earlier.close()
    kept = folder.with_name("kept")
    folder.rename(kept)
    folder.write_text("in the way", encoding="utf-8")
    late = LateLedger(str(folder), tables=("space",))
    for row in [("epoch", b"a", b"new"), ("space", b"9", b"new")]:
        with pytest.raises(OSError, match="cannot use"):
            late.put_many([row])
    was_durable = late.durable
    assert late.rows() == [("epoch", b"a", b"new"), ("space", b"9", b"new")]
    folder.unlink()
    kept.rename(folder)
    late.put_many([])
    assert (was_durable, late.durable) == (False, True)
    late.put_many([("epoch", b"more", b"1")])
    expected = {(table, key): value for table, key, value in ROWS if table != "space"}
    expected |= {("epoch", b"a"): b"new", ("space", b"9"): b"new", ("epoch", b"more"): b"1"}
    assert late.rows() == sorted((*name, value) for name, value in expected.items())
    late.close()
    assert rows_of(folder) == sorted((*name, value) for name, value in expected.items())
