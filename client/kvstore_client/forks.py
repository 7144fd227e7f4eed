"""Forks of a process that uses a client: none happens in the middle of a call.

gRPC survives a fork if no thread is inside it at that moment; otherwise the child hangs or crashes,
in a way that depends on GRPC_ENABLE_FORK_SUPPORT. So every call passes this gate, and a fork closes
it and waits until it is empty: shortly by itself, then by breaking the calls off, which become
misses. The hooks of Python run before those of gRPC. Forks that bypass Python are noticed by their
pid at the next use.

The child drops what it inherited (see `Forking`) and builds its own when it is used. Where gRPC's
own fork handlers are switched off by the environment, gRPC hangs in a child, and so the child does
not use it: its calls are misses.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Protocol

__all__ = ["GATE", "ForkGate", "Forking", "grpc_works_here", "watch_forks"]

DRAIN_S = 0.25
BREAK_OFF_S = 1.0
_FALSE = frozenset({"0", "f", "false", "n", "no"})


class Forking(Protocol):
    """What has to be put in order around a fork."""

    def before_fork(self) -> None:
        """In the parent: end what keeps a thread inside gRPC between calls."""

    def break_off(self) -> None:
        """In the parent: end the calls that are under way; they fail."""

    def last_before_fork(self) -> None:
        """In the parent, with the gate shut: end what came in between."""

    def after_fork_in_child(self) -> None:
        """In the child: forget connection, threads and locks; unmap; tell the daemon nothing."""


class ForkGate:
    """How many threads are inside gRPC, and whether one may enter."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False
        self.sockets: set[socket.socket] = set()
        """Of reads over the fd socket that are under way. Kept here and not with their session,
        which may be over before them: a child closes its copies."""

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around each use of gRPC. Waits while a fork is under way."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Lets nobody in from now on."""
        with self._changed:
            self._shut = True

    def empty_within(self, seconds: float) -> bool:
        """Waits until nobody is inside; False if somebody still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, seconds)

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def reset_in_child(self) -> None:
        """The threads that were inside, or held the lock, do not exist here."""
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False
        for sock in self.sockets:
            sock.close()
        self.sockets = set()


GATE = ForkGate()
_watched: weakref.WeakSet[Forking] = weakref.WeakSet()
_first_pid = os.getpid()


def watch_forks(one: Forking) -> None:
    """`one` is told of every fork for as long as it lives."""
    _watched.add(one)


def grpc_works_here(
    pid: int | None = None, environ: Mapping[str, str] = os.environ, first_pid: int = _first_pid
) -> bool:
    """False in a child of a process that had this module, where gRPC's fork handlers are off."""
    if (os.getpid() if pid is None else pid) == first_pid:
        return True
    return environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() not in _FALSE


def _before() -> None:
    for one in list(_watched):
        one.before_fork()
    GATE.shut()
    if not GATE.empty_within(DRAIN_S):
        for one in list(_watched):
            one.break_off()
        GATE.empty_within(BREAK_OFF_S)
    for one in list(_watched):
        one.last_before_fork()


def _in_child() -> None:
    GATE.reset_in_child()
    for one in list(_watched):
        one.after_fork_in_child()


os.register_at_fork(before=_before, after_in_parent=GATE.open, after_in_child=_in_child)
