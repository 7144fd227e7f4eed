"""Stage C: power cuts, made from logs of writes.

Two kinds of images, each opened by the production tier. `memory`: files in memory and an index that
is a log of commits, so that a cut goes between any two of their operations. `real`: the tier's own
folder with LMDB, and the ledger, as a shim saw them written, so that the index's own file is cut at
any write, its unsynced pages torn and reordered; opened in a throw-away child.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.ledger import LmdbLedger
from kvstore.testing.files import Injection, Keep, Op
from kvstore.testing.folder import MemoryFolder
from kvstore.tiers.disk.dictindex import CommitFault
from kvstore.tiers.disk.opening import DiskFolder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.verify import verify
from tests.torture import disk_history, disk_life, forked, mutants, writelog
from tests.torture.base import Job, Outcome
from tests.torture.disk_history import Event, History, Name, Standing
from tests.torture.disk_life import Found, Life, room

MEMORY_IMAGES, REAL_IMAGES = 2_000, 1_000
IMAGES_A_LIFE = 250
STEPS = 60
CAPACITIES = (room(20, 3), room(26, 5), room(34, 5))
VERIFY_EVERY = 8
PROBE_EVERY = 60
"""Every so many images are examined by the probe's own new interpreter."""
SHARED_MEMORY = Path("/dev/shm")


class PowerLoss:
    """See the module's docstring."""

    name = "power-loss"
    what = "images of the disk tier and the ledger after a power cut at any write, opened and used"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        self._total = job.scale.of(MEMORY_IMAGES) + job.scale.of(REAL_IMAGES)
        memory = _share(job.scale.of(MEMORY_IMAGES))
        for images in memory:
            if not job.enough(outcome):
                self._memory_life(job, outcome, images)
        if not writelog.compiler():
            outcome.skipped = "images of real files: no C compiler for the shim that logs writes"
            return outcome
        with fast_folder(job.folder) as folder:
            shim = folder / "writelog.so"
            writelog.build(shim)
            for number, images in enumerate(_share(job.scale.of(REAL_IMAGES))):
                if not job.enough(outcome):
                    place = folder / str(number)
                    place.mkdir()
                    self._real_life(job, outcome, images, place, shim)
                    shutil.rmtree(place)
        return outcome

    # ------------------------------------------------------------------ memory

    def _memory_life(self, job: Job, outcome: Outcome, images: int) -> None:
        chance = random.Random(job.rng.getrandbits(32))
        capacity_bytes = chance.choice(CAPACITIES)
        folder = MemoryFolder()
        history = History(lambda what: folder.stamp())

        def fault(chance: random.Random) -> None:
            if chance.random() < 0.3:
                broken = CommitFault(OSError(errno.EIO, "broken"), chance.random() < 0.5)
                folder.index.faults[folder.index.attempts + chance.randint(1, 3)] = broken
                return
            op = chance.choice((Op.PWRITEV, Op.FDATASYNC, Op.FDATASYNC, Op.CREATE, Op.UNLINK))
            nth, torn = chance.randint(1, 3), 512 * chance.randint(0, 8)
            folder.files.inject(Injection(op, nth, error=errno.EIO, moved_bytes=torn))

        life = Life(history, chance, lambda: folder, capacity_bytes=capacity_bytes, fault=fault)
        life.run(STEPS)
        folder.files.heal()
        outcome.counts.update(life.counts)
        standings = Standings(history.events)
        for number, cut in enumerate(_chosen(list(folder.cuts()), images, chance)):
            standing = standings.at(cut)
            found = Found()
            after = disk_life.scaled(capacity_bytes, chance.choice((0.7, 1.0, 1.3)))
            image = folder.cut(cut, chance)
            with told(found):
                tier = disk_life.start(image, capacity_bytes)
                _examine(tier, standing, history.names, found, number)
                # Once more, as after kill -9, with another capacity.
                again = disk_life.start(image.restarted(), after)
                disk_life.pass_time(again)
                disk_life.use(again, found, number + 1)
            if image.asides:
                found.failed.append(f"set aside: {image.asides}")
            _count(job, outcome, found, f"memory image at {cut}", self._total)
            if job.enough(outcome):
                return

    # ------------------------------------------------------------------ real

    def _real_life(self, job: Job, outcome: Outcome, images: int, place: Path, shim: Path) -> None:
        chance = random.Random(job.rng.getrandbits(32))
        capacity_bytes = chance.choice(CAPACITIES)
        life, history = place / "life", place / "history"
        life.mkdir()
        argv = [sys.executable, "-m", "tests.torture.recorded_life", str(life), str(history)]
        argv += [str(chance.getrandbits(32)), str(STEPS), str(capacity_bytes)]
        environ = {**os.environ, mutants.VARIABLE: job.mutant}
        try:
            entries = writelog.record(shim, argv, life, place / "log", environ)
        except subprocess.CalledProcessError as error:
            why = " ".join(error.stderr.decode().split()[-60:])
            outcome.failed.append(f"the life that is recorded: {why}")
            return
        events = disk_history.load(history)
        outcome.counts["entries of real logs"] += len(entries)
        names = dict.fromkeys(name for event in events for name in event.names)
        standings, replay = Standings(events), writelog.Replay()
        at = 0
        cuts = _chosen(range(1, len(entries) + 1), images, chance)
        for number, cut in enumerate(cuts):
            while at < cut:
                replay.step(entries[at])
                at += 1
            image = place / "image"
            replay.write_image(str(image), chance)
            found = _open_image(image, capacity_bytes, standings.at(cut), names, number)
            _count(job, outcome, found, f"real image at {cut}", self._total)
            shutil.rmtree(image)
            if job.enough(outcome):
                return
        for entry in entries[at:]:
            replay.step(entry)
        whole = place / "whole"
        replay.write_image(str(whole), chance, Keep.ALL)
        outcome.failed += [
            f"the log of writes lacks some of {name}" for name in _differ(life, whole)
        ]


