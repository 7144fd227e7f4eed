"""kvstore as a secondary tier of vLLM's OffloadingConnector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 4294967296, "offload_prompt_only": false,
        "secondary_tiers": [{"type": "KVStoreTier",
          "module_path": "kvstore_client.engines.vllm_tier",
          "target": "/run/kvstore/data.sock"}]}}'

Promises: the scheduler's thread never copies and never waits here, but in `drain_jobs` and
`shutdown`, as vLLM wants it; nothing is raised into vLLM, whatever the daemon does: a tier that
cannot work says why in the log and answers that it has nothing. Options are those of
`options`; see deploy/docs/vllm.md.

Imports vLLM: `import kvstore_client` does not import this module.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.model.reasons import KVStoreError
from kvstore_client.engines.async_tier import Answer, AsyncTier, Deadlines, Finished
from kvstore_client.engines.model_spaces import ModelSpaces, doubt_of
from kvstore_client.engines.options import Options
from kvstore_client.engines.refused import Refused
from kvstore_client.engines.vllm_facts import (
    Facts,
    fingerprint_of,
    group_of,
    key_of,
    leading_group,
    weights_folder,
    why_unnamed,
)
from kvstore_client.weights import WeightsDigest

__all__ = ["VERSIONS", "KVStoreTier"]

log = logging.getLogger("vllm.kvstore")
"""Below vLLM's own logger, which alone has a handler in an engine."""

VERSIONS: Final = {"0.32": "kvstore_client.engines.vllm_0_32"}
"""Minor versions of vLLM, and the module that reads the facts of each."""
METRIC: Final = "vllm:kvstore_tier_chunks"

T = TypeVar("T")

_ANSWERS: Final = {
    Answer.HIT: LookupResult.HIT,
    Answer.MISS: LookupResult.MISS,
    Answer.RETRY: LookupResult.RETRY,
}


def reader_of(version: str) -> str | None:
    """The module that reads the facts of this version of vLLM; None: it is not supported."""
    return VERSIONS.get(".".join(version.split(".")[:2]))


def _no_jobs() -> Iterable[JobResult]:
    return ()


