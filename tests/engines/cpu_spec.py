"""vLLM's tiering on a machine without a GPU: what copies between KV cache and host memory is a
memcpy. For tests only; everything else of vLLM's offloading is its own.

`spec_name: CpuTieringSpec, spec_module_path: tests.engines.cpu_spec` in the connector's settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CpuTieringSpec"]


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is untyped here
    """TieringOffloadingSpec with a worker that needs no accelerator."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, in the worker's own thread. Every transfer succeeds."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._device = [tensor.tensor for tensor in kv_caches.tensors]
        self._pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._host = [
            region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._transfer(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._transfer(job_id, dst_spec, src_spec, to_host=False)

    def _transfer(
        self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, to_host: bool
    ) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec)
        begun = time.perf_counter()
        moved = 0
        for group, block, chunk, place in self._places(blocks, chunks.chunk_ids.tolist()):
            for ref in self._groups[group]:
                page = self._pages[ref.tensor_idx]
                device = self._device[ref.tensor_idx][block][: ref.page_size_bytes]
                begin = place * page
                host = self._host[ref.tensor_idx][chunk][begin : begin + ref.page_size_bytes]
                source, target = (device, host) if to_host else (host, device)
                target.copy_(source)
                moved += ref.page_size_bytes
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - begun))
        return True

    def _places(
        self, blocks: GPULoadStoreSpec, chunks: Sequence[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """(group, device block, host chunk, place of the block in the chunk)."""
        ids = iter(blocks.block_ids.tolist())
        first_chunk = 0
        for group, (size, first_block) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            skipped = first_block % self._blocks_per_chunk
            for at in range(skipped, skipped + size):
                chunk, place = divmod(at, self._blocks_per_chunk)
                yield group, next(ids), chunks[first_chunk + chunk], place
            first_chunk += -(-(skipped + size) // self._blocks_per_chunk) if size else 0

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._host.clear()
        self._device.clear()
        self._region.cleanup()
