"""A daemon that was killed, on a folder with many blocks: how soon it answers from disk, and what
its index costs.

The folders are filled in this process, through the tier or, for a million rows, through the index
alone. Every start reads an index that is not in the page cache.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvstore.clock import SystemClock
from kvstore.model.layout import layout_of
from kvstore.tiers.base import SavedBlock
from kvstore.tiers.disk.folder import INDEX_FOLDER, SEGMENTS_FOLDER, segment_name
from kvstore.tiers.disk.format import Row, Segment, record_bytes, tenant_digest
from kvstore.tiers.disk.index import LmdbIndex
from kvstore.tiers.disk.opening import DiskFolder
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.probe import DATA_FILE
from kvstore.tiers.disk.ring import segment_slots
from kvstore.tiers.disk.rows import IndexRow
from kvstore.tiers.disk.tier import DiskTier
from kvstore_client import BlockKey, Client, ClientConfig
from tests.bench.daemon_cost import own_rss_bytes, wait_idle
from tests.bench.harness import Results, timed
from tests.bench.models import PAGE_BLOCKS
from tests.daemon import Daemon, make_daemon
from tests.rawclient import RawClient

TENANT = "default"
BLOCK_BYTES = layout_of(PAGE_BLOCKS).block_bytes
RECORD_BYTES = record_bytes(BLOCK_BYTES)
BATCH = 1_000
PROMPT = 100
DEADLINE_S = 60.0
POLL_S = 0.005
CAPACITY_BYTES = 64 << 30

BLOCKS = 100_000
RESTARTS = 5

ROWS = 1_000_000
ROW_RESTARTS = 3
LOOKUPS = 40
"""Right after everything is visible; before that as many as there is time for."""


@dataclass
class Folder:
    """A daemon's folder, and what is on disk in it: prompts of PROMPT blocks, in the order in which
    they were saved.
    """

    daemon: Daemon
    keys: list[bytes]

    def start(self) -> float:
        """Kills the daemon, drops the index from the page cache, and starts anew; when it began."""
        self.daemon.kill()
        _drop_cached(self.daemon.folder / "disk" / INDEX_FOLDER / DATA_FILE)
        began_s = time.perf_counter()
        self.daemon.start()
        return began_s

    def prompt(self, number: int) -> list[BlockKey]:
        first = number % (len(self.keys) // PROMPT) * PROMPT
        return [BlockKey(key) for key in self.keys[first : first + PROMPT]]


def _drop_cached(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- folders


@contextlib.contextmanager
def _folder(
    path: Path, fill: Callable[[Path, int, list[bytes]], None], blocks: int
) -> Iterator[Folder]:
    """A folder that a daemon began, so that its ledger knows the space, and `fill` filled."""
    path.mkdir()
    disk = path / "disk"
    daemon = _make_daemon(path)
    with daemon:
        daemon.start()
        with contextlib.closing(RawClient(daemon.data_socket)) as client:
            space_id = client.open(PAGE_BLOCKS).space_id
        _wait_open(daemon)
        assert daemon.stop() == 0
        packed = np.random.default_rng(23).bytes(32 * blocks)
        keys = [packed[at : at + 32] for at in range(0, len(packed), 32)]
        fill(disk, space_id, keys)
        yield Folder(daemon, keys)


def _make_daemon(path: Path) -> Daemon:
    """It keeps no trace, which would grow with every look-up."""
    return make_daemon(
        path,
        disk__path=str(path / "disk"),
        disk__capacity_bytes=CAPACITY_BYTES,
        trace__ring_records=0,
    )


def _wait_open(daemon: Daemon) -> None:
    """Until the disk's folder is made."""
    index = daemon.folder / "disk" / INDEX_FOLDER / DATA_FILE
    end = time.monotonic() + DEADLINE_S
    while not index.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"the disk tier does not open:\n{daemon.log()}")
        time.sleep(0.01)


