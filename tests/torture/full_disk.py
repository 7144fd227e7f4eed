"""Stage D: file systems of 48 MB that are filled, emptied and filled again below a daemon, and
other limits: of the size of a file, read-only, without permission, removed.

A cycle: the tier fills up; somebody else takes what is left and more, down to the last block, under
traffic; then gives it back, and the tier has to save again within seconds. All the while the folder
takes no more than its capacity, in blocks of the file system, and memory serves.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from kvstore.model.reasons import Reason
from tests.daemon import Daemon, DaemonDied
from tests.e2e.stage import Prompt, model
from tests.rawclient import Refused
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.disk_watch import (
    RECOVERY_S,
    RECOVERY_S_MAX,
    START_S,
    Health,
    disk_bytes,
    metrics,
    missing,
    recover,
    seconds_until,
    state_of,
)
from tests.torture.oracle import (
    CAPACITY_SLACK,
    Away,
    Client,
    Oracle,
    check_quiet,
    until_loaded,
)

MIB = 1 << 20
SIZE = 48 * MIB
XFS_SIZE = 320 * MIB
LARGER, SMALLER = 64 * MIB, 24 * MIB
CYCLES = 20
BLOCK = 64 << 10
MODEL = model(BLOCK)
PROMPT_BLOCKS = 16
BALLAST = 30 * MIB
"""What others take at least; they get it within seconds."""
BALLAST_S_MAX = 60.0
FULL_S = 0.8
"""How long nothing at all is left."""
DEADLINE_S = 2.0
MEMORY_S = 5.0
"""Of one that only memory is asked for."""
SETTLED_S = 1.0
"""After so long a file system has freed what was removed."""
LANES = 3


# ---------------------------------------------------------------- file systems


@contextlib.contextmanager
def tmpfs(folder: Path) -> Iterator[Path]:
    """A mounted file system of `SIZE`. OSError if there is none."""
    with _mounted(folder, ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "kvstore"]) as path:
        yield path


@contextlib.contextmanager
def ext4(folder: Path) -> Iterator[Path]:
    """The same on a loop device."""
    # Without a reserve for root, who the daemon may be.
    with _looped(folder, SIZE, ["mkfs.ext4", "-q", "-m", "0", "-F"]) as path:
        yield path


@contextlib.contextmanager
def xfs(folder: Path) -> Iterator[Path]:
    """Another one; it is never smaller than this."""
    with _looped(folder, XFS_SIZE, ["mkfs.xfs", "-q", "-f"]) as path:
        yield path


@contextlib.contextmanager
def _looped(folder: Path, size: int, make: list[str]) -> Iterator[Path]:
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size)
    try:
        _run([*make, str(image)])
        with _mounted(folder, ["mount", "-o", "loop", str(image)]) as path:
            yield path
    finally:
        image.unlink()


@contextlib.contextmanager
def _mounted(folder: Path, command: list[str]) -> Iterator[Path]:
    folder.mkdir()
    _run([*command, str(folder)])
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _run(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise OSError(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")


MakeFileSystem = Callable[[Path], contextlib.AbstractContextManager[Path]]


def missing_file_system(make: MakeFileSystem, folder: Path) -> str:
    """Why it cannot be had here; empty if it can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        with make(folder / "probe"):
            return ""
    except OSError as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            (folder / "probe").rmdir()


# ---------------------------------------------------------------- the stage


class FullDisk:
    name = "full-disk"
    what = "48 MB file systems filled, emptied and filled again below a daemon, and other limits"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        cycles = job.scale.of(CYCLES, at_least=2)
        tasks: list[Callable[[], Outcome]] = []
        why = []
        # A capacity beyond the file system meets its end; a smaller one is kept beside others.
        for name, make, often in (("tmpfs", tmpfs, SMALLER), ("ext4", ext4, LARGER)):
            if reason := missing_file_system(make, job.folder):
                why.append(f"{name}: {reason}")
                continue
            for capacity in (LARGER, SMALLER):
                count = cycles if capacity == often else cycles // 2
                tasks.append(_cycles(job, f"{name}-{capacity // MIB}", make, capacity, count))
        for limit in (_file_size, _read_only, _no_permission, _removed):
            tasks.append(_limit(job, limit))
        total = len(tasks)
        with ThreadPoolExecutor(LANES) as lanes:
            for done, more in enumerate(lanes.map(lambda task: task(), tasks), 1):
                _take(outcome, more)
                if more.skipped:
                    why.append(more.skipped)
                job.progress(done, total, outcome)
                if job.enough(outcome):
                    lanes.shutdown(wait=True, cancel_futures=True)
                    break
        outcome.skipped = "; ".join(why)
        return outcome


