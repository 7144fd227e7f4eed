"""What no file under version control may say, and versions that must agree between files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.tidy import source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Written in pieces, so that this file passes its own test.
BANNED_TEXT = re.compile(
    r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot)/|\bTO" + r"DO\b|\bFIX" + r"ME\b", re.ASCII
)


def findings(text: str) -> list[tuple[int, str]]:
    """(line, word) of each banned word."""
    return [
        (number, match.group())
        for number, line in enumerate(text.splitlines(), 1)
        for match in BANNED_TEXT.finditer(line)
    ]


def _text(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode("utf-8")


@pytest.mark.skipif(not (source.ROOT / ".git").exists(), reason="not a checkout")
def test_no_machine_path_and_no_loose_end() -> None:
    files = source.tracked_files()
    assert files, "no file under version control"
    found = [
        f"{path.relative_to(source.ROOT)}:{line}: {word}"
        for path in files
        for line, word in findings(_text(path))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["see /wo" + "rk/x", "'/ro" + "ot/y'", "# TO" + "DO: z"])
def test_scan_finds_banned_text(text: str) -> None:
    assert len(findings(text)) == 1


def test_scan_lets_pass_what_is_harmless() -> None:
    assert findings("net/wo" + "rk/ and TODOS, ./root/ of a tree") == []


def test_oldest_constraints_are_the_lower_bounds() -> None:
    with (source.ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    bounds = dict(re.findall(r"^([\w-]+)>=([\w.]+)", "\n".join(dependencies), re.MULTILINE))
    assert len(bounds) == len(dependencies), "a dependency without a plain lower bound"
    oldest = (source.ROOT / "constraints/oldest.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", oldest, re.MULTILINE))
    assert {name: pins.get(name) for name in bounds} == bounds
