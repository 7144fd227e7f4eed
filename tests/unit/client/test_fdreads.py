"""A read over the fd socket whose other end lies, stops or is not there."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import shm
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from kvstore_client.testing import FakeStore, FakeTransport
from tests.client_kit import model, rows, tokens

MODEL = model(ranks=2)
BLOCK_BYTES = 4096
DATA = rows(4, BLOCK_BYTES)
STREAM = ClientConfig(transport="stream", breaker_failures=1_000, deadline_ms=2_000)

Dial = Callable[[], socket.socket]
Say = Callable[[socket.socket], None]


class Store(FakeStore):
    """One that closes its clients."""

    def __init__(self) -> None:
        super().__init__(capacity_blocks=16)
        self.clients: list[Client] = []

    def client(self, dial: Dial, config: ClientConfig) -> Client:
        transport = FakeTransport.factory(self.answer, dial)
        self.clients.append(Client("/fake", transport=transport, config=config))
        return self.clients[-1]


@pytest.fixture
def store() -> Iterator[Store]:
    fake = Store()
    yield fake
    for client in fake.clients:
        client.close()
    fake.close()


def space_of(store: Store, dial: Dial, config: ClientConfig = STREAM) -> Any:
    """Four blocks are stored; their bytes come through what `dial` connects to."""
    store.client(store.dial, ClientConfig()).space(model()).push(tokens(4), DATA)
    return store.client(dial, config).space(model())


def speaks(say: Say) -> Dial:
    """An fd socket that hears the request, and then says what a test wants."""

    def dial() -> socket.socket:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with ours, contextlib.suppress(OSError):  # the client may hang up on a lie
                shm.recv_frame(ours)
                say(ours)

        threading.Thread(target=serve, daemon=True).start()
        return theirs

    return dial


def piece(sock: socket.socket, block: int, offset: int, data: bytes, reason: int = 0) -> None:
    body = fd_pb2.FdPiece(block=block, offset=offset, length=len(data))
    reply = fd_pb2.FdReply(seq=1, reason=pb.Reason.ValueType(reason), piece=body)
    shm.send_frame(sock, reply.SerializeToString())
    sock.sendall(data)


def block(number: int, end: int | None = None) -> bytes:
    return DATA[number : (number if end is None else end - 1) + 1].tobytes()


OK, CHANGED = int(Reason.OK), int(Reason.GENERATION_CHANGED)


def honest(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0, 2))
    piece(sock, 2, 0, block(2)[:1_000])
    piece(sock, 2, 1_000, block(2)[1_000:])
    piece(sock, 3, 0, block(3))
    piece(sock, 4, 0, b"", OK)


def unconfirmed(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0, 2))
    piece(sock, 2, 0, block(2))


def cut_within_a_piece(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    body = fd_pb2.FdPiece(block=1, length=BLOCK_BYTES)
    shm.send_frame(sock, fd_pb2.FdReply(seq=1, piece=body).SerializeToString())
    sock.sendall(block(1)[:100])


def disowned(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0, 2))
    piece(sock, 2, 0, bytes(BLOCK_BYTES))
    piece(sock, 2, 0, b"", CHANGED)


def disowned_in_the_block(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 1, 0, block(1)[:100])
    piece(sock, 1, 100, b"", CHANGED)


def ends_too_soon(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 1, 0, b"", OK)


def confirms_too_much(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 4, 0, b"", OK)


def twice(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 0, 0, block(0))


def a_gap(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 1, 0, block(1)[:100])
    piece(sock, 1, 101, block(1)[101:])


def over_the_end(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0, 4) + block(0))


def half_a_block_more(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 1, 0, block(1) + bytes(100))


def an_empty_piece(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 1, 0, b"")


def garbage(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 1, 0, block(1))
    shm.send_frame(sock, b"\xff\xff\xff")


def huge_frame(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    sock.sendall(b"\xff\xff\xff\x7f")


def session_over(sock: socket.socket) -> None:
    piece(sock, 0, 0, block(0))
    piece(sock, 1, 0, b"", int(Reason.SESSION_UNKNOWN))


def no_such_lease(sock: socket.socket) -> None:
    refusal = fd_pb2.FdReply(seq=1, reason=pb.REASON_PERMISSION_DENIED)
    shm.send_frame(sock, refusal.SerializeToString())


@pytest.mark.parametrize(
    ("say", "blocks", "reason"),
    [
        (honest, 4, Reason.OK),
        (unconfirmed, 2, Reason.UNAVAILABLE),
        (cut_within_a_piece, 1, Reason.UNAVAILABLE),
        (disowned, 2, Reason.GENERATION_CHANGED),
        (disowned_in_the_block, 1, Reason.GENERATION_CHANGED),
        (ends_too_soon, 1, Reason.INTERNAL),
        (confirms_too_much, 0, Reason.INTERNAL),
        (twice, 0, Reason.INTERNAL),
        (a_gap, 1, Reason.INTERNAL),
        (over_the_end, 0, Reason.INTERNAL),
        (half_a_block_more, 1, Reason.INTERNAL),
        (an_empty_piece, 1, Reason.INTERNAL),
        (garbage, 1, Reason.INTERNAL),
        (huge_frame, 0, Reason.UNAVAILABLE),
        (session_over, 1, Reason.SESSION_UNKNOWN),
        (no_such_lease, 0, Reason.LEASE_EXPIRED),
    ],
)
def test_only_whole_and_confirmed_blocks_count(
    store: Store, say: Say, blocks: int, reason: Reason
) -> None:
    space = space_of(store, speaks(say))
    fetched = space.fetch(space.keys(tokens(4)))
    assert (fetched.blocks, fetched.reason) == (blocks, reason)
    assert fetched.bytes == blocks * BLOCK_BYTES
    assert np.array_equal(fetched.data[:blocks], DATA[:blocks])
    assert store.requests["Fetch"] == 0
    if reason is not Reason.SESSION_UNKNOWN:  # whose leases are over with it
        assert store.wait(lambda s: not s.leases)


def test_all_or_nothing_is_nothing_where_a_block_is_disowned(store: Store) -> None:
    space = space_of(store, speaks(disowned))
    fetched = space.fetch(space.keys(tokens(4)), all_or_nothing=True)
    assert (fetched.blocks, fetched.reason) == (0, Reason.GENERATION_CHANGED)


def test_rows_may_lie_anywhere(store: Store) -> None:
    space = space_of(store, store.dial)
    out = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(4)]
    assert space.fetch(space.keys(tokens(4)), out, all_or_nothing=True).blocks == 4
    assert np.array_equal(np.stack(out), DATA)
    listed = space_of(store, speaks(honest))
    out = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(4)]
    assert listed.fetch(listed.keys(tokens(4)), out).blocks == 4
    assert np.array_equal(np.stack(out), DATA)


def test_only_the_part_that_is_wanted_is_asked_for(store: Store) -> None:
    writer = store.client(store.dial, ClientConfig())
    parts = rows(3, BLOCK_BYTES // 2), rows(3, BLOCK_BYTES // 2, seed=1)
    for rank in (0, 1):
        writer.space(MODEL, rank).push(tokens(3), parts[rank])
    reader = store.client(store.dial, STREAM)
    for rank in (0, 1):
        space = reader.space(MODEL, rank)
        fetched = space.fetch(space.keys(tokens(3)), part=True)
        assert (fetched.blocks, fetched.bytes) == (3, 3 * BLOCK_BYTES // 2)
        assert np.array_equal(fetched.data, parts[rank])


def hangs_up(sock: socket.socket) -> None:
    """As a daemon that does not know the request, or has no room."""


def refuses(sock: socket.socket) -> None:
    refusal = fd_pb2.FdReply(seq=1, reason=pb.REASON_LIMIT_QUEUE)
    shm.send_frame(sock, refusal.SerializeToString())


def fails(number: int) -> Dial:
    def dial() -> socket.socket:
        raise OSError(number, "no")

    return dial


@pytest.mark.parametrize(
    ("dial", "dials_again"),
    [
        (speaks(hangs_up), True),
        (speaks(refuses), True),
        (fails(errno.EMFILE), True),
        (fails(errno.ENOENT), False),
        (fails(errno.ECONNREFUSED), False),
    ],
    ids=["hangs up", "refuses", "EMFILE", "ENOENT", "ECONNREFUSED"],
)
def test_without_an_answer_there_is_grpc(store: Store, dial: Dial, dials_again: bool) -> None:
    dialed = []

    def counted() -> socket.socket:
        dialed.append(1)
        return dial()

    space = space_of(store, counted)
    for number in (1, 2):
        fetched = space.fetch(space.keys(tokens(4)))
        assert (fetched.blocks, fetched.reason) == (4, Reason.OK)
        assert np.array_equal(fetched.data, DATA)
        assert store.requests["Fetch"] == number
    assert len(dialed) == (2 if dials_again else 1)
    assert store.wait(lambda s: not s.leases)
    said = {Reason.from_wire(report.reason) for report in store.reports}
    assert said == {Reason.UNAVAILABLE}, "no defect, for which somebody would be woken"
    whole = space.fetch(space.keys(tokens(4)), all_or_nothing=True)
    assert (whole.blocks, whole.reason) == (0, Reason.NOT_SUPPORTED)


def test_a_daemon_that_stands_still_costs_the_deadline_and_no_more(store: Store) -> None:
    over = threading.Event()

    def stands_still(sock: socket.socket) -> None:
        piece(sock, 0, 0, block(0))
        piece(sock, 1, 0, block(1)[:10])
        over.wait(60)

    config = ClientConfig(transport="stream", breaker_failures=1_000, deadline_ms=200)
    space = space_of(store, speaks(stands_still), config)
    fetched = space.fetch(space.keys(tokens(4)))
    assert (fetched.blocks, fetched.reason) == (1, Reason.DEADLINE_EXCEEDED)
    over.set()


SHORT = ClientConfig(transport="stream", breaker_failures=1_000, deadline_ms=300)


def test_signals_that_keep_coming_do_not_stretch_the_deadline(store: Store) -> None:
    """As a profiler's timer: each interrupts the wait, which must not begin anew."""
    over = threading.Event()

    def stands_still(sock: socket.socket) -> None:
        piece(sock, 0, 0, block(0))
        piece(sock, 1, 0, block(1)[:10])
        over.wait(5)  # then it hangs up, which is another reason

    space = space_of(store, speaks(stands_still), SHORT)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        fetched = space.fetch(space.keys(tokens(4)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.set()
    assert (fetched.blocks, fetched.reason) == (1, Reason.DEADLINE_EXCEEDED)


@pytest.mark.parametrize("begin", [0, 1], ids=["the frame", "the piece"])
def test_bytes_that_drip_do_not_stretch_the_deadline(store: Store, begin: int) -> None:
    over = threading.Event()

    def drips(sock: socket.socket) -> None:
        piece(sock, 0, 0, block(0))
        body = fd_pb2.FdPiece(block=1, length=BLOCK_BYTES)
        frame = fd_pb2.FdReply(seq=1, piece=body).SerializeToString()
        framed = len(frame).to_bytes(4, "little") + frame
        sock.sendall(framed[: begin * len(framed)])
        for byte in (framed + bytes(20))[begin * len(framed) :][:20]:
            if over.wait(0.1):
                return
            sock.send(bytes([byte]))

    space = space_of(store, speaks(drips), SHORT)
    fetched = space.fetch(space.keys(tokens(4)))
    over.set()
    assert (fetched.blocks, fetched.reason) == (begin, Reason.DEADLINE_EXCEEDED)


@pytest.mark.parametrize("over", [False, True], ids=["", "its session is over"])
def test_a_fork_in_the_middle_leaves_the_read_to_the_parent(store: Store, over: bool) -> None:
    """The child has no copy of the socket, and ends nothing when it ends; the parent reads on. The
    session of the read may be over before the fork: it lives by a stream, which a fork ends.
    """
    begun, forked = threading.Event(), threading.Event()
    dialed: list[int] = []

    def waits(sock: socket.socket) -> None:
        piece(sock, 0, 0, block(0, 2))
        begun.set()
        forked.wait(20)
        piece(sock, 2, 0, block(2, 4))
        piece(sock, 4, 0, b"", OK)

    def dial() -> socket.socket:
        sock = speaks(waits)()
        dialed.append(sock.fileno())
        return sock

    config = ClientConfig(transport="stream", breaker_failures=1_000, deadline_ms=30_000)
    space = space_of(store, dial, config)
    answers: list[Any] = []
    reader = threading.Thread(target=lambda: answers.append(space.fetch(space.keys(tokens(4)))))
    reader.start()
    assert begun.wait(20)
    if over:
        store.clients[-1].close()
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(dialed[0])
        except OSError:
            os._exit(0)
        os._exit(1)
    inherited = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    forked.set()
    reader.join(20)
    assert inherited == 0, "the child has the socket"
    (fetched,) = answers
    assert (fetched.blocks, fetched.reason) == (4, Reason.OK)
    assert np.array_equal(fetched.data, DATA)
