"""The device tier on a real GPU. What holds for the order of calls is proven without one, by the
recording double; these prove that the device and its driver keep to what is built on.

Each says what it proves; deploy/docs/gpu.md lists them with where they have been run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import shm
from kvstore.model.values import Place, Region
from kvstore.tiers.base import Crossing
from kvstore.tiers.cuda import CudaDriver
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon, make_daemon
from tests.e2e.stage import Prompt, model, until
from tests.rawclient import RawClient

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.process, pytest.mark.slow]

MIB = 1 << 20
BLOCK = MIB
BLOCKS = 256
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
DEVICE, HOST = 0, 1


def region_of(region_id: int, tier: int) -> Region:
    header = shm.header_bytes(BLOCKS)
    return Region(region_id, tier, "default", BLOCK, BLOCKS, header, header + BLOCKS * BLOCK)


def at(tier: int, slot: int) -> Place:
    return Place(tier, 1 + tier, slot, 1, 0)


class Stand:
    """A host region and a device region of 256 blocks of 1 MiB, and the tier between them."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2)
        total = region_of(1, HOST).total_bytes
        self.host = HostTier(2 * total, region_bytes=total, mlock="off")
        self.tier = DeviceTier(
            CudaDriver(0), 2 * total, background=self.threads, host_map=self.host.mapped
        )
        self.host.unmapping = self.tier.release_host
        self.tier.open()
        self.tier.assign(region_of(1, DEVICE))
        self.host.assign(region_of(2, HOST))

    def crossings(self, *, inward: bool) -> list[Crossing]:
        return [
            Crossing(at(DEVICE, i), at(HOST, i), self.host.view(at(HOST, i), BLOCK), inward)
            for i in range(BLOCKS)
        ]

    def cross(self, *, inward: bool) -> float:
        """Seconds that all blocks take."""
        crossings = self.crossings(inward=inward)
        begun = time.perf_counter()
        assert self.tier.cross(crossings) == [None] * BLOCKS
        return time.perf_counter() - begun

    def close(self) -> None:
        self.tier.close()
        self.host.close()
        self.threads.shutdown()


@pytest.fixture
def stand() -> Iterator[Stand]:
    one = Stand()
    yield one
    one.close()


def test_blocks_come_back_from_the_device_as_they_were(stand: Stand) -> None:
    """Integrity of 1,000 rounds through streams, events and registered memory: every byte that was
    sent in comes back, in memory that is overwritten as soon as a copy is said to be done.
    """
    rng = np.random.default_rng(1)
    for _ in range(1_000):
        slot, back = (int(n) for n in rng.integers(0, BLOCKS, 2))
        source = stand.host.view(at(HOST, slot), BLOCK)
        source[:] = rng.integers(0, 256, BLOCK, dtype=np.uint8)
        expected = source.copy()
        inward = Crossing(at(DEVICE, slot), at(HOST, slot), source, True)
        assert stand.tier.cross([inward]) == [None]
        source[:] = 0
        target = stand.host.view(at(HOST, back), BLOCK)
        outward = Crossing(at(DEVICE, slot), at(HOST, back), target, False)
        assert stand.tier.cross([outward]) == [None]
        assert (target == expected).all()


def test_new_memory_of_the_device_is_all_zero() -> None:
    """A region never shows what another tenant's, or another process's, had in that memory."""
    for value in (0xFF, 0):
        stand = Stand()
        for slot in range(BLOCKS):
            assert not stand.tier.read(at(DEVICE, slot), BLOCK).any()
            stand.host.view(at(HOST, slot), BLOCK)[:] = value
        stand.cross(inward=True)
        stand.close()


