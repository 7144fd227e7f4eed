"""Blocks that are on disk only, fetched through a daemon, against plain direct reads of as many
records of the same files, and against LMDB with the blocks as values.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.disk.folder import SEGMENTS_FOLDER
from kvstore.tiers.disk.format import record_bytes
from kvstore_client import BlockKey, Client, ClientConfig
from tests.bench.daemon_cost import wait_idle
from tests.bench.direct import Direct, Piece
from tests.bench.harness import Ratio, Results, compare, timed
from tests.bench.models import MIB_BLOCKS
from tests.daemon import Daemon, make_daemon
from tests.rawclient import RawClient

MIB = 1 << 20
RECORD_BYTES = record_bytes(MIB)
BATCH = 64
STORED = 24 * BATCH
HOST_BATCHES = 8
"""That fit into the host tier: what is fetched again after all others is on disk only."""
ROUNDS = 40
WARMUP = HOST_BATCHES + 2
"""By then each region of the host tier was mapped once."""
LMDB_STORED = 8 * BATCH
LMDB_ROUNDS = 20
SEED = 17

Bytes = NDArray[np.uint8]


class Contents:
    """1 MiB a block, each another one, out of a few that are kept."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._rows = rng.integers(0, 256, (BATCH, MIB), dtype=np.uint8)

    def fill(self, number: int, target: Bytes) -> None:
        """Writes block `number`."""
        target[:] = self._rows[number % BATCH]
        target[:8].view("<u8")[0] = number

    def check(self, number: int, row: Bytes) -> None:
        """RuntimeError unless `row` is block `number`."""
        right = int(row[:8].view("<u8")[0]) == number
        if not (right and np.array_equal(row[8:], self._rows[number % BATCH][8:])):
            raise RuntimeError(f"block {number} came back wrong")


@dataclass
class Setup:
    """A daemon that was killed after everything was saved, and started again."""

    daemon: Daemon
    keys: list[BlockKey]
    contents: Contents
    direct: Direct
    slots: list[Piece]
    order: Iterator[list[int]]
    others: Iterator[list[int]]
    out: Bytes

    @property
    def target(self) -> str:
        return f"unix:{self.daemon.data_socket}"

    def baseline(self, number: int) -> float:
        """As many records at other random places of the same files."""
        return self.direct.read([self.slots[at] for at in next(self.others)])


def batches(count: int, seed: int) -> Iterator[list[int]]:
    """Random batches without end: each number of `count` once before any comes again."""
    order = np.random.default_rng(seed).permutation(count).tolist()
    while True:
        for start in range(0, count - BATCH + 1, BATCH):
            yield order[start : start + BATCH]


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[Setup]:
    daemon = make_daemon(
        folder,
        host__capacity_bytes=HOST_BATCHES * BATCH * MIB,
        disk__path=str(folder / "disk"),
        disk__capacity_bytes=STORED * MIB * 5 // 4,
    ).start()
    direct = Direct(folder, RECORD_BYTES, BATCH)
    with contextlib.ExitStack() as undo:
        undo.callback(direct.close)
        undo.callback(daemon.kill)
        contents = Contents(SEED)
        keys = _push_all(daemon, contents)
        daemon.kill()
        daemon.start()
        wait_idle(daemon.pid)
        slots = []
        for path in sorted((folder / "disk" / SEGMENTS_FOLDER).iterdir()):
            fd = direct.open(path)
            undo.callback(os.close, fd)
            records = path.stat().st_size // RECORD_BYTES
            slots += [Piece(fd, at * RECORD_BYTES) for at in range(records)]
        out = np.ones((BATCH, MIB), np.uint8)
        yield Setup(
            daemon,
            keys,
            contents,
            direct,
            slots[:STORED],
            batches(STORED, SEED),
            batches(STORED, SEED + 1),
            out,
        )


def _push_all(daemon: Daemon, contents: Contents) -> list[BlockKey]:
    """Everything is on disk when it returns."""
    config = ClientConfig(deadline_ms=120_000)
    with Client(f"unix:{daemon.data_socket}", config=config) as client:
        space = client.space(MIB_BLOCKS)
        rng = np.random.default_rng(SEED)
        keys: list[BlockKey] = []
        for first in range(0, STORED, BATCH):
            chain = space.keys(rng.integers(0, 2**31, BATCH * 16, dtype=np.uint32))
            pushed = space.push(chain, partial(_fill, contents, first), durable=True)
            if pushed.stored != BATCH:
                raise RuntimeError(f"{pushed.stored} of {BATCH} were saved: {pushed.reason.name}")
            keys += chain
    return keys


