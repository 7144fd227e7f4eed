"""What is asked of torch.cuda, without a GPU: torch's own tensors in CPU memory, and a torch.cuda
that writes down which device is current, what is on which stream, and what is registered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore_client.device import TorchCuda  # noqa: E402

pytestmark = pytest.mark.torch

STREAM = "copies of cuda:1"


class Cuda:
    """Stands for torch.cuda. journal: contexts entered and left."""

    def __init__(self) -> None:
        self.journal: list[str] = []

    @contextlib.contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.journal.append(f"in {name}")
        try:
            yield
        finally:
            self.journal.append(f"out {name}")

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return self._within(str(stream))


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


@pytest.fixture
def driver(cuda: Cuda) -> TorchCuda:
    return TorchCuda(
        SimpleNamespace(cuda=cuda, inference_mode=torch.inference_mode, frombuffer=torch.frombuffer)
    )


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_tensors_of_an_engine_in_inference_mode_are_copied_by_another_thread(
    driver: TorchCuda, worker: ThreadPoolExecutor, mode: Any
) -> None:
    host = np.arange(32, dtype=np.uint8)
    back = np.zeros_like(host)
    with mode():
        tensor = torch.zeros((4, 2, 8), dtype=torch.int16).transpose(0, 1)
        worker.submit(driver.copy_in, STREAM, host, tensor[:, 1]).result()
        assert not tensor[:, 0].any()
        worker.submit(driver.copy_out, STREAM, tensor[:, 1], back).result()
    assert np.array_equal(back, host)
    assert not worker.submit(torch.is_inference_mode_enabled).result(), "it was left on"
