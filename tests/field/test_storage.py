"""Field cases of the disk: devices that hang, come up short, are full, or lack something."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore.tiers.disk.format import RecordHeader, decode, record_bytes
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon
from tests.e2e.stage import model, until
from tests.faultfs import FaultFs, missing
from tests.faults import SEGMENTS, Fault
from tests.field.conftest import Start
from tests.field.content import assert_right, rows_of
from tests.field.rules import SLACK, Punctual, metrics, rounds, total
from tests.rawclient import CALL_S, RawAdmin, RawClient
from tests.torture.disk_watch import disk_bytes, state_of
from tests.torture.full_disk import MakeFileSystem, ext4, missing_file_system, tmpfs, xfs

pytestmark = pytest.mark.process

MIB = 1 << 20
BLOCK = 64 << 10
MODEL = model(BLOCK)
DISK = 2
"""Presence code of a block that the disk tier holds alone."""
MISS_MS = 200

SETTINGS: dict[str, Any] = {"disk__capacity_bytes": "128MiB", "host__capacity_bytes": "8MiB"}


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FaultFs]:
    """A file system that fails on demand; asked for before `daemons`, to end after them."""
    if reason := missing():
        pytest.skip(reason)
    with FaultFs(tmp_path / "device") as made:
        yield made


@pytest.fixture
def client() -> Iterator[Callable[[Daemon], Client]]:
    """Clients of a daemon, closed at the end."""
    with contextlib.ExitStack() as made:
        yield lambda daemon: made.enter_context(
            Client(daemon.data_socket, config=ClientConfig(deadline_ms=20_000))
        )


def prompt(seed: int, blocks: int = 16) -> list[BlockKey]:
    return [BlockKey(np.random.default_rng([seed, at]).bytes(32)) for at in range(blocks)]


def save(
    space: Any, keys: list[BlockKey], fingerprint: Fingerprint = MODEL, version: int = 0
) -> None:
    """Puts a prompt and waits until the disk has it."""
    rows = rows_of(fingerprint, keys, version=version)
    pushed = space.push(keys, rows, durable=True, deadline_ms=20_000)
    assert pushed.stored + pushed.present == len(keys), pushed


def read(space: Any, keys: list[BlockKey], fingerprint: Fingerprint = MODEL, **more: Any) -> int:
    """The leading blocks that are there; they are right."""
    fetched = space.fetch(keys, **more)
    assert_right(fetched.data, fingerprint, keys, fetched.blocks)
    return int(fetched.blocks)


def on_disk_alone(space: Any, keys: list[BlockKey]) -> bool:
    found = space.lookup(keys)
    return found.blocks == len(keys) and set(found.tiers) == {DISK - 1}


def cold(space: Any, count: int, blocks: int = 16, first: int = 0) -> list[list[BlockKey]]:
    """So many prompts that only the disk has: what is put later takes their place in memory."""
    written = [prompt(first + seed, blocks) for seed in range(count)]
    for keys in written:
        save(space, keys)
    for seed in range(12):
        save(space, prompt(1_000_000 + first + seed))
    chosen = [keys for keys in written if on_disk_alone(space, keys)]
    assert chosen, "nothing left memory"
    return chosen


# ---------------------------------------------------------------- P22, P23: waiting for the device


def p99_ms(taken_s: list[float]) -> float:
    return float(np.quantile(taken_s, 0.99)) * 1e3


def test_p22_a_load_that_never_ends_is_a_miss_in_time(
    device: FaultFs, daemons: Start, client: Callable[[Daemon], Client]
) -> None:
    daemon = daemons(disk__path=str(device.path / "disk"), **SETTINGS)
    space = client(daemon).space(MODEL)
    chosen = cold(space, 12)
    warm = prompt(2_000_000, 4)
    save(space, warm)

    def hits(count: int = 150) -> float:
        taken_s = []
        for _ in range(count):
            began = time.perf_counter()
            assert read(space, warm) == len(warm)
            taken_s.append(time.perf_counter() - began)
        return p99_ms(taken_s)

    alone_ms = hits()
    device.set(Fault(("read",), SEGMENTS, delay_s=30.0))
    try:
        punctual = Punctual(space)
        missed = punctual.fetch(chosen[0], request_id="again", deadline_ms=MISS_MS)
        assert missed.blocks == 0, missed
        with RawClient(daemon.data_socket) as raw:
            beside_ms, late_s, found = _hundred_at_once(raw, chosen, hits)
        assert found == 0
        assert late_s < 0.1 * SLACK
        assert beside_ms < 2 * SLACK * max(alone_ms, 1.0), (beside_ms, alone_ms)
        began = time.monotonic()
        for seed in range(8):
            pushed = punctual.push(
                keys := prompt(3_000_000 + seed, 4), rows_of(MODEL, keys), deadline_ms=1_000
            )
            assert pushed.stored == 4, pushed
        with RawAdmin(daemon.admin_socket) as admin:
            assert admin.stats().tiers
        assert metrics(daemon)
        assert time.monotonic() - began < 1.0 * SLACK
    finally:
        struck = device.clear()
    assert sum(struck.values()) > 0
    # What came late holds nothing: the daemon's fixture looks at leases and copies. And the same
    # request asked again gets its blocks.
    until("it loads again", lambda: read(space, chosen[0], request_id="again") == 16)


def _hundred_at_once(
    raw: RawClient, chosen: list[list[BlockKey]], hits: Callable[[], float]
) -> tuple[float, float, int]:
    """Acquires of what hangs, 100 at once: p99 of hits beside them, how late the latest answer came
    beyond its deadline, and how many were leased.
    """
    space_id = raw.open(MODEL).space_id
    began = time.monotonic()
    ended: list[float] = []
    calls = []
    for number in range(100):
        keys = chosen[number % len(chosen)]
        request = pb.AcquireRequest(
            session=raw.secret,
            space_id=space_id,
            keys=b"".join(keys[number % len(keys) :]),
            mode=pb.LEASE_MODE_COPY,
        )
        call = raw.stub.Acquire.future(request, timeout=MISS_MS / 1e3)
        call.add_done_callback(lambda _: ended.append(time.monotonic()))
        calls.append(call)
    beside_ms = hits()
    until("all have ended", lambda: len(ended) == len(calls), CALL_S)
    leased = 0
    for call in calls:
        if call.exception() is None and (reply := call.result()).lease_id:
            leased += reply.leased_blocks
            raw.release(reply.lease_id)
    return beside_ms, max(ended) - began - MISS_MS / 1e3, leased


def test_p23_clients_that_want_more_than_memory_takes_neither_spin_nor_hang(
    device: FaultFs, daemons: Start, client: Callable[[Daemon], Client]
) -> None:
    fingerprint = model(4 * BLOCK)
    daemon = daemons(
        disk__path=str(device.path / "disk"),
        disk__capacity_bytes="128MiB",
        host__capacity_bytes="4MiB",
        host__staging_bytes="512KiB",
    )
    space = client(daemon).space(fingerprint)
    clients, blocks = 64, 2
    written = [prompt(seed, blocks) for seed in range(clients)]
    for keys in written:
        save(space, keys, fingerprint)
    process = psutil.Process(daemon.pid)
    with RawClient(daemon.data_socket) as raw:
        device.set(Fault(("read",), SEGMENTS, delay_s=30.0))
        loads = total(daemon, "kvstore_disk_loads_total")
        began, used = time.monotonic(), sum(process.cpu_times()[:2])
        found, late_s = _all_at_once(raw, fingerprint, written, 1.5)
        cores = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
        assert late_s < 0.1 * SLACK
        assert cores < 0.6, "who waits does not spin"
        assert found < clients * blocks, "most is on disk alone"
        device.clear()
        until("what hung has ended", lambda: total(daemon, "kvstore_copies_in_flight") == 0)
        promoted = total(daemon, "kvstore_disk_loads_total") - loads
        assert promoted <= 16, "what nobody waits for is not loaded"
        began, used = time.monotonic(), sum(process.cpu_times()[:2])
        found, late_s = _all_at_once(raw, fingerprint, written, 5.0)
        cores = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
        assert late_s < 0.1 * SLACK
        assert cores <= 1.2 * 2, cores
        assert found > 0


def _all_at_once(
    raw: RawClient, fingerprint: Fingerprint, written: list[list[BlockKey]], deadline_s: float
) -> tuple[int, float]:
    """All prompts at once, each by its deadline: blocks that came and are right, and how late the
    latest answer was.
    """
    space_id = raw.open(fingerprint).space_id
    began = time.monotonic()
    ended: list[float] = []
    calls = []
    for keys in written:
        request = pb.AcquireRequest(
            session=raw.secret,
            space_id=space_id,
            keys=b"".join(keys),
            mode=pb.LEASE_MODE_COPY,
        )
        call = raw.stub.Acquire.future(request, timeout=deadline_s)
        call.add_done_callback(lambda _: ended.append(time.monotonic()))
        calls.append(call)
    found = 0
    for call in calls:
        # One after the other, so that each makes room for the next.
        if call.exception() is None and (reply := call.result()).lease_id:
            found += reply.leased_blocks
            raw.release(reply.lease_id)
    until("all have ended", lambda: len(ended) == len(calls), CALL_S)
    return found, max(ended) - began - deadline_s


# ---------------------------------------------------------------- P26: short reads


@pytest.mark.parametrize("cut_bytes", [-1, 4_096, 1, 0])
def test_p26_a_short_read_is_a_miss_or_goes_on(
    device: FaultFs, daemons: Start, client: Callable[[Daemon], Client], cut_bytes: int
) -> None:
    daemon = daemons(disk__path=str(device.path / "disk"), **SETTINGS)
    space = client(daemon).space(MODEL)
    chosen = cold(space, 6)[:2]
    device.set(Fault(("read",), SEGMENTS, cut_bytes=cut_bytes))
    dropped = total(daemon, "kvstore_disk_corrupt_dropped_total")
    there = [read(space, keys) for keys in chosen]
    assert sum(device.clear().values()) > 0
    dropped = total(daemon, "kvstore_disk_corrupt_dropped_total") - dropped
    # What came in pieces is right; what did not come is missed and counted.
    assert dropped >= sum(blocks < 16 for blocks in there)
    if cut_bytes in (0, 1):
        assert there == [0, 0]
    for keys in chosen:
        save(space, keys)
        assert read(space, keys) == 16


def test_p26_a_record_cut_anywhere_is_a_miss_and_counted(
    daemons: Start, tmp_path: Path, client: Callable[[Daemon], Client]
) -> None:
    fingerprint = model(4 * 4_096)
    size = record_bytes(4 * 4_096)
    daemon = daemons(disk__path=str(tmp_path / "disk"), **SETTINGS)
    space = client(daemon).space(fingerprint)
    cuts = range(0, size, 512)
    written = [prompt(seed, 1) for seed in range(len(cuts))]
    for keys in written:
        save(space, keys, fingerprint)
    for seed in range(50):
        save(space, prompt(1_000 + seed), fingerprint)
    assert all(on_disk_alone(space, keys) for keys in written)
    records = _records(tmp_path / "disk", size)
    for counted, (keys, cut) in enumerate(zip(written, cuts, strict=True), 1):
        path, offset = records[keys[0]]
        tail = _cut_off(path, offset + cut)
        assert read(space, keys, fingerprint) == 0, f"cut at {cut}"
        assert total(daemon, "kvstore_disk_corrupt_dropped_total") == counted, f"cut at {cut}"
        with path.open("ab") as file:
            file.write(tail)
        save(space, keys, fingerprint)
        assert read(space, keys, fingerprint) == 1


def _records(folder: Path, size: int) -> dict[bytes, tuple[Path, int]]:
    """Where each block's record is, by key."""
    found = {}
    for path in (folder / "segments").iterdir():
        data = path.read_bytes()
        for offset in range(0, len(data) - size + 1, size):
            header = decode(data[offset : offset + 4_096])
            if isinstance(header, RecordHeader):
                found[header.key] = (path, offset)
    return found


