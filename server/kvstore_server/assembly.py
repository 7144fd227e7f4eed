"""Builds the store out of its parts, as the settings say, and takes it apart again.

Order: memory is asked for before anything is made of it, the ledger before the core that it fills.
On the event loop's thread; called by the app, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore.clock import Clock
from kvstore.config import Limits, Settings, show_size
from kvstore.core.core import Core
from kvstore.ledger import Ledger, open_ledger
from kvstore.model.reasons import Reason, StartError
from kvstore.model.values import STAGING, CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.mover import Completion, Mover
from kvstore.policy.links import Link
from kvstore.store import Store
from kvstore.tiers import memory_budget
from kvstore.tiers.host import HostTier
from kvstore_server.logs import event
from kvstore_server.process import why_few_descriptors

log = logging.getLogger(__name__)

HOST = 0  # index of the host tier
COPY_THREADS = 2
# What a client's copy out of host memory is taken for until clients have reported some: one
# thread's memcpy, and the calls around it.
HOST_BYTES_PER_SECOND = 4e9
HOST_LATENCY_NS = 500_000
_MIB = 1 << 20


class Assembly:
    """The parts. `capacity_bytes` is what was granted, `wanted_bytes` what is configured."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Raises StartError; what was made until then is undone."""
        self.wanted_bytes = settings.host.capacity_bytes or _quarter_of_memory()
        self.limits = settings.limits_for(self.wanted_bytes)
        grant = memory_budget.check(self.wanted_bytes, allow_smaller=settings.host.allow_smaller)
        self.capacity_bytes = grant.granted_bytes
        if grant.reason:
            event(log, logging.WARNING, grant.reason, setting="host.capacity_bytes")
            self.limits = settings.limits_for(self.capacity_bytes)
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self.ledger = self._open_ledger(settings.state.path)
            undo.callback(self.ledger.close)
            core_limits = _core_limits(settings, self.limits)
            self.host = HostTier(
                self.capacity_bytes,
                region_bytes=core_limits.region_bytes(self.capacity_bytes),
                mlock=settings.host.mlock,
            )
            self.host.start()
            undo.callback(self.host.close)
            executor = ThreadPoolExecutor(COPY_THREADS, "kvstore-copy")
            undo.callback(executor.shutdown, wait=True, cancel_futures=True)
            loop = asyncio.get_running_loop()
            self.mover = Mover(
                {HOST: self.host, STAGING: self.host},
                clock=clock,
                post=loop.call_soon_threadsafe,
                on_done=self._copies_done,
                executor=executor,
                workers=COPY_THREADS,
            )
            undo.callback(self.mover.close)
            self.store = Store(
                self._core(settings, core_limits),
                host=self.host,
                host_tier=HOST,
                mover=self.mover,
                ledger=self.ledger,
                clock=clock,
                links=[
                    Link(
                        "host",
                        bytes_per_second=HOST_BYTES_PER_SECOND,
                        latency_ns=HOST_LATENCY_NS,
                    )
                ],
            )
            self.store.restore()
            self._undo = undo.pop_all()
        regions = self.capacity_bytes // core_limits.region_bytes(self.capacity_bytes)
        if few := why_few_descriptors(regions, self.limits.sessions_max):
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

    def _core(self, settings: Settings, core_limits: CoreLimits) -> Core:
        tiers = [TierSpec("host", TierKind.POOL, self.capacity_bytes, ingest=True)]
        tenants = [TenantSpec(name, one.quota_bytes) for name, one in settings.tenants.items()]
        return Core(tiers, tenants, core_limits)

    def _open_ledger(self, path: str) -> Ledger:
        ledger = open_ledger(path)
        if not ledger.durable:
            event(
                log,
                logging.WARNING,
                "weight epochs and reviews end with this process",
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


def _core_limits(settings: Settings, limits: Limits) -> CoreLimits:
    return CoreLimits(
        keys_per_call_max=limits.keys_per_call_max,
        leases_per_session_max=limits.leases_per_session_max,
        view_bytes_per_session_max=limits.view_bytes_per_session_max,
        sessions_max=limits.sessions_max,
        part_bytes_max=limits.part_bytes_max,
        staging_bytes=limits.staging_bytes,
        review_ttl_ns=int(settings.review.ttl_hours * 3600e9),
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
