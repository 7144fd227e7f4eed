"""What the store gives and needs: settled leases, its numbers, and the mover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.core.effects import Copy, Forget
from kvstore.model.hits import ABSENT, PENDING
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreStats, Place, Region, TierSpec
from kvstore.policy.links import Link
from kvstore.store.guards import GuardStats
from kvstore.tiers.base import ArchiveStats
from kvstore.tiers.device import DeviceStats
from kvstore.tiers.host import HostStats


class Mover(Protocol):
    """What runs the core's copies (kvstore.mover). They come back through `Store.copies_done`, in a
    later turn of the loop: never within `submit`.
    """

    def submit(self, moves: Sequence[Copy | Forget]) -> None: ...

    def relieve(self) -> None: ...


class Leased(NamedTuple):
    """A settled read lease; 0: nothing was leased. `places` has one entry a key, None where the
    block is absent. `reason`: OK, or why the first absent block is. `slowest`: index of the slowest
    tier that one of the blocks came from.
    """

    lease_id: int
    places: Sequence[Place | None]
    leased: int
    reason: Reason
    regions: tuple[Region, ...]
    slowest: int = 0

    @property
    def leading(self) -> int:
        """Blocks before the first absent one."""
        return self.places.index(None) if None in self.places else len(self.places)


class LinkStats(NamedTuple):
    """The path out of one tier. `samples` transfers of `moved_bytes` took `moving_s`; `predicted_s`
    is what each was predicted to take just before it was measured. bytes_per_second, latency_s: the
    estimate that plans are made with. queued_bytes: handed to the path, and not there yet. probes:
    begun, since plans passed the tier over.
    """

    tier: str
    samples: int
    moved_bytes: int
    moving_s: float
    predicted_s: float
    bytes_per_second: float
    latency_s: float
    queued_bytes: int
    probes: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `Store.stats` tells; `tier_states` has a word or a sentence for each tier, `archives`
    the numbers of those that are not the core's, `devices` what else is known of GPUs.
    """

    state: str
    uptime_s: float
    core: CoreStats
    tier_states: Mapping[str, str]
    host: HostStats
    archives: Mapping[str, ArchiveStats] = field(default_factory=dict)
    links: tuple[LinkStats, ...] = ()
    guards: tuple[GuardStats, ...] = ()
    devices: Mapping[str, DeviceStats] = field(default_factory=dict)


class DevicePool(NamedTuple):
    """The memory of a device region as its tenant's clients open it: see `driver.Exported`."""

    device_uuid: str
    kind: int
    mapped_bytes: int
    fd: int
    ipc_handle: bytes


def link_stats(tier: TierSpec, link: Link, probes: int) -> LinkStats:
    """The numbers of a tier's link."""
    return LinkStats(
        tier.name,
        link.samples,
        link.moved_bytes,
        link.moving_ns / 1e9,
        link.predicted_ns / 1e9,
        link.bytes_per_second,
        link.latency_ns / 1e9,
        link.queued_bytes,
        probes,
    )


def comes(codes: bytes, reach: frozenset[int] | None) -> bool:
    """Whether a reader of these blocks may wait for some: on their way, or out of his reach."""
    if reach is None:
        return PENDING in codes
    return any(code != ABSENT and code - 1 not in reach for code in codes)


def slowest_of(
    places: Sequence[Place | None],
    keys: Sequence[bytes],
    below: Mapping[bytes, int] | None = None,
    codes: bytes = b"",
) -> int:
    """The slowest tier that one of the leased blocks came from, where `below` and the presence
    `codes` say where they were before.
    """
    slowest, below = 0, below or {}
    for index, place in enumerate(places):
        if place is not None:
            was = codes[index] - 1 if codes and codes[index] not in (ABSENT, PENDING) else 0
            slowest = max(slowest, place.tier, below.get(keys[index], 0), was)
    return slowest


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
