"""Reads of leases over real unix sockets, with a fake store whose slots change when a test says."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.model.layout import Layout, layout_of
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import Place
from kvstore.shm import recv_frame, send_frame
from kvstore.testing.clock import ManualClock
from kvstore.wire.v1 import fd_pb2, store_pb2
from kvstore_server import fdreads
from kvstore_server.fdsocket import FdSocket
from tests.client_kit import model

SECRET = bytes(range(16))
DEADLINE_S = 10.0
NS = 1_000_000_000
BIG = layout_of(model(layers=64, heads=64, head_size=128))
"""Blocks of 8 MiB: more than a socket takes at once."""
SMALL = layout_of(model())
"""Blocks of 4 KiB."""


@dataclass
class Session:
    id: int = 1
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Slot:
    number: int

    def place(self) -> Place:
        return Place(0, 7, self.number, 1, 0)


@dataclass
class Space:
    layout: Layout
    id: int = 3


@dataclass
class Lease:
    space: Space
    slots: list[Slot | None]
    until_ns: int | None = 3600 * NS


class FakeStore:
    """One session with lease 5 on some blocks, and a core and host memory in one."""

    def __init__(self, layout: Layout, blocks: int) -> None:
        self.unmap_listeners: list[Callable[[int], None]] = []
        self.core = self
        self.clock = ManualClock(NS)
        self.session = Session()
        self.closed: Reason | None = None
        self.region_closed = False
        self.viewed = 0
        self.on_view: Callable[[int], None] = lambda slot: None
        rng = np.random.default_rng(5)
        self.data: NDArray[np.uint8] = rng.integers(
            0, 256, (blocks, layout.block_bytes), dtype=np.uint8
        )
        self.generations = [1] * blocks
        slots: list[Slot | None] = [Slot(number) for number in range(blocks)]
        self.leases = {5: Lease(Space(layout), slots)}

    def session_by_secret(self, secret: bytes, tenant: str) -> Session | None:
        return self.session if secret == SECRET and tenant == "alice" else None

    def leased(self, session: int, lease_id: int) -> Lease | None:
        return self.leases.get(lease_id) if session == self.session.id else None

    def space_of(self, session: int, space_id: int) -> Any:
        return self.closed or Space(SMALL)

    def block_view(self, place: Place, length: int) -> NDArray[np.uint8]:
        if self.region_closed:
            raise KVStoreError(Reason.REGION_UNKNOWN, "closed")
        self.viewed += 1
        self.on_view(place.slot)
        return self.data[place.slot, :length]

    def generation(self, place: Place) -> int:
        return self.generations[place.slot]

    def overwrite(self, slot: int) -> None:
        """Another block gets the slot, as after the end of the lease."""
        self.generations[slot] += 1
        self.data[slot] = 0xEE

    # Of a life by an fd connection, which a read is not.

    def bind_fd(self, session: Any) -> None:
        raise AssertionError("a read is nobody's life")

    def end_session(self, session_id: int) -> None:
        raise AssertionError("a read is nobody's life")

    def regions_of(self, tenant: str) -> list[Any]:
        return []

    def region_of(self, region_id: int, tenant: str) -> Any:
        return None

    def region_fd(self, region_id: int, tenant: str) -> int | None:
        return None

    def device_pool(self, region_id: int, tenant: str) -> Any:
        return None

    def staging_fd(self, session_id: int) -> tuple[int, int, int] | None:
        return None

    def holder_added(self, region_id: int) -> None:
        raise AssertionError("a read holds no memory")

    holder_gone = holder_added


@dataclass
class Setup:
    store: FakeStore
    server: FdSocket
    folder: Path
    socks: list[socket.socket] = field(default_factory=list)

    def connect(self, tenant: str = "alice") -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_S)
        sock.connect(str(self.folder / f"{tenant}.fd"))
        self.socks.append(sock)
        return sock

    def ask(self, tenant: str = "alice", **asked: Any) -> socket.socket:
        """A connection that has asked for lease 5, all of it unless the test says otherwise."""
        lease = self.store.leases.get(5)
        width = self.store.data.shape[1]
        wanted = {"session": SECRET, "lease_id": 5, "length": width}
        wanted["blocks"] = len(lease.slots) if lease is not None else 1
        sock = self.connect(tenant)
        fetch = fd_pb2.FdFetch(**{**wanted, **asked})
        send_frame(sock, fd_pb2.FdRequest(seq=9, fetch=fetch).SerializeToString())
        return sock

    async def until(self, what: Callable[[], object]) -> None:
        async def turns() -> None:
            while not what():  # noqa: ASYNC110 - turns of the loop are what it waits for
                await asyncio.sleep(0)

        await asyncio.wait_for(turns(), DEADLINE_S)

    def close(self) -> None:
        self.server.close()
        for sock in self.socks:
            sock.close()


def serve(folder: Path, layout: Layout, blocks: int) -> Setup:
    store = FakeStore(layout, blocks)
    server = FdSocket(store, sessions_max=8, clock=store.clock)
    for tenant in ("alice", "bob"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / f"{tenant}.fd"))
        server.listen(tenant, listener)
    return Setup(store, server, folder)


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Setup]:
    made = serve(tmp_path, SMALL, 6)
    yield made
    made.close()


@pytest.fixture
async def big(tmp_path: Path) -> AsyncIterator[Setup]:
    made = serve(tmp_path, BIG, 2)
    yield made
    made.close()


@dataclass
class Got:
    """What arrived: bytes by where they belong, and how it ended."""

    pieces: list[tuple[int, int, bytes]]
    end: fd_pb2.FdReply | None

    def joined(self) -> bytes:
        return b"".join(data for _, _, data in self.pieces)

    @property
    def reason(self) -> Reason:
        assert self.end is not None, "cut off"
        return Reason.from_wire(self.end.reason)


def read_reply(sock: socket.socket) -> fd_pb2.FdReply:
    return fd_pb2.FdReply.FromString(recv_frame(sock)[0])


def read_bytes(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = sock.recv(length - len(data))
        if not piece:
            raise ConnectionError("cut off")
        data += piece
    return bytes(data)


def read_all(sock: socket.socket) -> Got:
    got = Got([], None)
    with suppress(ConnectionError):
        while got.end is None:
            reply = read_reply(sock)
            assert reply.seq == 9
            piece = reply.piece
            if reply.reason:
                got.end = reply
                assert not piece.length
                assert sock.recv(1) == b"", "nothing comes after the end"
            else:
                got.pieces.append((piece.block, piece.offset, read_bytes(sock, piece.length)))
    return got


async def all_of(sock: socket.socket) -> Got:
    return await asyncio.to_thread(read_all, sock)


async def test_all_blocks_arrive_in_order_and_are_confirmed(small: Setup, tmp_path: Path) -> None:
    got = await all_of(small.ask())
    assert got.joined() == small.store.data.tobytes()
    assert got.end is not None
    assert (got.reason, got.end.piece.block, got.end.piece.offset) == (Reason.OK, 6, 0)
    await small.until(lambda: not small.server.reads)
    assert small.server.counts["closed_read_done"] == 1
    assert small.server.reads.sent_bytes == small.store.data.nbytes


async def test_large_blocks_come_in_pieces_that_say_where_they_belong(big: Setup) -> None:
    got = await all_of(big.ask())
    width = BIG.block_bytes
    at = 0
    for block, offset, data in got.pieces:
        assert (block, offset) == divmod(at, width)
        assert 0 < len(data) <= fdreads.PIECE_BYTES
        at += len(data)
    assert got.joined() == big.store.data.tobytes()
    assert got.reason is Reason.OK


async def test_only_the_wanted_part_of_the_wanted_blocks_is_sent(small: Setup) -> None:
    got = await all_of(small.ask(first=2, blocks=3, offset=100, length=1_000))
    assert got.joined() == small.store.data[2:5, 100:1_100].tobytes()
    assert got.end is not None
    assert got.end.piece.block == 3


@pytest.mark.parametrize(
    "asked",
    [
        {"session": b"wrong"},
        {"tenant": "bob"},
        {"lease_id": 6},
        {"blocks": 0},
        {"blocks": 7},
        {"first": 5, "blocks": 2},
        {"first": 2**32 - 1, "blocks": 2**32 - 1},
        {"length": 0},
        {"offset": 1},
        {"offset": 2**63, "length": 2**63},
    ],
    ids=str,
)
async def test_everything_else_gets_one_constant_answer(small: Setup, asked: Any) -> None:
    sock = small.ask(**asked)
    reply = await asyncio.to_thread(read_reply, sock)
    assert reply == fd_pb2.FdReply(seq=9, reason=store_pb2.REASON_PERMISSION_DENIED)
    assert await asyncio.to_thread(sock.recv, 1) == b""
    assert small.store.viewed == 0
    assert small.server.counts["denied"] == 1


async def test_an_absent_block_of_the_lease_cannot_be_read(small: Setup) -> None:
    small.store.leases[5].slots[1] = None
    reply = await asyncio.to_thread(read_reply, small.ask())
    assert Reason(reply.reason) is Reason.PERMISSION_DENIED
    assert (await all_of(small.ask(blocks=1))).reason is Reason.OK


def overwritten(setup: Setup) -> None:
    """The lease ends, and another block gets the slot: what a slow reader meets."""
    del setup.store.leases[5]
    for slot in range(len(setup.store.data)):
        setup.store.overwrite(slot)


def let_go(setup: Setup) -> None:
    del setup.store.leases[5]


def space_closed(setup: Setup) -> None:
    setup.store.closed = Reason.SPACE_CLOSED


def session_ended(setup: Setup) -> None:
    setup.store.session.ended.set()


def region_closed(setup: Setup) -> None:
    setup.store.region_closed = True


def changed_alone(setup: Setup) -> None:
    """Which no daemon does while the lease lives: the second guard."""
    for slot in range(len(setup.store.data)):
        setup.store.overwrite(slot)


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (overwritten, Reason.LEASE_EXPIRED),
        (let_go, Reason.LEASE_EXPIRED),
        (space_closed, Reason.SPACE_CLOSED),
        (session_ended, Reason.SESSION_UNKNOWN),
        (region_closed, Reason.GENERATION_CHANGED),
        (changed_alone, Reason.GENERATION_CHANGED),
    ],
)
async def test_what_ends_in_the_middle_is_disowned(
    big: Setup, happens: Callable[[Setup], None], reason: Reason
) -> None:
    """The reader stands still while the world changes: what is confirmed then is what was leased,
    and no byte of what came after is sent for a lease that has ended."""
    right = big.store.data.copy()
    sock = big.ask()
    first = await asyncio.to_thread(read_reply, sock)
    assert (first.piece.block, first.piece.offset) == (0, 0)
    await small_pause(big)
    happens(big)
    rest = await asyncio.to_thread(read_bytes, sock, first.piece.length)
    got = await all_of(sock)
    assert got.reason is reason
    assert got.end is not None
    confirmed = got.end.piece.block * BIG.block_bytes + got.end.piece.offset
    sent = rest + got.joined()
    assert confirmed < right.nbytes
    assert sent[:confirmed] == right.tobytes()[:confirmed]
    if happens is overwritten:
        assert b"\xee" * 64 not in sent


async def small_pause(setup: Setup) -> None:
    """Until the socket is full: the server has offered all that it may."""
    sent = -1
    while sent != setup.server.reads.sent_bytes:
        sent = setup.server.reads.sent_bytes
        for _ in range(5):
            await asyncio.sleep(0)


async def test_who_takes_nothing_is_cut_after_the_lease(tmp_path: Path) -> None:
    setup = serve(tmp_path, BIG, 2)
    setup.store.leases[5].until_ns = NS - 10 * NS  # over: only the linger is left
    setup.server.reads.linger_s = 0.05
    sock = setup.ask()
    await setup.until(lambda: setup.server.reads)
    await setup.until(lambda: not setup.server.reads)
    assert setup.server.counts["closed_read_late"] == 1
    assert setup.server.reads.sent_bytes < setup.store.data.nbytes, "nothing is queued here"
    assert (await all_of(sock)).end is None
    setup.close()


@pytest.mark.parametrize("how", ["close", "junk", "half-closed"])
async def test_the_end_of_the_connection_is_the_end_of_the_read(big: Setup, how: str) -> None:
    sock = big.ask()
    await big.until(lambda: big.server.reads)
    if how == "close":
        sock.close()
    elif how == "junk":
        sock.send(b"x")
    else:
        sock.shutdown(socket.SHUT_WR)
    await big.until(lambda: not big.server.reads)
    assert big.server.counts["closed_read_ended"] == 1


async def test_a_request_with_more_behind_it_or_a_descriptor_is_cut(small: Setup) -> None:
    fetch = fd_pb2.FdFetch(session=SECRET, lease_id=5, blocks=1, length=1)
    request = fd_pb2.FdRequest(seq=9, fetch=fetch).SerializeToString()
    framed = len(request).to_bytes(4, "little") + request
    more = small.connect()
    more.sendall(framed + b"x")
    assert (await all_of(more)).end is None
    given = small.connect()
    inside, outside = os.pipe()
    send_frame(given, request, inside)
    assert (await all_of(given)).end is None
    assert small.server.counts["closed_protocol"] == 2
    os.close(inside)
    os.set_blocking(outside, False)
    with pytest.raises(BrokenPipeError):  # nobody else has the reading end any more
        os.write(outside, b"x")
    os.close(outside)


async def test_reads_are_counted_apart_from_clients(big: Setup) -> None:
    for _ in range(fdreads.READS_MAX):
        big.ask()
    await big.until(lambda: len(big.server.reads) == fdreads.READS_MAX)
    assert not big.server.connections
    reply = await asyncio.to_thread(read_reply, big.ask())
    assert reply == fd_pb2.FdReply(seq=9, reason=store_pb2.REASON_LIMIT_QUEUE)
    assert big.server.counts["reads_full"] == 1
    big.socks[0].close()
    await big.until(lambda: len(big.server.reads) < fdreads.READS_MAX)
    assert (await all_of(big.ask(blocks=1, length=100))).reason is Reason.OK


async def test_two_readers_share_the_loop(big: Setup) -> None:
    """One call of the kernel a turn: neither is served to its end before the other begins."""
    order: list[int] = []
    big.store.on_view = order.append
    one, other = big.ask(first=0, blocks=1), big.ask(first=1, blocks=1)
    done = await asyncio.gather(all_of(one), all_of(other))
    assert [got.reason for got in done] == [Reason.OK, Reason.OK]
    assert Counter(order).keys() == {0, 1}
    assert order.index(1) < len(order) - 1 - order[::-1].index(0) or order.index(0) > order.index(1)


async def test_stopping_ends_all(big: Setup) -> None:
    sock = big.ask()
    await big.until(lambda: big.server.reads)
    big.server.close()
    assert not big.server.reads
    assert big.server.counts["closed_daemon_stops"] == 1
    assert (await all_of(sock)).end is None
