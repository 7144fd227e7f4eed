"""The record of one request: what came in, what was decided, what moved, and where it went wrong.

Pure: the time is an argument. The daemon builds one record a request with a `RecordBuilder` (cheap
enough for the hot path), keeps the last ones in a `Ring` (`kvstore trace`) and may write each as a
JSON line. Every request passes five stages; the first one whose result departs from the expected is
named. It promises to hold no token and no whole key: a line shows 8 hex digits of the first and the
last key, and for each block a number folded from its key.

A JSON line is a superset of the block traces' format (`timestamp` in milliseconds, `input_length`
in tokens, `hash_ids` with one id for each block and its prefix), so that the lookups of a trace
file can be replayed by the simulator; `tokens_per_block` tells the size of a block.
"""

from __future__ import annotations

import enum
import json
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvstore.model.plan import Plan
from kvstore.model.reasons import Origin, Reason

__all__ = ["EXPECTED", "Outcome", "Record", "RecordBuilder", "Ring", "Stage", "hash_ids"]

KEY_BYTES: Final = 32
KEY_SHOWN_BYTES: Final = 4
RECORD_BYTES: Final = 1_024
"""What a record without its keys is counted as in a ring; measured at about 900."""
RING_BYTES_MAX: Final = 64 << 20


class Stage(enum.IntEnum):
    """The five stages, in their order."""

    INPUT = 0
    """Decoded, within bounds, admitted."""
    PRECONDITIONS = 1
    """Session, space, fingerprint, limits."""
    PLAN = 2
    """What is there, what is worth loading, what is wanted."""
    MOVEMENT = 3
    """Copies, and waiting for them."""
    VERIFICATION = 4
    """Generation, checksum, commit; and the reply."""