def _fill(contents: Contents, first: int, block: int, target: Bytes) -> None:
    contents.fill(first + block, target)


def measure(setup: Setup, results: Results) -> None:
    about = setup.direct.about
    results.add_ratio("disk_get_64_to_lease_over_direct_read", to_lease(setup), about)
    with Client(setup.target, config=ClientConfig(deadline_ms=30_000)) as client:
        fetch = partial(_fetch, setup, client)
        ratio = compare(fetch, setup.baseline, ROUNDS, WARMUP)
        results.add_ratio("disk_get_64_to_buffer_over_direct_read", ratio, about)
        with lmdb_values(setup) as values:
            ratio = compare(values.get, fetch, LMDB_ROUNDS, 1)
    about = f"times faster; the device's read_ahead_kb is {values.read_ahead_kb}"
    results.add_ratio("disk_get_64_over_lmdb_values", ratio, about)


def to_lease(setup: Setup) -> Ratio:
    """One call on a session that is open: Acquire, until its answer is here."""
    with contextlib.closing(RawClient(setup.daemon.data_socket)) as client:
        space = client.open(MIB_BLOCKS).space_id

        def acquire(number: int) -> float:
            keys = [setup.keys[at] for at in next(setup.order)]
            leased = []
            took = timed(lambda: leased.append(client.acquire(space, keys)))
            if leased[0].blocks != BATCH:
                raise RuntimeError(f"{leased[0].blocks} blocks came: {leased[0].reason}")
            client.release(leased[0].lease_id)
            return took

        return compare(acquire, setup.baseline, ROUNDS, WARMUP)


def _fetch(setup: Setup, client: Client, number: int) -> float:
    space = client.space(MIB_BLOCKS)
    wanted = next(setup.order)
    keys = [setup.keys[at] for at in wanted]
    fetched = []
    took = timed(lambda: fetched.append(space.fetch(keys, setup.out)))
    if fetched[0].blocks != BATCH:
        raise RuntimeError(f"{fetched[0].blocks} of {BATCH} blocks came: {fetched[0].reason}")
    at = number % BATCH
    setup.contents.check(wanted[at], setup.out[at])
    return took


# ---------------------------------------------------------------- LMDB


class LmdbValues:
    """Some of the blocks as values of one LMDB file, read cold: it is opened anew, and the kernel
    told to drop its pages, before each round.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup = setup
        self._folder = folder
        self._order = batches(LMDB_STORED, SEED + 2)
        self.read_ahead_kb = read_ahead_kb(folder)
        block = np.empty(MIB, np.uint8)
        with self._open() as env:
            for start in range(0, LMDB_STORED, BATCH):
                with env.begin(write=True) as transaction:
                    for number in range(start, start + BATCH):
                        setup.contents.fill(number, block)
                        transaction.put(setup.keys[number], block.data)

    def get(self, number: int) -> float:
        """Seconds to copy a random batch into the same buffer."""
        self._drop()
        wanted = next(self._order)
        with self._open() as env, env.begin(buffers=True) as transaction:

            def run() -> None:
                for row, at in enumerate(wanted):
                    value = transaction.get(self._setup.keys[at])
                    assert value is not None
                    np.copyto(self._setup.out[row], np.frombuffer(value, np.uint8))

            took = timed(run)
        at = number % BATCH
        self._setup.contents.check(wanted[at], self._setup.out[at])
        return took

    def _open(self) -> lmdb.Environment:
        return lmdb.open(str(self._folder), map_size=2 * LMDB_STORED * MIB)

    def _drop(self) -> None:
        fd = os.open(self._folder / "data.mdb", os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@contextlib.contextmanager
def lmdb_values(setup: Setup) -> Iterator[LmdbValues]:
    folder = setup.daemon.folder / "lmdb"
    folder.mkdir()
    try:
        yield LmdbValues(setup, folder)
    finally:
        shutil.rmtree(folder)


def read_ahead_kb(folder: Path) -> str:
    """Of the device that `folder` is on."""
    device = os.stat(folder).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for where in islice((block, *block.parents), 2):
        with contextlib.suppress(OSError):
            return (where / "queue" / "read_ahead_kb").read_text().strip()
    return "unknown"
