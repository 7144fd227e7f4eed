"""A client of the bare protocol, for what the SDK would never do.

It speaks the generated stubs and the fd socket and maps regions, and promises nothing: no deadline
is kept, nothing is retried, nothing is released by itself. Errors of a call come out as `Refused`.
Everything that a call takes can be overridden, so that ids of others, late writes and wrong sizes
can be sent.

    with RawClient(daemon.data_socket) as client:
        space = client.open(MODEL).space_id
        client.put(space, keys, rows)
        rows = client.get(space, keys)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason
from kvstore.shm import MappedRegion, map_region, recv_frame
from kvstore.wire import convert, status
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc, fd_pb2, store_pb2_grpc
from kvstore.wire.v1 import store_pb2 as pb

Bytes = NDArray[np.uint8]
Reply = TypeVar("Reply")

CALL_S = 20.0
"""Longest that a call of a test may take: a daemon that does not answer fails the test."""
PATIENCE_S = 3.0
"""How long a put asks again while there is no room."""


class Refused(Exception):
    """A call that ended with a status. `answer` is all that a caller can see of it."""

    def __init__(self, error: grpc.RpcError) -> None:
        call: Any = error
        metadata = call.trailing_metadata() or ()
        details = [value for key, value in metadata if key == status.DETAIL_KEY]
        parsed = pb.ErrorDetail.FromString(details[0]) if details else pb.ErrorDetail()
        self.code: grpc.StatusCode = call.code()
        self.text: str = call.details()
        self.reason = Reason.from_wire(parsed.reason)
        self.detail = parsed
        self.answer = (self.code.name, self.text, tuple(details))
        super().__init__(f"{self.code.name}: {self.text}")


class Gone(AssertionError):
    """A region was closed before it was asked for: whoever is slow loses his lease, and what it was
    on.
    """


def refused_as(call: Callable[[], Reply]) -> Reply:
    """Runs a call; its status comes out as `Refused`."""
    try:
        return call()
    except grpc.RpcError as error:
        raise Refused(error) from None


def reason(number: int) -> Reason:
    """Of a reply's field."""
    return Reason.from_wire(number)


def channel(path: str) -> grpc.Channel:
    """A connection of its own to a unix socket."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_retries", 0),
    ]
    return grpc.insecure_channel(f"unix:{path}", options=options)


class Place(NamedTuple):
    """Where a leased block is; region 0: absent."""

    region: int
    slot: int
    generation: int


@dataclass
class Leased:
    """A read lease with the places of its blocks."""

    lease_id: int
    places: list[Place]
    block_bytes: int
    reply: pb.AcquireReply

    @property
    def reason(self) -> Reason:
        return reason(self.reply.reason)

    @property
    def blocks(self) -> int:
        """How many are there."""
        return sum(place.region != 0 for place in self.places)


@dataclass
class Mapped:
    """A region in this process."""

    info: pb.RegionInfo
    memory: MappedRegion
    fd: int
    device: MappedRegion | None = None
    """The memory of a device region, where CPU memory stands for a GPU's."""

    def slot(self, index: int, length: int) -> Bytes:
        if self.device is not None:
            return self.device.u8[index * self.info.slot_bytes :][:length]
        at = self.info.data_offset + index * self.info.slot_bytes
        return self.memory.u8[at : at + length]

    def generation(self, index: int) -> int:
        return int(self.memory.generations(self.info.slots)[index])


def send(sock: socket.socket, frame: bytes, fd: int | None = None) -> None:
    """One frame of the fd socket, with a descriptor on its first byte. A peer that answers and
    hangs up at once is heard all the same.
    """
    data = memoryview(len(frame).to_bytes(4, "little") + frame)
    if fd is not None:
        data = data[socket.send_fds(sock, [data], [fd]) :]
    if data:
        sock.sendall(data)


