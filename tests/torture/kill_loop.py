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

import random
import signal
import subprocess
import time
from collections.abc import Sequence
from threading import Thread

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, altered, model
from tests.torture.base import Job, Outcome
from tests.torture.killed_folder import ROOMY, TIGHT, KilledFolder, count_starts
from tests.torture.oracle import BUSY, Away, Client

CYCLES = 250
VERIFY_EVERY = 12
"""Cycles of a folder after which it is checked while no daemon has it."""
WHOLE_EVERY = 5
"""Cycles of a folder after which all is read that was ever put; else what was last, and a few."""
SAMPLE = 8
KEPT_SHARE = 0.95
"""Of what could be read before a SIGTERM, so much has to be there after it."""
REACH_CYCLES = 100
TRAFFIC_S_MAX = 0.25
START_KILL_S_MAX = 0.6
DRAIN_KILL_S_MAX = 0.15
PROMPTS = 12
"""Of a model."""
BLOCKS = 12
"""Of a prompt."""
STEPS = {
    "durable put": 30,
    "put": 25,
    "get": 25,
    "get another's": 15,
    "lookup": 10,
    "invalidate": 8,
    "abandon": 5,
    "invalidate space": 1,
    "epoch": 1,
    "stats": 4,
}
"""Calls of the traffic, and how often each is made."""
READS = ("get", "get another's", "lookup", "stats")
EVICTIONS = ("evictions host", "evictions disk")
MODES = ("traffic", "traffic", "traffic", "acknowledged", "acknowledged", "starting", "draining")


class KillLoop:
    name = "kill-loop"
    what = "kill -9 at random moments of a daemon with a disk tier, and what is there afterwards"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        lives = [_Life(KilledFolder(job, outcome, "roomy", ROOMY), job.seed)]
        lives += [_Life(KilledFolder(job, outcome, "tight", TIGHT), job.seed)]
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
                _check_reach(outcome, cycles)
        finally:
            for life in lives:
                life.kept.close()
        count_starts(outcome, [life.kept for life in lives])
        return outcome


def _check_reach(outcome: Outcome, cycles: int) -> None:
    """A loop that never got to the places that it is for has shown nothing."""
    reached = ("evictions host", "evictions disk", "durable blocks read", "records checked")
    if cycles >= REACH_CYCLES:
        outcome.failed += [
            f"no {what} in {cycles} cycles" for what in reached if not outcome.counts[what]
        ]


# ---------------------------------------------------------------- one folder's life


class _Life:
    """A folder, its clients, and the cycles that it goes through."""

    def __init__(self, kept: KilledFolder, seed: int) -> None:
        self.kept = kept
        self._seed = seed
        self._workers = [
            _Worker(kept, "0", (4 << 10, 16 << 10)),
            _Worker(kept, "1", (16 << 10, 64 << 10)),
        ]
        self._cycles = 0

    def cycle(self, number: int) -> None:
        """One kill, and all that follows."""
        rng = random.Random(f"{self._seed} {number}")
        mode = rng.choice(MODES)
        self.kept.outcome.counts[f"killed: {mode}"] += 1
        with self.kept.named(f"cycle {number}, {mode}"):
            self.kept.choose_capacity(rng)
            if mode == "starting":
                self._kill_start(rng)
            elif self.kept.start():
                self._check(rng, whole=self._cycles % WHOLE_EVERY == WHOLE_EVERY - 1)
                self._live(rng, mode)
                self._cycles += 1
                if self._cycles % VERIFY_EVERY == 0:
                    self.kept.verify()
            else:
                self.kept.kill()

    def end(self) -> None:
        """The last start, and a stop as it should be: what only memory had is saved by it."""
        prompts = self._workers[0].prompts[:PROMPTS]
        with self.kept.named("end"):
            if not self.kept.start():
                return
            self._check(random.Random(self._seed), whole=True)
            with Client(self.kept.daemon, self.kept.oracle) as client:
                for prompt in prompts:
                    client.put(prompt)
                before = sum(client.get(prompt) for prompt in prompts)
            self.kept.stop()
            self.kept.verify()
            if self.kept.start():
                with Client(self.kept.daemon, self.kept.oracle) as client:
                    after = sum(client.get(prompt) for prompt in prompts)
                if self.kept.roomy and after < KEPT_SHARE * before:
                    self.kept.oracle.failed(f"{after} of {before} blocks are there after SIGTERM")
                self.kept.stop()

    # ------------------------------------------------------------------ parts

    def _kill_start(self, rng: random.Random) -> None:
        process = self.kept.daemon.spawn()
        time.sleep(rng.uniform(0.0, START_KILL_S_MAX))
        code = process.poll()
        self.kept.kill()
        if code is not None:
            self.kept.oracle.failed(f"the start ended with {code} by itself")

    def _live(self, rng: random.Random, mode: str) -> None:
        """Traffic until the end of the daemon."""
        daemon, draining = self.kept.daemon, mode == "draining"
        fuse = _Fuse(daemon.process, rng.randint(1, 8) if mode == "acknowledged" else 0)
        threads = []
        for worker, other in zip(self._workers, reversed(self._workers), strict=True):
            worker.others = list(other.prompts)
            chance = random.Random(rng.random())
            threads.append(Thread(target=worker.work, args=(daemon, chance, fuse, draining)))
            threads[-1].start()
        time.sleep(rng.uniform(0.0, TRAFFIC_S_MAX))
        fuse.lit = True
        if draining and daemon.alive:
            daemon.signal(signal.SIGTERM)
            time.sleep(rng.uniform(0.0, DRAIN_KILL_S_MAX))
        daemon.kill()
        for thread in threads:
            thread.join()
        self.kept.oracle.restarted()

    def _check(self, rng: random.Random, *, whole: bool) -> None:
        """What is there after a start, and whether the books are in order."""
        prompts = [prompt for worker in self._workers for prompt in worker.prompts]
        if not whole:
            recent = [prompt for worker in self._workers for prompt in worker.recent]
            prompts = [*recent, *rng.sample(prompts, min(SAMPLE, len(prompts)))]
        with Client(self.kept.daemon, self.kept.oracle, sent=True) as client:
            self.kept.check(client, prompts)
            for worker in self._workers:
                worker.check_epochs(client)
        self.kept.check_books()


