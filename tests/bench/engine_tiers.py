"""Tiers of vLLM that note how long they hold the scheduler's thread: kvstore's, and vLLM's own of
files to compare with. Loaded by `module_path` as any tier; the option `times` names the file that a
finished request appends a line of JSON to: {"lookups_ns": [...], "hooks_ns": ...}.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvstore_client.engines.vllm_tier import KVStoreTier

__all__ = ["TimedFsTier", "TimedKVStoreTier"]


class _Timed:
    """Beside a tier's class, before it. One request at a time."""

    def __init__(self, *args: Any, times: str, **more: Any) -> None:
        self._times = Path(times)
        self._lookups_ns: list[int] = []
        self._hooks_ns = 0
        super().__init__(*args, **more)

    def lookup(self, key: Any, req_context: Any) -> Any:
        begun_ns = time.perf_counter_ns()
        answer = super().lookup(key, req_context)  # type: ignore[misc]
        self._lookups_ns.append(time.perf_counter_ns() - begun_ns)
        return answer

    def _hook(self, name: str, *args: Any) -> Any:
        begun_ns = time.perf_counter_ns()
        answer = getattr(super(), name)(*args)
        self._hooks_ns += time.perf_counter_ns() - begun_ns
        return answer

    def on_new_request(self, req_context: Any) -> Any:
        return self._hook("on_new_request", req_context)

    def submit_load(self, job_metadata: Any) -> None:
        self._hook("submit_load", job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        self._hook("submit_store", job_metadata)

    def get_finished_jobs(self) -> Any:
        return self._hook("get_finished_jobs")

    def on_schedule_end(self, context: Any) -> None:
        self._hook("on_schedule_end", context)

    def on_request_finished(self, req_context: Any) -> None:
        self._hook("on_request_finished", req_context)
        line = {"lookups_ns": self._lookups_ns, "hooks_ns": self._hooks_ns}
        with self._times.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._lookups_ns, self._hooks_ns = [], 0


class TimedKVStoreTier(_Timed, KVStoreTier):
    """The store's tier as engines load it."""


class TimedFsTier(_Timed, FileSystemTierManager):  # type: ignore[misc]
    """vLLM's own tier of files."""
