"""Regions and device memory as the wire describes them, in Acquire and on the fd socket."""

from __future__ import annotations

from typing import Protocol

from kvstore.store.values import DevicePool
from kvstore.wire.v1 import store_pb2 as pb


class RegionLike(Protocol):
    """What is needed of kvstore.model.values.Region."""

    @property
    def id(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


def region_to_wire(region: RegionLike, pool: DevicePool | None) -> pb.RegionInfo:
    """`pool`: its memory, of a device region that is handed out. Its file ends with the header."""
    return pb.RegionInfo(
        region_id=region.id,
        slot_bytes=region.slot_bytes,
        slots=region.slots,
        data_offset=region.header_bytes,
        total_bytes=region.total_bytes if pool is None else region.header_bytes,
        device=None if pool is None else pool_to_wire(pool),
    )


def pool_to_wire(pool: DevicePool) -> pb.DeviceMemory:
    """Without its descriptor."""
    return pb.DeviceMemory(
        device_uuid=pool.device_uuid,
        kind=pb.DeviceHandleKind.ValueType(pool.kind),
        mapped_bytes=pool.mapped_bytes,
        ipc_handle=pool.ipc_handle,
    )
