"""A disk tier's folder in memory, and what a crash at any moment of its life leaves of it.

One counter orders the log of the files and the commits of the index, so that `cut` can make both as
of one moment. For tests, simulations and the torture harness.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np

from kvstore.model.values import PAGE_BYTES
from kvstore.testing.files import Keep, MemoryFiles
from kvstore.tiers.disk.dictindex import Commit, DictIndex
from kvstore.tiers.disk.format import align
from kvstore.tiers.disk.opening import Opened
from kvstore.tiers.disk.pages import aligned_bytes


class MemoryFolder:
    """Implements `kvstore.tiers.disk.opening.Folder`.

    index, files: what `open` gives; replace them to start on other ones. failure: what `open`
    raises. asides: reasons of what was set aside. aside: bytes that it takes.
    """

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self._next = itertools.count(1).__next__
        self._commits: list[int] = []
        self.capacity_bytes = capacity_bytes
        self.failure: OSError | None = None
        self.asides: list[str] = []
        self.aside = 0
        self.closed = False
        self.files = MemoryFiles(capacity_bytes, ordinal=self._next)
        self.index = DictIndex()
        self.index.before = self._note

    def _note(self, commit: Commit) -> None:
        fault = self.index.faults.get(self.index.attempts)
        if fault is None or fault.holds:
            self._commits.append(self._next())

    # ------------------------------------------------------------------ Folder

    def open(self) -> Opened:
        if self.failure is not None:
            raise self.failure
        self.files.reopen()
        return Opened(self.index, self.files)

    def is_there(self) -> bool:
        return not self.files.gone

    def set_aside(self, reason: str) -> None:
        self.asides.append(reason)
        self.files = MemoryFiles(self.capacity_bytes, ordinal=self._next)
        self.index = DictIndex()
        self.index.before = self._note

    def aside_bytes(self) -> int:
        return self.aside

    def tidy(self) -> None:
        return None

    def drop_aside(self) -> None:
        self.aside = 0

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------------ crashes

    def stamp(self) -> int:
        """A moment of its own, after all that has happened: for what else a crash cuts."""
        return self._next()

    def cuts(self) -> Iterator[int]:
        """The moments at which a crash leaves something new, in order. Every commit took hold."""
        assert len(self._commits) == len(self.index.log), "a commit has a moment if it took hold"
        yield from sorted({*self.files.cuts(), *self._commits})

    def cut(self, moment: int, chance: random.Random, keep: Keep = Keep.ANY) -> MemoryFolder:
        """The folder after a crash right after `moment`; `keep`: what is left of what was not
        synced.
        """
        commits = sum(ordinal <= moment for ordinal in self._commits)
        return self._begun(self.files.image(moment, chance, keep), self.index.at(commits))

    def restarted(self) -> MemoryFolder:
        """The folder after kill -9 now: all that was written is there."""
        return self._begun(self.files, self.index.at(len(self.index.log)))

    def _begun(self, files: MemoryFiles, index: DictIndex) -> MemoryFolder:
        """A folder that begins with this content, all of it on the device."""
        made = MemoryFolder(self.capacity_bytes)
        made.aside = self.aside
        for segment, there in files.list().items():
            data = aligned_bytes(max(align(there.size_bytes), PAGE_BYTES))
            data[: there.size_bytes] = np.frombuffer(files.content(segment), np.uint8)
            made.files.create(segment, len(data))
            made.files.pwritev(segment, 0, [data])
            made.files.fdatasync(segment)
            made.files.truncate(segment, there.size_bytes)
        made.files.others_bytes = files.others_bytes
        index.before = made._note
        made.index = index
        made._commits += [0] * len(index.log)
        return made
