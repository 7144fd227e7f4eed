"""The host tier: CPU memory in sealed memfds that clients map read-only, and their staging regions.

Promises. Assigning takes microseconds while the stock lasts, and always succeeds at once; a
background thread faults memory in ahead, up to the capacity. Regions start all zero. What is
assigned, closing and in stock together stays within the capacity as long as the core stays within
it. Clients can write staging regions only.

`assign*`, `unassign`, `released`, `fd`, `grow` belong to the event loop's thread; views and
generations may be used from any.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvstore.model.reasons import KVStoreError, Reason, StartError
from kvstore.model.values import STAGING, Place, Region
from kvstore.shm import ARENA_SEALS, STAGING_SEALS, header_bytes, join
from kvstore.tiers.base import Bytes
from kvstore.tiers.memory_budget import ReadText, memlock_bytes, read_text, why_not_lockable
from kvstore.tiers.stock import Join, Memory, Stock

log = logging.getLogger(__name__)

BACKGROUND_NICE = 10
HUGE_FAILURES_MAX = 8
"""In a row; then memory is too scattered for huge pages, and looking for some more would cost too
much.
"""
END_S = 5.0
"""How long `close` waits for the thread, which does nothing that takes longer, unless it hangs."""

LockMode = Literal["auto", "off", "require"]
HugeMode = Literal["auto", "off"]


@dataclass(frozen=True)
class HostStats:
    """A snapshot, in bytes unless named otherwise. `lock_reason`: why memory is not locked;
    `huge_reason`: why it is in huge pages no longer, or not at all.
    """

    capacity_bytes: int
    assigned_bytes: int
    staging_bytes: int
    closing_bytes: int
    stock_bytes: int
    prefaulted_bytes: int
    locked_bytes: int
    lock_reason: str
    huge_bytes: int
    huge_reason: str
    prefault_error: str
    regions: int
    staging_regions: int
    assigned_from_stock: int
    assigned_on_the_spot: int


class _Region:
    """An open region: its memory and the views that give slots. Dropped whole when it closes."""

    __slots__ = ("data", "generations", "memory")

    def __init__(
        self, memory: Memory, data: Bytes, generations: NDArray[np.uint64] | None = None
    ) -> None:
        self.memory = memory
        self.data = data  # [slots, slot_bytes], or [total_bytes] of a staging region
        self.generations = generations


class HostTier:
    """See the module's docstring. Implements PoolMemory, for the tier and for STAGING."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        region_bytes: int,
        mlock: LockMode = "auto",
        huge_pages: HugeMode = "auto",
        join: Join = join,
        read: ReadText = read_text,
        memlock: Callable[[], int | None] = memlock_bytes,
    ) -> None:
        """`region_bytes`: of an ordinary region, for which the first stock is made."""
        self._memlock = memlock
        self._capacity_bytes = capacity_bytes
        self._mlock = mlock
        self._read = read
        self._join = join
        self._locking = False
        self._lock_reason = "host.mlock is off" if mlock == "off" else "not tried yet"
        self._huge_failures = 0
        self._huge_reason = "host.huge_pages is off" if huge_pages == "off" else ""
        self._prefault_error = ""
        self._regions: dict[int, _Region] = {}
        self._staging: dict[int, _Region] = {}
        self._closing: dict[int, int] = {}  # region id -> bytes that a client may still have mapped
        self._retired: list[tuple[int, Memory]] = []  # with the region's id
        self.unmapping: Callable[[int], None] = lambda region_id: None
        """Called on the background thread with the id of a closed region that is unmapped next:
        whatever else of this process uses its bytes lets go of them now.
        """
        self._making: Memory | None = None
        self._stock = Stock(region_bytes)
        self._from_stock = 0
        self._on_the_spot = 0
        # Guards all of the above against the background thread; never held across a system call
        # that takes longer than microseconds.
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._paused = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Prepares one region and starts the background thread. The tier is then ready to serve.

        Raises StartError if memory cannot be had, or not be locked though `host.mlock` requires it.
        """
        if self._mlock != "off":
            allowed_bytes = self._memlock()
            self._lock_reason = why_not_lockable(self._capacity_bytes, allowed_bytes, self._read)
            self._locking = not self._lock_reason
        while not self._stock.total_bytes and self.work() and not self._prefault_error:
            pass
        if self._prefault_error:
            self.close()
            raise StartError(Reason.START_MEMORY, self._prefault_error, "host.capacity_bytes")
        if self._mlock == "require" and not self._locking:
            self.close()
            raise StartError(Reason.START_MEMORY, self._lock_reason, "host.mlock")
        self._thread = threading.Thread(target=self._run, name="kvstore-prefault", daemon=True)
        self._thread.start()

    def pause(self, paused: bool) -> None:
        """Whether no memory is made or faulted in ahead. From any thread."""
        resumed, self._paused = self._paused and not paused, paused
        if resumed:
            self._wake.set()

    def close(self, patience_s: float = END_S) -> None:
        """Stops the thread and closes everything; idempotent. Views that live stay valid. A thread
        that hangs in `unmapping` is left, with what it unmaps.
        """
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(patience_s)
            self._thread = None
        with self._guard:
            memories = [r.memory for r in (*self._regions.values(), *self._staging.values())]
            memories += [*self._stock, *(memory for _, memory in self._retired)]
            if self._making is not None:
                memories.append(self._making)
            self._regions.clear()
            self._staging.clear()
            self._retired.clear()
            self._making = None
            self._stock = Stock(self._stock.chunk_bytes)
        for memory in memories:
            memory.close()

    def grow(self, capacity_bytes: int) -> None:
        """Raises the capacity; what the core may assign is the core's own affair."""
        with self._guard:
            self._capacity_bytes = max(self._capacity_bytes, capacity_bytes)
        self._wake.set()

    # ------------------------------------------------------------------ regions

    def assign(self, region: Region) -> None:
        """Makes the memory of `region`; see PoolMemory. OSError if descriptors have run out."""
        if region.id in self._regions or region.header_bytes < header_bytes(region.slots):
            raise ValueError(f"{region} is assigned already, or its header is too small")
        with self._guard:
            self._stock.expect(region.total_bytes)
            memory = self._stock.take(region.total_bytes)
            self._from_stock += memory is not None
            self._on_the_spot += memory is None
        if memory is None:
            memory = Memory(region.total_bytes)
        memory.seal(region.total_bytes, ARENA_SEALS, client_writes=False)
        mapped = memory.shared.map
        data = mapped.slots2d(region.header_bytes, region.slot_bytes, region.slots)
        generations = mapped.generations(region.slots)
        self._open(self._regions, region.id, _Region(memory, data, generations))

    def assign_staging(self, region_id: int, total_bytes: int) -> None:
        """Makes a staging region: no header, clients may write it but not change its size."""
        if region_id in self._staging:
            raise ValueError(f"staging region {region_id} is assigned already")
        with self._guard:
            memory = self._stock.take(total_bytes)
        if memory is None:
            memory = Memory(total_bytes)
        memory.seal(total_bytes, STAGING_SEALS, client_writes=True)
        self._open(self._staging, region_id, _Region(memory, memory.shared.map.u8))

    def unassign(self, region_id: int) -> None:
        """Closes a region of either kind. Its bytes count as used until `released`."""
        with self._guard:
            region = self._regions.pop(region_id, None) or self._staging.pop(region_id, None)
            if region is None:
                return
            memory = region.memory
            self._closing[region_id] = memory.total_bytes
        # The tier's own views must be gone first, or unmapping would fall to this thread.
        del region
        memory.close_fds()
        with self._guard:
            self._retired.append((region_id, memory))
        self._wake.set()

    def mapped(self, region_id: int) -> Bytes | None:
        """All bytes of an open region, uint8 [total_bytes]; None if it is closed. From any thread,
        for as long as `unmapping` has not told of it.
        """
        region = self._regions.get(region_id)
        return None if region is None else region.memory.shared.map.u8

    def released(self, region_id: int) -> None:
        """No process has the closed region any more: its bytes may be used again."""
        with self._guard:
            self._closing.pop(region_id, None)
        self._wake.set()

    def fd(self, region_id: int) -> int:
        """The tier's descriptor for clients: read-only of a region, read-write of staging."""
        region = self._regions.get(region_id) or self._staging.get(region_id)
        if region is None:
            raise _unknown(region_id)
        return region.memory.fd

    # ------------------------------------------------------------------ bytes

    def view(self, place: Place, length: int) -> Bytes:
        """uint8 [length] at `place`, of the tier or of STAGING; see PoolMemory."""
        if place.tier == STAGING:
            return self.staging_view(place.region, place.offset, length)
        region = self._regions.get(place.region)
        if region is None:
            raise _unknown(place.region)
        slots, slot_bytes = region.data.shape
        if not (0 <= place.slot < slots and 0 <= place.offset <= slot_bytes - length):
            raise ValueError(f"{length} bytes at {place} are not in the region")
        return region.data[place.slot, place.offset : place.offset + length]

    def staging_view(self, region_id: int, offset: int, length: int) -> Bytes:
        """uint8 [length] of a staging region, writeable."""
        region = self._staging.get(region_id)
        if region is None:
            raise _unknown(region_id)
        if not 0 <= offset <= len(region.data) - length:
            raise ValueError(f"{length} bytes at {offset} are not in staging region {region_id}")
        return region.data[offset : offset + length]

    def set_generation(self, region_id: int, slot: int, generation: int) -> None:
        """Writes the slot's generation where clients compare it."""
        region = self._regions.get(region_id)
        if region is None or region.generations is None:
            raise _unknown(region_id)
        region.generations[slot] = generation

    def generation(self, region_id: int, slot: int) -> int:
        """The slot's generation; 0 if the region is closed."""
        region = self._regions.get(region_id)
        if region is None or region.generations is None:
            return 0
        return int(region.generations[slot])

    # ------------------------------------------------------------------ numbers

    def stats(self) -> HostStats:
        """A snapshot."""
        with self._guard:
            regions = [region.memory for region in self._regions.values()]
            staging = [region.memory for region in self._staging.values()]
            memories = [*regions, *staging, *self._stock]
            if self._making is not None:
                memories.append(self._making)
            return HostStats(
                capacity_bytes=self._capacity_bytes,
                assigned_bytes=sum(memory.total_bytes for memory in regions),
                staging_bytes=sum(memory.total_bytes for memory in staging),
                closing_bytes=sum(self._closing.values()),
                stock_bytes=self._stock.total_bytes,
                prefaulted_bytes=sum(memory.prefaulted_bytes for memory in memories),
                locked_bytes=sum(memory.total_bytes for memory in memories if memory.locked),
                lock_reason=self._lock_reason,
                huge_bytes=sum(memory.huge_bytes for memory in memories),
                huge_reason=self._huge_reason,
                prefault_error=self._prefault_error,
                regions=len(regions),
                staging_regions=len(staging),
                assigned_from_stock=self._from_stock,
                assigned_on_the_spot=self._on_the_spot,
            )

    # ------------------------------------------------------------------ background

    def work(self) -> bool:
        """One unit of background work, of a few milliseconds; False if there is none.

        Called by the tier's own thread, or by who drives a tier that was not started.
        """
        with self._guard:
            retired, self._retired = self._retired, []
            open_regions = (*self._regions.values(), *self._staging.values())
            cold = next((r.memory for r in open_regions if r.memory.cold), None)
            cold = None if self._paused else cold
            excess = self._excess() if self._room() < 0 else []
        for region_id, memory in retired:
            self.unmapping(region_id)
            memory.close()
        for memory in excess:
            memory.close()
        closed = bool(retired or excess)
        if self._prefault_error:
            return closed
        try:
            return self._warm(cold) or closed
        except OSError as error:
            self._prefault_error = f"cannot prepare memory: {error}"
            log.warning("host tier: %s; regions are made when they are needed", error)
            return True

    def _warm(self, cold: Memory | None) -> bool:
        if cold is None:
            cold = self._make()
            if cold is None:
                return False
        huge_bytes = cold.huge_bytes
        why_not_huge = cold.warm(self._locking, None if self._huge_reason else self._join)
        if why_not_huge:
            self._huge_failures += 1
            if self._huge_failures == HUGE_FAILURES_MAX:
                self._huge_reason = why_not_huge
                log.info("host tier: no more huge pages: %s", why_not_huge)
        elif cold.huge_bytes > huge_bytes:
            self._huge_failures = 0
        if cold.lock_reason:
            self._locking, self._lock_reason = False, cold.lock_reason
        with self._guard:
            if cold is self._making and not cold.cold:
                self._making = None
                self._stock.put(cold)
        return True

    def _make(self) -> Memory | None:
        """The stock's next piece, begun already or new; None if the capacity is used up, or now is
        not the time.
        """
        with self._guard:
            if self._paused:
                return None
            if self._making is not None or self._room() < self._stock.chunk_bytes:
                return self._making
            self._making = Memory(self._stock.chunk_bytes)
            return self._making

    def _excess(self) -> list[Memory]:
        """A piece of memory to give up, so that the capacity holds."""
        excess = self._stock.drop()
        if excess is None:
            excess, self._making = self._making, None
        return [] if excess is None else [excess]

    def _room(self) -> int:
        """Bytes of the capacity that are neither open, closing nor in stock."""
        used = sum(self._closing.values()) + self._stock.total_bytes
        for region in (*self._regions.values(), *self._staging.values()):
            used += region.memory.total_bytes
        if self._making is not None:
            used += self._making.total_bytes
        return self._capacity_bytes - used

    def _open(self, table: dict[int, _Region], region_id: int, region: _Region) -> None:
        with self._guard:
            table[region_id] = region
        self._wake.set()

    def _run(self) -> None:
        # Behind everything that serves: memory that is not faulted in yet only costs its first use.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)
        while not self._stopped:
            if not self.work():
                self._wake.wait()
                self._wake.clear()


def _unknown(region_id: int) -> KVStoreError:
    return KVStoreError(Reason.REGION_UNKNOWN, f"region {region_id} is closed")
