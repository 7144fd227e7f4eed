"""Reads over the fd socket: the bytes of a lease's blocks, for clients that cannot map memory.

A connection that begins with FdFetch is one read of one copy lease (protos: fd.proto). Its bytes go
from the arena to the kernel without a copy in between, by pieces of at most 1 MiB. Before each call
of the kernel the lease is looked up: while it lives, nothing else is written to its slots. After a
piece its generations are compared, and only the frame that follows says that it counts; a piece
whose lease ended in the middle is filled up with zeros and disowned.

One call of the kernel a turn of the loop, none that blocks, nothing queued here: the next piece is
made when the peer has taken the last one. Who takes none is cut a second after the deadline of the
lease. Whatever the peer says after its request ends the read.

One event-loop thread; used by `fdsocket` alone.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from kvstore.clock import Clock
from kvstore.model.layout import Layout
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import Place
from kvstore.wire.v1 import fd_pb2, store_pb2
from kvstore_server.logs import Throttled
from kvstore_server.peers import peer_uid

READS_MAX = 64
"""Of a tenant at a time; who comes then is told to use Fetch."""
PIECE_BYTES = 1 << 20
BLOCKS_MAX = 256
"""In one piece: their addresses and generations are looked up one by one."""
SEND_BYTES = 1 << 20
"""Offered to the kernel in one call; it takes what its buffer has room for."""
BUFFER_BYTES = 256 << 10
"""Of the kernel, which doubles it: each time that it is full costs two wake-ups. Less than a piece,
so that not much is under way for a lease that has ended.
"""
LINGER_S = 1.0
"""That a read outlives its lease, to say that it has ended."""

_LENGTH = struct.Struct("<I")
_ZEROS = memoryview(bytes(SEND_BYTES))


class ReaderSession(Protocol):
    """What is needed of kvstore.store.Session."""

    @property
    def id(self) -> int: ...
    @property
    def ended(self) -> asyncio.Event: ...


class SlotLike(Protocol):
    """What is needed of kvstore.core.pools.Slot."""

    def place(self) -> Place: ...


class SpaceLike(Protocol):
    """What is needed of kvstore.core.spaces.Space."""

    @property
    def id(self) -> int: ...
    @property
    def layout(self) -> Layout: ...


class LeaseLike(Protocol):
    """What is needed of kvstore.core.leases.ReadLease."""

    @property
    def until_ns(self) -> int | None: ...
    @property
    def slots(self) -> Sequence[SlotLike | None]: ...
    @property
    def space(self) -> SpaceLike: ...


class LeaseBook(Protocol):
    """What is needed of kvstore.core.core.Core."""

    def leased(self, session: int, lease_id: int) -> LeaseLike | None: ...
    def space_of(self, session: int, space_id: int) -> Any: ...


class LeaseStore(Protocol):
    """What is needed of kvstore.store.Store."""

    @property
    def core(self) -> LeaseBook: ...
    @property
    def clock(self) -> Clock: ...

    def block_view(self, place: Place, length: int) -> Any: ...
    def generation(self, place: Place) -> int: ...


def wanted(store: LeaseStore, session_id: int, asked: fd_pb2.FdFetch) -> LeaseLike | None:
    """The lease, if it is the session's, lives, and holds everything that is asked for."""
    lease = store.core.leased(session_id, asked.lease_id)
    if lease is None or not (asked.blocks and asked.length):
        return None
    slots = lease.slots[asked.first : asked.first + asked.blocks]
    inside = asked.offset + asked.length <= lease.space.layout.block_bytes
    return lease if inside and len(slots) == asked.blocks and None not in slots else None


class Reads:
    """All reads of the daemon. `sent_bytes`: of blocks, for the metrics."""

    def __init__(self, store: LeaseStore, counts: Counter[str], warn: Throttled) -> None:
        self.store = store
        self.counts = counts
        self.warn = warn
        self.running: set[Read] = set()
        self.sent_bytes = 0
        self.linger_s = LINGER_S

    def __len__(self) -> int:
        return len(self.running)

    def full(self, tenant: str) -> bool:
        """Whether this tenant has as many as it may."""
        return sum(one.tenant == tenant for one in self.running) >= READS_MAX

    def begin(
        self,
        sock: socket.socket,
        tenant: str,
        session: ReaderSession,
        request: fd_pb2.FdRequest,
        lease: LeaseLike,
    ) -> None:
        """Takes a non-blocking socket over. `lease` is what `wanted` gave for the request."""
        self.counts["reads"] += 1
        self.running.add(Read(self, sock, tenant, session, request, lease))

    def close(self) -> None:
        """Ends all of them."""
        for one in list(self.running):
            one.close("daemon_stops")


