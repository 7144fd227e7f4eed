"""Imports point down, and importing the client is light."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy import source

PACKAGES = ("model", "policy", "core", "tiers", "wire", "testing", "cli")
MODULES = ("shm", "gather", "config", "clock", "mover", "ledger", "store", "simulate")

HEAVY = (
    "accelerate",
    "click",
    "kvstore_server",
    "lmdb",
    "msgspec",
    "prometheus_client",
    "rich",
    "torch",
    "transformers",
    "vllm",
)
HEAVY_OF_OURS = (
    "kvstore.core",
    "kvstore.mover",
    "kvstore.policy",
    "kvstore.store",
    "kvstore.tiers",
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the import contracts of folder/pyproject.toml over the packages in folder."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    roots = ":".join(str(folder / root) for root in (".", "server", "client"))
    environment = {**os.environ, "PYTHONPATH": roots}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_import_contracts_hold() -> None:
    run = lint(source.ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """Empty modules of every layer, under the real contracts."""
    shutil.copy(source.ROOT / "pyproject.toml", tmp_path)
    files = [f"kvstore/{name}/__init__.py" for name in PACKAGES]
    files += [f"kvstore/{name}.py" for name in MODULES]
    files += ["kvstore/__init__.py", "server/kvstore_server/__init__.py"]
    files += ["client/kvstore_client/__init__.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_contracts_hold_on_the_skeleton(skeleton: Path) -> None:
    text = "import kvstore.model\nfrom kvstore import gather, shm, wire\n"
    (skeleton / "client/kvstore_client/calls.py").write_text(text, encoding="utf-8")
    assert lint(skeleton).returncode == 0


@pytest.mark.parametrize(
    ("module", "line", "importer"),
    [
        ("kvstore/core/__init__.py", "import time", "kvstore.core"),
        ("kvstore/model/__init__.py", "from os import path", "kvstore.model"),
        ("kvstore/tiers/__init__.py", "import kvstore.core", "kvstore.tiers"),
        ("kvstore/store.py", "import kvstore.cli", "kvstore.store"),
        ("kvstore/wire/__init__.py", "import pickle", "kvstore.wire"),
        ("kvstore/mover.py", "import kvstore.testing", "kvstore.mover"),
        ("client/kvstore_client/__init__.py", "import kvstore_server", "kvstore_client"),
        ("client/kvstore_client/__init__.py", "import kvstore.policy", "kvstore_client"),
        ("client/kvstore_client/calls.py", "from kvstore.core import x", "kvstore_client.calls"),
        ("client/kvstore_client/calls.py", "import lmdb", "kvstore_client.calls"),
        ("kvstore/shm.py", "import kvstore.config", "kvstore.shm"),
    ],
)
def test_contracts_bite(skeleton: Path, module: str, line: str, importer: str) -> None:
    (skeleton / module).write_text(f"def late() -> None:\n    {line}\n", encoding="utf-8")
    run = lint(skeleton)
    assert run.returncode == 1
    assert f"{importer} -> " in run.stdout


def test_a_module_without_a_layer_is_refused(skeleton: Path) -> None:
    (skeleton / "kvstore/stray.py").touch()
    run = lint(skeleton)
    assert run.returncode == 1
    assert "kvstore.stray" in run.stdout


def modules_after(statement: str) -> set[str]:
    """What a fresh interpreter has loaded after the statement."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))",
        ],
        env={**os.environ, "PYTHONPATH": source.python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_the_client_is_light() -> None:
    loaded = modules_after("import kvstore_client")
    assert "kvstore_client" in loaded
    assert loaded.isdisjoint(HEAVY + HEAVY_OF_OURS), sorted(loaded & {*HEAVY, *HEAVY_OF_OURS})


def test_what_an_engine_adapter_decides_needs_no_engine() -> None:
    """So that it is tested where none is installed."""
    names = (
        "async_tier",
        "lanes",
        "model_spaces",
        "options",
        "page_store",
        "sglang_facts",
        "sglang_pages",
        "vllm_facts",
    )
    loaded = modules_after("\n".join(f"import kvstore_client.engines.{name}" for name in names))
    assert loaded.isdisjoint(HEAVY + HEAVY_OF_OURS), sorted(loaded & {*HEAVY, *HEAVY_OF_OURS})


def test_importing_the_daemon_needs_no_torch() -> None:
    loaded = modules_after("import kvstore_server.__main__")
    assert loaded.isdisjoint({"torch", "transformers", "kvstore_client"})
