"""The bytes of a lease over the fd socket, straight into the rows of a client that maps no memory.

One connection is one read (protos: fd.proto). What arrives is checked: order, length, and that each
piece ends where it may. A block counts when all its bytes are there and a later frame has said so.
No thread is inside gRPC meanwhile; a forked child closes the copy that it inherits.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from kvstore import shm
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import fd_pb2
from kvstore_client.arrays import Bytes, Rows
from kvstore_client.calls import SpaceSpec
from kvstore_client.channel import CallFailed
from kvstore_client.forks import GATE
from kvstore_client.session import Session
from kvstore_client.steps import Context

if TYPE_CHECKING:
    from kvstore_client.reads import Copied, FetchRequest

__all__ = ["NotServed", "lease_read"]

FIRST_ANSWER_SHARE = 0.5
"""Of the time that is left: without an answer by then there is still time to go another way."""
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT})
"""Of dialing: says nothing about the next time."""
BUFFERS_MAX = 512
"""In one call of the kernel, which takes 1,024."""

_LENGTH = struct.Struct("<I")


class NotServed(Exception):
    """The fd socket cannot be reached, or does not answer to this: nothing was read."""


def lease_read(
    context: Context,
    session: Session,
    lease_id: int,
    blocks: int,
    spec: SpaceSpec,
    request: FetchRequest,
    done: Copied,
) -> Callable[[], None]:
    """Work that reads the first `blocks` blocks of a lease into the rows that come next in `done`.
    It raises NotServed, or CallFailed; what it has counted in `done` by then is good.
    """
    span = request.span or slice(0, spec.layout.block_bytes)

    def run() -> None:
        asked = fd_pb2.FdFetch(
            session=session.secret,
            lease_id=lease_id,
            blocks=blocks,
            offset=span.start,
            length=span.stop - span.start,
        )
        rows = request.rows[done.blocks : done.blocks + blocks]
        started_ns = time.perf_counter_ns()
        sock = _dialed(session, context.deadline.left_s())
        try:
            _Reader(context, sock, asked, rows, done).run()
        finally:
            done.copy_ns += time.perf_counter_ns() - started_ns
            _hang_up(sock)

    return run


def _dialed(session: Session, timeout_s: float) -> socket.socket:
    if timeout_s <= 0:
        raise CallFailed(Reason.DEADLINE_EXCEEDED)
    try:
        with GATE.call():  # a fork meets no socket that nobody knows of
            sock = session.transport.dial_memory(timeout_s)
            GATE.sockets.add(sock)
    except OSError as error:
        if error.errno not in PASSING and not isinstance(error, TimeoutError):
            session.fd_fetch = False
        raise NotServed from error
    return sock


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the daemon was first
        sock.shutdown(socket.SHUT_RDWR)  # a child that was forked meanwhile may have it, too
    sock.close()
    GATE.sockets.discard(sock)  # last: a child closes what it still finds there


class _Reader:
    """One read."""

    def __init__(
        self, context: Context, sock: socket.socket, asked: fd_pb2.FdFetch, rows: Rows, done: Copied
    ) -> None:
        self._context = context
        self._sock = sock
        self._asked = asked
        self._rows = rows
        self._done = done
        self._first = done.blocks
        self._answered = False
        left_s = context.deadline.left_s()
        self._kept_s = left_s * (1 - FIRST_ANSWER_SHARE)  # for another way, if nobody answers
        # Where the next piece begins.
        self._block = 0
        self._offset = 0

    def run(self) -> None:
        try:
            self._sock.settimeout(self._left_s())
            request = fd_pb2.FdRequest(seq=1, fetch=self._asked)
            shm.send_frame(self._sock, request.SerializeToString())
            while self._take(self._reply()):
                pass
        except TimeoutError:
            raise self._lost(Reason.DEADLINE_EXCEEDED, "the fd socket took too long") from None
        except DecodeError as error:
            raise self._lost(Reason.INTERNAL, "the fd socket answered garbage") from error
        except OSError as error:
            raise self._lost(Reason.UNAVAILABLE, f"the fd socket hung up: {error}") from error

    def _lost(self, reason: Reason, detail: str) -> Exception:
        if self._answered:
            return CallFailed(reason, detail, outage=True)
        return NotServed(detail)

    def _left_s(self) -> float:
        """Raises TimeoutError if it is over."""
        left_s = self._context.deadline.left_s() - (0.0 if self._answered else self._kept_s)
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _reply(self) -> fd_pb2.FdReply:
        (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size))
        if length > shm.FRAME_BYTES_MAX:
            raise ConnectionError(f"a frame of {length} bytes")
        return fd_pb2.FdReply.FromString(bytes(self._bytes(length)))

    def _bytes(self, length: int) -> bytearray:
        data = bytearray(length)
        if length:
            self._fill([memoryview(data)])
        return data

    def _take(self, reply: fd_pb2.FdReply) -> bool:
        """Takes a frame, and the bytes behind it. False: it was the last one."""
        refused = Reason.from_wire(reply.reason)
        if reply.WhichOneof("reply") != "piece":
            if refused is Reason.PERMISSION_DENIED:
                raise CallFailed(Reason.LEASE_EXPIRED, "the lease ended before it was read")
            raise NotServed(refused.text)
        self._answered = True
        piece = reply.piece
        at = (piece.block, piece.offset)
        if reply.reason:
            self._end(at, refused)
            return False
        if at != (self._block, self._offset):
            raise CallFailed(Reason.INTERNAL, "pieces are out of order", outage=True)
        self._confirm(piece.block)
        for buffers in self._targets(piece.length):
            self._fill([buffer.data for buffer in buffers])
        blocks, self._offset = divmod(self._offset + piece.length, self._asked.length)
        self._block += blocks
        return True

    def _end(self, at: tuple[int, int], reason: Reason) -> None:
        if at > (self._block, self._offset):
            raise CallFailed(Reason.INTERNAL, "more is confirmed than was sent", outage=True)
        self._confirm(at[0])
        if reason is Reason.OK and at != (self._asked.blocks, 0):
            reason = Reason.INTERNAL
        if reason is Reason.SESSION_UNKNOWN:
            raise CallFailed(reason)
        self._done.reason = reason

    def _confirm(self, blocks: int) -> None:
        """So many blocks of this read are right."""
        new = self._first + blocks - self._done.blocks
        if new > 0:
            self._done.blocks += new
            self._done.bytes += new * self._asked.length

    def _targets(self, length: int) -> Iterator[list[Bytes]]:
        """Where the piece goes, some buffers at a time. Raises CallFailed if it does not fit."""
        width, left = self._asked.length, self._asked.blocks - self._block
        blocks, rest = divmod(length, width)
        inside = 0 < length <= width - self._offset
        if not left or not (inside or (not self._offset and not rest and 0 < blocks <= left)):
            raise CallFailed(Reason.INTERNAL, "a piece ends where none may", outage=True)
        if inside:
            yield [self._rows[self._block][self._offset : self._offset + length]]
            return
        rows = self._rows[self._block : self._block + blocks]
        if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
            yield [rows.reshape(-1)]
            return
        for first in range(0, blocks, BUFFERS_MAX):
            yield list(rows[first : first + BUFFERS_MAX])

    def _fill(self, views: list[memoryview]) -> None:
        """Receives exactly as many bytes as the views have. A descriptor that comes with them is
        closed by the kernel.
        """
        while views:
            # A timeout of Python's, not SO_RCVTIMEO: that begins anew with each signal that the
            # thread takes, so that a profiler's timer would keep a read from ever ending.
            self._sock.settimeout(self._left_s())
            got = self._sock.recvmsg_into(views)[0]
            if not got:
                raise ConnectionError("within a frame or a piece")
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if views:
                views[0] = views[0][got:]
