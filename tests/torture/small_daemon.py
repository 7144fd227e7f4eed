"""A daemon in one thread: the production parts from store to disk tier, on a folder in memory, a
virtual clock and an event loop that follows it; copies, device and rows go on when they are told.

    daemon = SmallDaemon(MemoryFolder(), CutLedger(), ManualClock(), host_bytes=..., disk_bytes=...)
    daemon.run(daemon.store.acquire(...))
    folder, ledger = daemon.crash(chance)      # what a kill or a power cut leaves
    daemon = SmallDaemon(folder, ledger, ...)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from kvstore.core.core import Core
from kvstore.ledger import Change, VolatileLedger
from kvstore.model.values import STAGING, CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.mover import Completion, Mover
from kvstore.policy.links import Link
from kvstore.store import Store
from kvstore.testing.clock import ManualClock
from kvstore.testing.files import Keep
from kvstore.testing.folder import MemoryFolder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostTier
from kvstore_server.disk import DISK_LIMITS
from tests.unit.store.virtual import StepPool, VirtualLoop

HOST, DISK = 0, 1
TENANTS = ("a", "b")
RECENT_MOMENTS = 40
SAVES_MAX = 2_000
"""Turns of a drain; it ends long before."""

Result = TypeVar("Result")


class CutLedger(VolatileLedger):
    """Durable rows, and what of them is there after a crash at any moment. `broken`: every write
    fails.
    """

    durable = True

    def __init__(self, rows: Iterable[Change] = ()) -> None:
        super().__init__()
        self.broken = False
        self.moment: Callable[[], int] = lambda: 0
        self._log: list[tuple[int, list[Change]]] = []
        self.put_many(rows)

    def put_many(self, rows: Iterable[Change]) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        changes = list(rows)
        super().put_many(changes)
        self._log.append((self.moment(), changes))

    def at(self, moment: int) -> CutLedger:
        """The ledger as of a moment; all of it is written from now on."""
        known = VolatileLedger()
        for at, changes in self._log:
            if at <= moment:
                known.put_many(changes)
        return CutLedger(known.rows())


class SmallDaemon:
    """One life of a daemon. See the module's docstring."""

    def __init__(
        self,
        folder: MemoryFolder,
        ledger: CutLedger,
        clock: ManualClock,
        *,
        host_bytes: int,
        disk_bytes: int,
        limits: CoreLimits | None = None,
    ) -> None:
        self.folder = folder
        self.ledger = ledger
        self.clock = clock
        self.tasks: list[asyncio.Task[None]] = []
        self.dropped: list[tuple[int, int, bytes]] = []
        """(moment, space id, key) of what the disk tier said to have no more."""
        self.to_unmap: list[int] = []
        ledger.moment = folder.stamp
        self._began = folder.stamp()
        self.loop = VirtualLoop(clock)
        self.rows, self.copying, self.device = StepPool(), StepPool(), StepPool()
        self.loop.set_default_executor(self.rows)
        limits = limits or CoreLimits(
            staging_bytes=host_bytes // 8, region_slots_min=2, ghost_keys_max=50, **DISK_LIMITS
        )
        self.host = HostTier(host_bytes, region_bytes=limits.region_bytes(host_bytes), mlock="off")
        self.disk = DiskTier(folder, capacity_bytes=disk_bytes, clock=clock, parallel=False)
        self.mover = Mover(
            {HOST: self.host, STAGING: self.host},
            clock=clock,
            post=self.loop.call_soon,
            on_done=self._copied,
            executor=self.copying,
            archives={DISK: self.disk},
            archive_executor=self.device,
            on_forgotten=self._forgotten,
        )
        tiers = [
            TierSpec("host", TierKind.POOL, host_bytes, ingest=True),
            TierSpec("disk", TierKind.ARCHIVE, disk_bytes),
        ]
        self.core = Core(tiers, [TenantSpec(name) for name in TENANTS], limits)
        self.store = Store(
            self.core,
            host=self.host,
            host_tier=HOST,
            mover=self.mover,
            ledger=ledger,
            clock=clock,
            archives={DISK: self.disk},
            links=[Link("host", bytes_per_second=4e9), Link("disk", bytes_per_second=1e9)],
        )
        self.store.unmap_listeners.append(self.to_unmap.append)
        self.disk.on_dropped = self._dropped
        self.device.held = True
        self.run(self._restore())
        # As `DiskTier.start` does it: rows of these spaces are loaded, and of no others.
        self.load()

    def _copied(self, done: Sequence[Completion]) -> None:
        self.store.copies_done(done)

    def _forgotten(self, count: int, durable: bool) -> None:
        self.store.archives.forgotten(count, durable)

    async def _restore(self) -> None:
        self.store.restore()

    def load(self) -> bool:
        """Opens the disk tier's folder and loads its index, if it is not open; False: not now.
        Until then nothing is asked of the device, since it would be waited for.
        """
        if self.disk.phase == "opening" and self.disk.open():
            self.disk.load_index()
        self.device.held = self.disk.phase != "ready"
        return not self.device.held

    def _dropped(self, space_id: int, keys: list[bytes]) -> None:
        moment = self.folder.stamp()
        self.dropped += [(moment, space_id, key) for key in keys]
        self.loop.call_soon(self.core.archive_dropped, DISK, space_id, keys)

    # ------------------------------------------------------------------ time

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs work to its end, however long that takes on the virtual clock."""
        return self.loop.run_until_complete(work)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work that goes on while other things happen."""
        self.tasks.append(self.loop.create_task(work))
        self.settle()

    def settle(self) -> None:
        """Everything that can be done at this moment is done; what failed raises."""
        self.loop.run_until_complete(_turns(12))
        done = [task for task in self.tasks if task.done()]
        self.tasks = [task for task in self.tasks if not task.done()]
        for task in done:
            task.result()

    def let_go(self) -> None:
        """Whatever was held goes on."""
        for pool in (self.rows, self.copying, self.device):
            pool.held = pool is self.device and self.disk.phase != "ready"
            while not pool.held and pool.waiting:
                pool.step()
        self.settle()

    def pass_time(self, elapsed_ns: int) -> None:
        """Time goes on; what is due is done."""
        self.clock.advance_ns(elapsed_ns)
        self.run(self._tick())
        if self.load():
            self.disk.tend()
            if self.disk.phase != "ready":
                self.device.held = True  # it was given up, and is opened again by and by
        self.settle()

    async def _tick(self) -> None:
        self.store.tick()

    @property
    def saves_failed(self) -> int:
        return self.core.stats().counters.get("saves_failed", 0)

    # ------------------------------------------------------------------ end

    def stop(self) -> tuple[MemoryFolder, CutLedger]:
        """SIGTERM, and what is there afterwards."""
        self.let_go()
        self.run(self._drain())
        self.settle()
        moment = self.folder.stamp()
        self.disk.close()
        return self._end(moment, random.Random(0), Keep.ALL)

    async def _drain(self) -> None:
        self.store.drain()
        for _ in range(SAVES_MAX):
            failed = self.saves_failed
            if self.device.held or not self.store.save_warmest():
                break
            await _turns(4)
            if self.saves_failed > failed:
                break

    def crash(self, chance: random.Random, *, power: bool) -> tuple[MemoryFolder, CutLedger, int]:
        """kill -9 now, or a power cut now or a little while ago; what is left, and of when."""
        moment = self.folder.stamp()
        if not power:
            return (*self._end(moment, chance, Keep.ALL), moment)
        moments = [*(at for at in self.folder.cuts() if at > self._began), moment]
        moment = chance.choice(moments[-RECENT_MOMENTS:])
        return (*self._end(moment, chance, Keep.ANY), moment)

    def _end(
        self, moment: int, chance: random.Random, keep: Keep
    ) -> tuple[MemoryFolder, CutLedger]:
        left = self.folder.cut(moment, chance, keep), self.ledger.at(moment)
        self.close()
        return left

    def close(self) -> None:
        """Nothing of it goes on. Idempotent."""
        if self.loop.is_closed():
            return
        self.mover.close()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()
        self.host.close()


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
