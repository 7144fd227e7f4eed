"""What the fd socket asks of a store: memory that clients map, by descriptor, and who has it. On
the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.core import Core
from kvstore.model.values import Region
from kvstore.store.regions import Regions


class Mapped:
    """See the module's docstring. The store is one."""

    def __init__(self, core: Core, regions: Regions) -> None:
        self.core = core
        self._regions = regions

    @property
    def unmap_listeners(self) -> list[Callable[[int], None]]:
        """Called with the id of each region that is closed while processes hold it."""
        return self._regions.holders.unmap_listeners

    def regions_of(self, tenant: str) -> list[Region]:
        """The open regions of a tenant."""
        return self.core.regions(tenant)

    def region_fd(self, region_id: int, tenant: str) -> int | None:
        """See `Regions.fd`."""
        return self._regions.fd(region_id, tenant)

    def staging_fd(self, session_id: int) -> tuple[int, int, int] | None:
        """See `Regions.staging`."""
        return self._regions.staging(session_id)

    def holder_added(self, region_id: int) -> None:
        """A process was given the region's descriptor."""
        self._regions.holders.added(region_id)

    def holder_gone(self, region_id: int) -> None:
        """A process has unmapped the region, or is proven dead."""
        self._regions.holders.gone(region_id)
