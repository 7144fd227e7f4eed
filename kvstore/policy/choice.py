"""The eviction policies by the names that settings and tools know them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvstore.policy.base import Entry, EvictionPolicy
from kvstore.policy.hit_density import HitDensity
from kvstore.policy.lru import Lru

E = TypeVar("E", bound=Entry)

NAMES = ("hit_density", "lru")


def policy_maker(
    name: str, pool_bytes: int, archive_bytes: int = 0
) -> Callable[[], EvictionPolicy[E]]:
    """Makes the policies of pools that have `pool_bytes` in all tiers together, over archives of
    `archive_bytes` (or blocks of both). ValueError: no such policy.
    """
    if name == "lru":
        return Lru
    if name == "hit_density":
        reach = 1 + archive_bytes / pool_bytes
        return lambda: HitDensity(reach=reach)
    raise ValueError(f"no policy {name!r}; there are {', '.join(NAMES)}")
