"""The fd socket over real unix sockets, with a fake store behind it."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.clock import SystemClock
from kvstore.model.reasons import Reason
from kvstore.model.values import Place
from kvstore.shm import FRAME_BYTES_MAX, recv_frame, send_frame
from kvstore.store.values import DevicePool
from kvstore.wire.v1 import fd_pb2, store_pb2
from kvstore_server import fdsocket
from kvstore_server.fdsocket import FdSocket

SECRET = bytes(range(16))
DEADLINE_S = 10.0
TENANTS = {"alice": 1, "bob": 2}


@dataclass
class FakeSession:
    id: int
    tenant: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class FakeRegion:
    id: int
    slot_bytes: int = 4096
    slots: int = 4
    header_bytes: int = 4096
    total_bytes: int = 5 * 4096


class NoLeases:
    """A core without a lease."""

    def leased(self, session: int, lease_id: int) -> None:
        return None

    def space_of(self, session: int, space_id: int) -> Reason:
        return Reason.SPACE_UNKNOWN


class FakeStore:
    """Sessions 1 (alice) and 2 (bob), regions by tenant, and what the fd socket said."""

    def __init__(self) -> None:
        self.core = NoLeases()
        self.clock = SystemClock()
        self.unmap_listeners: list[Callable[[int], None]] = []
        self.sessions = {SECRET: FakeSession(1, "alice"), SECRET[::-1]: FakeSession(2, "bob")}
        self.regions: dict[str, list[FakeRegion]] = {"alice": [FakeRegion(7)], "bob": []}
        self.fds = {7: _memfd(b"seven"), 9: _memfd(b"staging")}
        self.staging: dict[int, int] = {}
        self.pools: dict[tuple[str, int], DevicePool] = {}
        self.holders: Counter[int] = Counter()
        self.bound: list[int] = []
        self.ended: list[int] = []
        self.changed = asyncio.Event()

    def session_by_secret(self, secret: bytes, tenant: str) -> FakeSession | None:
        session = self.sessions.get(secret)
        return session if session is not None and session.tenant == tenant else None

    def bind_fd(self, session: FakeSession) -> None:
        self.bound.append(session.id)

    def end_session(self, session_id: int) -> None:
        self.ended.append(session_id)
        for session in self.sessions.values():
            if session.id == session_id:
                session.ended.set()
        self.changed.set()

    def regions_of(self, tenant: str) -> list[FakeRegion]:
        return self.regions[tenant]

    def region_of(self, region_id: int, tenant: str) -> FakeRegion | None:
        return next((one for one in self.regions[tenant] if one.id == region_id), None)

    def device_pool(self, region_id: int, tenant: str) -> DevicePool | None:
        return self.pools.get((tenant, region_id))

    def region_fd(self, region_id: int, tenant: str) -> int | None:
        known = any(region.id == region_id for region in self.regions[tenant])
        return self.fds[region_id] if known else None

    def staging_fd(self, session_id: int) -> tuple[int, int, int] | None:
        region_id = self.staging.get(session_id)
        return None if region_id is None else (region_id, 7, self.fds[region_id])

    def holder_added(self, region_id: int) -> None:
        self.holders[region_id] += 1

    def holder_gone(self, region_id: int) -> None:
        self.holders[region_id] -= 1
        self.changed.set()

    def block_view(self, place: Place, length: int) -> Any:
        raise AssertionError("nothing is leased")

    def generation(self, place: Place) -> int:
        raise AssertionError("nothing is leased")

    def close_region(self, region_id: int) -> None:
        for listener in self.unmap_listeners:
            listener(region_id)

    async def until(self, what: Callable[[], object]) -> None:
        async def changes() -> None:
            while not what():
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(changes(), DEADLINE_S)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


def _memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


@dataclass
class Setup:
    store: FakeStore
    server: FdSocket
    folder: Path
    clients: list[Client] = field(default_factory=list)

    def connect(self, tenant: str = "alice") -> Client:
        client = Client(self.folder / f"{tenant}.fd")
        self.clients.append(client)
        return client

    def close(self) -> None:
        self.server.close()
        for client in self.clients:
            client.sock.close()
        self.store.close()


class Client:
    """A blocking client, driven from a thread."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(str(path))
        self.seq = 0

    async def ask(self, fd: int | None = None, **request: Any) -> tuple[fd_pb2.FdReply, list[int]]:
        self.tell(fd, **request)
        return await self.receive()

    def tell(self, fd: int | None = None, **request: Any) -> None:
        self.seq += 1
        message = fd_pb2.FdRequest(seq=self.seq, **request)
        send_frame(self.sock, message.SerializeToString(), fd)

    async def receive(self) -> tuple[fd_pb2.FdReply, list[int]]:
        frame, fds = await asyncio.to_thread(recv_frame, self.sock)
        return fd_pb2.FdReply.FromString(frame), fds

    async def hello(self, secret: bytes = SECRET, fd: int | None = None) -> fd_pb2.FdReply:
        return (await self.ask(fd, hello=fd_pb2.FdHello(session=secret)))[0]

    async def is_cut(self) -> bool:
        try:
            return await asyncio.to_thread(self.sock.recv, 1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    made = _serve(tmp_path)
    yield made
    made.close()


def _serve(folder: Path, handshake_s: float = DEADLINE_S) -> Setup:
    store = FakeStore()
    server = FdSocket(store, sessions_max=8, handshake_s=handshake_s)
    for tenant in TENANTS:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / f"{tenant}.fd"))
        server.listen(tenant, listener)
    return Setup(store, server, folder)


