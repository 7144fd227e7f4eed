"""What the store gives and needs: settled leases, its numbers, and the mover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.core.effects import Copy, Forget
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreStats, Place, Region
from kvstore.tiers.base import ArchiveStats
from kvstore.tiers.host import HostStats


class Mover(Protocol):
    """What runs the core's copies (kvstore.mover). They come back through `Store.copies_done`, in a
    later turn of the loop: never within `submit`.
    """

    def submit(self, moves: Sequence[Copy | Forget]) -> None: ...

    def relieve(self) -> None: ...


class Leased(NamedTuple):
    """A settled read lease; 0: nothing was leased. `places` has one entry a key, None where the
    block is absent. `reason`: OK, or why the first absent block is.
    """

    lease_id: int
    places: Sequence[Place | None]
    leased: int
    reason: Reason
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `Store.stats` tells; `tier_states` has a word or a sentence for each tier, `archives`
    the numbers of those that are not the core's.
    """

    state: str
    uptime_s: float
    core: CoreStats
    tier_states: Mapping[str, str]
    host: HostStats
    archives: Mapping[str, ArchiveStats] = field(default_factory=dict)


WARM_SHARE = 15 / 16
"""What is left over, since regions do not divide the capacity, is not prepared."""


def nothing(keys: Sequence[bytes], reason: Reason) -> Leased:
    """The answer where nothing was leased."""
    return Leased(0, (None,) * len(keys), 0, reason, ())


def state_of(host: HostStats) -> str:
    """A word, or the sentence that says what is wrong."""
    if host.prefault_error:
        return host.prefault_error
    warm_bytes = host.prefaulted_bytes + host.closing_bytes
    return "ok" if warm_bytes >= host.capacity_bytes * WARM_SHARE else "warming"