class Outcome(enum.Enum):
    """What became of the request."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    DECLINED = "declined"
    """There, but not to be loaded, by policy: neither hit nor miss."""
    STORED = "stored"
    SKIPPED = "skipped"
    """A put that stored nothing."""
    DONE = "done"
    """Verbs that neither read nor write blocks."""
    REFUSED = "refused"
    FAILED = "failed"


READS: Final = frozenset({"lookup", "acquire", "fetch", "load"})
"""Verbs that end in hit, partial, miss or declined."""
WRITES: Final = frozenset({"reserve", "commit", "push"})
"""Verbs that end in stored or skipped."""

EXPECTED: Final = frozenset(
    {
        Reason.UNSPECIFIED, Reason.OK, Reason.HIT, Reason.ALREADY_PRESENT, Reason.NOTHING_TO_DO,
        Reason.COST_UNKNOWN,
    }
)  # fmt: skip
"""Reasons with which a stage has done what it should; any other is a departure."""

_FAILURES: Final = frozenset(
    {
        Reason.INTERNAL, Reason.COPY_FAILED, Reason.IO_ERROR, Reason.DEADLINE_EXCEEDED,
        Reason.UNAVAILABLE, Reason.CANCELLED, Reason.GENERATION_CHANGED, Reason.WRITE_GROUP_FAILED,
    }
)  # fmt: skip
"""Reasons for which an error counts as failed; for all others the request was refused."""

_STAGE_OF: Final = {
    Reason.MISS_INCOMPATIBLE: Stage.PRECONDITIONS,
    Reason.MISS_EPOCH_STALE: Stage.PRECONDITIONS,
    Reason.HELD_FOR_REVIEW: Stage.PRECONDITIONS,
    Reason.REJECTED_BY_REVIEW: Stage.PRECONDITIONS,
    Reason.UNCACHEABLE: Stage.INPUT,
    Reason.SPACE_UNKNOWN: Stage.PRECONDITIONS,
    Reason.SPACE_CLOSED: Stage.PRECONDITIONS,
    Reason.LEASE_UNKNOWN: Stage.PRECONDITIONS,
    Reason.PART_TOO_LARGE: Stage.PRECONDITIONS,
    Reason.BAD_PART: Stage.PRECONDITIONS,
    Reason.NOT_SUPPORTED: Stage.PRECONDITIONS,
    Reason.LEASE_EXPIRED: Stage.VERIFICATION,
    Reason.GENERATION_CHANGED: Stage.VERIFICATION,
    Reason.MISS_CORRUPT: Stage.VERIFICATION,
    Reason.WRITE_GROUP_FAILED: Stage.VERIFICATION,
    Reason.COPY_FAILED: Stage.MOVEMENT,
    Reason.IO_ERROR: Stage.MOVEMENT,
}


def _stage_of(reason: Reason, under_way: Stage) -> Stage:
    """The stage that a reason belongs to: misses, refusals for lack of room and what policy
    declined are answers of the plan; what may happen anywhere happened where the request was."""
    if reason in _STAGE_OF:
        return _STAGE_OF[reason]
    if reason.is_miss or 40 <= reason < 60 or 80 <= reason < 100 or reason == Reason.DRAINING:
        return Stage.PLAN
    return under_way


@dataclass(slots=True)
class Record:
    """One request, finished."""

    verb: str
    request_id: str
    tenant: str
    engine_id: str
    space_id: int
    wall_s: float
    """When it came, in seconds since 1970: for a person, and for the distances in a trace."""
    total_ns: int
    elapsed_ns: list[int]
    """By `Stage`; -1: not reached. They add up to `total_ns`."""
    unit: str
    """Type and unit of the input and of the value handed on: "tokens", "blocks", "leases"."""
    asked: int
    handed_on: int
    prompt_tokens: int
    """0: unknown."""
    block_tokens: int
    keys: bytes
    """Packed, by reference."""
    settings: tuple[tuple[str, str | int | float], ...]
    """Those that applied."""
    plan: Plan | None
    loaded_blocks: int
    """With the two fields below: a load as its client measured it."""
    loaded_bytes: int
    loaded_us: int
    fields: tuple[str, ...]
    """Fingerprint fields that differed."""
    outcome: Outcome
    reason: Reason
    detail: str
    departed: Stage | None
    """The first stage whose result was not the expected one; None if all were."""
    load_us: int = 0
    """From the asking for the lease until the last byte was verified; 0: not measured."""
    predicted_us: int = 0
    """What the plan had predicted for it; 0: nothing."""
    evidence: dict[str, Any] | None = None
    """The side of a comparison that the request was on, what it would have loaded, what its client
    reports or what an audit found; plain values for JSON."""

    @property
    def origin(self) -> Origin:
        """Who has to act on the reason."""
        return self.reason.origin

    @property
    def elapsed_us(self) -> float:
        """The whole request, in microseconds."""
        return self.total_ns / 1e3

    @property
    def size_bytes(self) -> int:
        """Memory that it is counted as."""
        return RECORD_BYTES + len(self.keys)

    def to_dict(self) -> dict[str, Any]:
        """Plain form for JSON."""
        fields: dict[str, Any] = {
            "timestamp": round(self.wall_s * 1e3),
            "input_length": self.prompt_tokens or len(self.keys) // KEY_BYTES * self.block_tokens,
            "request_id": self.request_id,
            "verb": self.verb,
            "tenant": self.tenant,
            "engine_id": self.engine_id,
            "space_id": self.space_id,
            "unit": self.unit,
            "asked": self.asked,
            "handed_on": self.handed_on,
            "outcome": self.outcome.value,
            "reason": self.reason.name,
            "origin": self.origin.value,
            "departed": None if self.departed is None else self.departed.name.lower(),
            "total_us": round(self.elapsed_us, 1),
            "stages_us": {
                stage.name.lower(): round(self.elapsed_ns[stage] / 1e3, 1)
                for stage in Stage
                if self.elapsed_ns[stage] >= 0
            },
            "settings": dict(self.settings),
        }
        if self.detail:
            fields["detail"] = self.detail
        if self.fields:
            fields["fields"] = list(self.fields)
        if self.plan is not None:
            fields["plan"] = _plan_fields(self.plan)
        if self.loaded_us:
            fields["loaded"] = {
                "blocks": self.loaded_blocks,
                "bytes": self.loaded_bytes,
                "us": self.loaded_us,
                "load_us": self.load_us,
                "predicted_us": self.predicted_us,
            }
        if self.evidence is not None:
            fields["evidence"] = self.evidence
        if self.keys:
            fields["first_key"] = self.keys[:KEY_SHOWN_BYTES].hex()
            fields["last_key"] = self.keys[-KEY_BYTES:][:KEY_SHOWN_BYTES].hex()
            fields["tokens_per_block"] = self.block_tokens
            fields["hash_ids"] = hash_ids(self.keys)
        return fields

    def to_json_line(self) -> str:
        """One line of JSON without the line's end."""
        return json.dumps(self.to_dict(), separators=(",", ":"))


