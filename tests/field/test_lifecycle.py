"""Life cycle and SDK: early publishing, holes, drains, two daemons, wrong answers, stale hints."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.reasons import KVStoreError, Reason
from kvstore.testing.payload import Finding
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from kvstore_client.testing import FakeStore
from tests import client_kit
from tests.daemon import Daemon, DaemonDied, make_daemon, start_daemon
from tests.e2e.stage import Prompt, model, record, until
from tests.field import wrongserver
from tests.field.conftest import Start
from tests.field.rules import FULL, LATE_S, SLACK, in_time, rounds, total, until_loaded
from tests.field.wrongserver import METHODS, WrongServer
from tests.rawclient import RawAdmin, RawClient

pytestmark = pytest.mark.process

Note = Callable[[str, object], None]

MIB = 1 << 20
MODEL = model()
CONFIG = ClientConfig(deadline_ms=5_000)
FILLER = np.zeros((200, 4096), np.uint8)
"""Of prompts that only take room."""


# ---------------------------------------------------------------- P25


def test_p25_a_block_is_read_whole_or_not_at_all(daemons: Start) -> None:
    """Sixteen readers poll while a writer fills 1 MiB blocks slice by slice."""
    fingerprint = model(MIB)
    slices, readers = rounds(16, 64), 16
    prompt = Prompt(fingerprint, 25, blocks=2)
    daemon = daemons()
    polls = [0] * readers
    seen: list[set[tuple[int, Reason]]] = [set() for _ in range(readers)]
    wrong: list[str] = []
    over = threading.Event()

    def read(number: int, space: Any) -> None:
        out = np.empty((2, MIB), np.uint8)
        most = 0
        while not over.is_set() or most < 2:
            got = in_time(lambda: space.fetch(prompt.keys, out), CONFIG.deadline_ms)
            for index in range(got.blocks):
                if prompt.finding(index, out[index]) is not Finding.RIGHT:
                    wrong.append(f"block {index}: {prompt.finding(index, out[index])}")
            if got.blocks < most:
                wrong.append(f"{got.blocks} blocks after {most}: {got.reason.name}")
            most = got.blocks
            seen[number].add((got.blocks, got.reason))
            polls[number] += 1
            if wrong:
                return

    def polled() -> None:
        """Every reader has looked since."""
        before = list(polls)
        until("all readers polled", lambda: wrong or all(map(int.__gt__, polls, before)), 60.0)

    with RawClient(daemon.data_socket) as writer, Client(daemon.data_socket, config=CONFIG) as sdk:
        space_id = writer.open(fingerprint).space_id
        space = sdk.space(fingerprint)
        threads = [threading.Thread(target=read, args=(n, space)) for n in range(readers)]
        for thread in threads:
            thread.start()
        try:
            rows = prompt.rows()
            for count in (1, 2):  # the second block follows the first
                reserved = writer.reserve(space_id, prompt.keys[:count])
                (offset,) = convert.unpack_u64(reserved.offsets).tolist()
                step = MIB // slices
                for start in range(0, MIB, step):
                    writer.write(offset + start, rows[count - 1][start : start + step])
                    if start % (4 * step) == 0:
                        polled()
                assert writer.commit(reserved.lease_id).visible == 1
                polled()
        finally:
            over.set()
            for thread in threads:
                thread.join(60.0)
    assert not wrong
    for answers in seen:
        assert {blocks for blocks, _ in answers} == {0, 1, 2}
        misses = {reason for blocks, reason in answers if blocks < 2}
        assert misses <= {Reason.MISS_NEVER_STORED, Reason.MISS_IN_PROGRESS}, misses


# ---------------------------------------------------------------- P29


def test_p29_a_hole_ends_the_hit_and_one_block_closes_it(daemons: Start) -> None:
    seed = 29
    print(f"seed {seed}")
    blocks, rng = 20, random.Random(seed)
    prompt = Prompt(MODEL, seed, blocks)
    rows = np.stack(prompt.rows())
    daemon = daemons()

    def by_key(admin: RawAdmin, space_id: int, at: int) -> None:
        dropped = admin.call("Invalidate", space_id=space_id, keys=prompt.keys[at])
        assert dropped.dropped_blocks == 1

    def stored_without(admin: RawAdmin, space_id: int, at: int) -> None:
        """The writer never had the block: everything else was offered."""
        admin.call("Invalidate", everything=True)
        with RawClient(daemon.data_socket, group=b"holes") as raw:
            space_id = raw.open(MODEL).space_id
            reserved = raw.reserve(space_id, prompt.keys)
            wanted = convert.unpack_u32(reserved.wanted).tolist()
            raw.abort(reserved.lease_id)
            for index in (one for one in wanted if one != at):
                chain = prompt.keys[: index + 1]
                one = raw.reserve(space_id, chain, first=index)
                raw.fill(one, list(rows))
                assert raw.commit(one.lease_id).visible == 1

    with (
        Client(daemon.data_socket, config=CONFIG) as client,
        RawAdmin(daemon.admin_socket) as admin,
    ):
        space = client.space(MODEL)
        for means in (by_key, stored_without):
            for at in (0, 1, rng.randrange(2, 18), 19):
                space.push(prompt.keys, rows)
                assert space.lookup(prompt.keys).blocks == blocks
                (known,) = admin.call("Spaces").spaces
                means(admin, known.space_id, at)
                found = space.lookup(prompt.keys)
                fetched = space.fetch(prompt.keys)
                assert (found.blocks, fetched.blocks) == (at, at), means.__name__
                prompt_part = [np.asarray(row) for row in fetched.data[:at]]
                for index, row in enumerate(prompt_part):
                    assert prompt.finding(index, row) is Finding.RIGHT
                # What the hole has cost is offered again, and only that is wanted.
                mended = space.push(prompt.keys[: at + 1], rows[at : at + 1], first_block=at)
                assert (mended.stored, mended.reason) == (1, Reason.OK)
                assert space.lookup(prompt.keys).blocks == blocks
                assert space.fetch(prompt.keys).blocks == blocks


def test_p29_the_suffix_leaves_before_its_head(daemons: Start) -> None:
    """By eviction no hole is made: of a prompt the tail goes first, and a block behind a hole that
    was made otherwise goes before what can still be hit.
    """
    prompt = Prompt(MODEL, 1, blocks=200)
    daemon = daemons()
    with (
        Client(daemon.data_socket, config=CONFIG) as client,
        RawAdmin(daemon.admin_socket) as admin,
    ):
        space = client.space(MODEL)
        assert space.push(prompt.keys, np.stack(prompt.rows())).stored == 200
        before = 200
        for seed in range(2, 200):
            space.push(Prompt(MODEL, seed, blocks=200).keys, FILLER)
            there = [
                one.reason is Reason.HIT for one in space.explain(prompt.keys, deadline_ms=10_000)
            ]
            run = there.index(False) if False in there else len(there)
            assert not any(there[run:]), "blocks behind a hole are kept"
            assert run <= before
            before = run
            if run == 0:
                break
        assert before == 0, "nothing was evicted"
        assert admin.stats().tiers[0].evictions > 0


# ---------------------------------------------------------------- P31


def test_p31_a_signal_while_the_index_is_read_ends_it_and_loses_nothing(tmp_path: Path) -> None:
    """Idle, under load, during the start and twice: see tests/e2e/test_daemon_lifecycle.py."""
    seed = 31
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompt = Prompt(MODEL, seed, blocks=400)
    disk: dict[str, Any] = {"disk__path": str(tmp_path / "disk"), "disk__capacity_bytes": "64MiB"}
    with make_daemon(tmp_path, host__capacity_bytes="16MiB", **disk) as daemon:
        daemon.start()
        with Client(daemon.data_socket, config=CONFIG) as client:
            space = client.space(MODEL)
            assert space.push(prompt.keys, np.stack(prompt.rows()), durable=True).stored == 400
        assert daemon.stop() == 0
        for turn in range(rounds(3, 20)):
            begun = time.monotonic()
            if turn % 2:
                daemon.start()  # ready, and most likely still reading its index
            else:
                daemon.spawn()
                until("it has begun", lambda: "disk" in daemon.log() or daemon.alive)
                time.sleep(rng.uniform(0.2, 0.8))
            daemon.process.send_signal(signal.SIGTERM)
            if turn % 3 > 1:
                daemon.process.send_signal(signal.SIGTERM)
            assert daemon.wait(10.0) in ({0} if turn % 2 else {0, -signal.SIGTERM}), turn
            assert time.monotonic() - begun < 5.0 * SLACK
            assert not list((tmp_path / "run").glob("*.sock*[!k]"))
        assert "Traceback" not in daemon.log()
        daemon.start()
        until_loaded(daemon)
        with Client(daemon.data_socket, config=CONFIG) as client:
            assert client.space(MODEL).fetch(prompt.keys).blocks == 400
        assert daemon.stop() == 0


@pytest.mark.root
def test_p31_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    """The kernel drops signals to it that it does not handle."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    for ready in (True, False):
        folder = tmp_path / str(ready)
        folder.mkdir()
        with make_daemon(folder, argv_prefix=prefix, host__capacity_bytes="16MiB") as daemon:
            if ready:
                assert daemon.start().ready["pid"] == 1
            else:
                daemon.spawn()
            child = _only_child(daemon.process.pid)
            until("it handles the signal", partial(_handles, child, signal.SIGTERM))
            os.kill(child, signal.SIGTERM)
            assert daemon.wait(10.0) == 0
            assert not list((folder / "run").glob("*.sock"))


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(until("it was forked", lambda: children.read_text().split())[0])


