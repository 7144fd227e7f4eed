"""What a power cut leaves of real files: the log of writes that the torture cuts, and that all that
was acknowledged survives a cut that takes whatever was not synced.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from kvstore.ledger import LmdbLedger
from kvstore.testing.files import Keep
from kvstore.tiers.disk.opening import DiskFolder
from tests.torture import disk_history, disk_life, writelog
from tests.torture.disk_life import Found, room
from tests.torture.power_loss import Standings
from tests.torture.writelog import Entry, Op, Replay

CAPACITY_BYTES = room(26, 5)
STEPS = 25


@pytest.mark.process
@pytest.mark.skipif(not writelog.compiler(), reason="there is no C compiler for the shim")
def test_what_was_acknowledged_survives_a_cut_of_all_that_was_not_synced(tmp_path: Path) -> None:
    shim, life, told = tmp_path / "writelog.so", tmp_path / "life", tmp_path / "history"
    writelog.build(shim)
    life.mkdir()
    argv = [sys.executable, "-m", "tests.torture.recorded_life", str(life), str(told), "7"]
    argv += [str(STEPS), str(CAPACITY_BYTES)]
    entries = writelog.record(shim, argv, life, tmp_path / "log", os.environ)
    replay, image = Replay(), tmp_path / "image"
    for entry in entries:
        replay.step(entry)
    replay.write_image(str(image), random.Random(0), Keep.NONE)
    events = disk_history.load(told)
    standing = Standings(events).at(entries[-1].number)
    assert standing.required, "blocks were acknowledged"
    ledger = LmdbLedger(str(image / "ledger"))
    assert tuple(ledger.rows()) in standing.ledgers
    assert ledger.rows()
    ledger.close()
    found = Found()
    tier = disk_life.start(DiskFolder(str(image / "disk")), CAPACITY_BYTES)
    disk_life.examine(tier, standing, {name for event in events for name in event.names}, found)
    tier.close()
    assert (found.wrong, found.failed) == ([], [])


# ---------------------------------------------------------------- the model of a device


def step(replay: Replay, op: Op, name: str, data: bytes = b"", **more: object) -> None:
    fields = {"other": "", "offset": 0, "size": 0, "synchronous": False, **more}
    replay.step(Entry(0, op, name, data=data, **fields))  # type: ignore[arg-type]


def image(replay: Replay, folder: Path, keep: Keep, seed: int = 0) -> dict[str, bytes]:
    """The files of an image."""
    made = folder / f"{keep.value}-{seed}"
    replay.write_image(str(made), random.Random(seed), keep)
    found = (path for path in made.rglob("*") if path.is_file())
    return {str(path.relative_to(made)): path.read_bytes() for path in found}


def begun() -> Replay:
    """A durable file of four sectors of `a`, in a durable folder."""
    replay = Replay()
    step(replay, Op.MKDIR, "folder")
    step(replay, Op.SYNCED, "")
    step(replay, Op.CREATE, "folder/file")
    step(replay, Op.WRITE, "folder/file", b"a" * 2_048)
    step(replay, Op.SYNC, "folder/file")
    step(replay, Op.SYNCED, "folder/file")
    step(replay, Op.SYNCED, "folder")
    return replay


def test_a_write_is_durable_once_it_was_synced(tmp_path: Path) -> None:
    replay = begun()
    step(replay, Op.WRITE, "folder/file", b"b" * 1_024, offset=512)
    assert image(replay, tmp_path, Keep.NONE)["folder/file"] == b"a" * 2_048
    assert image(replay, tmp_path, Keep.ALL)["folder/file"].count(b"b") == 1_024
    torn = {image(replay, tmp_path, Keep.SECTORS, n)["folder/file"].count(b"b") for n in range(40)}
    assert torn == {0, 512, 1_024}
    step(replay, Op.SYNC, "folder/file")
    step(replay, Op.WRITE, "folder/file", b"c" * 512)
    step(replay, Op.SYNCED, "folder/file")
    left = image(replay, tmp_path, Keep.NONE, 1)["folder/file"]
    assert left == b"a" * 512 + b"b" * 1_024 + b"a" * 512, "what came during the sync is not in it"


def test_what_a_failed_sync_was_to_cover_stays_in_doubt(tmp_path: Path) -> None:
    replay = begun()
    step(replay, Op.WRITE, "folder/file", b"b" * 512)
    step(replay, Op.SYNC, "folder/file")
    step(replay, Op.SYNC_FAILED, "folder/file")
    step(replay, Op.WRITE, "folder/file", b"c" * 512, offset=512)
    step(replay, Op.SYNC, "folder/file")
    step(replay, Op.SYNCED, "folder/file")
    left = image(replay, tmp_path, Keep.NONE)["folder/file"]
    assert left == b"a" * 512 + b"c" * 512 + b"a" * 1_024


def test_a_synchronous_write_is_durable_when_it_returned(tmp_path: Path) -> None:
    replay = begun()
    step(replay, Op.WRITE, "folder/file", b"b" * 512, synchronous=True)
    assert image(replay, tmp_path, Keep.NONE)["folder/file"] == b"a" * 2_048
    step(replay, Op.WROTE, "folder/file")
    assert image(replay, tmp_path, Keep.NONE, 1)["folder/file"][:512] == b"b" * 512


def test_a_name_is_durable_once_its_folder_was_synced(tmp_path: Path) -> None:
    replay = begun()
    step(replay, Op.CREATE, "folder/new")
    step(replay, Op.RENAME, "folder/new", other="folder/named")
    assert image(replay, tmp_path, Keep.NONE).keys() == {"folder/file"}
    assert image(replay, tmp_path, Keep.ALL).keys() == {"folder/file", "folder/named"}
    step(replay, Op.SYNCED, "folder")
    step(replay, Op.UNLINK, "folder/file")
    assert image(replay, tmp_path, Keep.NONE, 1).keys() == {"folder/file", "folder/named"}
    step(replay, Op.MKDIR, "other")
    step(replay, Op.CREATE, "other/file")
    step(replay, Op.SYNCED, "other")
    kept = image(replay, tmp_path, Keep.NONE, 2)
    assert "other/file" not in kept, "its folder's own name is not durable"