async def test_hello_binds_the_session_and_names_the_regions(setup: Setup) -> None:
    client = setup.connect()
    welcome = await client.hello()
    assert Reason(welcome.reason) is Reason.OK
    assert welcome.seq == client.seq
    assert [(r.region_id, r.data_offset, r.slots) for r in welcome.welcome.regions] == [
        (7, 4096, 4)
    ]
    assert setup.store.bound == [1]


@pytest.mark.parametrize(
    "request_",
    [
        {"hello": fd_pb2.FdHello(session=b"wrong")},
        {"hello": fd_pb2.FdHello(session=SECRET[::-1])},  # another tenant's
        {"hello": fd_pb2.FdHello()},
        {"fetch": fd_pb2.FdFetch(session=b"wrong", lease_id=1, blocks=1, length=1)},
        {"fetch": fd_pb2.FdFetch(session=SECRET, lease_id=1, blocks=1, length=1)},
        {"fetch": fd_pb2.FdFetch()},
        {"get_region": fd_pb2.GetRegion(region_id=7)},
        {"get_staging": fd_pb2.GetStaging()},
        {"get_device": fd_pb2.GetDevice(region_id=7)},
        {"unmapped": fd_pb2.Unmapped(region_id=7)},
    ],
)
async def test_anything_but_the_right_hello_gets_one_constant_answer(
    setup: Setup, request_: dict[str, Any]
) -> None:
    client = setup.connect()
    reply, fds = await client.ask(**request_)
    assert reply == fd_pb2.FdReply(seq=1, reason=store_pb2.REASON_PERMISSION_DENIED)
    assert fds == []
    assert await client.is_cut()
    assert setup.store.ended == []


async def test_a_session_has_one_fd_socket(setup: Setup) -> None:
    first, second = setup.connect(), setup.connect()
    await first.hello()
    assert Reason((await second.hello()).reason) is Reason.PERMISSION_DENIED
    assert await second.is_cut()
    reply, fds = await first.ask(get_region=fd_pb2.GetRegion(region_id=7))
    assert Reason(reply.reason) is Reason.OK
    os.close(fds[0])


async def test_a_region_comes_with_its_descriptor_once_counted(setup: Setup) -> None:
    client = setup.connect()
    await client.hello()
    for _ in range(2):
        reply, (fd,) = await client.ask(get_region=fd_pb2.GetRegion(region_id=7))
        assert reply.region.total_bytes == 5 * 4096
        assert os.pread(fd, 5, 0) == b"seven"
        os.close(fd)
    assert setup.store.holders == {7: 1}