def _handles(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


# ---------------------------------------------------------------- P32


def test_p32_default_settings_work_side_by_side(tmp_path: Path) -> None:
    """Own folders, all else as it comes: neither takes the other's port or answers for it."""
    made: list[Daemon] = []
    try:
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            settings: dict[str, Any] = dict.fromkeys(("http__listen", "server__runtime_dir"))
            environ = {"XDG_RUNTIME_DIR": str(folder)}
            made.append(
                start_daemon(folder, environ=environ, host__capacity_bytes="16MiB", **settings)
            )
        one, two = made
        assert {one.data_socket, two.data_socket} == {
            str(tmp_path / name / "kvstore" / "data.sock") for name in ("one", "two")
        }
        assert len({daemon.ready["http"] for daemon in made}) == 2
        assert "http.listen" in two.log()
        for number, daemon in enumerate(made):
            prompt = Prompt(MODEL, number, blocks=4)
            with Client(daemon.data_socket, config=CONFIG) as client:
                assert client.connection().instance_id.hex() == daemon.ready["instance_id"]
                space = client.space(MODEL)
                assert space.push(prompt.keys, np.stack(prompt.rows())).stored == 4
                assert space.lookup(Prompt(MODEL, 1 - number, blocks=4).keys).blocks == 0
            assert total(daemon, "kvstore_tier_blocks") == 4
    finally:
        for daemon in made:
            assert daemon.stop() == 0


def test_p32_a_second_one_is_refused_and_a_dead_ones_place_is_taken(tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    run = str(folders[0] / "run")
    prompt = Prompt(MODEL, 32, blocks=4)
    first = start_daemon(folders[0], host__capacity_bytes="16MiB", disk__path=disk)
    with first, Client(first.data_socket, config=CONFIG) as client:
        space = client.space(MODEL)
        assert space.push(prompt.keys, np.stack(prompt.rows()), durable=True).stored == 4
        # The same sockets; then other sockets over the same data.
        with pytest.raises(DaemonDied) as died:
            start_daemon(folders[1], server__runtime_dir=run)
        assert died.value.code == 3
        with pytest.raises(DaemonDied) as died:
            start_daemon(folders[1], host__capacity_bytes="16MiB", disk__path=disk)
        assert died.value.code == 3
        assert client.connection().instance_id.hex() == first.ready["instance_id"]
        assert space.fetch(prompt.keys).blocks == 4
        first.kill()
        assert stat.S_ISSOCK(os.stat(first.data_socket).st_mode), "left behind"
        # A stale socket and stale locks: the next one takes them, with what is on disk.
        with start_daemon(
            folders[1], server__runtime_dir=run, host__capacity_bytes="16MiB", disk__path=disk
        ) as second:
            assert second.data_socket == first.data_socket
            until_loaded(second)
            until("the same client goes on", lambda: space.fetch(prompt.keys).blocks == 4)
            assert client.connection().instance_id.hex() == second.ready["instance_id"]


# ---------------------------------------------------------------- P33

BLOCK_BYTES = 4096
SHORT_MS = 60
CODES = tuple(code for code in grpc.StatusCode if code is not grpc.StatusCode.OK)
WRONG: dict[str, wrongserver.Wrong] = {
    **{code.name: wrongserver.code(code) for code in CODES},
    "a garbled detail": wrongserver.code(grpc.StatusCode.RESOURCE_EXHAUSTED, b"\xff\xff\x01"),
    "garbage": wrongserver.garbage(b"\xff" * 7),
    "nothing": wrongserver.garbage(),
    "an empty message": wrongserver.garbage(b""),
    "another message": wrongserver.garbage(
        pb.ErrorDetail(reason=pb.REASON_OK, origin="x", detail="y" * 99).SerializeToString()
    ),
    "half": wrongserver.cut,
    "twice": wrongserver.twice,
    "late": wrongserver.late(2 * SHORT_MS / 1e3),
    "never": wrongserver.never,
}
SLOW = ("late", "never")
USUAL = ("UNAVAILABLE", "INTERNAL", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED")
"""Codes that are tried on every path; on one path, and in KVSTORE_FIELD_FULL=1, all are. In this
process all are tried on all of them: tests/contract/test_client_contract.py.
"""
LIES = ("another message",)
"""What can be read as "so many blocks are stored": nobody could tell."""


class Engine:
    """Makes each kind of call, and believes nothing that is not true."""

    def __init__(self, client: Any, prompt: Any, data: Any) -> None:
        self.client = client
        self.space = client.space(client_kit.model())
        self.prompt = prompt
        self.keys = self.space.keys(prompt)
        self.data = data

    def everything(self, deadline_ms: int) -> int:
        """Every call once, each by its deadline; how many blocks are said to be stored."""
        space, keys = self.space, self.keys
        timed: Callable[[Callable[[], Any]], Any] = lambda call: in_time(call, deadline_ms)  # noqa: E731
        connection = timed(lambda: self.client.connection(deadline_ms=deadline_ms))
        assert isinstance(connection.reason, Reason)
        timed(lambda: space.status(deadline_ms=deadline_ms))
        found = timed(lambda: space.lookup(self.prompt, deadline_ms=deadline_ms))
        assert found.blocks in (0, 2)
        out = np.zeros_like(self.data)
        fetched = timed(lambda: space.fetch(keys, out, deadline_ms=deadline_ms))
        assert np.array_equal(out[: fetched.blocks], self.data[: fetched.blocks])
        assert fetched.blocks <= 2
        timed(lambda: self._view(deadline_ms))
        pushed = timed(lambda: space.push(self.prompt, self.data, deadline_ms=deadline_ms))
        assert 0 <= pushed.stored <= 4
        with contextlib.suppress(KVStoreError):  # the one call that may raise, and nothing else
            timed(lambda: space.explain(keys, deadline_ms=deadline_ms))
        return int(pushed.stored)

    def _view(self, deadline_ms: int) -> None:
        with self.space.view(self.keys, deadline_ms=deadline_ms) as views:
            copies = [np.array(array) for array in views.arrays]
        if views.valid:
            for copy, row in zip(copies, self.data, strict=False):
                assert np.array_equal(copy, row)

    def works(self) -> bool:
        return bool(self.space.fetch(self.keys[:2], deadline_ms=5_000).blocks == 2)


@pytest.fixture
def wrong_server(tmp_path: Path) -> Iterator[WrongServer]:
    store = FakeStore(capacity_blocks=16, staging_bytes=8 * BLOCK_BYTES)
    with WrongServer(tmp_path, store) as server:
        yield server
    store.close()


REACHED = {
    "shm": set(METHODS) - {"Fetch", "Push", "Abort"},
    "stream": {"Attach", "Open", "Lookup", "Acquire", "Release", "Push", "Explain", "Detach"},
    "grpc": {"Attach", "Open", "Lookup", "Fetch", "Push", "Explain", "Detach"},
}
"""By those calls of an engine that `Engine.everything` and `close` make."""


@pytest.mark.parametrize(
    ("kind", "path"),
    [("threads", "shm"), ("threads", "stream"), ("threads", "grpc"), ("asyncio", "shm")],
)
def test_p33_a_store_that_errs_is_a_miss(
    wrong_server: WrongServer, record_property: Note, kind: str, path: Any
) -> None:
    """Every call of the service times every way to answer it wrongly."""
    server, store = wrong_server, wrong_server.store
    prompt, data = client_kit.tokens(4), client_kit.rows(4, BLOCK_BYTES)
    assert set(METHODS) >= REACHED["shm"] | REACHED["stream"] | REACHED["grpc"]
    transport: Any = "stream" if path == "grpc" else path
    tried = 0
    every = FULL or (kind, path) == ("threads", "shm")
    wrongs = {
        name: wrong
        for name, wrong in WRONG.items()
        if every or name in USUAL or name not in grpc.StatusCode.__members__
    }
    with client_kit.clients(kind) as make:
        healthy = Engine(make(server.path, transport=server.transport), prompt, data)
        assert healthy.space.push(prompt[:8], data[:2]).stored == 2
        store.shared_memory = path != "grpc"
        for method in sorted(REACHED[path]):
            for name, wrong in wrongs.items():
                if name in SLOW and method == "Detach":
                    continue  # a client that closes has no deadline of its own: see below
                store.drop(healthy.keys[2:])
                before = server.seen[method]
                server.wrong[method] = wrong
                deadline_ms = SHORT_MS if name in SLOW else 2_000
                config = ClientConfig(
                    transport=transport, breaker_failures=1_000, copy_threads=1, populate=False
                )
                engine = Engine(
                    make(server.path, transport=server.transport, config=config), prompt, data
                )
                stored = engine.everything(deadline_ms)
                if method == "Release":  # it goes out by itself, some time
                    until("it is called", partial(server.was_called, method, before))
                if method in ("Detach", "Release"):
                    engine.client.close()
                else:
                    server.wrong.clear()
                    until(f"it works again after {method}: {name}", engine.works)
                    engine.client.close()
                assert server.seen[method] > before, (method, name)
                server.wrong.clear()
                if stored and name not in LIES:
                    there = healthy.space.lookup(healthy.keys).blocks
                    assert there >= 2 + stored, f"{method}: {name}: said to be stored, and is not"
                tried += 1
    record(record_property, f"answers_{kind}_{path}", tried, "answers")


def test_p33_a_client_closes_although_nobody_answers(wrong_server: WrongServer) -> None:
    server = wrong_server
    for kind in ("threads", "asyncio"):
        for wrong in (wrongserver.never, wrongserver.late(5.0)):
            server.wrong = {"Detach": wrong, "Release": wrong}
            with client_kit.clients(kind) as make:
                client = make(server.path, transport=server.transport)
                space = client.space(client_kit.model())
                space.push(client_kit.tokens(2), client_kit.rows(2, BLOCK_BYTES))
                space.fetch(space.keys(client_kit.tokens(2)))
                started = time.monotonic()
                client.close()
                assert time.monotonic() - started < 0.5 + LATE_S * SLACK


# ---------------------------------------------------------------- P34


def test_p34_a_hint_promises_nothing(daemons: Start) -> None:
    """What a Hit says of blocks is believed by nobody after they were evicted, dropped, or died."""
    prompt = Prompt(MODEL, 34, blocks=16)
    rows = np.stack(prompt.rows())
    daemon = daemons()

    def dropped() -> None:
        with RawAdmin(daemon.admin_socket) as admin:
            admin.call("Invalidate", everything=True)

    def evicted() -> None:
        for seed in range(100, 200):
            space.push(Prompt(MODEL, seed, blocks=200).keys, FILLER)
            if not space.lookup(prompt.keys).blocks:
                return
        raise AssertionError("nothing was evicted")

    def restarted() -> None:
        daemon.kill()
        daemon.start()

    with Client(daemon.data_socket, config=CONFIG) as client:
        space = client.space(MODEL)
        for event in (dropped, evicted, restarted, dropped, restarted):
            until(
                "it is stored",
                lambda: (
                    space.push(prompt.keys, rows).reason in (Reason.OK, Reason.NOTHING_TO_DO)
                    and space.lookup(prompt.keys).blocks == 16
                ),
            )
            hint = space.lookup(prompt.keys)
            held = client.connection()
            event()
            fetched = space.fetch(hint)
            assert (fetched.blocks, fetched.bytes) == (0, 0), event.__name__
            assert fetched.reason is not Reason.OK
            with space.view(hint) as views:
                assert views.blocks == 0
            until("the daemon answers", lambda: client.connection().reason is Reason.OK)
            assert space.lookup(prompt.keys).blocks == 0
            assert not any(one.reason is Reason.HIT for one in space.explain(prompt.keys))
            # Nothing of another instance is kept in mind; a half true hint gives the true half.
            same = client.connection().instance_id == held.instance_id
            assert same is (event is not restarted)
            assert space.push(prompt.keys[:5], rows[:5]).stored == 5
            again = space.fetch(hint)
            assert again.blocks == 5
            for index in range(5):
                assert prompt.finding(index, again.data[index]) is Finding.RIGHT
