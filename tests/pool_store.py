"""A daemon in this process that lends pools of a GPU's memory, for which a file stands.

Blocks are pushed into host memory as in any FakeStore; `rise` moves them into the pool, and whoever
asks without naming the GPU has them moved down. What they leave behind is overwritten, so that
bytes from the wrong place are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import shm
from kvstore.model.keys import unpack_keys
from kvstore.wire import convert
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.fakespaces import Space
from kvstore_client.testing import FakeStore

__all__ = ["UUID", "PoolStore"]

UUID = "GPU-1"
FIRST_ID = 1 << 20
"""Of pools: a space's own number is added."""
LEFT, RISEN = 0xDD, 1_000


@dataclass
class _Pool:
    """A device region with a slot for each of the space's. file: the generations alone."""

    info: pb.RegionInfo
    file: shm.SharedRegion
    memory: shm.SharedRegion
    slots: dict[bytes, int] = field(default_factory=dict)

    @property
    def generations(self) -> NDArray[np.uint64]:
        return self.file.map.generations(self.info.slots)

    def bytes_of(self, slot: int, length: int) -> NDArray[np.uint8]:
        return self.memory.map.u8[slot * self.info.slot_bytes :][:length]


class PoolStore(FakeStore):
    """See the module's docstring. named: the GPU of each Acquire. lends: whether GetDevice is
    answered; forces: whether places are in pools whoever asks, as a broken daemon's may be.
    mapped_bytes: what GetDevice says, if not 0.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.named: list[str] = []
        self.lends, self.forces, self.mapped_bytes = True, False, 0
        self._pools: dict[int, _Pool] = {}

    def rise(self, keys: Iterable[bytes]) -> None:
        """These blocks of all spaces go into the pool."""
        with self._lock:
            for space in self._spaces.values():
                pool = self._pool_of(space)
                for key in keys:
                    if space.ready(key):
                        slot = pool.slots[key] = space.slots[key]
                        pool.generations[slot] += RISEN
                        data = space.bytes_of(slot)
                        pool.bytes_of(slot, data.size)[:] = data
                        data[:] = LEFT

    def drop(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for space in self._spaces.values():
                for key in keys:
                    self._leave_pool(space, key)
        super().drop(keys)

    def close_pools(self) -> None:
        """Moves all blocks down and tells all clients to unmap the pools."""
        with self._lock:
            for space in self._spaces.values():
                for key in list(self._pool_of(space).slots):
                    self._fall(space, key)
            sockets, pools = list(self._sockets), list(self._pools.values())
            self._pools.clear()
        for pool in pools:
            event = fd_pb2.FdReply(unmap=fd_pb2.Unmap(region_id=pool.info.region_id))
            for sock in sockets:
                shm.send_frame(sock, event.SerializeToString())
            pool.file.close()
            pool.memory.close()

    def _pool_of(self, space: Space) -> _Pool:
        if space.id not in self._pools:
            slots, slot_bytes = space.info.slots, space.info.slot_bytes
            header = shm.header_bytes(slots)
            file = shm.create_region(header, "kvstore-fake")
            file.seal(shm.ARENA_SEALS)
            memory = shm.create_region(slots * slot_bytes, "kvstore-fake")
            memory.seal(shm.ARENA_SEALS)
            device = pb.DeviceMemory(
                device_uuid=UUID,
                kind=pb.DEVICE_HANDLE_KIND_HOST_FILE,
                mapped_bytes=self.mapped_bytes or slots * slot_bytes,
            )
            info = pb.RegionInfo(
                region_id=FIRST_ID + len(self.unmapped) + space.id,
                slot_bytes=slot_bytes,
                slots=slots,
                data_offset=header,
                total_bytes=header,
                device=device,
            )
            self._pools[space.id] = _Pool(info, file, memory)
        return self._pools[space.id]

    def _leave_pool(self, space: Space, key: bytes) -> int | None:
        pool = self._pool_of(space)
        slot = pool.slots.pop(key, None)
        if slot is not None:
            pool.generations[slot] += 1
        return slot

    def _fall(self, space: Space, key: bytes) -> None:
        slot = self._leave_pool(space, key)
        if slot is not None:
            data = space.bytes_of(slot)
            left = self._pool_of(space).bytes_of(slot, data.size)
            data[:] = left
            left[:] = LEFT

    def _regions(self) -> list[shm.SharedRegion]:
        pools, self._pools = list(self._pools.values()), {}
        return [*super()._regions(), *(part for one in pools for part in (one.file, one.memory))]

    def _attach(self, request: pb.AttachRequest) -> pb.AttachEvent:
        event = super()._attach(request)
        event.welcome.device_uuids.append(UUID)
        return event

    def _acquire(self, request: pb.AcquireRequest) -> pb.AcquireReply:
        self.named.append(request.device_uuid)
        space, keys = self._space(request.space_id), unpack_keys(request.keys)
        pool, named = self._pool_of(space), request.device_uuid == UUID or self.forces
        if not named:
            for key in keys:
                self._fall(space, key)
        reply = super()._acquire(request)
        if reply.places:
            places = convert.unpack_places(reply.places)
            reply.places = convert.pack_places(
                (pool.info.region_id, pool.slots[key], int(pool.generations[pool.slots[key]]))
                if key in pool.slots
                else (int(place["region"]), int(place["slot"]), int(place["generation"]))
                if place["region"]
                else None
                for key, place in zip(keys, places, strict=True)
            )
        return reply

    def _memory_reply(
        self, request: fd_pb2.FdRequest, secret: bytes
    ) -> tuple[fd_pb2.FdReply | None, int | None]:
        kind = request.WhichOneof("request")
        asked = request.get_region.region_id or request.get_device.region_id
        for pool in self._pools.values():
            if pool.info.region_id == asked and secret in self._sessions:
                if kind == "get_region":
                    return fd_pb2.FdReply(reason=pb.REASON_OK, region=pool.info), pool.file.fd
                if self.lends:
                    reply = fd_pb2.FdReply(reason=pb.REASON_OK, device=pool.info.device)
                    return reply, pool.memory.fd
        return super()._memory_reply(request, secret)
