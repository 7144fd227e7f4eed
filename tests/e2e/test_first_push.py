"""A session's first push into memory that is full: room for its bytes has to be taken first."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig
from tests.client_kit import model, rows, tokens
from tests.daemon import start_daemon
from tests.e2e.stage import until

pytestmark = pytest.mark.process

MODEL = model("big", layers=8, heads=8, head_size=128)  # 128 KiB a block
PROMPTS = range(8)
BLOCKS = 16


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_it_is_stored_although_staging_is_not_there_at_once(
    tmp_path: Path, transport: Literal["shm", "stream"]
) -> None:
    disk = tmp_path / "disk"
    daemon = start_daemon(
        tmp_path, host__capacity_bytes="8MiB", disk__path=disk, disk__capacity_bytes="64MiB"
    )
    try:
        with Client(daemon.data_socket, config=ClientConfig(deadline_ms=30_000)) as writer:
            space = writer.space(MODEL)
            for seed in PROMPTS:
                data = rows(BLOCKS, space.block_bytes, seed)
                stored = space.push(tokens(BLOCKS, seed), data, durable=True)
                assert stored.stored == BLOCKS
        daemon.restart()
        config = ClientConfig(deadline_ms=30_000, transport=transport)
        with Client(daemon.data_socket, config=config) as client:
            space = client.space(MODEL)
            for seed in PROMPTS:
                keys = space.keys(tokens(BLOCKS, seed))
                until("all is read", lambda: space.fetch(keys).blocks == BLOCKS)  # noqa: B023
            pushed = space.push(tokens(4, 99), rows(4, space.block_bytes, 99))
            assert (pushed.stored, pushed.reason) == (4, Reason.OK)
    finally:
        daemon.stop()
