"""Memory through a real daemon's fd socket: written, committed, read back, and given up again."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvstore.model.reasons import Reason
from kvstore.shm import ARENA_SEALS, STAGING_SEALS, map_region, recv_frame, seals_of, send_frame
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc, fd_pb2, store_pb2, store_pb2_grpc
from tests.daemon import Daemon

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
CALL_S = 10.0
KEY = bytes(range(32))


class Client:
    """The protocol by hand: one session with its fd socket."""

    def __init__(self, daemon: Daemon, channel: grpc.Channel) -> None:
        self.stub: Any = store_pb2_grpc.StoreStub(channel)
        attach = store_pb2.AttachRequest(protocol_major=1, client_name="test", group_id=b"g")
        self.stream = self.stub.Attach(attach)
        self.session = next(self.stream).welcome.session
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CALL_S)
        self.sock.connect(f"{daemon.data_socket}.fd")
        self.ask(hello=fd_pb2.FdHello(session=self.session))
        self.space_id = self.call(
            "Open", store_pb2.OpenRequest(fingerprint=_fingerprint())
        ).space_id

    def call(self, name: str, request: Any) -> Any:
        request.session = self.session
        return getattr(self.stub, name)(request, timeout=CALL_S)

    def ask(self, **request: Any) -> tuple[fd_pb2.FdReply, list[int]]:
        self.tell(**request)
        frame, fds = recv_frame(self.sock)
        return fd_pb2.FdReply.FromString(frame), fds

    def tell(self, **request: Any) -> None:
        send_frame(self.sock, fd_pb2.FdRequest(seq=1, **request).SerializeToString())

    def event(self) -> fd_pb2.FdReply:
        frame, fds = recv_frame(self.sock)
        assert not fds
        return fd_pb2.FdReply.FromString(frame)

    def put(self, key: bytes, byte: int) -> None:
        """Stores one block whose bytes are all `byte`."""
        reserve = store_pb2.ReserveRequest(space_id=self.space_id, chain=key)
        reserved = self.call("Reserve", reserve)
        assert reserved.lease_id, reserved
        reply, (fd,) = self.ask(get_staging=fd_pb2.GetStaging())
        assert seals_of(fd) & STAGING_SEALS == STAGING_SEALS
        staging = map_region(fd, reply.staging.total_bytes, writable=True, populate=False)
        os.close(fd)
        (offset,) = struct.unpack("<Q", reserved.offsets)
        staging.u8[offset : offset + reserved.part_bytes] = byte
        assert staging.close()
        committed = self.call("Commit", store_pb2.CommitRequest(lease_id=reserved.lease_id))
        assert committed.visible == 1, committed

    def close(self) -> None:
        self.stream.cancel()
        self.sock.close()


def _fingerprint() -> store_pb2.Fingerprint:
    return store_pb2.Fingerprint(
        identity=store_pb2.Identity(model_name="m", weights_revision="r1", config_digest="c" * 64),
        geometry=store_pb2.Geometry(attention="gqa", layers=2, kv_heads=2, head_size=8),
        encoding=store_pb2.Encoding(
            kv_dtype="float16",
            block_tokens=16,
            element_order="layer,kv,head,token,dim",
            layout_version="1",
            attention_backend="test",
            cpu_isa="test",
        ),
        placement=store_pb2.Placement(tensor_parallel=1, pipeline_parallel=1, context_parallel=1),
    )


def _stats(daemon: Daemon) -> admin_pb2.StatsReply:
    with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        reply: admin_pb2.StatsReply = stub.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
    return reply


def _until(what: Callable[[], object], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.01)


def test_what_one_client_commits_another_reads_through_its_own_map(daemons: Daemons) -> None:
    daemon = daemons()
    with grpc.insecure_channel(f"unix:{daemon.data_socket}") as channel:
        writer, reader = Client(daemon, channel), Client(daemon, channel)
        writer.put(KEY, 0xA5)
        leased = reader.call(
            "Acquire", store_pb2.AcquireRequest(space_id=reader.space_id, keys=KEY)
        )
        region_id, slot, generation = struct.unpack("<IIQ", leased.places)
        reply, (fd,) = reader.ask(get_region=fd_pb2.GetRegion(region_id=region_id))
        assert seals_of(fd) & ARENA_SEALS == ARENA_SEALS
        with pytest.raises(OSError, match=r"EPERM|EACCES|Permission|permitted|Bad file"):
            os.pwrite(fd, b"x", 0)
        info = reply.region
        region = map_region(fd, info.total_bytes, writable=False, populate=False)
        os.close(fd)
        assert int(region.generations(info.slots)[slot]) == generation
        block = region.slots2d(info.data_offset, info.slot_bytes, info.slots)[slot]
        assert bytes(block[: leased.block_bytes]) == b"\xa5" * leased.block_bytes
        del block
        released = reader.call("Release", store_pb2.ReleaseRequest(lease_ids=[leased.lease_id]))
        assert (released.released, released.unknown) == (1, 0)
        writer.close()
        reader.close()
    assert daemon.stop() == 0


def test_staging_is_asked_back_when_its_session_ends(daemons: Daemons) -> None:
    daemon = daemons()
    with grpc.insecure_channel(f"unix:{daemon.data_socket}") as channel:
        client = Client(daemon, channel)
        client.put(KEY, 1)
        held = _stats(daemon).tiers[0]
        assert held.staging_bytes > 0
        client.call("Detach", store_pb2.DetachRequest())
        unmap = client.event().unmap
        assert _stats(daemon).tiers[0].closing_regions == 1  # this process may still have it mapped
        client.tell(unmapped=fd_pb2.Unmapped(region_id=unmap.region_id))
        _until(lambda: _stats(daemon).tiers[0].closing_regions == 0)
        assert _stats(daemon).tiers[0].used_bytes < held.used_bytes
        client.close()
    assert daemon.stop() == 0


def test_a_killed_client_gives_everything_back_within_a_second(daemons: Daemons) -> None:
    daemon = daemons()
    code = (
        "import sys, grpc; from tests.daemon import Daemon\n"
        "from tests.e2e.test_fd_handover import *\n"
        "class D: data_socket = sys.argv[1]\n"
        "channel = grpc.insecure_channel('unix:' + D.data_socket)\n"
        "client = Client(D, channel); client.put(KEY, 7)\n"
        "client.call('Reserve', store_pb2.ReserveRequest(\n"
        "    space_id=client.space_id, chain=bytes(32)))\n"
        "client.call('Acquire', store_pb2.AcquireRequest(\n"
        "    space_id=client.space_id, keys=KEY, mode=store_pb2.LEASE_MODE_VIEW))\n"
        "print('holding', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, daemon.data_socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holding\n"
        stats = _stats(daemon)
        assert (stats.sessions, stats.view_leases, stats.write_leases) == (1, 1, 1)
        child.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        _until(lambda: _stats(daemon).sessions == 0)
        _until(lambda: _stats(daemon).tiers[0].closing_regions == 0)
        assert time.monotonic() - begin < 10.0  # promised: 1 s
    stats = _stats(daemon)
    assert (stats.view_leases, stats.write_leases, stats.tiers[0].staging_bytes) == (0, 0, 0)
    assert stats.tiers[0].blocks == 1
    assert daemon.stop() == 0


def test_a_client_of_another_tenant_sees_nothing(daemons: Daemons) -> None:
    daemon = daemons(tenants__alice__mode="0600", tenants__bob__mode="0600")
    with (
        grpc.insecure_channel(f"unix:{daemon.data_sockets['alice']}") as channel,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        stub: Any = store_pb2_grpc.StoreStub(channel)
        attach = store_pb2.AttachRequest(protocol_major=1, client_name="test", group_id=b"g")
        stream = stub.Attach(attach)
        secret = next(stream).welcome.session
        sock.settimeout(CALL_S)
        sock.connect(f"{daemon.data_sockets['bob']}.fd")
        hello = fd_pb2.FdRequest(seq=1, hello=fd_pb2.FdHello(session=secret))
        send_frame(sock, hello.SerializeToString())
        frame, fds = recv_frame(sock)
        reply = fd_pb2.FdReply.FromString(frame)
        assert (Reason(reply.reason), fds) == (Reason.PERMISSION_DENIED, [])
        assert sock.recv(1) == b""
        stream.cancel()
