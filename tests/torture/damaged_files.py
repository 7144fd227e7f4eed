"""Stage F2: damage at rest. Every file of the disk tier's folder and of the ledger, damaged in
every way, opened by the production code in a throw-away child, read, checked offline, and used on.

What has to hold: no wrong block, ever; the daemon's part comes up, warm or cold (the death that
LMDB's own file may bring is the probe's, whose parent then starts cold); what is lost is counted,
block by block for records; the blocks that the damage does not touch are there; the next start has
nothing to complain about.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from kvstore.ledger import LmdbLedger
from kvstore.model.reasons import BlockCorrupt, KVStoreError
from kvstore.testing.payload import Finding, check
from kvstore.tiers.base import SavedBlock
from kvstore.tiers.disk.opening import DiskFolder
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.report import Kind
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.verify import verify
from tests.torture import forked
from tests.torture.base import Job, Outcome
from tests.torture.damages import CAPACITY_BYTES, Damage, Rest, damages, make_folder, write_files
from tests.torture.disk_history import Name
from tests.torture.disk_life import Found, content, find, length_of, start, tag, use
from tests.torture.power_loss import fast_folder, told

FILES = 2_100
PROBE_EVERY = 60
VERIFY_EVERY = 4
AGAIN_EVERY = 4
NEW_VERSION = 9


class DamagedFiles:
    """See the module's docstring."""

    name = "damaged-files"
    what = "segments, index, format, ledger and locks damaged at rest, opened, read and used"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        count = job.scale.of(FILES, at_least=12)
        with fast_folder(job.folder) as folder:
            rest_folder, scratch = folder / "rest", folder / "scratch"
            rest_folder.mkdir()
            scratch.mkdir()
            rest = make_folder(rest_folder)
            for number, damage in enumerate(damages(rest, job.rng, scratch, count)):
                place = folder / "damaged"
                write_files(place, {**rest.files, **damage.files})
                found = _in_child(rest, damage, place, number)
                shutil.rmtree(place)
                outcome.trials += 1
                outcome.counts.update(found.counts)
                outcome.wrong += [f"{number}: {damage.what}: {text}" for text in found.wrong]
                outcome.failed += [f"{number}: {damage.what}: {text}" for text in found.failed]
                job.progress(outcome.trials, count, outcome)
                if job.enough(outcome):
                    break
        return outcome


def _in_child(rest: Rest, damage: Damage, place: Path, number: int) -> Found:
    def work() -> dict[str, Any]:
        found = Found()
        with told(found):
            _Trial(rest, damage, place, number, found).run()
        return vars(found)

    with contextlib.ExitStack() as undo:
        if number % PROBE_EVERY:
            undo.enter_context(forked.quick_probe())
        ended = forked.call(work)
    if ended.result is None:
        return Found(failed=[f"the tier's process: {ended.why}"])
    return Found(ended.result["wrong"], ended.result["failed"], Counter(ended.result["counts"]))


