"""Values of `async_tier`: answers, deadlines, questions and jobs, how a job ended, and what is
counted.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "OUTCOMES",
    "Answer",
    "Asked",
    "Deadlines",
    "Finished",
    "Job",
    "Question",
    "Request",
    "runs",
    "trace_id",
]

REQUEST_ID_BYTES_MAX = 128
"""Of the engine's request id in the daemon's trace."""

OUTCOMES: Final = (
    "lookup_hit",
    "lookup_miss",
    "lookup_declined",
    "lookup_late",
    "load_loaded",
    "load_failed",
    "store_stored",
    "store_present",
    "store_dropped",
    "reset",
)
"""What is counted, in blocks, and resets; described on the engines' pages in deploy/docs."""


class Answer(enum.Enum):
    """What is known of a key."""

    RETRY = "retry"
    HIT = "hit"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Milliseconds that a lookup, a load or a store may take, from when the engine asked for it;
    what is not done by then is a miss, or is not stored.
    """

    lookup_ms: int = 250
    load_ms: int = 2_000
    store_ms: int = 5_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 600_000:
                raise ValueError(f"{name} is an int from 1 to 600000, not {value!r}")


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job ended.

    success: of all its keys. keys: those that are in their rows; of a store job all or none.
    seconds, bytes: of the whole call, and what it moved.
    """

    job_id: int
    load: bool
    success: bool
    keys: tuple[bytes, ...]
    seconds: float
    bytes: int


@dataclass(slots=True)
class Asked:
    """One key of one request. `failed`: it was there and could not be loaded."""

    key: bytes
    answer: Answer = Answer.RETRY
    asked_ns: int = 0
    failed: bool = False


@dataclass(slots=True)
class Request:
    keys: dict[bytes, Asked] = field(default_factory=dict)
    new: list[Asked] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Question:
    request_id: str
    asked: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """`keys[i]` belongs to `rows[i]`; `chain`: the prompt's keys up to the last of them."""

    submitted_ns: int
    job_id: int
    request_id: str
    load: bool
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    chain: tuple[bytes, ...] = ()


def runs(indexes: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indexes as ranges without a gap: (first, end)."""
    runs: list[tuple[int, int]] = []
    for index in indexes:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def trace_id(request_id: str) -> str:
    """As much of it as the daemon's trace takes."""
    return request_id.encode("utf-8", "replace")[:REQUEST_ID_BYTES_MAX].decode("utf-8", "ignore")
