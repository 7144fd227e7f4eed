"""A tier that alters what it has loaded: the negative control. Tokens must then be others, or no
test here could tell right KV from wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvstore_client.engines.vllm_tier import KVStoreTier

__all__ = ["CorruptingTier"]


class CorruptingTier(KVStoreTier):
    """Flips a bit of every byte of the rows that were filled, just before vLLM may read them."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._rows_of: dict[int, list[int]] = {}

    def submit_load(self, job_metadata: Any) -> None:
        self._rows_of[job_metadata.job_id] = np.asarray(job_metadata.chunk_ids).tolist()
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        done = list(super().get_finished_jobs())
        view = self._primary_kv_view.cast("B")
        row_bytes = self.block_size_bytes
        for result in done:
            for row in self._rows_of.pop(result.job_id, ()):
                piece = np.frombuffer(view[row * row_bytes : (row + 1) * row_bytes], np.uint8)
                piece ^= 0x10
        return done
