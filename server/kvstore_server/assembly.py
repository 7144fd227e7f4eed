"""Builds the store out of its parts, as the settings say, and takes it apart again.

Order: memory is asked for before anything is made of it, the ledger before the core that it fills.
On the event loop's thread; called by the app, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.clock import Clock
from kvstore.config import Limits, Settings, show_size
from kvstore.core.core import Core
from kvstore.core.pools import Slot
from kvstore.ledger import LateLedger, Ledger, open_ledger
from kvstore.model.reasons import Reason, StartError
from kvstore.model.values import STAGING, CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.mover import Completion, Mover
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.choice import policy_maker
from kvstore.policy.links import Link
from kvstore.store import Store
from kvstore.store.guarded import GuardedArchive
from kvstore.tiers import memory_budget
from kvstore.tiers.base import Archive
from kvstore.tiers.host import HostTier
from kvstore_server import gpu as gpus
from kvstore_server.disk import (
    DISK_LIMITS,
    READERS,
    device_threads,
    disk_link,
    ledger_threads,
    make_disk,
    take_folder,
)
from kvstore_server.fdreads import READS_MAX
from kvstore_server.guarding import guard_limits, tell_of_guard
from kvstore_server.logs import event
from kvstore_server.process import region_share, why_few_descriptors

if TYPE_CHECKING:
    from kvstore.tiers.device import DeviceTier
    from kvstore.tiers.disk.opening import DiskFolder
    from kvstore.tiers.disk.tier import DiskTier

log = logging.getLogger(__name__)

COPY_THREADS = 2
# How much larger than memory a disk tier is taken for that takes what its file system has.
DISK_SHARE = 10
# What a client's copy out of host memory is taken for until clients have reported some: one
# thread's memcpy, and the calls around it.
HOST_BYTES_PER_SECOND = 4e9
HOST_LATENCY_NS = 500_000
_MIB = 1 << 20


class Assembly:
    """The parts. `capacity_bytes` is what was granted, `wanted_bytes` what is configured."""

    def __init__(
        self, settings: Settings, clock: Clock, disk_folder: DiskFolder | None = None
    ) -> None:
        """Raises StartError; what was made until then is undone.

        disk_folder: the disk tier's, if it was taken already.
        """
        self.wanted_bytes = settings.host.capacity_bytes or _quarter_of_memory()
        self.limits = settings.limits_for(self.wanted_bytes)
        grant = memory_budget.check(self.wanted_bytes, allow_smaller=settings.host.allow_smaller)
        self.capacity_bytes = grant.granted_bytes
        if grant.reason:
            event(log, logging.WARNING, grant.reason, setting="host.capacity_bytes")
            self.limits = settings.limits_for(self.capacity_bytes)
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            folder = disk_folder or take_folder(settings)
            self.disk = None if folder is None else make_disk(settings, clock, folder)
            if self.disk is not None:
                undo.callback(self.disk.close)
            self.ledger = self._open_ledger(settings)
            undo.callback(self.ledger.close)
            core_limits = _core_limits(settings, self.limits)
            self.host = HostTier(
                self.capacity_bytes,
                region_bytes=core_limits.region_bytes(self.capacity_bytes),
                mlock=settings.host.mlock,
                huge_pages=settings.host.huge_pages,
            )
            self.host.start()
            undo.callback(self.host.close)
            executor = ThreadPoolExecutor(COPY_THREADS, "kvstore-copy")
            undo.callback(executor.shutdown, wait=True, cancel_futures=True)
            tiers = self._tiers(settings)
            at = {tier.name: index for index, tier in enumerate(tiers)}
            archives: dict[int, Archive] = {}
            if self.disk is not None:
                archives[at["disk"]] = GuardedArchive(self.disk)
            devices: dict[int, DeviceTier] = {}
            gpu, device = gpus.begin(settings, self.host, undo)
            if device is not None:
                devices[at[gpus.NAME]] = device
            disk_threads = device_threads() if archives else None
            if disk_threads is not None:
                # Not waited for: what hangs in a device must not keep the daemon from ending.
                undo.callback(disk_threads.shutdown, wait=False, cancel_futures=True)
            loop = asyncio.get_running_loop()
            if settings.ledger_path:
                loop.set_default_executor(ledger_threads())
            self.mover = Mover(
                {at["host"]: self.host, STAGING: self.host},
                clock=clock,
                post=loop.call_soon_threadsafe,
                on_done=self._copies_done,
                executor=executor,
                workers=COPY_THREADS,
                archives=archives,
                archive_executor=disk_threads,
                archive_readers=READERS,
                on_forgotten=self._forgotten,
                remotes=devices,
                remote_executor=gpu,
            )
            undo.callback(self.mover.close)
            self.store = Store(
                self._core(settings, core_limits, tiers),
                host=self.host,
                host_tier=at["host"],
                mover=self.mover,
                ledger=self.ledger,
                clock=clock,
                archives=archives,
                guard_limits=guard_limits(settings.guards),
                links=_links(settings, tiers),
                devices=devices,
            )
            self.store.guards.listeners.append(tell_of_guard)
            self.store.restore()
            if self.disk is not None:
                self._start_disk(self.disk, loop)
            self._undo = undo.pop_all()
        self._tell(settings, regions_in(tiers, core_limits))

    def _tell(self, settings: Settings, regions: int) -> None:
        reads_max = READS_MAX * max(1, len(settings.tenants))
        if few := why_few_descriptors(regions, self.limits.sessions_max, reads_max):
            event(log, logging.WARNING, few, setting="limits.sessions_max")
        event(
            log,
            logging.INFO,
            "memory",
            capacity=show_size(self.capacity_bytes),
            staging=show_size(self.limits.staging_bytes),
            locked=self.host.stats().lock_reason or "yes",
        )

    def grow(self) -> None:
        """Takes what a smaller start left out, as far as it can be had now. Reads a few files."""
        bound = memory_budget.tightest() if self.capacity_bytes < self.wanted_bytes else None
        if bound is None:
            return
        more_bytes = memory_budget.regrant(
            self.wanted_bytes,
            self.capacity_bytes,
            self.host.stats().prefaulted_bytes,
            bound.available_bytes,
        )
        if more_bytes:
            self.capacity_bytes += more_bytes
            self.store.grow(self.capacity_bytes)
            event(log, logging.INFO, "grown", capacity=show_size(self.capacity_bytes))

    def close(self) -> None:
        """Ends copies, memory and ledger. Idempotent."""
        self._undo.close()

    def _copies_done(self, done: Sequence[Completion]) -> None:
        self.store.copies_done(done)  # which is made after the mover that it needs

    def _forgotten(self, count: int, durable: bool) -> None:
        self.store.archives.forgotten(count, durable)

    def _start_disk(self, disk: DiskTier, loop: asyncio.AbstractEventLoop) -> None:
        """From here on it opens and loads by itself; the spaces of earlier runs are known."""

        tier = [one.name for one in self.store.tiers].index("disk")

        def dropped(space_id: int, keys: list[bytes]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.store.core.archive_dropped, tier, space_id, keys)

        disk.on_dropped = dropped
        disk.start()

    def _tiers(self, settings: Settings) -> list[TierSpec]:
        tiers = [TierSpec("host", TierKind.POOL, self.capacity_bytes, ingest=True)]
        if settings.disk.path:
            # What it may take is its own affair, and known once its file system was asked: a guess.
            disk_bytes = settings.disk.capacity_bytes or DISK_SHARE * self.capacity_bytes
            tiers.append(TierSpec("disk", TierKind.ARCHIVE, disk_bytes))
        return gpus.with_device(settings, tiers)

    def _core(self, settings: Settings, core_limits: CoreLimits, tiers: list[TierSpec]) -> Core:
        tenants = [TenantSpec(name, one.quota_bytes) for name, one in settings.tenants.items()]
        return Core(tiers, tenants, core_limits, eviction(settings, tiers))

    def _open_ledger(self, settings: Settings) -> Ledger:
        try:
            ledger = open_ledger(settings.ledger_path)
        except StartError as error:
            if settings.state.path or error.reason is not Reason.START_DISK:
                raise
            # The disk tier's device does not work now, which is no reason to refuse to serve from
            # memory; nothing is durable until it does, and said not to be. Spaces of earlier
            # daemons are not known then, nor are their blocks.
            event(log, logging.ERROR, error.detail, setting="disk.path")
            ledger = LateLedger(settings.ledger_path, tables=("space",))
        if not ledger.durable:
            event(
                log,
                logging.WARNING,
                "weight epochs and reviews end with this process"
                + (" unless the device works again" if ledger.tended else ""),
                setting="state.path",
            )
        if ledger.set_aside:
            event(
                log,
                logging.ERROR,
                "the ledger could not be used and was set aside",
                why=ledger.set_aside,
                setting="state.path",
            )
        return ledger


def regions_in(tiers: Sequence[TierSpec], core_limits: CoreLimits) -> int:
    """Ordinary regions of all pools: each takes a descriptor."""
    pools = [tier.capacity_bytes for tier in tiers if tier.kind is TierKind.POOL]
    return sum(one // core_limits.region_bytes(one) for one in pools)


def eviction(settings: Settings, tiers: Sequence[TierSpec]) -> Callable[[], EvictionPolicy[Slot]]:
    """Makes the pools' policies, which are told how much all of them hold, and what is below."""
    pools = [tier for tier in tiers if tier.kind is TierKind.POOL]
    archive_bytes = 0
    if settings.disk.path:
        host_bytes = next(tier.capacity_bytes for tier in pools if tier.ingest)
        archive_bytes = settings.disk.capacity_bytes or DISK_SHARE * host_bytes
    pool_bytes = sum(tier.capacity_bytes for tier in pools)
    return policy_maker(settings.policy.eviction, pool_bytes, archive_bytes)


