"""What a stage of the torture is, and what it says in the end.

    class KillLoop:
        name, what = "kill-loop", "kill -9 at random moments, ..."

        def run(self, job: Job) -> Outcome: ...

`stages.STAGES` lists them all. A stage ends every process that it started, leaves nothing outside
`job.folder`, and takes all chance from `job.rng`: seed and scale repeat it.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

SHOWN_MAX = 20
"""Findings of a stage that are printed; all are counted."""


class Scale(float):
    """How much of the full number of trials is run: 1.0 all of it, 0.1 a tenth."""

    def of(self, full: int, *, at_least: int = 1) -> int:
        """The number of trials where the full run has `full`."""
        return max(at_least, round(full * self))


@dataclass
class Outcome:
    """trials: what was tried, in the stage's own unit. wrong: bytes that were not what was promised
    (promise 1). failed: everything else that had to hold and did not. counts: figures for a person.
    skipped: why the stage did not run, or what of it could not; empty if all of it did.
    """

    trials: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.failed

    def entry(self, stage: str, seed: int) -> dict[str, Any]:
        """As build/torture.json has it."""
        return {
            "stage": stage,
            "trials": self.trials,
            "wrong": len(self.wrong),
            "failed": len(self.failed),
            "seeds": [seed],
            "skipped": self.skipped or None,
        }


@dataclass
class Job:
    """What a stage is given: a folder of its own, its seed, how much to do, where to say how far it
    is. mutant: the planted bug that every daemon it starts has, "" for none; until_first: end at
    the first finding, which is all that a planted bug needs.
    """

    stage: str
    folder: Path
    seed: int
    scale: Scale
    mutant: str = ""
    until_first: bool = False
    rng: random.Random = field(init=False)
    _said_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def progress(self, done: int, total: int, outcome: Outcome) -> None:
        """Says how far it is, every few seconds."""
        now = time.monotonic()
        if now - self._said_s >= 5.0 or done == total:
            self._said_s = now
            found = f"{len(outcome.wrong)} wrong, {len(outcome.failed)} failed"
            print(f"  {self.stage:14} {done:7}/{total}  {found}", file=sys.stderr, flush=True)

    def enough(self, outcome: Outcome) -> bool:
        """Whether to stop early."""
        return self.until_first and not outcome.ok


class Stage(Protocol):
    """One way to break it. name: as in build/torture.json; what: one line for a person."""

    name: str
    what: str

    def run(self, job: Job) -> Outcome: ...
