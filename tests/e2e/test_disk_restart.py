"""The disk tier under a real daemon: overflow, kill -9, restart; decisions that outlive it; folders
that are shared, small, without direct I/O, damaged or gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore.tiers.disk.verify import verify
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from tests import client_kit
from tests.daemon import Daemon, DaemonDied, make_daemon
from tests.e2e.stage import Prompt, model, until
from tests.rawclient import RawAdmin, RawClient, reason

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
BLOCK = 64 << 10
MODEL = model(BLOCK)
DISK = 2
"""Presence code of a block that the disk tier holds alone."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Daemons]:
    """Starts a daemon with a host tier of 16 MiB above a disk tier in `disk_path`."""
    made: list[Daemon] = []

    def begin(disk_path: Path | None = None, **settings: Any) -> Daemon:
        given = {
            "host.capacity_bytes": "16MiB",
            "host.staging_bytes": "2MiB",
            "disk.path": str(disk_path or tmp_path / "disk"),
            "disk.capacity_bytes": "256MiB",
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        folder = tmp_path / f"daemon-{len(made)}"
        folder.mkdir()
        daemon = make_daemon(folder, **{k.replace(".", "__"): v for k, v in given.items()})
        made.append(daemon)
        return daemon.start()

    yield begin
    for daemon in made:
        if daemon.alive:
            daemon.kill()


def disk_of(daemon: Daemon) -> Any:
    """The disk tier in the admin's numbers."""
    with RawAdmin(daemon.admin_socket) as admin:
        return next(tier for tier in admin.stats().tiers if tier.name == "disk")


def counter(daemon: Daemon, name: str) -> float:
    """A metric of the disk tier; its labels are summed."""
    with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until_loaded(daemon: Daemon) -> None:
    until("the index is loaded", lambda: counter(daemon, "kvstore_disk_loading") == 0)


def put(daemon: Daemon, *written: Prompt) -> None:
    """Puts prompts, each once the disk has kept up: who puts faster loses what is coldest."""
    with RawClient(daemon.data_socket) as client:
        for prompt in written:
            space = client.open(prompt.fingerprint).space_id
            client.put(space, prompt.keys, prompt.rows())
            until("saves have ended", lambda: counter(daemon, "kvstore_saves_in_flight") == 0)


def put_durably(client: RawClient, prompt: Prompt) -> int:
    """Commits all of a prompt durably; its space."""
    space = client.open(prompt.fingerprint).space_id
    rows, first = prompt.rows(), 0
    while first < len(prompt.keys):
        client.unmap()
        reserved = client.reserve(space, prompt.keys, first=first)
        if not reserved.lease_id:
            client.the_fd().drain(0.002)
            continue
        client.fill(reserved, rows)
        done = client.commit(reserved.lease_id, durable=True)
        assert reason(done.reason) is Reason.OK, done
        first = int(convert.unpack_u32(reserved.wanted)[-1]) + 1
    return space


def get(daemon: Daemon, prompt: Prompt) -> int:
    """Reads the leading run of a prompt, which must be right; how many blocks it has."""
    with RawClient(daemon.data_socket) as client:
        rows = client.get(client.open(prompt.fingerprint).space_id, prompt.keys)
    run = next((at for at, row in enumerate(rows) if row is None), len(rows))
    Prompt.assert_right(_cut(prompt, run), rows[:run])
    return run


def _cut(prompt: Prompt, blocks: int) -> Prompt:
    shorter = Prompt(prompt.fingerprint, 0, 0, tenant=prompt.tenant)
    shorter.keys = prompt.keys[:blocks]
    return shorter


def prompts(count: int, blocks: int = 40, first: int = 0) -> list[Prompt]:
    return [Prompt(MODEL, first + seed, blocks) for seed in range(count)]


# ---------------------------------------------------------------- overflow and restart


def test_what_overflows_memory_is_read_back_from_disk(start: Daemons) -> None:
    daemon = start()
    written = prompts(20)
    for prompt in written:
        put(daemon, prompt)
    assert disk_of(daemon).blocks > 400
    with RawClient(daemon.data_socket) as client:
        space = client.open(MODEL).space_id
        tiers = client.lookup(space, written[3].keys).tiers
        assert set(tiers) == {DISK}, "a look-up sees both tiers"
        explained = client.explain(space, [*written[3].keys[:1], b"?" * 32]).keys
        assert [reason(one.reason) for one in explained] == [Reason.HIT, Reason.MISS_NEVER_STORED]
        assert [one.tier for one in explained] == ["disk", ""]
    found = [get(daemon, prompt) for prompt in written]
    assert sum(found) > 0.9 * 20 * 40
    assert counter(daemon, "kvstore_disk_loads_total") > 300


def test_after_kill_9_a_conversation_is_read_from_disk_bit_exact(start: Daemons) -> None:
    daemon = start()
    written = prompts(20)
    put(daemon, *written)
    with RawClient(daemon.data_socket) as client:
        space = client.open(MODEL).space_id
        on_disk = [client.lookup(space, one.keys).tiers.count(DISK) for one in written]
    daemon.kill()
    report = verify(daemon.settings["disk.path"], capacity_bytes=256 << 20)
    assert report.ok, report
    assert report.parents_missing == 0, "what is on disk can be reached from its head"
    daemon.restart()
    until_loaded(daemon)
    with RawClient(daemon.data_socket) as client:
        assert client.open(MODEL).space_id == space, "the space is the same"
    found = [get(daemon, prompt) for prompt in written]
    assert sum(found) >= sum(on_disk)
    assert counter(daemon, "kvstore_disk_corrupt_dropped_total") == 0
    with RawAdmin(daemon.admin_socket) as admin:
        loads = admin.stats().counters["kvstore_disk_loads_total"]
    assert loads == counter(daemon, "kvstore_disk_loads_total") > 0


def test_a_drain_saves_what_only_memory_had(start: Daemons) -> None:
    daemon = start()
    (written,) = prompts(1)
    put(daemon, written)
    assert disk_of(daemon).blocks == 0
    assert daemon.stop() == 0
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, written) == 40


