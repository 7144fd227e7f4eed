"""Segment files in memory that fail on demand, and what a power cut would leave of them.

Promises what `kvstore.tiers.disk.files.Files` promises, by a plan: the n-th operation of a kind
fails with an errno, comes up short, is torn, is lost though reported done, or waits for the test.
Damage is done to bytes by hand. Each change goes into a log, from which `image` makes the files as
a power cut at any moment may leave them: what was synced is there, and of the rest any part, by
sectors of 512 bytes, in any order. A failed sync is modelled as Linux has it: what it was to cover
stays in doubt for ever, a later one that succeeds does not cover it.

For tests, simulations and the torture harness. Threads may share it; no clock, no chance of its
own: `image` takes the caller's random numbers.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from kvstore.model.values import PAGE_BYTES
from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.files import FileSystem, IoMode, SegmentFile, Truncated
from kvstore.tiers.disk.folder import segment_name
from kvstore.tiers.disk.pages import check_size, check_transfer, transfer

SECTOR_BYTES = 512
"""What a device writes whole or not at all."""


class Op(enum.Enum):
    """The operations of `Files`."""

    CREATE = "create"
    PREADV = "preadv"
    PWRITEV = "pwritev"
    FDATASYNC = "fdatasync"
    UNLINK = "unlink"
    LIST = "list"
    STATVFS = "statvfs"


@dataclass
class Injection:
    """One planned fault: it strikes the `nth` coming operation `op` (1: the next), `times` in all.

    error: errno to raise; 0: none. moved_bytes: of a transfer, None is all of it: with an error the
    write is torn there; without, the first system call comes up short and is continued. lost: a
    write or sync is reported as done and has no effect. pause: called before anything happens, to
    block, or to let another thread act; without an error the operation then goes on.
    """

    op: Op
    nth: int = 1
    times: int = 1
    error: int = 0
    moved_bytes: int | None = None
    lost: bool = False
    pause: Callable[[], None] | None = None

    def strikes(self, op: Op) -> bool:
        """Counts the operation down; whether it is one to fail."""
        if op is not self.op or self.times <= 0:
            return False
        if self.nth > 1:
            self.nth -= 1
            return False
        self.times -= 1
        return True


# ---------------------------------------------------------------- log


class Created(NamedTuple):
    """A file may be there from now on, whole or not."""

    ordinal: int
    segment: int
    size_bytes: int


class Named(NamedTuple):
    """The file that `Created` began is durable."""

    ordinal: int
    segment: int


class Wrote(NamedTuple):
    """Bytes that may reach the device from now on. applied: how many of them readers see."""

    ordinal: int
    segment: int
    offset: int
    data: bytes
    applied: int


class Synced(NamedTuple):
    """What was written up to ordinal `covered` is durable; if not ok, it never will be sure."""

    ordinal: int
    segment: int
    covered: int
    ok: bool


class Unlinking(NamedTuple):
    """The file may be gone from now on."""

    ordinal: int
    segment: int


class Unlinked(NamedTuple):
    """The file is gone."""

    ordinal: int
    segment: int


Entry: TypeAlias = "Created | Named | Wrote | Synced | Unlinking | Unlinked"


class Keep(enum.Enum):
    """Which of the unsynced bytes an image keeps.

    ALL: as after kill -9. TORN: all, the last write up to some sector. NONE. WRITES: some whole
    writes. SECTORS: of each sector any state that it had since it was durable. ANY: one of these.
    """

    ALL = "all"
    TORN = "torn"
    NONE = "none"
    WRITES = "writes"
    SECTORS = "sectors"
    ANY = "any"


class MemoryFiles:
    """See the module's docstring. Implements Files.

    Attributes to set at any time: `capacity_bytes` of the file system, `others_bytes` that others
    take of it, `read_only`, `gone` (the folder was removed).
    """

    def __init__(
        self, capacity_bytes: int = 1 << 40, *, ordinal: Callable[[], int] | None = None
    ) -> None:
        """`ordinal`: counts log entries from 1 on; give one counter to all that a cut goes across,
        as these files and the index."""
        self.capacity_bytes = capacity_bytes
        self.others_bytes = 0
        self.read_only = False
        self.gone = False
        self.log: list[Entry] = []
        self._ordinal = ordinal or itertools.count(1).__next__
        self._guard = threading.RLock()
        self._files: dict[int, bytearray] = {}
        self._plan: list[Injection] = []
        self._closed = False
        self.operations: dict[Op, int] = dict.fromkeys(Op, 0)

    # ------------------------------------------------------------------ faults

    def inject(self, *plan: Injection) -> None:
        """Adds faults; the first that strikes an operation is its fault."""
        with self._guard:
            self._plan.extend(plan)

    def heal(self) -> None:
        """Drops the plan, and what makes the file system unusable."""
        with self._guard:
            self._plan.clear()
            self.read_only = self.gone = False

    def content(self, segment_id: int) -> bytearray:
        """The file's bytes, to read and to damage; they are what readers see."""
        return self._files[segment_id]

    def truncate(self, segment_id: int, size_bytes: int) -> None:
        """Cuts the file."""
        with self._guard:
            del self._files[segment_id][size_bytes:]

    def swap(self, segment_id: int, offset: int, other: int, length: int) -> None:
        """Swaps bytes at two offsets of a file: records in each other's place."""
        with self._guard:
            data = self._files[segment_id]
            here, there = data[offset : offset + length], data[other : other + length]
            data[offset : offset + length], data[other : other + length] = there, here

    # ------------------------------------------------------------------ Files

    @property
    def mode(self) -> IoMode:
        return IoMode(direct=True, preallocated=True)

    def create(self, segment_id: int, size_bytes: int) -> None:
        check_size(size_bytes)
        self._begin(Op.CREATE, segment_id, writes=True)
        with self._guard:
            if segment_id in self._files:
                raise _error(errno.EEXIST, segment_id)
            if size_bytes > self.statvfs_now().free_bytes:
                raise _error(errno.ENOSPC, segment_id)
            self.log.append(Created(self._ordinal(), segment_id, size_bytes))
            self._files[segment_id] = bytearray(size_bytes)
            self.log.append(Named(self._ordinal(), segment_id))

    def preadv(self, segment_id: int, offset: int, buffers: Sequence[Bytes]) -> None:
        wanted = check_transfer(offset, buffers)
        fault = self._begin(Op.PREADV, segment_id)
        limits = _limits(fault)
        with self._guard:
            data = self._file(segment_id)

            def read(rest: Sequence[Bytes], done: int) -> int:
                left = next(limits)
                start = at = offset + done
                for into in rest:
                    part = data[at : at + min(len(into), max(start + left - at, 0))]
                    into[: len(part)] = np.frombuffer(part, np.uint8)
                    at += len(part)
                    if len(part) < len(into):
                        break
                return at - start

            done = transfer(read, buffers)
        if done < wanted:
            raise Truncated(segment_id, offset, wanted, done)

    def pwritev(self, segment_id: int, offset: int, buffers: Sequence[Bytes]) -> None:
        check_transfer(offset, buffers)
        fault = self._begin(Op.PWRITEV, segment_id, writes=True, torn=True)
        if fault is not None and fault.lost:
            self._check(segment_id)
            return
        data = b"".join(part.tobytes() for part in buffers)
        torn = fault is not None and fault.error != 0
        applied = len(data)
        if fault is not None and torn:
            applied = min(fault.moved_bytes or 0, applied)
        elif fault is not None:
            applied = transfer(_shortened(fault), buffers)
        with self._guard:
            file = self._file(segment_id)
            self.log.append(Wrote(self._ordinal(), segment_id, offset, data, applied))
            if offset + applied > len(file):
                file.extend(bytes(offset + applied - len(file)))
            file[offset : offset + applied] = data[:applied]
        if fault is not None and torn:
            raise _error(fault.error, segment_id)
        if applied < len(data):
            raise _error(errno.EIO, segment_id)

    def fdatasync(self, segment_id: int) -> None:
        with self._guard:
            covered = self.log[-1].ordinal if self.log else 0
        fault = self._strike(Op.FDATASYNC)
        with self._guard:
            self._check(segment_id)
            if fault is not None and fault.lost:
                return
            ok = fault is None or fault.error == 0
            self.log.append(Synced(self._ordinal(), segment_id, covered, ok))
        if fault is not None and not ok:
            raise _error(fault.error, segment_id)

    def unlink(self, segment_id: int) -> None:
        self._begin(Op.UNLINK, segment_id, writes=True)
        with self._guard:
            self._file(segment_id)
            self.log.append(Unlinking(self._ordinal(), segment_id))
            del self._files[segment_id]
            self.log.append(Unlinked(self._ordinal(), segment_id))

    def list(self) -> dict[int, SegmentFile]:
        self._begin(Op.LIST, None)
        with self._guard:
            return {
                segment_id: SegmentFile(len(data), len(data))
                for segment_id, data in self._files.items()
            }

    def statvfs(self) -> FileSystem:
        self._begin(Op.STATVFS, None)
        return self.statvfs_now()

    def statvfs_now(self) -> FileSystem:
        """As `statvfs`, which faults do not touch."""
        with self._guard:
            taken = sum(map(len, self._files.values())) + self.others_bytes
        free = max(self.capacity_bytes - taken, 0)
        return FileSystem(self.capacity_bytes, free, self.read_only)

    def close(self) -> None:
        self._closed = True

    def reopen(self) -> None:
        """Whoever opens the folder anew has these files."""
        self._closed = False

    # ------------------------------------------------------------------ power cut

    def cuts(self) -> _Ordinals:
        """The ordinals at which there is something new to cut after, 0 first."""
        with self._guard:
            return [0, *(entry.ordinal for entry in self.log)]

    def image(self, cut: int, chance: random.Random, keep: Keep = Keep.ANY) -> MemoryFiles:
        """The files as a power cut right after log entry `cut` may leave them: new files, with an
        empty log and no faults."""
        if keep is Keep.ANY:
            keep = chance.choice([kind for kind in Keep if kind is not Keep.ANY])
        with self._guard:
            log = [entry for entry in self.log if entry.ordinal <= cut]
        made = MemoryFiles(self.capacity_bytes)
        made.others_bytes = self.others_bytes
        for segment_id in dict.fromkeys(entry.segment for entry in log):
            history = [entry for entry in log if entry.segment == segment_id]
            file = _survivor(history, chance, keep)
            if file is not None:
                made._files[segment_id] = file
        return made

    def write_to(self, folder: str) -> None:
        """Writes the files into a real folder, which is there."""
        with self._guard:
            for segment_id, data in self._files.items():
                with open(os.path.join(folder, segment_name(segment_id)), "xb") as file:
                    file.write(data)

    # ------------------------------------------------------------------ parts

    def _strike(self, op: Op) -> Injection | None:
        with self._guard:
            self.operations[op] += 1
            struck = [injection for injection in self._plan if injection.strikes(op)]
        for injection in struck:
            if injection.pause is not None:
                injection.pause()
        return struck[0] if struck else None

    def _begin(
        self, op: Op, segment_id: int | None, *, writes: bool = False, torn: bool = False
    ) -> Injection | None:
        fault = self._strike(op)
        if self._closed:
            raise _error(errno.EBADF, segment_id)
        if self.gone:
            raise _error(errno.ENOENT, segment_id)
        if writes and self.read_only:
            raise _error(errno.EROFS, segment_id)
        if fault is not None and fault.error and not torn:
            raise _error(fault.error, segment_id)
        return fault

    def _check(self, segment_id: int) -> None:
        if self._closed:
            raise _error(errno.EBADF, segment_id)
        if self.gone or segment_id not in self._files:
            raise _error(errno.ENOENT, segment_id)

    def _file(self, segment_id: int) -> bytearray:
        self._check(segment_id)
        return self._files[segment_id]


