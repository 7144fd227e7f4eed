"""The files that the tidy tests read: product code, test code, everything under version control."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
IMPORT_ROOTS = (ROOT, ROOT / "server", ROOT / "client")
PRODUCT_FOLDERS = ("kvstore", "server/kvstore_server", "client/kvstore_client")
GENERATED_FOLDER = "kvstore/wire/v1"


def python_path() -> str:
    """A PYTHONPATH with which a fresh interpreter finds the three import roots."""
    return ":".join(map(str, IMPORT_ROOTS))


def product_files() -> list[Path]:
    """Every hand-written module of the product."""
    return [
        path
        for folder in PRODUCT_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / GENERATED_FOLDER)
    ]


def test_files() -> list[Path]:
    """Every module under tests/."""
    return sorted((ROOT / "tests").rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def tracked_files() -> list[Path]:
    """Every file under version control that still exists."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def imported_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each absolute import, wherever in the module it stands."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.lineno, node.module


def names_imported_from(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module.name) of each name that a `from module import name` takes."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def called_names(module: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """(call, dotted name) of each call of a plain or dotted name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name is not None:
                yield node, name


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return None if head is None else f"{head}.{node.attr}"
    return None
