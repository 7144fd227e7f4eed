"""The disk tier without a daemon, killed at each enumerated point of scripted lives.

    python -m tests.torture.engine FOLDER SEED SCALE      one JSON line a point, then {"ended": 1}

A point is a call that changes something on the device, of the tier or of what it stands on, and
when the process ends: before it, which is after the one before, or in the middle of a write. A dry
run of each life counts the calls. Then the life is lived again in a fork that ends at the point;
another fork opens what is left, compares it with what the first one had said before it ended, and
goes on living there. Some of those are killed as well.

For the stage kill-points alone, which runs it as a process of its own: forks want no threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.model.reasons import BlockCorrupt, KVStoreError
from kvstore.model.values import PAGE_BYTES
from kvstore.testing.clock import ManualClock
from kvstore.testing.payload import Finding, check, payload, tag_of
from kvstore.tiers.base import Bytes, SavedBlock
from kvstore.tiers.disk import probe
from kvstore.tiers.disk.files import SegmentFiles, SystemCalls
from kvstore.tiers.disk.index import LmdbIndex
from kvstore.tiers.disk.opening import DiskFolder
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.verify import verify
from tests.torture import mutants

SECOND = 10**9
CAPACITY_BYTES = 3 << 19
AGAIN_SHARE = 0.25
"""Of the restarts after a kill, so many are killed as well."""

Name = tuple[int, bytes]


# ---------------------------------------------------------------- points


@dataclass(frozen=True)
class Point:
    """call: which of all calls of a life, from 0. when: "before", "torn", or "after" the last."""

    life: str
    op: str
    number: int
    call: int
    when: str

    def __str__(self) -> str:
        return f"{self.life}: {self.when} {self.op} {self.number}"


class Hooks:
    """Counts the calls of this process that change a device, and ends it at one of them."""

    def __init__(self, call: int = -1, when: str = "before") -> None:
        self.seen: list[str] = []
        self._call = call
        self._when = when

    def wrap(self, op: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            if op == "open" and not (len(args) > 1 and args[1] & (os.O_CREAT | os.O_TRUNC)):
                return inner(*args, **kwargs)
            here = len(self.seen) == self._call
            self.seen.append(op)
            if here and self._when == "before":
                die()
            if here and self._when == "torn":
                fd, buffers, *rest = args
                inner(fd, _half(buffers), *rest)
                die()
            result = inner(*args, **kwargs)
            if here and self._when == "after":
                die()
            return result

        return outer

    def install(self) -> None:
        """Into this process, for good."""
        for op in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open"):
            setattr(os, op, self.wrap(op, getattr(os, op)))
        os.posix_fallocate = self.wrap("fallocate", os.posix_fallocate)
        calls = SystemCalls()
        wrapped = {
            one.name: self.wrap(one.name, getattr(calls, one.name))
            for one in dataclasses.fields(SystemCalls)
            if one.name != "preadv"
        }
        defaults = SegmentFiles.__init__.__kwdefaults__
        assert defaults is not None
        defaults["calls"] = dataclasses.replace(calls, **wrapped)
        setattr(LmdbIndex, "commit", self.wrap("commit", LmdbIndex.commit))  # noqa: B010


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half(buffers: Sequence[Bytes]) -> list[Bytes]:
    """The first half of the bytes, in whole pages."""
    left = sum(map(len, buffers)) // 2 // PAGE_BYTES * PAGE_BYTES
    kept = []
    for one in buffers:
        kept.append(one[:left])
        left -= len(kept[-1])
    return [one for one in kept if len(one)]


# ---------------------------------------------------------------- what is known


@dataclass
class Known:
    """What must, may and must not be there, by what was said before the end. must: saved, and
    neither forgotten nor dropped since; possible: versions that a block may have.
    """

    possible: dict[Name, set[int]] = field(default_factory=dict)
    must: set[Name] = field(default_factory=set)
    spaces: set[int] = field(default_factory=set)
    lengths: dict[Name, int] = field(default_factory=dict)

    def hear(self, said: dict[str, Any]) -> None:
        names = [(space, bytes.fromhex(key)) for space, key in said["names"]]
        if said["what"] == "saving":
            for name in names:
                self.possible.setdefault(name, set()).add(said["version"])
                self.lengths[name] = said["length"]
        elif said["what"] == "saved":
            self.must.update(names)
        elif said["what"] == "cold":
            self.must.clear()
        elif said["what"] in ("dropped", "forgetting"):
            self.must -= self._meant(names)
        elif said["what"] == "forgot":
            for name in self._meant(names):
                self.possible.pop(name, None)

    def _meant(self, names: Sequence[Name]) -> set[Name]:
        """An empty key means all of a space."""
        whole = {space for space, key in names if not key}
        return {*names, *(name for name in self.possible if name[0] in whole)}


# ---------------------------------------------------------------- one life


@dataclass(frozen=True)
class SpaceOf:
    tenant: str
    length: int

    @property
    def fingerprint(self) -> bytes:
        return hashlib.sha256(f"{self.tenant} {self.length}".encode()).digest()


SPACES = {1: SpaceOf("a", 8 << 10), 2: SpaceOf("b", 4 << 10), 3: SpaceOf("a", 32 << 10)}


def keys(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


class Engine:
    """A tier over a real folder, which tells what it did before it goes on."""

    def __init__(self, folder: str, say: Callable[[dict[str, Any]], None]) -> None:
        self.clock = ManualClock()
        self._folder = folder
        self._say = say
        self._tier: DiskTier | None = None
        self._versions = 0

    @property
    def tier(self) -> DiskTier:
        assert self._tier is not None, "open"
        return self._tier

    def say(self, what: str, names: Sequence[Name], **more: Any) -> None:
        self._say({"what": what, "names": [(space, key.hex()) for space, key in names], **more})

    def open(self, capacity_bytes: int, spaces: Sequence[int] = tuple(SPACES)) -> bool:
        """Opens, loads and tends once; False: it could not be opened."""
        tier = self._tier = DiskTier(
            DiskFolder(self._folder),
            capacity_bytes=capacity_bytes,
            clock=self.clock,
            parallel=False,
        )
        tier.on_dropped = lambda space, gone: self.say("dropped", [(space, one) for one in gone])
        for space_id in spaces:
            space = SPACES[space_id]
            tier.describe(space_id, space.tenant, space.fingerprint, space.length)
        if not (tier.open() and tier.load_index()):
            return False
        self.tend()
        return True

    def tend(self, rounds: int = 2) -> None:
        for _ in range(rounds):
            self.clock.advance_ns(SECOND)
            self.tier.tend()

    def save(self, space_id: int, chain: Sequence[bytes], version: int) -> list[bool]:
        """Saves a prompt, each block with its parent; which were taken."""
        length, names = SPACES[space_id].length, [(space_id, key) for key in chain]
        blocks = [
            SavedBlock(
                space_id,
                key,
                chain[at - 1] if at else b"",
                at,
                content(space_id, key, version),
            )
            for at, key in enumerate(chain)
        ]
        self.say("saving", names, version=version, length=length)
        taken = [isinstance(one, bytes) for one in self.tier.save_batch(blocks)]
        self.say("saved", [name for name, one in zip(names, taken, strict=True) if one])
        return taken

    def forget(self, names: Sequence[Name]) -> None:
        self.say("forgetting", names)
        self.tier.forget(names)
        self.say("forgot", names)

    def read(self, space_id: int, key: bytes) -> Bytes | None:
        """A block's bytes; None if it is not known. BlockCorrupt, OSError."""
        volume = self.tier.volume
        assert volume is not None
        if not volume.find(space_id, (key,)):
            return None
        into = aligned_bytes(SPACES[space_id].length)
        try:
            self.tier.load(space_id, key, into)
        except BlockCorrupt:
            raise
        except KVStoreError:
            return None
        return into

    def close(self) -> None:
        self.tier.close()