_Ordinals: TypeAlias = "list[int]"  # `list` is a method above


def _error(number: int, segment_id: int | None) -> OSError:
    name = "segments" if segment_id is None else segment_name(segment_id)
    return OSError(number, os.strerror(number), name)


def _limits(fault: Injection | None) -> Iterator[int]:
    """How many bytes each system call of a transfer moves at most."""
    if fault is not None and fault.moved_bytes is not None:
        yield fault.moved_bytes
    yield from itertools.repeat(1 << 62)


def _shortened(fault: Injection) -> Callable[[Sequence[Bytes], int], int]:
    limits = _limits(fault)
    return lambda rest, done: min(sum(part.nbytes for part in rest), next(limits))


# ---------------------------------------------------------------- what survives


def _survivor(history: Sequence[Entry], chance: random.Random, keep: Keep) -> bytearray | None:
    """One file after a cut: the last one that had this id, or None."""
    begun = max(at for at, entry in enumerate(history) if isinstance(entry, Created))
    life = history[begun:]
    created = life[0]
    assert isinstance(created, Created)
    if not any(isinstance(entry, Named) for entry in life):
        return _half_made(created, chance)
    if any(isinstance(entry, Unlinked) for entry in life):
        return None
    if any(isinstance(entry, Unlinking) for entry in life) and chance.random() < 0.5:
        return None
    return _replay(created.size_bytes, _writes(life), chance, keep)


