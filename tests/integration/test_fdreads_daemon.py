"""Reads over the fd socket of a real daemon that dies, of one without descriptors, and by a client
that is frozen.
"""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore.shm import recv_frame, send_frame
from kvstore.wire.v1 import fd_pb2
from kvstore_client import Client, ClientConfig
from kvstore_client.channel import GrpcTransport
from kvstore_server.fdreads import READS_MAX
from tests.daemon import Daemon
from tests.e2e.stage import Child, Prompt, model, open_sockets
from tests.integration.polling import within
from tests.rawclient import RawAdmin, RawClient

pytestmark = pytest.mark.process

Start = Callable[..., Daemon]
WIDE = 1 << 16
SOON_S = 20.0
UNTOUCHED = 0xA5
CONFIG = ClientConfig(transport="stream", deadline_ms=20_000)


class Halting(GrpcTransport):
    """The first fd socket passes so many bytes on, says so, and waits; later ones pass all."""

    def __init__(
        self, target: str, left_bytes: list[int], halted: threading.Event, go_on: threading.Event
    ) -> None:
        super().__init__(target)
        self.halted = halted
        self.go_on = go_on
        self._left_bytes = left_bytes

    def dial_memory(self, timeout_s: float) -> socket.socket:
        there = super().dial_memory(timeout_s)
        if not self._left_bytes:
            return there
        ours, given = socket.socketpair()
        given.settimeout(timeout_s)
        threading.Thread(
            target=self._pass_on, args=(there, ours, self._left_bytes.pop()), daemon=True
        ).start()
        return given

    def _pass_on(self, there: socket.socket, ours: socket.socket, left_bytes: int) -> None:
        with there, ours, suppress(OSError):
            send_frame(there, recv_frame(ours)[0])
            while data := there.recv(min(1 << 16, left_bytes)):
                ours.sendall(data)
                left_bytes -= len(data)
                if not left_bytes:
                    self.halted.set()
                    self.go_on.wait(SOON_S)
                    left_bytes = 1 << 40


@pytest.mark.parametrize("passed_bytes", [1_000, WIDE * 20, WIDE * 40 + 5])
def test_a_daemon_killed_in_the_middle_of_a_read(daemons: Start, passed_bytes: int) -> None:
    daemon = daemons()
    prompt = Prompt(model(WIDE), 3, blocks=64)
    data = np.stack(prompt.rows())
    left_bytes = [passed_bytes]
    halted, go_on = threading.Event(), threading.Event()

    def transport() -> Halting:
        return Halting(daemon.data_socket, left_bytes, halted, go_on)

    with Client(daemon.data_socket, config=CONFIG, transport=transport) as client:
        space = client.space(prompt.fingerprint)
        assert space.push(prompt.keys, data).stored == 64
        out = np.full_like(data, UNTOUCHED)
        answers: list[Any] = []
        reader = threading.Thread(target=lambda: answers.append(space.fetch(prompt.keys, out)))
        reader.start()
        assert halted.wait(SOON_S)
        daemon.kill()
        go_on.set()
        reader.join(SOON_S)
        (fetched,) = answers
        whole = passed_bytes // WIDE
        assert fetched.blocks <= whole
        assert fetched.blocks >= whole // 16 * 16 - 16, "what was confirmed before stays good"
        assert fetched.reason is Reason.UNAVAILABLE
        assert np.array_equal(out[: fetched.blocks], data[: fetched.blocks])
        assert (out[-1] == UNTOUCHED).all()

        daemon.start()
        assert within(SOON_S, lambda: space.push(prompt.keys, data).stored == 64)
        again = space.fetch(prompt.keys, all_or_nothing=True)
        assert (again.blocks, again.reason) == (64, Reason.OK)
        assert np.array_equal(again.data, data)


def test_a_frozen_reader_counts_nothing_of_what_came_after_its_lease(daemons: Start) -> None:
    daemon = daemons(host__capacity_bytes="8MiB")
    prompt = Prompt(model(), 5, blocks=512)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        with Child("late_taker", daemon.data_socket, 500, 5, 512) as child:
            assert child.hear()["begun"]
            child.stop()
            assert within(SOON_S, lambda: not admin.stats().read_leases)
            for number in range(9):
                other = Prompt(model(), 1_000 + number, blocks=256)
                client.put(space, other.keys, other.rows())
            assert None in client.get(space, prompt.keys), "no slot has another block"
            child.wake()
            findings = child.ask()["findings"]
    assert "wrong" not in findings
    assert findings["miss"] >= 256, "what was not confirmed before the end of the lease"


def served_by_grpc_alone(space: Any, prompt: Prompt) -> None:
    fetched = space.fetch(prompt.keys)
    assert (fetched.blocks, fetched.reason) == (len(prompt.keys), Reason.OK)
    prompt.assert_right(list(fetched.data))
    whole = space.fetch(prompt.keys, all_or_nothing=True)
    assert (whole.blocks, whole.reason) == (0, Reason.NOT_SUPPORTED)


def test_a_daemon_without_descriptors_serves_reads_by_grpc(daemons: Start) -> None:
    daemon = daemons()
    prompt = Prompt(model(), 6, blocks=8)
    config = ClientConfig(transport="stream", deadline_ms=4_000)
    with Client(daemon.data_socket, config=config) as client:
        space = client.space(prompt.fingerprint)
        assert space.push(prompt.keys, np.stack(prompt.rows())).stored == 8
        assert space.fetch(prompt.keys, all_or_nothing=True).blocks == 8
        sockets = open_sockets(daemon.pid)
        usual = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, usual[1]))
        try:
            served_by_grpc_alone(space, prompt)
        finally:
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, usual)
        assert "accept failed" in daemon.log()
        assert within(SOON_S, lambda: space.fetch(prompt.keys, all_or_nothing=True).blocks == 8)
        assert within(SOON_S, lambda: open_sockets(daemon.pid) <= sockets), "none was lost"


def test_more_reads_than_a_tenant_may_have_go_through_grpc(daemons: Start) -> None:
    daemon = daemons()
    prompt = Prompt(model(WIDE), 7, blocks=64)
    with Client(daemon.data_socket, config=CONFIG) as client, ExitStack() as stack:
        space = client.space(prompt.fingerprint)
        assert space.push(prompt.keys, np.stack(prompt.rows())).stored == 64
        raw = stack.enter_context(RawClient(daemon.data_socket))
        leased = raw.acquire(raw.open(prompt.fingerprint).space_id, prompt.keys)
        asked = fd_pb2.FdFetch(session=raw.secret, lease_id=leased.lease_id, blocks=64, length=WIDE)
        standing: list[socket.socket] = []
        for _ in range(READS_MAX):
            standing.append(stack.enter_context(closing(socket.socket(socket.AF_UNIX))))
            standing[-1].settimeout(SOON_S)
            standing[-1].connect(f"{daemon.data_socket}.fd")
            request = fd_pb2.FdRequest(seq=1, fetch=asked)
            send_frame(standing[-1], request.SerializeToString())
            assert fd_pb2.FdReply.FromString(recv_frame(standing[-1])[0]).piece.length
        served_by_grpc_alone(space, prompt)
        standing[0].close()
        assert within(SOON_S, lambda: space.fetch(prompt.keys, all_or_nothing=True).blocks == 64)
