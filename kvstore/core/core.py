"""The core's whole interface: commands in, effects out.

One thread, no clock (`now_ns` is the shell's monotonic time), no I/O. Every command is O(keys) and
never waits. After each command the shell drains `effects` and runs them in order. A block that is
not there, a space that was closed, a lease that has ended are answers; `BadRequest` is for calls
that no race can explain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvstore.core import check, stats
from kvstore.core.ahead import Ahead
from kvstore.core.books import Books
from kvstore.core.decisions import Decisions
from kvstore.core.effects import Effect
from kvstore.core.leases import LeaseKind, ReadLease, Session, WriteLease
from kvstore.core.losses import BLOCKS_PER_CALL, Losses
from kvstore.core.moves import Moves
from kvstore.core.names import Names
from kvstore.core.openings import Openings
from kvstore.core.pins import Pins
from kvstore.core.pools import Slot
from kvstore.core.reads import Reads
from kvstore.core.reviews import Reviews
from kvstore.core.room import Room
from kvstore.core.rows import Rows
from kvstore.core.spaces import Space
from kvstore.core.writes import Writes
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import (
    HEAD,
    Absence,
    Acquired,
    Before,
    CommitResult,
    Committed,
    CoreLimits,
    CoreStats,
    Dropped,
    EpochSet,
    KeyExplanation,
    LeaseMode,
    Opening,
    Pinned,
    Region,
    Reserved,
    Reviewed,
    ReviewRow,
    Settled,
    SpaceRow,
    TenantSpec,
    TierSpec,
)
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.lru import Lru

GROUP_BYTES_MAX = 64


class Core:
    """All state of blocks, leases, spaces and decisions. See the module's docstring."""

    # A test plants a bug in one of them, to see that the simulation notices.
    names_type: type[Names] = Names
    moves_type: type[Moves] = Moves
    reads_type: type[Reads] = Reads
    writes_type: type[Writes] = Writes

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        tenants: Sequence[TenantSpec],
        limits: CoreLimits | None = None,
        policy: Callable[[], EvictionPolicy[Slot]] = Lru,
    ) -> None:
        books = Books(tiers, tenants, limits or CoreLimits(), policy)
        rows, reviews = Rows(books), Reviews()
        self.books = books
        self._names = self.names_type(books)
        self._moves = self.moves_type(books, self._names)
        self._reads = self.reads_type(books, self._moves)
        self._writes = self.writes_type(books, self._moves)
        self._openings = Openings(books, self._moves, rows, reviews)
        self._decisions = Decisions(books, self._openings, rows, reviews)
        self._pins = Pins(books, self._moves)
        self._losses = Losses(books, self._moves)
        self._ahead = Ahead(books, self._moves)
        self._room = Room(books, self._moves, self._writes.turns)

    @property
    def tiers(self) -> tuple[TierSpec, ...]:
        """Fastest first."""
        return self.books.tiers

    @property
    def limits(self) -> CoreLimits:
        """The bounds that hold."""
        return self.books.limits

    # ------------------------------------------------------------------ sessions

    def begin_session(self, tenant: str, group: bytes, now_ns: int) -> int:
        """A new session of `group`, 1 to 64 bytes that name the engine instance. BadRequest: no
        such tenant. KVStoreError(LIMIT_SESSIONS).
        """
        books = self.books
        if tenant not in books.tenants:
            raise BadRequest(Reason.BAD_NAME, f"no tenant {tenant!r}", "tenants")
        if not 1 <= len(group) <= GROUP_BYTES_MAX:
            raise BadRequest(Reason.BAD_SIZE, f"1 to {GROUP_BYTES_MAX} bytes", "group")
        if len(books.sessions) >= books.limits.sessions_max:
            attached = f"{len(books.sessions)} sessions are attached"
            raise KVStoreError(Reason.LIMIT_SESSIONS, attached, "limits.sessions_max")
        session = Session(books.next_id("session"), tenant, group)
        books.sessions[session.id] = session
        books.group_sessions.setdefault(session.group_key, set()).add(session.id)
        return session.id

    def end_session(self, session: int, now_ns: int) -> None:
        """Frees everything that the session held. Idempotent. A commit that was given runs on."""
        books = self.books
        ended = books.sessions.pop(session, None)
        if ended is None:
            return
        for lease in list(ended.leases.values()):
            self._end_lease(lease, now_ns)
        for group in list(ended.groups):
            self._names.abort_group(group, Reason.WRITE_GROUP_FAILED, now_ns)
        self._writes.turns.end(ended, now_ns)
        peers = books.group_sessions[ended.group_key]
        peers.discard(ended.id)
        if not peers:
            del books.group_sessions[ended.group_key]
            self._openings.end_group(ended.group_key, now_ns)

    def _session(self, session: int) -> Session | None:
        return self.books.sessions.get(session)

    # ------------------------------------------------------------------ spaces

    def open(self, session: int, fingerprint: Fingerprint, now_ns: int) -> Opening:
        """Binds a fingerprint to a space of the session's tenant. BadRequest: unknown session."""
        known = self._session(session)
        if known is None:
            raise BadRequest(Reason.SESSION_UNKNOWN, "attach first", "session")
        return self._openings.open(known, fingerprint, now_ns)

    def space_of(self, session: int, space_id: int) -> Space | Reason:
        """The space that a session names, to be looked at only; or what it is told instead: the
        same for another tenant's space as for one that never was.
        """
        known = self._session(session)
        return Reason.SESSION_UNKNOWN if known is None else self.books.space(known, space_id)

    def explain_offer(self, tenant: str, group: bytes, fingerprint: Fingerprint) -> Opening:
        """What `open` would answer. space_id 0 with verdict MATCH or HELD: it would make one."""
        return self._openings.judge(tenant, group, fingerprint)

    # ------------------------------------------------------------------ reading

    def lookup(self, session: int, space_id: int, keys: Sequence[bytes]) -> bytes:
        """A presence code a key (`kvstore.model.hits`). No side effect."""
        known = self._session(session)
        if known is None:
            return bytes(len(keys))
        return self._reads.lookup(known, space_id, keys)

    def why_absent(self, session: int, space_id: int, key: bytes) -> Absence:
        """Why a key misses; reason HIT if it does not."""
        known = self._session(session)
        if known is None:
            return Absence(Reason.SESSION_UNKNOWN)
        return self._reads.why_absent(known, space_id, key)

    def acquire(
        self,
        session: int,
        space_id: int,
        keys: Sequence[bytes],
        *,
        mode: LeaseMode,
        until_ns: int | None,
        wait: bool,
        all_or_nothing: bool = False,
        below: Mapping[bytes, int] | None = None,
        reach: frozenset[int] | None = None,
        prompt_tokens: int = 0,
        now_ns: int,
    ) -> Acquired:
        """A read lease.

        until_ns: its deadline; None, and always for views: none. wait: also take what is being
        written or loaded; the lease is ready when all of that came or failed. below: key to archive
        tier, for keys that an archive holds: they are loaded, and what is being loaded is waited
        for, also without `wait`; None: neither. reach: pools that the reader can read; None: all.
        prompt_tokens: of the prompt that these blocks belong to; 0: it has no more that is known.
        """
        known = self._session(session)
        if known is None:
            return Acquired(0, False, Reason.SESSION_UNKNOWN)
        if len(keys) > self.books.limits.keys_per_call_max:
            return Acquired(0, False, Reason.TOO_MANY_KEYS)
        return self._reads.acquire(
            known,
            space_id,
            keys,
            mode=mode,
            until_ns=until_ns,
            wait=wait,
            all_or_nothing=all_or_nothing,
            below=below,
            reach=reach,
            prompt_tokens=prompt_tokens,
            now_ns=now_ns,
        )

    def settle(self, lease_id: int, now_ns: int, until_ns: int | None = None) -> Settled:
        """What a read lease holds. A lease that holds nothing ends here. until_ns: its deadline
        from now on, if that is sooner than the one it was taken with.
        """
        return self._reads.settle(lease_id, until_ns, now_ns)

    def release(self, session: int, lease_ids: Sequence[int], now_ns: int) -> tuple[int, int]:
        """Ends leases of the session or its group: (released, unknown). A reservation is aborted;
        one whose commit is waited for is known to that alone.
        """
        known = self._session(session)
        released = 0
        for lease_id in lease_ids:
            lease = self.books.leases.get(lease_id)
            owner = None if lease is None else lease.session
            if lease is None or owner is None or known is None:
                continue
            awaited = isinstance(lease, WriteLease) and lease.callers
            if owner.group_key == known.group_key and not awaited:
                self._end_lease(lease, now_ns)
                released += 1
        return released, len(lease_ids) - released

    def _end_lease(self, lease: ReadLease | WriteLease, now_ns: int) -> None:
        if isinstance(lease, ReadLease):
            self._reads.end(lease)
        else:
            self._writes.abort(lease, Reason.ABORTED, now_ns)

    def leased_bytes(self, session: int, lease_id: int, blocks: int) -> int:
        """Bytes of so many blocks of a read lease, at most of all; 0 if it is not the group's."""
        known, lease = self._session(session), self.books.leases.get(lease_id)
        if known is None or not isinstance(lease, ReadLease) or lease.session is None:
            return 0
        if lease.session.group_key != known.group_key:
            return 0
        return min(blocks, len(lease.slots)) * lease.space.layout.block_bytes

    def leased(self, session: int, lease_id: int) -> ReadLease | None:
        """The session's own live copy lease, to look at: what it holds stays until it ends."""
        known = self._session(session)
        lease = None if known is None else known.leases.get(lease_id)
        return lease if isinstance(lease, ReadLease) and lease.kind is LeaseKind.COPY else None

    # ------------------------------------------------------------------ writing

    def reserve(
        self,
        session: int,
        space_id: int,
        chain: Sequence[bytes],
        first: int,
        part: int,
        attempt: int,
        until_ns: int,
        now_ns: int,
        before: Before = HEAD,
        durable: bool = False,
    ) -> Reserved:
        """A write lease on what is wanted of `chain[first:]`, as far as there is room. `chain` is
        the prompt from its first block on, but for what is `before` it. `durable`: as the commit
        will be; a lease on nothing waits for what is present to be saved.
        """
        known = self._session(session)
        if known is None:
            return Reserved(0, [], [], 0, 0, 0, Reason.SESSION_UNKNOWN, 0)
        if len(chain) > self.books.limits.keys_per_call_max:
            return Reserved(0, [], [], 0, 0, 0, Reason.TOO_MANY_KEYS, 0)
        keys = list(chain)
        return self._writes.reserve(
            known, space_id, keys, first, part, attempt, until_ns, before, durable, now_ns
        )

    def is_reserved(self, session: int, lease_id: int) -> bool:
        """Whether the session's reservation may be filled: not given up, expired or committed."""
        return self._writes.is_reserved(self._session(session), lease_id)

    def commit(self, session: int, lease_id: int, durable: bool, now_ns: int) -> Committed:
        """Publishes a reservation once its bytes are copied. Asking again changes nothing."""
        known = self._session(session)
        if known is None:
            return Committed(False, Reason.SESSION_UNKNOWN)
        return self._writes.commit(known, lease_id, durable, now_ns)

    def settle_commit(self, lease_id: int, now_ns: int) -> CommitResult:
        """What became of a commit. Ends the lease, or what is left of it goes on by itself."""
        return self._writes.settle_commit(lease_id)

    # ------------------------------------------------------------------ facts from the shell

    def done(
        self,
        copy_id: int,
        ok: bool,
        reason: Reason,
        checksum: bytes | None,
        elapsed_ns: int,
        now_ns: int,
    ) -> None:
        """A copy has ended. Each is reported once."""
        flight = self.books.flights.pop(copy_id)
        self.books.counters[f"copies_{flight.copy.why}"] += 1
        self.books.counters[f"copied_bytes_{flight.copy.why}"] += flight.copy.length if ok else 0
        if flight.copy.why == "commit":
            self._writes.landed(flight, ok, reason, now_ns)
        else:
            self._moves.landed(flight, ok, reason, now_ns)

    def region_gone(self, region_id: int, now_ns: int) -> None:
        """No process can reach a closed region any more: its bytes are free, and go to who claimed
        them.
        """
        self._room.region_gone(region_id, now_ns)

    def grow(self, tier: int, capacity_bytes: int, now_ns: int) -> None:
        """A pool may use more from now on; it never shrinks."""
        self._room.grow(tier, capacity_bytes, now_ns)

    def pause_growth(self, tier: int, paused: bool, now_ns: int) -> None:
        """Whether a pool makes no regions and no staging for now: it works with what it has."""
        self._room.pause(tier, paused, now_ns)

    def set_admission(self, archive: int, chance: float) -> None:
        """Only what is asked for again with this chance at least, 0 to 1, is saved to an archive
        by itself; 0: what policies find worth it.
        """
        self.books.admission[archive] = chance

    def save_ahead(self, everything: bool, now_ns: int) -> int:
        """Begins to save what would be evicted next, if there is little room, or `everything`, the
        warmest first; as many as may be out; how many.
        """
        ahead = self._ahead
        return ahead.save_hottest() if everything else ahead.save_coldest(now_ns)

    def archive_dropped(self, tier: int, space_id: int, keys: Iterable[bytes]) -> None:
        """An archive has aged these names out: evicting the blocks is no longer free."""
        space = self.books.spaces.get(space_id)
        if space is not None:
            self._moves.unsaved(space, keys)

    def persisted(self, ticket: int, now_ns: int) -> None:
        """One durable row with this ticket is written."""
        tickets = self.books.tickets
        tickets[ticket] -= 1
        if tickets[ticket] <= 0:
            del tickets[ticket]

    def restore(self, rows: Iterable[tuple[str, bytes, bytes]]) -> None:
        """The durable rows of earlier runs: (table, key, value). Before any other command."""
        self._decisions.restore(rows)

    def tick(self, now_ns: int) -> int | None:
        """Expires what is due, serves who waits for staging. Returns when the next thing is due."""
        for lease in self.books.leases.due(now_ns):
            if isinstance(lease, ReadLease):
                self.books.counters["leases_expired"] += 1
                self._reads.end(lease)
            else:
                self._writes.expire(lease, now_ns)
        self._writes.turns.serve(now_ns)
        dates = (self.books.leases.next_due_ns(), self._decisions.expire_reviews(now_ns))
        return min((date for date in dates if date is not None), default=None)

    def lose(self, tier: int, now_ns: int, blocks_max: int = BLOCKS_PER_CALL) -> bool:
        """A pool's memory is gone: forgets so many of its blocks. True once all its regions are
        closed, after the leases that hold some of it; to be called again until then.
        """
        return self._losses.lose(tier, now_ns, blocks_max)

    def effects(self) -> list[Effect]:
        """What is to be done since the last call, in order."""
        drained = self.books.effects
        self.books.effects = []
        return drained

    # ------------------------------------------------------------------ the operator's verbs

    def pin(
        self, space_id: int, keys: Sequence[bytes], now_ns: int, tenant: str | None = None
    ) -> Pinned:
        """Holds the leading READY keys of a space (of any tenant, or of this one) until `unpin`."""
        return self._pins.pin(tenant, space_id, keys, now_ns)

    def unpin(self, pin_id: int, now_ns: int) -> bool:
        """Ends a pin. False: no such pin."""
        return self._pins.unpin(pin_id)

    def invalidate(
        self,
        *,
        tenant: str | None = None,
        space_id: int | None = None,
        model_name: str | None = None,
        everything: bool = False,
        keys: Sequence[bytes] | None = None,
        why: str = "",
        now_ns: int,
    ) -> Dropped:
        """Makes blocks invisible at once and for good: named keys of a space, or whole spaces.

        The selectors narrow each other; at least one is given, or `everything`.
        """
        return self._decisions.invalidate(
            tenant=tenant,
            space_id=space_id,
            model_name=model_name,
            everything=everything,
            keys=keys,
            now_ns=now_ns,
        )

    def set_epoch(self, model_name: str, epoch: int, why: str, now_ns: int) -> EpochSet:
        """Raises the weight epoch floor of a model for all tenants; it never falls."""
        return self._decisions.set_epoch(model_name, epoch, why, now_ns)

    def epoch_floors(self) -> dict[str, int]:
        """Model name to its weight epoch floor."""
        return dict(self._openings.floors)

    def review(
        self,
        review_id: int,
        approve: bool,
        revision: str,
        who: str,
        why: str,
        now_ns: int,
        wall_s: float,
    ) -> Reviewed:
        """Decides a held fingerprint: approve vouches for its weights `revision`."""
        return self._decisions.review(review_id, approve, revision, who, why, now_ns, wall_s)

    def hold(self, space_id: int, cause: Reason, words: str, *, now_ns: int, wall_s: float) -> int:
        """Keeps a space from everybody until a person decides. See `Decisions.hold`."""
        return self._decisions.hold(space_id, cause, words, now_ns, wall_s)

    def reviews(self, include_decided: bool = False) -> list[ReviewRow]:
        """Held fingerprints, oldest first."""
        return self._decisions.rows_of_reviews(include_decided)

    def review_states(self) -> Mapping[str, int]:
        """How many reviews there are, by state; "held": nobody has decided them."""
        return stats.review_states(self._decisions.reviews)

    def drain(self, now_ns: int) -> None:
        """No reservations from now on; reads and what is under way go on."""
        self.books.draining = True

    # ------------------------------------------------------------------ views

    def regions(self, tenant: str) -> list[Region]:
        """Open regions of a tenant, in all pools."""
        return stats.regions(self.books, tenant)

    def region(self, region_id: int) -> Region | None:
        """An open region."""
        return stats.region(self.books, region_id)

    def staging_of(self, session: int) -> int | None:
        """The session's staging region."""
        known = self._session(session)
        return None if known is None or known.staging is None else known.staging.region_id

    def explain(self, tenant: str, space_id: int, key: bytes, now_ns: int) -> KeyExplanation:
        """What is known of a key, for people."""
        return stats.explain(self.books, tenant, space_id, key, now_ns)

    def spaces(self) -> list[SpaceRow]:
        """All spaces that are not closed."""
        return stats.space_rows(self.books)

    def stats(self) -> CoreStats:
        """A snapshot of all numbers."""
        return stats.snapshot(self.books, self.review_states()["held"])

    def check(self) -> None:
        """Every invariant; AssertionError names the one that does not hold."""
        check.check(self.books)
