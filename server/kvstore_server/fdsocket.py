"""The fd socket: hands memory to clients, tells them what to unmap, and knows when they die.

Beside each tenant's data socket stands `<data socket>.fd`, a stream of length-prefixed messages
(protos: fd.proto). A connection must say Hello with the secret of a session of the same tenant;
anything else gets one constant answer. From then on the session lives as long as the connection and
the process: when either ends, everything that the session held is freed at once. Memory that a
process was given counts as held until the process says Unmapped or is dead. A connection that names
a lease instead is handed to `fdreads`.

Nothing a client does can block the loop or grow without bound: reads are small, frames at most 64
KiB, a handshake has a deadline, connections are counted, and a reader that lets answers pile up is
cut.

One event-loop thread. Built by the app; tests drive it with a fake store over real sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from kvstore.clock import Clock, SystemClock
from kvstore.model.reasons import Reason
from kvstore.shm import FRAME_BYTES_MAX, close_fds
from kvstore.store.values import DevicePool
from kvstore.wire.v1 import fd_pb2, store_pb2
from kvstore_server.fdreads import LeaseStore, Reads, wanted
from kvstore_server.logs import Throttled
from kvstore_server.peers import Process, Processes, peer_uid
from kvstore_server.regioninfo import RegionLike, pool_to_wire, region_to_wire

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
LINGER_S = 5.0  # that a client gets to say Unmapped after its session has ended
ACCEPT_RETRY_S = 0.1
WAITING_MAX = 64  # connections of a tenant that have not said Hello yet
READ_BYTES = 4096  # a call of the loop does little work for one client
QUEUED_FRAMES_MAX = 256
WELCOME_REGIONS_MAX = 1024
BACKLOG = 128

MISBEHAVED = frozenset({"denied", "handshake_late", "protocol", "slow"})

_LENGTH = struct.Struct("<I")
_FDS_MAX = 1


class SessionLike(Protocol):
    """What is needed of kvstore.store.Session."""

    @property
    def id(self) -> int: ...
    @property
    def ended(self) -> asyncio.Event: ...


class FdStore(LeaseStore, Protocol):
    """What is needed of kvstore.store.Store. Descriptors stay the store's; they are duplicated
    before they are sent."""

    @property
    def unmap_listeners(self) -> list[Callable[[int], None]]: ...

    def session_by_secret(self, secret: bytes, tenant: str) -> SessionLike | None: ...
    def bind_fd(self, session: Any) -> None: ...
    def end_session(self, session_id: int) -> None: ...
    def regions_of(self, tenant: str) -> Sequence[RegionLike]: ...
    def region_of(self, region_id: int, tenant: str) -> RegionLike | None: ...
    def region_fd(self, region_id: int, tenant: str) -> int | None: ...
    def device_pool(self, region_id: int, tenant: str) -> DevicePool | None: ...
    def staging_fd(self, session_id: int) -> tuple[int, int, int] | None: ...
    def holder_added(self, region_id: int) -> None: ...
    def holder_gone(self, region_id: int) -> None: ...


class _Queued(NamedTuple):
    data: memoryview
    fd: int | None  # ours, to be closed after it was sent


class FdSocket:
    """All fd sockets of the daemon. `counts` are plain counters for the metrics."""

    def __init__(
        self,
        store: FdStore,
        *,
        sessions_max: int,
        handshake_s: float = HANDSHAKE_S,
        clock: Clock | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.store = store
        self.handshake_s = handshake_s
        self.warn = Throttled(log, clock or SystemClock())
        self.bound: dict[int, Connection] = {}  # by session
        self.processes = Processes(self._process_died)
        self.connections: set[Connection] = set()
        self.reads = Reads(store, self.counts, self.warn)
        self._sessions_max = sessions_max
        self._listeners: dict[socket.socket, str] = {}
        # The store calls this in the middle of its own work; what follows may end sessions.
        store.unmap_listeners.append(self._unmap_soon)

    def listen(self, tenant: str, listener: socket.socket) -> None:
        """Serves `tenant` on a bound socket, which is taken over."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listeners[listener] = tenant
        self._loop().add_reader(listener, self._accept, listener)

    def stop_listening(self) -> None:
        """Takes no new connections; those that are there go on."""
        for listener in self._listeners:
            self._loop().remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def close(self) -> None:
        """Ends everything, sessions included."""
        self.stop_listening()
        for connection in list(self.connections):
            connection.close("daemon_stops")
        self.reads.close()
        self.processes.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # No descriptors or memory: the listener would stay readable and the loop spin.
            self.counts["accept_failed"] += 1
            self.warn.warning("accept", "fd socket: accept failed", error=error.strerror)
            self._loop().remove_reader(listener)
            self._loop().call_later(ACCEPT_RETRY_S, self._accept_again, listener)
            return
        sock.setblocking(False)
        tenant = self._listeners[listener]
        waiting = sum(one.waits_as(tenant) for one in self.connections)
        most = self._sessions_max + WAITING_MAX * len(self._listeners)
        if len(self.connections) >= most or waiting >= WAITING_MAX:
            self.counts["refused"] += 1
            sock.close()
            return
        self.counts["accepted"] += 1
        self.connections.add(Connection(self, sock, tenant))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop().add_reader(listener, self._accept, listener)

    def _unmap_soon(self, region_id: int) -> None:
        self._loop().call_soon(self._unmap, region_id)

    def _unmap(self, region_id: int) -> None:
        for connection in list(self.connections):
            if connection.concerns(region_id):
                connection.send(fd_pb2.FdReply(unmap=fd_pb2.Unmap(region_id=region_id)))

    def _process_died(self, process: Process) -> None:
        for connection in list(self.connections):
            if connection.process is process:
                connection.close("process_died")
        orphans, process.orphans = process.orphans, set()
        for region_id in orphans:
            self.store.holder_gone(region_id)

    @staticmethod
    def _loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()