def content(space_id: int, key: bytes, version: int) -> Bytes:
    made = aligned_bytes(SPACES[space_id].length)
    made[:] = payload(_tag(space_id, key, version), len(made))
    return made


def _tag(space_id: int, key: bytes, version: int) -> bytes:
    space = SPACES[space_id]
    return tag_of(space.tenant, space.fingerprint + bytes([space_id]), key, version)


# ---------------------------------------------------------------- scripts


def fresh(engine: Engine) -> None:
    """A folder is made, filled beyond its capacity by several sizes and tenants, forgotten from."""
    assert engine.open(CAPACITY_BYTES)
    first = keys("first", 6)
    engine.save(1, first, 1)
    engine.save(2, keys("small", 5), 1)
    engine.forget([(1, key) for key in first[3:]])
    engine.save(1, first, 2)
    for number in range(4):
        engine.save(3, keys(f"large {number}", 5), 1)
        engine.read(1, first[0])
    for number in range(3):
        engine.save(1, keys(f"middle {number}", 10), 1)
    engine.save(2, keys("small again", 8), 1)
    for number in range(4, 6):
        engine.save(3, keys(f"large {number}", 6), 1)
    engine.forget([(2, b"")])
    engine.tend()
    engine.save(1, keys("last", 4), 1)
    engine.close()


