"""Stage B: kill at every point that can be named, one after the other, and none left out.

    engine      each call of the disk tier that changes a device (`tests.torture.engine`)
    failpoint   before and after the first, second and third call of each named place of a daemon,
                of those that do not depend on time
    syscall     the n-th system call of a kind that a thread of a daemon makes, by strace

A dry run says what there is to visit. Points of a daemon form a chain: the start after a kill
checks what the kill left, and is itself killed at the next point. The list is printed, and a point
that was not visited is a failure.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.model.fingerprint import Fingerprint
from kvstore.tiers.disk.opening import tree_bytes
from tests.daemon import DaemonDied, _python_path
from tests.e2e.stage import Prompt, altered, model
from tests.torture import failpoints, mutants
from tests.torture.base import Job, Outcome
from tests.torture.daemons import MODULE
from tests.torture.killed_folder import (
    GIVEN_UP_S,
    ROOMY,
    TIGHT,
    KilledFolder,
    count_starts,
    last_lines,
)
from tests.torture.oracle import Away, Client, until_loaded

CALLS_MAX = 3
"""Of a place: so many calls are killed at."""
SYSCALL_POINTS = 80
SYSCALLS = (
    "pwrite64", "pwritev", "pwritev2", "writev", "fdatasync", "fsync", "rename", "renameat2",
    "unlink", "unlinkat", "rmdir", "mkdir", "fallocate",
)  # fmt: skip
"""Those that change what is on a device, or when it is."""
STRACE = ("strace", "-f", "-qq")
ACTS_MAX = 4
"""Rounds of the script within which a thread has to make its n-th call."""
ACTS = {"failpoint": (1, ACTS_MAX), "syscall": (ACTS_MAX, ACTS_MAX)}
"""Which thread takes what, what is worth a write, and how long a drain lasts, is chance: two starts
may get to a point.
"""
CAPACITY_BYTES_MIN = 3 << 20
SHRUNK_SHARE = 0.75
"""Of what a folder takes: segments go as soon as it is opened."""
SHM = Path("/dev/shm")

DAMAGED_FIRST = ("disk.set_aside", "disk.install", "disk.drop_aside", "disk.create")
"""Places that a daemon gets to for sure if it has to set a folder aside and begin anew."""
SHRUNK = "disk.unlink"
"""That it gets to for sure if a folder was filled and has less room now."""
TIGHT_ONLY = (*DAMAGED_FIRST, SHRUNK)
"""Places that it gets to only where capacity is short."""
CERTAIN_CALLS = {"store.save_warmest": 1}
"""Calls that each daemon makes; how many follow depends on how quick the machine is."""


_CALL = re.compile(r"^(\d+) +([a-z0-9]+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Point:
    """Where a daemon is killed. name: of the place with before or after, or of the system call."""

    kind: str
    name: str
    nth: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.nth}"


class KillPoints:
    name = "kill-points"
    what = "kill at each call that changes a device, named place of a daemon, and system call"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        visited = _engine_points(job, outcome)
        if not job.enough(outcome):
            visited += _daemon_points(job, outcome)
        _print(visited)
        for group, seen in visited:
            if not seen:
                outcome.failed.append(f"{group} was not visited")
        return outcome


def _print(visited: Sequence[tuple[str, bool]]) -> None:
    """All points, those of one name together: how many there were, and how many were visited."""
    groups: dict[str, list[bool]] = {}
    for name, seen in visited:
        groups.setdefault(name.rpartition(" ")[0], []).append(seen)
    for name, seen_all in groups.items():
        print(f"    {name}: {sum(seen_all)} of {len(seen_all)} visited", file=sys.stderr)


# ---------------------------------------------------------------- engine


def _engine_points(job: Job, outcome: Outcome) -> list[tuple[str, bool]]:
    """Runs `tests.torture.engine` in a process of its own."""
    # What kill -9 leaves is the same on any file system, and here a sync costs nothing.
    parent = SHM if os.access(SHM, os.W_OK) else job.folder
    visited: list[tuple[str, bool]] = []
    ended = False
    with tempfile.TemporaryDirectory(prefix="kvstore-points-", dir=parent) as folder:
        argv = [sys.executable, "-m", "tests.torture.engine", folder, str(job.seed)]
        environ = {**os.environ, "PYTHONPATH": _python_path(os.environ)}
        environ[mutants.VARIABLE] = job.mutant
        with subprocess.Popen(
            [*argv, str(float(job.scale))], stdout=subprocess.PIPE, text=True, env=environ
        ) as process:
            assert process.stdout is not None
            total = 0
            for line in process.stdout:
                said = json.loads(line)
                if "points" in said:
                    total = job.scale.of(len(said["points"]))
                    outcome.counts["engine points"] = len(said["points"])
                    continue
                ended = "ended" in said
                if ended:
                    break
                visited.append((f"engine, {said['point']}", said["visited"]))
                outcome.trials += 1
                outcome.wrong += said["wrong"]
                outcome.failed += said["failed"]
                job.progress(len(visited), total, outcome)
                if job.enough(outcome):
                    process.kill()
                    return visited
        if not ended:
            outcome.failed.append(f"engine: it ended with {process.returncode}")
    return visited


# ---------------------------------------------------------------- daemons


def _daemon_points(job: Job, outcome: Outcome) -> list[tuple[str, bool]]:
    folders = {
        "roomy": _Scripted(KilledFolder(job, outcome, "roomy", ROOMY), job.rng),
        "tight": _Scripted(KilledFolder(job, outcome, "tight", TIGHT[:2]), job.rng),
    }
    visited: list[tuple[str, bool]] = []
    try:
        for scripted in folders.values():
            scripted.fill()
        points = [*_failpoints(job, folders), *_syscalls(job, folders, outcome)]
        chosen = job.rng.sample(points, job.scale.of(len(points)))
        # Sampled in any order, so that each kill is followed by others of all kinds.
        for number, (folder, point) in enumerate(chosen):
            visited.append((str(point), folders[folder].visit(point)))
            outcome.trials += 1
            outcome.counts[f"{point.kind}s"] += 1
            job.progress(number + 1, len(chosen), outcome)
            if job.enough(outcome):
                return visited
        for scripted in folders.values():
            scripted.end()
    finally:
        for scripted in folders.values():
            scripted.kept.close()
    count_starts(outcome, [scripted.kept for scripted in folders.values()])
    return visited


def _failpoints(job: Job, folders: dict[str, _Scripted]) -> Iterator[tuple[str, Point]]:
    """By a dry run: before and after the first calls of each place, where it is called."""
    counts = {name: scripted.count_calls() for name, scripted in folders.items()}
    turn = 0
    for place in failpoints.PLACES:
        calls = min(CERTAIN_CALLS.get(place, CALLS_MAX), counts["tight"][place])
        for nth in range(1, max(calls, 1) + 1):
            for when in ("before", "after"):
                turn += 1
                only_tight = place in TIGHT_ONLY or counts["roomy"][place] < nth
                folder = "tight" if only_tight or turn % 2 else "roomy"
                yield folder, Point("failpoint", f"{place}.{when}", nth)


def _syscalls(job: Job, folders: dict[str, _Scripted], outcome: Outcome) -> list[tuple[str, Point]]:
    """By a dry run: the n-th call of each kind, up to as many as a thread made."""
    if shutil.which("strace") is None:
        outcome.skipped = "kills at system calls: there is no strace"
        return []
    counts = folders["roomy"].count_syscalls()
    if not counts:
        outcome.skipped = "kills at system calls: strace may not trace here"
        return []
    points = [
        Point("syscall", name, nth) for name, most in counts.items() for nth in range(1, most + 1)
    ]
    # Evenly over all of them, the first call of each kind included.
    step = max(1.0, len(points) / SYSCALL_POINTS)
    taken = [points[int(at * step)] for at in range(min(len(points), SYSCALL_POINTS))]
    outcome.counts["syscalls, by dry run"] = len(points)
    return [("roomy" if at % 2 else "tight", point) for at, point in enumerate(taken)]


class _Scripted:
    """A folder whose daemons all do the same: what each of them does, and where it is ended."""

    def __init__(self, kept: KilledFolder, rng: random.Random) -> None:
        self.kept = kept
        self._rng = rng
        self._main = model(16 << 10, name=f"main-{kept.name}")
        self._aged = model(4 << 10, name=f"aged-{kept.name}")
        self._prompts = [Prompt(self._main, seed, 12) for seed in range(40)]
        self._recent: list[Prompt] = []
        self._starts = 0
        self._seeds = 0
        self._epoch = 0
        self._closed: Fingerprint | None = None

    # ------------------------------------------------------------------ visits

    def fill(self) -> None:
        """What all later starts find."""
        with self.kept.named("filling"):
            if self.kept.start():
                with Client(self.kept.daemon, self.kept.oracle) as client:
                    for prompt in self._prompts:
                        client.put(prompt, durable=True)
                self.kept.stop()

    def visit(self, point: Point) -> bool:
        """A start that ends at this point; False: it did not, in two attempts."""
        return any(self._visit(point, acts) for acts in ACTS[point.kind])

    def _visit(self, point: Point, acts: int) -> bool:
        with self.kept.named(str(point)):
            if point.kind == "failpoint":
                self._arrange(point.name.rpartition(".")[0])
                code = self._run(f"{point.name}=kill,nth:{point.nth}", acts=acts)
            else:
                self._arrange("")
                inject = f"inject={point.name}:signal=SIGKILL:when={point.nth}"
                trace = (*STRACE, "-o", os.devnull, "-e", f"trace={point.name}", "-e", inject)
                code = self._run(prefix=trace, acts=acts)
            if code not in (0, -signal.SIGKILL):
                self.kept.oracle.failed(f"it ended with {code}")
        return code == -signal.SIGKILL

    def count_calls(self) -> Counter[str]:
        """How often one daemon gets to each place."""
        counts: Counter[str] = Counter()
        places = ("", SHRUNK, DAMAGED_FIRST[0]) if len(self.kept.capacities) > 1 else ("",)
        for place in places:
            notes = self.kept.disk_path.with_name(f"calls-{place}")
            asked = [f"{place}.before=note:{notes}" for place in failpoints.PLACES]
            with self.kept.named("dry run"):
                self._arrange(place)
                self._run(";".join(asked))
            seen = Counter(notes.read_text().replace(".before", "").split())
            counts |= seen
        return counts

    def count_syscalls(self) -> dict[str, int]:
        """How many calls of each kind the thread makes that makes most of them; empty: it may not
        be traced.
        """
        trace = self.kept.disk_path.with_name("trace")
        with self.kept.named("dry run, traced"):
            self._arrange("")
            asked = ("-o", str(trace), "-e", f"trace=execve,{','.join(SYSCALLS)}")
            if subprocess.run([*STRACE, *asked, "true"], check=False).returncode != 0:
                return {}
            self._run(prefix=(*STRACE, *asked))
        made = _CALL.findall(trace.read_text(errors="replace"))
        daemon, *others = [thread for thread, name in made if name == "execve"]
        most: dict[str, int] = {}
        for (thread, name), count in Counter(made).items():
            # What children do, as the one that walks the index, is not the daemon's.
            if name != "execve" and (thread == daemon or thread not in others):
                most[name] = max(count, most.get(name, 0))
        return most

    def end(self) -> None:
        """What the last kill left, and a stop as it should be."""
        with self.kept.named("end"):
            if self.kept.start():
                with Client(self.kept.daemon, self.kept.oracle) as client:
                    self.kept.check(client, self._prompts)
                self.kept.check_books()
                self.kept.stop()
                self.kept.verify()

    # ------------------------------------------------------------------ one daemon

    def _arrange(self, place: str) -> None:
        """The folder as it has to be found, so that a daemon gets to this place."""
        self._starts += 1
        capacities = self.kept.capacities
        capacity_bytes = capacities[self._starts % len(capacities)]
        if place == SHRUNK:
            self.kept.daemon.settings["disk.capacity_bytes"] = max(capacities)
            self._run()
        if place in TIGHT_ONLY:
            taken_bytes = tree_bytes(str(self.kept.disk_path))
            share = 1.0 if place in DAMAGED_FIRST else SHRUNK_SHARE
            capacity_bytes = max(int(taken_bytes * share), CAPACITY_BYTES_MIN)
        if place in DAMAGED_FIRST:
            index = self.kept.disk_path / "index"
            index.mkdir(exist_ok=True)  # the last kill may have come while it was set aside
            (index / "data.mdb").write_bytes(b"nothing of ours" * 4_096)
            self.kept.oracle.forgotten()
        self.kept.daemon.settings["disk.capacity_bytes"] = capacity_bytes

    def _run(self, points: str = "", prefix: tuple[str, ...] = (), acts: int = 1) -> int:
        """One daemon from its start to its end; its exit code."""
        daemon = self.kept.daemon
        daemon.environ[failpoints.VARIABLE] = points
        daemon.module = MODULE
        daemon.argv_prefix = prefix
        try:
            daemon.start(GIVEN_UP_S)
            self._check()
            for _ in range(acts):
                self._act()
            daemon.signal(signal.SIGTERM)
        except DaemonDied as died:
            return died.code
        except Away:
            pass
        except AssertionError as error:  # of tests.daemon: it is late
            self.kept.oracle.failed(last_lines(str(error)))
        finally:
            daemon.environ[failpoints.VARIABLE] = ""
            daemon.argv_prefix = ()
        try:
            return daemon.wait()
        except AssertionError as error:
            self.kept.oracle.failed(last_lines(str(error)))
            return 0
        finally:
            self.kept.oracle.restarted()

    # ------------------------------------------------------------------ script

    def _check(self) -> None:
        """What the kill before has left."""
        until_loaded(self.kept.daemon, self.kept.oracle)
        prompts = [*self._recent, *self._rng.sample(self._prompts, 6)]
        with Client(self.kept.daemon, self.kept.oracle) as client:
            self.kept.check(client, prompts)
            if self._closed is not None and client.space(self._closed):
                self.kept.oracle.failed("an epoch that was closed can be opened")
        self.kept.check_books()
        self._recent = []

    def _act(self) -> None:
        """Three times everything that a daemon is asked for."""
        with Client(self.kept.daemon, self.kept.oracle) as client:
            for turn in range(CALLS_MAX):
                self._turn(client, turn)

    def _turn(self, client: Client, turn: int) -> None:
        self._seeds += 1
        passing = model(16 << 10, name=f"passing-{self.kept.name}", revision=f"{self._seeds}")
        for prompt in self._some(2):
            client.put(prompt, durable=True)
            client.invalidate(prompt.fingerprint, prompt.keys[6:])
            client.put(prompt, durable=turn % 2 == 0)
        for seed in range(4):
            client.put(Prompt(passing, seed, 12))
        for prompt in self._some(4):
            client.get(prompt)
        client.put(Prompt(passing, 9, 12), durable=True)
        client.invalidate(passing)
        self._raise(client)

    def _raise(self, client: Client) -> None:
        """Whatever the epoch is by now: the next one."""
        aged = altered(self._aged, "identity", weight_epoch=self._epoch)
        self._epoch += 1
        client.put(Prompt(aged, self._epoch, 4))
        if client.raise_epoch([aged], self._epoch):
            self._closed = aged

    def _some(self, count: int) -> list[Prompt]:
        chosen = self._rng.sample(self._prompts, count)
        self._recent += chosen
        return chosen
