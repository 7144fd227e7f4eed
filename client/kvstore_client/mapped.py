"""Memory of the daemon in this process, and what a device has of it.

A region is unmapped after the device has let go: a registration or an open pool is `Held`, ends
once, and never while a copy uses it.
"""

from __future__ import annotations

import abc
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore import shm
from kvstore.wire.v1 import store_pb2 as pb

if TYPE_CHECKING:
    from kvstore_client.pools import Pool

__all__ = ["Held", "Region", "Staging"]


class Held(abc.ABC):
    """What a device has of the daemon's memory: copies use it, and it ends before the memory goes.
    For several threads. One that is dropped ends with its last reference, so never while a copy
    uses it. In a forked child it can neither be used nor ended: the device is the parent's.
    """

    def __init__(self, users: int = 0) -> None:
        self._changed = threading.Condition()
        self._users = users
        self._ended = self._ending = False
        self._pid = os.getpid()

    def use(self) -> bool:
        """Until `leave` it stays. False: it is over."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            self._users += not self._ended
            return not self._ended

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def end(self, wait_s: float = 0.0) -> bool:
        """Before the memory goes: ends it, once nobody uses it. False if that has not been so
        within `wait_s`: ask again. In a forked child it is only forgotten.
        """
        if os.getpid() != self._pid:
            self._forget()
            return True
        with self._changed:
            self._ending = True
            if not self._changed.wait_for(lambda: not self._users, wait_s):
                return False
            self._ended = True
            self._give_up()
            self._forget()
            return True

    @abc.abstractmethod
    def _give_up(self) -> None:
        """Once, however often it is called; raises nothing."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Lets go of what keeps memory mapped."""

    def __del__(self) -> None:
        # Of a session that hung up while a copy was under way; the memory is still here.
        if getattr(self, "_pid", 0) == os.getpid():
            self._give_up()


class _Mapped:
    """Memory of the daemon in this process. `gone`: the daemon has closed it. `pin`: what a device
    has of it.
    """

    def __init__(self, region_id: int, memory: shm.MappedRegion) -> None:
        self.id = region_id
        self.memory = memory
        self.gone = False
        self.pin: Held | None = None

    def drop(self) -> bool:
        """Gives the memory up; True once no view holds it any more. Idempotent."""
        self.gone = True
        unpinned = self.pin is None or self.pin.end()
        return unpinned and self.memory.close()

    def withdraw(self, wait_s: float) -> bool:
        """Gives the memory up whoever holds it. No generation in it is right any more, and what a
        slow writer still writes goes nowhere. False if a device copies it for longer than `wait_s`.
        """
        if self.pin is not None and not self.pin.end(wait_s):
            return False
        self.memory.withdraw()
        return True


class Region(_Mapped):
    """A region of blocks, mapped for reading. Of a device's only the generations are mapped; its
    slots are in `pool`, once that is open.
    """

    def __init__(self, info: pb.RegionInfo, memory: shm.MappedRegion) -> None:
        super().__init__(info.region_id, memory)
        self.slots = info.slots
        self.slot_bytes = info.slot_bytes
        self.generations = memory.generations(info.slots)
        self.pool: Pool | None = None
        self._slots2d = np.empty((0, 0), np.uint8)
        if not info.HasField("device"):
            self._slots2d = memory.slots2d(info.data_offset, info.slot_bytes, info.slots)

    @property
    def slots2d(self) -> NDArray[np.uint8]:
        """uint8 [slots, slot_bytes], read-only; empty if they are in a pool."""
        return self._slots2d

    def hold(self, pool: Pool) -> None:
        """The pool is this region's, and ends with it."""
        self.pin = self.pool = pool

    def drop(self) -> bool:
        self._slots2d = np.empty((0, 0), np.uint8)
        self.generations = np.empty(0, np.uint64)
        return super().drop()


class Staging(_Mapped):
    """The session's staging region, mapped for writing; not inherited by forked children."""

    def __init__(self, region_id: int, memory: shm.MappedRegion) -> None:
        super().__init__(region_id, memory)
        self.total_bytes = memory.total_bytes
