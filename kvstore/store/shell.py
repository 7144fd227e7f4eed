"""The store: reads the clock, runs the core's effects, waits for what they bring.

One event-loop thread owns a Store; none of its methods may be called from another. It keeps no
block state of its own, only who waits for which lease. Every data verb has the same shape: facts,
command, run the effects, await Ready or the deadline, settle.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.core.core import Core
from kvstore.core.effects import (
    Assign,
    AssignStaging,
    Copy,
    Effect,
    Forget,
    Persist,
    Ready,
    Unassign,
    UnassignStaging,
)
from kvstore.ledger import Ledger
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.hits import ABSENT, leading_run
from kvstore.model.layout import Layout
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import (
    CommitResult,
    CoreStats,
    LeaseMode,
    Opening,
    Place,
    Region,
    Reserved,
)
from kvstore.policy.links import Link
from kvstore.store.holders import Holders
from kvstore.store.rows import Rows
from kvstore.store.sessions import Session, Sessions
from kvstore.tiers.base import Archive
from kvstore.tiers.host import HostStats, HostTier

NS_PER_MS = 1_000_000
INSTANCE_ID_BYTES = 16


class Mover(Protocol):
    """What runs the core's copies (kvstore.mover); they come back through `Store.copies_done`."""

    def submit(self, moves: Sequence[Copy | Forget]) -> None: ...


@dataclass(frozen=True, slots=True)
class Presence:
    """Answer of a lookup in one space: a presence code a key (kvstore.model.hits)."""

    codes: bytes


