"""Leases, the sessions that hold them, and the write groups that bind the parts of a block.

One table and one expiry heap for all: a read lease (copy or view), a write lease (a reservation
until it is committed), a pin (a read lease without session and deadline). Everything here is
bookkeeping; what a lease's end does to blocks is `reads`' and `writes`'.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.core.pools import Slot
from kvstore.core.staging import Extent, Staging
from kvstore.model.reasons import Reason

if TYPE_CHECKING:
    from kvstore.core.spaces import Space

GroupKey = tuple[str, bytes]
"""(tenant, group id): one engine instance."""


class Session:
    """One client connection. groups: the write groups of several parts that it takes part in."""

    __slots__ = ("group", "groups", "id", "leases", "staging", "tenant", "view_bytes")

    def __init__(self, session_id: int, tenant: str, group: bytes) -> None:
        self.id = session_id
        self.tenant = tenant
        self.group = group
        self.leases: dict[int, Lease] = {}
        self.groups: set[WriteGroup] = set()
        self.staging: Staging | None = None
        self.view_bytes = 0

    @property
    def group_key(self) -> GroupKey:
        """Whose leases it may use and end."""
        return self.tenant, self.group


class WriteGroup:
    """(space, group, attempt): the writers whose parts make one block. fills: unfinished blocks."""

    __slots__ = ("fills", "key", "sessions")

    def __init__(self, key: tuple[int, bytes, int]) -> None:
        self.key = key
        self.fills: dict[Slot, None] = {}
        self.sessions: set[Session] = set()


class LeaseKind(enum.Enum):
    """What a lease gives: kinds are counted apart."""

    COPY = "copy"
    VIEW = "view"
    WRITE = "write"
    PIN = "pin"


class ReadLease:
    """A hold on some slots: `slots` has one entry a key, None where absent or still pending.

    reach: pools that its reader can read; None: all.
    """

    __slots__ = (
        "all_or_nothing",
        "ended",
        "id",
        "kind",
        "pending",
        "reach",
        "reasons",
        "session",
        "slots",
        "space",
        "until_ns",
        "view_bytes",
    )

    def __init__(
        self, kind: LeaseKind, session: Session | None, space: Space, until_ns: int | None
    ) -> None:
        self.id = 0
        self.kind = kind
        self.session = session
        self.space = space
        self.until_ns = until_ns
        self.slots: list[Slot | None] = []
        self.reasons: dict[int, Reason] = {}
        self.pending = 0
        self.view_bytes = 0
        self.reach: frozenset[int] | None = None
        self.all_or_nothing = False
        self.ended = False


class WriteState(enum.Enum):
    """RESERVED -commit-> COPYING -> COPIED; RESERVED -deadline-> EXPIRED."""

    RESERVED = "reserved"
    COPYING = "copying"
    COPIED = "copied"
    EXPIRED = "expired"


class WriteLease:
    """The right to write one part of some blocks.

    slots, generations, offsets: one entry a wanted block. chain: all keys of the prompt, for
    recency. visible, failed: blocks that were published or dropped. copies, saves: in flight for
    it. callers: how many wait to settle its commit; without any it goes when it can.
    """

    __slots__ = (
        "callers",
        "chain",
        "copies",
        "durable",
        "ended",
        "extents",
        "failed",
        "generations",
        "group",
        "id",
        "offsets",
        "part",
        "reason",
        "saves",
        "session",
        "slots",
        "space",
        "staging",
        "state",
        "told",
        "until_ns",
        "visible",
    )

    kind = LeaseKind.WRITE

    def __init__(
        self,
        session: Session,
        space: Space,
        group: WriteGroup,
        part: int,
        chain: list[bytes],
        staging: Staging,
        until_ns: int,
    ) -> None:
        self.id = 0
        self.session = session
        self.space = space
        self.group = group
        self.part = part
        self.chain = chain
        self.staging = staging
        self.until_ns = until_ns
        self.slots: list[Slot] = []
        self.generations: list[int] = []
        self.offsets: list[int] = []
        self.extents: list[Extent] = []
        self.state = WriteState.RESERVED
        self.copies = 0
        self.saves = 0
        self.visible = 0
        self.failed = 0
        self.reason = Reason.OK
        self.durable = False
        self.told = False
        self.callers = 0
        self.ended = False

    @property
    def waiting(self) -> int:
        """Blocks that are neither published nor dropped."""
        return len(self.slots) - self.visible - self.failed

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight for it after its commit."""
        return self.state is WriteState.COPIED and not self.saves


Lease = ReadLease | WriteLease


class LeaseTable:
    """All live leases by id, and when they end."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._heap: list[tuple[int, int]] = []
        self._dated = 0
        self._next_id = 1
        self.counts = dict.fromkeys(LeaseKind, 0)

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, lease_id: int) -> Lease | None:
        """The live lease with this id."""
        return self._leases.get(lease_id)

    def add(self, lease: Lease) -> int:
        """Gives the lease its id."""
        lease.id = self._next_id
        self._next_id += 1
        self._leases[lease.id] = lease
        self.counts[lease.kind] += 1
        if lease.session is not None:
            lease.session.leases[lease.id] = lease
        if lease.until_ns is not None:
            self._dated += 1
            heapq.heappush(self._heap, (lease.until_ns, lease.id))
        return lease.id

    def remove(self, lease: Lease) -> None:
        """The lease has ended; its id is unknown from now on."""
        lease.ended = True
        del self._leases[lease.id]
        self.counts[lease.kind] -= 1
        if lease.session is not None:
            del lease.session.leases[lease.id]
        if lease.until_ns is not None:
            self._dated -= 1
            if len(self._heap) > 64 and len(self._heap) > 2 * self._dated:
                dates: dict[int, int] = {}
                for until_ns, lease_id in self._heap:
                    if lease_id in self._leases:
                        dates[lease_id] = min(until_ns, dates.get(lease_id, until_ns))
                self._heap = [(until_ns, lease_id) for lease_id, until_ns in dates.items()]
                heapq.heapify(self._heap)

    def shorten(self, lease: Lease, until_ns: int) -> None:
        """Brings a lease's deadline forward; a later one changes nothing."""
        if lease.until_ns is not None and until_ns < lease.until_ns:
            lease.until_ns = until_ns
            heapq.heappush(self._heap, (until_ns, lease.id))

    def prolong(self, lease: Lease, until_ns: int) -> None:
        """Gives a lease whose deadline is over another one."""
        assert lease.until_ns is not None, "it had a deadline"
        lease.until_ns = until_ns
        heapq.heappush(self._heap, (until_ns, lease.id))

    def due(self, now_ns: int) -> Iterator[Lease]:
        """The live leases whose deadline is over; each is given once."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, lease_id = heapq.heappop(self._heap)
            lease = self._leases.get(lease_id)
            if lease is not None:
                yield lease

    def next_due_ns(self) -> int | None:
        """When the next deadline ends."""
        while self._heap and self._heap[0][1] not in self._leases:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def dated(self) -> set[int]:
        """Ids in the expiry heap, for `check`."""
        return {lease_id for _, lease_id in self._heap}
