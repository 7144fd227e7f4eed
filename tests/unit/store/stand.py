"""A Store on a stand: the real core and host tier, copies and rows by step, time by hand."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.core.core import Core
from kvstore.core.effects import Copy, Forget
from kvstore.gather import copy_one
from kvstore.ledger import Change, Ledger, VolatileLedger
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason
from kvstore.model.values import (
    CommitResult,
    CoreLimits,
    LeaseMode,
    Place,
    Region,
    Reserved,
    TenantSpec,
    TierKind,
    TierSpec,
)
from kvstore.policy.links import Link
from kvstore.store import Leased, Session, Store
from kvstore.testing.clock import ManualClock
from kvstore.testing.payload import payload, tag_of
from kvstore.testing.workload import fingerprint
from kvstore.tiers.base import Archive
from kvstore.tiers.host import HostTier
from tests.unit.store.virtual import StepPool, VirtualLoop

MS = 10**6
SECOND = 10**9
BLOCK = 4_096
"""Bytes of a block of `workload.fingerprint`."""
STAGING_BLOCKS = 16
TTL_NS = 30 * SECOND

Result = TypeVar("Result")


def keys(count: int, name: str = "prompt") -> list[bytes]:
    """Keys of a prompt."""
    return [hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(count)]


class FlakyHost(HostTier):
    """A host tier that cannot make regions while `broken`."""

    broken = False

    def assign(self, region: Region) -> None:
        if self.broken:
            raise OSError(24, "Too many open files")
        super().assign(region)

    def assign_staging(self, region_id: int, total_bytes: int) -> None:
        if self.broken:
            raise OSError(24, "Too many open files")
        super().assign_staging(region_id, total_bytes)


class FlakyLedger(VolatileLedger):
    """Rows that count as durable, unless `broken`. `durable` may be switched off."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.calls = 0

    def put_many(self, rows: Iterable[Change]) -> None:
        self.calls += 1
        if self.broken:
            raise OSError(28, "No space left on device")
        super().put_many(rows)


class StepMover:
    """Copies by `step`, or in the loop's next turn. `fails`: keys whose copy fails."""

    def __init__(self, stand: Stand) -> None:
        self.held = False
        self.fails: set[bytes] = set()
        self.out: list[Copy] = []
        self._stand = stand

    def submit(self, moves: Sequence[Copy | Forget]) -> None:
        self.out += [move for move in moves if isinstance(move, Copy)]
        if not self.held:
            # As the real one: never while the store is at work.
            self._stand.loop.call_soon(self.step)

    def relieve(self) -> None:
        """No copy of it ever stalls."""

    def step(self, count: int | None = None) -> None:
        """Ends the oldest copies that are out."""
        count = len(self.out) if count is None else count
        copies, self.out = self.out[:count], self.out[count:]
        if not copies:
            return
        done: list[tuple[int, bool, Reason, bytes | None, int]] = []
        for copy in copies:
            if copy.key in self.fails:
                done.append((copy.copy_id, False, Reason.COPY_FAILED, None, 1_000))
                continue
            host, target = self._stand.host, copy.target
            host.set_generation(target.region, target.slot, target.generation)
            source = host.view(copy.source, copy.length)
            copy_one(source, host.view(target, copy.length))
            done.append((copy.copy_id, True, Reason.OK, b"", 1_000))
        self._stand.store.copies_done(done)


