"""Reads what daemons recorded in their trace files: requests on both sides, look-ups, usage, holds.

Lines that are damaged, as the last one of a daemon that was killed, are counted and left out.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvstore.evidence.masking import masked, tenant_digest

__all__ = [
    "BUCKETS",
    "Records",
    "Request",
    "Source",
    "bucket_of",
    "digest_of_start",
    "read_records",
]

BUCKETS = (("< 1k", 1_024), ("1k-4k", 4_096), ("4k-16k", 16_384), ("16k-64k", 65_536))
"""Prompt lengths in tokens: name, and the first length that is too long for it."""
LAST_BUCKET = ">= 64k"


class Request(NamedTuple):
    """One reported request. Milliseconds; 0: not measured. applied: served; else the baseline."""

    at_s: float
    applied: bool
    tenant: str
    prompt_tokens: int
    tier: str
    first_token_ms: float
    prefill_ms: float
    load_ms: float
    found_tokens: int
    computed_tokens: int
    loaded_bytes: int
    failed: bool


class Source(NamedTuple):
    """One file. Times are those of its records, in seconds since 1970; 0: it has none. digest,
    size_bytes: of the lines that were read, unpacked: of a file that grows, those until then.
    """

    path: str
    digest: str
    size_bytes: int
    first_s: float
    last_s: float
    lines: int
    damaged: int


class Usage(NamedTuple):
    """What a daemon had used at some time, counted from its start."""

    at_s: float
    cpu_s: float
    rss_bytes: int
    ssd_written_bytes: int
    mismatches: int
    reviews: dict[str, int]


@dataclass(slots=True)
class Records:
    """All files together."""

    requests: list[Request] = field(default_factory=list)
    lookups: Counter[bool] = field(default_factory=Counter)
    """Prompts that were looked up, by whether they were served: a prompt in parts counts once."""
    withheld_ms: float = 0.0
    """What withheld look-ups would have saved, by the plan."""
    withheld_tokens: int = 0
    starts: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, list[Usage]] = field(default_factory=dict)
    """By the daemon process."""
    arms: Counter[str] = field(default_factory=Counter)
    sources: list[Source] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """When the first request was reported or looked up; 0: never."""
        return min((one.first_s for one in self.sources if one.first_s), default=0.0)


def read_records(paths: Iterable[Path], told: Callable[[int], None] | None = None) -> Records:
    """Reads files, plain or .gz. told: hears of bytes that were read. ValueError: a file is given
    twice, be it packed the second time, or begins as another one does. OSError, EOFError.
    """
    records = Records()
    beginnings: set[bytes] = set()
    for path in paths:
        source, beginning = _read(path, records, told or (lambda count: None))
        if beginning in beginnings:
            raise ValueError(f"{path.name} begins as another file does: each counts once")
        beginnings.add(beginning)
        records.sources.append(source)
    records.requests.sort(key=lambda one: one.at_s)
    return records


def digest_of_start(path: Path, size_bytes: int) -> tuple[str, bool]:
    """The digest of the first unpacked bytes of a file, as in `Source`, and whether there are more.
    OSError, EOFError.
    """
    hashed, left = hashlib.sha256(), size_bytes
    with _opened(path) as file:
        while left and (piece := file.read(min(left, 1 << 20))):
            hashed.update(piece)
            left -= len(piece)
        return _named(hashed), bool(file.read(1))


def _read(path: Path, records: Records, told: Callable[[int], None]) -> tuple[Source, bytes]:
    """The source, and its first line. A file may grow meanwhile: what was read is what counts."""
    hashed, size_bytes = hashlib.sha256(), 0
    first_s = last_s = 0.0
    lines = damaged = 0
    beginning = b""
    with _opened(path) as file:
        for line in file:
            told(len(line))
            hashed.update(line)
            size_bytes += len(line)
            if not line.strip():
                continue
            beginning = beginning or line
            lines += 1
            try:
                fields = json.loads(line)
                at_s = float(fields["timestamp"]) / 1e3
                _take(fields, at_s, records)
            except (ValueError, KeyError, TypeError, AttributeError):
                damaged += 1
                continue
            if fields["verb"] in ("report", "lookup"):
                first_s, last_s = min(first_s or at_s, at_s), max(last_s, at_s)
    name = str(path.absolute())
    source = Source(name, _named(hashed), size_bytes, first_s, last_s, lines, damaged)
    return source, beginning


def _opened(path: Path) -> IO[bytes]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: IO[bytes] = opener(path, "rb")
    return file


def _named(hashed: Any) -> str:
    return f"sha256:{hashed.hexdigest()}"


def _take(fields: dict[str, Any], at_s: float, records: Records) -> None:
    verb, evidence = fields["verb"], fields.get("evidence") or {}
    if verb == "report":
        records.requests.append(_request(fields, evidence, at_s))
        records.arms[evidence["arm"]] += 1
    elif verb == "lookup":
        # Only a withheld side is recorded. One that was refused has none, and is asked again.
        if not evidence.get("part") and fields.get("outcome") not in ("refused", "failed"):
            records.lookups[evidence.get("arm", "applied") == "applied"] += 1
        would = evidence.get("would_load")
        if would:
            records.withheld_ms += would["saved_ms"] or 0.0
            records.withheld_tokens += would["tokens"]
    elif verb == "start":
        one = evidence["start"]
        records.starts.append({"at_s": at_s, **one, "config": masked(str(one["config"]))})
    elif verb == "usage":
        one = evidence["usage"]
        records.usage.setdefault(one["instance"], []).append(
            Usage(
                at_s,
                float(one["cpu_s"]),
                int(one["rss_bytes"]),
                int(one["ssd_written_bytes"]),
                int(one["audit_mismatches"]),
                dict(one["reviews"]),
            )
        )


def _request(fields: dict[str, Any], evidence: dict[str, Any], at_s: float) -> Request:
    figures = evidence["request"]
    return Request(
        at_s=at_s,
        applied=evidence["arm"] == "applied",
        tenant=tenant_digest(str(fields["tenant"])),
        prompt_tokens=int(fields["input_length"]),
        tier=str(figures["tier"]),
        first_token_ms=float(figures["first_token_us"]) / 1e3,
        prefill_ms=float(figures["prefill_us"]) / 1e3,
        load_ms=float(figures["load_us"]) / 1e3,
        found_tokens=int(figures["found_tokens"]),
        computed_tokens=int(figures["computed_tokens"]),
        loaded_bytes=int(figures["loaded_bytes"]),
        failed=bool(figures["failed"]),
    )


def bucket_of(prompt_tokens: int) -> str:
    """The bucket of a prompt's length."""
    return next((name for name, end in BUCKETS if prompt_tokens < end), LAST_BUCKET)