def _take(outcome: Outcome, more: Outcome) -> None:
    outcome.trials += more.trials
    outcome.wrong += more.wrong
    outcome.failed += more.failed
    outcome.counts.update(more.counts)


def _cycles(
    job: Job, name: str, make: MakeFileSystem, capacity: int, count: int
) -> Callable[[], Outcome]:
    seed = job.rng.randrange(2**31)

    def run() -> Outcome:
        life = _Life(job, name, seed, capacity)
        with life.caught(), make(job.folder / f"{name}.fs") as path:
            life.start(path / "disk")
            try:
                filling = _Filling(life, path)
                for _ in range(count):
                    filling.cycle()
                    life.outcome.trials += 1
                    if job.enough(life.outcome):
                        break
                filling.end()
            finally:
                life.kill()
        return life.outcome

    return run


def _limit(job: Job, limit: Callable[[_Life], None]) -> Callable[[], Outcome]:
    name, seed = limit.__name__.strip("_").replace("_", "-"), job.rng.randrange(2**31)

    def run() -> Outcome:
        life = _Life(job, name, seed, LARGER)
        with life.caught():
            try:
                limit(life)
            finally:
                life.kill()
        life.outcome.trials += 1
        return life.outcome

    return run


class _Life:
    """A daemon with a disk tier, a client that verifies, and what it has put."""

    def __init__(self, job: Job, name: str, seed: int, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.seed = seed
        self.rng = random.Random(seed)
        self.outcome = Outcome()
        self.oracle = Oracle(self.outcome)
        self.folder = job.folder / name
        self.folder.mkdir()
        self.prompts: list[Prompt] = []
        self._job = job
        self._numbers = 0
        self.daemon: Daemon
        self.client: Client

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """What ends a life is a finding; each says whose it is."""
        try:
            yield
        except (Away, DaemonDied, Refused, AssertionError, OSError) as error:
            self.oracle.failed(f"{type(error).__name__}: {error}")
        self.outcome.failed = [
            f"{self.name}: {text} (seed {self.seed})" for text in self.outcome.failed
        ]
        self.outcome.wrong = [f"{self.name}: {text}" for text in self.outcome.wrong]

    def make(self, disk_path: Path, **more: Any) -> Daemon:
        self.daemon = daemon_of(
            self._job,
            self.folder,
            host__capacity_bytes="12MiB",
            host__staging_bytes="2MiB",
            disk__path=str(disk_path),
            disk__capacity_bytes=self.capacity,
            server__drain_grace_s=2,
            **more,
        )
        return self.daemon

    def start(self, disk_path: Path, **more: Any) -> None:
        self.make(disk_path, **more).start(START_S)
        self.attach()

    def attach(self) -> None:
        until_loaded(self.daemon, self.oracle)
        self.client = Client(self.daemon, self.oracle, deadline_s=DEADLINE_S)

    def kill(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        if hasattr(self, "daemon") and self.daemon.alive:
            self.daemon.kill()

    def fresh(self) -> Prompt:
        self._numbers += 1
        return Prompt(MODEL, self.seed * 10_000 + self._numbers, PROMPT_BLOCKS)

    def traffic(self, *, durable: bool = False) -> None:
        """A put, which memory has to take and to give back, and a get of something older."""
        try:
            self._traffic(durable)
        except Refused as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            self.count("calls whose time ran out", 1)  # which they kept

    def _traffic(self, durable: bool) -> None:
        prompt = self.fresh()
        put = self.client.put(prompt, durable=durable)
        if put.visible < PROMPT_BLOCKS and put.reason is Reason.DEADLINE_EXCEEDED:
            self.count("puts without an answer in time", 1)
        elif put.visible < PROMPT_BLOCKS:
            self.oracle.failed(f"a put stored {put.visible} blocks: {put.reason.name}")
        elif (there := self._from_memory(prompt)) < PROMPT_BLOCKS:
            self.oracle.failed(f"memory gave {there} of {PROMPT_BLOCKS} blocks just put")
        if self.prompts:
            self.count("blocks read", self.client.get(self.rng.choice(self.prompts)))
        self.prompts.append(prompt)
        self.count("blocks put", put.visible)

    def _from_memory(self, prompt: Prompt) -> int:
        """Waits for no device, so that it has time on a machine that has other work."""
        client = self.client
        client.deadline_s = client.raw.call_s = MEMORY_S
        try:
            return client.get(prompt)
        finally:
            client.deadline_s = client.raw.call_s = DEADLINE_S

    def count(self, what: str, number: float) -> None:
        self.outcome.counts[f"{self.name} {what}"] += int(number)

    def longest(self, what: str, number: float) -> None:
        counts = self.outcome.counts
        counts[f"{self.name} {what}"] = max(counts[f"{self.name} {what}"], int(number))

    def recover(self) -> None:
        """From now until the tier works; noted, and too long is a failure."""
        done = recover(self.daemon, self.client, self.fresh, self.prompts[-100:])
        self.longest("saves again after, ms, longest", done.written_s * 1e3)
        self.longest("all well after, ms, longest", done.well_s * 1e3)
        self.count("cycles that took over 5 s to save again", done.written_s > RECOVERY_S)
        if done.written_s > RECOVERY_S_MAX or done.well_s > RECOVERY_S_MAX:
            took = f"saves after {done.written_s:.0f} s, well after {done.well_s:.0f} s"
            self.oracle.failed(f"{took}: {state_of(self.daemon)}")


# ---------------------------------------------------------------- filling up


class _Filling:
    """Cycles on one file system."""

    def __init__(self, life: _Life, path: Path) -> None:
        self._life = life
        self._path = path
        self._disk = path / "disk"
        self._ballast = path / "ballast"
        self._watch = _Watch(life, path, self._ballast)
        self._fills = 0

    def cycle(self) -> None:
        life = self._life
        with self._watch, Health(life.daemon, life.oracle) as health:
            if not self._fills:
                self._fill()
            self._squeeze()
            self._ballast.unlink()
            life.recover()
            self._fill()
        life.longest("health, ms, longest", health.longest_s * 1e3)

    def _fill(self) -> None:
        """As much as the file system or the capacity has, and some more."""
        life = self._life
        room = min(self._life.capacity, SIZE)
        for turn in range(-(-room // (PROMPT_BLOCKS * BLOCK))):
            life.traffic(durable=turn % 4 == 3)
        self._fills += 1

    def _squeeze(self) -> None:
        """Somebody else takes 30 MB, then all that there is, time and again."""
        life = self._life
        self._ballast.touch()
        began = time.monotonic()
        while not self._grow(BALLAST):
            life.traffic(durable=True)
            if time.monotonic() - began > BALLAST_S_MAX:
                life.oracle.failed("others do not get what they ask for")
                break
        life.longest("others got 30 MB after, ms, longest", (time.monotonic() - began) * 1e3)
        errors = _write_errors(life.daemon)
        end = time.monotonic() + FULL_S
        while time.monotonic() < end:
            self._grow(SIZE)
            life.traffic(durable=True)
        life.count("write errors while full", _write_errors(life.daemon) - errors)

    def _grow(self, size: int) -> bool:
        """Writes ballast on as far as there is room; whether it has its size."""
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while (left := size - self._ballast.stat().st_size) > 0:
                if not file.write(bytes(min(256 << 10, left))):
                    break
        return self._ballast.stat().st_size >= size

    def end(self) -> None:
        """After all cycles the books are right, and what is there after kill -9 is, too."""
        life = self._life
        life.client.close()
        check_quiet(life.daemon, life.oracle, capacity_bytes=life.capacity)
        life.count("most, KiB", self._watch.most_bytes >> 10)
        life.count("of at most, KiB", min(life.capacity, SIZE) >> 10)
        life.count("evictions", metrics(life.daemon)['kvstore_tier_evictions_total{tier="disk"}'])
        life.daemon.kill()
        life.oracle.restarted()
        life.daemon.start(START_S)
        life.attach()
        last = life.prompts[-200:]
        gone = sum(len(missing(life.client, prompt)) for prompt in last)
        life.count("blocks there after kill -9", len(last) * PROMPT_BLOCKS - gone)
        if gone == len(last) * PROMPT_BLOCKS:
            life.oracle.failed("nothing is there after kill -9")


def _write_errors(daemon: Daemon, kind: str = "") -> float:
    """Of all kinds, or of one."""
    name = "kvstore_disk_write_errors_total" + (f'{{kind="{kind}"}}' if kind else "")
    return sum(value for found, value in metrics(daemon).items() if found.startswith(name))


class _Watch:
    """Looks at what the folder takes, all the time. most_bytes: that it was ever seen to take."""

    def __init__(self, life: _Life, path: Path, ballast: Path) -> None:
        self.most_bytes = 0
        self._life = life
        self._path = path
        self._ballast = ballast
        self._base = _used(path) - disk_bytes(path / "disk")
        self._ballast_bytes = 0
        self._changed_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> _Watch:
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        bound = self._life.capacity * CAPACITY_SLACK
        while not self._ended.wait(0.02):
            for how, taken in (("du", self._walked()), ("statvfs", self._asked())):
                self.most_bytes = max(self.most_bytes, taken)
                if taken > bound:
                    self._life.oracle.failed(f"takes {taken} bytes ({how}) of {bound:.0f}")
                    self._ended.set()

    def _walked(self) -> int:
        return disk_bytes(self._path / "disk")

    def _asked(self) -> int:
        """What statvfs says of all but the ballast; 0 if that changed just now: a file system frees
        blocks some time after their name has gone.
        """
        taken, ballast, now = (
            _used(self._path) - self._base,
            _blocks(self._ballast),
            time.monotonic(),
        )
        if ballast != self._ballast_bytes:
            self._ballast_bytes, self._changed_s = ballast, now
        return taken - ballast if now - self._changed_s > SETTLED_S else 0


def _used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------- other limits


def _file_size(life: _Life) -> None:
    """A limit of a file's size, as `ulimit -f` sets it: no new segment, then no index either."""
    life.start(life.folder / "disk")
    life.traffic(durable=True)
    _, hard = resource.prlimit(life.daemon.pid, resource.RLIMIT_FSIZE)
    for limit in (MIB, 64 << 10):
        errors, full = _write_errors(life.daemon), _write_errors(life.daemon, "full")
        resource.prlimit(life.daemon.pid, resource.RLIMIT_FSIZE, (limit, hard))
        with Health(life.daemon, life.oracle):
            for _ in range(40):
                life.traffic(durable=True)
        if _write_errors(life.daemon) == errors:
            life.oracle.failed(f"no write failed under a limit of {limit} bytes")
        if limit == MIB and _write_errors(life.daemon, "full") == full:
            life.oracle.failed("a file that may not grow is not counted as a lack of room")
        resource.prlimit(life.daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        life.recover()


def _read_only(life: _Life) -> None:
    """Mounted read-only at the start, writable later."""
    if reason := missing_file_system(tmpfs, life.folder):
        life.outcome.skipped = f"read-only: {reason}"
        return
    with tmpfs(life.folder / "fs") as path:
        _run(["mount", "-o", "remount,ro", str(path)])
        life.make(path / "disk").start(START_S)
        life.client = Client(life.daemon, life.oracle, deadline_s=DEADLINE_S)
        with Health(life.daemon, life.oracle):
            for _ in range(20):
                life.traffic(durable=True)
        if "ead-only" not in state_of(life.daemon):
            life.oracle.failed(f"the state does not say it: {state_of(life.daemon)}")
        _run(["mount", "-o", "remount,rw", str(path)])
        life.recover()
        life.kill()


def _no_permission(life: _Life) -> None:
    """The folder loses its permissions and gets them back."""
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            life.outcome.skipped = "no-permission: root without setpriv"
            return
        # Permissions count for root, too, without this.
        prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    life.start(life.folder / "disk", argv_prefix=prefix)
    for _ in range(10):
        life.traffic(durable=True)
    folders = [life.folder / "disk" / name for name in ("segments", "index")]
    folders.append(life.folder / "disk")
    for chosen in (folders[:1], folders[1:2], folders[2:], folders):
        modes = [folder.stat().st_mode for folder in chosen]
        for folder in chosen:
            folder.chmod(0)
        try:
            with Health(life.daemon, life.oracle):
                for _ in range(40):
                    life.traffic(durable=True)
        finally:
            for folder, mode in zip(reversed(chosen), reversed(modes), strict=True):
                folder.chmod(mode)
        life.recover()


def _removed(life: _Life) -> None:
    """The folder is removed under the daemon, which begins it anew."""
    disk = life.folder / "disk"
    life.start(disk)
    for turn in range(3):
        for _ in range(10):
            life.traffic(durable=True)
        life.oracle.forgotten()
        shutil.rmtree(disk)
        with Health(life.daemon, life.oracle):
            begun_s = seconds_until((disk / "FORMAT").exists, RECOVERY_S_MAX)
            life.longest("begun anew after, ms, longest", begun_s * 1e3)
            life.recover()
            for _ in range(10):
                life.traffic(durable=True)
        life.count("turns", 1)
        if turn == 2:
            _after_kill(life)


def _after_kill(life: _Life) -> None:
    """What was acknowledged as durable since is there."""
    life.client.close()
    life.daemon.kill()
    life.oracle.restarted()
    life.daemon.start(START_S)
    life.attach()
    for prompt in life.prompts:
        run = life.oracle.durable_run(prompt)
        if run and (there := life.client.get(prompt)) < run:
            life.oracle.failed(f"after kill -9 {there} of {run} durable blocks are there")
            return