class Stand:
    """See the module's docstring. As a context manager: every invariant of the core is checked at
    the end, and memory closed.
    """

    def __init__(
        self,
        *,
        slots: int = 256,
        tenants: Sequence[str] = ("a",),
        ledger: Ledger | None = None,
        limits: CoreLimits | None = None,
        archives: Mapping[int, Archive] | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.loop = VirtualLoop(self.clock)
        self.pool = StepPool()
        self.loop.set_default_executor(self.pool)
        self.limits = limits or CoreLimits(staging_bytes=STAGING_BLOCKS * BLOCK)
        capacity = slots * BLOCK
        tiers = [TierSpec("host", TierKind.POOL, capacity, ingest=True)]
        if archives:
            tiers.append(TierSpec("disk", TierKind.ARCHIVE, 2**30))
        region_bytes = self.limits.region_bytes(capacity)
        self.host = FlakyHost(capacity, region_bytes=region_bytes, mlock="off")
        self.core = Core(tiers, [TenantSpec(name) for name in tenants], self.limits)
        self.mover = StepMover(self)
        self.store = Store(
            self.core,
            host=self.host,
            host_tier=0,
            mover=self.mover,
            ledger=ledger or VolatileLedger(),
            clock=self.clock,
            archives=archives,
            links=[Link("host", bytes_per_second=4e9) for _ in tiers],
        )

    def __enter__(self) -> Stand:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.settle()
        self.loop.close()
        self.host.close()
        if error is None:
            self.core.check()

    # ------------------------------------------------------------------ time

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs work to its end, however long that takes on the virtual clock."""
        return self.loop.run_until_complete(work)

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Starts work, and lets it go as far as it comes at this moment."""
        task = self.loop.create_task(work)
        self.settle()
        return task

    def settle(self) -> None:
        """Everything that can be done at this moment is done."""
        for _ in range(20):
            self.loop.run_until_complete(_turn())

    def pass_time(self, elapsed_ns: int) -> None:
        """Time goes on; what is due expires."""
        self.clock.advance_ns(elapsed_ns)
        self.run(self._tick())
        self.settle()

    async def _tick(self) -> None:
        self.store.tick()

    def decide(self, command: Callable[[], Result]) -> Result:
        """An operator's command to the core, and what it leaves to do."""

        async def decided() -> Result:
            result = command()
            self.store.run_effects()
            return result

        result = self.run(decided())
        self.settle()
        return result

    # ------------------------------------------------------------------ verbs

    def attach(self, group: bytes = b"engine", tenant: str = "a") -> Session:
        return self.store.attach(tenant, group, "engine-1", "test")

    def open(self, session: Session, offer: Fingerprint | None = None) -> int:
        opening = self.store.open(session, offer or fingerprint())
        assert opening.space_id, opening
        return opening.space_id

    def reserve(
        self,
        session: Session,
        space: int,
        chain: Sequence[bytes],
        *,
        attempt: int = 0,
        ttl_ns: int = TTL_NS,
    ) -> Reserved:
        return self.store.reserve(
            session, space, chain, first=0, part=0, attempt=attempt, ttl_ns=ttl_ns
        )

    def fill(self, reserved: Reserved, chain: Sequence[bytes]) -> None:
        """Writes what a client writes into its staging."""
        for index, offset in zip(reserved.wanted, reserved.offsets, strict=True):
            window = self.store.staging_view(reserved.staging_region, offset, BLOCK)
            window[:] = block(chain[index])

    async def commit(
        self, session: Session, lease_id: int, *, wait_ns: int = 10 * SECOND, durable: bool = False
    ) -> CommitResult:
        return await self.store.commit(session, lease_id, durable=durable, wait_ns=wait_ns)

    def put(self, session: Session, space: int, chain: Sequence[bytes]) -> CommitResult:
        reserved = self.reserve(session, space, chain)
        assert reserved.lease_id, reserved
        self.fill(reserved, chain)
        return self.run(self.commit(session, reserved.lease_id))

    async def acquire(
        self,
        session: Session,
        space: int,
        chain: Sequence[bytes],
        *,
        view: bool = False,
        ttl_ns: int = TTL_NS,
        wait_ns: int = 0,
        load_ns: int = 0,
        all_or_nothing: bool = False,
    ) -> Leased:
        return await self.store.acquire(
            session,
            space,
            chain,
            mode=LeaseMode.VIEW if view else LeaseMode.COPY,
            ttl_ns=None if view else ttl_ns,
            wait_ns=wait_ns,
            load_ns=load_ns,
            all_or_nothing=all_or_nothing,
        )

    # ------------------------------------------------------------------ looking

    def codes(self, session: Session, space: int, chain: Sequence[bytes]) -> bytes:
        return self.run(self.store.lookup(session, space, chain))

    def assert_right(self, leased: Leased, chain: Sequence[bytes]) -> None:
        """Every place of a lease has the bytes of its key, and its generation."""
        for key, place in zip(chain, leased.places, strict=True):
            assert place is not None
            assert self.store.generation(place) == place.generation
            assert (self.bytes_at(place) == block(key)).all()

    def bytes_at(self, place: Place) -> NDArray[np.uint8]:
        view: NDArray[np.uint8] = self.store.block_view(place, BLOCK)
        return np.array(view)

    def unfinished(self) -> bool:
        return self.store.unfinished

    def busy(self) -> bool:
        return self.store.busy

    @property
    def held(self) -> tuple[int, int, int]:
        """(copy leases, view leases, write leases)."""
        stats = self.core.stats()
        return stats.read_leases, stats.view_leases, stats.write_leases


def block(key: bytes) -> NDArray[np.uint8]:
    """The bytes of a block."""
    return payload(tag_of("a", b"", key, 0), BLOCK)


async def _turn() -> None:
    await asyncio.sleep(0)
