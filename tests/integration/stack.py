"""The real servicers on real gRPC servers over unix sockets, in this process: the loop runs in a
thread, tests call from theirs. The core, the host tier, the mover and the fd socket are real;
copies can be held back, and everything inside can be looked at through `Stack.ask`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvstore.clock import SystemClock
from kvstore.config import Limits, Settings
from kvstore.core.core import Core
from kvstore.core.effects import Copy, Forget
from kvstore.ledger import Ledger, VolatileLedger
from kvstore.model.record import Record, Ring
from kvstore.model.sampling import ALL_SERVED, Sampling
from kvstore.model.values import STAGING, CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.mover import Completion, Mover
from kvstore.policy.links import Link
from kvstore.store import Store
from kvstore.testing.gpu import RecordingDriver
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier
from kvstore_server import locks, servicer
from kvstore_server.admin import AdminServicer
from kvstore_server.admin import register as register_admin
from kvstore_server.boundary import Boundary
from kvstore_server.fdsocket import FdSocket
from kvstore_server.listeners import Gate, Listener
from kvstore_server.metrics import Metrics

TICK_S = 0.01
START_S = 10.0
HOST_BYTES_PER_SECOND = 4e9
Result = TypeVar("Result")


class HeldMover:
    """The mover, behind a gate."""

    def __init__(self, mover: Mover) -> None:
        self.held = False
        self._mover = mover
        self._waiting: list[Copy | Forget] = []

    def submit(self, moves: Sequence[Copy | Forget]) -> None:
        self._waiting += moves
        if not self.held:
            self.let_go()

    def relieve(self) -> None:
        self._mover.relieve()

    def let_go(self) -> None:
        self.held = False
        moves, self._waiting = self._waiting, []
        if moves:
            self._mover.submit(moves)


class Stack:
    """See the module's docstring. `limits` overrides what follows from the capacity."""

    def __init__(
        self,
        folder: Path,
        *,
        tenants: Sequence[str] = ("default",),
        capacity_bytes: int = 32 << 20,
        ledger: Ledger | None = None,
        ring_records: int = 1_000,
        core_type: type[Core] = Core,
        sampling: Sampling = ALL_SERVED,
        device: RecordingDriver | None = None,
        **limits: int,
    ) -> None:
        """`device`: a GPU below the host's tier, of half its size."""
        self.limits: Limits = Settings().limits_for(capacity_bytes)._replace(**limits)
        self.tenants = tenants
        self.ring = Ring(ring_records)
        self.metrics = Metrics()
        self.drains: list[float] = []
        self._sampling = sampling
        self._device = device
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._ledger = ledger or VolatileLedger()
        self._core_type = core_type
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def socket(self, tenant: str = "default") -> str:
        return str(self._folder / f"{tenant}.sock")

    @property
    def admin_socket(self) -> str:
        return str(self._folder / "admin.sock")

    # ------------------------------------------------------------------ from the test's thread

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(START_S), "the stack did not start"

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(START_S)
        assert not self._thread.is_alive(), "the stack did not stop"

    def ask(self, question: Callable[[], Result]) -> Result:
        """Runs `question` in the loop's thread."""

        async def answer() -> Result:
            return question()

        return asyncio.run_coroutine_threadsafe(answer(), self.loop).result(START_S)

    def hold(self) -> None:
        """No copy ends until `let_go`."""
        self.mover.held = True

    def let_go(self) -> None:
        self.ask(self.mover.let_go)

    def held(self) -> tuple[int, int, int]:
        """(copy leases, view leases, write leases)."""
        stats = self.ask(self.store.core.stats)
        return stats.read_leases, stats.view_leases, stats.write_leases

    def records(self, verb: str = "") -> list[Record]:
        """The trace, oldest first."""
        found = self.ask(lambda: list(self.ring))
        return [record for record in found if verb in ("", record.verb)]

    def counters(self) -> dict[str, float]:
        return self.ask(self.metrics.flat)

    def active(self, tenant: str = "default") -> int:
        """Calls of a tenant, or of the operator ("admin"), that are under way."""
        return self.ask(lambda: self.boundaries[tenant]._active)

    @contextlib.contextmanager
    def turns(self, tenant: str = "default") -> Iterator[list[int]]:
        """Fills a list with one entry for each turn that another task of the loop has while a call
        of this tenant is under way.
        """
        taken: list[int] = []

        async def take() -> None:
            while True:
                if self.boundaries[tenant]._active:
                    taken.append(1)
                await asyncio.sleep(0)

        task = self.ask(lambda: self.loop.create_task(take()))
        try:
            yield taken
        finally:
            self.ask(task.cancel)

    # ------------------------------------------------------------------ in the loop's thread

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        with contextlib.ExitStack() as undo:
            self._build(undo)
            listeners = self._listen(undo)
            for listener in listeners:
                await listener.start()
            self._ready.set()
            while not self._over.is_set():
                self.store.tick()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), TICK_S)
            for listener in listeners:
                await listener.stop(0)
            self.store.core.check()

    def _build(self, undo: contextlib.ExitStack) -> None:
        clock, limits = SystemClock(), self.limits
        core_limits = CoreLimits(
            keys_per_call_max=limits.keys_per_call_max,
            leases_per_session_max=limits.leases_per_session_max,
            view_bytes_per_session_max=limits.view_bytes_per_session_max,
            sessions_max=limits.sessions_max,
            part_bytes_max=limits.part_bytes_max,
            staging_bytes=limits.staging_bytes,
        )
        self.host = HostTier(
            self._capacity_bytes,
            region_bytes=core_limits.region_bytes(self._capacity_bytes),
            mlock="off",
        )
        undo.callback(self.host.close)
        executor = ThreadPoolExecutor(2)
        undo.callback(executor.shutdown)
        tiers = [TierSpec("host", TierKind.POOL, self._capacity_bytes, ingest=True)]
        links = [Link("host", bytes_per_second=HOST_BYTES_PER_SECOND, latency_ns=500_000)]
        devices: dict[int, DeviceTier] = {}
        if self._device is not None:
            tiers.append(TierSpec("device", TierKind.POOL, self._capacity_bytes // 2))
            links.append(Link("device", bytes_per_second=10e9, then=links[0]))
            devices[1] = self._make_device(self._device, undo)
        mover = Mover(
            {0: self.host, STAGING: self.host},
            clock=clock,
            post=self.loop.call_soon_threadsafe,
            on_done=self._done,
            executor=executor,
            remotes=devices,
            remote_executor=executor,
        )
        undo.callback(mover.close)
        self.mover = HeldMover(mover)
        self.store = Store(
            self._core_type(
                tiers,
                [TenantSpec(name) for name in self.tenants],
                core_limits,
            ),
            host=self.host,
            host_tier=0,
            mover=self.mover,
            ledger=self._ledger,
            clock=clock,
            links=links,
            devices=devices,
        )
        self.store.restore()

    def _make_device(self, driver: RecordingDriver, undo: contextlib.ExitStack) -> DeviceTier:
        threads = ThreadPoolExecutor(1)
        undo.callback(threads.shutdown)
        device = DeviceTier(
            driver, self._capacity_bytes // 2, background=threads, host_map=self.host.mapped
        )
        threads.submit(device.open).result()
        undo.callback(lambda: threads.submit(device.close).result())
        self.host.unmapping = device.release_host
        driver.loop_thread = threading.get_ident()
        return device

    def _done(self, done: Sequence[Completion]) -> None:
        self.store.copies_done(done)

    def _listen(self, undo: contextlib.ExitStack) -> list[Listener]:
        fd_socket = FdSocket(self.store, sessions_max=self.limits.sessions_max)
        undo.callback(fd_socket.close)
        listeners = []
        self.boundaries: dict[str, Boundary] = {}
        for tenant in self.tenants:
            boundary = Boundary(self.store, self.metrics, self.ring, self.limits, self._sampling)
            self.boundaries[tenant] = boundary
            data = servicer.StoreServicer(
                self.store, boundary, self.limits, tenant=tenant, fd_socket=True
            )
            path = self.socket(tenant)
            fd_socket.listen(tenant, locks.bind(f"{path}.fd", "test"))
            register = partial(servicer.register, data)
            listeners.append(self._listener(path, register, data.refuse_malformed))
        self.boundaries["admin"] = Boundary(self.store, self.metrics, None, self.limits)
        admin = AdminServicer(
            self.store,
            self.boundaries["admin"],
            metrics=self.metrics,
            ring=self.ring,
            config_toml="[host]\n",
            on_drain=self.drains.append,
        )
        listeners.append(
            self._listener(
                self.admin_socket, partial(register_admin, admin), admin.refuse_malformed
            )
        )
        return listeners

    def _listener(self, path: str, register: Callable[[Any], None], refuse: Any) -> Listener:
        gate = Gate(path, "test", 0o600, None, locks.SocketLock(path, "test"))
        return Listener(gate, self.limits, ["kvstore.v1.Store"], register, refuse)


@contextlib.contextmanager
def stacks(folder: Path) -> Iterator[Callable[..., Stack]]:
    """A maker of stacks, each in a folder of its own; all are stopped at the end."""
    made: list[Stack] = []

    def make(**settings: Any) -> Stack:
        own = folder / str(len(made))
        own.mkdir()
        stack = Stack(own, **settings)
        stack.start()
        made.append(stack)
        return stack

    try:
        yield make
    finally:
        for stack in made:
            stack.stop()
