"""Which processes may still reach a region: a sealed memfd gives no page back before the last of
them has unmapped it or is proven dead. Counts only; it knows no region's content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

Listener = Callable[[int], None]


class Holders:
    """Counts the holders of each region's descriptor, and tells when a closed one is free."""

    def __init__(self, on_gone: Listener) -> None:
        """`on_gone(region id)`: a closed region has no holder any more."""
        self.unmap_listeners: list[Listener] = []
        """Called with the id of a region that was closed while processes hold it."""
        self._on_gone = on_gone
        self._counts: Counter[int] = Counter()
        self._closing: set[int] = set()

    def added(self, region_id: int) -> None:
        """A process was given the region's descriptor."""
        self._counts[region_id] += 1

    def gone(self, region_id: int) -> None:
        """A process has unmapped the region, or is proven dead."""
        self._counts[region_id] -= 1
        if self._counts[region_id] <= 0:
            del self._counts[region_id]
            if region_id in self._closing:
                self._free(region_id)

    def close(self, region_id: int) -> None:
        """Nobody is given the region from now on; its holders are asked to let go."""
        self._closing.add(region_id)
        if self._counts[region_id] > 0:
            for listener in self.unmap_listeners:
                listener(region_id)
        else:
            del self._counts[region_id]
            self._free(region_id)

    def _free(self, region_id: int) -> None:
        self._closing.discard(region_id)
        self._on_gone(region_id)