class Read:
    """One read, from its request to its end."""

    def __init__(
        self,
        reads: Reads,
        sock: socket.socket,
        tenant: str,
        session: ReaderSession,
        request: fd_pb2.FdRequest,
        lease: LeaseLike,
    ) -> None:
        self.tenant = tenant
        self._reads = reads
        self._store = reads.store
        self._sock = sock
        self._session = session
        self._seq = request.seq
        self._asked = request.fetch
        self._space_id = lease.space.id
        self._block = 0  # where the piece begins
        self._offset = 0
        self._length = 0
        self._places: list[Place] = []  # of the piece
        self._frame = memoryview(b"")
        self._sent = 0  # of frame and piece
        self._void: Reason | None = None  # why the piece and all that follows do not count
        self._last = False
        self._closed = False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._loop = asyncio.get_running_loop()
        until_ns = lease.until_ns or 0
        left_s = max(0.0, (until_ns - self._store.clock.monotonic_ns()) / 1e9)
        self._deadline = self._loop.call_later(left_s + reads.linger_s, self.close, "read_late")
        self._loop.add_reader(sock, self.close, "read_ended")
        self._loop.add_writer(sock, self._writable)

    def _writable(self) -> None:
        """One call of the kernel."""
        if self._sent == len(self._frame) + self._length:
            if self._last:
                self.close("read_done")
                return
            self._next()
        elif self._length:
            self._void = self._void or self._why_over()
        frame_left = self._frame[self._sent :]
        at = max(0, self._sent - len(self._frame))
        buffers = [frame_left, *self._raw(at)]
        try:
            sent = self._sock.sendmsg(buffers, [], socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close("read_ended")
            return
        self._sent += sent
        self._reads.sent_bytes += max(0, sent - len(frame_left))

    def _next(self) -> None:
        """Judges the piece that was sent, and begins another one, or the end."""
        self._void = self._void or self._why_closed() or self._why_changed()
        if self._void is None:
            self._block, self._offset = self._end()
            self._length = self._begin_piece()
        self._last = self._void is not None or not self._length
        reason = Reason.UNSPECIFIED
        if self._last:
            self._length = 0
            reason = self._void or Reason.OK
        reply = fd_pb2.FdReply(
            seq=self._seq,
            reason=store_pb2.Reason.ValueType(reason),
            piece=fd_pb2.FdPiece(block=self._block, offset=self._offset, length=self._length),
        )
        data = reply.SerializeToString()
        self._frame = memoryview(_LENGTH.pack(len(data)) + data)
        self._sent = 0

    def _end(self) -> tuple[int, int]:
        """(block, offset) behind the piece."""
        blocks, offset = divmod(self._offset + self._length, self._asked.length)
        return self._block + blocks, offset

    def _begin_piece(self) -> int:
        """Looks up the places of the next piece; its length. 0: there is none, or it is void."""
        width, left = self._asked.length, self._asked.blocks - self._block
        if not left:
            return 0
        blocks = 1 if self._offset else max(1, min(PIECE_BYTES // width, BLOCKS_MAX, left))
        lease = self._store.core.leased(self._session.id, self._asked.lease_id)
        first = self._asked.first + self._block
        slots = () if lease is None else lease.slots[first : first + blocks]
        self._places = [slot.place() for slot in slots if slot is not None]
        self._void = self._why_over() or self._why_changed()
        if self._void is not None:
            return 0
        return blocks * width if blocks > 1 else min(PIECE_BYTES, width - self._offset)

    def _why_over(self) -> Reason | None:
        """Why no more may be read, if so: nothing holds the slots any more."""
        lease = self._store.core.leased(self._session.id, self._asked.lease_id)
        return self._why_closed() or (Reason.LEASE_EXPIRED if lease is None else None)

    def _why_closed(self) -> Reason | None:
        """Why what was read may not be used, if so, whatever became of the lease."""
        if self._session.ended.is_set():
            return Reason.SESSION_UNKNOWN
        space = self._store.core.space_of(self._session.id, self._space_id)
        return space if isinstance(space, Reason) else None

    def _why_changed(self) -> Reason | None:
        same = all(self._store.generation(place) == place.generation for place in self._places)
        return None if same else Reason.GENERATION_CHANGED

    def _raw(self, at: int) -> list[memoryview]:
        """What is offered of the piece, from byte `at` on."""
        left = min(self._length - at, SEND_BYTES)
        block, offset = divmod(self._offset + at, self._asked.length)
        views: list[memoryview] = []
        while left and self._void is None:
            part = min(left, self._asked.length - offset)
            begin = self._asked.offset + offset
            try:
                view = self._store.block_view(self._places[block], begin + part)
            except KVStoreError:
                self._void = Reason.GENERATION_CHANGED
                break
            views.append(view.data[begin:])
            left -= part
            block, offset = block + 1, 0
        if left:
            # The frame has promised so many bytes; the next one tells that they are none.
            views.append(_ZEROS[:left])
        return views

    def close(self, why: str) -> None:
        """Ends it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._reads.counts[f"closed_{why}"] += 1
        if why == "read_late":
            self._reads.warn.warning(
                why, "fd socket: reader cut", tenant=self.tenant, uid=peer_uid(self._sock)
            )
        self._deadline.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._reads.running.discard(self)
