"""Regions as processes reach them: made when the core says so, handed out by descriptor, closed,
and gone when the last process has let go. On the event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvstore.core.core import Core
from kvstore.core.effects import Assign, AssignStaging
from kvstore.model.values import Region
from kvstore.store.holders import Holders
from kvstore.store.values import DevicePool
from kvstore.tiers.base import RegionMemory
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier

log = logging.getLogger(__name__)


class Regions:
    """The regions of all pools and the sessions' staging."""

    def __init__(
        self,
        core: Core,
        host: HostTier,
        host_tier: int,
        on_gone: Callable[[int], None],
        devices: Mapping[int, DeviceTier] | None = None,
    ) -> None:
        """`on_gone(region id)`: no process can reach a closed region any more. `devices`: the
        pools that are no host memory, by tier.
        """
        self.holders = Holders(self._let_go)
        self.devices = dict(devices or {})
        self._on_gone = on_gone
        self._memory: dict[int, RegionMemory] = {host_tier: host, **self.devices}
        self._tiers: dict[int, int] = {}  # of the regions that are not the host's
        self._core = core
        self._host = host
        self._host_tier = host_tier
        self._staging_bytes: dict[int, int] = {}
        self._owed: dict[int, Assign | AssignStaging] = {}

    def assign(self, effect: Assign | AssignStaging) -> None:
        """Makes a region. Where the system has no descriptor or memory left, `retry` tries again;
        until then nobody can have the region, and copies into it fail.
        """
        region_id = effect.region.id if isinstance(effect, Assign) else effect.region_id
        try:
            if isinstance(effect, Assign):
                self._memory[effect.region.tier].assign(effect.region)
                if effect.region.tier != self._host_tier:
                    self._tiers[region_id] = effect.region.tier
            else:
                self._host.assign_staging(region_id, effect.total_bytes)
                self._staging_bytes[region_id] = effect.total_bytes
        except OSError as error:
            if region_id not in self._owed:
                log.error("region %d cannot be made yet: %s", region_id, error)
            self._owed[region_id] = effect
        else:
            self._owed.pop(region_id, None)

    def pause(self, paused: bool, now_ns: int) -> None:
        """Whether no memory is made for now, ahead or on the spot."""
        self._host.pause(paused)
        self._core.pause_growth(self._host_tier, paused, now_ns)

    def retry(self) -> None:
        """Makes what could not be made before."""
        for effect in list(self._owed.values()):
            self.assign(effect)

    def unassign(self, region_id: int) -> None:
        """Closes a region of either kind."""
        self._owed.pop(region_id, None)
        self._staging_bytes.pop(region_id, None)
        self._memory_of(region_id).unassign(region_id)
        self.holders.close(region_id)

    def _memory_of(self, region_id: int) -> RegionMemory:
        return self._memory[self._tiers.get(region_id, self._host_tier)]

    def _let_go(self, region_id: int) -> None:
        self._memory_of(region_id).released(region_id)
        self._tiers.pop(region_id, None)
        self._on_gone(region_id)

    def fd(self, region_id: int, tenant: str) -> int | None:
        """A read-only descriptor (it stays the tier's); None for a region that is closed, unknown
        or another tenant's, which look alike, and for one that no client may have.
        """
        region = self._core.region(region_id)
        if region is None or region.tenant != tenant or region_id in self._owed:
            return None
        offered = region.tier == self._host_tier or self.device_pool(region_id, tenant) is not None
        return self._memory[region.tier].fd(region_id) if offered else None

    def device_pool(self, region_id: int, tenant: str) -> DevicePool | None:
        """The memory of a device region, for clients of the tenant whose it is; None of any other
        region, and where none is handed out.
        """
        region = self._core.region(region_id)
        device = None if region is None else self.devices.get(region.tier)
        if region is None or device is None or region.tenant != tenant:
            return None
        handed = device.exported(region_id)
        if handed is None:
            return None
        memory, mapped_bytes = handed
        return DevicePool(
            device.device_uuid, int(memory.kind), mapped_bytes, memory.fd, memory.ipc_handle
        )

    def staging(self, session_id: int) -> tuple[int, int, int] | None:
        """(region id, total bytes, read-write descriptor) of the session's staging, if any."""
        region_id = self._core.staging_of(session_id)
        if region_id is None or region_id not in self._staging_bytes:
            return None
        return region_id, self._staging_bytes[region_id], self._host.fd(region_id)

    def named(self, region_ids: set[int]) -> tuple[Region, ...]:
        """Those of these regions that are open."""
        return tuple(r for i in region_ids if (r := self._core.region(i)) is not None)
