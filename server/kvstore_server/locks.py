"""Folders, locks and socket files: one daemon a socket, and nobody else's file in its place.

A daemon holds an exclusive lock on `<socket>.lock` before it touches the socket: gRPC silently
takes a socket over from a living daemon, and a stale socket cannot be told from a busy one by its
file. Lock files are never removed, since removing one while another process opens it would leave
two holders. Sockets are made closed to all, then opened as far as the settings say.

Linux. Called by the app, once, at its start and end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Iterator

from kvstore import folders
from kvstore.model.reasons import Reason, StartError
from kvstore.model.sockets import LOCK_SUFFIX

_CLOSED_MASK = 0o177
TRUST_SETTING = "server.trust_folder_writers"


class SocketLock:
    """The exclusive right to a socket's path. Ends with `close` or the process."""

    def __init__(self, socket_path: str, setting: str) -> None:
        """Raises StartError: START_LOCKED if another daemon has it, START_SOCKET if it cannot be
        had."""
        path = f"{socket_path}{LOCK_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise _unusable(path, setting, error) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _unusable(path, setting, error) from None
            raise StartError(
                Reason.START_LOCKED,
                f"another daemon (pid {holder or 'unknown'}) holds {path}",
                setting,
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._fd)


def prepare_folder(
    path: str, *, passable: bool, setting: str, writers_trusted: bool = False
) -> str:
    """The real path of a folder that is ours to put sockets into; made if absent.

    `passable`: others may reach the sockets in it (0711 instead of 0700); a folder that is there
    stays as it is. Raises StartError if another user could replace what lies in it, unless
    `writers_trusted`.
    """
    mode = 0o711 if passable else 0o700
    try:
        return folders.prepare(path, mode=mode, shared=True, writers_trusted=writers_trusted)
    except folders.Exchangeable as error:
        detail = f"{error.detail}, or, if nobody else can reach it, set {TRUST_SETTING}"
        raise StartError(Reason.START_SOCKET, detail, setting) from None
    except folders.NotOurs as error:
        raise StartError(Reason.START_SOCKET, error.detail, setting) from None
    except OSError as error:
        raise _unusable(path, setting, error) from None


def clear_stale(path: str, setting: str) -> None:
    """Removes the socket of a daemon that is gone. Call it with the lock held.

    Raises StartError if something else is there, or somebody answers on it all the same (the lock
    file was removed).
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise StartError(Reason.START_SOCKET, f"{path} is there and is no socket", setting)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except BlockingIOError:
                pass  # a full backlog: somebody listens
            except ConnectionRefusedError:
                os.unlink(path)
                return
        raise StartError(Reason.START_LOCKED, f"another process listens on {path}", setting)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(path, setting, error) from None


@contextlib.contextmanager
def closed_umask() -> Iterator[None]:
    """Files that are made meanwhile are closed to everybody else. The process has one umask: no
    other threads yet."""
    before = os.umask(_CLOSED_MASK)
    try:
        yield
    finally:
        os.umask(before)


def open_up(path: str, mode: int, gid: int | None, setting: str) -> None:
    """Gives a socket file its group and mode."""
    try:
        if gid is not None:
            os.chown(path, -1, gid)
        os.chmod(path, mode)
    except OSError as error:
        raise _unusable(path, setting, error) from None


def bind(path: str, setting: str) -> socket.socket:
    """A bound stream socket, closed to everybody else; `open_up` it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with closed_umask():
            sock.bind(path)
    except OSError as error:
        sock.close()
        raise _unusable(path, setting, error) from None
    return sock


def group_id(name: str, setting: str) -> int | None:
    """Number of a group given by name or number; None for "". StartError if there is no such
    group."""
    if not name:
        return None
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise StartError(Reason.START_SETTINGS, f"there is no group {name!r}", setting) from None


def remove_sockets(paths: list[str]) -> None:
    """Removes our sockets. Call it with the locks held."""
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)


def _unusable(path: str, setting: str, error: OSError) -> StartError:
    return StartError(Reason.START_SOCKET, f"cannot use {path}: {error.strerror}", setting)
