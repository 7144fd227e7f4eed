"""Stage I: many threads in odd orders (`jitter`), around pools of a few blocks.

Each round is a daemon with a disk tier, small in everything, whose threads change places at every
chance and sleep where they meet. Its clients do so too: one client in threads, one with asyncio,
one whose puts, reads and invalidations an oracle checks, and sessions that are cut off while they
hold something. Every byte is verified; in the end nobody holds anything, the books add up, and the
daemon ends as it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.testing.payload import Finding
from kvstore_client import AsyncClient, Client, ClientConfig
from tests.bench.models import fingerprint
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, model
from tests.rawclient import Gone, RawClient, Refused
from tests.soak.worker import Blocks, Traffic, Worker, prompt_tokens
from tests.torture import jitter, oracle
from tests.torture.base import Job, Outcome
from tests.torture.daemons import MODULE, daemon_of
from tests.torture.oracle import Away, Oracle, check_quiet, until_loaded

ROUNDS = 20
TRAFFIC_S = 1.2
START_S = 60.0
"""How fast a start is, is not the question here."""
JOIN_S = 20.0
"""A client's thread that has not ended so long after it was told to hangs."""
REQUEST_S_MAX = 10.0
DEADLINE_MS = 1_000
KIB, MIB = 1 << 10, 1 << 20

MODELS = (
    fingerprint("schedules-4KiB", layers=1, kv_heads=1, head_size=64),
    fingerprint("schedules-16KiB", layers=4, kv_heads=1, head_size=64),
)
PROMPTS, BLOCKS = 6, 6
WRITERS = 3
STAGING = ("16KiB", "16KiB", "64KiB")
"""Of a session: one large block, or a few."""
HOST = (128 * KIB, 256 * KIB, MIB)
DISK = (MIB, 2 * MIB, 16 * MIB)
LATE = 2.0
"""Of its lease's time, for which a client's copy sleeps now and then."""
LEASE_MS = (30, 30, 400, 30_000)


class Schedules:
    name = "schedules"
    what = "threads in odd orders around pools of a few blocks, in the daemon and in its clients"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        rounds = job.scale.of(ROUNDS, at_least=2)
        for number in range(rounds):
            folder = job.folder / str(number)
            folder.mkdir()
            marks = len(outcome.wrong), len(outcome.failed)
            _Round(job, outcome, folder, f"{job.seed}/{number}").run()
            for found, mark in zip((outcome.wrong, outcome.failed), marks, strict=True):
                found[mark:] = [f"round {number}: {text}" for text in found[mark:]]
            outcome.trials += 1
            job.progress(number + 1, rounds, outcome)
            if job.enough(outcome):
                return outcome
        verified = sum(count for name, count in outcome.counts.items() if "verified" in name)
        if not verified:
            outcome.failed.append("nothing was verified")
        return outcome


