"""Values of `async_tier`: answers, deadlines, how a job ended, and what is counted."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

__all__ = ["OUTCOMES", "Answer", "Deadlines", "Finished"]

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
