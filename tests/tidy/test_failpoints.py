"""The torture's failpoints: each names a function that is there, and what is asked for is read."""

from __future__ import annotations

import errno
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.torture.failpoints import PLACES, BadFailpoint, Failpoint, parse


@pytest.mark.parametrize("name", PLACES)
def test_a_place_is_a_function_that_is_called_and_returns(name: str) -> None:
    module, path = PLACES[name]
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert inspect.isfunction(found)
    # Their call returns before anything was done.
    assert not inspect.iscoroutinefunction(found)
    assert not inspect.isgeneratorfunction(found)


def test_several_are_read_with_what_they_do_and_when() -> None:
    points = parse("disk.commit.before=kill;disk.pread.after=error:EIO,nth:3;disk.sync.before=off")
    assert points == [
        Failpoint("disk.commit.before", "kill"),
        Failpoint("disk.pread.after", "error", "EIO", nth=3),
        Failpoint("disk.sync.before", "off"),
    ]
    assert parse("") == []


@pytest.mark.parametrize(
    "text",
    ["disk.nothing.before=kill", "disk.commit=kill", "disk.commit.before=explode",
     "disk.commit.before=error:ENOTHING", "disk.commit.before=kill,at:3"],
)  # fmt: skip
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadFailpoint):
        parse(text)


def test_a_call_is_struck_by_its_number() -> None:
    third, later = parse("disk.commit.before=off,nth:3;disk.commit.before=off,from:3")
    assert [third.strikes(call) for call in range(1, 6)] == [False, False, True, False, False]
    assert [later.strikes(call) for call in range(1, 6)] == [False, False, True, True, True]


def test_an_error_is_raised_and_a_note_is_written(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    error, note = parse(f"disk.sync.before=error:ENOSPC;disk.sync.after=note:{notes}")
    with pytest.raises(OSError, match="No space left") as caught:
        error.strike()
    assert caught.value.errno == errno.ENOSPC
    note.strike()
    note.strike()
    assert notes.read_text() == "disk.sync.after\ndisk.sync.after\n"
