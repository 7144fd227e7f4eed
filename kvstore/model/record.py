"""The record of one request: what came in, what was decided, what moved, and where it went wrong.

Pure: the time is an argument. The daemon builds one record a request with a `RecordBuilder` (cheap
enough for the hot path), keeps the last ones in a `Ring` (`kvstore trace`) and may write each as a
JSON line. Every request passes five stages; the first one whose result departs from the expected is
named. It promises to hold no token and no whole key: a line shows 8 hex digits of the first and the
last key, and for each block a number folded from its key.

A JSON line is a superset of the block traces' format (`timestamp` in milliseconds from the start,
`input_length` in tokens, `hash_ids` with one id for each block and its prefix), so that a trace
file can be replayed by the simulator; `tokens_per_block` tells the size of a block.
"""

from __future__ import annotations

import enum
import json
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvstore.model.plan import Plan
from kvstore.model.reasons import Origin, Reason

__all__ = ["EXPECTED", "Outcome", "Record", "RecordBuilder", "Ring", "Stage", "hash_ids"]

KEY_BYTES: Final = 32
KEY_SHOWN_BYTES: Final = 4
RECORD_BYTES: Final = 1_024
"""What a record without its keys is counted as in a ring; measured at about 900."""


class Stage(enum.IntEnum):
    """The five stages, in their order."""

    INPUT = 0
    """Decoded and within bounds. Hands on: keys, tokens or bytes."""
    PRECONDITIONS = 1
    """Session, fingerprint, limits, deadline. Hands on: the space."""
    PLAN = 2
    """What is there, what is worth loading, what is wanted. Hands on: blocks."""
    MOVEMENT = 3
    """Copies and waiting for them. Hands on: bytes."""
    VERIFICATION = 4
    """Generation, checksum, commit. Hands on: blocks."""


class Outcome(enum.Enum):
    """What became of the request."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    DECLINED = "declined"
    """There, but not loaded, by policy: neither hit nor miss."""
    STORED = "stored"
    SKIPPED = "skipped"
    """A put that stored nothing, with a reason that is no failure of the store."""
    DONE = "done"
    """Verbs without a block: open, release, administration."""
    REFUSED = "refused"
    FAILED = "failed"


EXPECTED: Final = frozenset(
    {Reason.OK, Reason.HIT, Reason.ALREADY_PRESENT, Reason.NOTHING_TO_DO, Reason.COST_UNKNOWN}
)
"""Reasons with which a stage has done what it should; any other is a departure."""


@dataclass(slots=True)
class Record:
    """One request, finished. Times in nanoseconds of the daemon's monotonic clock.

    The four lists are indexed by `Stage`; a stage that was not reached has elapsed -1.
    """

    verb: str
    request_id: str
    tenant: str
    engine_id: str
    space_id: int
    started_ns: int
    total_ns: int
    input_kind: str
    """Type and unit of the input: "keys", "tokens", "bytes", "fingerprint", "leases"."""
    input_count: int
    input_tokens: int
    block_tokens: int
    keys: bytes
    settings: tuple[tuple[str, str | int | float], ...]
    elapsed_ns: list[int]
    values: list[int]
    units: list[str]
    reasons: list[Reason]
    plan: Plan | None
    measured_bytes: int
    measured_ns: int
    outcome: Outcome
    reason: Reason

    @property
    def origin(self) -> Origin:
        """Who has to act on the reason."""
        return self.reason.origin

    @property
    def departed(self) -> Stage | None:
        """The first stage whose result was not the expected one; None if all were."""
        for stage in Stage:
            if self.elapsed_ns[stage] >= 0 and self.reasons[stage] not in EXPECTED:
                return stage
        return None

    @property
    def size_bytes(self) -> int:
        """Memory that it is counted as."""
        return RECORD_BYTES + len(self.keys)

    def to_dict(self, origin_ns: int = 0) -> dict[str, Any]:
        """Plain form for JSON; timestamps count from `origin_ns`."""
        departed = self.departed
        fields: dict[str, Any] = {
            "timestamp": (self.started_ns - origin_ns) // 1_000_000,
            "input_length": self.input_tokens,
            "request_id": self.request_id,
            "verb": self.verb,
            "tenant": self.tenant,
            "engine_id": self.engine_id,
            "space_id": self.space_id,
            "input": {"kind": self.input_kind, "count": self.input_count},
            "outcome": self.outcome.value,
            "reason": self.reason.name,
            "origin": self.origin.value,
            "departed": None if departed is None else departed.name.lower(),
            "total_us": _us(self.total_ns),
            "stages": [self._stage(stage) for stage in Stage if self.elapsed_ns[stage] >= 0],
            "settings": dict(self.settings),
        }
        if self.plan is not None:
            fields["plan"] = self._plan(self.plan)
        if self.measured_ns:
            fields["measured"] = {"bytes": self.measured_bytes, "us": _us(self.measured_ns)}
        if self.keys:
            fields["first_key"] = self.keys[:KEY_SHOWN_BYTES].hex()
            fields["last_key"] = self.keys[-KEY_BYTES:][:KEY_SHOWN_BYTES].hex()
            fields["tokens_per_block"] = self.block_tokens
            fields["hash_ids"] = hash_ids(self.keys)
        return fields

    def to_json_line(self, origin_ns: int = 0) -> str:
        """One line of JSON without the line's end."""
        return json.dumps(self.to_dict(origin_ns), separators=(",", ":"))

    def _stage(self, stage: Stage) -> dict[str, Any]:
        return {
            "stage": stage.name.lower(),
            "us": _us(self.elapsed_ns[stage]),
            "value": self.values[stage],
            "unit": self.units[stage],
            "reason": self.reasons[stage].name,
        }

    def _plan(self, plan: Plan) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "load_blocks": plan.load_blocks,
            "recompute_tokens": plan.recompute_tokens,
            "load_ms": round(plan.load_ms, 3),
            "ideal_load_ms": round(plan.ideal_load_ms, 3),
            "recompute_ms": round(plan.recompute_ms, 3),
            "bytes_per_second": round(plan.bytes_per_second),
            "reason": plan.reason.name,
        }
        if self.measured_ns and plan.ideal_load_ms > 0:
            # The gap to the bound is what serialisation, queueing and synchronisation cost.
            fields["measured_over_ideal"] = round(self.measured_ns / 1e6 / plan.ideal_load_ms, 3)
        return fields


