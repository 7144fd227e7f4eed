"""A backend that alters what it has loaded: the negative control. Pages must then be others, or no
test here could tell right bytes from wrong.
"""

from __future__ import annotations

from typing import Any

from kvstore_client.engines.sglang import KVStoreBackend

__all__ = ["CorruptingBackend"]


class CorruptingBackend(KVStoreBackend):
    """Flips a bit of the last byte of each page that was loaded, and says that it is right."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        results = super().batch_get_v1(keys, host_indices, extra_info)
        assert self._pages is not None
        for loaded, page in zip(results, self._pages.pieces(host_indices, len(keys)), strict=True):
            if loaded:
                page[-1][-1] ^= 0x10
        return results