def test_a_durable_commit_outlives_kill_9(start: Daemons) -> None:
    daemon = start()
    for turn in range(5):
        prompt = Prompt(MODEL, turn, 8)
        with RawClient(daemon.data_socket) as client:
            put_durably(client, prompt)
        daemon.kill()
        daemon.restart()
        until_loaded(daemon)
        for earlier in range(turn + 1):
            assert get(daemon, Prompt(MODEL, earlier, 8)) == 8


def test_what_memory_has_is_durable_when_a_durable_push_of_it_returns(start: Daemons) -> None:
    daemon = start()
    fingerprint = client_kit.model("small")
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=10_000)) as client:
        space = client.space(fingerprint)
        prompt, data = client_kit.tokens(6), client_kit.rows(6, space.block_bytes)
        assert space.push(prompt, data).stored == 6
        pushed = space.push(prompt, data, durable=True)
        assert (pushed.present, pushed.stored, pushed.reason) == (6, 0, Reason.OK)
        daemon.kill()
        daemon.restart()
        until_loaded(daemon)
        out = np.zeros_like(data)
        fetched = until("it is connected again", lambda: space.fetch(space.keys(prompt), out))
        assert fetched.blocks == 6
        assert np.array_equal(out, data)


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_the_client_sees_and_fetches_what_only_disk_has(
    start: Daemons, transport: Literal["shm", "stream"]
) -> None:
    daemon = start()
    fingerprint = client_kit.model("big", layers=8, heads=4, head_size=128)  # 64 KiB
    config = ClientConfig(transport=transport, deadline_ms=10_000)
    with Client(daemon.data_socket, config=config) as client:
        space = client.space(fingerprint)
        prompt, data = client_kit.tokens(40), client_kit.rows(40, space.block_bytes)
        assert space.push(prompt, data).stored == 40
        assert daemon.stop() == 0
        daemon.restart()
        until_loaded(daemon)
        hit = until("the same client is connected again", lambda: _hit(space, prompt))
        assert [client.connection().tiers[tier] for tier in hit.tiers] == ["disk"] * 40
        out = np.zeros_like(data)
        fetched = space.fetch(hit, out)
        assert (fetched.blocks, fetched.reason) == (40, Reason.OK)
        assert np.array_equal(out, data)
        again = space.lookup(prompt)
        assert [client.connection().tiers[tier] for tier in again.tiers] == ["host"] * 40


def _hit(space: Any, prompt: Any) -> Any:
    hit = space.lookup(prompt)
    return hit if hit.blocks else None


def test_the_daemon_is_ready_before_its_index(start: Daemons) -> None:
    daemon = start()
    put(daemon, *prompts(20))
    daemon.kill()
    daemon.restart()
    assert disk_of(daemon).state.split(":")[0] in ("opening", "loading", "ok")
    until_loaded(daemon)
    assert disk_of(daemon).state.startswith("ok")


