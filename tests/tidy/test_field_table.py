"""The table of field cases: every case has a row, and every test that a row names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy import source

FIELD = source.ROOT / "tests" / "field"
TABLE = FIELD / "README.md"
IDS = [f"P{number:02}" for number in range(1, 37)] + ["G1", "G2", "G3"]

ROW = re.compile(r"\| (?P<id>[PG]\d+) \| (?P<what>[^|]+) \| (?P<tests>[^|]+) \| ?(?P<form>[^|]*)\|")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
STAGE = re.compile(r"\btorture (\w+)")
NOT_APPLICABLE = "does not apply: "


def rows(text: str) -> dict[str, str]:
    """The cell of tests, by id. Raises ValueError for a row that is none, or is there twice."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith(("| P", "| G")):
            continue
        row = ROW.fullmatch(line)
        if row is None or row["id"] in found:
            raise ValueError(line[:80])
        found[row["id"]] = row["tests"]
    return found


def functions_of(path: Path) -> set[str]:
    """Names of the test functions of a module."""
    return {
        node.name
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }


def stages() -> set[str]:
    """The letters of the torture's stages."""
    places = (source.ROOT / "tests" / "torture" / "stages.py").read_text(encoding="utf-8")
    return set(re.findall(r'^    \("(\w+)", "\w+", "\w+"\),$', places, re.MULTILINE))


def named_by_id() -> dict[str, set[str]]:
    """The tests of this folder that have an id in their name: `file::test` by id."""
    found: dict[str, set[str]] = {}
    for path in sorted(FIELD.glob("test_*.py")):
        for name in functions_of(path):
            match = re.match(r"test_([pg]\d+)_", name)
            assert match is not None, f"{path.name}::{name} has no id"
            reference = f"{path.relative_to(source.ROOT)}::{name}"
            found.setdefault(match[1].upper(), set()).add(reference)
    return found


TABLE_ROWS = rows(TABLE.read_text(encoding="utf-8"))


def test_every_case_has_a_row_and_no_other() -> None:
    assert list(TABLE_ROWS) == IDS


@pytest.mark.parametrize("case", IDS)
def test_the_tests_of_a_case_exist(case: str) -> None:
    cell = TABLE_ROWS[case]
    if cell.startswith(NOT_APPLICABLE):
        assert len(cell) > len(NOT_APPLICABLE) + 20, "a reason is given"
        assert case not in named_by_id()
        return
    references = TEST.findall(cell)
    letters = STAGE.findall(cell)
    assert references or letters, cell
    for file, name in references:
        path = source.ROOT / file
        assert path.is_file(), file
        assert not name or name in functions_of(path), f"{file}::{name}"
    assert set(letters) <= stages()
    rest = STAGE.sub("", TEST.sub("", cell)).strip()
    assert rest == "", f"neither a test nor a stage: {rest}"


@pytest.mark.parametrize("case", IDS)
def test_tests_with_an_id_are_in_its_row(case: str) -> None:
    listed = {f"{file}::{name}" for file, name in TEST.findall(TABLE_ROWS[case])}
    assert named_by_id().get(case, set()) <= listed


@pytest.mark.parametrize(
    "line",
    ["| P01 | two | cells |", "| P01 | a | `tests/x.py` | in full |\n| P01 | b | `y` | in full |"],
)
def test_a_row_that_is_none_is_found(line: str) -> None:
    with pytest.raises(ValueError, match="P01"):
        rows(line)
