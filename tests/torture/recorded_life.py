"""A life of a disk tier on real files, run under the shim of `tests.torture.writelog`.

    python -m tests.torture.recorded_life FOLDER HISTORY SEED STEPS CAPACITY_BYTES

Tier in FOLDER/disk, ledger in FOLDER/ledger; the history goes to HISTORY. Its moments are numbers
of entries of the log.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import sys
from pathlib import Path

from kvstore.ledger import LmdbLedger
from kvstore.tiers.disk.opening import DiskFolder
from tests.torture import mutants
from tests.torture.disk_history import History
from tests.torture.disk_life import Life

DATA = "disk/index/data.mdb"


class Shim:
    """What the shim offers to the process that it is in."""

    def __init__(self) -> None:
        process = ctypes.CDLL(None)
        self._mark = process.writelog_mark
        self._mark.argtypes, self._mark.restype = (ctypes.c_char_p,), ctypes.c_uint64
        self._fail = process.writelog_fail
        self._fail.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
        # Children that examine the index are not to log.
        os.environ.pop("WRITELOG_FOLDER")
        os.environ.pop("LD_PRELOAD")

    def mark(self, text: str) -> int:
        """Writes a mark; its number."""
        return int(self._mark(text.encode()))

    def fail(self, name: str, nth: int, number: int, *, after: bool) -> None:
        """The nth coming write or sync of a file fails; after: it is done all the same."""
        self._fail(name.encode(), nth, number, after)


def main(folder: Path, out: Path, seed: int, steps: int, capacity_bytes: int) -> int:
    """Lives the life."""
    mutants.plant(os.environ.get(mutants.VARIABLE, ""))
    shim = Shim()

    def fault(chance: random.Random) -> None:
        segments = os.listdir(folder / "disk" / "segments")
        if not segments or chance.random() < 0.5:
            # Writes of pages, their sync, the write of the new root: a commit has few more.
            shim.fail(DATA, chance.randint(1, 5), errno.EIO, after=chance.random() < 0.5)
        else:
            name = f"disk/segments/{chance.choice(segments)}"
            shim.fail(name, chance.randint(1, 2), errno.EIO, after=False)

    chance = random.Random(seed)
    ledger = LmdbLedger(str(folder / "ledger"))
    history = History(shim.mark)
    life = Life(
        history,
        chance,
        lambda: DiskFolder(str(folder / "disk")),
        capacity_bytes=capacity_bytes,
        fault=fault,
        ledger=ledger,
        restarts=True,
    )
    life.run(steps)
    history.dump(out)
    return 0


if __name__ == "__main__":
    seed, steps, capacity_bytes = map(int, sys.argv[3:])
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), seed, steps, capacity_bytes))
