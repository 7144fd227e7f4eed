"""What sizing.md and the manifests say a daemon needs beside its arena, held against a real one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, ClientConfig
from tests import client_kit
from tests.daemon import Daemon

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parent.parent.parent
IDLE_BYTES = 128 << 20
BLOCK_BYTES = 1 << 10
BLOCKS = 40_000


def own_bytes(pid: int) -> int:
    """Resident memory of a process that is not shared memory: not the arena."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"(?m)^(RssAnon|RssFile):\s+(\d+) kB", status))
    return sum(int(kib) << 10 for kib in found.values())


def test_the_figures_are_those_of_the_document() -> None:
    text = (ROOT / "deploy/docs/sizing.md").read_text()
    assert f"| under {IDLE_BYTES >> 20} MiB |" in text
    assert f"| about {BLOCK_BYTES >> 10} KiB |" in text
    assert "host.capacity_bytes + 512 MiB + 1 KiB x blocks beyond 250,000" in text


def test_an_idle_daemon_and_its_blocks_need_no_more(
    daemons: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = daemons(
        host__capacity_bytes="256MiB",
        disk__path=str(tmp_path / "disk"),
        disk__capacity_bytes="512MiB",
    )
    idle = own_bytes(daemon.pid)
    rows = np.zeros((1000, 4096), np.uint8)
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=30_000)) as client:
        space = client.space(client_kit.model())
        stored = sum(
            space.push(client_kit.tokens(1000, seed), rows).stored for seed in range(BLOCKS // 1000)
        )
    assert stored == BLOCKS
    each = (own_bytes(daemon.pid) - idle) / BLOCKS
    print(f"idle: {idle >> 20} MiB; a block: {each:.0f} bytes")
    assert idle < IDLE_BYTES
    # Of these some are in memory and on disk at once, and some were taken by the heap for good.
    assert each < 2 * BLOCK_BYTES
    assert daemon.stop() == 0