# ---------------------------------------------------------------- decisions


def test_what_was_invalidated_stays_so_after_kill_9(start: Daemons) -> None:
    daemon = start()
    kept, dropped = prompts(2)
    with RawClient(daemon.data_socket) as client:
        for prompt in (kept, dropped):
            space = put_durably(client, prompt)
    with RawAdmin(daemon.admin_socket) as admin:
        admin.call("Invalidate", space_id=space, keys=b"".join(dropped.keys[10:]))
    daemon.kill()
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, kept) == 40
    assert get(daemon, dropped) == 10
    with RawAdmin(daemon.admin_socket) as admin:
        admin.call("Invalidate", space_id=space)
    daemon.kill()
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, kept) == 0
    until("its rows are removed", lambda: disk_of(daemon).blocks == 0)


def test_a_raised_epoch_holds_on_disk_after_kill_9(start: Daemons) -> None:
    daemon = start()
    (old,) = prompts(1)
    other = Prompt(model(BLOCK, name="other"), 1, 40)
    with RawClient(daemon.data_socket) as client:
        for prompt in (old, other):
            put_durably(client, prompt)
    with RawAdmin(daemon.admin_socket) as admin:
        admin.call("SetWeightEpoch", model_name="small", epoch=1)
    daemon.kill()
    daemon.restart()
    until_loaded(daemon)
    with RawClient(daemon.data_socket) as client:
        assert reason(client.open(MODEL).reason) is Reason.MISS_EPOCH_STALE
    assert get(daemon, other) == 40


# ---------------------------------------------------------------- folders


def test_two_daemons_do_not_share_a_folder(start: Daemons) -> None:
    first = start()
    with pytest.raises(DaemonDied) as caught:
        start(Path(first.settings["disk.path"]))
    assert caught.value.code == 3
    assert "disk.path" in caught.value.output
    put(first, *prompts(1))
    assert get(first, prompts(1)[0]) == 40


def test_a_path_that_is_no_folder_is_refused_by_name(start: Daemons, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(DaemonDied) as caught:
        start(file)
    assert caught.value.code == 2
    assert "disk.path" in caught.value.output


def test_without_the_setting_there_is_no_such_tier(start: Daemons) -> None:
    daemon = start(disk__path="")
    with RawAdmin(daemon.admin_socket) as admin:
        assert [tier.name for tier in admin.stats().tiers] == ["host"]
    assert counter(daemon, "kvstore_disk") == 0


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 48 MiB: soon full, and on older kernels without direct I/O."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "kvstore-test", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False)
    if os.geteuid() != 0 or not mounted or mounted.returncode != 0:
        pytest.skip("cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.root
def test_a_small_file_system_is_filled_emptied_and_used_again(
    start: Daemons, small_file_system: Path
) -> None:
    daemon = start(small_file_system / "disk", disk__capacity_bytes="64MiB")
    written = prompts(30)
    put(daemon, *written)
    tier = disk_of(daemon)
    assert tier.state.startswith("ok"), tier.state
    assert tier.blocks > 200
    assert sum(get(daemon, prompt) for prompt in written) > 300
    ballast = small_file_system / "ballast"
    for turn in range(3):
        until("others get what they ask for", lambda: _grow(ballast, 24 << 20), 30)
        put(daemon, *prompts(10, first=100 + turn))
        assert disk_of(daemon).used_bytes < 26 << 20
        ballast.unlink()
        saved = counter(daemon, "kvstore_disk_saves_total")

        def saves_again(saved: float = saved, turn: int = turn) -> bool:
            put(daemon, *prompts(10, first=1_000 + 100 * turn))
            return counter(daemon, "kvstore_disk_saves_total") > saved + 100

        until("it resumes", saves_again, 5)
    until("all is well", lambda: disk_of(daemon).state.startswith("ok"))
    daemon.kill()
    daemon.restart()
    until_loaded(daemon)
    assert sum(get(daemon, one) for one in prompts(10, first=1_200)) > 100


@pytest.mark.root
def test_a_read_only_folder_is_said_and_used_once_it_can_be(
    start: Daemons, small_file_system: Path
) -> None:
    _remount(small_file_system, "ro")
    daemon = start(small_file_system / "disk", disk__capacity_bytes="40MiB")
    (written,) = prompts(1)
    put(daemon, written)
    assert get(daemon, written) == 40, "memory serves"
    assert "Read-only" in disk_of(daemon).state
    assert not daemon.ready["durable"]
    _remount(small_file_system, "rw")
    until("it is opened", lambda: disk_of(daemon).state.startswith("ok"), 6)
    put(daemon, *prompts(8, first=100))
    assert get(daemon, written) == 40
    assert disk_of(daemon).blocks > 100
    with RawClient(daemon.data_socket) as client:
        put_durably(client, late := Prompt(MODEL, 7, 20))
    daemon.kill()
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, late) == 20, "the ledger has found its folder, too"


def _remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


def test_a_damaged_record_is_dropped_counted_and_written_anew(start: Daemons) -> None:
    daemon = start()
    (written,) = prompts(1)
    put(daemon, written)
    assert daemon.stop() == 0
    _flip(Path(daemon.settings["disk.path"]), written.rows()[20].tobytes()[:64])
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, written) == 20
    assert counter(daemon, "kvstore_disk_corrupt_dropped_total") == 1
    put(daemon, written)
    assert get(daemon, written) == 40


