"""`kvstore verify`: what it prints and how it exits."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.disk.test_verify import SLOT_BYTES, Folder


@pytest.fixture
def disk(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "disk")


def test_a_right_folder_is_code_0(run: Run, disk: Folder) -> None:
    output = run("verify", str(disk.path)).stdout
    assert "10 of 10 right" in output
    assert output.splitlines()[-1] == "nothing is damaged"


def test_damage_is_code_1_and_is_named(run: Run, disk: Folder) -> None:
    disk.flip(3, SLOT_BYTES + 5_000)
    result = run("verify", str(disk.path), code=1)
    assert "9 of 10 right" in result.stdout
    assert "segments/00000003.seg slot 1" in result.stdout
    assert "payload damaged" in result.stdout
    assert result.stderr.strip().splitlines()[-1] == f"Error: 1 damaged in {disk.path}"


def test_json_is_json_with_either_code(run: Run, disk: Folder) -> None:
    right = json.loads(run("verify", str(disk.path), "--json").stdout)
    assert (right["ok"], right["right"]) == (True, 10)
    disk.flip(3, 0)
    wrong = json.loads(run("verify", str(disk.path), "--json", code=1).stdout)
    assert (wrong["ok"], wrong["damage_counts"]) == (False, {"record": 1})


def test_a_capacity_is_compared(run: Run, disk: Folder) -> None:
    assert "% used" in run("verify", str(disk.path), "--capacity", "1GiB").stdout
    assert "over capacity" in run("verify", str(disk.path), "--capacity", "8KiB", code=1).stdout
    assert "size" in run("verify", str(disk.path), "--capacity", "much", code=2).stderr


def test_a_folder_in_use_or_absent_is_code_2(run: Run, disk: Folder, tmp_path: Path) -> None:
    with (disk.path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "a daemon holds" in run("verify", str(disk.path), code=2).stderr
    assert "does not exist" in run("verify", str(tmp_path / "absent"), code=2).stderr


def test_many_damages_are_cut_short(run: Run, tmp_path: Path) -> None:
    disk = Folder(tmp_path / "disk", blocks=16)
    rows = [disk.block(100 + slot, segment=3, slot=slot % 8) for slot in range(8)]
    disk.commit(rows)
    for segment in (3, 4):
        disk.edit(segment, lambda data: data.__setitem__(slice(None), b"\xff" * len(data)))
    result = run("verify", str(disk.path), code=1)
    assert result.stdout.count("foreign") == 16
    assert "record     16" in result.stdout