def test_the_rate_into_the_device_beside_a_raw_pinned_copy(
    stand: Stand, record_property: Callable[[str, object], None]
) -> None:
    """Measures; its bytes alone can fail it. GB/s of 256 blocks of 1 MiB out of a registered region
    and of one copy of as many bytes out of torch's pinned memory, alternately.
    """
    pinned = torch.empty(BLOCKS * BLOCK, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(BLOCKS * BLOCK, dtype=torch.uint8, device="cuda")
    ours, raw = [], []
    for _ in range(10):
        ours.append(stand.cross(inward=True))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        raw.append(time.perf_counter() - begun)
    rates = {name: BLOCKS * BLOCK / min(s) / 1e9 for name, s in (("tier", ours), ("raw", raw))}
    print(rates)
    record_property("h2d_gb_per_s", rates)
    assert stand.tier.stats().registered_bytes == region_of(2, HOST).total_bytes


def test_the_stall_of_a_compute_stream_while_blocks_cross(
    stand: Stand, record_property: Callable[[str, object], None]
) -> None:
    """Measures; its bytes alone can fail it. How much longer the same kernels take on another
    stream while the tier copies all the time, in and out.
    """
    left = torch.randn(4096, 4096, device="cuda")

    def kernels() -> float:
        torch.cuda.synchronize()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(50):
            left @ left
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))

    kernels()
    alone, beside = [], []
    for _ in range(5):
        alone.append(kernels())
        copying = stand.threads.submit(
            lambda: [stand.cross(inward=bool(n % 2)) for n in range(1, 9)]
        )
        beside.append(kernels())
        copying.result()
    ratio = min(beside) / min(alone)
    print(f"kernels beside copies take {ratio:.3f} of what they take alone")
    record_property("compute_stall_ratio", ratio)
    for slot in range(BLOCKS):
        assert not stand.host.view(at(HOST, slot), BLOCK).any()


def run_exporter(blocks: int, seconds: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.gpu.exporter", str(blocks), str(BLOCK), str(seconds)]
    return subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """All lines until the output ends, which both processes hold open."""
    assert process.stdout is not None
    return [json.loads(line) for line in process.stdout]


def test_a_pool_is_opened_by_another_process() -> None:
    """Memory that the tier exports as a descriptor has the same bytes in a process that imports it,
    also while the exporter goes on writing the same ones.
    """
    process = run_exporter(16, 3)
    merged: dict[str, Any] = {}
    for line in said(process):
        merged |= line
    assert process.wait(PATIENCE_S) == 0
    assert merged["first"][:16] == list(range(16))
    assert merged["copies"] > 0
    assert merged["wrong"] == 0


@pytest.mark.parametrize("after_ms", [0, 1, 5, 20, 100])
def test_who_copies_out_of_a_pool_outlives_the_kill_of_its_owner(after_ms: int) -> None:
    """The gate of device.pools = shared_unproven: the owner of a pool is killed with -9 while its
    own copies and those of the process that opened it run; that process goes on for seconds, reads
    the same bytes, and ends by itself with no error of its device.
    """
    process = run_exporter(64, 4)
    assert process.stdout is not None
    lines = iter(process.stdout)
    merged: dict[str, Any] = {}
    while "first" not in merged:
        merged |= json.loads(next(lines))
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after_ms / 1e3)
    process.kill()
    process.wait(PATIENCE_S)
    for line in lines:
        merged |= json.loads(line)
    assert merged["wrong"] == 0, "and not missing: it has ended by itself"
    assert merged["copies"] > 0


LOSE = """
import torch
from tests.gpu.test_device_pool import DEVICE, HOST, Stand, at, BLOCK
from kvstore.tiers.driver import DeviceLostError
stand = Stand()
stand.host.view(at(HOST, 0), BLOCK)[:] = 7
stand.cross(inward=True)
index = torch.tensor([1 << 40], device="cuda")
try:
    torch.zeros(4, device="cuda")[index]
    torch.cuda.synchronize()
except RuntimeError:
    pass
outcomes = stand.tier.cross(stand.crossings(inward=True))
assert all(isinstance(one, DeviceLostError) for one in outcomes), outcomes[:3]
assert stand.tier.lost
assert (stand.host.view(at(HOST, 0), BLOCK) == 7).all()
stand.host.unassign(2)
while stand.host.work():
    pass
print("dropped", stand.tier.lost)
"""


