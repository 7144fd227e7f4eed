"""Why: one list of reasons for every outcome, where each comes from, and the error tree.

    KVStoreError                reason, detail, setting
    |- BadRequest               the caller's input is wrong; sending it again will fail again
    |- FingerprintMismatch      the bytes belong to another model; carries the fields that differ
    |- NoSpace                  a pool, quota or limit is full; the retry may succeed
    |- LeaseExpired             the right to read or write has ended
    |- BlockCorrupt             bytes are not those that were committed
    |- Unavailable              the store is away, draining or too slow
    `- StartError               the daemon cannot start; names the setting to change

The numbers go on the wire and into trace files: a number is never given a second meaning, and a
reason that is retired leaves a hole. 0 is what a peer sends that says nothing. Any layer may import
this module.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvstore.model.fingerprint import Difference


class Origin(enum.Enum):
    """Where a reason comes from, hence who can act on it; a defect is ours."""

    DATA = "data"
    SETTINGS = "settings"
    POLICY = "policy"
    RESOURCES = "resources"
    DEFECT = "defect"


class Reason(enum.IntEnum):
    """The outcome of a request, or of one block in it. The numbers are stable."""

    UNSPECIFIED = 0

    # Outcomes that are no trouble.
    OK = 1
    HIT = 2
    ALREADY_PRESENT = 3
    ALREADY_RESERVED = 4
    NOTHING_TO_DO = 5
    COST_UNKNOWN = 6
    ABORTED = 7
    CANCELLED = 8

    # Misses: why a block is not there.
    MISS_NEVER_STORED = 20
    MISS_EVICTED = 21
    MISS_NOT_ADMITTED = 22
    MISS_INCOMPATIBLE = 23
    MISS_EPOCH_STALE = 24
    MISS_INVALIDATED = 25
    MISS_CORRUPT = 26
    MISS_IN_PROGRESS = 27

    # What policy or a person decided.
    DECLINED_RECOMPUTE_FASTER = 40
    DECLINED_HOLDOUT = 41
    DECLINED_GUARD = 42
    HELD_FOR_REVIEW = 43
    REJECTED_BY_REVIEW = 44
    NOT_ADMITTED = 45
    UNCACHEABLE = 46
    DECLINED_SHADOW = 47
    HELD_BY_AUDIT = 48

    # Leases, sessions, spaces.
    LEASE_EXPIRED = 60
    LEASE_UNKNOWN = 61
    SESSION_UNKNOWN = 62
    SPACE_UNKNOWN = 63
    SPACE_CLOSED = 64
    GENERATION_CHANGED = 65
    WRITE_GROUP_FAILED = 66
    REGION_UNKNOWN = 67

    # Room.
    NO_SPACE = 80
    STAGING_BUSY = 81
    VIEW_LIMIT = 82
    QUOTA_EXCEEDED = 83
    PIN_LIMIT = 84
    DISK_FULL = 85
    LIMIT_LEASES = 86
    LIMIT_SESSIONS = 87
    LIMIT_QUEUE = 88

    # Movement and availability.
    COPY_FAILED = 100
    DEADLINE_EXCEEDED = 101
    UNAVAILABLE = 102
    BREAKER_OPEN = 103
    DRAINING = 104
    IO_ERROR = 105
    NO_DURABLE_TIER = 106

    # Requests that are wrong.
    BAD_REQUEST = 120
    BAD_KEY_LENGTH = 121
    BAD_SIZE = 122
    TOO_MANY_KEYS = 123
    MESSAGE_TOO_LARGE = 124
    PART_TOO_LARGE = 125
    BAD_PART = 126
    BAD_FINGERPRINT = 127
    BAD_TOKENS = 128
    BAD_EXTRAS = 129
    BAD_NAME = 130
    PROTOCOL_VERSION = 131
    PERMISSION_DENIED = 132
    NOT_SUPPORTED = 133

    # The daemon cannot start.
    START_MEMORY = 150
    START_LOCKED = 151
    START_SETTINGS = 152
    START_DISK = 153
    START_SOCKET = 154

    INTERNAL = 255

    @classmethod
    def from_wire(cls, number: int) -> Reason:
        """The reason with this number; UNSPECIFIED for a number of a newer peer."""
        try:
            return cls(number)
        except ValueError:
            return cls.UNSPECIFIED

    @property
    def origin(self) -> Origin:
        """Where the reason comes from."""
        return _FACTS[self].origin

    @property
    def text(self) -> str:
        """One line for a person: what happened, and what to do about it."""
        return _FACTS[self].text

    @property
    def is_miss(self) -> bool:
        """True if it says why a block is not there."""
        return 20 <= self.value < 40

    @property
    def is_declined(self) -> bool:
        """True if policy decided not to load what is there: neither hit nor miss."""
        return self.name.startswith("DECLINED_")

    @property
    def is_retryable(self) -> bool:
        """True if the same request may succeed a little later, with nothing changed by hand."""
        return self in _RETRYABLE


class _Facts(NamedTuple):
    origin: Origin
    text: str


_FACTS: dict[Reason, _Facts] = {
    Reason.UNSPECIFIED: _Facts(
        Origin.DEFECT, "The peer gave no reason that this version knows; compare the versions."
    ),
    Reason.OK: _Facts(Origin.DATA, "Done."),
    Reason.HIT: _Facts(Origin.DATA, "The block is there."),
    Reason.ALREADY_PRESENT: _Facts(
        Origin.DATA, "The block is stored already; the first writer wins, nothing to do."
    ),
    Reason.ALREADY_RESERVED: _Facts(
        Origin.DATA, "Another writer is storing this block; skip it, or wait for it with acquire."
    ),
    Reason.NOTHING_TO_DO: _Facts(
        Origin.DATA, "The prompt is empty or shorter than one block; only full blocks are stored."
    ),
    Reason.COST_UNKNOWN: _Facts(
        Origin.SETTINGS,
        "No prefill cost is known, so load or recompute was not weighed; give the client a cost.",
    ),
    Reason.ABORTED: _Facts(Origin.DATA, "The writer gave the reservation up; nothing was stored."),
    Reason.CANCELLED: _Facts(Origin.DATA, "The caller cancelled the request."),
    Reason.MISS_NEVER_STORED: _Facts(
        Origin.DATA, "Nobody stored this block; expected for the first request with a prompt."
    ),
    Reason.MISS_EVICTED: _Facts(
        Origin.RESOURCES, "The block was evicted to make room; give the tier more bytes."
    ),
    Reason.MISS_NOT_ADMITTED: _Facts(
        Origin.POLICY, "The block left memory and the slower tier did not admit it; see admission."
    ),
    Reason.MISS_INCOMPATIBLE: _Facts(
        Origin.DATA,
        "The prefix is stored for another fingerprint; see which fields differ with explain.",
    ),
    Reason.MISS_EPOCH_STALE: _Facts(
        Origin.POLICY, "The block was made before the model's weight epoch was raised."
    ),
    Reason.MISS_INVALIDATED: _Facts(Origin.POLICY, "An operator invalidated the block."),
    Reason.MISS_CORRUPT: _Facts(
        Origin.RESOURCES, "The block failed its checksum and was dropped; check the device."
    ),
    Reason.MISS_IN_PROGRESS: _Facts(
        Origin.DATA, "The block is being written or loaded; wait for it with acquire."
    ),
    Reason.DECLINED_RECOMPUTE_FASTER: _Facts(
        Origin.POLICY, "The block is there, but recomputing is predicted to be faster than loading."
    ),
    Reason.DECLINED_HOLDOUT: _Facts(
        Origin.SETTINGS, "The request is in the share that is held out for comparison."
    ),
    Reason.DECLINED_GUARD: _Facts(
        Origin.RESOURCES, "A guard stopped the tier; it is probed again by itself. See status."
    ),
    Reason.HELD_FOR_REVIEW: _Facts(
        Origin.DATA,
        "A required field is missing, or blocks came back damaged: see `kvstore review`.",
    ),
    Reason.REJECTED_BY_REVIEW: _Facts(Origin.POLICY, "An operator rejected this fingerprint."),
    Reason.NOT_ADMITTED: _Facts(Origin.POLICY, "The policy did not admit the block."),
    Reason.UNCACHEABLE: _Facts(
        Origin.DATA, "The tokens do not say the content and no digest does; pass content digests."
    ),
    Reason.DECLINED_SHADOW: _Facts(
        Origin.SETTINGS,
        "Shadow mode (serve.share is 0): what would be loaded is recorded, nothing is loaded.",
    ),
    Reason.HELD_BY_AUDIT: _Facts(
        Origin.DATA,
        "A stored block was not what an engine computes; nobody reads it before `kvstore review`.",
    ),
    Reason.LEASE_EXPIRED: _Facts(
        Origin.SETTINGS, "The lease ended before its use; copy sooner or ask for a longer one."
    ),
    Reason.LEASE_UNKNOWN: _Facts(
        Origin.DATA, "No such lease in this session's group: released already, or never granted."
    ),
    Reason.SESSION_UNKNOWN: _Facts(
        Origin.DATA, "No such session: the daemon restarted or ended it; attach again."
    ),
    Reason.SPACE_UNKNOWN: _Facts(Origin.DATA, "No such space for this tenant; open it again."),
    Reason.SPACE_CLOSED: _Facts(
        Origin.POLICY, "The space was closed by invalidation, review or epoch; open it again."
    ),
    Reason.GENERATION_CHANGED: _Facts(
        Origin.RESOURCES, "The slot was reused while it was read; the copy was discarded."
    ),
    Reason.WRITE_GROUP_FAILED: _Facts(
        Origin.DATA, "Another rank of the write group failed or ended; the block was dropped."
    ),
    Reason.REGION_UNKNOWN: _Facts(
        Origin.DATA, "No such region for this session: it was reclaimed; acquire again."
    ),
    Reason.NO_SPACE: _Facts(
        Origin.RESOURCES, "Every slot is leased or pinned; release leases or raise the capacity."
    ),
    Reason.STAGING_BUSY: _Facts(
        Origin.RESOURCES, "The session's staging is full; commit first, or raise staging bytes."
    ),
    Reason.VIEW_LIMIT: _Facts(
        Origin.RESOURCES, "Views hold all the bytes a session may hold; release some, or copy."
    ),
    Reason.QUOTA_EXCEEDED: _Facts(
        Origin.SETTINGS, "The tenant is over its quota and nothing of its own can be evicted."
    ),
    Reason.PIN_LIMIT: _Facts(
        Origin.SETTINGS, "Pinned bytes would pass half of the tier; unpin something."
    ),
    Reason.DISK_FULL: _Facts(
        Origin.RESOURCES, "The disk is full; writing resumes by itself when there is room."
    ),
    Reason.LIMIT_LEASES: _Facts(
        Origin.SETTINGS, "The session holds as many leases as it may; release some."
    ),
    Reason.LIMIT_SESSIONS: _Facts(
        Origin.SETTINGS, "As many sessions as allowed are attached; end some or raise the limit."
    ),
    Reason.LIMIT_QUEUE: _Facts(Origin.RESOURCES, "Too many requests wait; retry a little later."),
    Reason.COPY_FAILED: _Facts(Origin.RESOURCES, "The copy failed; the block counts as a miss."),
    Reason.DEADLINE_EXCEEDED: _Facts(
        Origin.RESOURCES, "The deadline passed; counted as a miss or a skipped push."
    ),
    Reason.UNAVAILABLE: _Facts(
        Origin.RESOURCES, "The daemon cannot be reached; the engine goes on without it."
    ),
    Reason.BREAKER_OPEN: _Facts(
        Origin.RESOURCES, "Calls failed in a row, so none is made for a while; probed by itself."
    ),
    Reason.DRAINING: _Facts(Origin.POLICY, "The daemon is shutting down and takes nothing new."),
    Reason.IO_ERROR: _Facts(
        Origin.RESOURCES, "The device failed a read or write; see its log and health."
    ),
    Reason.NO_DURABLE_TIER: _Facts(
        Origin.SETTINGS, "A durable commit was asked for and no durable tier is configured."
    ),
    Reason.BAD_REQUEST: _Facts(Origin.DATA, "The request is malformed; see the detail."),
    Reason.BAD_KEY_LENGTH: _Facts(Origin.DATA, "Keys are 32 bytes each, packed without gaps."),
    Reason.BAD_SIZE: _Facts(Origin.DATA, "A size or number is out of range; see the detail."),
    Reason.TOO_MANY_KEYS: _Facts(Origin.DATA, "Too many keys in one call; split it."),
    Reason.MESSAGE_TOO_LARGE: _Facts(Origin.DATA, "The message is larger than allowed; split it."),
    Reason.PART_TOO_LARGE: _Facts(
        Origin.SETTINGS, "A part is larger than allowed; use smaller blocks or raise the limit."
    ),
    Reason.BAD_PART: _Facts(Origin.DATA, "No such part in this layout; check the rank and sizes."),
    Reason.BAD_FINGERPRINT: _Facts(
        Origin.DATA, "A fingerprint field is malformed, unknown or contradicts another."
    ),
    Reason.BAD_TOKENS: _Facts(Origin.DATA, "Token ids are whole numbers from 0 to 2^32-1."),
    Reason.BAD_EXTRAS: _Facts(
        Origin.DATA, "The extras are malformed; they are never taken for absent ones."
    ),
    Reason.BAD_NAME: _Facts(
        Origin.DATA, "Names are 1 to 256 bytes of UTF-8 without control characters."
    ),
    Reason.PROTOCOL_VERSION: _Facts(
        Origin.SETTINGS, "Client and daemon speak different major versions; upgrade one of them."
    ),
    Reason.PERMISSION_DENIED: _Facts(
        Origin.SETTINGS, "This way in may not do that; check socket mode, certificate or token."
    ),
    Reason.NOT_SUPPORTED: _Facts(Origin.SETTINGS, "This build or configuration cannot do that."),
    Reason.START_MEMORY: _Facts(
        Origin.SETTINGS, "The configured memory does not fit into this machine or its cgroup."
    ),
    Reason.START_LOCKED: _Facts(
        Origin.SETTINGS, "Another daemon uses this folder; stop it or configure another folder."
    ),
    Reason.START_SETTINGS: _Facts(Origin.SETTINGS, "A setting is wrong; the detail names it."),
    Reason.START_DISK: _Facts(
        Origin.SETTINGS, "The disk folder cannot be used; check path, rights and free bytes."
    ),
    Reason.START_SOCKET: _Facts(
        Origin.SETTINGS, "The socket cannot be bound; check path, rights and running daemons."
    ),
    Reason.INTERNAL: _Facts(Origin.DEFECT, "A defect of kvstore; please report it with the trace."),
}

_RETRYABLE: frozenset[Reason] = frozenset(
    {
        Reason.ALREADY_RESERVED,
        Reason.MISS_IN_PROGRESS,
        Reason.DECLINED_GUARD,
        Reason.NO_SPACE,
        Reason.STAGING_BUSY,
        Reason.VIEW_LIMIT,
        Reason.DISK_FULL,
        Reason.LIMIT_LEASES,
        Reason.LIMIT_SESSIONS,
        Reason.LIMIT_QUEUE,
        Reason.DEADLINE_EXCEEDED,
        Reason.UNAVAILABLE,
        Reason.BREAKER_OPEN,
        Reason.DRAINING,
    }
)


class KVStoreError(Exception):
    """Root of the tree.

    detail: what exactly. setting: the setting or argument to change, if one would help.
    """

    def __init__(self, reason: Reason, detail: str, setting: str | None = None) -> None:
        super().__init__(reason, detail, setting)
        self.reason = reason
        self.detail = detail
        self.setting = setting

    def __str__(self) -> str:
        hint = f" (setting: {self.setting})" if self.setting else ""
        return f"{self.reason.name}: {self.detail}{hint}"


class BadRequest(KVStoreError):
    """The caller's input is wrong; it will fail again."""


class FingerprintMismatch(KVStoreError):
    """The bytes belong to another model; `differences` has each field, stored and offered."""

    def __init__(
        self,
        reason: Reason,
        detail: str,
        setting: str | None = None,
        differences: tuple[Difference, ...] = (),
    ) -> None:
        super().__init__(reason, detail, setting)
        self.differences = differences


class NoSpace(KVStoreError):
    """A pool, quota or limit is full."""


class LeaseExpired(KVStoreError):
    """The right to read or write has ended."""


class BlockCorrupt(KVStoreError):
    """Bytes are not those that were committed."""


class Unavailable(KVStoreError):
    """The store is away, draining or too slow."""


class StartError(KVStoreError):
    """The daemon cannot start; `setting` names what to change."""
