"""The abstract storage backend, and what it is given."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any


@dataclass
class HiCacheStorageConfig:
    """Of one rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "m"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0


@dataclass
class HiCacheStorageExtraInfo:
    """prefix_keys: of the pages before those of the call."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


@dataclass
class PoolTransferResult:
    """Pages of a prefix that are there, in the first pool and in each other one."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


class HiCacheStorage(abc.ABC):
    """What has to be there, and what is called in any case."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        return None

    def on_host_pools_registered(self) -> None:
        return None

    @abc.abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abc.abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abc.abstractmethod
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool: ...

    @abc.abstractmethod
    def exists(self, key: str) -> bool: ...

    def clear(self) -> None:
        return None

    def get_stats(self) -> Any:
        return None
