"""GPU, CPU memory and SSD in one daemon, the GPU's place taken by CPU memory that torch copies: all
three are filled, blocks go down and come up, the daemon is restarted and killed, and no byte is
wrong. `kvstore top` and the metrics show what moved.

By hand: python -m pytest tests/e2e/test_three_tiers.py -s
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from kvstore.cli import main
from kvstore.model.reasons import Reason
from kvstore.tiers.torchcpu import UUID
from tests.daemon import Daemon, make_daemon
from tests.e2e.stage import Prompt, model, until
from tests.rawclient import RawAdmin, RawClient, reason

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
    """A client that puts prompts and holds what it gets against what it put."""

    def __init__(self, daemon: Daemon, *, device_uuid: str = "") -> None:
        self.raw = RawClient(daemon.data_socket)
        self.space = self.raw.open(MODEL).space_id
        self.device_uuid = device_uuid
        self.right = self.wrong = self.missed = 0

    def put(self, prompt: Prompt, *, durable: bool = False) -> Reason:
        return reason(self.raw.put(self.space, prompt.keys, prompt.rows(), durable=durable).reason)

    def get(self, prompt: Prompt) -> int:
        """Blocks that came, all of them as they were put."""
        rows = self.raw.get(self.space, prompt.keys, device_uuid=self.device_uuid)
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
        return {self.raw.welcome.tiers[code - 1] for code in hit.tiers if 0 < code < 255}

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()


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
    uuid = UUID if shared else ""
    prompts = [Prompt(MODEL, seed, PROMPT_BLOCKS) for seed in range(PROMPTS)]
    with Verifier(daemon, device_uuid=uuid) as client:
        assert list(client.raw.welcome.device_uuids) == ([UUID] if shared else [])
        order = ["device", "host", "disk"] if shared else ["host", "device", "disk"]
        assert list(client.raw.welcome.tiers) == order
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
        print(f"\n{pools}: {held}, up {up:.0f}, down {down:.0f}, right {client.right}")

        assert client.put(prompts[0], durable=True) is Reason.OK
    assert daemon.stop() == 0  # saves the rest, what is in the GPU too
    daemon.start(START_S)
    with Verifier(daemon, device_uuid=uuid) as client:
        for prompt in prompts:
            client.get(prompt)
        assert client.wrong == 0
        assert client.right > 0
    daemon.kill()
    daemon.start(START_S)
    with Verifier(daemon, device_uuid=uuid) as client:
        assert client.get(prompts[0]) == PROMPT_BLOCKS, "what was durable outlives a kill"
        for prompt in prompts:
            client.get(prompt)
        assert client.wrong == 0
        assert client.tiers(prompts[0]) <= set(order)
