"""GPU, CPU memory and SSD in one daemon, the GPU's place taken by CPU memory that torch copies: all
three are filled, blocks go down and come up, the daemon is restarted and killed, and no byte is
wrong. `kvstore top` and the metrics show what moved.

By hand: python -m pytest tests/e2e/test_three_tiers.py -s
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from click.testing import CliRunner

from kvstore.cli import main
from kvstore.model.reasons import Reason
from kvstore.tiers.torchcpu import UUID
from kvstore_client import Client, ClientConfig, Pushed
from kvstore_client.torchcpu import TorchCpu
from tests.daemon import Daemon, make_daemon
from tests.e2e.stage import Bytes, Prompt, model, until
from tests.rawclient import RawAdmin, RawClient, reason

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.slow]

Pools = Literal["staged", "shared_unproven"]
BLOCK = 64 << 10
MODEL = model(BLOCK)
PROMPT_BLOCKS = 16
PROMPTS = 30
"""30 MiB, more than 8 MiB of GPU memory and 16 MiB of CPU memory hold."""
START_S = 90.0
"""torch is imported, which takes long on a busy machine."""


class Verifier:
    """A client that puts prompts and holds what it gets against what it put: of the bare protocol,
    which is served through CPU memory.
    """

    def __init__(self, daemon: Daemon) -> None:
        self.right = self.wrong = self.missed = 0
        self.begin(daemon)

    def begin(self, daemon: Daemon) -> None:
        self.raw = RawClient(daemon.data_socket)
        self.space = self.raw.open(MODEL).space_id
        self.order = list(self.raw.welcome.tiers)
        self.lent = tuple(self.raw.welcome.device_uuids)

    def put(self, prompt: Prompt, *, durable: bool = False) -> Reason:
        return reason(self.raw.put(self.space, prompt.keys, prompt.rows(), durable=durable).reason)

    def get(self, prompt: Prompt) -> int:
        """Blocks that came, all of them as they were put."""
        return self.count(prompt, self.raw.get(self.space, prompt.keys))

    def count(self, prompt: Prompt, rows: Sequence[Bytes | None]) -> int:
        came = 0
        for row, expected in zip(rows, prompt.rows(), strict=True):
            if row is None:
                self.missed += 1
            elif (row == expected).all():
                self.right += 1
                came += 1
            else:
                self.wrong += 1
        return came

    def tiers(self, prompt: Prompt) -> set[str]:
        """Where its blocks are."""
        hit = self.raw.lookup(self.space, prompt.keys)
        return {self.order[code - 1] for code in hit.tiers if 0 < code < 255}

    def pool_blocks(self) -> int:
        """That came out of pools since the daemon was started."""
        return 0

    def again(self, daemon: Daemon) -> None:
        """The daemon is another one."""
        self.close()
        self.begin(daemon)

    def close(self) -> None:
        self.raw.close()


class PoolVerifier(Verifier):
    """The same with the client of this package, which opens pools: tensors go in and out, and one
    client lives through all daemons.
    """

    def __init__(self, daemon: Daemon) -> None:
        self.client = Client(
            daemon.data_socket, config=ClientConfig(deadline_ms=20_000), device=TorchCpu()
        )
        self.sdk = self.client.space(MODEL)
        super().__init__(daemon)

    def put(self, prompt: Prompt, *, durable: bool = False) -> Reason:
        data = torch.from_numpy(np.stack(prompt.rows()))

        def stored() -> Pushed | None:
            pushed = self.sdk.push(prompt.keys, data, durable=durable)
            return None if pushed.reason in (Reason.NO_SPACE, Reason.STAGING_BUSY) else pushed

        pushed = until("there is room", stored)
        assert pushed is not None
        return pushed.reason

    def get(self, prompt: Prompt) -> int:
        out = torch.full((len(prompt.keys), BLOCK), 0xCC, dtype=torch.uint8)
        blocks = self.sdk.fetch(prompt.keys, out).blocks
        rows: list[Bytes | None] = list(out.numpy()[:blocks])
        return self.count(prompt, [*rows, *[None] * (len(prompt.keys) - blocks)])

    def tiers(self, prompt: Prompt) -> set[str]:
        return {self.order[tier] for tier in self.sdk.lookup(prompt.keys).tiers}

    def pool_blocks(self) -> int:
        return self.client.connection().pools.blocks

    def again(self, daemon: Daemon) -> None:
        self.begin(daemon)

    def begin(self, daemon: Daemon) -> None:
        until("it is connected", lambda: self.client.connection().reason is Reason.OK)
        there = self.client.connection()
        assert there.transport == "shm"
        self.order, self.lent = list(there.tiers), there.pools.gpus

    def close(self) -> None:
        assert not self.client.connection().pools.refused
        self.client.close()


def metrics(daemon: Daemon) -> dict[str, float]:
    with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def moved(daemon: Daemon, why: str) -> float:
    return metrics(daemon).get(f'kvstore_copies_total{{why="{why}"}}', 0.0)


def blocks(daemon: Daemon) -> dict[str, int]:
    with RawAdmin(daemon.admin_socket) as admin:
        return {tier.name: tier.blocks for tier in admin.stats().tiers}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Daemon]]:
    """Daemons that are ended with the test."""
    daemons: list[Daemon] = []
    yield daemons
    for daemon in daemons:
        if daemon.alive:
            daemon.kill()


def three_tiers(tmp_path: Path, pools: Pools) -> Daemon:
    return make_daemon(
        tmp_path,
        host__capacity_bytes="16MiB",
        host__staging_bytes="2MiB",
        device__capacity_bytes="8MiB",
        device__driver="torch-cpu",
        device__pools=pools,
        disk__path=str(tmp_path / "disk"),
        disk__capacity_bytes="256MiB",
    )


@pytest.mark.parametrize("pools", ["staged", "shared_unproven"])
def test_three_tiers_in_one_run(made: list[Daemon], tmp_path: Path, pools: Pools) -> None:
    daemon = three_tiers(tmp_path, pools)
    made.append(daemon.start(START_S))
    shared = pools == "shared_unproven"
    prompts = [Prompt(MODEL, seed, PROMPT_BLOCKS) for seed in range(PROMPTS)]
    client = PoolVerifier(daemon) if shared else Verifier(daemon)
    assert client.lent == ((UUID,) if shared else ())
    order = ["device", "host", "disk"] if shared else ["host", "device", "disk"]
    assert client.order == order
    for prompt in prompts:
        assert client.put(prompt) is Reason.OK
        if shared:  # asked for again, so worth a place in the GPU
            for _ in range(3):
                client.get(prompt)
    until("all tiers hold blocks", lambda: all(blocks(daemon).values()))
    held = blocks(daemon)
    for _ in range(2):
        for prompt in reversed(prompts):
            client.get(prompt)
    assert client.wrong == 0
    assert client.right >= PROMPTS * PROMPT_BLOCKS
    up, down = moved(daemon, "promote"), moved(daemon, "demote")
    assert up > 0, "blocks have come up"
    assert down > 0, "blocks have gone down"
    assert moved(daemon, "load") > 0
    shown = CliRunner().invoke(
        main, ["top", "--once", "--admin-socket", daemon.admin_socket], catch_exceptions=False
    )
    assert shown.exit_code == 0
    for name in order:
        assert name in shown.output
    lent = client.pool_blocks()
    assert bool(lent) == shared
    print(f"\n{pools}: {held}, up {up:.0f}, down {down:.0f}, right {client.right}, pools {lent}")

    assert client.put(prompts[0], durable=True) is Reason.OK
    assert daemon.stop() == 0  # saves the rest, what is in the GPU too
    daemon.start(START_S)
    client.again(daemon)
    before = client.right
    for prompt in prompts:
        client.get(prompt)
    assert client.wrong == 0
    assert client.right > before
    if shared:
        until(
            "blocks are in the GPU again", lambda: client.get(prompts[0]) and client.pool_blocks()
        )
    _kill_while_it_is_read(daemon, client, prompts)
    daemon.start(START_S)
    client.again(daemon)
    assert client.get(prompts[0]) == PROMPT_BLOCKS, "what was durable outlives a kill"
    for prompt in prompts:
        client.get(prompt)
    assert client.wrong == 0
    assert client.tiers(prompts[0]) <= set(order)
    if shared:
        until(
            "blocks are in the GPU again", lambda: client.get(prompts[0]) and client.pool_blocks()
        )
        assert client.wrong == 0
    client.close()


def _kill_while_it_is_read(daemon: Daemon, client: Verifier, prompts: list[Prompt]) -> None:
    """Of a client that opens pools: another thread reads meanwhile, and until all is a miss."""
    if not isinstance(client, PoolVerifier):
        daemon.kill()
        return
    begun, reads = threading.Event(), 0
    with ThreadPoolExecutor(1) as thread:

        def read() -> None:
            nonlocal reads
            while client.get(prompts[reads % 2]):
                reads += 1
                begun.set()

        reading = thread.submit(read)
        assert begun.wait(START_S)
        daemon.kill()
        reading.result(START_S)
    assert client.wrong == 0
