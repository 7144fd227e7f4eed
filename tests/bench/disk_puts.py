"""Saving 256 blocks so that they outlive a power cut, against plain direct writes into preallocated
extents and one sync. Mover, tier and index as the daemon has them, in this process.

Neither side writes where anybody has written before: a device that makes room for what is written
first (a thin volume, a virtual disk) takes half as long again for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstore.clock import SystemClock
from kvstore.core.effects import Copy
from kvstore.model.values import STAGING, Place, Region
from kvstore.mover import Completion, Mover
from kvstore.shm import header_bytes
from kvstore.tiers.disk.format import record_bytes
from kvstore.tiers.disk.opening import DiskFolder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostTier
from kvstore_server.disk import READERS, device_threads
from tests.bench.direct import Direct
from tests.bench.harness import PAIRS_MIN, Results, compare, timed

MIB = 1 << 20
RECORD_BYTES = record_bytes(MIB)
BATCH = 256
ROUNDS = 20
WARMUP = 3
SPARE = 3
"""Batches for which the tier has room beyond: its segments are made ahead."""
SWITCH_S = 0.0002
"""The daemon's switch interval."""
HOST, DISK, SPACE = 0, 1, 1
READY_S = 20.0


class Saver:
    """A host region full of blocks, and a tier to save them to."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._loop.close)
        self.tier = DiskTier(
            DiskFolder(str(folder)), capacity_bytes=capacity_bytes, clock=SystemClock()
        )
        self._undo.callback(self.tier.close)
        self.tier.describe(SPACE, "default", bytes(32), MIB)
        self.tier.start()
        header = header_bytes(BATCH)
        region = Region(1, HOST, "default", MIB, BATCH, header, header + BATCH * MIB)
        host = HostTier(region.total_bytes, region_bytes=region.total_bytes, mlock="off")
        self._undo.callback(host.close)
        host.assign(region)
        rng = np.random.default_rng(3)
        for slot in range(BATCH):
            place = Place(HOST, region.id, slot, 1, 0)
            host.view(place, MIB)[:] = rng.integers(0, 256, MIB, dtype=np.uint8)
        executor = ThreadPoolExecutor(2)
        self._undo.callback(executor.shutdown)
        device = device_threads()
        self._undo.callback(device.shutdown)
        self._mover = Mover(
            {HOST: host, STAGING: host},
            clock=SystemClock(),
            post=self._loop.call_soon_threadsafe,
            on_done=self._on_done,
            executor=executor,
            archives={DISK: self.tier},
            archive_executor=device,
            archive_readers=READERS,
        )
        self._undo.callback(self._mover.close)
        self._copies = 0
        self._left = 0
        self._failed: list[Completion] = []

    def close(self) -> None:
        self._undo.close()

    def wait_ready(self) -> None:
        """Until the index is loaded, and the segments that a batch needs are made."""
        deadline = time.monotonic() + READY_S
        while self.tier.phase != "ready" or self._is_short():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the tier is not ready: {self.tier.stats().state}")
            time.sleep(0.005)

    def _is_short(self) -> bool:
        volume = self.tier.volume
        if volume is None:
            return True
        with volume.books:
            return volume.ring.is_short()

    def save(self, number: int) -> float:
        """Seconds from the submission of a prompt of BATCH blocks until all are told to be saved:
        their rows are committed.
        """
        self.wait_ready()
        prompt = [self._effect(slot) for slot in range(BATCH)]
        self._left, self._failed = BATCH, []

        def run() -> None:
            self._mover.submit(prompt)
            self._loop.run_forever()

        took = timed(run)
        if self._failed:
            raise RuntimeError(f"{len(self._failed)} blocks were not saved: {self._failed[0]}")
        return took

    def _effect(self, slot: int) -> Copy:
        self._copies += 1
        key = self._copies.to_bytes(32, "big")
        parent = (self._copies - 1).to_bytes(32, "big") if slot else b""
        source, target = Place(HOST, 1, slot, 1, 0), Place(DISK, 0, 0, 0, 0)
        copy = Copy(self._copies, "save", SPACE, key, source, target, MIB)
        return copy._replace(parent=parent, depth=slot)

    def _on_done(self, done: Sequence[Completion]) -> None:
        self._failed += [one for one in done if not one.ok]
        self._left -= len(done)
        if not self._left:
            self._loop.stop()


@contextlib.contextmanager
def _as_in_the_daemon() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def measure(results: Results, folder: Path) -> None:
    with contextlib.ExitStack() as undo:
        undo.enter_context(_as_in_the_daemon())
        undo.callback(shutil.rmtree, folder / "saved", ignore_errors=True)
        direct = Direct(folder, RECORD_BYTES, BATCH)
        undo.callback(direct.close)
        rounds = _rounds(folder, direct)
        batches = rounds + WARMUP
        path = folder / "direct"
        fd = direct.allocate(path, batches * BATCH)
        undo.callback(path.unlink)
        undo.callback(os.close, fd)
        saver = Saver(folder / "saved", (batches + SPARE) * BATCH * RECORD_BYTES * 33 // 32)
        undo.callback(saver.close)
        ratio = compare(
            saver.save, lambda number: direct.write(fd, number * BATCH, BATCH), rounds, WARMUP
        )
    about = f"hashed, synced, committed; {direct.about}"
    results.add_ratio("disk_put_256_durable_over_direct_write", ratio, about)


def _rounds(folder: Path, direct: Direct) -> int:
    """As many as there is room for. Few where the file system may be memory."""
    room = shutil.disk_usage(folder).free // (3 * BATCH * RECORD_BYTES) - WARMUP - SPARE
    return max(min(ROUNDS, room), PAIRS_MIN) if direct.bypassed else PAIRS_MIN
