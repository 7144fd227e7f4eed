"""The values that the core takes and gives: tiers, limits, places, regions, answers to commands.

Pure and immutable. The shell builds the settings and reads the answers; the core builds the
answers. Bytes are counted in bytes, times in nanoseconds of the shell's monotonic clock. A tier is
its index in the configured list, fastest first.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.model.fingerprint import Difference, Fingerprint, Verdict
from kvstore.model.layout import Layout
from kvstore.model.reasons import Reason

PAGE_BYTES = 4_096
STAGING = -1
"""`Place.tier` of a session's staging region."""

REPORTS_PER_CALL_MAX = 256
"""Reports of requests in one call, and of audits: each makes a record on the daemon's loop."""


class TierKind(enum.Enum):
    """POOL: the core names its slots. ARCHIVE: addressed by key, it ages by itself."""

    POOL = "pool"
    ARCHIVE = "archive"


class LeaseMode(enum.Enum):
    """COPY: has a deadline, the reader compares generations. VIEW: ends by release or death."""

    COPY = "copy"
    VIEW = "view"


@dataclass(frozen=True)
class TierSpec:
    """One tier. Exactly one pool is the ingest pool: commits and loads go there.

    granule_bytes: what a pool's memory comes in; regions are cut to multiples of it.
    """

    name: str
    kind: TierKind
    capacity_bytes: int
    ingest: bool = False
    granule_bytes: int = PAGE_BYTES


@dataclass(frozen=True)
class TenantSpec:
    """One tenant. `quota_bytes` holds for each pool; 0 is an equal share of its capacity.

    A quota is soft: more may be used while nobody else needs it.
    """

    name: str
    quota_bytes: int = 0