async def test_a_device_pool_comes_with_its_descriptor_and_its_file(setup: Setup) -> None:
    """The file ends where the generations do; both together are one hold."""
    setup.store.pools["alice", 7] = DevicePool("GPU-1", 1, 2 << 20, setup.store.fds[9], b"")
    client = setup.connect()
    await client.hello()
    reply, (fd,) = await client.ask(get_device=fd_pb2.GetDevice(region_id=7))
    device = reply.device
    assert (device.device_uuid, device.mapped_bytes) == ("GPU-1", 2 << 20)
    assert device.kind == store_pb2.DEVICE_HANDLE_KIND_CUDA_FD
    assert os.pread(fd, 7, 0) == b"staging"
    os.close(fd)
    reply, (fd,) = await client.ask(get_region=fd_pb2.GetRegion(region_id=7))
    os.close(fd)
    assert reply.region.device == device
    assert reply.region.total_bytes == reply.region.data_offset == 4096
    assert setup.store.holders == {7: 1}
    client.tell(unmapped=fd_pb2.Unmapped(region_id=7))
    await client.ask(get_device=fd_pb2.GetDevice(region_id=8))  # heard after what was told
    assert not setup.store.holders[7]


async def test_a_pool_by_legacy_handle_comes_without_a_descriptor(setup: Setup) -> None:
    setup.store.pools["alice", 7] = DevicePool("GPU-1", 2, 2 << 20, -1, b"h" * 64)
    client = setup.connect()
    await client.hello()
    reply, fds = await client.ask(get_device=fd_pb2.GetDevice(region_id=7))
    assert (reply.device.ipc_handle, fds) == (b"h" * 64, [])


async def test_a_pool_is_never_given_to_another_tenant(setup: Setup) -> None:
    setup.store.pools["alice", 7] = DevicePool("GPU-1", 1, 2 << 20, setup.store.fds[9], b"")
    client = setup.connect("bob")
    await client.hello(SECRET[::-1])
    reply, fds = await client.ask(get_device=fd_pb2.GetDevice(region_id=7))
    assert (Reason(reply.reason), fds) == (Reason.REGION_UNKNOWN, [])
    assert not setup.store.holders


async def test_a_region_is_handed_out_although_no_descriptor_is_left(setup: Setup) -> None:
    client = setup.connect()
    await client.hello()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    again = asyncio.Event()

    def restore() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        again.set()

    def region_fd(region_id: int, tenant: str) -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
        asyncio.get_running_loop().call_soon(restore)  # when the answer was sent
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        return setup.store.fds[region_id]

    setup.store.region_fd = region_fd  # type: ignore[method-assign]
    client.tell(get_region=fd_pb2.GetRegion(region_id=7))
    await asyncio.wait_for(again.wait(), DEADLINE_S)
    reply, (fd,) = await client.receive()
    assert Reason(reply.reason) is Reason.OK
    assert os.pread(fd, 5, 0) == b"seven"
    os.close(fd)


async def test_foreign_closed_and_unknown_regions_look_alike(setup: Setup) -> None:
    client = setup.connect("bob")
    await client.hello(SECRET[::-1])
    answers = []
    for region_id in (7, 8, 0):
        reply, fds = await client.ask(get_region=fd_pb2.GetRegion(region_id=region_id))
        assert fds == []
        reply.seq = 0
        answers.append(reply.SerializeToString())
    assert len(set(answers)) == 1
    assert setup.store.holders == {}


async def test_staging_is_the_sessions_own(setup: Setup) -> None:
    client = setup.connect()
    await client.hello()
    reply, fds = await client.ask(get_staging=fd_pb2.GetStaging())
    assert (Reason(reply.reason), fds) == (Reason.REGION_UNKNOWN, [])
    setup.store.staging = {1: 9}
    reply, (fd,) = await client.ask(get_staging=fd_pb2.GetStaging())
    assert (reply.staging.region_id, reply.staging.total_bytes) == (9, 7)
    assert os.pread(fd, 7, 0) == b"staging"
    os.close(fd)


async def test_hanging_up_ends_the_session_but_a_living_process_still_holds(setup: Setup) -> None:
    client = setup.connect()
    await client.hello()
    _, (fd,) = await client.ask(get_region=fd_pb2.GetRegion(region_id=7))
    os.close(fd)
    client.sock.close()
    await setup.store.until(lambda: setup.store.ended == [1])
    assert setup.store.holders == {7: 1}
    assert not setup.server.connections


