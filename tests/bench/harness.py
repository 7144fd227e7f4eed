"""Rounds, medians and the result list. A figure is a ratio of two things measured alternately in
one process."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Timed = Callable[[int], float]
"""Does round n, returns seconds."""


@dataclass(frozen=True)
class Entry:
    """One line of build/bench.json."""

    name: str
    value: float | None
    unit: str
    samples: int
    note: str


@dataclass(frozen=True)
class Ratio:
    """A median of `pairs` ratios, and a note that says how they spread."""

    value: float
    note: str
    pairs: int


@dataclass
class Results:
    """Collects entries, prints each as it comes."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, name: str, value: float | None, unit: str, samples: int, note: str) -> None:
        self.entries.append(Entry(name, value, unit, samples, note))
        shown = "not measured" if value is None else f"{value:.3f} {unit}"
        print(f"{name:40} {shown:>18}   n={samples}  {note}", flush=True)

    def add_ratio(self, name: str, ratio: Ratio, about: str = "") -> None:
        """A comparison's outcome; about: what its note begins with."""
        note = f"{about}; {ratio.note}" if about else ratio.note
        self.add(name, ratio.value, "ratio", ratio.pairs, note)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(entry) for entry in self.entries], indent=1) + "\n")


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


SECONDS_MAX = 40.0
"""So long a comparison takes at most, where the machine is slow: fewer pairs then."""
PAIRS_MIN = 4


def compare(subject: Timed, baseline: Timed, rounds: int, warmup: int = 3) -> Ratio:
    """Subject / baseline over alternating rounds.

    The order within a pair alternates as well, so that neither side always runs on the caches of
    the other.
    """
    ratios: list[float] = []
    subjects: list[float] = []
    baselines: list[float] = []
    end = time.monotonic() + SECONDS_MAX
    for number in range(warmup + rounds):
        if number % 2:
            base = baseline(number)
            took = subject(number)
        else:
            took = subject(number)
            base = baseline(number)
        if number >= warmup:
            ratios.append(took / base)
            subjects.append(took)
            baselines.append(base)
        if len(ratios) >= PAIRS_MIN and time.monotonic() > end:
            break
    low, middle, high = statistics.quantiles(ratios, n=4)
    fewer = f" ({rounds} would have taken too long)" if len(ratios) < rounds else ""
    note = (
        f"median of {len(ratios)} pairs{fewer}, quartiles {low:.2f}-{high:.2f}; "
        f"{ms(subjects):.2f} ms against {ms(baselines):.2f} ms"
    )
    return Ratio(middle, note, len(ratios))


def ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(seconds) * 1e3