def _links(settings: Settings, tiers: Sequence[TierSpec]) -> list[Link]:
    host_link = Link("host", bytes_per_second=HOST_BYTES_PER_SECOND, latency_ns=HOST_LATENCY_NS)
    links = {
        "host": host_link,
        "disk": disk_link(host_link),
        gpus.NAME: gpus.device_link(settings, host_link),
    }
    return [links[tier.name] for tier in tiers]


def _core_limits(settings: Settings, limits: Limits) -> CoreLimits:
    return CoreLimits(
        keys_per_call_max=limits.keys_per_call_max,
        leases_per_session_max=limits.leases_per_session_max,
        view_bytes_per_session_max=limits.view_bytes_per_session_max,
        sessions_max=limits.sessions_max,
        part_bytes_max=limits.part_bytes_max,
        staging_bytes=limits.staging_bytes,
        review_ttl_ns=int(settings.review.ttl_hours * 3600e9),
        region_share=region_share(CoreLimits.region_share),
        **(DISK_LIMITS if settings.disk.path else {}),
    )


def _quarter_of_memory() -> int:
    total_bytes = memory_budget.total_bytes()
    if total_bytes is None:
        raise StartError(
            Reason.START_MEMORY,
            "the size of memory cannot be read from /proc: say how much to use",
            "host.capacity_bytes",
        )
    return total_bytes // 4 // _MIB * _MIB
