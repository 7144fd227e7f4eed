"""Reading: lookup, acquire, settle, release, and why a key is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.core.arena import Arena
from kvstore.core.books import Books
from kvstore.core.effects import Ready
from kvstore.core.leases import LeaseKind, ReadLease, Session
from kvstore.core.moves import Moves
from kvstore.core.pools import Slot, release_holds
from kvstore.core.promotions import Promotions
from kvstore.core.spaces import Space
from kvstore.core.states import SlotState
from kvstore.model.reasons import Reason
from kvstore.model.values import Absence, Acquired, LeaseMode, Place, Settled

READY = SlotState.READY


class Reads:
    """See the module's docstring."""

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves
        self.names = moves.names
        self.promotions = Promotions(books, moves)

    # ------------------------------------------------------------------ no side effect

    def lookup(self, session: Session, space_id: int, keys: Sequence[bytes]) -> bytes:
        """A presence code a key."""
        space = self.books.space(session, space_id)
        if not isinstance(space, Space):
            return bytes(len(keys))
        get = space.index.get
        return bytes([0 if (slot := get(key)) is None else slot.code for key in keys])

    def why_absent(self, session: Session, space_id: int, key: bytes) -> Absence:
        """Why this key misses; HIT if it does not."""
        space = self.books.space(session, space_id)
        if not isinstance(space, Space):
            closed = self.books.spaces.closed_why(space_id, session.tenant)
            doubted = space is Reason.SPACE_CLOSED and closed is None
            return Absence(closed or (Reason.HELD_FOR_REVIEW if doubted else space))
        why = self.why(space, key)
        if why is Reason.MISS_NEVER_STORED:
            nearest = self.books.spaces.nearest(space.tenant, space.fingerprint, key)
            if nearest is not None:
                other, differences = nearest
                digest = other.fingerprint.digest
                return Absence(Reason.MISS_INCOMPATIBLE, differences, "", digest)
        return Absence(why)

    def why(self, space: Space, key: bytes) -> Reason:
        """What is known of a key in its own space."""
        slot = space.index.get(key)
        if slot is not None:
            return Reason.HIT if slot.state is READY else Reason.MISS_IN_PROGRESS
        ghost = self.books.ghosts.get(space.id, key)
        return Reason.MISS_NEVER_STORED if ghost is None else _as_miss(ghost.why)

    # ------------------------------------------------------------------ acquire

    def acquire(
        self,
        session: Session,
        space_id: int,
        keys: Sequence[bytes],
        *,
        mode: LeaseMode,
        until_ns: int | None,
        wait: bool,
        all_or_nothing: bool,
        below: Mapping[bytes, int] | None,
        reach: frozenset[int] | None,
        prompt_tokens: int,
        now_ns: int,
    ) -> Acquired:
        """Takes a read lease on what is there, and on what comes if the caller waits."""
        space = self.books.space(session, space_id)
        if not isinstance(space, Space):
            return Acquired(0, False, space)
        if len(session.leases) >= self.books.limits.leases_per_session_max:
            return Acquired(0, False, Reason.LIMIT_LEASES)
        self.books.next_command()
        view = mode is LeaseMode.VIEW
        kind = LeaseKind.VIEW if view else LeaseKind.COPY
        lease = ReadLease(kind, session, space, None if view else until_ns)
        lease.all_or_nothing = all_or_nothing
        lease.reach = reach
        # A prompt is no shorter than what is asked for of it.
        tokens = max(prompt_tokens, len(keys) * space.fingerprint.encoding.block_tokens)
        allowed = self._view_blocks(session, space) if view else len(keys)
        absent = self._hold_present(lease, keys, reach, allowed)
        if absent:
            request = _Request(keys, tokens, wait, below, reach, allowed, now_ns)
            if all_or_nothing and not all(self._may_come(lease, i, request) for i in absent):
                self._explain_first(lease, keys, absent)
                release_holds(lease.slots)
                return Acquired(0, False, lease.reasons[min(lease.reasons)])
            self._fetch_absent(lease, absent, request)
        return self._grant(lease, tokens, now_ns)

    def _grant(self, lease: ReadLease, prompt_tokens: int, now_ns: int) -> Acquired:
        reason = lease.reasons[min(lease.reasons)] if lease.reasons else Reason.OK
        held = [slot for slot in lease.slots if slot is not None]
        nothing = not held and not lease.pending
        if nothing or (lease.all_or_nothing and lease.reasons):
            lease.ended = True
            release_holds(held)
            return Acquired(0, False, reason)
        self.names.use(held, prompt_tokens, now_ns)
        if lease.kind is LeaseKind.VIEW:
            assert lease.session is not None
            lease.view_bytes = (len(held) + lease.pending) * lease.space.layout.block_bytes
            lease.session.view_bytes += lease.view_bytes
        self.books.counters["blocks_acquired"] += len(held)
        self.books.leases.add(lease)
        return Acquired(lease.id, not lease.pending, reason)

    def _hold_present(
        self,
        lease: ReadLease,
        keys: Sequence[bytes],
        reach: frozenset[int] | None,
        allowed: int,
    ) -> list[int]:
        """Holds what is READY and in reach; gives the indexes of the rest. The hot loop."""
        slots = lease.slots
        absent: list[int] = []
        for index, slot in enumerate(map(lease.space.index.get, keys)):
            if (
                slot is not None
                and slot.state is READY
                and (reach is None or slot.pool.tier in reach)
                and allowed > 0
            ):
                slot.holds += 1
                slot.hits += 1
                allowed -= 1
                slots.append(slot)
            else:
                slots.append(None)
                absent.append(index)
        return absent

    def _landing(self, reach: frozenset[int] | None) -> Arena | None:
        """Where a load goes: the ingest pool, or the slowest pool that the reader reaches."""
        ingest = self.books.ingest
        if reach is None or ingest.tier in reach:
            return ingest
        return next((a for a in reversed(self.books.open_pools) if a.tier in reach), None)

    def _view_blocks(self, session: Session, space: Space) -> int:
        limit = self.books.limits.view_bytes_per_session_max
        limit = limit or self.books.ingest.capacity_bytes // 4
        return max(limit - session.view_bytes, 0) // space.layout.block_bytes

    # ------------------------------------------------------------------ what is not there yet

    def _may_come(self, lease: ReadLease, index: int, request: _Request) -> bool:
        """Whether an absent block could come; no side effect."""
        slot = lease.space.index.get(request.keys[index])
        if len(lease.slots) > request.allowed:
            return False
        if slot is not None:
            return request.brings if slot.state is READY else request.waits_for(slot)
        return request.below is not None and request.keys[index] in request.below

    def _explain_first(self, lease: ReadLease, keys: Sequence[bytes], absent: list[int]) -> None:
        for index in absent:
            why = self.why(lease.space, keys[index])
            if why is not Reason.HIT:
                lease.reasons[index] = why
                return
        lease.reasons[absent[0]] = Reason.VIEW_LIMIT

    def _fetch_absent(self, lease: ReadLease, absent: list[int], request: _Request) -> None:
        """Joins what is on its way and starts loads; the first block that stays away gets its
        reason.
        """
        left = request.allowed - (len(lease.slots) - len(absent))
        space = lease.space
        if request.brings and request.reach is not None:
            self._use_out_of_reach(space, absent[: max(left, 0)], request)
        for index in absent:
            if index >= request.useful:
                break
            key = request.keys[index]
            slot = space.index.get(key)
            why = None
            if left <= 0:
                why = Reason.VIEW_LIMIT
            elif slot is None:
                archive = None if request.below is None else request.below.get(key)
                if archive is not None and (space.id, key) not in self.books.forgetting:
                    slot, why = self._load(lease, key, index, archive, request)
            elif slot.state is READY:
                slot, why = self._bring_into_reach(slot, request)
            elif request.reach is not None and slot.pool.tier not in request.reach:
                slot = None
            if slot is not None and why is None and request.waits_for(slot):
                assert slot.fill is not None
                slot.fill.waiters.append((lease, index))
                lease.pending += 1
                left -= 1
            elif not lease.reasons:
                lease.reasons[index] = why or self.why(space, key)
        if request.useful < len(lease.slots):
            lease.reasons.setdefault(request.useful, Reason.NO_SPACE)

    def _load(
        self, lease: ReadLease, key: bytes, index: int, archive: int, request: _Request
    ) -> tuple[Slot | None, Reason | None]:
        """Begins a load. Where there is no room because of what comes later in the same prompt,
        that is let go, its end first: what comes after a gap is of no use to the reader.
        """
        arena = self._landing(request.reach)
        if arena is None:
            return None, Reason.NOT_SUPPORTED
        space = lease.space
        parent = request.keys[index - 1] if index else b""
        tokens, now_ns = request.prompt_tokens, request.now_ns
        while True:
            loaded = self.moves.load(space, key, parent, index, tokens, archive, arena, now_ns)
            if isinstance(loaded, Slot):
                return loaded, None
            if loaded is not Reason.NO_SPACE or not self._let_go_last(lease, index, arena, request):
                return None, loaded

    @staticmethod
    def _let_go_last(lease: ReadLease, index: int, arena: Arena, request: _Request) -> bool:
        """The lease holds one block less of those after `index` in this pool. False: none."""
        while request.useful > index + 1 and not lease.all_or_nothing:
            request.useful -= 1
            slot = lease.slots[request.useful]
            if slot is not None and slot.pool.tier == arena.tier:
                release_holds((slot,))
                slot.hits -= 1
                lease.slots[request.useful] = None
                return True
        return False

    def _use_out_of_reach(self, space: Space, wanted: Sequence[int], request: _Request) -> None:
        """Blocks that are to be brought are asked for where they are, as those that are held; what
        makes room for one of them evicts no other.
        """
        there = (space.index.get(request.keys[index]) for index in wanted)
        slots = [slot for slot in there if slot is not None and slot.state is READY]
        self.names.use(slots, request.prompt_tokens, request.now_ns)
        for slot in slots:
            slot.command = self.books.command

    def _bring_into_reach(self, slot: Slot, request: _Request) -> tuple[Slot | None, Reason | None]:
        """A READY block is in no pool that the reader reaches: it is moved to one if he waits, for
        writers or for loads.
        """
        if not request.brings:
            return None, Reason.MISS_IN_PROGRESS
        arena = self._landing(request.reach)
        if arena is None:
            return None, Reason.NOT_SUPPORTED
        brought = self.moves.bring(slot, arena, request.now_ns)
        return (brought, None) if brought is not None else (None, Reason.NO_SPACE)

    # ------------------------------------------------------------------ settle, release

    def settle(self, lease_id: int, until_ns: int | None, now_ns: int) -> Settled:
        """What the lease holds; what has not come by now is dropped from it. What is in a slower
        pool than it might be may rise from here on.
        """
        lease = self.books.leases.get(lease_id)
        if not isinstance(lease, ReadLease):
            return Settled([], {0: Reason.LEASE_EXPIRED}, 0)
        if lease.pending:
            self._drop_pending(lease)
        places: list[Place | None] = [
            None if slot is None else slot.place() for slot in lease.slots
        ]
        leased = len(places) - places.count(None)
        if not leased or (lease.all_or_nothing and leased < len(places)):
            self.end(lease)
            return Settled([None] * len(places), lease.reasons, 0)
        if until_ns is not None:
            self.books.leases.shorten(lease, until_ns)
        if len(self.books.pools) > 1:
            self.promotions.consider(lease.slots, lease.reach, now_ns)
        return Settled(places, lease.reasons, leased)

    def _drop_pending(self, lease: ReadLease) -> None:
        for index, slot in enumerate(lease.slots):
            if slot is None:
                lease.reasons.setdefault(index, Reason.MISS_IN_PROGRESS)
        if lease.view_bytes:
            assert lease.session is not None
            bytes_left = lease.pending * lease.space.layout.block_bytes
            lease.view_bytes -= bytes_left
            lease.session.view_bytes -= bytes_left
        lease.pending = 0

    def end(self, lease: ReadLease) -> None:
        """Every hold of the lease ends, and the wait for it."""
        self.books.leases.remove(lease)
        if lease.pending:
            self.books.effects.append(Ready(lease.id))
        if lease.session is not None:
            lease.session.view_bytes -= lease.view_bytes
        release_holds(lease.slots)
        lease.slots = []