def test_a_foreign_index_is_set_aside_and_the_daemon_starts_cold(start: Daemons) -> None:
    daemon = start()
    (written,) = prompts(1)
    put(daemon, written)
    assert daemon.stop() == 0
    folder = Path(daemon.settings["disk.path"])
    (folder / "index" / "data.mdb").write_bytes(b"nothing of ours" * 4_096)
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, written) == 0
    assert "set aside" in disk_of(daemon).state
    assert len(list((folder / "aside").iterdir())) == 1
    put(daemon, written)
    assert daemon.stop() == 0
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, written) == 40


def test_a_removed_folder_is_begun_anew(start: Daemons) -> None:
    daemon = start()
    first, second = prompts(2)
    put(daemon, first)
    shutil.rmtree(Path(daemon.settings["disk.path"]))
    until("it is missed", lambda: counter(daemon, "kvstore_disk_loading") == 1 or _again(daemon))
    until_loaded(daemon)
    put(daemon, second)
    assert get(daemon, first) == get(daemon, second) == 40, "memory has them"
    put(daemon, *prompts(10, first=100))
    assert disk_of(daemon).state.startswith("ok")
    assert get(daemon, first) + get(daemon, second) == 80, "and the new folder has them now"
    assert daemon.stop() == 0
    daemon.restart()
    until_loaded(daemon)
    assert get(daemon, second) == 40, "the ledger that says whose they are was made anew as well"


def _grow(path: Path, size_bytes: int) -> bool:
    """Writes a file on, as far as there is room; whether it has its size."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        file.write(bytes(min(1 << 20, size_bytes - path.stat().st_size)))
    return path.stat().st_size >= size_bytes


def _again(daemon: Daemon) -> bool:
    return (Path(daemon.settings["disk.path"]) / "FORMAT").exists()


def _flip(folder: Path, begin: bytes) -> None:
    """Flips a byte of the one record whose payload begins like that."""
    for path in (folder / "segments").iterdir():
        data = path.read_bytes()
        at = data.find(begin)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 5_000)
                byte = file.read(1)
                file.seek(at + 5_000)
                file.write(bytes([byte[0] ^ 1]))
            return
    raise AssertionError("no record begins like that")


def test_a_frozen_daemon_wakes_up_with_its_disk(start: Daemons) -> None:
    daemon = start()
    written = prompts(12)
    put(daemon, *written[:6])
    os.kill(daemon.pid, signal.SIGSTOP)
    os.kill(daemon.pid, signal.SIGCONT)
    put(daemon, *written[6:])
    assert sum(get(daemon, prompt) for prompt in written) > 400


def test_an_acquire_that_wants_too_much_gets_what_fits(start: Daemons) -> None:
    daemon = start()
    long = Prompt(MODEL, 7, 200)
    with RawClient(daemon.data_socket) as client:
        space = put_durably(client, long)
        put(daemon, *prompts(10))
        client.unmap()
        leased = client.acquire(space, long.keys)
        rows = client.copy(leased)
        run = next((at for at, row in enumerate(rows) if row is None), len(rows))
        _cut(long, run).assert_right(rows[:run])
        assert 60 < run < 200
        client.release(leased.lease_id)
        reply: pb.AcquireReply = client.acquire(space, long.keys[:run]).reply
        assert reply.leased_blocks == run
