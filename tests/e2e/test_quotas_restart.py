"""Quotas above a disk tier, before and after a restart: what a tenant keeps when another floods
memory and disk does not depend on which daemon it was stored under.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, model, until
from tests.rawclient import RawAdmin
from tests.torture.watching import http

pytestmark = [pytest.mark.process, pytest.mark.slow]

MIB = 1 << 20
BLOCK = 64 << 10
MODEL = model(BLOCK)
CONFIG = ClientConfig(deadline_ms=60_000)
BLOCKS = 32
OWN_PROMPTS = 5
"""10 MiB of tenant a: less than its quota of memory and its share of the disk."""
FLOOD_PROMPTS = 36
"""72 MiB of tenant b: more than all memory, more than its share of the disk, and with what is there
more than all of the disk. But less than all of the disk at once: what nobody asked the disk for
while as much was written as it holds gives way, whosever it is.
"""
REGION = MIB
"""More than any region here."""


@pytest.fixture
def daemon(tmp_path: Path, daemons: Callable[..., Daemon]) -> Daemon:
    return daemons(
        host__capacity_bytes="32MiB",
        host__staging_bytes="2MiB",
        disk__path=str(tmp_path / "disk"),
        disk__capacity_bytes="96MiB",
        tenants__a__quota_bytes="20MiB",
        tenants__b__quota_bytes="8MiB",
    )


def prompts(tenant: str, count: int, seed: int) -> list[Prompt]:
    return [Prompt(MODEL, seed + n, blocks=BLOCKS, tenant=tenant) for n in range(count)]


def put(daemon: Daemon, tenant: str, written: list[Prompt]) -> None:
    """Stores prompts, each on disk as well; of what has no room, as much as there is."""
    with Client(daemon.data_sockets[tenant], config=CONFIG) as client:
        space = client.space(MODEL)
        for prompt in written:
            rows = np.stack(prompt.rows())

            def stored(prompt: Prompt = prompt, rows: Any = rows) -> bool:
                return space.push(prompt.keys, rows, durable=True).reason is Reason.OK

            until("there is staging", stored)


def fetched(daemon: Daemon, tenant: str, wanted: list[Prompt]) -> list[int]:
    """Blocks that are there of each prompt; they must be right."""
    found = []
    with Client(daemon.data_sockets[tenant], config=CONFIG) as client:
        space = client.space(MODEL)
        for prompt in wanted:
            got = space.fetch(prompt.keys)
            shorter = Prompt(prompt.fingerprint, 0, 0, tenant=tenant)
            shorter.keys = prompt.keys[: got.blocks]
            Prompt.assert_right(shorter, list(got.data[: got.blocks]))
            found.append(got.blocks)
    return found


def used_bytes(daemon: Daemon, tenant: str) -> int:
    """Of memory."""
    with RawAdmin(daemon.admin_socket) as admin:
        (found,) = [one for one in admin.stats().tenants if one.tenant == tenant]
        return int(found.used_bytes)


def quota_bytes(daemon: Daemon) -> dict[str, int]:
    with RawAdmin(daemon.admin_socket) as admin:
        return {one.tenant: one.quota_bytes for one in admin.stats().tenants}


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_a_flood_takes_neither_memory_nor_disk_of_another_after_a_restart_either(
    daemon: Daemon, end: str
) -> None:
    own = prompts("a", OWN_PROMPTS, 1)
    whole = [BLOCKS] * OWN_PROMPTS
    put(daemon, "a", own)
    held = used_bytes(daemon, "a")
    assert held >= OWN_PROMPTS * BLOCKS * BLOCK
    put(daemon, "b", prompts("b", FLOOD_PROMPTS, 1_000))
    assert used_bytes(daemon, "a") > held - REGION, "a flood took what is another's"
    assert fetched(daemon, "a", own) == whole
    quotas = quota_bytes(daemon)
    if end == "SIGKILL":
        daemon.kill()
        daemon.start()
    else:
        daemon.restart()
    until("the index is loaded", lambda: "kvstore_disk_loading 0.0" in http(daemon, "/metrics")[1])
    assert quota_bytes(daemon) == quotas == {"a": 20 * MIB, "b": 8 * MIB}
    # On disk alone: this flood takes the other's files if shares are forgotten with the process.
    put(daemon, "b", prompts("b", FLOOD_PROMPTS, 2_000))
    # In memory again, of which b had all meanwhile: regions change hands one after the other, and
    # what finds no room is read past memory.
    until(
        "tenant a's blocks are loaded",
        lambda: fetched(daemon, "a", own) == whole and used_bytes(daemon, "a") > 4 * MIB,
        30,
    )
    held = used_bytes(daemon, "a")
    put(daemon, "b", prompts("b", FLOOD_PROMPTS, 3_000))
    assert used_bytes(daemon, "a") > held - REGION
    until("tenant a's blocks are there", lambda: fetched(daemon, "a", own) == whole)