def _writes(life: Sequence[Entry]) -> list[tuple[Wrote, bool]]:
    """The file's writes in order, and whether each is sure to be on the device."""
    sure: set[int] = set()
    open_writes: list[int] = []
    for entry in life:
        if isinstance(entry, Wrote):
            open_writes.append(entry.ordinal)
        elif isinstance(entry, Synced):
            if entry.ok:
                sure.update(number for number in open_writes if number <= entry.covered)
            # What a failed sync was to cover is marked clean: no later sync writes it again.
            open_writes = [number for number in open_writes if number > entry.covered]
    return [(entry, entry.ordinal in sure) for entry in life if isinstance(entry, Wrote)]


def _replay(
    size_bytes: int, writes: Sequence[tuple[Wrote, bool]], chance: random.Random, keep: Keep
) -> bytearray:
    end = max((write.offset + len(write.data) for write, _ in writes), default=0)
    file = np.zeros(max(end, size_bytes), np.uint8)
    unsure = [at for at, (_, sure) in enumerate(writes) if not sure]
    for at, (write, sure) in enumerate(writes):
        data = np.frombuffer(write.data, np.uint8)
        sectors = data.reshape(-1, SECTOR_BYTES)
        into = file[write.offset : write.offset + len(data)].reshape(-1, SECTOR_BYTES)
        if sure or keep is Keep.ALL or (keep is Keep.TORN and at != unsure[-1]):
            into.reshape(-1)[: write.applied] = data[: write.applied]
        elif keep is Keep.TORN:
            kept = chance.randint(0, len(sectors))
            into[:kept] = sectors[:kept]
        elif keep is Keep.WRITES and chance.random() < 0.5:
            into[:] = sectors
        elif keep is Keep.SECTORS:
            odds = chance.choice((0.05, 0.5, 0.95))
            kept_rows = np.array([chance.random() < odds for _ in sectors], np.bool_)
            into[kept_rows] = sectors[kept_rows]
    return bytearray(file[:size_bytes].tobytes())


def _half_made(created: Created, chance: random.Random) -> bytearray | None:
    """A file whose making was cut: not there, empty, in part, or whole."""
    pages = created.size_bytes // PAGE_BYTES
    kept = chance.choice((None, 0, chance.randint(0, pages), pages))
    return None if kept is None else bytearray(kept * PAGE_BYTES)
