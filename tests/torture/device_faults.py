"""Stage E: a device that fails, lies, comes up short, hangs or is full, below a daemon that serves.

For each kind of fault a daemon has its folder on a file system that fails on demand. Three rounds,
each with a seed of its own: the fault for a while, under traffic that checks every byte; then no
fault, and within seconds all has to work again. What the tier dropped it has counted; everything
else that was acknowledged as durable is still there, also after kill -9.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.model.reasons import Reason
from kvstore.tiers.disk.format import RecordHeader, decode, record_bytes
from tests.daemon import DaemonDied
from tests.e2e.stage import Prompt, model
from tests.faultfs import FaultFs
from tests.faultfs import missing as why_no_fuse
from tests.faults import SEGMENTS, Fault
from tests.rawclient import Refused
from tests.torture import own_faults
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.disk_watch import (
    RECOVERY_S,
    RECOVERY_S_MAX,
    START_S,
    Health,
    drops,
    metrics,
    missing,
    recover,
    seconds_until,
    state_of,
)
from tests.torture.oracle import Away, Client, Oracle, check_quiet, until_loaded
from tests.torture.own_faults import OwnFaults

ROUNDS = 3
KINDS_MIN = 8
LANES = 5
"""Kinds that are tried side by side: they wait more than they compute."""
BLOCK = 32 << 10
MODEL = model(BLOCK)
PROMPT_BLOCKS = 4
PROMPTS = 64
"""Durable before the first fault: twice what memory holds."""
CAPACITY = 96 << 20
FAULT_S = 1.2
DEADLINE_S = 0.5
"""Of a call during the fault."""
MEMORY_S = 5.0
"""Of one that only memory is asked for."""
PAUSE_S = 0.02
TURNS_MIN = 15
HOLD_S = 30.0
KEPT_SHARE = 0.95
_ENDS = (Away, DaemonDied, Refused, AssertionError, OSError, subprocess.TimeoutExpired)
"""What ends a trial is a finding."""
STOP_S_MAX = 15.0
"""To end while the device hangs: the grace of 2 s, and twice what closing waits for."""

Record = tuple[Path, int, bytes, int]
"""File, offset, key, generation."""
Damage = Callable[[list[Record], random.Random], list[Record]]
"""Damages records at rest, of these; which ones."""
SIZE = record_bytes(BLOCK)


@dataclass(frozen=True)
class Kind:
    """A kind of fault. faults: in force for `seconds`; damage: done to the files instead.
    moves: metrics of which one has to go up. stops: a gauge that has to be 1 at some moment.
    goes_on: durable puts succeed all the while, and nothing is dropped. puts: durable ones that are
    made at least. fallocate, direct: what the file system has.
    """

    name: str
    faults: tuple[Fault, ...] = ()
    moves: tuple[str, ...] = ()
    stops: str = ""
    seconds: float = FAULT_S
    damage: Damage | None = None
    goes_on: bool = False
    puts: int = 0
    fallocate: bool = True
    direct: bool = True

    @property
    def hangs(self) -> bool:
        return any(fault.delay_s for fault in self.faults)

    @property
    def sure(self) -> bool:
        """Whether it strikes all calls that it concerns."""
        return all(fault.chance >= 1 for fault in self.faults)

    @property
    def of_segments(self) -> bool:
        """Whether a daemon can do it to itself."""
        return self.fallocate and self.direct and all(one.where == SEGMENTS for one in self.faults)

    @property
    def takes_blocks(self) -> bool:
        """Whether it is single blocks that it damages, or makes unreadable."""
        return self.damage is not None or any(
            fault.lie or fault.cut_bytes is not None or ("read" in fault.ops and fault.chance < 1)
            for fault in self.faults
        )


# ---------------------------------------------------------------- damage at rest


def live_records(folder: Path, keys: set[bytes]) -> list[Record]:
    """The records of these blocks, of each the last one that was written."""
    last: dict[bytes, Record] = {}
    for path in sorted((folder / "segments").iterdir()):
        data = path.read_bytes()
        for offset in range(0, len(data) - SIZE + 1, SIZE):
            header = decode(data[offset : offset + 4_096])
            if isinstance(header, RecordHeader) and header.key in keys:
                known = last.get(header.key)
                if known is None or known[3] < header.generation:
                    last[header.key] = (path, offset, header.key, header.generation)
    return sorted(last.values())


def _flip(records: list[Record], rng: random.Random) -> list[Record]:
    chosen = rng.sample(records, 6)
    for path, offset, _, _ in chosen:
        with path.open("r+b") as file:
            at = offset + rng.randrange(SIZE)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return chosen


def _swap(records: list[Record], rng: random.Random) -> list[Record]:
    chosen = rng.sample(records, 6)
    for one, other in zip(chosen[::2], chosen[1::2], strict=True):
        first, second = _read(one), _read(other)
        _write(one, second)
        _write(other, first)
    return chosen


def _read(record: Record) -> bytes:
    with record[0].open("rb") as file:
        file.seek(record[1])
        return file.read(SIZE)


def _write(record: Record, data: bytes) -> None:
    with record[0].open("r+b") as file:
        file.seek(record[1])
        file.write(data)


def _truncate(records: list[Record], rng: random.Random) -> list[Record]:
    path = rng.choice(sorted({record[0] for record in records}))
    its = [record for record in records if record[0] == path]
    # Through a record, at a page's end or not.
    end = max(record[1] for record in its) + SIZE
    length = max(100, end - rng.choice([512, 4_096, SIZE + 100]))
    with path.open("r+b") as file:
        file.truncate(length)
    return [record for record in its if record[1] + SIZE > length]


# ---------------------------------------------------------------- kinds

READ_ERRORS = ("kvstore_disk_read_errors_total",)
WRITE_ERRORS = ("kvstore_disk_write_errors_total",)
CORRUPT = ("kvstore_disk_corrupt_dropped_total",)
NOT_READ = "kvstore_disk_reading_stopped"
NOT_WRITTEN = "kvstore_disk_writing_stopped"
EVERY = ("read", "write", "sync", "grow", "open", "look")

KINDS: tuple[Kind, ...] = (
    Kind("EIO on every read", (Fault(("read",), SEGMENTS, "EIO"),), READ_ERRORS, NOT_READ),
    Kind("EIO on some reads", (Fault(("read",), SEGMENTS, "EIO", chance=0.3),), READ_ERRORS),
    Kind("EIO on every write", (Fault(("write",), "*", "EIO"),), WRITE_ERRORS, NOT_WRITTEN),
    Kind("EIO on some writes", (Fault(("write",), "*", "EIO", chance=0.3),), WRITE_ERRORS),
    Kind("EIO on fsync", (Fault(("sync",), "*", "EIO"),), WRITE_ERRORS, NOT_WRITTEN),
    Kind("EIO on some fsyncs", (Fault(("sync",), "*", "EIO", chance=0.4),), WRITE_ERRORS),
    Kind("EIO on everything", (Fault(EVERY, "*", "EIO"),), (*WRITE_ERRORS, *READ_ERRORS)),
    Kind("ENOSPC", (Fault(("write", "grow"), "*", "ENOSPC"),), WRITE_ERRORS, NOT_WRITTEN),
    Kind("EDQUOT", (Fault(("write", "grow"), "*", "EDQUOT"),), WRITE_ERRORS, NOT_WRITTEN),
    Kind("ENOSPC for new files", (Fault(("grow",), "*", "ENOSPC"),), puts=60),
    Kind("EROFS", (Fault(("write", "grow", "sync"), "*", "EROFS"),), WRITE_ERRORS, NOT_WRITTEN),
    Kind("a page of each read", (Fault(("read",), SEGMENTS, cut_bytes=4_096),)),
    Kind("half of each read", (Fault(("read",), SEGMENTS, cut_bytes=-1),)),
    Kind("no bytes read", (Fault(("read",), SEGMENTS, cut_bytes=0, chance=0.3),), CORRUPT),
    Kind("one byte read", (Fault(("read",), SEGMENTS, cut_bytes=1, chance=0.3),), CORRUPT),
    Kind("a page of each write", (Fault(("write",), SEGMENTS, cut_bytes=4_096),)),
    Kind("half of each write", (Fault(("write",), SEGMENTS, cut_bytes=-1),)),
    Kind("no bytes written", (Fault(("write",), SEGMENTS, cut_bytes=0),), WRITE_ERRORS),
    Kind("torn writes", (Fault(("write",), SEGMENTS, lie="torn", chance=0.3),)),
    Kind("flipped when written", (Fault(("write",), SEGMENTS, lie="flip", chance=0.3),)),
    Kind("flipped when read", (Fault(("read",), SEGMENTS, lie="flip", chance=0.3),), CORRUPT),
    Kind("flipped at rest", damage=_flip, moves=CORRUPT),
    Kind("swapped at rest", damage=_swap, moves=CORRUPT),
    Kind("truncated at rest", damage=_truncate, moves=CORRUPT),
    Kind("reads hang", (Fault(("read",), SEGMENTS, delay_s=HOLD_S),), stops=NOT_READ, seconds=3.5),
    Kind("writes hang", (Fault(("write",), "*", delay_s=HOLD_S),), seconds=3.5),
    Kind("fsync hangs", (Fault(("sync",), "*", delay_s=HOLD_S),), seconds=3.5),
    Kind("everything hangs", (Fault(EVERY, "*", delay_s=HOLD_S),), seconds=3.5),
    Kind(
        "the ledger hangs",
        (Fault(("write", "sync", "look"), "*/ledger*", delay_s=HOLD_S),),
        seconds=3.5,
    ),
    Kind("no fallocate", fallocate=False, goes_on=True),
    Kind("no direct I/O", direct=False, goes_on=True),
    Kind(
        "neither", (Fault(("read",), SEGMENTS, "EIO", chance=0.3),), fallocate=False, direct=False
    ),
)


class DeviceFaults:
    name = "device-faults"
    what = (
        "a device that fails, lies, hangs or is full below a daemon, and what is there afterwards"
    )

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        rounds = job.scale.of(ROUNDS)
        why = why_no_fuse()
        kinds = [kind for kind in KINDS if not why or kind.of_segments]
        fewer = max(KINDS_MIN, job.scale.of(ROUNDS * len(kinds)) // rounds)
        if fewer < len(kinds):
            kinds = job.rng.sample(kinds, fewer)  # a short form tries others each time
        if why:
            left_out = sum(not kind.of_segments for kind in KINDS)
            outcome.skipped = (
                f"{left_out} of {len(KINDS)} kinds of faults, all but those of segment files: {why}"
            )
        trials = [
            _Trial(
                job,
                kind,
                job.folder / f"{number:02}",
                job.rng.randrange(2**31),
                rounds,
                own=bool(why),
            )
            for number, kind in enumerate(kinds)
        ]
        with ThreadPoolExecutor(LANES) as lanes:
            for trial in lanes.map(_Trial.run, trials):
                _take(outcome, trial.outcome)
                job.progress(outcome.trials, rounds * len(kinds), outcome)
                if job.enough(outcome):
                    lanes.shutdown(wait=True, cancel_futures=True)
                    break
        return outcome


def _take(outcome: Outcome, more: Outcome) -> None:
    outcome.trials += more.trials
    outcome.wrong += more.wrong
    outcome.failed += more.failed
    for name, count in more.counts.items():
        longest = name.endswith("longest")
        outcome.counts[name] = (
            max(outcome.counts[name], count) if longest else outcome.counts[name] + count
        )


class _Trial:
    """One kind of fault: a device, a daemon, and what is known of its blocks."""

    def __init__(
        self, job: Job, kind: Kind, folder: Path, seed: int, rounds: int, *, own: bool = False
    ) -> None:
        """own: the daemon fails its own calls, for want of a file system that does."""
        self.outcome = Outcome()
        self._job = job
        self._kind = kind
        self._folder = folder
        self._seed = seed
        self._rng = random.Random(seed)
        self._rounds = rounds
        self._own = own
        self._oracle = Oracle(self.outcome)
        self._prompts: list[Prompt] = []
        self._numbers = itertools.count()
        self._damaged: set[tuple[bytes, int]] = set()
        self._lost = 0
        self._counted = 0
        self._counted_by_this = 0

    def run(self) -> _Trial:
        kind = self._kind
        self._folder.mkdir()
        with self._make_device() as device:
            self._device = device
            self._daemon = daemon_of(
                self._job,
                self._folder,
                host__capacity_bytes="5MiB",
                host__staging_bytes="1MiB",
                disk__path=str(device.path / "disk"),
                disk__capacity_bytes=CAPACITY,
                server__drain_grace_s=2,
            )
            if isinstance(device, OwnFaults):
                self._daemon.module = own_faults.MODULE
                self._daemon.environ |= device.environ
            try:
                self._lives()
            except _ENDS as error:
                self._failed(f"{type(error).__name__}: {error}")
            finally:
                device.clear()
                if self._daemon.alive:
                    self._daemon.kill()
        self.outcome.failed = [f"{kind.name}: {text}" for text in self.outcome.failed]
        self.outcome.wrong = [f"{kind.name}: {text}" for text in self.outcome.wrong]
        return self

    def _make_device(self) -> FaultFs | OwnFaults:
        folder, kind = self._folder / "device", self._kind
        if self._own:
            return OwnFaults(folder, seed=self._seed)
        return FaultFs(folder, seed=self._seed, fallocate=kind.fallocate, direct=kind.direct)

    def _failed(self, text: str) -> None:
        self._oracle.failed(f"{text} (seed {self._seed})")

    def _lives(self) -> None:
        self._daemon.start(START_S)
        until_loaded(self._daemon, self._oracle)
        self._client = Client(self._daemon, self._oracle)
        for _ in range(PROMPTS):
            prompt = self._fresh()
            if self._client.put(prompt, durable=True).durable == PROMPT_BLOCKS:
                self._prompts.append(prompt)
        if len(self._prompts) < PROMPTS:
            self._failed(f"only {len(self._prompts)} of {PROMPTS} prompts became durable")
        for _ in range(self._rounds):
            self._round()
            self.outcome.trials += 1
            if self._job.enough(self.outcome):
                return
        self._client.close()
        if self._kind.damage is not _truncate:  # whose file has less than its blocks, until read
            check_quiet(self._daemon, self._oracle, capacity_bytes=CAPACITY, damaged=True)
        self._count()
        self._daemon.kill()
        self._start_again()
        self._sweep("after kill -9")
        if self._counted < len(self._damaged):
            self._failed(f"{len(self._damaged)} damaged records, counted {self._counted}")
        self.outcome.counts["records damaged at rest"] += len(self._damaged)
        self._client.close()
        if self._kind.hangs:
            self._stop_while_it_hangs()
        elif (code := self._daemon.stop()) != 0:
            self._failed(f"the daemon ended with {code}")

    def _fresh(self) -> Prompt:
        return Prompt(MODEL, self._seed * 10_000 + next(self._numbers), PROMPT_BLOCKS)

    def _count(self) -> None:
        """Takes up what the daemon says it has dropped."""
        now = drops(self._daemon)
        self._counted += now - self._counted_by_this
        self._counted_by_this = now

    # ------------------------------------------------------------------ a round

    def _round(self) -> None:
        kind = self._kind
        before = metrics(self._daemon)
        pid = self._daemon.pid
        if kind.damage:
            keys = {bytes(key) for prompt in self._prompts for key in prompt.keys}
            records = live_records(self._device.backing / "disk", keys)
            damaged = kind.damage(records, self._rng)
            self._damaged |= {(key, generation) for _, _, key, generation in damaged}
        self._device.set(*kind.faults)
        stopped = False
        with Health(self._daemon, self._oracle) as health:
            try:
                stopped = self._under_the_fault()
            except Away:
                self._died()
            struck = self._device.clear()
            took_s = recover(self._daemon, self._client, self._fresh, self._prompts).well_s
        self._note(struck, took_s, health)
        if pid == self._daemon.pid:
            self._check_figures(before, metrics(self._daemon), stopped)
        self._sweep("after the fault")

    def _note(self, struck: Counter[str], took_s: float, health: Health) -> None:
        counts = self.outcome.counts
        counts["faults struck"] += sum(struck.values())
        counts["recovered, ms, longest"] = max(counts["recovered, ms, longest"], int(took_s * 1e3))
        counts["health, ms, longest"] = max(
            counts["health, ms, longest"], int(health.longest_s * 1e3)
        )
        counts["rounds that took over 5 s to recover"] += took_s > RECOVERY_S
        if self._kind.faults and not struck:
            counts["rounds in which the fault never struck"] += 1
            if self._kind.sure:
                self._failed("the fault never struck")
        if took_s > RECOVERY_S_MAX:
            self._failed(f"not recovered after {took_s:.0f} s: {state_of(self._daemon)}")

    def _check_figures(
        self, before: dict[str, float], after: dict[str, float], stopped: bool
    ) -> None:
        kind = self._kind

        def moved(name: str) -> float:
            return sum(
                value - before.get(key, 0)
                for key, value in after.items()
                if key.partition("{")[0] == name
            )

        if kind.moves and kind.sure and not kind.damage and not any(map(moved, kind.moves)):
            self._failed(f"none of {', '.join(kind.moves)} went up")
        if kind.goes_on and (moved("kvstore_disk_corrupt_dropped_total") or moved(*READ_ERRORS)):
            self._failed("blocks were dropped")
        if kind.stops and not stopped:
            self._failed(f"{kind.stops} was never 1")

    def _sweep(self, when: str) -> None:
        """Reads all that has to be there. What is not has to be among what was dropped and counted;
        it is put again, and then is there.
        """
        blocks = lost = 0
        again: list[Prompt] = []
        for prompt in self._prompts:
            blocks += len(prompt.keys)
            if gone := missing(self._client, prompt):
                lost += len(gone)
                again.append(prompt)
        self._lost += lost
        self._count()
        self.outcome.counts["blocks that had to be there"] += blocks
        self.outcome.counts["of these dropped, and counted"] += lost
        if not (self._kind.takes_blocks or self._kind.puts) and lost > (1 - KEPT_SHARE) * blocks:
            self._failed(f"{when} {blocks - lost} of {blocks} blocks are there")
        if self._lost > self._counted:
            self._failed(f"{when} {self._lost} blocks are lost, {self._counted} counted")
        for prompt in again:
            put = self._client.put(prompt, durable=True)
            there = self._client.get(prompt)
            if put.reason is not Reason.OK or there < len(prompt.keys):
                self._failed(f"{when} put again, {there} of {len(prompt.keys)}: {put.reason.name}")

    def _under_the_fault(self) -> bool:
        """Traffic while it lasts. Whether the tier said that it has stopped something."""
        kind, client = self._kind, self._client
        stopped = False
        client.deadline_s = client.raw.call_s = DEADLINE_S
        end = time.monotonic() + (kind.seconds if kind.faults or kind.damage else 0.3)
        turn = 0
        turns = kind.puts or (0 if kind.hangs else TURNS_MIN)
        while time.monotonic() < end or turn < turns:
            # Not all the time: what is put during all rounds fits into the tier.
            time.sleep(PAUSE_S)
            try:
                self._use(durable=turn % 3 == 2 or bool(kind.puts))
            except Refused as error:
                if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                self.outcome.counts["calls whose time ran out"] += 1  # which they kept
            stopped |= bool(kind.stops) and metrics(self._daemon)[kind.stops] > 0
            turn += 1
        client.deadline_s = client.raw.call_s = 20.0
        return stopped

    def _use(self, *, durable: bool) -> None:
        """A put, which memory has to take and to give back, and a get of something older."""
        client = self._client
        prompt = self._fresh()
        put = client.put(prompt, durable=durable)
        if put.durable == PROMPT_BLOCKS:
            self._prompts.append(prompt)
            self.outcome.counts["durable under a fault"] += PROMPT_BLOCKS
        elif durable and self._kind.goes_on:
            self._failed(f"a durable put answered {put.reason.name}")
        if put.visible < PROMPT_BLOCKS and put.reason is Reason.DEADLINE_EXCEEDED:
            self.outcome.counts["puts without an answer in time"] += 1
        elif put.visible < PROMPT_BLOCKS:
            self._failed(f"a put stored {put.visible} blocks: {put.reason.name}")
        elif (there := self._from_memory(prompt)) < PROMPT_BLOCKS:
            self._failed(f"memory gave {there} of {PROMPT_BLOCKS} blocks that were just put")
        older = client.get(self._rng.choice(self._prompts))
        self.outcome.counts["blocks read under a fault"] += older

    def _from_memory(self, prompt: Prompt) -> int:
        """Waits for no device, so that it has time on a machine that has other work."""
        client = self._client
        client.deadline_s = client.raw.call_s = MEMORY_S
        try:
            return client.get(prompt)
        finally:
            client.deadline_s = client.raw.call_s = DEADLINE_S

    def _died(self) -> None:
        """Only what damages LMDB's own file under it may end a daemon."""
        code = self._daemon.process.wait(10)
        index = any(fault.where == "*" and "read" in fault.ops for fault in self._kind.faults)
        if code != -signal.SIGBUS or not index:
            self._failed(f"the daemon ended with {code}: {self._daemon.log()[-2000:]}")
        self.outcome.counts["restarts by SIGBUS"] += 1
        self._device.clear()
        self._client.close()
        self._start_again()

    def _start_again(self) -> None:
        self._oracle.restarted()
        self._counted_by_this = 0
        self._daemon.start(START_S)
        until_loaded(self._daemon, self._oracle)
        self._client = Client(self._daemon, self._oracle)

    def _stop_while_it_hangs(self) -> None:
        """A device that does not answer does not keep the daemon from ending all it can end; its
        process stays as long as the kernel waits for the device.
        """
        with Client(self._daemon, self._oracle, deadline_s=DEADLINE_S) as client:
            self._device.set(*self._kind.faults)
            client.put(self._fresh(), durable=True)
            client.get(self._rng.choice(self._prompts))
        self._daemon.signal(signal.SIGTERM)
        took_s = seconds_until(lambda: "stopped" in self._daemon.log(), STOP_S_MAX)
        self.outcome.counts["end under a hang, ms, longest"] = int(took_s * 1e3)
        if took_s > STOP_S_MAX:
            self._failed(f"it has not ended {took_s:.1f} s after SIGTERM")
        self._device.clear()
        if (code := self._daemon.wait()) != 0:
            self._failed(f"the daemon ended with {code}")