class _Trial:
    """One damaged folder."""

    def __init__(self, rest: Rest, damage: Damage, place: Path, number: int, found: Found) -> None:
        self._rest = rest
        self._damage = damage
        self._disk = str(place / "disk")
        self._ledger = str(place / "ledger")
        self._number = number
        self._found = found

    def run(self) -> None:
        self._open_ledger()
        if self._number % VERIFY_EVERY == 0:
            self._verify()
        tier = start(DiskFolder(self._disk), CAPACITY_BYTES)
        there = self._read(tier)
        self._put_again(tier)
        # A segment of another size than the index says is only as long as it is.
        use(tier, self._found, self._number, sizes=not self._resized())
        blocks, cold = tier.usage().blocks, tier.set_aside
        tier.close()
        self._found.counts["cold" if cold else "warm"] += 1
        if self._number % AGAIN_EVERY == 1:
            self._start_again(there, blocks)

    def _resized(self) -> bool:
        before = self._rest.files
        return any(
            path.endswith(".seg") and data is not None and len(data) != len(before.get(path, data))
            for path, data in self._damage.files.items()
        )

    def _open_ledger(self) -> None:
        """All of its rows, or an empty one that says so."""
        for again in (False, True):
            ledger = LmdbLedger(self._ledger)
            rows = [row for row in ledger.rows() if row[0] != "after"]
            if rows != self._rest.ledger:
                if rows:
                    self._found.wrong.append(f"the ledger gives {len(rows)} other rows")
                elif not ledger.set_aside and not again:
                    if "ledger/ledger.mdb" not in self._damage.files:
                        self._found.failed.append("the ledger is empty, and says nothing")
                    elif self._damage.files["ledger/ledger.mdb"] is not None:
                        self._found.failed.append("a damaged ledger is empty, and says nothing")
                self._found.counts["ledgers set aside"] += not again
            elif ledger.set_aside:
                self._found.failed.append(f"set aside for nothing: {ledger.set_aside}")
            ledger.put_many([("after", b"%d" % again, b"value")])
            if ledger.rows()[0][0] != "after":
                self._found.failed.append("the ledger does not take a row")
            ledger.close()

    def _verify(self) -> None:
        report = verify(self._disk)
        self._found.counts["verified"] += 1
        lost = self._damage.lost
        if lost is None:
            if report.right < len(self._rest.rows) and report.ok:
                self._found.failed.append(f"verify finds {report.right} blocks and no damage")
            return
        counted = {Kind.RECORD, Kind.INDEX_ROW, Kind.SEGMENT_MISSING, Kind.UNREADABLE}
        named = sum(count for kind, count in report.damage_counts.items() if kind in counted)
        right = len(self._rest.rows) - len(lost)
        missing = report.damage_counts.get(Kind.SEGMENT_MISSING, 0)
        if report.right != right or (named < len(lost) and not missing):
            self._found.failed.append(
                f"verify: {report.right} right, not {right}; {named} damaged, not {len(lost)}"
            )

    def _read(self, tier: DiskTier) -> set[Name]:
        """Reads all that is known; the names that are right. What is not is counted, or told."""
        rest, found = self._rest, self._found
        known: set[Name] = set()
        for space_id in {name[0] for name in (*rest.rows, *rest.gone)}:
            keys = [name[1] for name in (*rest.rows, *rest.gone) if name[0] == space_id]
            known.update((space_id, key) for key in find(tier, space_id, keys))
        right = {name for name in known if self._read_one(tier, name)}
        corrupt, dropped = tier.counts["corrupt_dropped"], len(known) - len(right)
        if corrupt != dropped:
            found.failed.append(f"{dropped} damaged records were read, {corrupt} are counted")
        found.counts["records dropped"] += corrupt
        rows = int(tier.stats().counters["rows_dropped"])
        found.counts["rows dropped"] += rows
        unknown = rest.rows.keys() - known
        segments = tier.counts["lost_segments"]
        if unknown and not tier.set_aside and not segments and rows < len(unknown):
            found.failed.append(f"{len(unknown)} blocks are not known, {rows} rows are counted")
        lost = self._damage.lost
        if lost is not None and right != rest.rows.keys() - lost:
            found.failed.append(
                f"{len(right)} of {len(rest.rows)} blocks are right, {len(lost)} were hit"
            )
        if tier.usage().blocks != len(right):
            found.failed.append(f"{tier.usage().blocks} are accounted for, {len(right)} are there")
        return right

    def _read_one(self, tier: DiskTier, name: Name) -> bool:
        into = aligned_bytes(length_of(name[1]))
        try:
            tier.load(*name, into)
        except BlockCorrupt:
            return False
        except (KVStoreError, OSError) as error:
            self._found.failed.append(f"a block is known and cannot be read: {error}")
            return False
        version = self._rest.versions.get(name)
        tags = [] if version is None else [tag(name, version)]
        if check(into, tags) is not Finding.RIGHT:
            self._found.wrong.append(f"block {name[1][:4].hex()} of space {name[0]}")
        return True

    def _put_again(self, tier: DiskTier) -> None:
        """What was lost can be put anew, and is then right."""
        for name in sorted(self._rest.rows)[:: 1 + self._number % 5][:8]:
            if find(tier, name[0], [name[1]]):
                continue
            data = content(name, NEW_VERSION)
            (saved,) = tier.save_batch([SavedBlock(*name, b"", 0, data)])
            into = aligned_bytes(len(data))
            if not isinstance(saved, bytes):
                self._found.failed.append(f"a lost block cannot be put anew: {saved}")
                continue
            tier.load(*name, into)
            if (into != data).any():
                self._found.wrong.append("a block that was put anew")

    def _start_again(self, there: set[Name], blocks: int) -> None:
        """The second start after the damage is like any other."""
        tier = start(DiskFolder(self._disk), CAPACITY_BYTES)
        if tier.set_aside:
            self._found.failed.append(f"set aside at the second start: {tier.set_aside}")
        if tier.usage().blocks != blocks:
            self._found.failed.append(f"{tier.usage().blocks} blocks at the second start, {blocks}")
        for name in there:
            if find(tier, name[0], [name[1]]) and not self._read_one(tier, name):
                self._found.failed.append("a record is damaged at the second start")
        tier.close()
