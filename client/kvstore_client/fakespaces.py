"""What a FakeStore keeps: spaces of blocks in shared memory, reservations, and leases that are read
over the fd socket. For `fakestore` alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore import shm
from kvstore.model.layout import Layout
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb

__all__ = ["Leased", "Reservation", "Space", "send_lease"]

PIECE_BYTES = 1 << 10
"""Small, so that blocks of tests arrive in several pieces."""


@dataclass
class Space:
    id: int
    digest: bytes
    layout: Layout
    region: shm.SharedRegion
    info: pb.RegionInfo
    slots: dict[bytes, int] = field(default_factory=dict)
    parts: dict[bytes, set[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    def ready(self, key: bytes) -> bool:
        return len(self.parts.get(key, ())) == len(self.layout.parts)

    def bytes_of(self, slot: int) -> NDArray[np.uint8]:
        start = self.info.data_offset + slot * self.info.slot_bytes
        return self.region.map.u8[start : start + self.layout.block_bytes]

    def generation(self, slot: int) -> int:
        return int(self.region.map.generations(self.info.slots)[slot])

    def leased(self, key: bytes) -> Leased:
        slot = self.slots[key]
        return Leased(self, slot, self.generation(slot))


@dataclass
class Reservation:
    session: bytes
    space: Space
    part: int
    keys: list[bytes]
    offsets: list[int]


class Leased(NamedTuple):
    """A block of a lease."""

    space: Space
    slot: int
    generation: int

    def changed(self) -> bool:
        return self.space.generation(self.slot) != self.generation


def send_lease(
    sock: socket.socket,
    request: fd_pb2.FdRequest,
    leased: Callable[[], Sequence[Leased | None]],
) -> None:
    """Answers FdFetch as a daemon does, on a blocking socket. `leased`: what the lease holds now,
    nothing once it has ended.
    """
    asked = request.fetch
    blocks = leased()[asked.first : asked.first + asked.blocks]
    if len(blocks) < max(1, asked.blocks) or None in blocks:
        refusal = fd_pb2.FdReply(seq=request.seq, reason=pb.REASON_PERMISSION_DENIED)
        shm.send_frame(sock, refusal.SerializeToString())
        return

    def frame(block: int, offset: int, length: int, reason: Reason) -> None:
        piece = fd_pb2.FdPiece(block=block, offset=offset, length=length)
        reply = fd_pb2.FdReply(seq=request.seq, reason=pb.Reason.ValueType(reason), piece=piece)
        shm.send_frame(sock, reply.SerializeToString())

    for number, block in enumerate(blocks):
        assert block is not None
        for offset in range(0, asked.length, PIECE_BYTES):
            length = min(PIECE_BYTES, asked.length - offset)
            begin = asked.offset + offset
            data = block.space.bytes_of(block.slot)[begin : begin + length].tobytes()
            if block.changed() or not leased():
                frame(number, offset, 0, Reason.GENERATION_CHANGED)
                return
            frame(number, offset, length, Reason.UNSPECIFIED)
            sock.sendall(data)
    frame(asked.blocks, 0, 0, Reason.OK)