class RecordBuilder:
    """Takes the times of one request as it passes the stages; `finish` makes the `Record`.

    Belongs to one request. About 5 microseconds a request in all.
    """

    __slots__ = ("_last", "_mark_ns", "_started_ns", "record")

    def __init__(
        self,
        verb: str,
        request_id: str,
        tenant: str,
        now_ns: int,
        wall_s: float = 0.0,
        *,
        settings: tuple[tuple[str, str | int | float], ...] = (),
    ) -> None:
        """`settings`: names and values that apply to the request; shared, not copied."""
        self._started_ns = self._mark_ns = now_ns
        self._last = -1
        self.record = Record(
            verb, request_id, tenant, "", 0, wall_s, 0, [-1, -1, -1, -1, -1], "", 0, 0, 0, 0, b"",
            settings, None, 0, 0, 0, (), Outcome.DONE, Reason.OK, "", None,
        )  # fmt: skip

    @property
    def tenant(self) -> str:
        return self.record.tenant

    @property
    def engine_id(self) -> str:
        return self.record.engine_id

    @engine_id.setter
    def engine_id(self, engine_id: str) -> None:
        self.record.engine_id = engine_id

    def prompt(
        self, space_id: int, keys: bytes = b"", block_tokens: int = 0, prompt_tokens: int = 0
    ) -> None:
        """Which blocks the request is about: what makes a record replayable. keys: packed."""
        record = self.record
        record.space_id, record.keys = space_id, keys
        record.block_tokens, record.prompt_tokens = block_tokens, prompt_tokens

    def stage(self, stage: Stage | str, now_ns: int, reason: Reason = Reason.OK) -> None:
        """The stage is over; a reason that is no expected one makes it the departure. A stage that
        is passed again adds its time."""
        at = stage if isinstance(stage, Stage) else _STAGES[stage]
        record = self.record
        elapsed_ns = record.elapsed_ns
        elapsed_ns[at] = max(elapsed_ns[at], 0) + now_ns - self._mark_ns
        self._mark_ns = now_ns
        self._last = max(self._last, at)
        if record.departed is None and reason not in EXPECTED:
            record.departed = at
            record.reason = reason

    def count(self, unit: str, asked: int, handed_on: int) -> None:
        """How much was asked for and how much was handed on; calls of one unit add up."""
        record = self.record
        if record.unit != unit:
            record.unit, record.asked, record.handed_on = unit, 0, 0
        record.asked += asked
        record.handed_on += handed_on

    def planned(self, plan: Plan) -> None:
        """The advice that was given."""
        self.record.plan = plan

    def loaded(
        self,
        request_id: str,
        blocks: int,
        length_bytes: int,
        copy_us: int,
        reason: Reason,
        *,
        load_us: int = 0,
        predicted_us: int = 0,
    ) -> None:
        """A load as its client measured it, and as it was predicted; several add up."""
        record = self.record
        record.request_id = record.request_id or request_id
        record.loaded_blocks += blocks
        record.loaded_bytes += length_bytes
        record.loaded_us += copy_us
        record.load_us += load_us
        record.predicted_us += predicted_us
        if record.departed is None and reason not in EXPECTED:
            record.departed = _stage_of(reason, Stage.MOVEMENT)
            record.reason = reason

    def differ(self, fields: Iterable[str]) -> None:
        """Fingerprint fields that differed from what is stored."""
        self.record.fields = (*self.record.fields, *fields)

    def fail(self, reason: Reason, detail: str = "") -> None:
        """The request ends here with an error, in the stage that is under way."""
        record = self.record
        if record.departed is None:
            record.departed = self._under_way()
        record.detail = detail
        record.outcome = Outcome.FAILED if reason in _FAILURES else Outcome.REFUSED

    def finish(self, reason: Reason, now_ns: int) -> Record:
        """Ends the request. The time since the last stage goes to the stage in which it ended."""
        record = self.record
        if record.departed is None and reason not in EXPECTED:
            record.departed = _stage_of(reason, self._under_way())
        if reason is not Reason.OK or record.departed is None:
            record.reason = reason
        if record.outcome is Outcome.DONE:
            record.outcome = _outcome(record)
        rest = self._under_way() if record.departed is not None else Stage.VERIFICATION
        record.elapsed_ns[rest] = max(record.elapsed_ns[rest], 0) + now_ns - self._mark_ns
        record.total_ns = now_ns - self._started_ns
        return record

    def _under_way(self) -> Stage:
        return Stage(min(self._last + 1, Stage.VERIFICATION))


