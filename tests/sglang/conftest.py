"""Collected by `python -m tests.sglang` alone, which installs what is needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.daemon import Daemon, make_daemon
from tests.sglang.place import importable, installed

# A test environment without an engine's packages cannot import it, whatever lies in build.
if installed() and importlib.util.find_spec("zmq") is not None:
    importable()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """With a disk; started."""
    folder = tmp_path_factory.mktemp("store")
    made = make_daemon(
        folder,
        host__capacity_bytes="128MiB",
        disk__path=str(folder / "disk"),
        disk__capacity_bytes="256MiB",
        state__path=str(folder / "state"),
    )
    made.start()
    yield made
    if made.alive:
        made.kill()