def _cut_off(path: Path, length: int) -> bytes:
    """Truncates a file; what it had after that."""
    with path.open("r+b") as file:
        file.seek(length)
        tail = file.read()
        file.truncate(length)
    return tail


# ---------------------------------------------------------------- P27: how much it takes


def test_p27_a_capacity_is_never_passed(
    daemons: Start, tmp_path: Path, client: Callable[[Daemon], Client]
) -> None:
    fingerprint = model(MIB)
    cap = 64 * MIB
    folder = tmp_path / "disk"
    daemon = daemons(
        disk__path=str(folder),
        disk__capacity_bytes=cap,
        host__capacity_bytes="48MiB",
        host__staging_bytes="8MiB",
    )
    space = client(daemon).space(fingerprint)
    most = 0
    for seed in range(rounds(32, 128)):
        save(space, prompt(seed, 8), fingerprint)
        most = max(most, disk_bytes(folder))
    saved = total(daemon, "kvstore_disk_saved_bytes_total")
    assert saved >= 3 * cap
    assert cap / 2 < most <= cap * 1.02
    assert total(daemon, "kvstore_disk_ok") == 1


def test_p27_without_a_capacity_the_daemon_chooses_one_and_says_so(
    daemons: Start, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    found = os.statvfs(tmp_path)
    free_bytes = found.f_bavail * found.f_frsize
    daemon = daemons(disk__path=str(tmp_path / "here" / "disk"))
    until("it is open", lambda: state_of(daemon).startswith("ok"))
    chosen = metrics(daemon)['kvstore_tier_capacity_bytes{tier="disk"}']
    assert 0.5 * free_bytes < chosen < 0.9 * free_bytes


@pytest.mark.root
def test_p27_a_file_system_smaller_than_the_capacity_does_no_harm(
    tmp_path: Path, daemons: Start, client: Callable[[Daemon], Client]
) -> None:
    with _file_system(tmpfs, tmp_path) as path:
        daemon = daemons(disk__path=str(path / "disk"), disk__capacity_bytes="64MiB")
        try:
            space = client(daemon).space(MODEL)
            for seed in range(60):
                save(space, keys := prompt(seed))
                assert read(space, keys) == 16
            ballast = path / "ballast"
            until("others get room", lambda: _grows(ballast, 24 * MIB), 5.0 * SLACK)
            for seed in range(20):
                keys = prompt(1_000 + seed)
                assert space.push(keys, rows_of(MODEL, keys)).stored == 16
                assert read(space, keys) == 16, "memory serves"
            ballast.unlink()
            until("it saves again", lambda: _saves(space), 5.0 * SLACK)
            until("all is well", lambda: state_of(daemon).startswith("ok"))
            assert daemon.stop() == 0
        finally:
            if daemon.alive:
                daemon.kill()


def _grows(path: Path, size: int) -> bool:
    """Writes a file on, as far as there is room; whether it has its size."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        file.write(bytes(min(MIB, size - path.stat().st_size)))
    return path.stat().st_size >= size


_numbers = iter(range(5_000_000, 6_000_000))


def _saves(space: Any) -> bool:
    keys = prompt(next(_numbers), 1)
    pushed = space.push(keys, rows_of(MODEL, keys), durable=True, deadline_ms=1_000)
    return bool(pushed.stored == 1 and pushed.reason is Reason.OK)


@contextlib.contextmanager
def _file_system(make: MakeFileSystem, folder: Path) -> Iterator[Path]:
    if reason := missing_file_system(make, folder):
        pytest.skip(reason)
    with make(folder / "fs") as path:
        yield path


# ---------------------------------------------------------------- P28: a victim that does not go


def test_p28_a_victim_that_cannot_go_stops_nobody(
    device: FaultFs, daemons: Start, client: Callable[[Daemon], Client]
) -> None:
    daemon = daemons(
        disk__path=str(device.path / "disk"),
        disk__capacity_bytes="24MiB",
        host__capacity_bytes="8MiB",
    )
    space = client(daemon).space(MODEL)
    chosen = cold(space, 8)
    # One that is being read, for ever; with others the tier is full several times over.
    device.set(Fault(("read",), SEGMENTS, delay_s=30.0))
    space.fetch(chosen[-1], deadline_ms=MISS_MS)
    evictions = total(daemon, "kvstore_tier_evictions_total")
    for seed in range(40):
        save(space, prompt(10_000 + seed))
    assert total(daemon, "kvstore_tier_evictions_total") > evictions + 300
    device.clear()
    # Ones that cannot be read.
    device.set(Fault(("read",), SEGMENTS, error="EIO"))
    for seed in range(40):
        save(space, prompt(20_000 + seed))
    device.clear()
    until("it reads again", lambda: read(space, prompt(20_039)) == 16)


def test_p28_a_file_that_cannot_be_removed_stops_nobody(
    device: FaultFs, daemons: Start, client: Callable[[Daemon], Client]
) -> None:
    daemon = daemons(disk__path=str(device.path / "disk"), disk__capacity_bytes="24MiB")
    used = client(daemon)
    space, other = used.space(MODEL), used.space(fingerprint := model(4 * 4_096, name="other"))
    for seed in range(30):
        save(space, prompt(seed))
    device.set(Fault(("unlink",), SEGMENTS, error="EPERM"))
    # Another size of blocks needs the segments of the first.
    for seed in range(60):
        keys = prompt(1_000 + seed)
        assert other.push(keys, rows_of(fingerprint, keys)).stored == 16
        save(space, prompt(2_000 + seed))
    assert sum(device.clear().values()) > 0, "a removal was refused"
    assert daemon.log().count("WARNING") <= 3, daemon.log()
    for seed in range(30):
        save(other, prompt(3_000 + seed), fingerprint)
    assert disk_bytes(device.backing / "disk") <= 24 * MIB * 1.02


# ---------------------------------------------------------------- P30: what a file system has not


def _works(start: Start, path: Path, tmp_path: Path, said: str = "") -> None:
    """A durable put, kill -9, and it is there; the state says what is missing."""
    folder = tmp_path / "daemon"
    folder.mkdir(exist_ok=True)
    daemon = start(folder, disk__path=str(path / "disk"), disk__capacity_bytes="32MiB")
    try:
        until("it is open", lambda: state_of(daemon).startswith("ok"))
        with Client(daemon.data_socket) as client:
            save(client.space(MODEL), keys := prompt(1))
        if said:
            assert said in state_of(daemon)
        daemon.kill()
        daemon.restart()
        until("it is open", lambda: state_of(daemon).startswith("ok"))
        with Client(daemon.data_socket) as client:
            assert read(client.space(MODEL), keys, deadline_ms=20_000) == 16
        assert daemon.stop() == 0
    finally:
        if daemon.alive:
            daemon.kill()


@pytest.mark.root
@pytest.mark.parametrize("make", [tmpfs, ext4, xfs])
def test_p30_a_file_system_is_used_as_it_is(
    tmp_path: Path, daemons: Start, make: MakeFileSystem
) -> None:
    with _file_system(make, tmp_path) as path:
        _works(daemons, path, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fallocate": False}, "preallocate"),
        ({"direct": False}, "direct I/O"),
        ({"fallocate": False, "direct": False}, "preallocate"),
    ],
)
def test_p30_what_a_file_system_has_not_is_said(
    tmp_path: Path, daemons: Start, options: dict[str, bool], said: str
) -> None:
    if reason := missing():
        pytest.skip(reason)
    with FaultFs(tmp_path / "device", **options) as device:
        _works(daemons, device.path, tmp_path, said)


def test_p30_a_read_only_folder_leaves_memory_and_is_said(
    device: FaultFs, daemons: Start, client: Callable[[Daemon], Client]
) -> None:
    device.set(Fault(("write", "grow", "sync"), "*", error="EROFS"))
    daemon = daemons(disk__path=str(device.path / "disk"))
    space = client(daemon).space(MODEL)
    keys = prompt(1)
    assert space.push(keys, rows_of(MODEL, keys)).stored == 16
    assert read(space, keys) == 16
    assert "Read-only" in state_of(daemon)
    device.clear()
    until("it saves", lambda: _saves(space), 5.0 * SLACK)
    assert state_of(daemon).startswith("ok")
