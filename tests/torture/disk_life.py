"""A life of a disk tier, by a seed, and what is asked of a tier that starts on what is left of it.

`Life` saves, evicts, reuses slots, makes and retires segments, forgets names and spaces, changes
capacity and meets faults; all of it is noted in its history. `examine` holds a tier to what follows
from that, `use` goes on with it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.ledger import Ledger
from kvstore.model.reasons import BlockCorrupt, KVStoreError
from kvstore.testing.clock import ManualClock
from kvstore.testing.payload import Finding, check, payload, tag_of
from kvstore.tiers.base import Bytes, SavedBlock
from kvstore.tiers.disk.format import payload_checksum, record_bytes
from kvstore.tiers.disk.opening import Folder
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.rows import index_bytes
from kvstore.tiers.disk.tier import DiskTier
from tests.torture.disk_history import History, Name, NotingFolder, Standing

SECOND_NS = 10**9
SMALL, LARGE = 4_096, 12_288
SPACES = tuple(range(1, 13))
RETRIES = 12


def tenant_of(space_id: int) -> str:
    return "a" if space_id % 3 else "b"


def fingerprint_of(space_id: int) -> bytes:
    return hashlib.sha256(b"fingerprint/%d" % space_id).digest()


def length_of(key: bytes) -> int:
    """Two sizes of blocks; which one a block has follows from its key."""
    return LARGE if key[0] < 48 else SMALL


def tag(name: Name, version: int) -> bytes:
    return tag_of(tenant_of(name[0]), fingerprint_of(name[0]), name[1], version)


def content(name: Name, version: int) -> Bytes:
    """The bytes of one write of a block, at the begin of a page."""
    length = length_of(name[1])
    made = aligned_bytes(length)
    made[:] = payload(tag(name, version), length)
    return made


def room(small: int, large: int) -> int:
    """A capacity for so many blocks, and their index."""
    records = small * record_bytes(SMALL) + large * record_bytes(LARGE)
    return records + index_bytes(small + large)


def scaled(capacity_bytes: int, share: float) -> int:
    """A capacity for that share of the records."""
    fixed_bytes = index_bytes(0)
    return fixed_bytes + int((capacity_bytes - fixed_bytes) * share)


# ---------------------------------------------------------------- life


def start(folder: Folder, capacity_bytes: int, spaces: Iterable[int] = SPACES) -> DiskTier:
    """A tier that is open and loaded, as the daemon's thread makes it. AssertionError if it does
    not come up.
    """
    clock = ManualClock()
    tier = DiskTier(folder, capacity_bytes=capacity_bytes, clock=clock, parallel=False)
    for space_id in spaces:
        tier.describe(space_id, tenant_of(space_id), fingerprint_of(space_id), SMALL)
    for _ in range(RETRIES):
        if tier.open() and tier.load_index():
            return tier
        clock.advance_ns(5 * SECOND_NS)
    raise AssertionError(f"the tier did not come up: {tier.writes.reason}")


def pass_time(tier: DiskTier, elapsed_ns: int = 5 * SECOND_NS) -> None:
    """Time goes on, and the tier tends."""
    assert isinstance(tier.clock, ManualClock)
    tier.clock.advance_ns(elapsed_ns)
    tier.tend()


def find(tier: DiskTier, space_id: int, keys: Sequence[bytes]) -> list[bytes]:
    """What the tier knows of `keys`; it waits for nothing."""
    try:
        tier.find(space_id, keys).send(None)
    except StopIteration as answer:
        return list(answer.value)
    raise AssertionError("a look-up waited")


class Life:
    """One life. fault: lets something fail soon. folder: makes the folder, again at each restart;
    None: it is opened once. ledger: is written to, too.
    """

    def __init__(
        self,
        history: History,
        chance: random.Random,
        folder: Callable[[], Folder],
        *,
        capacity_bytes: int,
        fault: Callable[[random.Random], None],
        ledger: Ledger | None = None,
        restarts: bool = False,
    ) -> None:
        self.history = history
        self.counts: Counter[str] = Counter()
        self._chance = chance
        self._folder = folder
        self._fault = fault
        self._ledger = ledger
        self._restarts = restarts
        self._values: dict[tuple[str, bytes], bytes] = {}
        self._version = 0
        self._spaces = list(SPACES[:4])
        self._capacity_bytes = capacity_bytes
        self._start(capacity_bytes)

    def _start(self, capacity_bytes: int) -> None:
        folder = NotingFolder(self._folder(), self.history)
        self.tier = start(folder, capacity_bytes, SPACES)
        self.tier.on_dropped = self._dropped

    def _dropped(self, space_id: int, keys: list[bytes]) -> None:
        self.history.note("dropped", [(space_id, key) for key in keys])

    def run(self, steps: int) -> None:
        """So many steps."""
        kinds = {
            self._save: 60, self._forget: 8, self._drop_space: 2, self._tend: 10,
            self._read: 10, self._fail: 3, self._write_ledger: 8, self._restart: 3,
        }  # fmt: skip
        steps_of = list(kinds)
        for _ in range(steps):
            (step,) = self._chance.choices(steps_of, list(kinds.values()))
            self.counts[step.__name__.strip("_")] += 1
            step()
        self.counts["evictions"] += self.tier.counts["evictions"]

    # ------------------------------------------------------------------ steps

    def _save(self) -> None:
        space_id = self._chance.choice(self._spaces)
        chain = self._chance.randrange(30)
        keys = [
            hashlib.sha256(b"%d/%d" % (chain, number)).digest()
            for number in range(self._chance.randint(1, 7))
        ]
        self._version += 1
        blocks = []
        for depth, key in enumerate(keys):
            data = content((space_id, key), self._version)
            self.history.wrote((space_id, key), self._version, payload_checksum(data))
            blocks.append(SavedBlock(space_id, key, keys[depth - 1] if depth else b"", depth, data))
        for saved in self.tier.save_batch(blocks):
            if isinstance(saved, bytes):
                name, version = self.history.versions[saved]
                self.history.note("saved", [name], version)
                self.counts["saved"] += 1
            else:
                self.counts["refused"] += 1

    def _forget(self) -> None:
        names = list(self.history.names)
        chosen = self._chance.sample(names, min(len(names), self._chance.randint(1, 6)))
        self._forget_these(chosen, chosen)

    def _drop_space(self) -> None:
        left = [one for one in SPACES if one > max(self._spaces)]
        if not left:
            return
        gone = self._spaces.pop(self._chance.randrange(len(self._spaces)))
        self._spaces.append(left[0])
        self._forget_these([(gone, b"")], [name for name in self.history.names if name[0] == gone])

    def _forget_these(self, asked: list[Name], names: list[Name]) -> None:
        self.history.note("forget", names)
        try:
            self.tier.forget(asked)
        except OSError:
            self.counts["forgetting failed"] += 1
            return
        self.history.note("forgotten", names)

    def _tend(self) -> None:
        pass_time(self.tier)

    def _read(self) -> None:
        names = list(self.history.names)
        for space_id, key in self._chance.sample(names, min(len(names), 8)):
            if find(self.tier, space_id, [key]):
                self.tier.load(space_id, key, aligned_bytes(length_of(key)))

    def _fail(self) -> None:
        self._fault(self._chance)

    def _write_ledger(self) -> None:
        if self._ledger is None:
            return
        changes: list[tuple[str, bytes, bytes | None]] = []
        for _ in range(self._chance.randint(1, 4)):
            table, key = self._chance.choice(("epoch", "space")), b"%d" % self._chance.randrange(9)
            value = self._chance.randbytes(self._chance.randint(1, 400))
            changes.append((table, key, value if self._chance.random() < 0.8 else None))
        for table, key, new in changes:
            self._values.pop((table, key), None)
            if new is not None:
                self._values[table, key] = new
        values = [(*name, value) for name, value in sorted(self._values.items())]
        self.history.note("ledger", values=values)
        self._ledger.put_many(changes)
        self.history.note("in ledger", values=values)

    def _restart(self) -> None:
        if not self._restarts:
            return
        self.counts["evictions"] += self.tier.counts["evictions"]
        self.tier.close()
        self._start(scaled(self._capacity_bytes, self._chance.choice((0.7, 1.0, 1.5))))


# ---------------------------------------------------------------- examination


@dataclass
class Found:
    """What an examination found, as `Outcome` has it."""

    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def examine(tier: DiskTier, standing: Standing, names: Iterable[Name], found: Found) -> set[Name]:
    """Reads every block that is known; those that are there."""
    known: set[Name] = set()
    by_space: dict[int, list[bytes]] = {}
    for space_id, key in names:
        by_space.setdefault(space_id, []).append(key)
    for space_id, keys in by_space.items():
        known.update((space_id, key) for key in find(tier, space_id, keys))
    for name in sorted(known):
        _examine_block(tier, name, standing, found)
    for name in standing.required.keys() - known:
        found.failed.append(f"durable block {_text(name)} is lost")
    assert tier.volume is not None
    loaded = len(tier.volume.catalog)
    if loaded != len(known):
        found.failed.append(f"{loaded} blocks are known, of which {len(known)} were ever saved")
    with tier.volume.books:
        tier.volume.ring.check()
    if (blocks := tier.usage().blocks) != len(known):
        found.failed.append(f"{blocks} blocks are accounted for, {len(known)} are there")
    found.counts["blocks read"] += len(known)
    return known


def _examine_block(tier: DiskTier, name: Name, standing: Standing, found: Found) -> None:
    into = aligned_bytes(length_of(name[1]))
    try:
        tier.load(*name, into)
    except (BlockCorrupt, KVStoreError, OSError) as error:
        found.failed.append(f"block {_text(name)} is known and cannot be read: {error}")
        return
    right = standing.allowed.get(name, set())
    result = check(into, [tag(name, version) for version in right])
    if result is not Finding.RIGHT:
        why = result.value if right else "it was forgotten, or never committed"
        found.wrong.append(f"block {_text(name)}: {why}")


def use(tier: DiskTier, found: Found, mark: int, *, sizes: bool = True) -> None:
    """Goes on with a tier: what is put is there, and all fits. sizes: files are as long as the
    index says.
    """
    space_id = SPACES[-1]
    for number in range(4):  # one by one: of a class there may be room for no more
        key = hashlib.sha256(b"after/%d/%d" % (mark, number)).digest()
        name = (space_id, key)
        (saved,) = tier.save_batch([SavedBlock(space_id, key, b"", 0, content(name, 0))])
        if not isinstance(saved, bytes):
            found.failed.append(f"nothing can be saved afterwards: {saved}")
        elif find(tier, space_id, [key]):
            _examine_block(tier, name, Standing(allowed={name: {0}}), found)
        else:
            found.failed.append("a block that was just saved is not there")
    pass_time(tier)
    assert tier.volume is not None
    there, ring = tier.volume.files.list(), tier.volume.ring.usage()
    size_bytes = sum(one.size_bytes for one in there.values())
    if there.keys() != tier.volume.segments.keys():
        found.failed.append(f"{len(there)} segments are there, not {len(tier.volume.segments)}")
    if sizes and size_bytes != ring.segment_bytes:
        found.failed.append(f"{size_bytes} bytes of segments, {ring.segment_bytes} in the books")
    if (used := tier.usage().used_bytes) > tier.capacity_bytes:
        found.failed.append(f"{used} bytes are used, of {tier.capacity_bytes}")


def _text(name: Name) -> str:
    return f"{name[1][:4].hex()} of space {name[0]}"
