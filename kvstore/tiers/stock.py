"""Memory of the host tier: made, faulted in and locked ahead, so that a region is assigned in no
time.

A piece of memory is in the stock until it is taken, then belongs to one region for life, and is
never used again afterwards: a client may still have it mapped. All of it comes zeroed from the
kernel.

Used by the host tier alone. `Stock` is not thread-safe; its owner holds a lock around it.
`Memory.warm` is called by one thread, without that lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from kvstore import shm
from kvstore.shm import HUGE_PAGE_BYTES, MappedRegion, Seal, SharedRegion

NAME = "kvstore-host"
WARM_BYTES = 1 << 20
"""Faulted in by one call: under a millisecond. The kernel holds the process's memory map meanwhile,
so that a larger piece would stall every thread that allocates: 32 MiB doubled the time of a lookup.
"""

Join = Callable[[MappedRegion, int, int], tuple[int, str]]
"""As `shm.join`."""


class Memory:
    """One memfd with the daemon's writable mapping of it."""

    __slots__ = ("_fd", "huge_bytes", "lock_reason", "locked", "prefaulted_bytes", "shared")

    def __init__(self, total_bytes: int) -> None:
        """OSError if there is no descriptor or address space left."""
        self.shared: SharedRegion = shm.create_region(total_bytes, NAME)
        self.prefaulted_bytes = 0
        self.huge_bytes = 0
        self.locked = False
        self.lock_reason = ""
        # Opened before any client sees it: the owner of a memfd may change its mode, and a client
        # may be of the same user.
        self._fd = shm.open_readonly_fd(self.shared.fd)

    @property
    def total_bytes(self) -> int:
        return self.shared.total_bytes

    @property
    def fd(self) -> int:
        """The descriptor for clients; read-only unless sealed as staging."""
        return self._fd

    @property
    def cold(self) -> bool:
        """Whether some of it is not faulted in yet."""
        return self.prefaulted_bytes < self.total_bytes

    def seal(self, total_bytes: int, seals: Seal, *, client_writes: bool) -> None:
        """Cuts it to `total_bytes` and fixes its size; one descriptor stays, for clients."""
        self.shared.shrink(total_bytes)
        self.prefaulted_bytes = min(self.prefaulted_bytes, total_bytes)
        self.huge_bytes = min(self.huge_bytes, total_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        self.shared.seal(seals)
        if client_writes:
            self._fd, self.shared.fd = self.shared.fd, self._fd
        os.close(self.shared.fd)
        self.shared.fd = -1

    def warm(self, lock: bool, join: Join | None = None) -> str:
        """Faults in the next piece; locks the whole after the last one, if wanted. Huge pages that
        are complete by that are made with `join`: returns why they were not, "" else.
        """
        start, why_not = self.prefaulted_bytes, ""
        shm.prefault(self.shared.map, start, WARM_BYTES, write=True)
        end = self.prefaulted_bytes = min(start + WARM_BYTES, self.total_bytes)
        if join is not None:
            start -= start % HUGE_PAGE_BYTES
            joined, why_not = join(self.shared.map, start, end - start)
            self.huge_bytes += joined
        if lock and not self.cold and not self.locked:
            self.locked, self.lock_reason = shm.lock(self.shared.map)
        return why_not

    def close_fds(self) -> None:
        """Closes the descriptors; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        fd, self.shared.fd = self.shared.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> bool:
        """Closes and unmaps; idempotent. False while views live; the last one unmaps."""
        self.close_fds()
        return self.shared.close()


class Stock:
    """Memory that is ready to be assigned."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes_min = chunk_bytes
        self.chunk_bytes = chunk_bytes
        """Size of the next one to be made."""
        self._ready: list[Memory] = []
        self.total_bytes = 0

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._ready)

    def put(self, memory: Memory) -> None:
        self._ready.append(memory)
        self.total_bytes += memory.total_bytes

    def take(self, total_bytes: int) -> Memory | None:
        """The smallest that holds `total_bytes` and is not twice as large, if there is one."""
        fitting = [m for m in self._ready if total_bytes <= m.total_bytes < 2 * total_bytes]
        return self._remove(min(fitting, key=lambda m: m.total_bytes)) if fitting else None

    def expect(self, total_bytes: int) -> None:
        """Makes the next ones fit what was asked for last; never smaller than at first, or a few
        small regions would fill the capacity with descriptors.
        """
        self.chunk_bytes = max(total_bytes, self._chunk_bytes_min)

    def drop(self) -> Memory | None:
        """Any one, an unusual size first; None if it is empty."""
        if not self._ready:
            return None
        return self._remove(max(self._ready, key=lambda m: abs(m.total_bytes - self.chunk_bytes)))

    def _remove(self, memory: Memory) -> Memory:
        self._ready.remove(memory)
        self.total_bytes -= memory.total_bytes
        return memory