async def test_unmap_reaches_holders_and_is_answered(setup: Setup) -> None:
    client = setup.connect()
    await client.hello()
    _, (fd,) = await client.ask(get_region=fd_pb2.GetRegion(region_id=7))
    os.close(fd)
    setup.store.close_region(7)
    event, _ = await client.receive()
    assert event == fd_pb2.FdReply(unmap=fd_pb2.Unmap(region_id=7))
    client.tell(unmapped=fd_pb2.Unmapped(region_id=7))
    await setup.store.until(lambda: setup.store.holders == {7: 0})
    client.tell(unmapped=fd_pb2.Unmapped(region_id=7))  # a second time, and one never given
    client.tell(unmapped=fd_pb2.Unmapped(region_id=8))
    await client.ask(get_region=fd_pb2.GetRegion(region_id=99))
    assert setup.store.holders == {7: 0}


async def test_unmap_does_not_reach_who_was_never_given_the_region(setup: Setup) -> None:
    client = setup.connect()
    await client.hello()
    setup.store.close_region(7)
    reply, _ = await client.ask(get_region=fd_pb2.GetRegion(region_id=99))
    assert reply.seq == client.seq


async def test_a_new_connection_of_the_process_answers_for_an_old_one(setup: Setup) -> None:
    first = setup.connect()
    await first.hello()
    _, (fd,) = await first.ask(get_region=fd_pb2.GetRegion(region_id=7))
    os.close(fd)
    first.sock.close()
    await setup.store.until(lambda: setup.store.ended == [1])
    second = setup.connect("bob")
    await second.hello(SECRET[::-1])
    setup.store.close_region(7)
    event, _ = await second.receive()
    assert event.unmap.region_id == 7
    second.tell(unmapped=fd_pb2.Unmapped(region_id=7))
    await setup.store.until(lambda: setup.store.holders == {7: 0})


async def test_orphans_of_many_connections_do_not_pile_up(setup: Setup) -> None:
    for number in range(5):
        setup.store.sessions[SECRET] = FakeSession(10 + number, "alice")
        client = setup.connect()
        await client.hello()
        _, (fd,) = await client.ask(get_region=fd_pb2.GetRegion(region_id=7))
        os.close(fd)
        client.sock.close()
        await setup.store.until(lambda ended=10 + number: ended in setup.store.ended)  # type: ignore[misc]
    assert setup.store.holders == {7: 1}
    assert len(setup.server.processes) == 1


async def test_after_the_end_of_the_session_only_goodbyes_are_heard(setup: Setup) -> None:
    client = setup.connect()
    await client.hello()
    _, (fd,) = await client.ask(get_region=fd_pb2.GetRegion(region_id=7))
    os.close(fd)
    setup.store.end_session(1)
    reply, _ = await client.ask(get_region=fd_pb2.GetRegion(region_id=7))
    assert Reason(reply.reason) is Reason.SESSION_UNKNOWN
    client.tell(unmapped=fd_pb2.Unmapped(region_id=7))
    await setup.store.until(lambda: setup.store.holders == {7: 0})


async def test_a_descriptor_that_nobody_asked_for_is_closed(setup: Setup) -> None:
    client = setup.connect()
    before = len(os.listdir("/proc/self/fd"))
    read_fd, write_fd = os.pipe()
    await client.hello(fd=read_fd)
    for _ in range(20):
        await client.ask(read_fd, get_region=fd_pb2.GetRegion(region_id=99))
    os.close(read_fd)
    os.close(write_fd)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the accepted socket and the pidfd


async def test_two_descriptors_in_one_message_are_too_many(setup: Setup) -> None:
    client = setup.connect()
    data = fd_pb2.FdRequest(seq=1, hello=fd_pb2.FdHello(session=SECRET)).SerializeToString()
    frame = struct.pack("<I", len(data)) + data
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(client.sock, [frame], [0, 0])
    assert await client.is_cut()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", 0),
        struct.pack("<I", FRAME_BYTES_MAX + 1),
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack("<I", 5) + b"\xff" * 5,
        struct.pack("<I", 2) + fd_pb2.FdRequest(seq=3).SerializeToString(),  # no request
        struct.pack("<I", 2) + b"\x12\x00",  # Hello with seq 0
    ],
)
async def test_broken_framing_is_cut(setup: Setup, garbage: bytes) -> None:
    client = setup.connect()
    client.sock.sendall(garbage)
    assert await client.is_cut()