class RecordBuilder:
    """Takes the times of one request as it passes the stages; `finish` makes the `Record`.

    Belongs to one request. About 5 microseconds a request in all.
    """

    __slots__ = ("_last", "_mark_ns", "record")

    def __init__(
        self,
        verb: str,
        now_ns: int,
        *,
        request_id: str = "",
        tenant: str = "",
        engine_id: str = "",
        settings: tuple[tuple[str, str | int | float], ...] = (),
    ) -> None:
        """`settings`: names and values that apply to the request; shared, not copied."""
        self._mark_ns = now_ns
        self._last = -1
        self.record = Record(
            verb, request_id, tenant, engine_id, 0, now_ns, 0, "", 0, 0, 0, b"", settings,
            [-1, -1, -1, -1, -1], [0, 0, 0, 0, 0], ["", "", "", "", ""], [Reason.OK] * 5,
            None, 0, 0, Outcome.DONE, Reason.OK,
        )  # fmt: skip

    def input(
        self, kind: str, count: int, *, keys: bytes = b"", tokens: int = 0, block_tokens: int = 0
    ) -> None:
        """What came in. keys: packed, kept by reference; tokens: of the prompt, as far as known."""
        record = self.record
        record.input_kind, record.input_count = kind, count
        record.keys, record.block_tokens = keys, block_tokens
        record.input_tokens = tokens or len(keys) // KEY_BYTES * block_tokens

    def passed(
        self, stage: Stage, now_ns: int, value: int, unit: str, reason: Reason = Reason.OK
    ) -> None:
        """The stage is over. value: what it hands on, in `unit`. A stage that is passed again adds
        its time and value, and keeps its first reason that is a departure."""
        record = self.record
        before_ns = record.elapsed_ns[stage]
        record.elapsed_ns[stage] = max(before_ns, 0) + now_ns - self._mark_ns
        record.values[stage] += value
        record.units[stage] = unit
        if record.reasons[stage] in EXPECTED:
            record.reasons[stage] = reason
        self._mark_ns = now_ns
        self._last = max(self._last, stage)

    def planned(self, plan: Plan) -> None:
        """The advice that was given."""
        self.record.plan = plan

    def measured(self, length_bytes: int, elapsed_ns: int) -> None:
        """A transfer as it was measured (by the client, for its own copies); adds up."""
        self.record.measured_bytes += length_bytes
        self.record.measured_ns += elapsed_ns

    def finish(self, now_ns: int, outcome: Outcome, reason: Reason, space_id: int = 0) -> Record:
        """Ends the request. A reason that departs from the expected and was not given to a stage
        belongs to the stage that was under way."""
        record = self.record
        if reason not in EXPECTED and record.departed is None:
            stage = Stage(min(self._last + 1, Stage.VERIFICATION))
            self.passed(stage, now_ns, 0, record.units[stage], reason)
        record.total_ns = now_ns - record.started_ns
        record.outcome, record.reason, record.space_id = outcome, reason, space_id
        return record


class Ring:
    """The last records, bounded in number and in bytes; the oldest go first."""

    __slots__ = ("_bytes_max", "_records", "_records_max", "bytes", "dropped", "origin_ns")

    def __init__(self, records_max: int, bytes_max: int, origin_ns: int = 0) -> None:
        """`origin_ns`: from where timestamps count. `records_max` 0 keeps nothing."""
        self._records: deque[Record] = deque()
        self._records_max = records_max
        self._bytes_max = bytes_max
        self.bytes = 0
        self.dropped = 0
        self.origin_ns = origin_ns

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Oldest first."""
        return iter(self._records)

    def add(self, record: Record) -> None:
        """Keeps the record; drops old ones over the bounds and counts them."""
        self._records.append(record)
        self.bytes += record.size_bytes
        while len(self._records) > self._records_max or self.bytes > self._bytes_max:
            self.bytes -= self._records.popleft().size_bytes
            self.dropped += 1
            if not self._records:
                break

    def lines(self, last: int = 0, request_id: str = "", outcome: str = "") -> list[str]:
        """JSON lines of the last records that match, oldest first.

        last: at most so many; 0: all. outcome: the name of an outcome or of a reason.
        """
        found: list[Record] = []
        for record in reversed(self._records):
            if request_id and record.request_id != request_id:
                continue
            if outcome and outcome.lower() not in (
                record.outcome.value,
                record.reason.name.lower(),
            ):
                continue
            found.append(record)
            if last and len(found) == last:
                break
        return [record.to_json_line(self.origin_ns) for record in reversed(found)]


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


def _us(elapsed_ns: int) -> float:
    return round(elapsed_ns / 1e3, 1)
