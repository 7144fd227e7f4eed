"""The lives of a real daemon, ended with kill -9 or SIGTERM, as Hypothesis chooses them.

The oracle's client (`oracle`) checks each answer. There is room for all that is ever put, so that
what is acknowledged as durable has to be there after every restart.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvstore.model.fingerprint import Fingerprint
from tests.e2e.stage import Prompt, altered, model
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.oracle import Client, Oracle, check_durable, check_quiet, until_loaded

MIB = 1 << 20
DISK_BYTES = (64 * MIB, 96 * MIB, 200 * MIB)
HOST = ("4MiB", "8MiB")
START_S = 60.0
"""How fast a start is, is not the question here."""
PROMPTS, BLOCKS = 3, 10

prompts = st.integers(0, 2 * PROMPTS - 1)
hosts = st.sampled_from(HOST)
disks = st.sampled_from(DISK_BYTES)


class Process(RuleBasedStateMachine):
    """See the module's docstring."""

    job: ClassVar[Job]
    outcome: ClassVar[Outcome]

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(self.outcome)
        self.folder = Path(tempfile.mkdtemp(dir=self.job.folder))
        self.models = [model(4 << 10, name="small"), model(16 << 10, name="large")]
        self.seeds = 0
        self.prompts = self._new_prompts(0) + self._new_prompts(1)
        self.stale: list[Fingerprint] = []
        self.daemon = daemon_of(
            self.job,
            self.folder,
            host__capacity_bytes=HOST[0],
            disk__path=str(self.folder / "disk"),
            disk__capacity_bytes=DISK_BYTES[0],
            server__drain_grace_s=2,
        )
        self.client: Client | None = None
        self.found = 0, 0

    def _new_prompts(self, number: int) -> list[Prompt]:
        self.seeds += PROMPTS
        seeds = range(self.seeds - PROMPTS, self.seeds)
        return [Prompt(self.models[number], 100 * number + one, BLOCKS) for one in seeds]

    @property
    def fresh(self) -> Client:
        """The client of the moment."""
        if self.client is None:
            self.client = Client(self.daemon, self.oracle)
        return self.client

    # ------------------------------------------------------------------ commands

    @initialize()
    def begin(self) -> None:
        self.outcome.counts["examples"] += 1
        self.found = len(self.outcome.wrong), len(self.outcome.failed)
        self._start()
        for number in range(len(self.prompts)):
            self.put(number, BLOCKS, durable=number % 2 == 0)
            self.get(number)
        self.kill(HOST[0], DISK_BYTES[0])

    @rule(prompt=prompts, blocks=st.integers(1, BLOCKS), durable=st.booleans())
    def put(self, prompt: int, blocks: int, durable: bool) -> None:
        done = self.fresh.put(self.prompts[prompt], durable=durable, blocks=blocks)
        self.outcome.counts["process: blocks put"] += done.visible
        self._check()

    @rule(prompt=prompts)
    def get(self, prompt: int) -> None:
        """What a look-up finds can be read, since there is room for all of it."""
        chosen = self.prompts[prompt]
        space = self.fresh.space(chosen.fingerprint)
        hit = self.fresh.raw.lookup(space, chosen.keys).hit_blocks
        there = self.fresh.get(chosen)
        self.outcome.counts["process: blocks got"] += there
        if there < hit:
            self.oracle.failed(f"a look-up found {hit} blocks, {there} can be read")
        self._check()

    @rule(prompt=prompts)
    def get_again(self, prompt: int) -> None:
        self.get(prompt)

    @rule(prompt=prompts)
    def abandon(self, prompt: int) -> None:
        self.fresh.abandon(self.prompts[prompt])
        self._check()

    @rule(prompt=prompts, first=st.integers(0, BLOCKS - 1))
    def invalidate(self, prompt: int, first: int) -> None:
        chosen = self.prompts[prompt]
        self.fresh.invalidate(chosen.fingerprint, chosen.keys[first:])
        self._check()

    @rule(prompt=prompts, at=st.integers(0, BLOCKS - 2))
    def punch(self, prompt: int, at: int) -> None:
        """A hole: what comes after it is no hit."""
        chosen = self.prompts[prompt]
        self.fresh.invalidate(chosen.fingerprint, chosen.keys[at : at + 1])
        self.get(prompt)

    @rule(number=st.integers(0, 1), whole=st.integers(0, 2))
    def close_space(self, number: int, whole: int) -> None:
        """Sometimes a space goes, sometimes its model's epoch."""
        old = self.models[number]
        if whole == 0:
            self.fresh.invalidate(old)
        elif whole == 1 and self.fresh.raise_epoch([old], old.identity.weight_epoch + 1):
            epoch = old.identity.weight_epoch + 1
            self.models[number] = altered(old, "identity", weight_epoch=epoch)
            self.stale.append(old)
            mine = slice(number * PROMPTS, (number + 1) * PROMPTS)
            self.prompts[mine] = self._new_prompts(number)
        self._check()

    # ------------------------------------------------------------------ ends

    @rule(host=hosts, disk=disks)
    def kill(self, host: str, disk: int) -> None:
        self._check_counters()
        self.daemon.kill()
        self.outcome.counts["process: kills"] += 1
        self._restart(host, disk)

    @rule(host=hosts, disk=disks)
    def stop(self, host: str, disk: int) -> None:
        self._check_counters()
        code = self.daemon.stop()
        if code:
            self.oracle.failed(f"SIGTERM: it ended with {code}")
        self._restart(host, disk)

    @rule()
    def leave(self) -> None:
        """The client ends its session, and another one comes."""
        self._close()

    def _restart(self, host: str, disk: int) -> None:
        self._close()
        self.oracle.restarted()
        self.daemon.settings["host.capacity_bytes"] = host
        self.daemon.settings["disk.capacity_bytes"] = disk
        self._start()

    def _start(self) -> None:
        try:
            self.daemon.start(START_S)
        except AssertionError as error:
            # A replay may not show it: it is noted where it is seen.
            self.oracle.failed(f"the start failed: {error}")
            raise
        until_loaded(self.daemon, self.oracle)
        self.outcome.counts["process: durable found"] += check_durable(self.fresh, self.prompts)
        for fingerprint in self.stale[-2:]:
            if self.fresh.space(fingerprint):
                self.oracle.failed("a space whose epoch was closed can be opened")
        self._check()

    def _close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    # ------------------------------------------------------------------ what holds

    def _check(self) -> None:
        """Ends the example at its first finding."""
        found = len(self.outcome.wrong), len(self.outcome.failed)
        assert found == self.found, "see the finding before"

    def teardown(self) -> None:
        try:
            if self.daemon.alive:
                self._check_counters()
                self._close()
                disk = int(self.daemon.settings["disk.capacity_bytes"])
                check_quiet(self.daemon, self.oracle, capacity_bytes=disk)
        finally:
            self.daemon.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check_counters(self) -> None:
        counters = self.fresh.counters()
        asked = sum(n for name, n in counters.items() if "lookup_tokens" in name)
        hit = sum(n for name, n in counters.items() if "hit_tokens" in name)
        self.outcome.counts["process: tokens asked"] += int(asked)
        self.outcome.counts["process: tokens hit"] += int(hit)
        if hit > asked:
            self.oracle.failed(f"{hit:g} tokens were hit, {asked:g} were asked for")
