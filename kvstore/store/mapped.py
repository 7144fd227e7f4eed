"""What a store has in memory that others reach: regions by descriptor, and who has them; the bytes
of leased blocks; which pools a reader may be sent to. On the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.core.core import Core
from kvstore.model.values import Place, Region
from kvstore.policy.links import Link
from kvstore.store.regions import Regions
from kvstore.store.values import DevicePool
from kvstore.tiers.host import HostTier


class Mapped:
    """See the module's docstring. The store is one."""

    def __init__(
        self,
        core: Core,
        regions: Regions,
        host: HostTier,
        host_tier: int,
        links: Sequence[Link],
        clock: Clock,
    ) -> None:
        self.core = core
        self.clock = clock
        self.links = list(links)
        self._regions = regions
        self._host = host
        self._host_tier = host_tier
        self._lost: set[int] = set()  # device tiers whose memory is gone, until none of it is left

    @property
    def unmap_listeners(self) -> list[Callable[[int], None]]:
        """Called with the id of each region that is closed while processes hold it."""
        return self._regions.holders.unmap_listeners

    def regions_of(self, tenant: str) -> list[Region]:
        """The open regions of a tenant that its clients may map ahead."""
        return [one for one in self.core.regions(tenant) if one.tier == self._host_tier]

    def region_of(self, region_id: int, tenant: str) -> Region | None:
        """An open region of a tenant, in any pool."""
        region = self.core.region(region_id)
        return region if region is not None and region.tenant == tenant else None

    def region_fd(self, region_id: int, tenant: str) -> int | None:
        """See `Regions.fd`."""
        return self._regions.fd(region_id, tenant)

    def device_pool(self, region_id: int, tenant: str) -> DevicePool | None:
        """See `Regions.device_pool`."""
        return self._regions.device_pool(region_id, tenant)

    def staging_fd(self, session_id: int) -> tuple[int, int, int] | None:
        """See `Regions.staging`."""
        return self._regions.staging(session_id)

    def holder_added(self, region_id: int) -> None:
        """A process was given the region's descriptor."""
        self._regions.holders.added(region_id)

    def holder_gone(self, region_id: int) -> None:
        """A process has unmapped the region, or is proven dead."""
        self._regions.holders.gone(region_id)

    # ------------------------------------------------------------------ bytes

    def block_view(self, place: Place, length: int) -> NDArray[np.uint8]:
        """The daemon's own view of a leased block's bytes, for the byte streams."""
        return self._host.view(place, length)

    def generation(self, place: Place) -> int:
        """The slot's generation now: another than the place's once another block has the slot."""
        return self._host.generation(place.region, place.slot)

    def staging_view(self, region_id: int, offset: int, length: int) -> NDArray[np.uint8]:
        """The daemon's own view of a staging window, for pushed byte streams."""
        return self._host.staging_view(region_id, offset, length)

    def note_load(self, length_bytes: int, copy_ns: int, tier: int) -> None:
        """Learns from a client's measured copy of blocks of which the slowest came from `tier`: out
        of host memory, or of a GPU's that he copies himself.
        """
        own = tier if self._is_shared(tier) else self._host_tier
        self.links[own].observe(length_bytes, copy_ns, self.clock.monotonic_ns())

    # ------------------------------------------------------------------ devices

    @property
    def device_uuids(self) -> list[str]:
        """GPUs whose pools clients may open."""
        devices = self._regions.devices.values()
        return [one.device_uuid for one in devices if one.shares and not one.lost]

    def reach(self, device_uuid: str) -> frozenset[int] | None:
        """Pools in which a reader's blocks may be; None: in any. `device_uuid`: the GPU whose pools
        he opens; empty: none.
        """
        devices = self._regions.devices
        if not devices:
            return None
        own = {
            tier
            for tier, one in devices.items()
            if device_uuid and one.device_uuid == device_uuid and one.shares and not one.lost
        }
        return frozenset({self._host_tier, *own})

    def _is_shared(self, tier: int) -> bool:
        """Whether clients copy out of the tier's device memory themselves."""
        device = self._regions.devices.get(tier)
        return device is not None and device.shares

    def lose_devices(self, now_ns: int) -> None:
        """Forgets what was in the memory of devices that were lost; now, and on each tick until
        nothing of it is left.
        """
        for tier, device in self._regions.devices.items():
            if device.lost and tier not in self._lost and self.core.lose(tier, now_ns):
                self._lost.add(tier)
