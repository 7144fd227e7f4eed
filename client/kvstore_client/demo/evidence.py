"""What the demo's processes hand to each other and to the report: plain records, kept as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Claim", "Job", "Reference", "Rejection", "Transcript", "Turn", "load", "store"]


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker process is told. `mode`: "writer"; "reader", while the writer's daemon lives;
    or "survivor", after it was killed and started again.
    """

    mode: str
    data_socket: str
    admin_socket: str
    daemon_pid: int
    model_folder: str
    scratch_folder: str
    dtype: str
    random_model: bool
    turns: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn in one process. Times in milliseconds; `fresh_*` is the full prefill of the same
    prompt."""

    number: int
    prompt_tokens: int
    restored_tokens: int
    restored_bytes: int
    ideal_ms: float
    fetch_ms: float
    load_ms: float
    first_token_ms: float
    fresh_first_token_ms: float
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the demo says, and whether it was so."""

    text: str
    true: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An offer that must not be served: what was changed, and what the store answered."""

    offer: str
    restored_tokens: int
    reason: str
    differences: list[str]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the second process must reproduce: the live cache cut at the tokens that it will
    restore."""

    prompt: list[int]
    restored_tokens: int
    answer: list[int]
    logits_digest: str
    fresh_first_token_ms: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """What one worker did."""

    turns: list[Turn]
    claims: list[Claim]
    references: list[Reference] = field(default_factory=list)
    block_digests: list[str] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    memory_bytes_per_second: float = 0.0
    notes: list[str] = field(default_factory=list)


_R = TypeVar("_R", Job, Transcript)


def store(path: Path, record: Job | Transcript) -> None:
    """Writes a record; it appears whole."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
    draft.replace(path)


def load(path: Path, kind: type[_R]) -> _R:
    """Reads a record that `store` wrote."""
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if kind is Transcript:
        parts = {"turns": Turn, "claims": Claim, "references": Reference, "rejections": Rejection}
        for name, part in parts.items():
            fields[name] = [part(**values) for values in fields[name]]
    return kind(**fields)


def digest(data: bytes | memoryview) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()