@dataclass(frozen=True, slots=True)
class Leased:
    """A settled read lease. `places` has one entry a key, None where the block is absent."""

    lease_id: int
    places: list[Place | None]
    leased: int
    reason: Reason
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `Store.stats` tells; `tier_states` has a word or a sentence for each tier."""

    state: str
    uptime_s: float
    core: CoreStats
    tier_states: Mapping[str, str]
    host: HostStats


class Store:
    """See the module's docstring. Built by the daemon's app, which also calls `tick`."""

    def __init__(
        self,
        core: Core,
        *,
        host: HostTier,
        host_tier: int,
        mover: Mover,
        ledger: Ledger,
        clock: Clock,
        archives: Mapping[int, Archive] | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        """`host_tier`: index of the pool whose memory clients map. `links`: one a tier."""
        self.core = core
        self.clock = clock
        self.tiers = core.tiers
        self.host_name = core.tiers[host_tier].name
        self.instance_id = secrets.token_bytes(INSTANCE_ID_BYTES)
        self.links = list(links)
        self.drained = asyncio.Event()
        self.started_ns = clock.monotonic_ns()
        self._host = host
        self._host_tier = host_tier
        self._mover = mover
        self._ledger = ledger
        self._archives = dict(archives or {})
        self._sessions = Sessions()
        self._holders = Holders(self._gone)
        self._rows = Rows(ledger, lambda ticket: core.persisted(ticket, clock.monotonic_ns()))
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._staging_bytes: dict[int, int] = {}
        self._running = False

    # ------------------------------------------------------------------ life

    def restore(self) -> None:
        """Loads the durable rows into the core. Called once, before serving."""
        self.core.restore(self._ledger.rows())
        self._run()

    def tick(self) -> None:
        """Expires what is due. Called by the daemon every few tens of milliseconds."""
        self.core.tick(self.clock.monotonic_ns())
        self._run()

    def drain(self) -> None:
        """No new sessions and reservations from now on; reads and running writes go on."""
        self.drained.set()
        self.core.drain(self.clock.monotonic_ns())
        self._run()

    def grow(self, capacity_bytes: int) -> None:
        """Raises the host tier's capacity: what a smaller start left out can be had now."""
        self._host.grow(capacity_bytes)
        self.core.grow(self._host_tier, capacity_bytes, self.clock.monotonic_ns())
        self._run()

    @property
    def draining(self) -> bool:
        return self.drained.is_set()

    @property
    def busy(self) -> bool:
        """Whether copies, durable writes or waiting calls are under way."""
        return bool(self._waiters or self._rows.busy or self.core.stats().copies_in_flight)

    def stats(self) -> StoreStats:
        """A snapshot of plain values: may be handed to another thread."""
        host = self._host.stats()
        return StoreStats(
            state="draining" if self.draining else "ready",
            uptime_s=(self.clock.monotonic_ns() - self.started_ns) / 1e9,
            core=self.core.stats(),
            tier_states={self.host_name: _state_of(host)},
            host=host,
        )

    # ------------------------------------------------------------------ sessions

    def attach(self, tenant: str, group: bytes, engine_id: str, client_name: str) -> Session:
        """Opens a session; raises KVStoreError(LIMIT_SESSIONS, DRAINING)."""
        if self.draining:
            raise KVStoreError(Reason.DRAINING, "the daemon is stopping")
        now_ns = self.clock.monotonic_ns()
        return self._sessions.add(
            self.core.begin_session(tenant, group, now_ns),
            tenant=tenant,
            group=group,
            engine_id=engine_id,
            client_name=client_name,
            now_ns=now_ns,
        )

    def session_by_secret(self, secret: bytes, tenant: str) -> Session | None:
        """The session of this tenant with this secret."""
        return self._sessions.by_secret(secret, tenant)

    def bind_fd(self, session: Session) -> None:
        """The session's process is known by its fd socket from now on."""
        session.fd_bound = True

    def end_session(self, session_id: int) -> None:
        """Frees everything that the session held. Idempotent."""
        if self._sessions.remove(session_id) is not None:
            self.core.end_session(session_id, self.clock.monotonic_ns())
            self._run()

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    # ------------------------------------------------------------------ memory that clients map

    @property
    def unmap_listeners(self) -> list[Callable[[int], None]]:
        """Called with the id of each region that is closed while processes hold it."""
        return self._holders.unmap_listeners

    def regions_of(self, tenant: str) -> list[Region]:
        """The open regions of a tenant."""
        return self.core.regions(tenant)

    def region_fd(self, region_id: int, tenant: str) -> int | None:
        """A read-only descriptor (it stays the tier's); None for a region that is closed, unknown
        or another tenant's, which look alike.
        """
        region = self.core.region(region_id)
        if region is None or region.tenant != tenant or region.tier != self._host_tier:
            return None
        return self._host.fd(region_id)

    def staging_fd(self, session_id: int) -> tuple[int, int, int] | None:
        """(region id, total bytes, read-write descriptor) of the session's staging, if any."""
        region_id = self.core.staging_of(session_id)
        if region_id is None or region_id not in self._staging_bytes:
            return None
        return region_id, self._staging_bytes[region_id], self._host.fd(region_id)

    def holder_added(self, region_id: int) -> None:
        """A process was given the region's descriptor."""
        self._holders.added(region_id)

    def holder_gone(self, region_id: int) -> None:
        """A process has unmapped the region, or is proven dead."""
        self._holders.gone(region_id)

    def _gone(self, region_id: int) -> None:
        self._host.released(region_id)
        self.core.region_gone(region_id, self.clock.monotonic_ns())
        self._run()

    # ------------------------------------------------------------------ spaces

    def open(self, session: Session, fingerprint: Fingerprint) -> Opening:
        """Binds a fingerprint to a space; refusals are values (see Opening)."""
        opening = self.core.open(session.id, fingerprint, self.clock.monotonic_ns())
        self._run()
        return opening

    def space_of(self, session: Session, space_id: int) -> tuple[Layout, bytes]:
        """(layout, fingerprint digest) of a space that this session may use.

        Raises BadRequest(SPACE_UNKNOWN): never given to this tenant, and the same for another's;
        KVStoreError(SPACE_CLOSED): it was, until it was closed.
        """
        space = self.core.space_of(session.id, space_id)
        if space is Reason.SPACE_UNKNOWN:
            raise BadRequest(Reason.SPACE_UNKNOWN, "no such space of this tenant; open it first")
        if isinstance(space, Reason):
            raise KVStoreError(space, "the space was closed; open it again")
        return space.layout, space.fingerprint.digest

    # ------------------------------------------------------------------ reading

    async def lookup(self, session: Session, space_id: int, keys: Sequence[bytes]) -> Presence:
        """Presence of `keys`; archives are asked from the first key on that no pool holds."""
        codes = self.core.lookup(session.id, space_id, keys)
        run = leading_run(codes)
        if run < len(keys) and self._archives:
            archived = await self._find_archived(space_id, keys[run:])
            codes = bytes(
                1 + archived[key] if code == ABSENT and key in archived else code
                for code, key in zip(codes, keys, strict=True)
            )
        return Presence(codes)

    async def _find_archived(self, space_id: int, keys: Sequence[bytes]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for tier, archive in self._archives.items():
            missing = [key for key in keys if key not in found]
            found.update(dict.fromkeys(await archive.find(space_id, missing), tier))
        return found

    async def acquire(
        self,
        session: Session,
        space_id: int,
        keys: Sequence[bytes],
        *,
        mode: LeaseMode,
        ttl_ns: int | None,
        wait_ns: int,
        all_or_nothing: bool = False,
    ) -> Leased:
        """Read lease on what of `keys` is there, or comes within `wait_ns`.

        `ttl_ns` counts from the answer; None is for view leases, which have no deadline.
        """
        below = await self._find_archived(space_id, keys) if self._archives else {}
        now_ns = self.clock.monotonic_ns()
        acquired = self.core.acquire(
            session.id,
            space_id,
            keys,
            mode=mode,
            until_ns=None if ttl_ns is None else now_ns + wait_ns + ttl_ns,
            wait=wait_ns > 0,
            all_or_nothing=all_or_nothing,
            below=below,
            now_ns=now_ns,
        )
        self._run()
        lease_id = acquired.lease_id
        if not lease_id:
            return Leased(0, [None] * len(keys), 0, acquired.reason, ())
        if not acquired.ready:
            try:
                await self._ready(lease_id, wait_ns)
            except asyncio.CancelledError:
                self.release(session, (lease_id,))
                raise
        settled = self.core.settle(lease_id, self.clock.monotonic_ns())
        self._run()
        first_reason = settled.reasons[min(settled.reasons)] if settled.reasons else Reason.OK
        ids = dict.fromkeys(place.region for place in settled.places if place is not None)
        regions = tuple(r for i in ids if (r := self.core.region(i)) is not None)
        return Leased(
            lease_id if settled.leased else 0,
            settled.places,
            settled.leased,
            first_reason,
            regions,
        )

    def release(self, session: Session, lease_ids: Sequence[int]) -> tuple[int, int]:
        """(released, unknown). An uncommitted write lease is aborted."""
        counts = self.core.release(session.id, lease_ids, self.clock.monotonic_ns())
        self._run()
        return counts

    def block_view(self, place: Place, length: int) -> NDArray[np.uint8]:
        """The daemon's own view of a leased block's bytes, for the byte streams."""
        return self._host.view(place, length)

    def generation(self, place: Place) -> int:
        """The slot's generation now: another than the place's once another block has the slot."""
        return self._host.generation(place.region, place.slot)

    def note_load(self, session: Session, lease_id: int, blocks: int, copy_ns: int) -> int:
        """Learns from a client's measured copy; returns its bytes (0: no lease of this group)."""
        length = self.core.leased_bytes(session.id, lease_id, blocks)
        if length and copy_ns:
            self.links[self._host_tier].observe(length, copy_ns, self.clock.monotonic_ns())
        return length

    # ------------------------------------------------------------------ writing

    def reserve(
        self,
        session: Session,
        space_id: int,
        chain: Sequence[bytes],
        *,
        first: int,
        part: int,
        attempt: int,
        ttl_ns: int,
    ) -> Reserved:
        """Write lease on what of `chain[first:]` is wanted and has room; refusals are values."""
        now_ns = self.clock.monotonic_ns()
        reserved = self.core.reserve(
            session.id, space_id, chain, first, part, attempt, now_ns + ttl_ns, now_ns
        )
        self._run()
        return reserved

    def staging_view(self, region_id: int, offset: int, length: int) -> NDArray[np.uint8]:
        """The daemon's own view of a staging window, for pushed byte streams."""
        return self._host.staging_view(region_id, offset, length)

    async def commit(
        self, session: Session, lease_id: int, *, durable: bool, wait_ns: int
    ) -> CommitResult:
        """Copies a write lease's bytes and publishes them at once; returns when that is settled or
        `wait_ns` is over. Raises KVStoreError when the lease cannot be committed.
        """
        committed = self.core.commit(session.id, lease_id, durable, self.clock.monotonic_ns())
        self._run()
        if committed.reason is not Reason.OK:
            raise KVStoreError(committed.reason, "the reservation cannot be committed")
        if not committed.ready:
            await self._ready(lease_id, wait_ns)
        result = self.core.settle_commit(lease_id, self.clock.monotonic_ns())
        self._run()
        return result

    def copies_done(self, results: Iterable[tuple[int, bool, Reason, bytes | None, int]]) -> None:
        """Completions of the mover: (copy id, ok, reason, checksum, elapsed in ns)."""
        now_ns = self.clock.monotonic_ns()
        for copy_id, ok, reason, checksum, elapsed_ns in results:
            self.core.done(copy_id, ok, reason, checksum, elapsed_ns, now_ns)
        self._run()

    # ------------------------------------------------------------------ effects

    async def durable(self, ticket: int) -> bool:
        """Runs the effects of an operator's command, then waits until its rows are written.

        False: the ledger is volatile, or writing failed.
        """
        self._run()
        return await self._rows.durable(ticket)

    def run_effects(self) -> None:
        """Runs what a command that was given to `core` directly left to do."""
        self._run()

    def _run(self) -> None:
        if self._running:
            return  # an effect led to a command: the loop below runs what that left to do
        self._running = True
        moves: list[Copy | Forget] = []
        try:
            while effects := self.core.effects():
                for effect in effects:
                    self._apply(effect, moves)
        finally:
            self._running = False
        if moves:
            self._mover.submit(moves)
        self._rows.start()

    def _apply(self, effect: Effect, moves: list[Copy | Forget]) -> None:
        if isinstance(effect, Copy | Forget):
            moves.append(effect)  # in order: a name may be saved, dropped and saved anew
        elif isinstance(effect, Ready):
            waiter = self._waiters.get(effect.lease_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif isinstance(effect, Assign):
            self._host.assign(effect.region)
        elif isinstance(effect, AssignStaging):
            self._host.assign_staging(effect.region_id, effect.total_bytes)
            self._staging_bytes[effect.region_id] = effect.total_bytes
        elif isinstance(effect, Unassign | UnassignStaging):
            self._staging_bytes.pop(effect.region_id, None)
            self._host.unassign(effect.region_id)
            self._holders.close(effect.region_id)
        elif isinstance(effect, Persist):
            self._rows.add(effect)

    async def _ready(self, lease_id: int, wait_ns: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[lease_id] = future
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(future, wait_ns / 1e9)
        finally:
            self._waiters.pop(lease_id, None)


def _state_of(host: HostStats) -> str:
    if host.prefault_error:
        return host.prefault_error
    return "ok" if host.prefaulted_bytes >= host.capacity_bytes else "warming"
