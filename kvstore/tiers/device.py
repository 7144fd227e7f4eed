"""The device tier: memory of one GPU, in regions as the host tier's, that only the GPU copies.

Promises. A region begins all zero, belongs to one tenant for life, and all of them together stay
within the capacity. A copy is said to have ended only after its event has; its target's generation
is the caller's to write before. Host memory is registered with the device once a region, when a
copy touches it first, and unregistered before it is unmapped. When the device is lost, everything
here fails from then on, and `lost` says so.

`assign`, `unassign`, `released`, `fd`, `exported` belong to the event loop's thread and never touch
the driver; `cross`, `read`, `release_host` belong to others and may take as long as the device
does. Generations may be used from any.

A region's memory is made by the thread whose copy is its first. A region's file, that clients map,
holds the generations alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.model.reasons import KVStoreError, NoSpace, Reason
from kvstore.model.values import Place, Region
from kvstore.shm import ARENA_SEALS, header_bytes, whole_pages
from kvstore.tiers.base import Bytes, Crossing
from kvstore.tiers.driver import (
    DeviceDriver,
    DeviceFullError,
    DeviceLostError,
    DeviceMemory,
    Event,
    Exported,
    HandleKind,
    Stream,
)
from kvstore.tiers.stock import Memory

log = logging.getLogger(__name__)

HostMap = Callable[[int], Bytes | None]
"""All bytes of an open host region, by id: what is registered; None if it is closed."""


@dataclass(frozen=True)
class DeviceStats:
    """A snapshot, in bytes unless named otherwise. `unpinned_reason`: why host memory is not
    registered; lost: why the device is gone. crossings, crossed bytes: by direction.
    """

    uuid: str
    capacity_bytes: int
    made_bytes: int
    closing_bytes: int
    registered_bytes: int
    regions: int
    exported_regions: int
    copies_in: int
    copies_out: int
    copied_in_bytes: int
    copied_out_bytes: int
    copies_failed: int
    unpinned_reason: str
    lost: str

    @property
    def gauges(self) -> dict[str, float]:
        """By the parts of metrics' names that they are, as an archive's."""
        return {
            "made_bytes": self.made_bytes,
            "registered_bytes": self.registered_bytes,
            "exported_regions": self.exported_regions,
        }

    @property
    def counters(self) -> dict[str, float]:
        """As `gauges`; some with a label."""
        return {
            "copies way=in": self.copies_in,
            "copies way=out": self.copies_out,
            "copied_bytes way=in": self.copied_in_bytes,
            "copied_bytes way=out": self.copied_out_bytes,
            "copies_failed": self.copies_failed,
        }

    @property
    def state(self) -> str:
        """A word, or the sentence that says what is wrong."""
        if self.lost:
            return f"lost: {self.lost}"
        return (
            f"host memory is not pinned: {self.unpinned_reason}" if self.unpinned_reason else "ok"
        )


class _Region:
    """An open region. `memory` is None until a copy needs it; `guard` is held while it is made."""

    __slots__ = ("exported", "file", "generations", "guard", "info", "memory", "open")

    def __init__(self, info: Region) -> None:
        self.info = info
        self.file = Memory(info.header_bytes)
        self.file.seal(info.header_bytes, ARENA_SEALS, client_writes=False)
        self.generations: NDArray[np.uint64] | None = self.file.shared.map.generations(info.slots)
        self.memory: DeviceMemory | None = None
        self.exported: Exported | None = None
        self.open = True
        self.guard = threading.Lock()

    @property
    def data_bytes(self) -> int:
        return self.info.slots * self.info.slot_bytes


class DeviceTier:
    """See the module's docstring. Implements RemotePool."""

    def __init__(
        self,
        driver: DeviceDriver,
        capacity_bytes: int,
        *,
        background: Executor,
        host_map: HostMap,
        export: bool = False,
    ) -> None:
        """`background` runs what need not be waited for. `export`: whether pools are handed to
        clients.
        """
        self._driver = driver
        self._capacity_bytes = capacity_bytes
        self._background = background
        self._host_map = host_map
        self._export = export
        self._regions: dict[int, _Region] = {}
        self._closing: dict[int, int] = {}
        self._made_bytes = 0
        self._retired: deque[_Region] = deque()
        self._opened: dict[int, _Region] = {}  # closed, of memory that others may have by its name
        self._registered: dict[int, Bytes] = {}
        self._unpinned_reason = ""
        self._lost = ""
        self._closed = False
        self._streams: tuple[Stream, Stream] | None = None  # into the device, out of it
        self._counts = {"in": 0, "out": 0, "in_bytes": 0, "out_bytes": 0, "failed": 0}
        self._guard = threading.Lock()  # of all tables; never held across a call of the driver
        self._under_way = 0  # batches of copies
        self._batch_ended = threading.Condition(self._guard)
        self._pinning = threading.Lock()  # held while host memory is registered or given up

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Takes the device. Off the loop's thread. StartError: there is none to be had."""
        self._driver.open()
        self._streams = self._driver.stream(), self._driver.stream()

    @property
    def device_uuid(self) -> str:
        """Of the GPU."""
        return self._driver.uuid

    @property
    def shares(self) -> bool:
        """Whether pools are handed to clients."""
        return self._export

    @property
    def lost(self) -> str:
        """Why the device is gone; empty while it works."""
        return self._lost

    def close(self) -> None:
        """Gives everything back once the copies that are under way have ended; idempotent. Off the
        loop's thread, after all other calls but `cross` and `read`.
        """
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._retired.extend([*self._regions.values(), *self._opened.values()])
            self._regions.clear()
            self._opened.clear()
            self._batch_ended.wait_for(lambda: not self._under_way)
        with self._pinning:
            self._unregister(list(self._registered))
        self._drop_retired()
        self._driver.close()

    # ------------------------------------------------------------------ regions

    def assign(self, region: Region) -> None:
        """See RegionMemory. OSError if descriptors have run out."""
        if region.id in self._regions or region.header_bytes < header_bytes(region.slots):
            raise ValueError(f"{region} is assigned already, or its header is too small")
        made = _Region(region)
        with self._guard:
            self._regions[region.id] = made

    def unassign(self, region_id: int) -> None:
        """See RegionMemory. The core has no copy under way in it. Its bytes count until
        `released`.
        """
        with self._guard:
            region = self._regions.pop(region_id, None)
            if region is None:
                return
            region.open = False
            region.generations = None
            self._closing[region_id] = 0 if region.memory is None else region.memory.mapped_bytes
            opened = region.exported is not None and region.exported.kind is HandleKind.CUDA_IPC
            if opened:
                # Who has opened it by a descriptor keeps it; CUDA allows no freeing under who has
                # opened it by name.
                self._opened[region_id] = region
            else:
                self._retired.append(region)
        region.file.close_fds()
        if not opened:
            self._background.submit(self._drop_retired)

    def released(self, region_id: int) -> None:
        """No process has the closed region any more: its bytes may be used again."""
        with self._guard:
            self._made_bytes -= self._closing.pop(region_id, 0)
            region = self._opened.pop(region_id, None)
            if region is not None:
                self._retired.append(region)
        if region is not None:
            self._background.submit(self._drop_retired)

    def fd(self, region_id: int) -> int:
        """The descriptor of the region's file; see RegionMemory."""
        return self._region(region_id).file.fd

    def exported(self, region_id: int) -> tuple[Exported, int] | None:
        """(handle, bytes to map) of a region's memory for its tenant's clients; None if pools are
        not handed out, or this one has no memory yet.
        """
        region = self._regions.get(region_id)
        if region is None or region.exported is None or region.memory is None or self._lost:
            return None
        return region.exported, region.memory.mapped_bytes

    def set_generation(self, region_id: int, slot: int, generation: int) -> None:
        """Writes the slot's generation where clients compare it."""
        generations = self._region(region_id).generations
        if generations is None:
            raise _unknown(region_id)
        generations[slot] = generation

    def generation(self, region_id: int, slot: int) -> int:
        """The slot's generation; 0 if the region is closed."""
        region = self._regions.get(region_id)
        generations = None if region is None else region.generations
        return 0 if generations is None else int(generations[slot])

    def _region(self, region_id: int) -> _Region:
        region = self._regions.get(region_id)
        if region is None:
            raise _unknown(region_id)
        return region

    # ------------------------------------------------------------------ bytes

    def cross(self, crossings: Sequence[Crossing]) -> list[KVStoreError | OSError | None]:
        """See RemotePool."""
        for crossing in crossings:
            self._check(crossing)  # a defect shows before anything is under way
        with self._guard:
            self._under_way += 1
        try:
            return self._cross(crossings)
        except Exception:
            self._end_all()  # the caller gives this memory to others, whatever is under way
            raise
        finally:
            with self._guard:
                self._under_way -= 1
                self._batch_ended.notify_all()

    def _cross(self, crossings: Sequence[Crossing]) -> list[KVStoreError | OSError | None]:
        outcomes: list[KVStoreError | OSError | None] = []
        queued: list[tuple[int, Crossing, Event]] = []
        for index, crossing in enumerate(crossings):
            outcome: KVStoreError | OSError | None = None
            try:
                queued.append((index, crossing, self._queue(crossing)))
            except (KVStoreError, OSError) as error:
                outcome = self._failed(error)
            outcomes.append(outcome)
        for index, crossing, event in queued:
            try:
                self._driver.wait(event)
            except OSError as error:
                outcomes[index] = self._failed(self._settled(crossing, error))
            else:
                self._count(crossing)
        return outcomes

    def read(self, place: Place, length: int) -> Bytes:
        """See RemotePool."""
        into = whole_pages(length)
        (outcome,) = self.cross([Crossing(place, None, into, inward=False)])
        if outcome is not None:
            raise outcome
        return into

    def _check(self, crossing: Crossing) -> None:
        region = self._regions.get(crossing.device.region)
        if region is None:
            return  # closed, which is an answer
        place, info, length = crossing.device, region.info, len(crossing.memory)
        if not (0 <= place.slot < info.slots and 0 <= place.offset <= info.slot_bytes - length):
            raise ValueError(f"{length} bytes at {place} are not in the region")

    def _queue(self, crossing: Crossing) -> Event:
        if self._lost or self._streams is None:
            raise DeviceLostError(self._lost or "the device is not open")
        region = self._region(crossing.device.region)
        memory = self._memory_of(region)
        if crossing.host is not None:
            self._register(crossing.host.region)
        offset = crossing.device.slot * region.info.slot_bytes + crossing.device.offset
        stream = self._streams[0 if crossing.inward else 1]
        if crossing.inward:
            self._driver.copy_in(stream, crossing.memory, memory, offset)
        else:
            self._driver.copy_out(stream, memory, offset, crossing.memory)
        try:
            return self._driver.record(stream)
        except OSError as error:
            raise self._settled(crossing, error) from error

    def _settled(self, crossing: Crossing, error: OSError) -> OSError:
        """A copy was queued that no event tells of: nobody may use its memory while it may run, so
        this waits. What went wrong in the end; a device that is lost copies nothing any more.
        """
        if isinstance(error, DeviceLostError) or self._streams is None:
            return error
        try:
            self._driver.drain(self._streams[0 if crossing.inward else 1])
        except OSError as worse:
            return DeviceLostError(f"copies of the device cannot be ended: {worse}")
        return error

    def _end_all(self) -> None:
        """After a defect: waits until no copy is under way. The tier is lost if that fails."""
        for stream in self._streams or ():
            try:
                self._driver.drain(stream)
            except Exception as error:
                log.exception("device tier: copies cannot be ended after a defect")
                self._failed(DeviceLostError(f"copies of the device cannot be ended: {error}"))

    def _count(self, crossing: Crossing) -> None:
        way = "in" if crossing.inward else "out"
        with self._guard:
            self._counts[way] += 1
            self._counts[f"{way}_bytes"] += len(crossing.memory)

    def _failed(self, error: KVStoreError | OSError) -> KVStoreError | OSError:
        """Notes a failure; the first one that says so ends the tier."""
        first = False
        with self._guard:
            self._counts["failed"] += 1
            if isinstance(error, DeviceLostError) and not self._lost:
                self._lost = str(error) or "lost"
                first = not self._closed
        if first:
            log.error("device tier: the device is lost, the tier is dropped: %s", error)
        if isinstance(error, DeviceFullError):
            return NoSpace(Reason.NO_SPACE, str(error), "device.capacity_bytes")
        return error

    # ------------------------------------------------------------------ device memory

    def _memory_of(self, region: _Region) -> DeviceMemory:
        """The region's memory, made if this is its first copy."""
        with region.guard:
            if region.memory is not None:
                return region.memory
            self._drop_retired()  # it may be what makes room
            granule = self._driver.granule_bytes()
            want_bytes = -(-region.data_bytes // granule) * granule
            with self._guard:
                if not region.open or self._closed:
                    raise _unknown(region.info.id)
                if self._made_bytes + want_bytes > self._capacity_bytes:
                    raise DeviceFullError(f"{self._made_bytes} bytes are made already")
                self._made_bytes += want_bytes
            try:
                memory = self._driver.make(region.data_bytes, shared=self._export)
            except OSError:
                with self._guard:
                    self._made_bytes -= want_bytes
                raise
            if self._export:
                region.exported = self._try_export(memory)
            region.memory = memory
            return memory

    def _try_export(self, memory: DeviceMemory) -> Exported | None:
        try:
            return self._driver.export(memory)
        except DeviceLostError:
            raise
        except OSError as error:
            log.warning("device tier: a pool cannot be handed out: %s", error)
            return None

    def _drop_retired(self) -> None:
        """Gives the memory of closed regions back. Off the loop's thread."""
        while self._retired:
            try:
                region = self._retired.popleft()
            except IndexError:
                return
            with region.guard:
                memory, region.memory, region.exported = region.memory, None, None
            region.file.close()
            if memory is not None:
                try:
                    self._driver.drop(memory)
                except OSError as error:
                    self._failed(error)

    # ------------------------------------------------------------------ host memory

    def _register(self, region_id: int) -> None:
        """Registers a host region, once. Copies work without, too."""
        if region_id in self._registered:
            return
        with self._pinning:
            if region_id in self._registered:
                return
            whole = self._host_map(region_id)
            if whole is None or self._closed:
                return
            try:
                self._driver.register(whole)
            except DeviceLostError:
                raise
            except OSError as error:
                if not self._unpinned_reason:
                    log.warning("device tier: host memory cannot be pinned: %s", error)
                self._unpinned_reason = str(error) or "refused"
                whole = whole[:0]  # remembered, so that it is not tried again
            self._registered[region_id] = whole

    def release_host(self, region_id: int) -> None:
        """A host region is about to be unmapped. Off the loop's thread."""
        with self._pinning:
            self._unregister([region_id])

    def _unregister(self, region_ids: Sequence[int]) -> None:
        for region_id in region_ids:
            whole = self._registered.pop(region_id, None)
            if whole is not None and len(whole) and not self._lost:
                try:
                    self._driver.unregister(whole)
                except OSError as error:
                    self._failed(error)

    # ------------------------------------------------------------------ numbers

    def stats(self) -> DeviceStats:
        """A snapshot."""
        with self._guard:
            regions, counts = list(self._regions.values()), dict(self._counts)
            return DeviceStats(
                uuid=self._driver.uuid,
                capacity_bytes=self._capacity_bytes,
                made_bytes=self._made_bytes,
                closing_bytes=sum(self._closing.values()),
                registered_bytes=sum(len(one) for one in list(self._registered.values())),
                regions=len(regions),
                exported_regions=sum(region.exported is not None for region in regions),
                copies_in=counts["in"],
                copies_out=counts["out"],
                copied_in_bytes=counts["in_bytes"],
                copied_out_bytes=counts["out_bytes"],
                copies_failed=counts["failed"],
                unpinned_reason=self._unpinned_reason,
                lost=self._lost,
            )


def _unknown(region_id: int) -> KVStoreError:
    return KVStoreError(Reason.REGION_UNKNOWN, f"region {region_id} is closed")