_STAGES: Final = {stage.name.lower(): stage for stage in Stage}


def _outcome(record: Record) -> Outcome:
    reason, some = record.reason, record.handed_on > 0
    if reason in _FAILURES and not some:
        return Outcome.FAILED
    if record.verb in READS:
        if reason.is_declined:
            return Outcome.DECLINED
        if not some:
            return Outcome.MISS
        return Outcome.HIT if record.handed_on >= record.asked else Outcome.PARTIAL
    if record.verb in WRITES:
        return Outcome.STORED if some else Outcome.SKIPPED
    return Outcome.DONE


def outcome_without_blocks(reason: Reason) -> Outcome:
    """What a read was that handed on no block, for this reason."""
    if reason.is_declined:
        return Outcome.DECLINED
    if reason in _FAILURES or reason is Reason.BREAKER_OPEN:
        return Outcome.FAILED
    return Outcome.MISS if reason.is_miss or reason in EXPECTED else Outcome.REFUSED


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {
        "load_blocks": plan.load_blocks,
        "recompute_tokens": plan.recompute_tokens,
        "load_ms": round(plan.load_ms, 3),
        "ideal_load_ms": round(plan.ideal_load_ms, 3),
        "recompute_ms": round(plan.recompute_ms, 3),
        "bytes_per_second": round(plan.bytes_per_second),
        "reason": plan.reason.name,
        "total_ms": round(plan.split.total_ms, 3),
        "compute_only_ms": round(plan.split.compute_only_ms, 3),
        "tiers": [
            {
                "tier": one.tier,
                "found_blocks": one.found_blocks,
                "load_blocks": one.load_blocks,
                "bytes": one.length_bytes,
                "queued_bytes": one.queued_bytes,
                "load_ms": round(one.load_ms, 3),
                "recompute_ms": round(one.recompute_ms, 3),
            }
            for one in plan.tiers
        ],
    }


class Ring:
    """The last records, bounded in number and in bytes; the oldest go first."""

    __slots__ = ("_bytes_max", "_records", "_records_max", "bytes", "dropped")

    def __init__(self, records_max: int, bytes_max: int = RING_BYTES_MAX) -> None:
        """`records_max` 0 keeps nothing."""
        self._records: deque[Record] = deque()
        self._records_max = records_max
        self._bytes_max = bytes_max
        self.bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Oldest first."""
        return iter(self._records)

    def append(self, record: Record) -> None:
        """Keeps the record; drops old ones over the bounds and counts them."""
        self._records.append(record)
        self.bytes += record.size_bytes
        while len(self._records) > self._records_max or self.bytes > self._bytes_max:
            self.bytes -= self._records.popleft().size_bytes
            self.dropped += 1
            if not self._records:
                break

    def select(self, last: int = 0, request_id: str = "", outcome: str = "") -> list[Record]:
        """The last records that match, oldest first.

        last: at most so many; 0: all. outcome: the name of an outcome or of a reason.
        """
        wanted = outcome.lower()
        found: list[Record] = []
        for record in reversed(self._records):
            if request_id and record.request_id != request_id:
                continue
            if wanted and wanted not in (record.outcome.value, record.reason.name.lower()):
                continue
            found.append(record)
            if last and len(found) == last:
                break
        found.reverse()
        return found


def hash_ids(keys: bytes) -> list[int]:
    """A number under 2^53 for each packed 32-byte key: equal keys have equal numbers.

    The key's four words are combined by exclusive or, so that no part of a key can be read from it.
    """
    whole = len(keys) // KEY_BYTES
    words = struct.unpack(f"<{4 * whole}Q", keys[: whole * KEY_BYTES])
    return [
        (a ^ b ^ c ^ d) >> 11
        for a, b, c, d in zip(words[0::4], words[1::4], words[2::4], words[3::4], strict=True)
    ]
