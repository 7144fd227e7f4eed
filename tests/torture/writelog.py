"""What a process did to the files of a folder, and what a power cut would have left of them.

`record` runs a process under a shim (`writelog.c`, LD_PRELOAD) that logs every write, sync and
change of a name below a folder. `Replay` walks the log and makes the folder as a cut after any
entry may leave it: what was synced is there; of the rest, by sectors of 512 bytes, any part, in any
order; names that were changed since their folder was synced may have changed or not. A failed sync
is modelled as Linux has it: what it was to cover stays in doubt for ever.
"""

from __future__ import annotations

import enum
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.testing.files import SECTOR_BYTES, Keep

SOURCE = Path(__file__).with_suffix(".c")
_ENTRY = struct.Struct("<QIIQQII")


class Op(enum.IntEnum):
    """As in writelog.c."""

    CREATE = 1
    WRITE = 2
    WROTE = 3
    SYNC = 4
    SYNCED = 5
    SYNC_FAILED = 6
    SIZE = 7
    RENAME = 8
    UNLINK = 9
    MKDIR = 10
    RMDIR = 11
    MARK = 12


class Entry(NamedTuple):
    """One call, or the end of one. name: relative to the folder; of a MARK its text. size: of
    SIZE. synchronous: of a WRITE that is durable at its WROTE.
    """

    number: int
    op: Op
    name: str
    other: str
    offset: int
    data: bytes
    size: int
    synchronous: bool


def compiler() -> str:
    """The C compiler of this machine; empty if there is none."""
    return shutil.which("gcc") or shutil.which("cc") or ""


def build(target: Path) -> None:
    """Compiles the shim."""
    argv = [compiler(), "-shared", "-fPIC", "-O2", "-o", str(target), str(SOURCE)]
    subprocess.run(argv, check=True, capture_output=True)


def record(
    shim: Path, argv: Sequence[str], folder: Path, log: Path, environ: Mapping[str, str]
) -> list[Entry]:
    """Runs a process and returns what it did below `folder`. CalledProcessError."""
    own = {"LD_PRELOAD": str(shim), "WRITELOG_FOLDER": str(folder), "WRITELOG_FILE": str(log)}
    subprocess.run(argv, check=True, env={**environ, **own}, capture_output=True)
    return read(log.read_bytes())


def read(log: bytes) -> list[Entry]:
    """The entries of a log."""
    entries, at = [], 0
    while at < len(log):
        number, op, flags, offset, length, name_length, other_length = _ENTRY.unpack_from(log, at)
        at += _ENTRY.size
        name = log[at : at + name_length].decode()
        at += name_length
        other = log[at : at + other_length].decode()
        at += other_length
        data, size = b"", 0
        if op == Op.SIZE:
            size = length
        else:
            data = log[at : at + length]
            at += length
        entries.append(Entry(number, Op(op), name, other, offset, data, size, bool(flags)))
    return entries


# ---------------------------------------------------------------- replay


@dataclass
class _Pending:
    """A write, or a new size (data is empty). sure: it is durable, but something before it is not.
    doubtful: a sync that was to cover it has failed. covered: a sync that runs began after it.
    """

    offset: int
    data: bytes
    size: int
    sure: bool = False
    doubtful: bool = False
    covered: bool = False


