"""The shell around the pure core: reads the clock, runs the core's effects, waits for what they
bring.

One event-loop thread owns a Store; none of its methods may be called from another. It keeps no
block state of its own: sessions' secrets, waiters (lease -> future), and who holds which region's
descriptor. Every data verb has the same shape: facts, command, run the effects, await Ready or the
deadline, settle.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from kvstore.tiers.base import Archive
from kvstore.tiers.host import HostStats, HostTier

log = logging.getLogger(__name__)

NS_PER_MS = 1_000_000
SECRET_BYTES = 16


class Mover(Protocol):
    """What runs the core's copies (kvstore.mover); completions come back through
    `Store.copies_done`."""

    def submit(self, moves: Sequence[Copy | Forget]) -> None: ...


@dataclass(slots=True)
class Session:
    """One client connection. `id` is the core's; `secret` names it on the wire."""

    id: int
    secret: bytes
    tenant: str
    group: bytes
    engine_id: str
    client_name: str
    opened_ns: int
    fd_bound: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Presence:
    """Answer of a lookup in one space: a presence code a key (kvstore.model.hits)."""

    codes: bytes
    archived: Mapping[bytes, int]


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
    """What `Store.stats` tells. `tier_states` has a word or a sentence for each tier that has
    something to say."""

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
        self.core = core
        self.clock = clock
        self.tiers = core.tiers
        self.host_name = core.tiers[host_tier].name
        self.instance_id = secrets.token_bytes(16)
        self.links = list(links)
        self.draining = False
        self.drained = asyncio.Event()
        self.unmap_listeners: list[Callable[[int], None]] = []
        self._host = host
        self._host_tier = host_tier
        self._mover = mover
        self._ledger = ledger
        self._archives = dict(archives or {})
        self._sessions: dict[int, Session] = {}
        self._by_secret: dict[bytes, Session] = {}
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._tickets: dict[int, asyncio.Future[bool]] = {}
        self._rows: list[Persist] = []
        self._saving: asyncio.Task[None] | None = None
        self._holders: Counter[int] = Counter()
        self._closing: set[int] = set()
        self._staging: dict[int, tuple[int, int]] = {}
        self.started_ns = clock.monotonic_ns()

    # ------------------------------------------------------------------ life

    def restore(self) -> None:
        """Loads the durable rows (epoch floors, reviews, spaces) into the core. Called once, before
        serving."""
        self.core.restore(self._ledger.rows())
        self._run()

    def tick(self) -> None:
        """Expires what is due. Called by the daemon every few tens of milliseconds."""
        self.core.tick(self.clock.monotonic_ns())
        self._run()

    def drain(self) -> None:
        """No new reservations from now on; reads and running writes go on."""
        self.draining = True
        self.drained.set()
        self.core.drain(self.clock.monotonic_ns())
        self._run()

    @property
    def busy(self) -> bool:
        """Whether copies, durable writes or waiting calls are under way."""
        return bool(self._waiters or self._tickets or self.core.stats().copies_in_flight)

    # ------------------------------------------------------------------ sessions

    def attach(self, tenant: str, group: bytes, engine_id: str, client_name: str) -> Session:
        """Opens a session; raises KVStoreError(LIMIT_SESSIONS, DRAINING)."""
        if self.draining:
            raise KVStoreError(Reason.DRAINING, "the daemon is stopping")
        now_ns = self.clock.monotonic_ns()
        session = Session(
            id=self.core.begin_session(tenant, group, now_ns),
            secret=secrets.token_bytes(SECRET_BYTES),
            tenant=tenant,
            group=group,
            engine_id=engine_id,
            client_name=client_name,
            opened_ns=now_ns,
        )
        self._sessions[session.id] = session
        self._by_secret[_digest(session.secret)] = session
        return session

    def session_by_secret(self, secret: bytes, tenant: str) -> Session | None:
        """The session of this tenant with this secret. The dictionary sees a digest, so timing
        tells nothing of it."""
        session = self._by_secret.get(_digest(secret))
        return session if session is not None and session.tenant == tenant else None

    def bind_fd(self, session: Session) -> None:
        """The session's process is known by its fd socket: from now on that socket is its life, not
        the stream."""
        session.fd_bound = True

    def end_session(self, session_id: int) -> None:
        """Frees everything that the session held. Idempotent."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        del self._by_secret[_digest(session.secret)]
        self.core.end_session(session_id, self.clock.monotonic_ns())
        session.ended.set()
        self._run()

    def stats(self) -> StoreStats:
        """A snapshot for metrics, the admin service and health; plain values, safe to hand to
        another thread."""
        host = self._host.stats()
        tier_states = {self.host_name: _host_state(host)}
        state = "draining" if self.draining else "ready"
        uptime_s = (self.clock.monotonic_ns() - self.started_ns) / 1e9
        return StoreStats(state, uptime_s, self.core.stats(), tier_states, host)

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    # ------------------------------------------------------------------ regions and their holders

    def regions_of(self, tenant: str) -> list[Region]:
        return self.core.regions(tenant)

    def region_fd(self, region_id: int, tenant: str) -> int | None:
        """A read-only descriptor (owned by the tier), or None: closed, unknown and another tenant's
        look alike."""
        if region_id in self._closing:
            return None
        region = self.core.region(region_id)
        if region is None or region.tenant != tenant or region.tier != self._host_tier:
            return None
        return self._host.fd(region_id)

    def staging_fd(self, session_id: int) -> tuple[int, int, int] | None:
        """(region id, total bytes, read-write descriptor) of the session's staging, if any."""
        region_id = self.core.staging_of(session_id)
        if region_id is None or region_id not in self._staging:
            return None
        return region_id, self._staging[region_id][1], self._host.fd(region_id)

    def holder_added(self, region_id: int) -> None:
        """A process was given the region's descriptor."""
        self._holders[region_id] += 1

    def holder_gone(self, region_id: int) -> None:
        """A process has unmapped the region, or is proven dead."""
        self._holders[region_id] -= 1
        if self._holders[region_id] <= 0:
            del self._holders[region_id]
            if region_id in self._closing:
                self._gone(region_id)

    def _close_region(self, region_id: int) -> None:
        self._closing.add(region_id)
        self._staging.pop(region_id, None)
        self._host.unassign(region_id)
        if self._holders[region_id] > 0:
            for listener in self.unmap_listeners:
                listener(region_id)
        else:
            del self._holders[region_id]
            self._gone(region_id)

    def _gone(self, region_id: int) -> None:
        self._closing.discard(region_id)
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
            raise KVStoreError(Reason.SPACE_CLOSED, f"closed: {space.name}; open it again")
        return space.layout, space.fingerprint.digest

    # ------------------------------------------------------------------ reading

    async def lookup(self, session: Session, space_id: int, keys: Sequence[bytes]) -> Presence:
        """Presence of `keys`; archives are asked from the first key on that no pool holds."""
        codes = self.core.lookup(session.id, space_id, keys)
        run = leading_run(codes)
        archived = await self._find_archived(space_id, keys, run) if run < len(keys) else {}
        if archived:
            merged = bytearray(codes.ljust(len(keys), bytes([ABSENT])))
            for index in range(run, len(keys)):
                if merged[index] == ABSENT and (tier := archived.get(keys[index])) is not None:
                    merged[index] = 1 + tier
            codes = bytes(merged)
        return Presence(codes, archived)

    async def _find_archived(
        self, space_id: int, keys: Sequence[bytes], first: int
    ) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for tier, archive in self._archives.items():
            missing = [key for key in keys[first:] if key not in found]
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

        `ttl_ns` None is for view leases, which have no deadline.
        """
        below = await self._find_archived(space_id, keys, 0) if self._archives else {}
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
            reach=None,
            now_ns=now_ns,
        )
        self._run()
        if not acquired.lease_id:
            return Leased(0, [None] * len(keys), 0, acquired.reason, ())
        if not acquired.ready:
            try:
                await self._ready(acquired.lease_id, wait_ns)
            except asyncio.CancelledError:
                self.release(session, (acquired.lease_id,))
                raise
        settled = self.core.settle(acquired.lease_id, self.clock.monotonic_ns())
        self._run()
        lease_id = acquired.lease_id if settled.leased else 0
        ids = dict.fromkeys(place.region for place in settled.places if place is not None)
        regions = tuple(r for i in ids if (r := self.core.region(i)) is not None)
        return Leased(lease_id, settled.places, settled.leased, acquired.reason, regions)

    def release(self, session: Session, lease_ids: Sequence[int]) -> tuple[int, int]:
        """(released, unknown). An uncommitted write lease is aborted."""
        counts = self.core.release(session.id, lease_ids, self.clock.monotonic_ns())
        self._run()
        return counts

    def block_view(self, place: Place, length: int) -> NDArray[np.uint8]:
        """The daemon's own view of a leased block's bytes, for the byte streams."""
        return self._host.view(place, length)

    def generation(self, place: Place) -> int:
        """The slot's generation now: differs from `place.generation` once the slot was given to
        another block."""
        return self._host.generation(place.region, place.slot)

    def note_load(self, session: Session, lease_id: int, blocks: int, copy_ns: int) -> int:
        """Learns from a client's measured copy; returns the bytes that it moved (0: not a lease of
        this session)."""
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
        """Write lease on what of `chain[first:]` is wanted and has room; refusals are values (see
        Reserved)."""
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
        `wait_ns` is over.

        Raises KVStoreError when the lease cannot be committed.
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
        """Completions of the mover: (copy id, ok, reason, checksum, elapsed in ns). On the loop's
        thread."""
        now_ns = self.clock.monotonic_ns()
        for copy_id, ok, reason, checksum, elapsed_ns in results:
            self.core.done(copy_id, ok, reason, checksum, elapsed_ns, now_ns)
        self._run()

    # ------------------------------------------------------------------ durable rows

    async def durable(self, ticket: int) -> bool:
        """Waits until the rows behind `ticket` are written. False: the ledger is volatile, or
        writing failed."""
        if not ticket:
            return self._ledger.durable
        future = self._tickets.setdefault(ticket, asyncio.get_running_loop().create_future())
        self._run()
        return await future

    def run_effects(self) -> None:
        """Runs what the last command left to do. For commands given to `core` directly (open,
        reserve, admin verbs)."""
        self._run()

    def _save_rows(self) -> None:
        if self._rows and self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save())

    async def _save(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._rows:
                batch, self._rows = self._rows, []
                rows = [(row.table, row.key, row.value) for row in batch]
                try:
                    await loop.run_in_executor(None, self._ledger.put_many, rows)
                    written = self._ledger.durable
                except OSError:
                    log.exception("ledger: writing %d rows failed; see state.path", len(rows))
                    written = False
                for row in batch:
                    self.core.persisted(row.ticket, self.clock.monotonic_ns())
                    future = self._tickets.pop(row.ticket, None)
                    if future is not None and not future.done():
                        future.set_result(written)
        finally:
            self._saving = None
        self._run()

    # ------------------------------------------------------------------ effects

    def _run(self) -> None:
        moves: list[Copy | Forget] = []
        while effects := self.core.effects():
            for effect in effects:
                self._apply(effect, moves)
        if moves:
            self._mover.submit(moves)
        self._save_rows()

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
            self._staging[effect.region_id] = (effect.session, effect.total_bytes)
        elif isinstance(effect, Unassign | UnassignStaging):
            self._close_region(effect.region_id)
        elif isinstance(effect, Persist):
            self._rows.append(effect)

    async def _ready(self, lease_id: int, wait_ns: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[lease_id] = future
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(future, wait_ns / 1e9)
        finally:
            self._waiters.pop(lease_id, None)


def _host_state(host: HostStats) -> str:
    warming = host.prefault_error or (
        "warming" if host.prefaulted_bytes < host.capacity_bytes else ""
    )
    return warming or "ok"


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