def test_a_lost_context_drops_the_tier_and_leaves_the_host_alone() -> None:
    """A kernel of the same context fails, which ends the context for good: all copies fail from
    then on as lost, host memory keeps its bytes and is unmapped without a crash.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOSE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "dropped" in done.stdout


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = make_daemon(
        tmp_path,
        host__capacity_bytes="64MiB",
        device__capacity_bytes="2GiB",
        disk__path=str(tmp_path / "disk"),
        disk__capacity_bytes="2GiB",
    )
    yield made.start(PATIENCE_S)
    if made.alive:
        made.kill()


ENGINE = """
import sys
from tests.e2e.stage import Prompt, model
from tests.rawclient import RawClient
with RawClient(sys.argv[1]) as client:
    space = client.open(model(65536)).space_id
    for seed in range(60):
        prompt = Prompt(model(65536), seed, 64)
        client.put(space, prompt.keys, prompt.rows())
        print(seed, flush=True)
"""


def test_an_engine_that_is_killed_finds_its_blocks_when_it_comes_back(daemon: Daemon) -> None:
    """An engine process is killed in the middle of its work; the one that replaces it reads what
    had been committed, from GPU memory too, and not one byte is wrong.
    """
    argv = [sys.executable, "-c", ENGINE, daemon.data_socket]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        for line in engine.stdout:
            if int(line) == 50:
                os.kill(engine.pid, signal.SIGKILL)
                break
    fingerprint = model(65536)
    right = 0
    with RawClient(daemon.data_socket) as client:
        space = client.open(fingerprint).space_id
        for seed in range(51):
            prompt = Prompt(fingerprint, seed, 64)
            rows = client.get(space, prompt.keys)
            for row, expected in zip(rows, prompt.rows(), strict=True):
                assert row is None or (row == expected).all()
                right += row is not None
    assert right > 64 * MIB // 65536, "more than host memory holds"


def test_the_client_reads_blocks_out_of_the_daemons_pool(tmp_path: Path) -> None:
    """The whole way of device.pools = shared_unproven with the client of this package: what is
    asked for often rises into the GPU, and a fetch into a CUDA tensor copies it from there, rows in
    a line and rows apart, every byte; it goes on when the daemon is killed meanwhile.
    """
    fingerprint, blocks = model(65536), 64
    made = make_daemon(
        tmp_path,
        host__capacity_bytes="256MiB",
        device__capacity_bytes="1GiB",
        device__pools="shared_unproven",
    )
    prompts = [Prompt(fingerprint, seed, blocks) for seed in range(20)]
    made.start(PATIENCE_S)
    try:
        with Client(made.data_socket, config=ClientConfig(deadline_ms=20_000)) as client:
            space = client.space(fingerprint)
            line = torch.zeros((blocks, 65536), dtype=torch.uint8, device="cuda")
            halves = torch.zeros((2, blocks, 32768), dtype=torch.uint8, device="cuda")

            def check(prompt: Prompt) -> int:
                came = space.fetch(prompt.keys, line).blocks
                expected = np.stack(prompt.rows())
                assert (line.cpu().numpy()[:came] == expected[:came]).all()
                with space.fetch_layers(prompt.keys, [halves.transpose(0, 1)]) as layers:
                    layers.wait(0)
                    came = layers.result().blocks
                got = halves.cpu().numpy().transpose(1, 0, 2).reshape(blocks, -1)
                assert (got[:came] == expected[:came]).all()
                return came

            for prompt in prompts:
                space.push(prompt.keys, torch.from_numpy(np.stack(prompt.rows())).cuda())
                for _ in range(3):
                    check(prompt)
            until(
                "blocks come out of a pool",
                lambda: [check(prompt) for prompt in prompts] and client.connection().pools.blocks,
                PATIENCE_S,
            )
            assert not client.connection().pools.refused, client.connection().pools.detail
            with ThreadPoolExecutor(1) as thread:
                reading = thread.submit(
                    lambda: [check(prompt) for _ in range(50) for prompt in prompts]
                )
                made.kill()
                reading.result(PATIENCE_S)
            assert float(torch.ones(4, device="cuda").sum()) == 4.0, "the context lives"
    finally:
        if made.alive:
            made.kill()
