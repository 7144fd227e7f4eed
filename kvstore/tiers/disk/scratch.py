"""Small things that are done with files: a scratch folder, a file that appears whole, room kept
for later, a name that is watched. They may wait for the device. For index and folder alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator


class Spare:
    """A file that holds room on a file system, to be given up when there is none left."""

    def __init__(self, path: str, size: int) -> None:
        """size: bytes. Nothing is made yet."""
        self._path = path
        self._size = size
        self._made = False

    def make(self) -> None:
        """If it is not there: makes it if there is room."""
        if self._made:
            return
        # A link is not followed, and nobody is waited for at the other end of a pipe.
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self._path, flags, 0o600)
        except OSError:
            return
        try:
            os.posix_fallocate(fd, 0, self._size)
            self._made = True
        except OSError:
            self.drop()
        finally:
            os.close(fd)

    def drop(self) -> None:
        """Gives the room up."""
        self._made = False
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class Held:
    """A file or folder that lay under a name. It is held, not opened, so that no other one gets its
    number: some file systems give numbers anew once nobody holds them.
    """

    def __init__(self, path: str) -> None:
        """OSError; `close` it."""
        self._path = path
        self._fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    def is_there(self) -> bool:
        """Whether it still lies there. OSError if it cannot be asked."""
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def scratch_folder(folder: str) -> Iterator[str]:
    """An empty folder beside the index; what a crash left in it is no data yet."""
    scratch = _scratch(folder)
    remove_scratch(folder)
    os.mkdir(scratch, mode=0o700)
    try:
        yield scratch
    finally:
        remove_scratch(folder)


def remove_scratch(folder: str) -> None:
    """Removes what a crash left of a scratch folder: nobody counts it."""
    shutil.rmtree(_scratch(folder), ignore_errors=True)


def _scratch(folder: str) -> str:
    return folder + ".new"


def install(source: str, target: str) -> None:
    """Gives a complete file its name, durably."""
    os.chmod(source, 0o600)  # a copy that LMDB made is as open as the umask
    _sync(source)
    os.replace(source, target)
    _sync(os.path.dirname(target))
    _sync(os.path.dirname(os.path.dirname(target)))


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
