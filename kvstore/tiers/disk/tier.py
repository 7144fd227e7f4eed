"""The disk tier, an archive that outlives the daemon: its life, its threads, its guards.

Promises (with `volume` and `writer`, which keep the folder): what a look-up finds is read back
exactly as it was committed or not at all; what `save_batch` reported as saved is there after any
crash. No fault of the device is an exception of the daemon's: writing stops and resumes by itself,
reading is bypassed while it fails or hangs, a folder that cannot be opened is tried again, and
meanwhile everything misses.

    opening -> loading -> ready -> closed

A thread of its own opens the folder, loads the index (look-ups see it grow), and then tends:
debts, dropped spaces, capacity, trials of what was stopped. Without `start` a test runs `open`,
`load` and `tend` itself.

Any thread may call anything. `_writing` is held by whoever changes the folder; `find` needs no
lock, `load` only the volume's short one.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from kvstore.clock import Clock
from kvstore.model.reasons import KVStoreError, NoSpace, Reason
from kvstore.tiers.base import ArchiveStats, ArchiveUsage, Bytes, Saved, SavedBlock
from kvstore.tiers.disk import figures
from kvstore.tiers.disk.files import FULL_BYTES, Trouble
from kvstore.tiers.disk.format import record_bytes, tenant_digest
from kvstore.tiers.disk.guard import Ages, Endurance, Path
from kvstore.tiers.disk.opening import Folder
from kvstore.tiers.disk.reading import Reading
from kvstore.tiers.disk.rows import Unusable
from kvstore.tiers.disk.threads import DeviceThreads
from kvstore.tiers.disk.volume import SpaceInfo, Volume, make_volume
from kvstore.tiers.disk.writer import GONE, Outgoing, Writer

log = logging.getLogger(__name__)

WRITE_THREADS = 6
"""With four writes beside each other a device is at its limit; the others hash."""
LOAD_WAIT_S = 1.0
"""So long a save waits for the index, then it is given up: slots of the host wait for it."""
CLOSE_WAIT_S = 2.0
TEND_EVERY_S = 0.5
CAPACITY_SHARE = 0.8
"""Of what the file system has free, where no capacity is set."""
MARGIN_SHARE = 1 / 64
MARGIN_BYTES_MAX = 64 << 20
GENERATION_BITS = 40
"""Writes of one opening; the number of the opening is above them."""


class DiskTier:
    """See the module's docstring. Implements kvstore.tiers.base.Archive."""

    def __init__(
        self,
        folder: Folder,
        *,
        capacity_bytes: int = 0,
        endurance_bytes_per_day: int = 0,
        quota_bytes: Mapping[str, int] = MappingProxyType({}),
        clock: Clock,
        parallel: bool = True,
    ) -> None:
        """`folder` is the tier's from now on. capacity_bytes: of everything in it; 0: a share of
        what is free. endurance_bytes_per_day: writes are stopped beyond; 0: none. quota_bytes: what
        tenants keep, by name; 0: an equal share. parallel: writes
        on threads of their own.
        """
        self.on_dropped: Callable[[int, list[bytes]], None] = lambda space_id, keys: None
        self.phase = "opening"
        self.counts: Counter[str] = Counter()
        self.capacity_bytes = capacity_bytes
        self.set_aside = ""
        self.writes = Path()
        self.reading = Reading(clock, self.counts, parallel=parallel)
        self.endurance = Endurance(endurance_bytes_per_day)
        self.eviction_age_s = 0.0
        self.file_system = (0.0, 0.0)  # free bytes, and how many the tier leaves free
        self.clock = clock
        self.volume: Volume | None = None
        self._folder = folder
        self._wanted_bytes = capacity_bytes
        self._quota_bytes = {tenant_digest(name): quota for name, quota in quota_bytes.items()}
        self._writer: Writer | None = None
        self._ages = Ages()
        self._spaces: dict[int, SpaceInfo] = {}
        # Those of earlier daemons, whose rows are to be loaded first: a space that is made later
        # may have the number of one that the ledger has lost.
        self._restored: set[int] | None = None
        self._forgotten: set[tuple[int, bytes]] = set()  # before the folder could be opened
        self._generations = itertools.count(1)
        self._writing = threading.Lock()
        self._loaded = threading.Event()
        self._stopping = False
        self._tidied = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._executor = DeviceThreads(WRITE_THREADS - 1, "kvstore-disk") if parallel else None

    # ------------------------------------------------------------------ archive

    def describe(
        self, space_id: int, tenant: str, fingerprint_digest: bytes, slot_bytes: int
    ) -> None:
        self._spaces[space_id] = SpaceInfo(tenant_digest(tenant), fingerprint_digest)

    async def find(self, space_id: int, keys: Sequence[bytes]) -> Collection[bytes]:
        volume = self.volume
        if volume is None:
            return ()
        found = self.reading.find(volume, space_id, keys)
        if self._forgotten:
            return [key for key in found if (space_id, key) not in self._forgotten]
        return found

    def load(self, space_id: int, key: bytes, into: Bytes) -> bytes:
        volume, space = self.volume, self._spaces.get(space_id)
        if volume is None or space is None or (space_id, key) in self._forgotten:
            raise KVStoreError(Reason.MISS_EVICTED, "not there")
        return self.reading.load(volume, space_id, key, space, into)

    def wanted(self, space_id: int, keys: Sequence[bytes]) -> None:
        volume = self.volume
        if volume is not None:
            volume.wanted.append((space_id, keys))

    def save_batch(self, blocks: Sequence[SavedBlock]) -> list[Saved]:
        self._loaded.wait(LOAD_WAIT_S)
        with self._writing:
            writer, volume = self._writer, self.volume
            if writer is None or volume is None or not self._loaded.is_set():
                waiting = KVStoreError(Reason.DECLINED_GUARD, f"the disk tier is {self.phase}")
                return [waiting] * len(blocks)
            saved: dict[tuple[int, bytes], Saved] = {}
            groups: dict[tuple[bytes, int], list[Outgoing]] = {}
            self.reading.give_up(volume, [(block.space_id, block.key) for block in blocks])
            known = volume.known(blocks)
            for block in blocks:
                name, space = (block.space_id, block.key), self._spaces.get(block.space_id)
                if name in known:
                    saved[name] = known[name].checksum
                elif space is None:
                    saved[name] = KVStoreError(Reason.SPACE_CLOSED, "its space was closed")
                else:
                    group = (space.tenant_digest, record_bytes(len(block.data)))
                    groups.setdefault(group, []).append(Outgoing(block, space))
            for outgoing in groups.values():
                self._save(writer, outgoing, saved)
            if groups:
                self._take_back(volume, blocks, saved)
            return [saved[block.space_id, block.key] for block in blocks]

    def forget(self, names: Sequence[tuple[int, bytes]]) -> None:
        for space_id, key in names:
            if not key:
                self._spaces.pop(space_id, None)
        if self.volume is None:
            self._forgotten.update(name for name in names if name[1])
            raise OSError(errno.EIO, f"the disk tier is {self.phase}: {self.writes.reason}")
        self._loaded.wait()
        with self._writing:
            if self._writer is None:
                raise OSError(errno.EBADF, "the disk tier is closed")
            self.counts["forgotten"] += len(names)
            try:
                self._writer.forget(names)
            except OSError as error:
                self._note_write_errors(self._writer, error, 1)
                raise

    def usage(self) -> ArchiveUsage:
        return figures.usage(self)

    def stats(self) -> ArchiveStats:
        return figures.stats(self)

    # ------------------------------------------------------------------ saving

    def _save(
        self, writer: Writer, outgoing: list[Outgoing], saved: dict[tuple[int, bytes], Saved]
    ) -> None:
        now_ns, wall_s = self.clock.monotonic_ns(), self.clock.wall_s()
        tried = outgoing[: self.writes.allowed(now_ns)]
        reason = self.endurance.stop_reason(wall_s)
        if reason:
            tried = []
        if tried:
            self._write(writer, tried, wall_s)
        refusal = KVStoreError(Reason.DECLINED_GUARD, reason or f"stopped: {self.writes.reason}")
        for one in outgoing:
            name = (one.block.space_id, one.block.key)
            if one.row is not None:
                saved[name] = one.row.row.checksum
            else:
                saved[name] = one.error or refusal
        self.counts["saves_refused"] += len(outgoing) - len(tried)

    def _take_back(
        self, volume: Volume, blocks: Sequence[SavedBlock], saved: dict[tuple[int, bytes], Saved]
    ) -> None:
        """What was there, or was written, may have made room for what came later in its batch."""
        known = volume.known(blocks)
        for name in saved.keys() - known.keys():
            if isinstance(saved[name], bytes):
                detail = "it made room for others of its batch"
                saved[name] = NoSpace(Reason.NO_SPACE, detail, "disk.capacity_bytes")

    def _write(self, writer: Writer, tried: list[Outgoing], wall_s: float) -> None:
        began_ns = self.clock.monotonic_ns()
        size = record_bytes(len(tried[0].block.data))
        self.endurance.wrote(size * len(tried), wall_s)
        if writer.write(tried, {"writes": self.endurance.pack()}):
            self._wake.set()
        errors = [one.error for one in tried if isinstance(one.error, OSError)]
        done = sum(one.row is not None for one in tried)
        self.counts["saves"] += done
        self.counts["saved_bytes"] += sum(len(one.block.data) for one in tried if one.row)
        self.counts["save_batches"] += 1
        self.counts["save_ns"] += self.clock.monotonic_ns() - began_ns
        if news := self.endurance.news(wall_s):
            log.warning("disk tier: %s", news)
        if errors:
            self._note_write_errors(writer, errors[0], len(errors), still_works=done > 0)
        elif done and self.writes.succeeded():
            log.info("disk tier: writing goes on")
        rows = [one.row.row.generation for one in tried if one.row is not None]
        if rows:
            self._ages.note(max(rows), self.clock.monotonic_ns())

    def _note_write_errors(
        self, writer: Writer, error: OSError, count: int, *, still_works: bool = False
    ) -> None:
        trouble = writer.trouble(error)
        self.counts[f"write_errors kind={_label(trouble)}"] += count
        if still_works:
            return
        if self.writes.failed(f"{trouble.value}: {error.strerror}", self.clock.monotonic_ns()):
            log.warning("disk tier: writing is stopped, and tried again: %s", error)
        self._wake.set()

    def _dropped(self, names: Sequence[tuple[int, bytes]], generation: int) -> None:
        self.counts["evictions"] += len(names)
        self.eviction_age_s = self._ages.age_s(generation, self.clock.monotonic_ns())
        self._tell(names)

    def _tell(self, names: Sequence[tuple[int, bytes]]) -> None:
        by_space: dict[int, list[bytes]] = {}
        for space_id, key in names:
            by_space.setdefault(space_id, []).append(key)
        for space_id, keys in by_space.items():
            self.on_dropped(space_id, keys)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Opens, loads and tends on a thread. The spaces of earlier runs were described before."""
        self._restored = set(self._spaces)
        self._thread = threading.Thread(target=self._run, name="kvstore-disk-tend", daemon=True)
        self._thread.start()

    def open(self) -> bool:
        """Opens the folder; False: not now. A content that cannot be used is set aside."""
        with self._writing:
            try:
                self._open()
            except OSError as error:
                if self.writes.failed(f"cannot open: {error.strerror}", self.clock.monotonic_ns()):
                    log.error("disk tier: the folder cannot be opened, tried again: %s", error)
                return False
            self.phase = "loading"
            self.writes.succeeded()
            return True

    def load_index(self) -> bool:
        """Makes the rows known; False: it ended before that."""
        volume = self.volume
        assert volume is not None, "opened before"
        gone = set(self._gone_spaces(volume))
        spaces = self._spaces if self._restored is None else self._restored
        known = [space_id for space_id in list(spaces) if space_id not in gone]
        try:
            volume.load(known, lambda: not self._stopping)
        except Unusable as unusable:
            self._abandon(str(unusable), set_aside=True)
            return False
        except OSError as error:
            self._abandon(f"the index cannot be read: {error.strerror}")
            return False
        if self._stopping:
            return False
        with self._writing:
            for space_id in gone:
                volume.debts.meta[f"{GONE}{space_id}"] = None
            for name in self._forgotten:
                volume.discard(*name)
            self._forgotten.clear()
            self._settle_first()
        self._restored = None
        self.phase = "ready"
        self._loaded.set()
        return True

    def tend(self) -> None:
        """One round of what is to be done now and then. Waits for the device."""
        volume = self.volume
        if self.phase != "ready" or volume is None:
            return
        self.reading.tend(volume)
        try:
            there = self._folder.is_there()
        except OSError:
            there = True  # the device does not answer: no reason to leave it
        if not there:
            self._abandon("the folder, its index or its segments were removed")
            return
        with self._writing:
            writer, volume, now_ns = self._writer, self.volume, self.clock.monotonic_ns()
            trial = self.writes.stopped
            if writer is None or volume is None or (trial and not self.writes.due(now_ns)):
                return
            try:
                self._follow_file_system(volume)
                if trial:
                    with volume.books:
                        volume.debts.meta["trial"] = str(now_ns).encode()
                    writer.reclaim(unlink_first=True)
                writer.settle()
                writer.reclaim()
                if not trial:
                    writer.stock()
                if not self._tidied:
                    writer.remove_orphans()
                    self._tidy(writer)
            except OSError as error:
                self._note_write_errors(writer, error, 1)
                return
            if trial:
                self.writes.seems_well()
                with volume.books:
                    volume.ring.aside_stays = False  # a device that failed may have been the reason
        while not self._stopping and self._sweep():
            pass

    def close(self) -> None:
        """Ends the thread and gives the folder up. Idempotent. What hangs in the device is left."""
        self._stopping = True
        self._wake.set()
        self._loaded.set()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)
        if self._writing.acquire(timeout=CLOSE_WAIT_S):
            try:
                self._close()
            finally:
                self.phase = "closed"
                self._writing.release()
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._folder.close()

    # ------------------------------------------------------------------ parts

    def _run(self) -> None:
        while not self._stopping:
            if self.phase == "opening" and self.open():
                self.load_index()
            self.tend()
            self._wake.wait(TEND_EVERY_S)
            self._wake.clear()

    def _open(self) -> None:
        opened = self._folder.open()
        self._note_set_aside(opened.set_aside)
        index, files = opened.index, opened.files
        try:
            volume = make_volume(
                index,
                files,
                capacity_bytes=self._wanted_bytes,
                share=CAPACITY_SHARE,
                aside_bytes=self._folder.aside_bytes(),
                quota_bytes=self._quota_bytes,
            )
            meta = index.meta()
        except (Unusable, OSError) as error:
            index.close()
            files.close()
            if isinstance(error, OSError):
                raise
            self._folder.set_aside(str(error))
            self._note_set_aside(str(error))
            raise OSError(errno.EIO, f"the index was set aside: {error}") from error
        self.capacity_bytes = volume.ring.capacity_bytes
        opens = int(meta.get("opens", b"0")) + 1
        volume.debts.meta["opens"] = str(opens).encode()
        self._generations = itertools.count((opens << GENERATION_BITS) + 1)
        self.endurance = Endurance(self.endurance.budget_bytes_per_day, meta.get("writes", b""))
        self.counts["lost_segments"] += volume.lost_segments
        if volume.lost_segments:
            log.error("disk tier: %d segments are gone, with their blocks", volume.lost_segments)
        self._tidied = False
        self._writer = Writer(
            volume,
            self._folder,
            generation=self._generations.__next__,
            on_dropped=self._dropped,
            executor=self._executor,
            executor_threads=WRITE_THREADS - 1,
        )
        self.reading.begin_anew()
        self.volume = volume

    def _gone_spaces(self, volume: Volume) -> list[int]:
        names = [name.removeprefix(GONE) for name in volume.index.meta() if name.startswith(GONE)]
        return [int(name) for name in names if name.isdigit()]

    def _settle_first(self) -> None:
        """Before anything is placed the rows that no slot stands for are removed, and this opening
        has its number.
        """
        assert self._writer is not None
        try:
            self._writer.settle()
        except OSError as error:
            self._note_write_errors(self._writer, error, 1)

    def _note_set_aside(self, reason: str) -> None:
        if reason:
            self.set_aside = reason
            self.counts["set_aside"] += 1

    def _abandon(self, reason: str, *, set_aside: bool = False) -> None:
        """What was open cannot be used: begins anew, with what is there then."""
        log.error("disk tier: %s", reason)
        with self._writing:
            volume = self.volume
            self._close()
            self._loaded.clear()
            self.phase = "opening"
            try:
                if set_aside:
                    self._folder.set_aside(reason)
                    self._note_set_aside(reason)
            except OSError as error:
                reason = f"cannot set aside: {error.strerror}"
            self.writes.failed(reason, self.clock.monotonic_ns())
            if volume is not None:
                for names in volume.give_up(list(self._spaces)):
                    self._tell(names)

    def _tidy(self, writer: Writer) -> None:
        """What cannot be removed takes room, and stops nobody."""
        self._tidied = True
        try:
            self._folder.tidy()
        except OSError as error:
            log.warning("disk tier: an older set-aside cannot be removed: %s", error)
        writer.count_aside()

    def _close(self) -> None:
        volume, self.volume, self._writer = self.volume, None, None
        if volume is not None:
            volume.index.close()
            volume.files.close()

    def _follow_file_system(self, volume: Volume) -> None:
        """The capacity is what is set, but no more than the file system has room for."""
        system = volume.files.statvfs()
        margin = max(min(system.total_bytes * MARGIN_SHARE, MARGIN_BYTES_MAX), 2 * FULL_BYTES)
        self.file_system = (system.free_bytes, margin)
        with volume.books:
            usage = volume.ring.usage()
            used = usage.segment_bytes + usage.index_bytes + usage.aside_bytes
            room = int(used + system.free_bytes - margin)
            volume.ring.capacity_bytes = max(0, min(self.capacity_bytes, room))

    def _sweep(self) -> bool:
        with self._writing:
            if self._writer is None:
                return False
            try:
                return self._writer.sweep()
            except OSError as error:
                self._note_write_errors(self._writer, error, 1)
                return False


def _label(trouble: Trouble) -> str:
    return trouble.name.lower()