@dataclass(frozen=True)
class CoreLimits:
    """Bounds of everything that a client can make grow.

    view_bytes_per_session_max: 0 is a quarter of the ingest pool.
    staging_bytes: of one session. staging_share: of the ingest pool, over all sessions.
    pinned_share: of each pool. copies_in_flight_max: saves and demotions, and more as long as they
    have less than copies_in_flight_bytes; loads_in_flight_max: loads, 0: as many. Of either never
    more bytes than copies_in_flight_share of the ingest pool. Past it blocks are dropped unsaved,
    or not loaded. save_ahead_share: the coldest part of a pool, that is saved before it has to go;
    what is evicted unsaved is dropped then. 0: blocks are saved when they are evicted, and their
    slots wait for that. region_share: of a pool, for one region.
    """

    keys_per_call_max: int = 16_384
    leases_per_session_max: int = 10_000
    view_bytes_per_session_max: int = 0
    sessions_max: int = 256
    spaces_max: int = 1_024
    part_bytes_max: int = 256 * 2**20
    staging_bytes: int = 256 * 2**20
    staging_share: float = 0.5
    pinned_share: float = 0.5
    copies_in_flight_max: int = 256
    copies_in_flight_bytes: int = 0
    copies_in_flight_share: float = 1.0
    loads_in_flight_max: int = 0
    save_ahead_share: float = 0.0
    region_slots_min: int = 4
    region_share: float = 1 / 64
    review_ttl_ns: int = 24 * 3_600 * 10**9
    ghost_keys_max: int = 65_536

    def region_bytes(self, capacity_bytes: int) -> int:
        """Bytes of an ordinary region of a pool: what a stock of prepared memory is cut to."""
        return max(int(capacity_bytes * self.region_share) // PAGE_BYTES, 1) * PAGE_BYTES


class Place(NamedTuple):
    """Where bytes are.

    offset: within the region's data for staging, within the slot for a part, else 0. An archive is
    addressed by space and key: its region, slot and offset are 0.
    """

    tier: int
    region: int
    slot: int
    generation: int
    offset: int


@dataclass(frozen=True)
class Region:
    """Memory cut into equal slots, of one tenant and one slot size for life.

    It begins with `header_bytes`: a u64 generation for each slot, padded to pages. Slot i is at
    `header_bytes + i * slot_bytes`; `total_bytes` may be a little more than the last slot's end.
    """

    id: int
    tier: int
    tenant: str
    slot_bytes: int
    slots: int
    header_bytes: int
    total_bytes: int


# ---------------------------------------------------------------- answers of the data verbs


class Opening(NamedTuple):
    """What a fingerprint is bound to. `space_id` 0: refused, `reason` and `differences` say why.

    differences: for a new space against the nearest known fingerprint, else what was refused.
    """

    space_id: int
    verdict: Verdict
    reason: Reason
    differences: tuple[Difference, ...]
    digest: bytes
    review_id: int
    missing: tuple[str, ...]
    layout: Layout | None
    detail: str = ""


class Absence(NamedTuple):
    """Why a key is not there. `digest`: of the nearest fingerprint that holds it, if one does."""

    reason: Reason
    differences: tuple[Difference, ...] = ()
    detail: str = ""
    digest: bytes = b""


class Acquired(NamedTuple):
    """A read lease. 0: nothing was leased. `reason`: OK, or why the first absent block is."""

    lease_id: int
    ready: bool
    reason: Reason


class Settled(NamedTuple):
    """What a read lease holds: one place a key, None where absent; `reasons` say why, by index."""

    places: list[Place | None]
    reasons: dict[int, Reason]
    leased: int


class Before(NamedTuple):
    """What comes before a chain that does not begin with its prompt's first block.

    parent: key of the block before it. blocks: how many there are. since: the `mark` of the
    prompt's first reservation; what was used since then is no victim of this one.
    """

    parent: bytes = b""
    blocks: int = 0
    since: int = 0


HEAD = Before()
"""Nothing: the chain begins with the first block."""


class Reserved(NamedTuple):
    """A write lease. 0: nothing is wanted or possible.

    wanted: indexes into the chain, ascending. offsets: of this part of each wanted block in the
    staging region. present, reserved: offered blocks that are there, or being written by others.
    reason: OK, or why the rest was not taken. mark: of this moment, for `Before.since`.
    """

    lease_id: int
    wanted: list[int]
    offsets: list[int]
    staging_region: int
    present: int
    reserved: int
    reason: Reason
    part_bytes: int
    mark: int = 0


class Committed(NamedTuple):
    """`ready`: the lease can be settled now; else a Ready effect says when. `reason`: why not."""

    ready: bool
    reason: Reason


class CommitResult(NamedTuple):
    """Blocks of a commit: READY, waiting for parts of other ranks, dropped."""

    visible: int
    waiting: int
    failed: int
    reason: Reason


# ---------------------------------------------------------------- answers of the operator's verbs


class Pinned(NamedTuple):
    """A pin holds the leading `pinned` keys. `reason`: OK, or why the next one is not held."""

    pin_id: int
    pinned: int
    reason: Reason


class Dropped(NamedTuple):
    """What an invalidation made invisible; wait for `ticket` (0: none) before replying."""

    blocks: int
    spaces: int
    ticket: int


class EpochSet(NamedTuple):
    """The floor that holds now; it never falls. `ticket` 0: it was that high already."""

    epoch: int
    closed_spaces: int
    dropped_blocks: int
    ticket: int


class Reviewed(NamedTuple):
    """A decision. `space_id`: of the space that readers find now, 0 if there is none yet."""

    reason: Reason
    space_id: int
    ticket: int
    detail: str = ""


class ReviewRow(NamedTuple):
    """One held fingerprint. state: held, approved, rejected, expired, ended. doubt: why the blocks
    of a complete one are held.
    """

    review_id: int
    tenant: str
    fingerprint: Fingerprint
    missing: tuple[str, ...]
    state: str
    blocks: int
    created_ns: int
    decided_by: str
    decided_why: str
    revision: str
    doubt: str = ""


class SpaceRow(NamedTuple):
    """One space that is not closed. state: open, held."""

    space_id: int
    tenant: str
    state: str
    fingerprint: Fingerprint
    blocks: int
    bytes: int
    review_id: int


class KeyExplanation(NamedTuple):
    """What is known of a key. reason HIT: it is in pool `tier` (index); else why not, and tier -1.

    age_ns: since the last event on this key, -1: unknown.
    """

    reason: Reason
    tier: int
    generation: int
    leases: int
    age_ns: int
    differences: tuple[Difference, ...] = ()
    detail: str = ""


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True)
class PoolStats:
    """One pool. used_bytes counts regions, closing ones and staging; it never passes capacity."""

    name: str
    tier: int
    capacity_bytes: int
    used_bytes: int
    staging_bytes: int
    closing_bytes: int
    regions: int
    closing_regions: int
    free_slots: int
    blocks: int
    block_bytes: int
    pinned_bytes: int
    evictions: int


@dataclass(frozen=True)
class TenantStats:
    """One tenant, over all pools. used_bytes: of its open regions."""

    tenant: str
    used_bytes: int
    quota_bytes: int
    blocks: int
    block_bytes: int


@dataclass(frozen=True)
class CoreStats:
    """A snapshot. Gauges are as of now, `counters` only grow."""

    pools: tuple[PoolStats, ...]
    tenants: tuple[TenantStats, ...]
    sessions: int
    read_leases: int
    view_leases: int
    write_leases: int
    pins: int
    copies_in_flight: int
    saves_in_flight: int
    spaces_open: int
    spaces_held: int
    reviews_held: int
    counters: dict[str, int] = field(default_factory=dict)
