"""Engines under test: `make test-engines` has an environment of its own with vLLM in it. Without
vLLM nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, make_daemon
from tests.engines.kit import Engine
from tests.engines.nursery import fork

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, 1)
    return folder


def write_model(folder: Path, seed: int, kind: str = "llama") -> None:
    """See tests.engines.models. In a process of its own, as this one has no need of torch."""
    with Path(os.devnull).open("r+b") as nothing:
        number = nothing.fileno()
        child = fork(
            "tests.engines.models",
            str(folder),
            str(seed),
            kind,
            environ=os.environ,
            stdin=number,
            stdout=number,
            stderr=2,
        )
    assert child.wait(120) == 0


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """`engines(model, target=...)` starts one; what is left is killed at the end.

    In float32: how an engine batches depends on when the store answers, and bfloat16 rounds so
    coarsely that other batches make other tokens, with and without a store.
    """
    folder = tmp_path_factory.mktemp("engines")
    made: list[Engine] = []

    def start(model: Path, **arguments: Any) -> Engine:
        arguments = {"dtype": "float32", **arguments}
        engine = Engine(model, log=folder / f"engine{len(made)}.log", **arguments)
        made.append(engine)
        return engine

    yield start
    for engine in made:
        if engine.process.poll() is None:
            engine.kill()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """With a disk; not started."""
    folder = tmp_path_factory.mktemp("store")
    made = make_daemon(
        folder,
        host__capacity_bytes="128MiB",
        disk__path=str(folder / "disk"),
        disk__capacity_bytes="256MiB",
        state__path=str(folder / "state"),
    )
    yield made
    if made.alive:
        made.kill()
