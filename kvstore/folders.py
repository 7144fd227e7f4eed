"""Folders of the daemon that nobody else can put something of theirs into, or exchange.

Promise. What `prepare` gives back belongs to us or to root, and nobody else may replace it, or what
leads to it, at the moment of the call; and it is still there after a power cut. Pure POSIX. Used
wherever the daemon makes a folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

_LINKS_MAX = 40
"""As the kernel's own limit."""


class NotOurs(PermissionError):
    """Somebody else could exchange the folder or what lies in it; `detail` says who and where."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(errno.EPERM, detail, path)
        self.detail = detail


class Exchangeable(NotOurs):
    """Everybody may: a folder on the way is open and not sticky."""


def prepare(
    path: str, *, mode: int = 0o700, shared: bool = False, writers_trusted: bool = False
) -> str:
    """The real path of a folder; made with `mode`, whatever the umask, if absent, its parents too.

    `shared`: others may put files beside ours if they cannot touch ours (a sticky folder such as
    /tmp). `writers_trusted`: whoever may write a folder on the way is no enemy. One that is there
    keeps its mode. Raises NotOurs, OSError.
    """
    real = _make(path, mode, writers_trusted)
    # Also of one that was there: whoever made it may have been killed before this.
    _sync_parent(real)
    found = os.stat(real)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), real)
    if found.st_uid not in (os.geteuid(), 0):
        raise NotOurs(real, f"{real} belongs to user {found.st_uid}, not to us")
    if found.st_mode & stat.S_IWOTH and not shared:
        raise NotOurs(real, f"everybody may put files into {real}: take that right away")
    return real


def check_way(path: str) -> None:
    """Raises Exchangeable if everybody may put another file in the place of `path`, or of what it
    points to.
    """
    for at in (os.path.abspath(path), os.path.realpath(path)):
        parts = at.split("/")
        for length in range(1, len(parts)):
            _check_writers("/".join(parts[:length]) or "/")


def sync(folder: str) -> None:
    """Makes the names in a folder durable. Waits for the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_parent(path: str) -> None:
    # One that we may not read was made by somebody else, with what leads to it.
    with contextlib.suppress(PermissionError):
        sync(os.path.dirname(path))


def _make(path: str, mode: int, writers_trusted: bool) -> str:
    """Follows `path` name by name, makes what is missing, and refuses what others could exchange
    on the way.
    """
    names = _names(os.path.abspath(path))
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # in a user namespace root has another number
    at, links = "/", 0
    while True:
        if not writers_trusted:
            _check_writers(at)
        if not names:
            return at
        name = names.pop()
        if name == "..":
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, name)
        try:
            found = os.lstat(here)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another daemon starts beside us
                os.mkdir(here, 0o700)
                os.chmod(here, mode)
                _sync_parent(here)
            found = os.lstat(here)
        if not stat.S_ISLNK(found.st_mode):
            at = here
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if found.st_uid not in trusted:
            raise NotOurs(here, f"{here} is a link of user {found.st_uid}, who may turn it")
        target = os.readlink(here)
        names += _names(target)
        at = "/" if os.path.isabs(target) else at


def _names(path: str) -> list[str]:
    """The names of a path, the first one last."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _check_writers(folder: str) -> None:
    mode = os.stat(folder).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and stat.S_ISDIR(mode):
        raise Exchangeable(
            folder,
            f"everybody may replace what lies in {folder}: make it sticky or choose another",
        )
