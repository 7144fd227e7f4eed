"""A folder in memory after commits that fail, and after it was closed and opened again."""

from __future__ import annotations

import contextlib
import random

from kvstore.testing.files import Keep
from kvstore.testing.folder import MemoryFolder
from kvstore.tiers.disk.dictindex import CommitFault


def named(folder: MemoryFolder) -> list[str]:
    return sorted(folder.index.meta())


def test_a_commit_that_did_not_take_hold_is_no_moment_of_a_crash() -> None:
    folder = MemoryFolder()
    index = folder.index
    index.faults[2] = CommitFault(OSError(5, "broken"))
    index.faults[3] = CommitFault(OSError(5, "broken"), holds=True)
    stamps = []
    for name in ("first", "lost", "held", "last"):
        with contextlib.suppress(OSError):
            index.commit(meta={name: b"1"})
        stamps.append(folder.stamp())
    assert len(list(folder.cuts())) == 1 + 3
    seen = [named(folder.cut(at, random.Random(0), Keep.ALL)) for at in stamps]
    assert seen == [["first"], ["first"], ["first", "held"], ["first", "held", "last"]]


def test_whoever_opens_it_again_has_the_same_files() -> None:
    folder = MemoryFolder()
    opened = folder.open()
    opened.files.create(3, 4096)
    opened.files.close()
    assert list(folder.open().files.list()) == [3]
