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
    """Stands for torch.cuda. journal: contexts entered and left, and calls of the runtime."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.result = 0

    @contextlib.contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.journal.append(f"in {name}")
        try:
            yield
        finally:
            self.journal.append(f"out {name}")

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return self._within(str(device))

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, length_bytes: int, flags: int) -> int:
        self.journal.append(f"register {address} {length_bytes} {flags:#x}")
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        self.journal.append(f"unregister {address}")
        return self.result

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


def test_what_a_worker_does_it_does_on_the_tensors_device(
    driver: TorchCuda, cuda: Cuda, worker: ThreadPoolExecutor
) -> None:
    """The first device is current in a new thread: it would get a context, and a stream's context
    would make it current again when it is left."""
    tensor = torch.zeros(8, dtype=torch.uint8)
    host = np.zeros(8, np.uint8)
    place, stream = str(tensor.device), STREAM
    inside = [f"in {place}", f"in {stream}", f"out {stream}", f"out {place}"]
    for copy in (driver.copy_in, driver.copy_out):
        cuda.journal.clear()
        pair = (host, tensor) if copy == driver.copy_in else (tensor, host)
        worker.submit(copy, stream, *pair).result()
        assert cuda.journal == inside
    cuda.journal.clear()
    assert driver.register(4096, 512, driver.place(tensor), read_only=True)
    assert driver.register(8192, 512, driver.place(tensor), read_only=False)
    driver.unregister(4096)
    assert cuda.journal == [
        f"in {place}",
        "register 4096 512 0x9",
        f"out {place}",
        f"in {place}",
        "register 8192 512 0x1",
        f"out {place}",
        f"in {place}",
        "unregister 4096",
        f"out {place}",
    ]
    cuda.result = 1
    assert not driver.register(12288, 512, driver.place(tensor), read_only=True)


def test_host_memory_that_must_not_be_written_is_copied_without_a_copy_of_its_own(
    driver: TorchCuda,
) -> None:
    """The driver's aliases, on the CPU: torch would warn of such memory, which is an error here."""
    host = np.arange(24, dtype=np.uint8)
    host.flags.writeable = False
    target = torch.zeros((3, 2, 4), dtype=torch.bfloat16).transpose(0, 1)[:, :, :2]
    assert not driver.owns(target)
    driver.copy_in(STREAM, host, target)
    back = np.zeros(24, np.uint8)
    driver.copy_out(STREAM, target, back)
    assert np.array_equal(back, host)
