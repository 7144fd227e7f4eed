"""Which process is at the other end of a unix socket, when it dies, and what it still has mapped.

A process is proven dead by its pidfd alone: the end of a socket proves nothing while the process
lives, and a forked child keeps a dead process's socket open. Memory that was handed to a process
counts as held until it says that it has unmapped it, or is dead. Where no pidfd can be had (an old
kernel, or another pid namespace without help from the peer), the end of the socket has to do.

One event-loop thread; called by the fd socket.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import struct
from collections.abc import Callable, Hashable

SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
_UCRED = struct.Struct("iII")
_PID_LINE = re.compile(r"^Pid:\s*(-?\d+)$", re.MULTILINE)


class Process:
    """A peer process. `orphans` are regions whose connection has ended while the process lives
    on."""

    def __init__(self, key: Hashable, pidfd: int | None) -> None:
        self.key = key
        self.pidfd = pidfd
        self.dead = False
        self.connections = 0
        self.orphans: set[int] = set()


class Processes:
    """The peer processes by identity, each watched once.

    `on_death(process)` is called from the loop once, and before the process is forgotten.
    """

    def __init__(self, on_death: Callable[[Process], None]) -> None:
        self._on_death = on_death
        self._processes: dict[Hashable, Process] = {}
        self._anonymous_device = _anonymous_device()

    def __len__(self) -> int:
        return len(self._processes)

    def join(self, sock: socket.socket, sent_pidfd: int | None) -> Process:
        """The process behind `sock`, with one more connection.

        Takes over `sent_pidfd`, which the peer gave of itself; it is used only where the kernel
        names no process.
        """
        pidfd = _kernel_pidfd(sock)
        if pidfd is None and sent_pidfd is not None and _pid_of(sent_pidfd) is not None:
            pidfd, sent_pidfd = sent_pidfd, None
        if sent_pidfd is not None:
            os.close(sent_pidfd)
        key = self._key(pidfd)
        process = self._processes.get(key)
        if process is not None:
            if pidfd is not None:
                os.close(pidfd)
        else:
            process = self._processes[key] = Process(key, pidfd)
            if pidfd is not None:
                asyncio.get_running_loop().add_reader(pidfd, self._died, process)
        process.connections += 1
        return process

    def leave(self, process: Process) -> None:
        """One connection less; a process without connections is forgotten once it holds nothing."""
        process.connections -= 1
        self.forget_idle(process)

    def forget_idle(self, process: Process) -> None:
        """Forgets the process if nothing is left to know about it. Idempotent."""
        if process.connections == 0 and not process.orphans:
            self._forget(process)

    def close(self) -> None:
        """Watches nobody any longer."""
        for process in list(self._processes.values()):
            self._forget(process)

    def _died(self, process: Process) -> None:
        process.dead = True
        asyncio.get_running_loop().remove_reader(process.pidfd or -1)
        self._on_death(process)
        self._forget(process)

    def _forget(self, process: Process) -> None:
        if self._processes.pop(process.key, None) is None or process.pidfd is None:
            return
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
        process.pidfd = None

    def _key(self, pidfd: int | None) -> Hashable:
        if pidfd is None:
            return object()
        stat = os.fstat(pidfd)
        if stat.st_dev != self._anonymous_device:
            return stat.st_dev, stat.st_ino  # pidfs, Linux 6.9: an inode names one process for ever
        pid = _pid_of(pidfd)
        return pid if pid is not None and pid > 0 else object()


def peer_uid(sock: socket.socket) -> int:
    """User of the process that connected, as seen from here."""
    return int(
        _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
    )


def _kernel_pidfd(sock: socket.socket) -> int | None:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass  # a kernel before 6.5, or the peer is gone already: its socket will say so
    pid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    try:
        # The number may have been given away since the peer connected. Then the socket's end still
        # ends the session; only memory would count as held for too long.
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _pid_of(fd: int) -> int | None:
    """The pid if `fd` is a pidfd (0 or -1: not visible from here, or gone), None if it is something
    else."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        match = _PID_LINE.search(info.read())
    return None if match is None else int(match.group(1))


def _anonymous_device() -> int:
    with select.epoll() as epoll:
        return os.fstat(epoll.fileno()).st_dev