class Standings:
    """What must hold of a crash at a moment, for moments in order."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._taken = 0
        self._standing = Standing()

    def at(self, moment: int) -> Standing:
        """As of the first moment that is not before the last one asked for."""
        while self._taken < len(self._events) and self._events[self._taken].at <= moment:
            self._standing.take(self._events[self._taken])
            self._taken += 1
        return self._standing


def _open_image(
    image: Path, capacity_bytes: int, standing: Standing, names: Iterable[Name], number: int
) -> Found:
    """Opens, examines and uses an image in a child."""

    def work() -> dict[str, Any]:
        found = Found()
        with told(found):
            _examine_real(image, capacity_bytes, standing, names, found, number)
        return vars(found)

    with contextlib.ExitStack() as undo:
        if number % PROBE_EVERY:
            undo.enter_context(forked.quick_probe())
        ended = forked.call(work)
    if ended.result is None:
        return Found(failed=[f"the tier's process: {ended.why}"])
    fields = ended.result
    return Found(fields["wrong"], fields["failed"], Counter(fields["counts"]))


def _examine_real(
    image: Path,
    capacity_bytes: int,
    standing: Standing,
    names: Iterable[Name],
    found: Found,
    number: int,
) -> None:
    ledger = LmdbLedger(str(image / "ledger"))
    if tuple(ledger.rows()) not in standing.ledgers:
        found.failed.append(f"the ledger has other rows than were written; {ledger.set_aside}")
    ledger.put_many([("after", b"", b"")])
    ledger.close()
    disk = str(image / "disk")
    tier = disk_life.start(DiskFolder(disk), capacity_bytes)
    _examine(tier, standing, names, found, number)
    blocks = tier.usage().blocks
    tier.close()
    if number % VERIFY_EVERY:
        return
    report = verify(disk, capacity_bytes=capacity_bytes)
    found.counts["verified"] += 1
    if not report.ok or not report.rows == report.right == blocks:
        why = report.damages[:3] or f"{report.right} of {report.rows} right, {blocks} accounted for"
        found.failed.append(f"verify says: {why}")
    again = disk_life.start(DiskFolder(disk), capacity_bytes)
    if again.usage().blocks != blocks:
        found.failed.append(f"{again.usage().blocks} blocks after another start, not {blocks}")
    again.close()


def _examine(
    tier: DiskTier, standing: Standing, names: Iterable[Name], found: Found, number: int
) -> None:
    """What has to hold of a tier that has just started on an image."""
    if tier.set_aside:
        found.counts["cold"] += 1
        if standing.acknowledged:
            found.failed.append(f"set aside although blocks were acknowledged: {tier.set_aside}")
    disk_life.examine(tier, standing, names, found)
    disk_life.use(tier, found, number)
    dropped = tier.counts["corrupt_dropped"], tier.stats().counters["rows_dropped"]
    if any(dropped):
        found.failed.append(f"{dropped[0]} records and {dropped[1]:.0f} rows were dropped")


# ---------------------------------------------------------------- parts


def _share(images: int) -> list[int]:
    """Images of each life."""
    lives = -(-images // IMAGES_A_LIFE)
    return [images // lives + (number < images % lives) for number in range(lives)]


def _chosen(moments: Sequence[int], count: int, chance: random.Random) -> list[int]:
    """So many moments, in order: each one once before any is there twice."""
    rounds, rest = divmod(count, len(moments))
    return sorted([*moments] * rounds + chance.sample(list(moments), rest))


def _count(job: Job, outcome: Outcome, found: Found, what: str, total: int) -> None:
    outcome.trials += 1
    outcome.counts.update(found.counts)
    outcome.wrong += [f"{what}: {text}" for text in found.wrong]
    outcome.failed += [f"{what}: {text}" for text in found.failed]
    outcome.counts[what.partition(" image")[0] + " images"] += 1
    job.progress(outcome.trials, total, outcome)


@contextlib.contextmanager
def told(found: Found) -> Iterator[None]:
    """What an examination raises is a finding."""
    try:
        yield
    except Exception as error:  # whatever it is, the tier did not do what it has to
        place = traceback.extract_tb(error.__traceback__)[-1]
        found.failed.append(f"{type(error).__name__} in {place.name}: {error}")


def _differ(one: Path, other: Path) -> list[str]:
    """Names of files that are not equal. LMDB's lock file is mapped, and of no use after a cut."""
    files = {p.relative_to(root) for root in (one, other) for p in root.rglob("*") if p.is_file()}
    return sorted(
        str(name)
        for name in files
        if name.name != "lock.mdb"
        and not (
            (one / name).is_file()
            and (other / name).is_file()
            and filecmp.cmp(one / name, other / name, shallow=False)
        )
    )


@contextlib.contextmanager
def fast_folder(folder: Path) -> Iterator[Path]:
    """A folder in memory if there is one, else below `folder`: thousands of images are written."""
    in_memory = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(
        prefix="kvstore-torture-", dir=SHARED_MEMORY if in_memory else folder
    ) as made:
        yield Path(made)
