"""Blocks as gRPC streams, for a client that cannot map the daemon's memory: several times slower.
Where it can reach the fd socket it gets them through that instead: see `fdreads`.

What arrives is checked: whose it is, order, length. Only blocks that are whole count; the first
chunk that does not fit ends the run. The bytes themselves are as safe as the connection.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.model.reasons import Reason
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.arrays import Bytes, Rows
from kvstore_client.calls import (
    TOKENS_MAX,
    Binding,
    SpaceSpec,
    check_digest,
)
from kvstore_client.channel import CallFailed
from kvstore_client.session import Session
from kvstore_client.steps import (
    Context,
    UserError,
)

if TYPE_CHECKING:
    from kvstore_client.reads import Copied, FetchRequest

__all__ = ["Fill", "RowsFill", "download_blocks", "upload_blocks"]

CHUNK_BYTES = 1 << 20
"""gRPC is fastest with messages of 1 to 4 MiB."""

Fill = Callable[[int, Bytes], None]
"""fill(block index, writable uint8 [part_bytes])"""


class RowsFill:
    """Fills blocks from the rows of an array. Unlike a user's function it runs in two threads."""

    __slots__ = ("_first_block", "_rows")

    def __init__(self, rows: Rows, first_block: int) -> None:
        self._rows = rows
        self._first_block = first_block

    def __call__(self, index: int, target: Bytes) -> None:
        np.copyto(target, self._rows[index - self._first_block])


# ---------------------------------------------------------------- down


def download_blocks(
    context: Context,
    session: Session,
    binding: Binding,
    spec: SpaceSpec,
    request: FetchRequest,
    done: Copied,
) -> Callable[[], None]:
    """Work that fetches the blocks of the request that are not `done`, window by window, into its
    rows.
    """

    def run() -> None:
        limit = session.keys_per_call_max
        for start in range(done.blocks, len(request.keys), limit):
            keys = request.keys[start : start + limit]
            message = pb.FetchRequest(
                session=session.secret,
                space_id=binding.space_id,
                keys=b"".join(keys),
                wait_ms=min(request.wait_ms, context.deadline.left_ms()),
                request_id=request.request_id,
                prompt_tokens=min(request.prompt_tokens, TOKENS_MAX),
            )
            chunks = session.transport.download(
                message.SerializeToString(), context.deadline.left_s()
            )
            receiver = _Receiver(binding, spec, request, done, start, len(keys))
            try:
                with contextlib.closing(chunks):  # type: ignore[type-var]
                    _receive(receiver, chunks)
            except CallFailed as failure:
                done.reason, done.detail = failure.reason, failure.detail
                if failure.outage or failure.reason is Reason.SESSION_UNKNOWN:
                    raise _Partial(failure) from None
            if done.blocks < start + len(keys):
                return

    def fail_open() -> None:
        try:
            run()
        except _Partial as partial:
            if not done.blocks:
                raise partial.failure from None

    return fail_open


class _Partial(Exception):
    def __init__(self, failure: CallFailed) -> None:
        super().__init__(failure)
        self.failure = failure


def _receive(receiver: _Receiver, chunks: Iterator[bytes]) -> None:
    for chunk in chunks:
        try:
            header, payload = convert.decode_fetch_chunk(chunk)
        except (DecodeError, TypeError) as error:
            raise CallFailed(Reason.INTERNAL, "a chunk is garbage", outage=True) from error
        if receiver.take(header, payload):
            return
    raise CallFailed(Reason.UNAVAILABLE, "the stream ended early", outage=True)


class _Receiver:
    """Puts the chunks of one stream into rows. `take` is True at the end of the stream."""

    def __init__(
        self,
        binding: Binding,
        spec: SpaceSpec,
        request: FetchRequest,
        done: Copied,
        first: int,
        count: int,
    ) -> None:
        self._binding = binding
        self._block_bytes = spec.layout.block_bytes
        self._request = request
        self._done = done
        self._first = first
        self._count = count
        self._begun = False
        self._got = 0
        # Only a part of each block may be wanted.
        self._span = request.span or slice(0, self._block_bytes)

    def take(self, header: pb.ChunkHeader, payload: memoryview) -> bool:
        started_ns = time.perf_counter_ns()
        if not self._begun:
            check_digest(self._binding, header.fingerprint_digest)
            if header.block_bytes != self._block_bytes:
                raise CallFailed(Reason.INTERNAL, "the blocks have another size")
            self._begun = True
        block = self._done.blocks - self._first
        if header.reason:
            reason = Reason.from_wire(header.reason)
            short = block < self._count
            self._done.reason = Reason.UNSPECIFIED if short and reason is Reason.OK else reason
            return True
        if payload:
            if (header.block, header.offset) != (block, self._got):
                raise CallFailed(Reason.INTERNAL, "chunks are out of order")
            if not self._fits(block, len(payload)):
                raise CallFailed(Reason.INTERNAL, "a chunk ends where none may")
            self._put(np.frombuffer(payload, np.uint8))
        self._done.copy_ns += time.perf_counter_ns() - started_ns
        return False

    def _fits(self, block: int, length: int) -> bool:
        """Within one block, or over whole ones."""
        if self._got + length <= self._block_bytes:
            return block < self._count
        whole, rest = divmod(length, self._block_bytes)
        return not self._got and not rest and block + whole <= self._count

    def _put(self, data: Bytes) -> None:
        span = self._span
        while data.size:
            piece = data[: self._block_bytes - self._got]
            first, end = max(span.start, self._got), min(span.stop, self._got + piece.size)
            row = self._request.rows[self._done.blocks]
            if first < end:
                np.copyto(
                    row[first - span.start : end - span.start],
                    piece[first - self._got : end - self._got],
                )
            self._got += piece.size
            data = data[piece.size :]
            if self._got == self._block_bytes:
                self._got = 0
                self._done.bytes += len(row)
                self._done.blocks += 1


# ---------------------------------------------------------------- up


def upload_blocks(
    session: Session,
    reserve: pb.ReserveRequest,
    blocks: Sequence[int],
    part_bytes: int,
    fill: Fill,
    timeout_s: float,
) -> bytes:
    """Pushes blocks (indexes into the reservation's chain) as one stream; the encoded PushReply.

    Raises CallFailed; UserError if `fill` raised, and then nothing is committed.
    """
    broken: list[UserError] = []

    def chunks() -> Iterator[bytes]:
        yield pb.PushChunk(reserve=reserve).SerializeToString()
        block = np.empty(part_bytes, np.uint8)
        for index in blocks:
            try:
                fill(index, block)
            except UserError as error:
                broken.append(error)
                return  # a stream that ends without commit is an abort
            for offset in range(0, part_bytes, CHUNK_BYTES):
                payload = block[offset : offset + CHUNK_BYTES].data
                header = pb.ChunkHeader(block=index, offset=offset)
                yield _push_chunk(header, payload)
        yield pb.PushChunk(commit=True).SerializeToString()

    try:
        return session.transport.upload(chunks(), timeout_s)
    except CallFailed:
        if broken:
            raise broken[0] from None
        raise


def _push_chunk(header: pb.ChunkHeader, payload: memoryview) -> bytes:
    """An encoded PushChunk with one copy of the payload: header is field 2, payload field 3."""
    encoded = header.SerializeToString()
    return b"".join(
        (b"\x12", _varint(len(encoded)), encoded, b"\x1a", _varint(len(payload)), payload)
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
