"""The watch of tests/conftest.py fails a test in which the product unpickled, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tidy import source

# A class is looked up while this is loaded; it is compiled as if it stood in the named file.
TESTS = """
import pickle
from pathlib import Path
import pytest

LOAD = "import pickle; pickle.loads(data)"
DATA = pickle.dumps(Path("x"))
PRODUCT = {product!r}

def unpickle_in(name):
    exec(compile(LOAD, name, "exec"), {{"data": DATA}})

def test_product_unpickles():
    unpickle_in(PRODUCT)

def test_product_unpickles_and_hides_it():
    try:
        unpickle_in(PRODUCT)
    except Exception:
        pass

def test_others_unpickle():
    unpickle_in("/elsewhere/library.py")

def test_nobody_unpickles():
    pass
"""


def test_unpickling_fails_a_test(tmp_path: Path) -> None:
    product = str(source.ROOT / "kvstore/store.py")
    (tmp_path / "test_it.py").write_text(TESTS.format(product=product), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source.python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 passed" in run.stdout, run.stdout + run.stderr
    assert "nothing may be unpickled, but: pathlib" in run.stdout