def guarded(otherwise: Callable[[], T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Nothing that goes wrong in a hook gets into vLLM, which would end the engine."""

    def decorate(hook: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(hook)
        def call(self: KVStoreTier, *args: Any, **more: Any) -> T:
            try:
                return hook(self, *args, **more)
            except Exception:  # the fail-open boundary
                self._stumbled(hook.__name__)
                return otherwise()

        return call

    return decorate


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped here
    """See the module's docstring."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._tier: AsyncTier | None = None
        self._chains: dict[str, list[bytes]] = {}
        self._failed: list[JobResult] = []
        self._stumbles: dict[str, int] = {}
        try:
            self._tier = self._start(options, offloading_spec, primary_kv_view)
        except (Refused, KVStoreError, ValueError) as error:
            log.error("kvstore is off, the engine goes on without it: %s", error)
        except Exception:  # the fail-open boundary: without a store the engine is whole
            log.exception("kvstore is off, the engine goes on without it")

    @staticmethod
    def _start(given: dict[str, Any], spec: Any, view: memoryview) -> AsyncTier:
        reader = reader_of(vllm.__version__)
        if reader is None:
            raise Refused(f"vLLM {vllm.__version__} is not one of {', '.join(VERSIONS)}")
        options = Options.of(given)
        deadlines = Deadlines(
            options.lookup_deadline_ms, options.load_deadline_ms, options.store_deadline_ms
        )
        rows = np.frombuffer(view.cast("B"), np.uint8).reshape(len(view), -1)
        facts: Facts = importlib.import_module(reader).facts_of(spec, rows.shape[1])
        fingerprint = fingerprint_of(
            facts,
            model_name=options.model_name,
            weights_revision=options.weights_revision,
            weight_epoch=options.weight_epoch,
        )
        folder = weights_folder(facts)
        unknown = fingerprint.identity.weights_revision is None
        if unknown and folder is None:
            log.warning("kvstore: nothing is shared: %s. Set weights_revision", why_unnamed(facts))
        spaces = ModelSpaces(
            options.client(str(spec.config.engine_id)),
            fingerprint,
            weights=WeightsDigest(folder) if unknown and folder is not None else None,
            doubt=lambda: "" if folder is None else doubt_of(folder),
        )
        log.info(
            "kvstore at %s for %s: %d rows of %d bytes",
            options.target,
            fingerprint.identity.model_name,
            rows.shape[0],
            facts.content_bytes,
        )
        tier = AsyncTier(
            spaces,
            rows,
            facts.content_bytes,
            key_of,
            group_of=group_of,
            leading=leading_group(facts),
            deadlines=deadlines,
            durable=bool(options.durable),
        )
        tier.connect_ahead()
        return tier

    def _stumbled(self, hook: str) -> None:
        count = self._stumbles[hook] = self._stumbles.get(hook, 0) + 1
        if count == 1:
            log.exception("kvstore: %s failed; told once, counts as a miss", hook)

    # ---------------------------------------------------------------- what vLLM calls

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._tier is None:
            return LookupResult.MISS
        return _ANSWERS[self._tier.lookup(req_context.req_id, key)]

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._tier is not None:
            self._tier.request_began(req_context.req_id)
        return RequestOffloadingContext()

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._submit_load)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._submit_store)

    def _submit(self, job: TransferJob, submit: Callable[[AsyncTier, TransferJob], None]) -> None:
        """vLLM waits for the end of each job that it has handed over: one that cannot be taken is
        reported as failed.
        """
        try:
            if self._tier is not None:
                submit(self._tier, job)
                return
        except Exception:  # the fail-open boundary
            self._stumbled(submit.__name__)
        self._failed.append(JobResult(job_id=job.job_id, success=False))

    @staticmethod
    def _submit_load(tier: AsyncTier, job: TransferJob) -> None:
        """vLLM asks for a window from its end."""
        end_of = job.req_context._offload_key_positions
        rows = np.asarray(job.chunk_ids).tolist()
        pairs = sorted(zip(job.keys, rows, strict=True), key=lambda pair: end_of.get(pair[0], 0))
        keys, rows = [key for key, _ in pairs], [row for _, row in pairs]
        tier.submit_load(job.job_id, job.req_context.req_id, keys, rows)

    def _submit_store(self, tier: AsyncTier, job: TransferJob) -> None:
        keys, rows = list(job.keys), np.asarray(job.chunk_ids).tolist()
        chain = self._chain(job.req_context)
        tier.submit_store(job.job_id, job.req_context.req_id, keys, rows, _until(chain, keys))

    def _chain(self, context: ReqContext) -> list[bytes]:
        """The keys of the request's chunks, of each group from its first token on; vLLM adds to
        them as the request grows.
        """
        positions = context._offload_key_positions
        chain = self._chains.setdefault(context.req_id, [])
        chain.extend(itertools.islice(positions, len(chain), None))
        return chain

    @guarded(_no_jobs)
    def get_finished_jobs(self) -> Iterable[JobResult]:
        done = [] if self._tier is None else self._tier.finished()
        failed, self._failed = self._failed, []
        return [*failed, *map(_result, done)]

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._tier is not None:
            self._tier.end_step()

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._chains.pop(req_context.req_id, None)
        if self._tier is not None:
            self._tier.request_finished(req_context.req_id)

    @guarded(lambda: None)
    def drain_jobs(self) -> None:
        """When vLLM resets its caches, as after an update of the weights."""
        if self._tier is not None:
            self._tier.drain()

    @guarded(lambda: None)
    def shutdown(self) -> None:
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()

    # ---------------------------------------------------------------- metrics

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {
            METRIC: OffloadingCounterMetadata(
                documentation="Chunks at kvstore by outcome: lookup_hit, lookup_declined, ...",
                labelnames=("outcome",),
            )
        }

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        counted = {} if self._tier is None else self._tier.counted()
        if not counted:
            return None
        stats = OffloadingConnectorStats()
        for outcome, number in counted.items():
            stats.increase_counter(METRIC, number, (outcome,))
        return stats


def _until(chain: list[bytes], keys: Collection[bytes]) -> list[bytes]:
    """The chain up to the last of the keys. Looked for from its end, where new chunks are."""
    left = set(keys)
    for end in range(len(chain), 0, -1):
        if chain[end - 1] in left:
            return chain[:end]
    return []


def _result(done: Finished) -> JobResult:
    partial = done.keys if done.load and not done.success and done.keys else None
    return JobResult(
        job_id=done.job_id,
        success=done.success,
        successful_keys=partial,
        transfer_time=done.seconds,
        transfer_bytes=done.bytes,
    )