async def test_random_bytes_never_hurt(setup: Setup) -> None:
    seed = 20240607
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        client = setup.connect()
        authenticated = rng.random() < 0.5
        setup.store.sessions[SECRET] = FakeSession(rng.getrandbits(40), "alice")
        if authenticated:
            await client.hello()
        payload = rng.randbytes(rng.randrange(1, 200))
        if rng.random() < 0.5:
            payload = struct.pack("<I", len(payload)) + payload
        with suppress(ConnectionError):
            client.sock.sendall(payload)
            client.sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while await asyncio.to_thread(client.sock.recv, 65536):
                pass
        client.sock.close()
    for _ in range(100):  # each turn of the loop handles what is readable
        await asyncio.sleep(0)
    assert not setup.server.connections
    survivor = setup.connect()
    setup.store.sessions[SECRET] = FakeSession(1, "alice")
    assert Reason((await survivor.hello()).reason) is Reason.OK


async def test_frames_split_and_joined_anyhow_are_the_same(setup: Setup) -> None:
    client = setup.connect()
    stream = b""
    for seq in range(1, 30):
        request = fd_pb2.FdRequest(seq=seq, hello=fd_pb2.FdHello(session=SECRET))
        if seq > 1:
            request = fd_pb2.FdRequest(seq=seq, get_region=fd_pb2.GetRegion(region_id=99))
        data = request.SerializeToString()
        stream += struct.pack("<I", len(data)) + data
    rng = random.Random(3)
    while stream:
        cut = rng.randrange(1, 40)
        client.sock.sendall(stream[:cut])
        stream = stream[cut:]
        await asyncio.sleep(0)
    answers = [(await client.receive())[0].seq for _ in range(29)]
    assert answers == list(range(1, 30))


async def test_a_reader_that_lets_answers_pile_up_is_cut(setup: Setup) -> None:
    client = setup.connect()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    await client.hello()

    def flood() -> None:
        while True:
            client.tell(get_region=fd_pb2.GetRegion(region_id=99))

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(asyncio.to_thread(flood), DEADLINE_S)
    await setup.store.until(lambda: setup.store.ended == [1])
    assert setup.server.counts["closed_slow"] == 1


async def test_who_says_nothing_is_cut_at_the_deadline(tmp_path: Path) -> None:
    made = _serve(tmp_path, handshake_s=0.01)
    assert await made.connect().is_cut()
    assert made.server.counts["closed_handshake_late"] == 1
    made.close()


async def test_connections_are_counted(setup: Setup) -> None:
    clients = [setup.connect() for _ in range(fdsocket.WAITING_MAX)]
    extra = setup.connect()
    assert await extra.is_cut()
    assert setup.server.counts["refused"] == 1
    clients[0].sock.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert Reason((await setup.connect().hello()).reason) is Reason.OK


_PEER = """
import os, socket, sys, time
from kvstore.shm import recv_frame, send_frame
from kvstore.wire.v1 import fd_pb2
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
hello = fd_pb2.FdHello(session=bytes(range(16)))
send_frame(sock, fd_pb2.FdRequest(seq=1, hello=hello).SerializeToString())
recv_frame(sock)
get = fd_pb2.GetRegion(region_id=7)
send_frame(sock, fd_pb2.FdRequest(seq=2, get_region=get).SerializeToString())
recv_frame(sock)
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


def _start_peer(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PEER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.process
async def test_death_is_seen_though_a_child_keeps_the_socket(setup: Setup) -> None:
    peer = _start_peer(setup.folder / "alice.fd")
    with peer:
        assert peer.stdout is not None
        child = int(await asyncio.to_thread(peer.stdout.readline))
        try:
            assert setup.store.ended == []
            assert setup.store.holders == {7: 1}
            peer.kill()
            await setup.store.until(lambda: setup.store.ended == [1])
            await setup.store.until(lambda: setup.store.holders == {7: 0})
            assert len(setup.server.processes) == 0
        finally:
            os.kill(child, signal.SIGKILL)