class _Round:
    def __init__(self, job: Job, outcome: Outcome, folder: Path, seed: str) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.job = job
        self.outcome = outcome
        self.oracle = Oracle(outcome)
        self.over = threading.Event()
        self.lease_ms = self.rng.choice(LEASE_MS)
        self.disk_bytes = self.rng.choice(DISK)
        self.daemon = self._daemon(folder)

    def _daemon(self, folder: Path) -> Daemon:
        # Where leases end soon, slots change hands soon too.
        soon = self.lease_ms == LEASE_MS[0]
        daemon = daemon_of(
            self.job,
            folder,
            host__capacity_bytes=HOST[0] if soon else self.rng.choice(HOST),
            host__staging_bytes=self.rng.choice(STAGING),
            disk__path=str(folder / "disk"),
            disk__capacity_bytes=self.disk_bytes,
            limits__lease_ttl_ms=self.lease_ms,
        )
        daemon.module = MODULE
        daemon.environ[jitter.VARIABLE] = self.seed
        return daemon

    def run(self) -> None:
        self.daemon.start(START_S)
        try:
            until_loaded(self.daemon, self.oracle)
            with jitter.jittery_clients(self.seed, LATE * self.lease_ms / 1e3):
                self._traffic()
            check_quiet(self.daemon, self.oracle, capacity_bytes=self.disk_bytes, wait_s=20.0)
            code = self.daemon.stop()
            if code:
                self.oracle.failed(f"the daemon ended with {code}")
        finally:
            if self.daemon.alive:
                self.daemon.kill()
        if "Traceback" in (log := self.daemon.log()):
            self.oracle.failed(f"an error was logged: {log[log.index('Traceback') :][:1_500]}")

    def _traffic(self) -> None:
        """All clients for a while; what one of them raises is a finding."""
        config = ClientConfig(deadline_ms=DEADLINE_MS)
        target = f"unix:{self.daemon.data_socket}"
        with Client(target, config=config) as client:
            kinds: Sequence[tuple[str, Callable[[], None]]] = (
                ("threads", lambda: self._threads(client, 0)),
                ("threads", lambda: self._threads(client, 1)),
                ("asyncio", lambda: asyncio.run(self._asyncio(target, config))),
                ("oracle", self._oracle),
                ("cut off", self._cut_off),
            )
            threads = [
                threading.Thread(target=self._play, args=kind, name=kind[0], daemon=True)
                for kind in kinds
            ]
            for thread in threads:
                thread.start()
            time.sleep(TRAFFIC_S)
            self.over.set()
            until_s = time.monotonic() + JOIN_S
            for thread in threads:
                thread.join(max(until_s - time.monotonic(), 0.0))
            hanging = [thread.name for thread in threads if thread.is_alive()]
            if hanging:
                self.oracle.failed(f"hangs: {', '.join(hanging)}")
                faulthandler.dump_traceback(file=sys.stderr)

    def _play(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # of a thread: nobody else would see it
            self.oracle.failed(f"{name}: {type(error).__name__}: {error}")

    # ------------------------------------------------------------------ clients

    def _blocks(self, name: str, writer: int) -> Blocks:
        def wrong(finding: Finding, key: bytes) -> None:
            self.oracle.wrong(f"{name}: {finding.value}, key {key.hex()[:8]}")

        return Blocks(writer, WRITERS, wrong)

    @contextlib.contextmanager
    def _counted(self, name: str, blocks: Blocks) -> Iterator[None]:
        try:
            yield
        finally:
            for what in ("blocks verified", "blocks stored"):
                self.outcome.counts[f"{name}: {what}"] += blocks.counts[what]

    @contextlib.contextmanager
    def _in_time(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        took_s = time.monotonic() - began
        if took_s > REQUEST_S_MAX:
            self.oracle.failed(f"{name}: a request took {took_s:.1f} s")

    def _threads(self, client: Client, writer: int) -> None:
        """One of the threads that share a client."""
        blocks = self._blocks("threads", writer)
        worker = Worker(
            client,
            self.rng.randrange(2**31),
            blocks,
            traffic="mixed",
            models=MODELS,
            prompts=PROMPTS,
            blocks_max=BLOCKS,
        )
        with self._counted("threads", blocks):
            while not self.over.is_set():
                with self._in_time("threads"):
                    worker.request()

    async def _asyncio(self, target: str, config: ClientConfig) -> None:
        async with AsyncClient(target, config=config) as client:
            await asyncio.gather(*(self._task(client, number) for number in range(2)))

    async def _task(self, client: AsyncClient, number: int) -> None:
        rng = np.random.default_rng(self.rng.randrange(2**31))
        traffic, blocks = Traffic("uniform", rng, PROMPTS), self._blocks("asyncio", 2)
        fingerprint: Fingerprint = MODELS[number]
        space = client.space(fingerprint)
        length = layout_of(fingerprint).block_bytes
        with self._counted("asyncio", blocks):
            while not self.over.is_set():
                count = int(rng.integers(1, BLOCKS + 1))
                keys = space.keys(prompt_tokens(traffic.prompt(), BLOCKS)[: count * 16])
                out = np.empty((count, length), np.uint8)
                with self._in_time("asyncio"):
                    fetched = await space.fetch(keys, out)
                    for index in range(fetched.blocks):
                        blocks.verify(out[index], fingerprint, keys[index])
                    if fetched.blocks < count:
                        rows = blocks.rows(fingerprint, keys[fetched.blocks :])
                        pushed = await space.push(keys, rows, first_block=fetched.blocks)
                        blocks.counts["blocks stored"] += pushed.stored

    def _oracle(self) -> None:
        """Puts, reads and drops, of which is known at each moment what may be read."""
        prompts = [
            Prompt(model(size, name=f"oracle-{size}"), seed, BLOCKS)
            for size in (4 * KIB, 16 * KIB)
            for seed in range(2)
        ]
        rng = random.Random(self.rng.randrange(2**31))
        with self._calls(), oracle.Client(self.daemon, self.oracle, deadline_s=3.0) as client:
            while not self.over.is_set():
                prompt, choice = rng.choice(prompts), rng.random()
                if choice < 0.4:
                    client.put(prompt, durable=choice < 0.2)
                elif choice < 0.8:
                    there = client.get(prompt)
                    self.outcome.counts["oracle: blocks verified"] += there
                elif choice < 0.97:
                    client.invalidate(prompt.fingerprint, prompt.keys[rng.randrange(BLOCKS) :])
                else:
                    client.invalidate(prompt.fingerprint)

    def _cut_off(self) -> None:
        """Sessions that end while they hold leases, views, reservations and memory."""
        prompt = Prompt(model(4 * KIB, name="cut off"), 1, BLOCKS)
        rng = random.Random(self.rng.randrange(2**31))
        with self._calls():
            while not self.over.is_set():
                raw = RawClient(self.daemon.data_socket, group=b"cut off %d" % rng.randrange(4))
                try:
                    self._hold(raw, prompt, rng)
                finally:
                    self.outcome.counts["sessions cut off"] += 1
                    raw.close()

    def _hold(self, raw: RawClient, prompt: Prompt, rng: random.Random) -> None:
        space = raw.open(prompt.fingerprint).space_id
        raw.call_s = 3.0
        with contextlib.suppress(Refused, Gone):
            raw.put(space, prompt.keys, prompt.rows(), patience_s=0.1)
        for view in (False, True):
            with contextlib.suppress(Refused, Gone):
                raw.copy(raw.acquire(space, prompt.keys, view=view))
        other = Prompt(prompt.fingerprint, rng.randrange(1000), BLOCKS)
        with contextlib.suppress(Refused, Gone):
            reserved = raw.reserve(space, other.keys)
            if reserved.lease_id and rng.random() < 0.7:
                raw.fill(reserved, other.rows())
                if rng.random() < 0.5:
                    raw.commit(reserved.lease_id)

    @contextlib.contextmanager
    def _calls(self) -> Iterator[None]:
        """A call may be refused, when everything is as small as this; the daemon stays."""
        with contextlib.suppress(Refused, Away):
            yield