# ---------------------------------------------------------------- one client's traffic


class _Fuse:
    """Kills a daemon after so many acknowledgements; 0: never. lit: somebody ends it, so that calls
    may find none.
    """

    def __init__(self, process: subprocess.Popen[bytes], acknowledgements: int) -> None:
        self.lit = False
        self._process = process
        self._left = acknowledgements

    def acknowledged(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.lit = True
            self._process.kill()


class _Worker:
    """A client with models and prompts of its own, so that it knows what it left there."""

    def __init__(self, kept: KilledFolder, name: str, sizes: Sequence[int]) -> None:
        self.prompts: list[Prompt] = []
        self.others: Sequence[Prompt] = ()
        self.recent: list[Prompt] = []
        self._oracle = kept.oracle
        self._roomy = kept.roomy
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
            with Client(daemon, self._oracle, sent=True) as client:
                # What had no answer may have closed a model that this worker still has.
                if self._raising is not None:
                    self._raise(client, self._raising)
                while self._step(client, rng, fuse, draining):
                    pass
        except Away as away:
            if not fuse.lit:
                self._oracle.failed(f"no daemon, while it lived: {away}")
        except BaseException as error:  # an error of a thread is a finding, too
            self._oracle.failed(f"a client ended with {type(error).__name__}: {error}")

    def _step(self, client: Client, rng: random.Random, fuse: _Fuse, draining: bool) -> bool:
        """One call; False: this daemon takes no more."""
        counts = self._oracle.outcome.counts
        prompt = rng.choice(self.prompts)
        (kind,) = rng.choices(tuple(STEPS), tuple(STEPS.values()))
        if kind not in READS:
            self.recent.append(prompt)
        counts[kind] += 1
        if kind == "stats":
            self._look(client)
        elif kind == "lookup":
            client.lookup(prompt)
        elif kind == "get another's":
            counts["blocks read"] += client.get(rng.choice(self.others))
        elif kind == "get":
            wanted = self._oracle.durable_run(prompt) if self._roomy and not draining else 0
            there = client.get(prompt, wanted=wanted)
            counts["blocks read"] += there
            # What this worker has reserved, and never committed, is hidden until that ends.
            if there < wanted and client.missed is not Reason.MISS_IN_PROGRESS:
                client.note_absent(prompt, there)
        elif kind in ("put", "durable put"):
            done = client.put(prompt, durable=kind == "durable put")
            counts[f"{kind}: {done.reason.name}"] += 1
            if done.reason is Reason.DRAINING:
                return False
            if done.reason is Reason.OK and done.visible:
                fuse.acknowledged()
            elif self._roomy and self._raising is None and done.reason not in (Reason.OK, *BUSY):
                self._oracle.failed(f"{kind}: {done.reason.name}")
        elif kind == "abandon":
            client.abandon(prompt)
        elif kind == "invalidate":
            client.put(prompt)
            first = rng.randrange(BLOCKS)
            last = rng.randint(first + 1, BLOCKS)
            if client.invalidate(prompt.fingerprint, prompt.keys[first:last]):
                fuse.acknowledged()
            client.lookup(prompt)  # there may be a hole now
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
        if self._roomy and seen["evictions disk"]:
            self._oracle.failed(f"{seen['evictions disk']:g} blocks made room where there was room")

    def _raise(self, client: Client, number: int) -> bool:
        """Raises a model's epoch, and goes on with the model of that epoch."""
        self._raising = number
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