def _parent(keys: Sequence[bytes], at: int) -> bytes:
    return keys[at - 1] if at % PROMPT else b""


def save_blocks(disk: Path, space_id: int, keys: list[bytes]) -> None:
    """Blocks of 4 KiB, whose bytes begin with their key."""
    tier = DiskTier(DiskFolder(str(disk)), capacity_bytes=CAPACITY_BYTES, clock=SystemClock())
    try:
        tier.describe(space_id, TENANT, PAGE_BLOCKS.digest, BLOCK_BYTES)
        if not (tier.open() and tier.load_index()):
            raise RuntimeError(f"the folder cannot be opened: {tier.stats().state}")
        pages = aligned_bytes(BATCH * BLOCK_BYTES).reshape(BATCH, BLOCK_BYTES)
        for first in range(0, len(keys), BATCH):
            batch = []
            for row, at in enumerate(range(first, first + BATCH)):
                pages[row, :32] = np.frombuffer(keys[at], np.uint8)
                batch.append(
                    SavedBlock(space_id, keys[at], _parent(keys, at), at % PROMPT, pages[row])
                )
            saved = tier.save_batch(batch)
            if not all(isinstance(one, bytes) for one in saved):
                raise RuntimeError(f"a block was not saved: {saved[0]!r}")
    finally:
        tier.close()


def save_rows(disk: Path, space_id: int, keys: list[bytes]) -> None:
    """Rows only: the segment files have their size, and are holes."""
    slots = segment_slots(CAPACITY_BYTES, RECORD_BYTES)
    index = LmdbIndex(str(disk / INDEX_FOLDER), len(keys))
    try:
        for number, first in enumerate(range(0, len(keys), slots)):
            segment = Segment(number, RECORD_BYTES, slots, tenant_digest(TENANT))
            (disk / SEGMENTS_FOLDER / segment_name(number)).touch()
            os.truncate(disk / SEGMENTS_FOLDER / segment_name(number), segment.file_bytes)
            rows = [
                IndexRow(
                    space_id,
                    keys[at],
                    Row(
                        number,
                        at - first,
                        at + 1,
                        BLOCK_BYTES,
                        bytes(16),
                        _parent(keys, at),
                        at % PROMPT,
                    ),
                )
                for at in range(first, min(first + slots, len(keys)))
            ]
            index.commit(add=rows, add_segments=[segment])
    finally:
        index.close()


# ---------------------------------------------------------------- measuring


def measure(results: Results, path: Path) -> None:
    with _folder(path / "blocks", save_blocks, BLOCKS) as folder:
        _measure_first_hit(folder, results)
        _measure_all_visible(folder, results)
    with _folder(path / "rows", save_rows, ROWS) as folder:
        _measure_rows(folder, results)


def _measure_first_hit(folder: Folder, results: Results) -> None:
    took_s = []
    out = np.zeros((PROMPT, BLOCK_BYTES), np.uint8)
    for number in range(RESTARTS):
        began_s = folder.start()
        prompt = folder.prompt(number * 211)
        with _client(folder) as client:
            space = client.space(PAGE_BLOCKS)
            _until(lambda: space.fetch(prompt, out).blocks > 0)  # noqa: B023 (called here only)
            took_s.append(time.perf_counter() - began_s)
        if out[0, :32].tobytes() != prompt[0]:
            raise RuntimeError("another block came back")
    note = f"{BLOCKS} blocks; from exec to bytes of a prompt somewhere on disk; {_spread(took_s)}"
    results.add("restart_to_first_hit_s", statistics.median(took_s), "s", RESTARTS, note)


def _measure_all_visible(folder: Folder, results: Results) -> None:
    took_s = []
    for _ in range(RESTARTS):
        began_s = folder.start()
        with _client(folder) as client:
            took_s.append(_until_visible(folder, client) - began_s)
    note = f"{BLOCKS} blocks; from exec; {_spread(took_s)}"
    results.add("restart_to_all_visible_s", statistics.median(took_s), "s", RESTARTS, note)


