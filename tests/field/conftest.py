"""Daemons of the field cases: they keep the standing rules, whatever a case did to them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.daemon import Daemon, make_daemon
from tests.field.rules import assert_standing_rules


class Start(Protocol):
    """Starts a daemon with a host tier of 16 MiB, in a folder of its own unless one is given."""

    def __call__(self, folder: Path | None = None, **settings: Any) -> Daemon: ...


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Start]:
    """At the end the standing rules are checked of those that run; none may have died by itself."""
    made: list[Daemon] = []

    def start(folder: Path | None = None, **settings: Any) -> Daemon:
        if folder is None:
            folder = tmp_path / f"d{len(made)}"
            folder.mkdir()
        given = {"host__capacity_bytes": "16MiB", "host__staging_bytes": "2MiB", **settings}
        daemon = make_daemon(folder, **given)
        daemon.start()
        made.append(daemon)
        return daemon

    try:
        yield start
        for daemon in made:
            if daemon.alive:
                assert_standing_rules(daemon)
            assert daemon.process.poll() in (None, 0, -signal.SIGKILL), daemon.log()
    finally:
        for daemon in made:
            if daemon.alive:
                daemon.kill()
