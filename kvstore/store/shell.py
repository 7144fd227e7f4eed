"""The store: reads the clock, runs the core's effects, waits for what they bring.

One event-loop thread owns a Store; none of its methods may be called from another. It keeps no
block state of its own, only who waits for which lease. Every data verb has the same shape: facts,
command, run the effects, await Ready or the deadline, settle.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

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
    Wanted,
)
from kvstore.ledger import Ledger
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.hits import ABSENT, PENDING, leading_run
from kvstore.model.layout import Layout
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import (
    HEAD,
    Before,
    CommitResult,
    LeaseMode,
    Opening,
    Reserved,
)
from kvstore.policy.guards import GuardLimits
from kvstore.policy.links import Link
from kvstore.store.archives import Archives
from kvstore.store.guarded import GuardedArchive
from kvstore.store.guards import Guards
from kvstore.store.mapped import Mapped
from kvstore.store.probes import Probes
from kvstore.store.regions import Regions
from kvstore.store.rows import Rows
from kvstore.store.sessions import Session, Sessions
from kvstore.store.values import (
    Leased,
    Mover,
    StoreStats,
    comes,
    link_stats,
    nothing,
    slowest_of,
    state_of,
)
from kvstore.store.waiters import Waiters
from kvstore.tiers.base import Archive
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier

NS_PER_MS = 1_000_000
INSTANCE_ID_BYTES = 16


class Store(Mapped):
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
        guard_limits: GuardLimits | None = None,
        devices: Mapping[int, DeviceTier] | None = None,
    ) -> None:
        """`host_tier`: index of the pool whose memory clients map. `links`: one a tier."""
        regions = Regions(core, host, host_tier, self._gone, devices)
        super().__init__(core, regions, host, host_tier, links, clock)
        self.tiers = core.tiers
        self.host_name = core.tiers[host_tier].name
        self.instance_id = secrets.token_bytes(INSTANCE_ID_BYTES)
        self.drained = asyncio.Event()
        self.started_ns = clock.monotonic_ns()
        self._mover = mover
        self._ledger = ledger
        staged = [tier for tier, one in regions.devices.items() if not one.shares]
        self.archives = Archives(core, archives or {}, self.links, clock, staged)
        self.probes = Probes(self, host_tier)
        self._sessions = Sessions()
        self._rows = Rows(ledger, lambda ticket: core.persisted(ticket, clock.monotonic_ns()))
        self._waiters = Waiters()
        self._effects: deque[Effect] = deque()
        self._running = False
        self.guards = Guards(
            guard_limits or GuardLimits(),
            [tier.name for tier in core.tiers],
            {i: one for i, one in (archives or {}).items() if isinstance(one, GuardedArchive)},
            reviews_held=lambda: core.review_states()["held"],
            hold=self.hold,
            pause_memory=lambda paused: self._regions.pause(paused, clock.monotonic_ns()),
            set_admission=core.set_admission,
        )

    # ------------------------------------------------------------------ life

    def restore(self) -> None:
        """Loads the durable rows into the core. Called once, before serving."""
        self.core.restore(self._ledger.rows())
        self._run()
        self.archives.describe_all()

    def tick(self) -> None:
        """Expires what is due. Called by the daemon every few tens of milliseconds."""
        self.core.tick(self.clock.monotonic_ns())
        self._regions.retry()
        self._rows.retry()
        self._mover.relieve()
        self.lose_devices(self.clock.monotonic_ns())
        self.core.save_ahead(False, self.clock.monotonic_ns())
        self._run()
        self.guards.tick(self.clock.monotonic_ns())

    def drain(self) -> None:
        """No new sessions and reservations from now on; reads and running writes go on."""
        self.drained.set()
        # What is saved from now on is nobody's without the ledger's rows.
        self._rows.retry(at_once=True)
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

    @property
    def unfinished(self) -> bool:
        """Whether somebody still reads or writes: what a drain waits for."""
        core = self.core.stats()
        return bool(core.read_leases or core.write_leases) or self.busy

    def stats(self) -> StoreStats:
        """A snapshot of plain values: may be handed to another thread."""
        host, archives = self._host.stats(), self.archives.stats()
        devices = {self.tiers[i].name: one.stats() for i, one in self._regions.devices.items()}
        states = {name: one.state for name, one in (archives | devices).items()}
        return StoreStats(
            state="draining" if self.draining else "ready",
            uptime_s=(self.clock.monotonic_ns() - self.started_ns) / 1e9,
            core=self.core.stats(),
            tier_states={self.host_name: state_of(host), **states},
            host=host,
            archives=archives,
            links=tuple(map(link_stats, self.tiers, self.links, self.probes.counts())),
            guards=self.guards.stats(),
            devices=devices,
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
        """Frees everything that the session held, and ends its waiting calls. Idempotent."""
        if self._sessions.remove(session_id) is not None:
            self.core.end_session(session_id, self.clock.monotonic_ns())
            self._run()
            self._waiters.wake_session(session_id)

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    def _gone(self, region_id: int) -> None:
        self.core.region_gone(region_id, self.clock.monotonic_ns())
        self._run()

    # ------------------------------------------------------------------ spaces

    def open(self, session: Session, fingerprint: Fingerprint) -> Opening:
        """Binds a fingerprint to a space; refusals are values (see Opening)."""
        now_ns = self.clock.monotonic_ns()
        refused = self.guards.refuses(self.core, session, fingerprint, now_ns)
        opening = refused or self.core.open(session.id, fingerprint, now_ns)
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

    async def lookup(self, session: Session, space_id: int, keys: Sequence[bytes]) -> bytes:
        """A presence code a key (kvstore.model.hits), as of the answer. Archives are asked from the
        first key on that no pool holds.
        """
        codes = self.core.lookup(session.id, space_id, keys)
        run = leading_run(codes)
        if run == len(keys) or not self.archives:
            return codes
        archived = await self.archives.find(space_id, keys[run:])
        codes = self.core.lookup(session.id, space_id, keys)
        if isinstance(self.core.space_of(session.id, space_id), Reason):
            return codes  # closed meanwhile: the archive may not have forgotten it yet
        return bytes(
            1 + archived[key] if code == ABSENT and key in archived else code
            for code, key in zip(codes, keys, strict=True)
        )

    async def acquire(
        self,
        session: Session,
        space_id: int,
        keys: Sequence[bytes],
        *,
        mode: LeaseMode,
        ttl_ns: int | None,
        wait_ns: int,
        load_ns: int = 0,
        all_or_nothing: bool = False,
        device_uuid: str = "",
        prompt_tokens: int = 0,
    ) -> Leased:
        """Read lease on what of `keys` is there, or comes within `wait_ns` from writers, or within
        `load_ns` from slower tiers.

        `ttl_ns` counts from the answer; None is for view leases, which have no deadline.
        device_uuid: see `reach`. prompt_tokens: of the whole prompt; 0: unknown.
        """
        below, most_ns, reach, codes = None, wait_ns, self.reach(device_uuid), b""
        if load_ns and (self.archives or reach is not None):
            codes = self.core.lookup(session.id, space_id, keys)
            below = await self.archives.below(space_id, keys, codes)
            if below or comes(codes, reach):  # else nothing is loaded; the lease ends by its ttl
                most_ns = max(wait_ns, load_ns)
        now_ns = self.clock.monotonic_ns()
        acquired = self.core.acquire(
            session.id,
            space_id,
            keys,
            mode=mode,
            until_ns=None if ttl_ns is None else now_ns + most_ns + ttl_ns,
            wait=wait_ns > 0,
            all_or_nothing=all_or_nothing,
            below=below,
            reach=reach,
            prompt_tokens=prompt_tokens,
            now_ns=now_ns,
        )
        self._run()
        lease_id = acquired.lease_id
        if not lease_id:
            return nothing(keys, acquired.reason)
        if acquired.ready:
            return self._settle(lease_id, keys, ttl_ns)
        try:
            await self._waiters.wait(lease_id, session.id, most_ns)
        except asyncio.CancelledError:
            self.release(session, (lease_id,))
            raise
        leased = self._settle(lease_id, keys, ttl_ns)
        if below or reach:
            leased = leased._replace(slowest=slowest_of(leased.places, keys, below, codes))
        return self._still_there(session, space_id, keys, leased, all_or_nothing=all_or_nothing)

    def _settle(self, lease_id: int, keys: Sequence[bytes], ttl_ns: int | None) -> Leased:
        now_ns = self.clock.monotonic_ns()
        settled = self.core.settle(lease_id, now_ns, None if ttl_ns is None else now_ns + ttl_ns)
        self._run()
        reason = settled.reasons[min(settled.reasons)] if settled.reasons else Reason.OK
        if not settled.leased:
            return nothing(keys, reason)
        ids = {place.region for place in settled.places if place is not None}
        regions = self._regions.named(ids)
        slowest = slowest_of(settled.places, keys) if self._regions.devices else self._host_tier
        return Leased(lease_id, settled.places, settled.leased, reason, regions, slowest)

    def _still_there(
        self,
        session: Session,
        space_id: int,
        keys: Sequence[bytes],
        leased: Leased,
        *,
        all_or_nothing: bool,
    ) -> Leased:
        """Takes out what was dropped while the lease waited for other blocks: its bytes are held,
        but no reader who comes now may have them.
        """
        if session.ended.is_set():
            return nothing(keys, Reason.SESSION_UNKNOWN)
        if not leased.lease_id:
            return leased
        codes = self.core.lookup(session.id, space_id, keys)
        places = [
            None if code in (ABSENT, PENDING) else place
            for code, place in zip(codes, leased.places, strict=True)
        ]
        count = len(places) - places.count(None)
        if count == leased.leased:
            return leased
        space = self.core.space_of(session.id, space_id)
        reason = space if isinstance(space, Reason) else Reason.MISS_INVALIDATED
        if not count or all_or_nothing:
            self.release(session, (leased.lease_id,))
            return nothing(keys, reason)
        return leased._replace(places=places, leased=count, reason=reason)

    def release(self, session: Session, lease_ids: Sequence[int]) -> tuple[int, int]:
        """(released, unknown). An uncommitted write lease is aborted."""
        counts = self.core.release(session.id, lease_ids, self.clock.monotonic_ns())
        self._run()
        return counts

    def leased_bytes(self, session: Session, lease_id: int, blocks: int) -> int:
        """Bytes of so many blocks of a read lease, at most all of it; 0: none of this group."""
        return self.core.leased_bytes(session.id, lease_id, blocks)

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
        before: Before = HEAD,
        durable: bool = False,
    ) -> Reserved:
        """Write lease on what of `chain[first:]` is wanted and has room; refusals are values."""
        now_ns = self.clock.monotonic_ns()
        if not self.guards.may_write(now_ns):
            return Reserved(0, [], [], 0, 0, 0, Reason.DECLINED_GUARD, 0)
        until_ns = now_ns + ttl_ns
        reserved = self.core.reserve(
            session.id, space_id, chain, first, part, attempt, until_ns, now_ns, before, durable
        )
        self._run()
        return reserved

    async def commit(
        self, session: Session, lease_id: int, *, durable: bool, wait_ns: int
    ) -> CommitResult:
        """Copies a write lease's bytes and publishes them at once; returns when that is settled or
        `wait_ns` is over. Raises KVStoreError when the lease cannot be committed.
        """
        until_ns = self.clock.monotonic_ns() + wait_ns
        committed = self.core.commit(session.id, lease_id, durable, self.clock.monotonic_ns())
        self._run()
        if committed.reason is not Reason.OK:
            raise KVStoreError(committed.reason, committed.reason.text)
        in_time = committed.ready
        try:
            if not in_time:
                in_time = await self._waiters.wait(lease_id, session.id, wait_ns)
        finally:
            # Also for a caller who is gone: what he gave is published, and the lease ends.
            result = self.core.settle_commit(lease_id, self.clock.monotonic_ns())
            self._run()
        if session.ended.is_set():
            raise KVStoreError(Reason.SESSION_UNKNOWN, "the session ended during the commit")
        if not in_time and result.reason is Reason.OK:
            return result._replace(reason=Reason.DEADLINE_EXCEEDED)
        left_ns = max(0, until_ns - self.clock.monotonic_ns())
        if durable and result.reason is Reason.OK and not await self._rows.settled(left_ns):
            # Blocks outlive the daemon only with the row that says whose they are.
            return result._replace(reason=Reason.IO_ERROR)
        return result

    def copies_done(self, results: Iterable[tuple[int, bool, Reason, bytes | None, int]]) -> None:
        """Completions of the mover: (copy id, ok, reason, checksum, elapsed in ns)."""
        now_ns = self.clock.monotonic_ns()
        for copy_id, ok, reason, checksum, elapsed_ns in results:
            self.archives.copied(copy_id, ok)
            self.core.done(copy_id, ok, reason, checksum, elapsed_ns, now_ns)
        self.archives.measured(now_ns)
        self.core.save_ahead(False, now_ns)
        self._run()

    def save_warmest(self) -> int:
        """Goes on to save what only memory has; saves that are out then."""
        if self.core.stats().saves_in_flight < self.core.limits.copies_in_flight_max // 2:
            self.core.save_ahead(True, self.clock.monotonic_ns())
            self._run()
        return self.core.stats().saves_in_flight

    # ------------------------------------------------------------------ effects

    async def durable(self, ticket: int, wait_ns: int) -> bool:
        """Runs the effects of an operator's command, then waits until its rows are written.

        False: the ledger is volatile, writing failed, or it is not done within `wait_ns`. The
        decision holds all the same, until the daemon ends.
        """
        self._run()
        return await self._rows.durable(ticket, wait_ns)

    def hold(self, space_id: int, cause: Reason, words: str) -> int:
        """See `Core.hold`: the review's id; 0 if nobody reads the space anyway."""
        now_ns, wall_s = self.clock.monotonic_ns(), self.clock.wall_s()
        review_id = self.core.hold(space_id, cause, words, now_ns=now_ns, wall_s=wall_s)
        self._run()
        return review_id

    def run_effects(self) -> None:
        """Runs what a command that was given to `core` directly left to do."""
        self._run()

    def _run(self) -> None:
        if self._running:
            return  # an effect led to a command: the loop below runs what that left to do
        self._running = True
        moves: list[Copy | Forget] = []
        effects = self._effects
        try:
            effects.extend(self.core.effects())
            while effects:
                self._apply(effects.popleft(), moves)
                if not effects:
                    effects.extend(self.core.effects())
        finally:
            # A defect costs one effect: the others are run, now or by the next command.
            self._running = False
            if moves:
                self.archives.sent(moves)
                self._mover.submit(moves)
        self._rows.start()

    def _apply(self, effect: Effect, moves: list[Copy | Forget]) -> None:
        if isinstance(effect, Copy | Forget):
            moves.append(effect)  # in order: a name may be saved, dropped and saved anew
        elif isinstance(effect, Ready):
            self._waiters.wake((effect.lease_id,))
        elif isinstance(effect, Assign | AssignStaging):
            self._regions.assign(effect)
        elif isinstance(effect, Unassign | UnassignStaging):
            self._regions.unassign(effect.region_id)
        elif isinstance(effect, Wanted):
            self.archives.told(effect)
        elif isinstance(effect, Persist):
            self.archives.note(effect)
            self._rows.add(effect)