@dataclass
class _File:
    """A file, whatever its name. base: what is durable of it."""

    base: bytearray = field(default_factory=bytearray)
    pending: list[_Pending] = field(default_factory=list)

    def settle(self) -> None:
        """Folds into the base what is durable, as far as nothing uncertain comes before it."""
        while self.pending and self.pending[0].sure:
            _apply(self.base, self.pending.pop(0))

    def image(self, chance: random.Random, keep: Keep) -> bytearray:
        """What a cut may leave."""
        made = bytearray(self.base)
        last = next((one for one in reversed(self.pending) if not one.sure), None)
        for pending in self.pending:
            if pending.sure or keep is Keep.ALL or (keep is Keep.TORN and pending is not last):
                _apply(made, pending)
            elif keep is Keep.TORN:
                kept = chance.randint(0, -(-len(pending.data) // SECTOR_BYTES)) * SECTOR_BYTES
                if kept:
                    _apply(made, _Pending(pending.offset, pending.data[:kept], 0))
            elif keep is Keep.WRITES and chance.random() < 0.5:
                _apply(made, pending)
            elif keep is Keep.SECTORS:
                _apply_some(made, pending, chance)
        return made


def _apply(into: bytearray, pending: _Pending) -> None:
    if not pending.data:
        del into[pending.size :]
        into.extend(bytes(pending.size - len(into)))
        return
    end = pending.offset + len(pending.data)
    if end > len(into):
        into.extend(bytes(end - len(into)))
    into[pending.offset : end] = pending.data


def _apply_some(into: bytearray, pending: _Pending, chance: random.Random) -> None:
    """Sectors of the device: they lie at multiples of their size in the file."""
    odds = chance.choice((0.05, 0.5, 0.95))
    if not pending.data:
        if chance.random() < odds:
            _apply(into, pending)
        return
    at, end = pending.offset, pending.offset + len(pending.data)
    while at < end:
        until = min((at // SECTOR_BYTES + 1) * SECTOR_BYTES, end)
        if chance.random() < odds:
            part = pending.data[at - pending.offset : until - pending.offset]
            _apply(into, _Pending(at, part, 0))
        at = until


class Replay:
    """The folder while the log is walked: `step` takes entries in order, `write_image` makes what a
    cut after the last of them may leave.
    """

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}  # by name, as the process saw it
        self._durable: dict[str, _File | None] = {}  # by name, as on the device; None: a folder
        self._names: list[tuple[Entry, _File | None]] = []  # changes that are not durable yet
        self._folders: set[str] = set()

    def step(self, entry: Entry) -> None:
        """Takes the next entry."""
        if entry.op in (Op.CREATE, Op.RENAME, Op.UNLINK, Op.MKDIR, Op.RMDIR):
            self._rename(entry)
            return
        file = self._files.get(entry.name)
        if entry.op is Op.SYNCED and entry.name in {*self._folders, ""}:
            self._sync_names(entry.name)
        if file is None:
            return
        if entry.op is Op.WRITE and entry.data:
            file.pending.append(_Pending(entry.offset, entry.data, 0))
        elif entry.op is Op.SIZE:
            file.pending.append(_Pending(0, b"", entry.size))
        elif entry.op is Op.WROTE:
            last = next(p for p in reversed(file.pending) if p.offset == entry.offset and p.data)
            last.sure = True
        elif entry.op is Op.SYNC:
            for pending in file.pending:
                pending.covered = True
        elif entry.op in (Op.SYNCED, Op.SYNC_FAILED):
            self._synced(file, ok=entry.op is Op.SYNCED)
        file.settle()

    def _synced(self, file: _File, *, ok: bool) -> None:
        for pending in file.pending:
            if pending.covered and not pending.doubtful:
                pending.sure |= ok
                # What a failed sync was to cover is marked clean: no later one writes it again.
                pending.doubtful = not pending.sure
            pending.covered = False

    # ------------------------------------------------------------------ names

    def _rename(self, entry: Entry) -> None:
        file: _File | None = None
        if entry.op is Op.CREATE:
            file = self._files[entry.name] = _File()
        elif entry.op is Op.MKDIR:
            self._folders.add(entry.name)
        elif entry.op is Op.RMDIR:
            self._folders.discard(entry.name)
        elif entry.op is Op.UNLINK:
            self._files.pop(entry.name, None)
        elif entry.name in self._files:
            file = self._files[entry.other] = self._files.pop(entry.name)
        self._names.append((entry, file))

    def _sync_names(self, folder: str) -> None:
        """What changed in a folder is durable; what changed in others is not, as POSIX has it."""
        left = []
        for entry, file in self._names:
            touched = {os.path.dirname(entry.name)}
            if entry.op is Op.RENAME:
                touched.add(os.path.dirname(entry.other))
            if folder in touched:
                _change(self._durable, entry, file)
            else:
                left.append((entry, file))
        self._names = left

    # ------------------------------------------------------------------ images

    def write_image(self, folder: str, chance: random.Random, keep: Keep = Keep.ANY) -> None:
        """Writes the folder, which is not there yet."""
        if keep is Keep.ANY:
            keep = chance.choice([kind for kind in Keep if kind is not Keep.ANY])
        names = dict(self._durable)
        count = chance.randint(0, len(self._names))
        if keep in (Keep.ALL, Keep.NONE, Keep.TORN):
            count = 0 if keep is Keep.NONE else len(self._names)
        for entry, file in self._names[:count]:
            _change(names, entry, file)
        os.mkdir(folder, 0o700)
        # In order of names a folder comes before what is in it, which goes with it.
        for name, found in sorted(names.items()):
            path = os.path.join(folder, name)
            if not os.path.isdir(os.path.dirname(path)):
                continue
            if found is None:
                os.mkdir(path, 0o700)
            else:
                _write(path, found.image(chance, keep))


def _change(names: dict[str, _File | None], entry: Entry, file: _File | None) -> None:
    if entry.op in (Op.UNLINK, Op.RMDIR):
        names.pop(entry.name, None)
    elif entry.op is Op.RENAME:
        names.pop(entry.name, None)
        names[entry.other] = file
    else:
        names[entry.name] = file


def _write(path: str, data: bytearray) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if data:
            # Blocks are counted: zeros that were allocated are allocated here, too.
            os.posix_fallocate(fd, 0, len(data))
        if np.frombuffer(data, np.uint8).any():
            os.pwrite(fd, data, 0)
    finally:
        os.close(fd)