class FdChannel:
    """The fd socket of one session. Requests are answered in order; events are kept in `unmaps`."""

    def __init__(self, data_socket: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(CALL_S)
        self.sock.connect(f"{data_socket}.fd")
        self.unmaps: list[int] = []
        self._seq = 0

    def ask(self, **request: Any) -> tuple[fd_pb2.FdReply, list[int]]:
        """Sends a request and waits for its answer, which is given whatever it says."""
        self._seq += 1
        send(self.sock, fd_pb2.FdRequest(seq=self._seq, **request).SerializeToString())
        while True:
            reply, fds = self.receive()
            if reply.seq == self._seq:
                return reply, fds

    def hello(self, secret: bytes) -> fd_pb2.FdReply:
        """Says who this is, with this process's own pidfd as a client in a container would."""
        self._seq += 1
        request = fd_pb2.FdRequest(seq=self._seq, hello=fd_pb2.FdHello(session=secret))
        own = os.pidfd_open(os.getpid())
        try:
            send(self.sock, request.SerializeToString(), own)
        finally:
            os.close(own)
        while True:
            reply, _ = self.receive()
            if reply.seq:
                return reply

    def bare(self, length: int) -> bytes:
        """Bytes that follow a frame."""
        data = bytearray()
        while len(data) < length:
            piece = self.sock.recv(length - len(data))
            if not piece:
                raise EOFError("the fd socket hung up")
            data += piece
        return bytes(data)

    def receive(self) -> tuple[fd_pb2.FdReply, list[int]]:
        frame, fds = recv_frame(self.sock)
        reply = fd_pb2.FdReply.FromString(frame)
        if reply.WhichOneof("reply") == "unmap":
            self.unmaps.append(reply.unmap.region_id)
        return reply, fds

    def drain(self, seconds: float = 0.0) -> list[int]:
        """The regions that the daemon wants unmapped, by what has come within `seconds`."""
        self.sock.settimeout(max(seconds, 0.001))
        try:
            while True:
                self.receive()
        except TimeoutError:
            return self.unmaps
        finally:
            self.sock.settimeout(CALL_S)

    def unmapped(self, region_id: int) -> None:
        request = fd_pb2.FdRequest(seq=1, unmapped=fd_pb2.Unmapped(region_id=region_id))
        send(self.sock, request.SerializeToString())

    def close(self) -> None:
        self.sock.close()


class RawClient:
    """One session. `fd=False` leaves the fd socket out: the stream is the session's life then. So
    does `wire`, a channel by another way than the socket.
    """

    def __init__(
        self,
        data_socket: str,
        *,
        group: bytes = b"engine",
        engine_id: str = "raw",
        major: int = 1,
        minor: int = 0,
        fd: bool = True,
        wire: grpc.Channel | None = None,
    ) -> None:
        self.data_socket = data_socket
        self.call_s = CALL_S
        self.read_end = Reason.OK
        self.channel = channel(data_socket) if wire is None else wire
        self.stub = store_pb2_grpc.StoreStub(self.channel)
        self.regions: dict[int, Mapped] = {}
        self.staging: Mapped | None = None
        self.fd: FdChannel | None = None
        self._stream: Any = self.stub.Attach(
            pb.AttachRequest(
                protocol_major=major,
                protocol_minor=minor,
                client_name="rawclient",
                engine_id=engine_id,
                group_id=group,
            )
        )
        try:
            self.welcome: pb.Welcome = refused_as(lambda: next(self._stream)).welcome
            self.secret = self.welcome.session
            if fd and wire is None:
                self.fd = FdChannel(data_socket)
                said = self.fd.hello(self.secret)
                assert reason(said.reason) is Reason.OK, said
                self.end_stream()
        except BaseException:
            self.close()
            raise

    def end_stream(self) -> None:
        """Ends the Attach stream; the fd socket is the session's life from then on."""
        self._stream.cancel()

    def next_event(self) -> pb.AttachEvent:
        """The next event of the Attach stream."""
        event: pb.AttachEvent = refused_as(lambda: next(self._stream))
        return event

    # ------------------------------------------------------------------ calls

    def call(self, method: str, request: Any) -> Any:
        """Any unary call, with this session's secret unless the request has one."""
        if not request.session:
            request.session = self.secret
        return refused_as(lambda: getattr(self.stub, method)(request, timeout=self.call_s))

    def open(self, fingerprint: Fingerprint) -> pb.OpenReply:
        request = pb.OpenRequest(fingerprint=convert.fingerprint_to_wire(fingerprint))
        reply: pb.OpenReply = self.call("Open", request)
        return reply

    def lookup(self, space: int, keys: Sequence[bytes], **more: Any) -> pb.GroupHit:
        query = pb.Query(space_id=space, keys=b"".join(keys))
        reply: pb.LookupReply = self.call("Lookup", pb.LookupRequest(queries=[query], **more))
        return reply.groups[0]

    def acquire(
        self, space: int, keys: Sequence[bytes], *, view: bool = False, **more: Any
    ) -> Leased:
        mode = pb.LEASE_MODE_VIEW if view else pb.LEASE_MODE_COPY
        request = pb.AcquireRequest(space_id=space, keys=b"".join(keys), mode=mode, **more)
        reply: pb.AcquireReply = self.call("Acquire", request)
        places = [Place(*map(int, place)) for place in convert.unpack_places(reply.places)]
        return Leased(reply.lease_id, places, reply.block_bytes, reply)

    def release(self, *lease_ids: int) -> pb.ReleaseReply:
        reply: pb.ReleaseReply = self.call("Release", pb.ReleaseRequest(lease_ids=lease_ids))
        return reply

    def reserve(
        self, space: int, chain: Sequence[bytes], *, first: int = 0, **more: Any
    ) -> pb.ReserveReply:
        request = pb.ReserveRequest(
            space_id=space, chain=b"".join(chain), first_block=first, **more
        )
        reply: pb.ReserveReply = self.call("Reserve", request)
        return reply

    def commit(self, lease_id: int, **more: Any) -> pb.CommitReply:
        reply: pb.CommitReply = self.call("Commit", pb.CommitRequest(lease_id=lease_id, **more))
        return reply

    def abort(self, lease_id: int) -> pb.AbortReply:
        reply: pb.AbortReply = self.call("Abort", pb.AbortRequest(lease_id=lease_id))
        return reply

    def explain(self, space: int, keys: Sequence[bytes]) -> pb.ExplainReply:
        request = pb.ExplainRequest(space_id=space, keys=b"".join(keys))
        reply: pb.ExplainReply = self.call("Explain", request)
        return reply

    def fetch(self, space: int, keys: Sequence[bytes], **more: Any) -> list[pb.FetchChunk]:
        """The byte stream, message by message."""
        request = pb.FetchRequest(session=self.secret, space_id=space, keys=b"".join(keys), **more)
        return refused_as(lambda: list(self.stub.Fetch(request, timeout=CALL_S)))

    def push(self, chunks: Iterable[pb.PushChunk]) -> pb.PushReply:
        reply: pb.PushReply = refused_as(lambda: self.stub.Push(iter(chunks), timeout=CALL_S))
        return reply

    def detach(self) -> None:
        self.call("Detach", pb.DetachRequest())

    # ------------------------------------------------------------------ memory

    def the_fd(self) -> FdChannel:
        assert self.fd is not None, "a session without an fd socket has no memory"
        return self.fd

    def region(self, region_id: int) -> Mapped:
        """The region, mapped; asked for once."""
        mapped = self.regions.get(region_id)
        if mapped is None:
            request = fd_pb2.GetRegion(region_id=region_id)
            reply, fds = self.the_fd().ask(get_region=request)
            if reply.WhichOneof("reply") != "region":
                raise Gone(f"region {region_id}: {reply}")
            mapped = self.adopt(reply.region, fds[0])
        return mapped

    def adopt(self, info: pb.RegionInfo, fd: int) -> Mapped:
        """Maps a region whose descriptor has come."""
        memory = map_region(fd, info.total_bytes, writable=False, populate=False)
        mapped = self.regions[info.region_id] = Mapped(info, memory, fd)
        if info.HasField("device"):
            mapped.device = self._open_device(info.region_id)
        return mapped

    def _open_device(self, region_id: int) -> MappedRegion:
        reply, fds = self.the_fd().ask(get_device=fd_pb2.GetDevice(region_id=region_id))
        if reply.WhichOneof("reply") != "device":
            raise Gone(f"device memory of region {region_id}: {reply}")
        assert reply.device.kind == pb.DEVICE_HANDLE_KIND_HOST_FILE, "there is no GPU to open it on"
        memory = map_region(fds[0], reply.device.mapped_bytes, writable=False, populate=False)
        os.close(fds[0])
        return memory

    def staging_map(self) -> Mapped:
        """This session's staging, mapped for writing."""
        if self.staging is None:
            reply, fds = self.the_fd().ask(get_staging=fd_pb2.GetStaging())
            if reply.WhichOneof("reply") != "staging":
                raise Gone(f"staging: {reply}")
            total = reply.staging.total_bytes
            memory = map_region(fds[0], total, writable=True, populate=False)
            info = pb.RegionInfo(region_id=reply.staging.region_id, total_bytes=total)
            self.staging = Mapped(info, memory, fds[0])
        return self.staging

    def unmap(self) -> None:
        """Does what the daemon asked for: unmaps closed regions and says so."""
        for region_id in self.the_fd().drain():
            self._forget(self.regions.pop(region_id, None))
            if self.staging is not None and self.staging.info.region_id == region_id:
                self._forget(self.staging)
                self.staging = None
            self.the_fd().unmapped(region_id)
        self.the_fd().unmaps.clear()

    @staticmethod
    def _forget(mapped: Mapped | None) -> None:
        if mapped is not None:
            if mapped.device is not None:
                mapped.device.close()
            mapped.memory.close()
            os.close(mapped.fd)

    def write(self, offset: int, data: Bytes) -> None:
        """Into the staging region, lease or not."""
        self.staging_map().memory.u8[offset : offset + len(data)] = data

    def fill(self, reserved: pb.ReserveReply, rows: Sequence[Bytes]) -> None:
        """Writes the wanted blocks of a reservation; `rows` has one a block of the chain."""
        wanted = convert.unpack_u32(reserved.wanted)
        offsets = convert.unpack_u64(reserved.offsets)
        staging = self.staging
        if staging is not None and staging.info.region_id != reserved.staging_region_id:
            self.unmap()  # it was closed, and there is another one
        for index, offset in zip(wanted, offsets, strict=True):
            self.write(int(offset), rows[int(index)])

    # ------------------------------------------------------------------ whole operations

    def put(
        self,
        space: int,
        chain: Sequence[bytes],
        rows: Sequence[Bytes],
        *,
        patience_s: float = PATIENCE_S,
        **more: Any,
    ) -> pb.CommitReply:
        """Reserves, fills and commits; windows of staging one after the other. Where there is no
        room yet it asks again, for a while: a region that changes hands has to be let go first.
        """
        total = pb.CommitReply(reason=pb.REASON_OK)
        first = 0
        patience = time.monotonic() + patience_s
        while True:
            self.unmap()
            reserved = self.reserve(space, chain, first=first, **more)
            busy = reserved.reason == pb.REASON_STAGING_BUSY
            if not reserved.lease_id:
                total.reason = reserved.reason
                full = reserved.reason == pb.REASON_NO_SPACE and first == 0
                if not (busy or full) or time.monotonic() > patience:
                    return total
                self.the_fd().drain(0.002)
                continue
            self.fill(reserved, rows)
            done = self.commit(reserved.lease_id)
            total.visible += done.visible
            total.waiting += done.waiting
            total.failed += done.failed
            total.reason = reserved.reason if done.reason == pb.REASON_OK else done.reason
            first = int(convert.unpack_u32(reserved.wanted)[-1]) + 1
            if not busy or first >= len(chain):
                return total

    def copy(self, leased: Leased) -> list[Bytes | None]:
        """The blocks, None where absent or where the slot holds another one by now."""
        rows: list[Bytes | None] = []
        for place in leased.places:
            if not place.region:
                rows.append(None)
                continue
            mapped = self.region(place.region)
            row = mapped.slot(place.slot, leased.block_bytes).copy()
            same = mapped.generation(place.slot) == place.generation
            rows.append(row if same else None)
        return rows

    def read(
        self, leased: Leased, meanwhile: Callable[[], object] | None = None
    ) -> list[Bytes | None]:
        """As `copy`, sent over the fd socket: a connection for each run of blocks. `read_end` is
        why the last one ended. meanwhile: called when the first piece of one is here; a daemon
        that has hung up by then has said nothing more.
        """
        rows: list[Bytes | None] = []
        for there, places in itertools.groupby(leased.places, lambda place: bool(place.region)):
            blocks = len(list(places))
            if there:
                rows += self._sent(leased, len(rows), blocks, meanwhile)
            else:
                rows += [None] * blocks
        return rows

    def _sent(
        self, leased: Leased, first: int, blocks: int, meanwhile: Callable[[], object] | None
    ) -> list[Bytes | None]:
        width = leased.block_bytes
        fetch = fd_pb2.FdFetch(
            session=self.secret, lease_id=leased.lease_id, first=first, blocks=blocks, length=width
        )
        reply, data = fd_pb2.FdReply(), bytearray()
        wire = FdChannel(self.data_socket)
        try:
            reply, _ = wire.ask(fetch=fetch)
            while reply.piece.length:
                assert (reply.piece.block, reply.piece.offset) == divmod(len(data), width)
                data += wire.bare(reply.piece.length)
                if meanwhile is not None and len(data) == reply.piece.length:
                    meanwhile()
                reply, _ = wire.receive()
            self.read_end = reason(reply.reason)
        except (EOFError, ConnectionError):
            if meanwhile is None:
                raise
            self.read_end = Reason.UNAVAILABLE
        finally:
            wire.close()
        # What was sent counts as far as the last frame says.
        rows = np.frombuffer(bytes(data[: reply.piece.block * width]), np.uint8).reshape(-1, width)
        return [*rows, *[None] * (blocks - len(rows))]

    def get(self, space: int, keys: Sequence[bytes], **more: Any) -> list[Bytes | None]:
        """Acquires, copies, verifies, releases."""
        self.unmap()
        leased = self.acquire(space, keys, **more)
        if not leased.lease_id:
            return [None] * len(keys)
        try:
            return self.copy(leased)
        finally:
            self.release(leased.lease_id)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Unmaps everything, says so, and closes."""
        mapped = [*self.regions.values(), *([self.staging] if self.staging else [])]
        for region in mapped:
            self._forget(region)
            with contextlib.suppress(OSError):
                self.the_fd().unmapped(region.info.region_id)
        self.regions.clear()
        self.staging = None
        self.vanish()

    def vanish(self) -> None:
        """Closes the sockets without a word; what is mapped stays mapped."""
        if self.fd is not None:
            self.fd.close()
        self._stream.cancel()
        self.channel.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawAdmin:
    """The admin service: `admin.call("Stats")`, `admin.call("Pin", space_id=1, keys=...)`."""

    def __init__(self, admin_socket: str) -> None:
        self.call_s = CALL_S
        self.channel = channel(admin_socket)
        self.stub = admin_pb2_grpc.AdminStub(self.channel)

    def call(self, method: str, **fields: Any) -> Any:
        service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
        request = getattr(admin_pb2, service.methods_by_name[method].input_type.name)(**fields)
        return refused_as(lambda: getattr(self.stub, method)(request, timeout=self.call_s))

    def stats(self) -> admin_pb2.StatsReply:
        reply: admin_pb2.StatsReply = self.call("Stats")
        return reply

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> RawAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def bytes_method(
    path: str, method: str, *, streams: bool = False
) -> Iterator[Callable[[bytes], bytes]]:
    """A call of the data service that sends and receives bare bytes: what no message class would
    encode can be sent, negative numbers and unknown fields included. Of a stream, the first answer.
    """
    with channel(path) as wire:
        name = f"/kvstore.v1.Store/{method}"
        unary: Any = wire.unary_unary(name)
        stream: Any = wire.unary_stream(name)

        def call(request: bytes) -> bytes:
            if streams:
                return bytes(refused_as(lambda: next(stream(request, timeout=CALL_S))))
            return bytes(refused_as(lambda: unary(request, timeout=CALL_S)))

        yield call
