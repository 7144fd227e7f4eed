"""Size of files and functions, and what code may not do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy import source

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 90

# Loading with these runs code that the data names.
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load"}

SLEEPS = {"time.sleep", "asyncio.sleep"}

# Real processes are polled with a deadline, and polling sleeps; it does so in these places alone.
SLEEP_ALLOWED = (
    "tests/e2e/",
    "tests/engines/",
    "tests/field/",
    "tests/audit/",
    "tests/bench/",
    "tests/torture/",
    "tests/soak",
    "tests/integration/polling.py",
)


def long_functions(module: ast.Module, lines_max: int) -> Iterator[tuple[int, str, int]]:
    """(line, name, lines) of each function that is longer than lines_max."""
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > lines_max:
                yield node.lineno, node.name, lines


def banned(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of each import and call that can run code out of data."""
    for line, name in source.imported_names(module):
        if name.split(".")[0] in BANNED_MODULES:
            yield line, f"import {name}"
    for line, name in source.names_imported_from(module):
        if name in BANNED_CALLS:
            yield line, f"import of {name}"
    for call, name in source.called_names(module):
        if name in BANNED_CALLS:
            yield call.lineno, f"{name}()"
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle" and not _is_constant(keyword.value, False):
                yield call.lineno, f"{name}(allow_pickle=...)"


def sleeps(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of each sleep; asyncio.sleep(0) only yields to the loop and is none."""
    for line, name in source.names_imported_from(module):
        if name in SLEEPS:
            yield line, f"import of {name}"
    for call, name in source.called_names(module):
        yields_only = name == "asyncio.sleep" and call.args and _is_constant(call.args[0], 0)
        if name in SLEEPS and not yields_only:
            yield call.lineno, name


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def _at(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(source.ROOT)}:{line}: {what}"


def test_no_file_is_too_long() -> None:
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in source.product_files()
    }
    assert lengths, "no product code found"
    too_long = [_at(p, n, "too long") for p, n in lengths.items() if n > FILE_LINES_MAX]
    assert too_long == []


def test_no_function_is_too_long() -> None:
    too_long = [
        _at(path, line, f"{name} has {lines} lines")
        for path in source.product_files()
        for line, name, lines in long_functions(source.tree(path), FUNCTION_LINES_MAX)
    ]
    assert too_long == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(source.ROOT))
        for path in source.product_files()
        if source.tree(path).body and ast.get_docstring(source.tree(path)) is None
    ]
    assert silent == []


def test_product_runs_no_code_out_of_data() -> None:
    found = [
        _at(path, line, what)
        for path in source.product_files()
        for line, what in banned(source.tree(path))
    ]
    assert found == []


def test_tests_do_not_sleep() -> None:
    found = [
        _at(path, line, what)
        for path in source.test_files()
        if not str(path.relative_to(source.ROOT)).startswith(SLEEP_ALLOWED)
        for line, what in sleeps(source.tree(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "def late():\n    import shelve",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_scan_finds_what_is_banned(text: str) -> None:
    assert list(banned(ast.parse(text)))


def test_scan_lets_pass_what_is_harmless() -> None:
    text = "import json, re\nre.compile('x')\nimport numpy\nnumpy.load('x', allow_pickle=False)"
    assert list(banned(ast.parse(text))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import time\ntime.sleep(1)", 1),
        ("from time import sleep", 1),
        ("import asyncio\nasyncio.sleep(0.1)", 1),
        ("import asyncio\nasyncio.sleep(0)", 0),
        ("import time\ntime.monotonic_ns()", 0),
    ],
)
def test_scan_finds_sleeps(text: str, found: int) -> None:
    assert len(list(sleeps(ast.parse(text)))) == found


def test_scan_measures_functions() -> None:
    module = ast.parse("def long():\n    a = 1\n    b = 2\n\ndef short():\n    pass\n")
    assert list(long_functions(module, 2)) == [(1, "long", 3)]
