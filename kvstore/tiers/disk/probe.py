"""Reads an LMDB index from end to end in a process of its own, which damage may kill.

LMDB follows page numbers and offsets that it finds in its file; a flipped one can end the process
(SIGBUS, SIGSEGV, an assertion), now or many commits later. So a daemon does not open an index
before a child has examined all of it: first the file's own order, without LMDB; then with it every
page of every tree and the list of free pages by a compacting copy to nowhere, every node by a
cursor. What the child survived its parent survives, since both read the same pages. A device that
fails is told from damage: before anything is mapped all of the file is read.

    python -m kvstore.tiers.disk.probe FOLDER     exits 0, or 1 with the reason as its last line, or
                                                  2 with the number of the device's error

`examine` is for the index alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import lmdb

from kvstore import lmdbfile

log = logging.getLogger(__name__)

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
_TABLES_MAX = 16
_META_PAGES = 2
_PAGE_BYTES_MIN = 4_096
_UNUSABLE = 1
_UNREADABLE = 2
_PIECE_BYTES = 1 << 20
_DEADLY = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def examine(folder: str) -> str:
    """Why the index in `folder` cannot be used, in a word; empty if it can.

    Takes about 0.1 s and 1 s a million rows. Empty as well if no child could be started or it was
    killed from outside, which is logged: that is no verdict over the file. OSError if the device
    cannot read it.
    """
    if reason := strange(folder) or short(folder):
        return reason
    try:
        code, said = run(folder)
    except OSError as error:
        log.warning("the index in %s is opened unexamined: %s", folder, error.strerror)
        return ""
    return _verdict(folder, code, said)


class Ahead:
    """An examination that was begun before it is needed, by whoever holds the folder's lock."""

    def __init__(self, folder: str) -> None:
        """OSError: there is no file to examine, or no child to do it."""
        self._folder = folder
        self._file = _identity(folder)
        self._child = _spawn(folder)

    def verdict(self) -> str:
        """What `examine` says; it is begun anew if the file is another one by now."""
        said, _ = self._child.communicate()
        if strange(self._folder) or self._file != _identity(self._folder):
            return examine(self._folder)
        return _verdict(self._folder, self._child.returncode, said)

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None, "what it says is read"
        self._child.stdout.close()


def begin(folder: str) -> Ahead | None:
    """Starts an examination; None where there is nothing to examine, as `examine` will say."""
    try:
        return None if strange(folder) or short(folder) else Ahead(folder)
    except OSError:
        return None


def _identity(folder: str) -> tuple[int, ...]:
    """Changes when the file is written or replaced."""
    there = os.stat(os.path.join(folder, DATA_FILE))
    return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


def _verdict(folder: str, code: int, said: bytes) -> str:
    if code == 0:
        return ""
    if -code in _DEADLY:
        return f"damaged-{signal.Signals(-code).name}"
    words = said.decode("ascii", "replace").split()
    if code == _UNUSABLE and words:
        return words[-1]
    if code == _UNREADABLE and words:
        raise OSError(int(words[-1]), os.strerror(int(words[-1])), os.path.join(folder, DATA_FILE))
    log.warning("the index in %s is opened unexamined: exit code %d", folder, code)
    return ""


def run(folder: str) -> tuple[int, bytes]:
    """The child's exit code, negative for a signal, and what it said. OSError: there is none."""
    child = _spawn(folder)
    said, _ = child.communicate()
    return child.returncode, said


def _spawn(folder: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", __name__, folder],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def strange(folder: str) -> str:
    """Whether a file of LMDB's is there and no plain one, which it would not ask: "strange-" and
    its name, or nothing. Through a link it would write over what is not ours.
    """
    for name in (DATA_FILE, LOCK_FILE):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(os.path.join(folder, name)).st_mode):
                return f"strange-{name}"
    return ""


def short(folder: str) -> str:
    """Whether the file is too short to be opened at all: "empty", "truncated" or nothing."""
    size = os.stat(os.path.join(folder, DATA_FILE)).st_size
    if size < _META_PAGES * _PAGE_BYTES_MIN:
        return "truncated" if size else "empty"
    return ""


def truncated(env: lmdb.Environment, folder: str) -> bool:
    """Whether the file ends before the last page that it uses; touches the first two pages only."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    return os.stat(os.path.join(folder, DATA_FILE)).st_size < needed


def _read(folder: str) -> None:
    with Path(folder, DATA_FILE).open("rb", buffering=0) as file:
        while file.read(_PIECE_BYTES):
            pass


def _examine(folder: str) -> str:
    _read(folder)
    # Mapped: an index of millions of rows need not be in memory. What ends it, ends the child.
    with (
        Path(folder, DATA_FILE).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        reason = lmdbfile.examine(data)
    if reason == "truncated":
        return reason
    return f"damaged-{reason}" if reason else _walk(folder)


def _walk(folder: str) -> str:
    with lmdb.open(folder, create=False, max_dbs=_TABLES_MAX, readahead=True, lock=False) as env:
        if truncated(env, folder):
            return "truncated"
        with Path(os.devnull).open("wb") as nowhere:
            env.copyfd(nowhere.fileno(), compact=True)
        with env.begin() as transaction:
            for name in list(transaction.cursor().iternext(keys=True, values=False)):
                table = env.open_db(name, txn=transaction, create=False)
                for _ in transaction.cursor(table).iternext(keys=True, values=True):
                    pass
    return ""


def _unreadable(number: int) -> int:
    sys.stdout.write(str(number))
    return _UNREADABLE


def main(folder: str) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        reason = _examine(folder)
    except lmdb.Error as error:
        if str(error).endswith(os.strerror(errno.EIO)):
            return _unreadable(errno.EIO)
        reason = f"damaged-{type(error).__name__}"
    except OSError as error:
        return _unreadable(error.errno or errno.EIO)
    sys.stdout.write(reason)
    return _UNUSABLE if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
