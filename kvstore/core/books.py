"""Everything that the core keeps, in one place: what its parts share.

No rules here. `core` builds it; `reads`, `writes`, `moves`, `decisions` work on it; `check` and
`stats` read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.core.arena import Arena
from kvstore.core.effects import Copy, Effect
from kvstore.core.ghosts import Ghosts
from kvstore.core.leases import GroupKey, LeaseTable, ReadLease, Session, WriteLease
from kvstore.core.pools import Slot
from kvstore.core.spaces import Space, Spaces
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.values import CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.policy.base import EvictionPolicy


@dataclass(eq=False)
class Flight:
    """A copy that was decided and is not done. It may still wait behind another copy.

    source, target: the slots, where it has them. lease: the commit that it belongs to. leaves: the
    source bears another name already, or none. durable: commits that wait for this save.
    """

    __slots__ = ("copy", "durable", "lease", "leaves", "source", "target")

    copy: Copy
    source: Slot | None
    target: Slot | None
    lease: WriteLease | None
    leaves: bool
    durable: list[WriteLease]


class Books:
    """The state of the core."""

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        tenants: Sequence[TenantSpec],
        limits: CoreLimits,
        policy: Callable[[], EvictionPolicy[Slot]],
    ) -> None:
        _check_settings(tiers, tenants)
        self.limits = limits
        self.tiers = tuple(tiers)
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.arenas: list[Arena | None] = [
            Arena(index, spec, list(tenants), limits, self._policy)
            if spec.kind is TierKind.POOL
            else None
            for index, spec in enumerate(tiers)
        ]
        self._make_policy = policy
        self._policies: dict[tuple[str, int], EvictionPolicy[Slot]] = {}
        pools = [arena for arena in self.arenas if arena is not None]
        self.pools = pools
        self.open_pools = list(pools)
        """Those that blocks may go to: all whose memory is there."""
        self.ingest = next(arena for arena in pools if arena.spec.ingest)
        self.archives = [i for i, spec in enumerate(tiers) if spec.kind is TierKind.ARCHIVE]
        self.admission = dict.fromkeys(self.archives, 0.0)
        """By archive: the least chance of another use that a write is worth."""
        self.spaces = Spaces()
        self.sessions: dict[int, Session] = {}
        self.group_sessions: dict[GroupKey, set[int]] = {}
        self.leases = LeaseTable()
        self.flights: dict[int, Flight] = {}
        self.saving: dict[tuple[int, bytes], Flight] = {}
        self.forgetting: set[tuple[int, bytes]] = set()
        self.moving = 0
        self.moving_bytes = 0
        self.loading = 0
        self.loading_bytes = 0
        self.staging_sessions: dict[int, Session] = {}
        self.staging_closing: dict[int, int] = {}
        """Since when: ns."""
        self.staging_waiting: dict[int, int] = {}
        """Session to the bytes that it needs at least, in the order of arrival."""
        self.pins: dict[int, ReadLease] = {}
        self.ghosts = Ghosts(limits.ghost_keys_max)
        self.counters: Counter[str] = Counter()
        self.effects: list[Effect] = []
        self.tickets: Counter[int] = Counter()
        self.command = 0
        self.spared = 0
        self.draining = False
        self._ids: Counter[str] = Counter()

    def _policy(self, tenant: str, slot_bytes: int) -> EvictionPolicy[Slot]:
        """Of a new pool. A tenant's blocks of one size are the same in all tiers, and so is what is
        learnt of them.
        """
        first = self._policies.get((tenant, slot_bytes))
        if first is not None:
            return first.beside()
        return self._policies.setdefault((tenant, slot_bytes), self._make_policy())

    @property
    def moves_full(self) -> bool:
        """Whether as many saves, demotions and promotions are out as may be."""
        limits = self.limits
        many = self.moving >= limits.copies_in_flight_max
        return self._fills(self.moving_bytes) or (
            many and self.moving_bytes >= limits.copies_in_flight_bytes
        )

    @property
    def loads_full(self) -> bool:
        """Whether as many loads are out as may be."""
        most = self.limits.loads_in_flight_max or self.limits.copies_in_flight_max
        return self.loading >= most or self._fills(self.loading_bytes)

    def _fills(self, copied_bytes: int) -> bool:
        return copied_bytes >= self.limits.copies_in_flight_share * self.ingest.capacity_bytes

    def next_id(self, kind: str) -> int:
        """1, 2, 3 ... for each kind; never reused."""
        self._ids[kind] += 1
        return self._ids[kind]

    def skip_ids(self, kind: str, used: int) -> None:
        """Ids up to `used` were given before a restart."""
        self._ids[kind] = max(self._ids[kind], used)

    def next_command(self, since: int = 0) -> int:
        """The number of a command that may evict: what it uses itself is no victim of it, nor what
        was used from command `since` on, if that is given.
        """
        self.command += 1
        self.spared = min(since or self.command, self.command)
        return self.command

    def arena_below(self, tier: int) -> Arena | None:
        """The next slower pool that blocks may go to."""
        return next((arena for arena in self.open_pools if arena.tier > tier), None)

    def archive_below(self, tier: int) -> int | None:
        """The next archive below a tier."""
        return next((archive for archive in self.archives if archive > tier), None)

    def space(self, session: Session, space_id: int) -> Space | Reason:
        """The space if the session may see it, else what it is told instead.

        Another tenant's space, another group's held one and one that never was look alike.
        """
        space = self.spaces.get(space_id)
        if space is not None and space.visible_to(session.tenant, session.group):
            return space
        if self.spaces.closed_why(space_id, session.tenant) is not None:
            return Reason.SPACE_CLOSED
        if space is not None and space.doubted and space.tenant == session.tenant:
            return Reason.SPACE_CLOSED  # who opens it again is told why
        return Reason.SPACE_UNKNOWN


def _check_settings(tiers: Sequence[TierSpec], tenants: Sequence[TenantSpec]) -> None:
    """BadRequest: a tier list or tenant list that the core cannot work with."""
    ingest = [t for t in tiers if t.ingest]
    if len(ingest) != 1 or ingest[0].kind is not TierKind.POOL:
        raise BadRequest(Reason.START_SETTINGS, "exactly one pool must be the ingest pool", "tiers")
    if any(t.capacity_bytes <= 0 for t in tiers):
        raise BadRequest(Reason.START_SETTINGS, "a tier needs capacity", "capacity_bytes")
    names = [tenant.name for tenant in tenants]
    if not names or len(set(names)) != len(names):
        raise BadRequest(Reason.START_SETTINGS, "tenants need distinct names", "tenants")
    if len(tiers) > 250:
        raise BadRequest(Reason.START_SETTINGS, "presence codes allow 250 tiers", "tiers")
