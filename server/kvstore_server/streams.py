"""Bodies of the byte streams, for clients that cannot map memory: Fetch and Push.

A message at a time is in memory here. A stream lives no longer than the lease or reservation behind
it, however slow the peer is.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.config import Limits
from kvstore.model.layout import Layout
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.values import CommitResult, LeaseMode, Place, Reserved
from kvstore.store import NS_PER_MS, Leased, Session, Store
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Boundary, Call
from kvstore_server.reading import ReadCalls
from kvstore_server.writing import WriteCalls

CHUNK_BYTES = 1 << 20
"""Payload of one message: where gRPC was fastest; with 2 MiB it took half as long again."""


class StreamCalls:
    """One instance a tenant."""

    def __init__(
        self,
        store: Store,
        boundary: Boundary,
        limits: Limits,
        reads: ReadCalls,
        writes: WriteCalls,
    ) -> None:
        self._store = store
        self._boundary = boundary
        self._limits = limits
        self._reads = reads
        self._writes = writes

    # ------------------------------------------------------------------ fetch

    async def fetch(self, request: pb.FetchRequest, call: Call) -> None:
        """Sends FetchChunk messages, encoded: the leading run of the keys, then a last one that
        says why it ends.
        """
        packed = request.keys
        keys = self._boundary.keys(packed)
        session = call.the_session()
        layout, digest = self._store.space_of(session, request.space_id)
        call.record.prompt(request.space_id, packed, layout.block_tokens)
        self._boundary.stage(call, "preconditions")
        ttl_ns = self._limits.lease_ttl_ms * NS_PER_MS
        declined = self._reads.evidence.declined(call, request.request_id)
        if declined is not None:
            header = pb.ChunkHeader(
                fingerprint_digest=digest,
                block_bytes=layout.block_bytes,
                reason=convert.reason_to_wire(declined),
            )
            call.record.count("blocks", len(keys), 0)
            call.reason = declined
            await call.send(convert.encode_fetch_chunk(header.SerializeToString()))
            return
        leased = await self._store.acquire(
            session,
            request.space_id,
            keys,
            mode=LeaseMode.COPY,
            ttl_ns=min(ttl_ns, self._boundary.left_ns(call)),
            wait_ns=self._boundary.wait_ns(call, request.wait_ms),
            load_ns=self._boundary.load_ns(call),
            prompt_tokens=request.prompt_tokens,
        )
        self._boundary.stage(call, "plan")
        absence = self._reads.absence(call, request.space_id, keys, leased)
        try:
            first = pb.ChunkHeader(fingerprint_digest=digest, block_bytes=layout.block_bytes)
            await self._boundary.within(
                call, self._send(call, request.space_id, leased, layout, first, absence.reason)
            )
        finally:
            if leased.lease_id:
                self._store.release(session, (leased.lease_id,))
            self._boundary.stage(call, "movement")

    async def _send(
        self,
        call: Call,
        space_id: int,
        leased: Leased,
        layout: Layout,
        first: pb.ChunkHeader,
        end: Reason,
    ) -> None:
        await call.send(convert.encode_fetch_chunk(first.SerializeToString()))
        run = list(itertools.takewhile(lambda place: place is not None, leased.places))
        sent = 0
        for piece in _pieces(len(run), layout.block_bytes):
            places = [p for p in run[piece.block : piece.block + piece.blocks] if p is not None]
            try:
                message = self._chunk(piece, places)
            except KVStoreError as error:
                if error.reason is not Reason.REGION_UNKNOWN:
                    raise
                end = Reason.GENERATION_CHANGED
                break
            void = self._void(call.the_session(), space_id, places)
            if void is not None:
                end = void
                break
            await call.send(message)
            sent = piece.done
        call.record.count("blocks", len(leased.places), sent)
        if sent:
            call.tier = self._store.tiers[leased.slowest].name
        call.reason = end
        last = pb.ChunkHeader(block=sent, reason=convert.reason_to_wire(end))
        await call.send(convert.encode_fetch_chunk(last.SerializeToString()))

    def _chunk(self, piece: _Piece, places: Sequence[Place]) -> bytes:
        """The message, as its bytes are now. KVStoreError(REGION_UNKNOWN): the lease ran out, and
        the region was closed.
        """
        header = pb.ChunkHeader(block=piece.block, offset=piece.offset)
        views = [
            self._store.block_view(place, piece.offset + piece.length).data[piece.offset :]
            for place in places
        ]
        return convert.encode_fetch_chunk(header.SerializeToString(), *views)

    def _void(self, session: Session, space_id: int, places: Sequence[Place]) -> Reason | None:
        """Why what was just copied may not be sent, if so: the reader was so slow that the lease
        ran out, or the space was closed meanwhile.
        """
        space = self._store.core.space_of(session.id, space_id)
        if isinstance(space, Reason):
            return space
        same = all(self._store.generation(place) == place.generation for place in places)
        return None if same else Reason.GENERATION_CHANGED

    # ------------------------------------------------------------------ push

    async def push(self, chunks: AsyncIterator[pb.PushChunk], call: Call) -> pb.PushReply:
        """Takes a reservation's bytes as a stream; commits at its end, aborts if it breaks off."""
        first = await self._boundary.within(call, _first(chunks))
        if first is None or not first.HasField("reserve"):
            raise BadRequest(Reason.BAD_REQUEST, "the first message of a push reserves")
        self._boundary.identify(call, first.reserve.session, first.reserve.request_id)
        self._boundary.stage(call, "input")
        reserved = self._writes.reserved(first.reserve, call)
        reply = pb.PushReply(
            present=reserved.present,
            reserved=reserved.reserved,
            reason=convert.reason_to_wire(reserved.reason),
            mark=reserved.mark,
        )
        if not reserved.lease_id:
            return reply
        done: CommitResult | None = None
        try:
            await self._boundary.within(call, self._fill(reserved, chunks, call.the_session()))
            done = await self._writes.committed(reserved.lease_id, call, durable=False)
        finally:
            if done is None:
                self._store.release(call.the_session(), (reserved.lease_id,))
        reply.stored = done.visible + done.waiting
        reply.failed = done.failed
        if done.reason is not Reason.OK:
            reply.reason = convert.reason_to_wire(done.reason)
        return reply

    async def _fill(
        self, reserved: Reserved, chunks: AsyncIterator[pb.PushChunk], session: Session
    ) -> None:
        """Writes the stream into the staging windows, until it asks for the commit."""
        offsets = dict(zip(reserved.wanted, reserved.offsets, strict=True))
        filled = dict.fromkeys(reserved.wanted, 0)
        async for chunk in chunks:
            if chunk.payload:
                # Whoever gave the reservation up may have its ranges for another one by now.
                if not self._store.core.is_reserved(session.id, reserved.lease_id):
                    raise KVStoreError(
                        Reason.LEASE_EXPIRED, "the reservation ended", "limits.reserve_ttl_ms"
                    )
                self._write(reserved, offsets, filled, chunk)
            if chunk.commit:
                short = [i for i, length in filled.items() if length != reserved.part_bytes]
                if short:
                    length = filled[short[0]]
                    raise KVStoreError(
                        Reason.ABORTED,
                        f"block {short[0]} has {length} of {reserved.part_bytes} bytes",
                    )
                return
        raise KVStoreError(Reason.ABORTED, "the stream ended without commit")

    def _write(
        self,
        reserved: Reserved,
        offsets: dict[int, int],
        filled: dict[int, int],
        chunk: pb.PushChunk,
    ) -> None:
        block, at, payload = chunk.header.block, chunk.header.offset, chunk.payload
        if block not in offsets:
            return  # present already, or no room: the client sends without knowing
        if at != filled[block] or at + len(payload) > reserved.part_bytes:
            raise BadRequest(
                Reason.BAD_SIZE, "payload is sent in order and fills each block's part exactly"
            )
        window = self._store.staging_view(
            reserved.staging_region, offsets[block] + at, len(payload)
        )
        np.copyto(window, np.frombuffer(payload, np.uint8))
        filled[block] = at + len(payload)


async def _first(chunks: AsyncIterator[pb.PushChunk]) -> pb.PushChunk | None:
    async for chunk in chunks:
        return chunk
    return None


class _Piece(NamedTuple):
    """What one message carries: `length` bytes from `offset` on of each of `blocks` blocks. `done`:
    blocks that are complete after it.
    """

    block: int
    blocks: int
    offset: int
    length: int
    done: int


def _pieces(blocks: int, block_bytes: int) -> Iterator[_Piece]:
    """Several whole blocks a message where they are small, several messages a block else."""
    several = CHUNK_BYTES // block_bytes
    if several:
        for block in range(0, blocks, several):
            count = min(several, blocks - block)
            yield _Piece(block, count, 0, block_bytes, block + count)
        return
    for block in range(blocks):
        for offset in range(0, block_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, block_bytes - offset)
            done = block + (offset + length == block_bytes)
            yield _Piece(block, 1, offset, length, done)