def smaller(engine: Engine) -> None:
    """A full folder is opened with less capacity, then with more."""
    assert engine.open(CAPACITY_BYTES * 3 // 4)
    engine.save(1, keys("after", 6), 1)
    engine.forget([(1, key) for key in keys("after", 6)[4:]])
    engine.save(3, keys("large after", 5), 1)
    engine.close()
    assert engine.open(CAPACITY_BYTES * 2)
    for number in range(3):
        engine.save(3, keys(f"larger {number}", 5), 1)
    engine.close()


def interrupted(engine: Engine) -> None:
    """A folder in which a segment's file has no row yet is opened and tidied."""
    assert engine.open(CAPACITY_BYTES)
    engine.save(2, keys("small later", 6), 1)
    engine.save(1, keys("later", 6), 1)
    engine.close()


def gone(engine: Engine) -> None:
    """A space that the ledger no longer has: its rows go before anything is written."""
    assert engine.open(CAPACITY_BYTES, spaces=(1, 2))
    engine.save(1, keys("beside", 6), 1)
    engine.close()


def damaged(engine: Engine) -> None:
    """An index that is not ours is set aside beside an older one, and given up when room is
    needed.
    """
    assert engine.open(CAPACITY_BYTES)
    engine.save(1, keys("cold", 6), 1)
    for number in range(5):
        engine.save(3, keys(f"cold {number}", 6), 1)
    engine.tend()
    engine.close()


@dataclass(frozen=True)
class Life:
    """A script and the folder that it begins with. spaces: that outlive it."""

    script: Callable[[Engine], None]
    begin: Callable[[str, Callable[[dict[str, Any]], None]], None]
    spaces: tuple[int, ...] = tuple(SPACES)


def _empty(folder: str, say: Callable[[dict[str, Any]], None]) -> None:
    Path(folder).mkdir()


def _full(folder: str, say: Callable[[dict[str, Any]], None]) -> None:
    Path(folder).mkdir()
    fresh(Engine(folder, say))


def _cut(folder: str, say: Callable[[dict[str, Any]], None]) -> None:
    """As `_full`, with a file that no row names."""
    _full(folder, say)
    (Path(folder) / "segments" / "000000ff.seg").write_bytes(bytes(96 << 10))


def _without(folder: str, say: Callable[[dict[str, Any]], None]) -> None:
    _full(folder, say)
    say({"what": "forgot", "names": [(3, "")]})


def _foreign(folder: str, say: Callable[[dict[str, Any]], None]) -> None:
    _full(folder, say)
    (Path(folder) / "index" / "data.mdb").write_bytes(b"nothing of ours" * 4_096)
    older = Path(folder) / "aside" / "1-older" / "segments"
    older.mkdir(parents=True)
    (older / "00000001.seg").write_bytes(bytes(256 << 10))
    say({"what": "cold", "names": []})


LIVES = {
    "fresh": Life(fresh, _empty),
    "smaller": Life(smaller, _full),
    "interrupted": Life(interrupted, _cut),
    "gone": Life(gone, _without, spaces=(1, 2)),
    "damaged": Life(damaged, _foreign),
}


# ---------------------------------------------------------------- forks


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Errors of a tier that was damaged on purpose are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fork(body: Callable[[Callable[[dict[str, Any]], None]], None]) -> tuple[list[Any], int]:
    """Runs it in a child: what it said until its end, and its status (negative: the signal)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            write = os.write
            body(lambda said: _say(write, writer, said))
            code = 0
        except BaseException as error:
            _say(os.write, writer, {"what": "error", "names": [], "text": repr(error)})
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = [json.loads(line) for line in pipe.read().splitlines()]
    return said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _say(write: Callable[[int, bytes], int], fd: int, said: dict[str, Any]) -> None:
    write(fd, json.dumps(said).encode() + b"\n")


class Torture:
    """All lives in one folder."""

    def __init__(self, folder: str, seed: int, scale: float) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._scale = scale
        self._templates: dict[str, tuple[str, list[Any]]] = {}

    def run(self, tell: Callable[[dict[str, Any]], None]) -> None:
        points = [point for name in LIVES for point in self._points(name)]
        tell({"points": [str(point) for point in points]})
        count = max(1, round(len(points) * self._scale))
        for point in self._rng.sample(points, count) if count < len(points) else points:
            tell(self._try(point))
        tell({"ended": True})

    def _points(self, name: str) -> list[Point]:
        """The dry run of a life."""
        life, begin = LIVES[name], os.path.join(self._folder, f"begin-{name}")

        def prepare(say: Callable[[dict[str, Any]], None]) -> None:
            life.begin(begin, say)

        said, code = fork(prepare)
        assert code == 0, said
        self._templates[name] = begin, said
        folder = self._copy(name)

        def live(say: Callable[[dict[str, Any]], None]) -> None:
            hooks = Hooks()
            hooks.install()
            life.script(Engine(folder, lambda said: None))
            say({"what": "seen", "names": [], "seen": hooks.seen})

        said, code = fork(live)
        assert code == 0, said
        counts: Counter[str] = Counter()
        points = []
        for call, op in enumerate(said[-1]["seen"]):
            counts[op] += 1
            for when in ("before", "torn") if op == "pwritev" else ("before",):
                points.append(Point(name, op, counts[op], call, when))
        return [*points, Point(name, op, counts[op], call, "after")]

    def _copy(self, name: str) -> str:
        folder = os.path.join(self._folder, "now")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._templates[name][0], folder)
        return folder

    def _try(self, point: Point) -> dict[str, Any]:
        """Lives until the point, then sees what is left."""
        life, folder = LIVES[point.life], self._copy(point.life)
        known = Known(spaces=set(life.spaces))
        for said in self._templates[point.life][1]:
            known.hear(said)

        def live(say: Callable[[dict[str, Any]], None]) -> None:
            Hooks(point.call, point.when).install()
            life.script(Engine(folder, say))

        heard, code = fork(live)
        for said in heard:
            known.hear(said)
        found: dict[str, Any] = {"point": str(point), "wrong": [], "failed": []}
        found["visited"] = code == -signal.SIGKILL
        if self._rng.random() < AGAIN_SHARE:
            call, when = self._rng.randrange(12), self._rng.choice(("before", "after"))

            def again(say: Callable[[dict[str, Any]], None]) -> None:
                Hooks(call, when).install()
                look(folder, known, say)

            for said in fork(again)[0]:
                if said["what"] not in ("wrong", "failed", "error"):
                    known.hear(said)
        heard, code = fork(lambda say: look(folder, known, say))
        for said in heard:
            if said["what"] in ("wrong", "failed"):
                found[said["what"]].append(f"{point}: {said['text']}")
            elif said["what"] == "error":
                found["failed"].append(f"{point}: what is left cannot be used: {said['text']}")
        if code not in (0, 1):
            found["failed"].append(f"{point}: the restart ended with {code}")
        return found


# ---------------------------------------------------------------- what is left


def look(folder: str, known: Known, say: Callable[[dict[str, Any]], None]) -> None:
    """Opens what is left, compares, goes on, and checks the folder."""

    def found(what: str, text: str) -> None:
        say({"what": what, "names": [], "text": text})

    capacity_bytes = 2 * CAPACITY_BYTES
    engine = Engine(folder, say)
    if not engine.open(capacity_bytes, sorted(known.spaces)):
        found("failed", f"it is not opened: {engine.tier.stats().state}")
        return
    _compare(engine, known, found)
    _account(engine, capacity_bytes, found)
    for space_id in sorted(known.spaces):
        chain = keys("well", 4)
        taken = engine.save(space_id, chain, 9)
        if not all(taken):
            found("failed", f"space {space_id}: {taken.count(False)} of 4 blocks are not saved")
        known.hear({"what": "saving", "names": _named(space_id, chain), "version": 9, "length": 0})
        known.hear({"what": "saved", "names": _named(space_id, chain)})
        for key in chain:
            if engine.read(space_id, key) is None:
                found("failed", f"a block of space {space_id} that was saved just now is absent")
    volume = engine.tier.volume
    assert volume is not None
    blocks = volume.ring.usage().live_slots
    engine.close()
    report = verify(folder, capacity_bytes=capacity_bytes)
    if not report.ok:
        found("failed", f"verify: {report.damage_counts}: {report.damages[:2]}")
    if report.rows != blocks:
        found("failed", f"{blocks} blocks were known, the index has {report.rows} rows")
    if report.unknown_segments:
        found("failed", f"{report.unknown_segments} files that no row names were left")


def _named(space_id: int, chain: Sequence[bytes]) -> list[tuple[int, str]]:
    return [(space_id, key.hex()) for key in chain]


def _compare(engine: Engine, known: Known, found: Callable[[str, str], None]) -> None:
    asked = {*known.possible, *known.must}
    for space_id, key in sorted(asked):
        if space_id not in known.spaces:
            continue
        name = f"{key[:4].hex()} of space {space_id}"
        try:
            row = engine.read(space_id, key)
        except (BlockCorrupt, OSError) as error:
            found("failed", f"{name} is known and cannot be read: {error}")
            continue
        versions = known.possible.get((space_id, key), set())
        if row is None:
            if (space_id, key) in known.must:
                found("failed", f"{name} was saved and is absent")
        elif not versions:
            found("wrong", f"{name} was forgotten and is there")
        else:
            tags = [_tag(space_id, key, version) for version in versions]
            finding = check(np.asarray(row), tags)
            if finding is not Finding.RIGHT:
                found("wrong", f"{name}: {finding.value}")


def _account(engine: Engine, capacity_bytes: int, found: Callable[[str, str], None]) -> None:
    """The books against the folder. Orphans have gone: it was tended to."""
    volume = engine.tier.volume
    assert volume is not None
    with volume.books:
        volume.ring.check()
        usage = volume.ring.usage()
    files = volume.files.list()
    if set(files) != set(volume.segments):
        found("failed", f"files {sorted(files)}, segments {sorted(volume.segments)}")
    taken = sum(one.size_bytes for one in files.values())
    if taken != usage.segment_bytes:
        found("failed", f"files take {taken} bytes, {usage.segment_bytes} are said")
    total = taken + volume.index.used_bytes() + usage.aside_bytes
    if total > capacity_bytes:
        found("failed", f"the folder has {total} of {capacity_bytes} bytes")
    if usage.live_slots != len(volume.catalog):
        found("failed", f"{usage.live_slots} slots are live, {len(volume.catalog)} blocks known")


def main() -> int:
    folder, seed, scale = sys.argv[1:]
    mutants.plant(os.environ.get(mutants.VARIABLE, ""))
    # Each of these processes is thrown away after it has opened an index: it walks it itself.
    probe.examine = lambda folder: probe.short(folder) or _walked(folder)
    np.unique(np.zeros(1))  # what it imports late, every fork would import anew
    with _quiet():
        Torture(folder, int(seed), float(scale)).run(
            lambda said: print(json.dumps(said), flush=True)
        )
    return 0


def _walked(folder: str) -> str:
    import lmdb

    try:
        return probe._walk(folder)
    except lmdb.Error as error:
        return f"damaged-{type(error).__name__}"


if __name__ == "__main__":
    sys.exit(main())