def _until_visible(folder: Folder, client: Client, meanwhile: Callable[[], object] = bool) -> float:
    """When all are visible. What was saved last is loaded last; then each one is asked for."""
    space = client.space(PAGE_BLOCKS)
    last = [BlockKey(key) for key in folder.keys[-PROMPT:]]

    def visible() -> bool:
        meanwhile()
        return space.lookup(last).blocks == PROMPT

    _until(visible)
    then_s = time.perf_counter()
    for first in range(0, len(folder.keys), BATCH):
        keys = [BlockKey(key) for key in folder.keys[first : first + BATCH]]
        blocks = space.lookup(keys).blocks
        if blocks != len(keys):
            raise RuntimeError(f"{blocks} of {len(keys)} are visible after the last one was")
    return then_s


def _measure_rows(folder: Folder, results: Results) -> None:
    chance = np.random.default_rng(29)
    loading_ms: list[float] = []
    after_ms: list[float] = []
    grown_mb, peak_mb, visible_s = [], [0.0], []
    empty_bytes = _empty_rss_bytes(folder)

    def note_rss() -> None:
        peak_mb.append((own_rss_bytes(folder.daemon.pid) - empty_bytes) / 1e6)

    for _ in range(ROW_RESTARTS):
        began_s = folder.start()
        with _client(folder) as client:
            space = client.space(PAGE_BLOCKS)

            def look_up(took_ms: list[float]) -> int:
                chosen = chance.integers(0, ROWS, BATCH).tolist()
                keys = [BlockKey(folder.keys[at]) for at in chosen]
                hits = []
                took_ms.append(timed(lambda: hits.append(space.lookup(keys))) * 1e3)  # noqa: B023
                note_rss()
                return int(hits[0].blocks)

            visible_s.append(_until_visible(folder, client, partial(look_up, loading_ms)) - began_s)
            for _ in range(LOOKUPS):
                if look_up(after_ms) != BATCH:
                    raise RuntimeError("a row is not visible any more")
            wait_idle(folder.daemon.pid)
            grown_mb.append((own_rss_bytes(folder.daemon.pid) - empty_bytes) / 1e6)
    loading, after = statistics.median(loading_ms), statistics.median(after_ms)
    note = f"worse of {loading:.2f} while rows are loaded, {after:.2f} after; the client's time"
    samples = len(loading_ms) + len(after_ms)
    results.add("disk_lookup_1000_keys_1m_rows_ms", max(loading, after), "ms", samples, note)
    note = (
        f"RssAnon + RssFile against the same daemon with an empty disk; at most {max(peak_mb):.0f} "
        f"MB while rows are loaded; all visible after {statistics.median(visible_s):.1f} s"
    )
    results.add("disk_rss_growth_1m_rows_mb", max(grown_mb), "MB", ROW_RESTARTS, note)


def _empty_rss_bytes(folder: Folder) -> int:
    """Of a daemon with the same settings that serves a client, and has nothing on disk."""
    path = folder.daemon.folder / "empty"
    path.mkdir()
    daemon = _make_daemon(path)
    with daemon:
        daemon.start()
        other = Folder(daemon, folder.keys[:BATCH])
        with _client(other) as client:
            client.space(PAGE_BLOCKS).lookup([BlockKey(key) for key in other.keys])
            wait_idle(daemon.pid)
            return own_rss_bytes(daemon.pid)


def _client(folder: Folder) -> Client:
    config = ClientConfig(deadline_ms=30_000)
    return Client(f"unix:{folder.daemon.data_socket}", config=config)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not done():
        if time.monotonic() > end:
            raise RuntimeError("the daemon does not find what is on disk")
        time.sleep(POLL_S)


def _spread(took_s: Sequence[float]) -> str:
    return f"{min(took_s):.2f}-{max(took_s):.2f}"
