"""A folder that outlives its daemons, each of which is killed: how the next one starts on it, and
what has to be there then. For the stages kill-loop and kill-points.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvstore.tiers.disk.verify import verify
from tests.daemon import DaemonDied
from tests.e2e.stage import Prompt
from tests.rawclient import Refused
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.oracle import (
    Away,
    Client,
    Oracle,
    check_durable,
    check_quiet,
    until_loaded,
)

START_S_MAX = 10.0
"""From the start of the process until the disk tier has loaded its index; its bound is a second."""
GIVEN_UP_S = 60.0
LOAD_MAX = 4.0
"""Processes that want each core; with more no time says anything of a daemon."""
MIB = 1 << 20
ROOMY = (96 * MIB,)
"""Capacity of a folder in which nothing has to make room."""
TIGHT = (8 * MIB, 12 * MIB, 20 * MIB)
"""Those of a folder in which slots and segments change hands; another at each start."""
LOG_LINES = 3
BAD_NEWS = ("Traceback", "a record was dropped", "is stopped, and tried again")
"""That no daemon has to write, since nothing but a kill was wrong."""


class KilledFolder:
    """See the module's docstring. `daemon` is the one that is there, if it is alive."""

    def __init__(self, job: Job, outcome: Outcome, name: str, capacities: Sequence[int]) -> None:
        self.name = name
        self.outcome = outcome
        self.oracle = Oracle(outcome)
        self.starts_s: list[float] = []
        self.roomy = len(capacities) == 1
        self.capacities = capacities
        self._folder = job.folder / name
        self._folder.mkdir()
        self.disk_path = self._folder / "disk"
        self.daemon = daemon_of(
            job,
            self._folder,
            host__capacity_bytes="6MiB",
            host__staging_bytes="1MiB",
            disk__path=str(self.disk_path),
            disk__capacity_bytes=capacities[0],
            server__drain_grace_s=2,
        )

    @contextlib.contextmanager
    def named(self, where: str) -> Iterator[None]:
        """Says in each finding where it was found. A call that was refused is one."""
        marks = len(self.outcome.wrong), len(self.outcome.failed)
        try:
            yield
        except Refused as error:
            self.oracle.failed(f"a call was refused: {error}")
        finally:
            for found, mark in zip((self.outcome.wrong, self.outcome.failed), marks, strict=True):
                found[mark:] = [f"{where}, {self.name}: {text}" for text in found[mark:]]

    def choose_capacity(self, rng: random.Random) -> None:
        """For the next start."""
        self.daemon.settings["disk.capacity_bytes"] = rng.choice(self.capacities)

    def start(self) -> bool:
        """Until its index is loaded; a start that fails, or takes too long, is a failure."""
        began = time.monotonic()
        try:
            self.daemon.start(GIVEN_UP_S)
            until_loaded(self.daemon, self.oracle, GIVEN_UP_S)
        except (DaemonDied, AssertionError, Away) as error:
            self.oracle.failed(f"the start failed: {last_lines(str(error))}")
            return False
        took_s = time.monotonic() - began
        self.starts_s.append(took_s)
        if os.getloadavg()[0] > LOAD_MAX * (os.cpu_count() or 1):
            self.outcome.counts["starts not timed, the machine is busy"] += 1
        elif took_s > START_S_MAX:
            self.oracle.failed(f"ready and loaded after {took_s:.1f} s, not {START_S_MAX:.0f}")
        return True

    def kill(self) -> None:
        """SIGKILL, if it is alive; what only it knew is gone."""
        self.daemon.kill()
        self.oracle.restarted()

    def stop(self) -> None:
        """SIGTERM, after which it ends with 0."""
        code = self.daemon.stop()
        if code != 0:
            self.oracle.failed(f"SIGTERM: it ended with {code}: {last_lines(self.daemon.log())}")
        self.oracle.restarted()

    def check(self, client: Client, prompts: Iterable[Prompt]) -> None:
        """Reads all, and what has to be there after a restart has to be."""
        asked = list({id(prompt): prompt for prompt in prompts}.values())
        for prompt in asked:
            self.outcome.counts["blocks read"] += client.get(prompt)
        if self.roomy:
            self.outcome.counts["durable blocks read"] += check_durable(client, asked)

    def check_books(self) -> None:
        """Nobody has a client any more: the daemon's accounts against each other and the folder."""
        capacity_bytes = int(self.daemon.settings["disk.capacity_bytes"])
        check_quiet(self.daemon, self.oracle, capacity_bytes=capacity_bytes)

    def verify(self) -> None:
        """Checks the folder, which no daemon has now."""
        report = verify(str(self.disk_path))
        self.outcome.counts["folders checked"] += 1
        self.outcome.counts["records checked"] += report.right
        if not report.ok:
            self.oracle.failed(f"verify: {report.damage_counts}: {report.damages[:3]}")

    def close(self) -> None:
        """Ends what is left, and looks through what all the daemons have written."""
        if self.daemon.alive:
            self.daemon.kill()
        bad = Counter(name for name in BAD_NEWS for _ in range(self.daemon.log().count(name)))
        for name, count in bad.items():
            self.oracle.failed(f"{self.name}: the daemons wrote {name!r} {count} times")


def count_starts(outcome: Outcome, folders: Sequence[KilledFolder]) -> None:
    """How long they took."""
    starts = sorted(took_s for folder in folders for took_s in folder.starts_s)
    if starts:
        outcome.counts["start ms, median"] = int(starts[len(starts) // 2] * 1e3)
        outcome.counts["start ms, longest"] = int(starts[-1] * 1e3)


def last_lines(text: str) -> str:
    """The end of what a daemon wrote, in one line."""
    return " | ".join(text.strip().splitlines()[-LOG_LINES:])
