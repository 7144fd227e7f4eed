"""Loads a dynamic backend by the three names in its configuration."""

from __future__ import annotations

import importlib
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class StorageBackendFactory:
    """As the one of SGLang, for the name "dynamic"."""

    @classmethod
    def create_backend(
        cls, backend_name: str, storage_config: Any, mem_pool_host: Any, **kwargs: Any
    ) -> Any:
        assert backend_name == "dynamic"
        extra = storage_config.extra_config
        for name in ("backend_name", "module_path", "class_name"):
            if name not in extra:
                raise ValueError(f"{name} is missing")
        made = getattr(importlib.import_module(extra["module_path"]), extra["class_name"])
        if not issubclass(made, HiCacheStorage):
            raise TypeError(f"{made} is no backend")
        return made(storage_config, kwargs)