class Connection:
    """One client's fd socket, from accept to close."""

    def __init__(self, server: FdSocket, sock: socket.socket, tenant: str) -> None:
        self.session: SessionLike | None = None
        self.process: Process | None = None
        self.held: set[int] = set()
        self._server = server
        self._store = server.store
        self._sock = sock
        self._tenant = tenant
        self._input = bytearray()
        self._received: list[int] = []
        self._output: deque[_Queued] = deque()
        self._closing = ""  # why, after the last answer
        self._closed = False
        self._hung_up = False  # the peer reads no more
        self._ended: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.call_later(server.handshake_s, self.close, "handshake_late")
        self._loop.add_reader(sock, self._readable)

    def waits_as(self, tenant: str) -> bool:
        """Whether it has not said Hello yet; counted by tenant, so that none keeps others out."""
        return self.session is None and self._tenant == tenant

    def concerns(self, region_id: int) -> bool:
        """Whether this client, or an earlier connection of its process, was given the region."""
        orphaned = self.process is not None and region_id in self.process.orphans
        return region_id in self.held or orphaned

    # ---------------------------------------------------------------- in

    def _readable(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._sock, READ_BYTES, _FDS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close("reset")
            return
        self._received += fds
        if not data:
            self.close("hung_up")
        elif flags & socket.MSG_CTRUNC or len(self._received) > _FDS_MAX:
            self.close("protocol")
        else:
            self._input += data
            self._take_frames()

    def _take_frames(self) -> None:
        while len(self._input) >= _LENGTH.size and not (self._closed or self._closing):
            (length,) = _LENGTH.unpack_from(self._input)
            if not 0 < length <= FRAME_BYTES_MAX:
                self.close("protocol")
                return
            end = _LENGTH.size + length
            if len(self._input) < end:
                return
            frame = bytes(self._input[_LENGTH.size : end])
            del self._input[:end]
            self._take(frame)

    def _take(self, frame: bytes) -> None:
        try:
            request = fd_pb2.FdRequest.FromString(frame)
        except DecodeError:
            self.close("protocol")
            return
        kind = request.WhichOneof("request")
        if kind is None or request.seq == 0:
            self.close("protocol")
        elif self.session is None and kind == "fetch":
            self._read(request)
        elif self.session is None:
            self._hello(request)
        elif kind == "unmapped":
            self._unmapped(request.unmapped.region_id)
        elif self.session.ended.is_set():
            self._refuse(request.seq, Reason.SESSION_UNKNOWN)
        elif kind == "get_region":
            self._give_region(request.seq, request.get_region.region_id)
        elif kind == "get_device":
            self._give_device(request.seq, request.get_device.region_id)
        elif kind == "get_staging":
            self._give_staging(request.seq, self.session.id)
        else:
            self.close("protocol")  # a second Hello
        close_fds(self._received)

    def _hello(self, request: fd_pb2.FdRequest) -> None:
        session = self._store.session_by_secret(request.hello.session, self._tenant)
        if session is None or session.ended.is_set() or session.id in self._server.bound:
            # One answer for a wrong secret, another tenant's, a second socket, and no Hello at all.
            self._deny(request.seq)
            return
        self._deadline.cancel()
        sent_pidfd = self._received.pop() if self._received else None
        self.process = self._server.processes.join(self._sock, sent_pidfd)
        self.session = session
        self._server.bound[session.id] = self
        self._store.bind_fd(session)
        self._ended = self._loop.create_task(self._linger(session))
        regions = [region_to_wire(one, None) for one in self._store.regions_of(self._tenant)]
        welcome = fd_pb2.FdWelcome(regions=regions[:WELCOME_REGIONS_MAX])
        self.send(fd_pb2.FdReply(seq=request.seq, reason=_OK, welcome=welcome))

    def _deny(
        self, seq: int, reason: Reason = Reason.PERMISSION_DENIED, why: str = "denied"
    ) -> None:
        self._server.counts[why] += 1
        self._closing = why
        self._refuse(seq, reason)

    def _read(self, request: fd_pb2.FdRequest) -> None:
        """Hands the socket over to a read of a lease, which is nobody's life."""
        session = self._store.session_by_secret(request.fetch.session, self._tenant)
        lease = None if session is None else wanted(self._store, session.id, request.fetch)
        if session is None or lease is None:
            # The same for a wrong secret, another's lease, one that has ended, or none.
            self._deny(request.seq)
        elif self._server.reads.full(self._tenant):
            self._deny(request.seq, Reason.LIMIT_QUEUE, "reads_full")
        elif self._input or self._received:
            self.close("protocol")
        else:
            self._closed = True
            self._deadline.cancel()
            self._loop.remove_reader(self._sock)
            self._server.connections.discard(self)
            self._server.reads.begin(self._sock, self._tenant, session, request, lease)

    async def _linger(self, session: SessionLike) -> None:
        await session.ended.wait()
        self._deadline = self._loop.call_later(LINGER_S, self.close, "session_ended")

    def _give_region(self, seq: int, region_id: int) -> None:
        fd = self._store.region_fd(region_id, self._tenant)
        region = self._store.region_of(region_id, self._tenant)
        if fd is None or region is None:
            self._refuse(seq, Reason.REGION_UNKNOWN)
            return
        self._hold(region_id)
        info = region_to_wire(region, self._store.device_pool(region_id, self._tenant))
        self.send(fd_pb2.FdReply(seq=seq, reason=_OK, region=info), fd)

    def _give_device(self, seq: int, region_id: int) -> None:
        pool = self._store.device_pool(region_id, self._tenant)
        if pool is None:
            self._refuse(seq, Reason.REGION_UNKNOWN)
            return
        self._hold(region_id)
        reply = fd_pb2.FdReply(seq=seq, reason=_OK, device=pool_to_wire(pool))
        self.send(reply, pool.fd if pool.fd >= 0 else None)

    def _give_staging(self, seq: int, session_id: int) -> None:
        staging = self._store.staging_fd(session_id)
        if staging is None:
            self._refuse(seq, Reason.REGION_UNKNOWN)
            return
        region_id, total_bytes, fd = staging
        self._hold(region_id)
        info = fd_pb2.StagingInfo(region_id=region_id, total_bytes=total_bytes)
        self.send(fd_pb2.FdReply(seq=seq, reason=_OK, staging=info), fd)

    def _hold(self, region_id: int) -> None:
        if region_id not in self.held:
            self.held.add(region_id)
            self._store.holder_added(region_id)

    def _unmapped(self, region_id: int) -> None:
        process = self.process
        if region_id in self.held:
            self.held.discard(region_id)
        elif process is not None and region_id in process.orphans:
            process.orphans.discard(region_id)
        else:
            return
        self._store.holder_gone(region_id)

    # ---------------------------------------------------------------- out

    def _refuse(self, seq: int, reason: Reason) -> None:
        self.send(fd_pb2.FdReply(seq=seq, reason=store_pb2.Reason.ValueType(reason)))

    def send(self, reply: fd_pb2.FdReply, fd: int | None = None) -> None:
        """Sends a frame with `fd` on its first byte. What the peer does not take now is queued,
        with a duplicate of `fd`. Never blocks.
        """
        if self._closed or self._hung_up:
            return
        if len(self._output) >= QUEUED_FRAMES_MAX:
            self.close("slow")
            return
        payload = reply.SerializeToString()
        data = memoryview(_LENGTH.pack(len(payload)) + payload)
        if fd is not None and not self._output:
            # At once if possible: a daemon without a descriptor to spare can still hand this out.
            sent = self._sent_now(data, fd)
            if sent:
                data, fd = data[sent:], None
        try:
            own = None if fd is None else os.dup(fd)
        except OSError:
            self.close("no_descriptors")
            return
        if data:
            self._output.append(_Queued(data, own))
        if len(self._output) == 1:
            self._writable()

    def _sent_now(self, data: memoryview, fd: int) -> int:
        """Bytes that the peer has taken, with the descriptor; 0 if none yet, or never."""
        try:
            return socket.send_fds(self._sock, [data], [fd], socket.MSG_NOSIGNAL)
        except OSError:
            return 0  # what is queued finds out why

    def _writable(self) -> None:
        while self._output:
            item = self._output[0]
            try:
                fds = [] if item.fd is None else [item.fd]
                sent = socket.send_fds(self._sock, [item.data], fds, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._writable)
                return
            except OSError:
                self._hung_up_on()
                return
            if item.fd is not None:
                os.close(item.fd)
            if sent == len(item.data):
                self._output.popleft()
            else:
                self._output[0] = _Queued(item.data[sent:], None)
        self._loop.remove_writer(self._sock)
        if self._closing:
            self.close(self._closing)

    def _hung_up_on(self) -> None:
        """The peer takes no more. What it said before, such as Unmapped, is still to be read: the
        reader then finds the end.
        """
        self._loop.remove_writer(self._sock)
        close_fds([item.fd for item in self._output if item.fd is not None])
        self._output.clear()
        self._hung_up = True
        if self._closing:
            self.close(self._closing)

    # ---------------------------------------------------------------- end

    def close(self, why: str) -> None:
        """Ends the connection and its session. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._server.counts[f"closed_{why}"] += 1
        if why in MISBEHAVED:
            self._server.warn.warning(
                why, "fd socket: client cut", why=why, tenant=self._tenant, uid=peer_uid(self._sock)
            )
        self._deadline.cancel()
        if self._ended is not None:
            self._ended.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        close_fds(self._received)
        close_fds([item.fd for item in self._output if item.fd is not None])
        self._output.clear()
        self._server.connections.discard(self)
        if self.session is not None and self.process is not None:
            self._let_go(self.session, self.process)

    def _let_go(self, session: SessionLike, process: Process) -> None:
        del self._server.bound[session.id]
        gone, self.held = self.held, set()
        if process.pidfd is not None and not process.dead:
            # The process may have it mapped still; a region that it held twice is held once now.
            gone, process.orphans = gone & process.orphans, process.orphans | gone
        for region_id in gone:
            self._store.holder_gone(region_id)
        self._store.end_session(session.id)
        self._server.processes.leave(process)


_OK = store_pb2.Reason.ValueType(Reason.OK)
