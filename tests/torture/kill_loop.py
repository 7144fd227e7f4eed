"""Stage A: kill -9 at random moments, start again, and see that all promises held.

Two folders live through all cycles. `roomy` has room for everything that is ever put, so that all
that was acknowledged as durable has to be there after each restart. `tight` has not, and another
capacity at every start, so that slots and segments change hands all the time: what it has has to be
right, at least.

A cycle: two threads put, get, invalidate and raise epochs; the daemon is killed at a random moment,
or right after an acknowledgement, while it drains, or while it starts; it starts again, and what
may be there is compared with what is.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from threading import Thread

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason
from kvstore.tiers.disk.verify import verify
from tests.daemon import Daemon, DaemonDied
from tests.e2e.stage import Prompt, altered, model
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

CYCLES = 250
VERIFY_EVERY = 25
"""Cycles after which a folder is checked while no daemon has it."""
START_S_MAX = 10.0
"""From the start of the process until the disk tier has loaded its index; its bound is a second."""
TRAFFIC_S_MAX = 0.25
START_KILL_S_MAX = 0.6
DRAIN_KILL_S_MAX = 0.15
MIB = 1 << 20

PROMPTS = 12
"""Of a model."""
BLOCKS = 12
"""Of a prompt."""
STEPS = {
    "durable put": 30,
    "put": 25,
    "get": 25,
    "invalidate": 8,
    "abandon": 5,
    "invalidate space": 1,
    "epoch": 1,
    "stats": 4,
}
"""Calls of the traffic, and how often each is made."""
EVICTIONS = ("evictions host", "evictions disk")
BUSY = (Reason.STAGING_BUSY, Reason.NO_SPACE)
MODES = ("traffic", "traffic", "traffic", "acknowledged", "acknowledged", "starting", "draining")


class KillLoop:
    name = "kill-loop"
    what = "kill -9 at random moments of a daemon with a disk tier, and what is there afterwards"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        lives = [
            _Life(job, outcome, "roomy", (96 * MIB,)),
            _Life(job, outcome, "tight", (8 * MIB, 12 * MIB, 20 * MIB)),
        ]
        cycles = job.scale.of(CYCLES, at_least=4)
        try:
            for cycle in range(cycles):
                lives[cycle % 2].cycle(cycle)
                outcome.trials += 1
                job.progress(cycle + 1, cycles, outcome)
                if job.enough(outcome):
                    break
            else:
                for life in lives:
                    life.end()
        finally:
            for life in lives:
                life.close()
        starts = sorted(took_s for life in lives for took_s in life.starts_s)
        outcome.counts["start ms, median"] = int(starts[len(starts) // 2] * 1e3) if starts else 0
        outcome.counts["start ms, longest"] = int(starts[-1] * 1e3) if starts else 0
        return outcome


# ---------------------------------------------------------------- one folder's life


class _Life:
    """A folder, its daemons one after the other, and what is known of its blocks."""

    def __init__(self, job: Job, outcome: Outcome, name: str, capacities: Sequence[int]) -> None:
        self.name = name
        self.outcome = outcome
        self.starts_s: list[float] = []
        self._job = job
        self._capacities = capacities
        self._oracle = Oracle(outcome)
        self._folder = job.folder / name
        self._folder.mkdir()
        self._daemon = daemon_of(
            job,
            self._folder,
            host__capacity_bytes="6MiB",
            host__staging_bytes="1MiB",
            disk__path=str(self._folder / "disk"),
            disk__capacity_bytes=capacities[0],
            server__drain_grace_s=2,
        )
        self._workers = [
            _Worker(self._oracle, f"{name}-0", (4 << 10, 16 << 10), roomy=self._roomy),
            _Worker(self._oracle, f"{name}-1", (16 << 10, 64 << 10), roomy=self._roomy),
        ]
        self._cycles = 0

    @property
    def _roomy(self) -> bool:
        return len(self._capacities) == 1

    def cycle(self, number: int) -> None:
        """One kill, and all that follows."""
        rng = random.Random(f"{self._job.seed} {number}")
        mode = rng.choice(MODES)
        self.outcome.counts[f"killed: {mode}"] += 1
        with self._named(f"cycle {number}, {self.name}, {mode}"):
            if not self._start(rng, kill=mode == "starting"):
                return
            self._check(rng, whole=self._cycles % 5 == 4)
            self._live(rng, mode)
            self._cycles += 1
            if self._cycles % max(VERIFY_EVERY // 2, 1) == 0:
                self._verify()

    def end(self) -> None:
        """The last start, and a stop as it should be."""
        with self._named(f"end, {self.name}"):
            if not self._start(random.Random(self._job.seed)):
                return
            self._check(random.Random(self._job.seed), whole=True)
            code = self._daemon.stop()
            if code != 0:
                self._oracle.failed(f"SIGTERM: it ended with {code}")
            self._oracle.restarted()
            self._verify()

    def close(self) -> None:
        if self._daemon.alive:
            self._daemon.kill()

    @contextlib.contextmanager
    def _named(self, where: str) -> Iterator[None]:
        """Says in each finding where it was found."""
        marks = len(self.outcome.wrong), len(self.outcome.failed)
        try:
            yield
        except Refused as error:
            self._oracle.failed(f"a call was refused: {error}")
        finally:
            for found, mark in zip((self.outcome.wrong, self.outcome.failed), marks, strict=True):
                found[mark:] = [f"{where}: {text}" for text in found[mark:]]

    # ------------------------------------------------------------------ start and kill

    def _start(self, rng: random.Random, *, kill: bool = False) -> bool:
        """Starts the daemon; False: it was killed meanwhile, or did not start."""
        daemon = self._daemon
        daemon.settings["disk.capacity_bytes"] = rng.choice(self._capacities)
        if kill:
            process = daemon.spawn()
            time.sleep(rng.uniform(0.0, START_KILL_S_MAX))
            code = process.poll()
            daemon.kill()
            if code is not None:
                self._oracle.failed(f"the start ended with {code}: {daemon.log()[-2_000:]}")
            return False
        began = time.monotonic()
        try:
            daemon.start()
        except (DaemonDied, AssertionError) as error:
            self._oracle.failed(f"the start failed: {error}")
            return False
        until_loaded(daemon, self._oracle)
        took_s = time.monotonic() - began
        self.starts_s.append(took_s)
        if took_s > START_S_MAX:
            self._oracle.failed(f"ready and loaded after {took_s:.1f} s, not {START_S_MAX:.0f}")
        return True

    def _live(self, rng: random.Random, mode: str) -> None:
        """Traffic until the end of the daemon."""
        daemon, draining = self._daemon, mode == "draining"
        fuse = _Fuse(daemon.process, rng.randint(1, 8) if mode == "acknowledged" else 0)
        threads = []
        for worker in self._workers:
            chance = random.Random(rng.random())
            threads.append(Thread(target=worker.work, args=(daemon, chance, fuse, draining)))
            threads[-1].start()
        time.sleep(rng.uniform(0.0, TRAFFIC_S_MAX))
        if draining and daemon.alive:
            daemon.signal(signal.SIGTERM)
            time.sleep(rng.uniform(0.0, DRAIN_KILL_S_MAX))
        daemon.kill()
        for thread in threads:
            thread.join()
        self._oracle.restarted()

    # ------------------------------------------------------------------ checks

    def _check(self, rng: random.Random, *, whole: bool) -> None:
        """What is there after a start, and whether the books are in order."""
        oracle = self._oracle
        prompts = [prompt for worker in self._workers for prompt in worker.prompts]
        recent = [prompt for worker in self._workers for prompt in worker.recent]
        others = prompts if whole else rng.sample(prompts, min(8, len(prompts)))
        with Client(self._daemon, oracle) as client:
            for prompt in {id(one): one for one in (*recent, *others)}.values():
                self.outcome.counts["blocks read"] += client.get(prompt)
            if self._roomy:
                asked = prompts if whole else recent
                self.outcome.counts["durable blocks read"] += check_durable(client, asked)
            for worker in self._workers:
                worker.check_epochs(client)
        capacity = int(self._daemon.settings["disk.capacity_bytes"])
        check_quiet(self._daemon, oracle, capacity_bytes=capacity)

    def _verify(self) -> None:
        """Checks the folder, which no daemon has now."""
        report = verify(str(self._folder / "disk"))
        self.outcome.counts["folders checked"] += 1
        self.outcome.counts["records checked"] += report.right
        if not report.ok:
            self._oracle.failed(f"verify: {report.damage_counts}: {report.damages[:3]}")


# ---------------------------------------------------------------- one client's traffic


class _Fuse:
    """Kills a daemon after so many acknowledgements; 0: never."""

    def __init__(self, process: subprocess.Popen[bytes], acknowledgements: int) -> None:
        self._process = process
        self._left = acknowledgements

    def acknowledged(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._process.kill()


class _Worker:
    """A client with models and prompts of its own, so that it knows what it left there."""

    def __init__(self, oracle: Oracle, name: str, sizes: Sequence[int], *, roomy: bool) -> None:
        self.prompts: list[Prompt] = []
        self.recent: list[Prompt] = []
        self._oracle = oracle
        self._roomy = roomy
        self._models = [model(size, name=f"{name}-{size}") for size in sizes]
        self._stale: list[Fingerprint] = []
        self._raising: int | None = None
        self._seeds = 0
        self._seen: dict[str, float] = {}
        for fingerprint in self._models:
            self._add_prompts(fingerprint)

    def _add_prompts(self, fingerprint: Fingerprint) -> None:
        for _ in range(PROMPTS):
            self._seeds += 1
            self.prompts.append(Prompt(fingerprint, self._seeds, BLOCKS))

    def work(self, daemon: Daemon, rng: random.Random, fuse: _Fuse, draining: bool) -> None:
        """Until the daemon is gone."""
        self.recent = []
        self._seen = dict.fromkeys(EVICTIONS, 0.0)
        try:
            with Client(daemon, self._oracle) as client:
                while self._step(client, rng, fuse, draining):
                    pass
        except Away:
            pass
        except BaseException as error:  # an error of a thread is a finding, too
            self._oracle.failed(f"a client ended with {type(error).__name__}: {error}")

    def _step(self, client: Client, rng: random.Random, fuse: _Fuse, draining: bool) -> bool:
        """One call; False: this daemon takes no more."""
        counts = self._oracle.outcome.counts
        prompt = rng.choice(self.prompts)
        (kind,) = rng.choices(tuple(STEPS), tuple(STEPS.values()))
        if kind not in ("get", "stats"):
            self.recent.append(prompt)
        counts[kind] += 1
        if kind == "stats":
            self._look(client)
        elif kind == "get":
            wanted = self._oracle.durable_run(prompt) if self._roomy else 0
            there = client.get(prompt)
            counts["blocks read"] += there
            if there < wanted and not draining:
                self._oracle.failed(f"{there} of {wanted} durable blocks are there, all had room")
        elif kind in ("put", "durable put"):
            done = client.put(prompt, durable=kind == "durable put")
            counts[f"{kind}: {done.reason.name}"] += 1
            if done.reason is Reason.DRAINING:
                return False
            if done.reason is Reason.OK and done.visible:
                fuse.acknowledged()
            elif self._roomy and done.reason not in (Reason.OK, *BUSY):
                self._oracle.failed(f"{kind}: {done.reason.name}")
        elif kind == "abandon":
            client.abandon(prompt)
        elif kind == "invalidate":
            first = rng.randrange(BLOCKS)
            if client.invalidate(prompt.fingerprint, prompt.keys[first:]):
                fuse.acknowledged()
        elif kind == "invalidate space":
            if client.invalidate(prompt.fingerprint):
                fuse.acknowledged()
        elif self._raise(client, rng.randrange(len(self._models))):
            fuse.acknowledged()
        return True

    def _look(self, client: Client) -> None:
        """Counters never fall while a daemon lives."""
        seen = client.counters()
        for name, count in self._seen.items():
            now = seen.get(name, 0.0)
            if now < count:
                self._oracle.failed(f"{name} fell from {count:g} to {now:g}")
            elif name.startswith("evictions"):
                self._oracle.outcome.counts[name] += int(now - count)
        self._seen = seen

    def _raise(self, client: Client, number: int) -> bool:
        """Raises a model's epoch, and goes on with the model of that epoch. What was not
        acknowledged is tried again first.
        """
        number = self._raising = number if self._raising is None else self._raising
        old = self._models[number]
        if not client.raise_epoch([old], old.identity.weight_epoch + 1):
            return False
        self._raising = None
        self._stale.append(old)
        self._models[number] = altered(old, "identity", weight_epoch=old.identity.weight_epoch + 1)
        self.prompts = [one for one in self.prompts if one.fingerprint != old]
        self._add_prompts(self._models[number])
        return True

    def check_epochs(self, client: Client) -> None:
        """Nobody opens what an acknowledged epoch has closed."""
        for fingerprint in self._stale[-4:]:
            if client.space(fingerprint):
                name = fingerprint.identity.model_name
                self._oracle.failed(f"an epoch of {name} that was closed can be opened")