class _Request:
    """What an acquire was asked, for those who look for absent blocks. useful: how many of the keys
    it is still tried to give him.
    """

    __slots__ = ("allowed", "below", "keys", "now_ns", "prompt_tokens", "reach", "useful", "wait")

    def __init__(
        self,
        keys: Sequence[bytes],
        prompt_tokens: int,
        wait: bool,
        below: Mapping[bytes, int] | None,
        reach: frozenset[int] | None,
        allowed: int,
        now_ns: int,
    ) -> None:
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        self.wait = wait
        self.below = below
        self.reach = reach
        self.allowed = allowed
        self.now_ns = now_ns
        self.useful = len(keys)

    @property
    def brings(self) -> bool:
        """Whether the caller waits for a block that is moved to where he reaches it."""
        return self.wait or self.below is not None

    def waits_for(self, slot: Slot) -> bool:
        """Whether the caller waits for a block that is not READY, or not in reach: for one that a
        writer fills if he waits, for one that a copy fills also if he loads.
        """
        loading = slot.fill is not None and slot.fill.group is None
        return self.wait or (self.below is not None and loading)


def _as_miss(why: Reason) -> Reason:
    """A ghost's reason as the reason of a miss: what was never published was never stored."""
    return why if why.is_miss else Reason.MISS_NEVER_STORED
