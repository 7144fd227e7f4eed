"""Tensors in a real GPU's memory, through torch.cuda, over memory that is really shared. The order
of calls is proven without a GPU in `test_device`; these prove that the device keeps to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore.model.reasons import Reason  # noqa: E402
from kvstore_client import Client, ClientConfig, Space  # noqa: E402
from kvstore_client.testing import FakeStore  # noqa: E402
from tests.client_kit import model, tokens  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

LAYERS = 8
MODEL = model(layers=LAYERS, heads=8, head_size=128)
BLOCKS = 64
ELEMENTS = LAYERS * 2 * 8 * 4 * 128
"""Of a block, two bytes each."""


@pytest.fixture
def store() -> Iterator[FakeStore]:
    fake = FakeStore(capacity_blocks=4 * BLOCKS, staging_bytes=2 * BLOCKS * ELEMENTS * 2)
    yield fake
    fake.close()


@pytest.fixture
def space(store: FakeStore) -> Iterator[Space]:
    config = ClientConfig(deadline_ms=60_000)
    with Client("/fake", transport=store.transport, config=config) as client:
        yield client.space(MODEL)


def written(number: int) -> Any:
    """Blocks that a kernel has been told to write, after another that takes its time."""
    out = torch.zeros((BLOCKS, ELEMENTS), dtype=torch.int16, device="cuda")
    torch.cuda._sleep(2_000_000)
    return out.add_(number % 30_000)


def test_a_store_right_after_a_kernel_has_what_the_kernel_wrote(
    space: Space, store: FakeStore
) -> None:
    """1,000 rounds: the push is called while the kernel that writes the blocks is still queued, and
    the memory is overwritten by another as soon as the push returns. What is stored is what the
    first one wrote, every byte."""
    keys = space.keys(tokens(BLOCKS))
    out = np.zeros((BLOCKS, ELEMENTS), np.int16)
    for number in range(1, 1_001):
        made = written(number)
        assert space.push(keys, made).stored == BLOCKS
        made.fill_(-1)
        assert space.fetch(keys, out).blocks == BLOCKS
        assert (out == number).all(), number
        store.drop(keys)


def test_a_fetch_writes_nothing_that_a_kernel_still_reads(space: Space) -> None:
    """The tensor is given to a fetch while a kernel that reads it is queued behind a slow one: the
    kernel sees the old bytes, whoever looks after the fetch the new ones."""
    keys = space.keys(tokens(BLOCKS))
    space.push(keys, written(7))
    for _ in range(100):
        place = torch.full((BLOCKS, ELEMENTS), 3, dtype=torch.int16, device="cuda")
        torch.cuda._sleep(2_000_000)
        read = place.clone()
        assert space.fetch(keys, place).blocks == BLOCKS
        after = place.clone()
        torch.cuda.synchronize()
        assert bool((read == 3).all())
        assert bool((after == 7).all())


def test_layers_arrive_while_the_compute_stream_is_busy(space: Space) -> None:
    """Copies do not stand behind kernels that were launched after the fetch was asked for: all
    layers are there, and right, while such a kernel still runs. So is what was put by layers."""
    keys = space.keys(tokens(BLOCKS))
    by_layer = [written(layer).reshape(BLOCKS, LAYERS, -1)[:, layer] for layer in range(LAYERS)]
    with space.push_layers(keys) as push:
        for layer in range(LAYERS):
            push.put(layer, by_layer[layer])
        assert push.commit().stored == BLOCKS
    out = torch.zeros((LAYERS, BLOCKS, ELEMENTS // LAYERS), dtype=torch.int16, device="cuda")
    with space.fetch_layers(keys, out) as fetch:
        torch.cuda._sleep(20_000_000_000)  # about ten seconds
        busy = torch.cuda.Event()
        busy.record()
        assert [fetch.wait(layer) for layer in range(LAYERS)] == [BLOCKS] * LAYERS
        assert not busy.query(), "the copies were to overlap this kernel"
    torch.cuda.synchronize()
    for layer in range(LAYERS):
        assert bool((out[layer] == layer).all())


def test_memory_that_goes_leaves_the_device_in_order(space: Space, store: FakeStore) -> None:
    """Regions are closed by the daemon and the client is closed: they were unregistered before they
    were unmapped, so the device works on, and no error is left for the next kernel."""
    keys = space.keys(tokens(BLOCKS))
    for number in range(1, 6):
        space.push(keys, written(number))
        place = torch.zeros((BLOCKS, ELEMENTS), dtype=torch.int16, device="cuda")
        assert space.fetch(keys, place).blocks == BLOCKS
        store.unmap()
        torch.cuda.synchronize()
        assert bool((place == number).all())
        store.drop(keys)
    store.restart()
    gone = space.fetch(keys, place)
    assert (gone.blocks, gone.reason is Reason.OK) == (0, False)
    assert int(torch.ones(8, device="cuda").sum()) == 8
    torch.cuda.synchronize()


def test_the_rate_of_a_fetch_beside_a_raw_pinned_copy(
    space: Space, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measures; its bytes alone can fail it. Prints GB/s of fetches from registered regions and of
    one cudaMemcpyAsync from pinned memory of the same size, alternately."""
    keys = space.keys(tokens(BLOCKS))
    space.push(keys, written(9))
    place = torch.zeros((BLOCKS, ELEMENTS), dtype=torch.int16, device="cuda")
    raw = torch.full((BLOCKS, ELEMENTS), 9, dtype=torch.int16).pin_memory()
    took: dict[str, list[float]] = {"fetch": [], "raw": []}
    for _ in range(50):
        for name in took:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            if name == "fetch":
                assert space.fetch(keys, place).blocks == BLOCKS
            else:
                place.copy_(raw, non_blocking=True)
                torch.cuda.synchronize()
            took[name].append(time.perf_counter() - begun)
            assert bool((place == 9).all())
    with capsys.disabled():
        size = raw.numel() * 2
        rates = {name: size / sorted(times)[25] / 1e9 for name, times in took.items()}
        print(f"\nH2D of {size >> 20} MiB: {rates} GB/s")
