"""Hostile peers of the TCP listener of a real daemon. It stays up, gives back what they took, and
serves the others meanwhile: through sockets always, over TCP as long as there are connections left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig
from kvstore_server.listeners import HANDSHAKE_MS
from tests.client_kit import model, rows, tokens
from tests.daemon import Daemon, make_daemon
from tests.integration.polling import within
from tests.tls_kit import HOST, Pki, address_of

pytestmark = pytest.mark.process

CALL_S = 20.0
CLOSED_S = HANDSHAKE_MS / 1e3 + 10
HANGING = 200
DESCRIPTORS = 1_024
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def daemon(pki: Pki, daemons: Callable[..., Daemon]) -> Daemon:
    return daemons(**pki.settings("a", "b"))


def sockets(daemon: Daemon) -> int:
    """How many it has open."""
    found = 0
    for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(fd).startswith("socket:")
    return found


class Others:
    """A tenant through its socket and one over TCP, who want their blocks all the while."""

    def __init__(self, daemon: Daemon, pki: Pki) -> None:
        deadline = {"deadline_ms": 10_000, "connect_timeout_ms": 10_000}
        by_socket = Client(daemon.data_sockets["b"], config=ClientConfig(**deadline))  # type: ignore[arg-type]
        by_tcp = Client(f"tcp://{daemon.ready['tcp']}", config=pki.config("a", **deadline))
        self.clients = {"socket": by_socket, "tcp": by_tcp}
        self.prompt, self.data = tokens(4), rows(4, 4096)
        self.spaces = {name: client.space(model()) for name, client in self.clients.items()}
        for space in self.spaces.values():
            assert space.push(self.prompt, self.data).stored == 4

    def served(self, *names: str) -> None:
        for name in names or self.spaces:
            space = self.spaces[name]
            fetched = space.fetch(space.keys(self.prompt))
            assert (fetched.blocks, fetched.reason) == (4, Reason.OK), (name, fetched)
            assert (fetched.data == self.data).all()

    def close(self) -> None:
        for client in self.clients.values():
            client.close()


@pytest.fixture
def others(daemon: Daemon, pki: Pki) -> Iterator[Others]:
    with contextlib.closing(Others(daemon, pki)) as both:
        yield both


def hung_up(sock: socket.socket) -> bool:
    """Whether the daemon ends the connection by itself. What it says before is read and dropped."""
    sock.settimeout(CLOSED_S)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except (ssl.SSLError, ConnectionError):
        pass
    return True


def client_hello(pki: Pki) -> bytes:
    """The first flight of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    half = pki.tls("a").wrap_bio(incoming, outgoing, server_hostname=HOST)
    with contextlib.suppress(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()


def test_handshakes_that_hang_end_and_cost_nobody_else(
    daemon: Daemon, pki: Pki, others: Others
) -> None:
    others.served()
    before = sockets(daemon)
    hello = client_hello(pki)
    said = [b"", hello[:1], hello[: len(hello) // 2], hello, b"\x16\x03\x01\x40\x00", PREFACE]
    with contextlib.ExitStack() as stack:
        hanging = []
        for number in range(HANGING):
            sock = stack.enter_context(socket.create_connection(address_of(daemon), CALL_S))
            sock.sendall(said[number % len(said)])
            hanging.append(sock)
        others.served()
        assert all(map(hung_up, hanging))
        others.served()
    assert within(CLOSED_S, lambda: sockets(daemon) <= before + 2)
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE + SETTINGS,
        b"\0" * 4096,
        b"\xff" * 4096,
        b"\x16\x03\x01\xff\xff" + b"\xff" * 65535,
        b"\x80\x2e\x01\x03\x01",
        bytes(range(256)) * 64,
    ],
)
def test_what_is_no_tls_ends(daemon: Daemon, others: Others, said: bytes) -> None:
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(socket.create_connection(address_of(daemon), CALL_S))
            for _ in range(10)
        ]
        for sock in peers:
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
        others.served()
        assert all(map(hung_up, peers))
    others.served()
    assert daemon.alive
    assert said[:16].hex() not in daemon.log()


@contextlib.contextmanager
def inside(daemon: Daemon, pki: Pki, certificate: str = "a") -> Iterator[ssl.SSLSocket]:
    """A connection that has shaken hands, without gRPC on this side."""
    with (
        socket.create_connection(address_of(daemon), CALL_S) as plain,
        pki.tls(certificate).wrap_socket(plain, server_hostname=HOST) as wrapped,
    ):
        yield wrapped


@pytest.mark.parametrize(
    "said",
    [
        b"",
        PREFACE[:10],
        PREFACE,
        b"GET / HTTP/1.1\r\n\r\n",
        PREFACE + b"\xff" * 64,
        PREFACE + SETTINGS + b"\xff\xff\xff\x01\x04\0\0\0\x01",  # HEADERS of 16 MiB
        PREFACE + SETTINGS + b"\0\0\x04\x01\x04\0\0\0\0\xff\xff\xff\xff",  # HEADERS of stream 0
    ],
)
def test_a_certificate_alone_does_not_keep_a_broken_connection(
    daemon: Daemon, pki: Pki, others: Others, said: bytes
) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(inside(daemon, pki)) for _ in range(5)]
        for one in connections:
            one.sendall(said)
        others.served()
        assert all(map(hung_up, connections))
    others.served()
    assert daemon.alive


def test_too_much_metadata_is_refused_and_takes_no_memory(
    daemon: Daemon, pki: Pki, others: Others
) -> None:
    """Also of those who would be let in."""
    token = pki.path("a.token").read_text().strip()
    for metadata in (
        [("x-big", "x" * (1 << 20))],
        [(f"x-{n}", "x" * 1_000) for n in range(1_000)],
        [("authorization", "Bearer " + "x" * (1 << 20))],
        [("authorization", f"Bearer {token}"), ("x-big", "x" * (1 << 20))],
    ):
        with pki.channel(daemon.ready["tcp"], "a", "") as channel:
            method: Any = channel.stream_stream("/grpc.health.v1.Health/Check")
            for _ in range(5):
                with pytest.raises(grpc.RpcError):
                    list(method(iter([b""]), metadata=tuple(metadata), timeout=CALL_S))
        others.served()
    assert token not in daemon.log()


def test_a_crowd_takes_its_share_of_descriptors_and_no_more(tmp_path: Path, pki: Pki) -> None:
    """More connections than are let in: what is over is closed, sockets serve as before, and TCP
    does when the crowd has gone.
    """
    prlimit = shutil.which("prlimit")
    if prlimit is None:
        pytest.skip("prlimit is absent")
    bound = DESCRIPTORS // 8
    limits = (prlimit, f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
    with (
        make_daemon(tmp_path, argv_prefix=limits, **pki.settings("a", "b")).start() as daemon,
        contextlib.closing(Others(daemon, pki)) as others,
    ):
        before = sockets(daemon)
        with contextlib.ExitStack() as stack:
            for _ in range(3 * bound):
                stack.enter_context(socket.create_connection(address_of(daemon), CALL_S))
            assert within(CALL_S, lambda: sockets(daemon) <= before + bound)
            others.served("socket")
            with Client(daemon.data_sockets["b"]) as late:
                assert late.connection(10_000).reason is Reason.OK
            assert sockets(daemon) <= before + bound + 8
        assert within(CLOSED_S, lambda: sockets(daemon) <= before + 8)
        others.served()
        assert daemon.stop() == 0
