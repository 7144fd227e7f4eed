"""The daemon's life: start, serve, drain, stop. What is built, in which order, and what ends it.

    App(settings, announcer).run() -> exit code
      startup     sockets locked, memory granted, store restored, everything bound, then "ready"
      main_loop   the store's clock, and growth towards the configured capacity
      shutdown    drain, end what is in flight, give everything back

SIGTERM, SIGINT or the admin service's Drain end the main loop; a second signal ends the drain at
once. SIGHUP has certificates and tokens read again. SIGUSR1 writes every thread's stack to stderr.
A defect in the store's clock ends the daemon: a restart forgets, which is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

import kvstore
from kvstore.clock import Clock, SystemClock
from kvstore.config import HTTP_LISTEN, Settings, render_toml
from kvstore.config.evidence import sampling_of
from kvstore.model.accesses import Space
from kvstore.model.reasons import StartError
from kvstore.model.record import Ring
from kvstore.model.sockets import FD_SUFFIX
from kvstore_server import admin as admin_service
from kvstore_server import process, servicer, tcp
from kvstore_server.accesslog import AccessLog
from kvstore_server.assembly import Assembly
from kvstore_server.boundary import Boundary
from kvstore_server.exposition import Snapshot, StoreCollector
from kvstore_server.fdsocket import FdSocket
from kvstore_server.health import HealthApp, HealthServer, OnLoop
from kvstore_server.linefile import NOTHING
from kvstore_server.listeners import Gates, Listener, Serving, stop_all
from kvstore_server.locks import bind, open_up
from kvstore_server.logs import event
from kvstore_server.metrics import Metrics
from kvstore_server.ready import Announcer
from kvstore_server.sinks import Sink, SinkRing
from kvstore_server.tracefile import TraceFile
from kvstore_server.usage import USAGE_EVERY_S, start_record, usage_record

if TYPE_CHECKING:
    from kvstore.tiers.disk.opening import DiskFolder

log = logging.getLogger(__name__)

TICK_S = 0.05
GROW_EVERY_S = 5.0
DRAIN_POLL_S = 0.02
STORE_SERVICE = "kvstore.v1.Store"
ADMIN_SERVICE = "kvstore.v1.Admin"


class App:
    """One daemon. `run` is called once."""

    def __init__(
        self,
        settings: Settings,
        announcer: Announcer,
        clock: Clock | None = None,
        *,
        disk_folder: DiskFolder | None = None,
    ) -> None:
        """disk_folder: the disk tier's, if it was taken already (see `disk.take_folder`)."""
        self._settings = settings
        self._disk_folder = disk_folder
        self._announcer = announcer
        self._clock = clock or SystemClock()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._grace_s = settings.server.drain_grace_s
        self._state = "starting"
        self._metrics = Metrics()
        self._sampling = sampling_of(settings.serve, settings.audit)
        self._listeners: list[Serving] = []
        self._tcp: tcp.Tcp | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._http: HealthServer | None = None
        self._trace_file: TraceFile | None = None
        self._access_log: AccessLog | None = None
        # Ends what was begun, in reverse order, however far the start came.
        self._undo = contextlib.ExitStack()

    async def run(self) -> int:
        """Serves until a signal. The exit code; raises StartError if it cannot start."""
        self._handle_signals()
        try:
            await self._startup()
            await self._main_loop()
            await self._shutdown()
        finally:
            self._undo.close()
        event(log, logging.INFO, "stopped")
        return 0

    # ---------------------------------------------------------------- start

    async def _startup(self) -> None:
        settings = self._settings
        gates = Gates(settings)
        self._undo.callback(gates.unlock)
        gates.clear_stale()
        self._undo.callback(gates.remove)
        tcp_files = tcp.read(settings)
        parts = self._parts = Assembly(settings, self._clock, self._disk_folder)
        self._undo.callback(parts.close)
        unlocked = parts.host.stats().lock_reason
        if unlocked and settings.host.mlock == "auto":
            event(log, logging.WARNING, "memory may be swapped", why=unlocked, setting="host.mlock")
        self._store = parts.store
        self._fd_socket = FdSocket(parts.store, sessions_max=parts.limits.sessions_max)
        self._undo.callback(self._fd_socket.close)
        self._ring = self._make_ring()
        self._listen(gates)
        self._listen_on_tcp(tcp_files)
        http = self._serve_http()
        for listener in self._listeners:
            await listener.start()
        # What was made until now lives as long as the process: the collector need not look at it
        # again.
        gc.collect()
        gc.freeze()
        if self._trace_file is not None:
            self._trace_file.append(start_record(settings, self._store, self._clock))
        self._state = "ready"
        self._announce(gates, http)

    def _make_ring(self) -> Ring:
        trace, record = self._settings.trace, self._settings.record
        sinks: list[Sink] = []
        if trace.file:
            self._trace_file = TraceFile(trace.file, self._clock)
            self._undo.callback(self._trace_file.close)
            sinks.append(self._trace_file)
        if record.path:
            self._access_log = AccessLog(
                record.path, record.capacity_bytes, self._space_facts, self._clock
            )
            self._undo.callback(self._access_log.close)
            sinks.append(self._access_log)
        return SinkRing(trace.ring_records, sinks)

    def _space_facts(self, space_id: int) -> Space | None:
        """What the access log says of a space."""
        space = self._store.core.books.spaces.get(space_id)
        if space is None:
            return None
        return Space(space.fingerprint.digest, space.layout.block_bytes)

    def _listen(self, gates: Gates) -> None:
        limits, store = self._parts.limits, self._store
        for tenant, gate in gates.data.items():
            boundary = Boundary(store, self._metrics, self._ring, limits, self._sampling)
            data = servicer.StoreServicer(store, boundary, limits, tenant=tenant, fd_socket=True)
            fd_path = f"{gate.path}{FD_SUFFIX}"
            fd_listener = bind(fd_path, gate.setting)
            open_up(fd_path, gate.mode, gate.gid, gate.setting)
            self._fd_socket.listen(tenant, fd_listener)
            self._listeners.append(
                Listener(
                    gate,
                    limits,
                    [STORE_SERVICE],
                    partial(servicer.register, data),
                    data.refuse_malformed,
                )
            )
        admin = admin_service.AdminServicer(
            store,
            Boundary(store, self._metrics, None, limits),
            metrics=self._metrics,
            ring=self._ring,
            config_toml=render_toml(self._settings),
            on_drain=self._drain,
        )
        self._listeners.append(
            Listener(
                gates.admin,
                limits,
                [ADMIN_SERVICE],
                partial(admin_service.register, admin),
                admin.refuse_malformed,
            )
        )

    def _listen_on_tcp(self, files: tcp.Files | None) -> None:
        if files is None:
            return
        limits, store = self._parts.limits, self._store
        servicers = {
            tenant: servicer.StoreServicer(
                store,
                Boundary(store, self._metrics, self._ring, limits, self._sampling),
                limits,
                tenant=tenant,
                fd_socket=False,  # memory is handed to processes of this machine alone
            )
            for tenant, one in self._settings.tenants.items()
            if one.token_file
        }
        self._tcp = tcp.Tcp(self._settings, files, limits, self._clock, servicers)
        self._listeners.append(self._tcp)

    def _serve_http(self) -> str:
        address = self._settings.http.address
        if address is None:
            return ""
        on_loop = OnLoop(asyncio.get_running_loop())
        registry = CollectorRegistry()
        registry.register(StoreCollector(lambda: on_loop(self._snapshot)))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        health = HealthApp(registry, on_loop, lambda: self._state)
        try:
            server = HealthServer(address, health)
        except StartError as error:
            if self._settings.http.listen != HTTP_LISTEN:
                raise
            # Nobody asked for this port, and another daemon of this host may have it.
            server = HealthServer((address[0], 0), health)
            event(log, logging.WARNING, error.detail, setting="http.listen", instead=server.address)
        self._undo.callback(server.close)
        self._http = server
        server.start()
        return server.address

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self._metrics.snapshot(),
            self._store.stats(),
            dict(self._fd_socket.counts),
            len(self._fd_socket.connections) + len(self._fd_socket.reads),
            {} if self._http is None else dict(self._http.counts),
            state=self._state,
            wanted_bytes=self._parts.wanted_bytes,
            sessions_max=self._parts.limits.sessions_max,
            fd_sent_bytes=self._fd_socket.reads.sent_bytes,
            tcp_events={} if self._tcp is None else self._tcp.counts,
            trace_dropped=0 if self._trace_file is None else self._trace_file.dropped,
            recorded=NOTHING if self._access_log is None else self._access_log.counts(),
        )

    def _announce(self, gates: Gates, http: str) -> None:
        record: dict[str, Any] = {
            "pid": os.getpid(),
            "version": kvstore.__version__,
            "instance_id": self._store.instance_id.hex(),
            "data_sockets": {tenant: gate.path for tenant, gate in gates.data.items()},
            "admin_socket": gates.admin.path,
            "http": http,
            "tcp": "" if self._tcp is None else self._tcp.address,
            "capacity_bytes": self._parts.capacity_bytes,
            "durable": self._parts.ledger.durable,
        }
        self._announcer.ready(record)
        # Until the very end: a drain, too, may take longer than the watchdog's patience.
        feeding = asyncio.ensure_future(self._announcer.manager.feed_watchdog())
        self._undo.callback(feeding.cancel)
        event(log, logging.INFO, "ready", **record)

    # ---------------------------------------------------------------- serve

    async def _main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        grow_s = loop.time() + GROW_EVERY_S
        usage_s = loop.time()
        while not self._stop.is_set():
            self._store.tick()
            if loop.time() >= grow_s:
                self._parts.grow()
                grow_s = loop.time() + GROW_EVERY_S
            if loop.time() >= usage_s:
                self._note_usage()
                usage_s = loop.time() + USAGE_EVERY_S
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)

    def _note_usage(self) -> None:
        """For the trace file alone: nobody asked."""
        if self._trace_file is not None:
            self._trace_file.append(usage_record(self._store, self._metrics, self._clock))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in process.END_SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            event(log, logging.WARNING, "second signal: ending at once", signal=name)
            self._hurry.set()
        else:
            event(log, logging.INFO, "draining", signal=name, grace_s=self._grace_s)
            self._stop.set()

    def _hung_up(self) -> None:
        # The default would end the process without a drain, because a terminal was closed.
        self._reloading = asyncio.ensure_future(self._reload())

    async def _reload(self) -> None:
        with self._announcer.manager.reloading():
            if self._tcp is None:
                event(log, logging.INFO, "SIGHUP is ignored: settings are read at the start only")
            else:
                await self._tcp.reload()

    def _drain(self, grace_s: float) -> None:
        """Drain by the admin service; 0 takes the configured grace."""
        if grace_s > 0:
            self._grace_s = min(grace_s, self._settings.server.drain_grace_s)
        event(log, logging.INFO, "draining", by="admin", grace_s=self._grace_s)
        self._stop.set()

    # ---------------------------------------------------------------- stop

    async def _shutdown(self) -> None:
        self._state = "draining"
        self._note_usage()
        self._announcer.stopping()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._grace_s
        self._store.drain()
        for listener in self._listeners:
            await listener.announce_end()
        # Reads and running writes may end; only then are calls refused. Meanwhile what only memory
        # has goes to slower tiers, the warmest first.
        saving, failed = True, self._saves_failed
        while loop.time() < end_s and not self._hurry.is_set():
            saving = saving and self._saves_failed == failed and self._store.save_warmest() > 0
            if not (saving or self._unfinished):
                break
            self._store.tick()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), DRAIN_POLL_S)
        self._fd_socket.stop_listening()
        await stop_all(self._listeners, max(0.0, end_s - loop.time()), self._hurry)

    @property
    def _saves_failed(self) -> int:
        return self._store.core.stats().counters.get("saves_failed", 0)

    @property
    def _unfinished(self) -> bool:
        core = self._store.stats().core
        return bool(core.read_leases or core.write_leases) or self._store.busy


def serve(
    settings: Settings, announcer: Announcer, make: Callable[[Settings, Announcer], App] = App
) -> int:
    """Runs a daemon in this process; the exit code. Raises StartError."""
    sys.setswitchinterval(
        0.0002
    )  # a copying thread then delays the loop by less than a millisecond

    async def run() -> int:
        try:
            return await make(settings, announcer).run()
        finally:
            # All is tidied up: one more signal does not make a failure of it.
            for number in process.END_SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    return asyncio.run(run())


__all__ = ["App", "StartError", "serve"]
