"""Tensors in a GPU's memory, on a double whose copies happen when they are waited for: the order of
events, registrations and calls, and the bytes that come of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.model.reasons import BadRequest, Reason
from kvstore_client.device import Pin
from kvstore_client.testing import FakeStore, FakeTransport
from tests.client_kit import MakeClient, clients, model, rows, tokens
from tests.device_double import RecordingDevice, Tensor

LAYERS = 3
MODEL = model(layers=LAYERS)
LAYER_BYTES = 2048
BLOCK_BYTES = LAYERS * LAYER_BYTES
BLOCKS = 4
PATHS = ("shm", "grpc")


@pytest.fixture(params=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with clients(request.param) as maker:
        yield maker


@pytest.fixture
def store() -> Iterator[FakeStore]:
    fake = FakeStore(capacity_blocks=32, staging_bytes=16 * BLOCK_BYTES)
    yield fake
    fake.close()


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice()


def noted(store: FakeStore, device: RecordingDevice) -> Callable[[], Any]:
    """Connections whose calls stand in the device's journal."""

    def answer(method: str, request: Any) -> Any:
        ended = getattr(request, "lease_ids", ())
        if method in ("Acquire", "Commit") or (method == "Release" and ended):
            device.note(method)
        return store.answer(method, request)

    return FakeTransport.factory(answer, store.dial)


def by_layer(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(data.reshape(len(data), LAYERS, -1).swapaxes(0, 1))


def order(device: RecordingDevice, *names: str) -> list[str]:
    """The journal's entries of these names, each run of equal ones once."""
    kept = [entry for entry in device.journal if entry in names]
    return [entry for at, entry in enumerate(kept) if not at or kept[at - 1] != entry]


# ---------------------------------------------------------------- fetch


def test_a_fetch_waits_for_the_callers_kernels_and_ends_its_lease_after_the_last_event(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    space = make(transport=noted(store, device), device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    space.push(keys, data)
    device.journal.clear()
    out = Tensor(np.zeros_like(data))
    before = out.array.copy()
    device.launch("kernel", lambda: before.__setitem__(..., out.array))  # still reads it
    fetched = space.fetch(keys, out)
    assert (fetched.blocks, fetched.reason, fetched.data) == (BLOCKS, Reason.OK, out)
    assert np.array_equal(out.array, data)
    assert not before.any(), "the memory was written while a kernel still read it"
    assert store.wait(lambda s: not s.leases)
    assert order(device, "Acquire", "kernel", "copied in", "event ended", "Release") == [
        "Acquire",
        "kernel",
        "copied in",
        "event ended",
        "Release",
    ]
    assert "hold" in device.journal
    assert device.has_registered(1)
    assert "registered read-only" in device.journal
    assert not device.broken


@pytest.mark.parametrize("path", PATHS)
def test_layers_are_told_of_after_their_event(
    make: MakeClient, store: FakeStore, device: RecordingDevice, path: str
) -> None:
    store.shared_memory = path == "shm"
    space = make(transport=noted(store, device), device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    space.push(keys, data)
    # As an engine has it: heads before tokens, so that no row is contiguous.
    whole = np.zeros((LAYERS, 2, 2, BLOCKS, 4, 64), np.int16)
    out = [Tensor(layer.transpose(2, 0, 1, 3, 4)) for layer in whole]
    with space.fetch_layers(keys, out) as fetch:
        for layer in range(LAYERS):
            assert fetch.wait(layer) == BLOCKS
            got = np.ascontiguousarray(out[layer].array).reshape(BLOCKS, -1).view(np.uint8)
            assert np.array_equal(got, by_layer(data)[layer])
        assert fetch.result().blocks == BLOCKS
    assert device.journal.count("event ended") >= LAYERS
    assert not device.broken


def test_generations_are_compared_after_the_event(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    """A block that is reused while its bytes are on their way is a miss."""
    space = make(transport=store.transport, device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    space.push(keys, data)
    device.landed = lambda: store.drop(keys[2:3])
    out = Tensor(np.zeros_like(data))
    fetched = space.fetch(keys, out)
    assert (fetched.blocks, fetched.reason) == (2, Reason.GENERATION_CHANGED)
    space.push(keys, data)
    again = space.fetch(keys, out, all_or_nothing=True)
    assert (again.blocks, again.reason) == (0, Reason.GENERATION_CHANGED)


def test_no_copy_waits_for_a_registration(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    """Pinning a mapping of GiB takes seconds: until it is done copies are not pinned."""
    may_go_on = threading.Event()
    device.registering = lambda: may_go_on.wait(60)
    space = make(transport=store.transport, device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    assert space.push(keys, Tensor(data)).stored == BLOCKS
    out = Tensor(np.zeros_like(data))
    assert space.fetch(keys, out).blocks == BLOCKS
    assert np.array_equal(out.array, data)
    assert not device.registered
    may_go_on.set()
    assert device.has_registered(2), "the region, and staging"
    assert not device.broken


def test_memory_that_cannot_be_registered_is_copied_from_all_the_same(
    make: MakeClient, store: FakeStore
) -> None:
    device = RecordingDevice(registers=False)
    space = make(transport=store.transport, device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    assert space.push(keys, Tensor(data)).stored == BLOCKS
    out = Tensor(np.zeros_like(data))
    assert space.fetch(keys, out).blocks == BLOCKS
    assert np.array_equal(out.array, data)
    assert "unregistered" not in device.journal


# ---------------------------------------------------------------- push


@pytest.mark.parametrize("path", PATHS)
def test_a_push_reads_after_the_kernel_and_commits_after_its_copies(
    make: MakeClient, store: FakeStore, device: RecordingDevice, path: str
) -> None:
    store.shared_memory = path == "shm"
    space = make(transport=noted(store, device), device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    made = Tensor(np.zeros_like(data))
    device.launch("kernel", lambda: made.array.__setitem__(..., data))
    assert space.push(keys, made).stored == BLOCKS
    assert np.array_equal(space.fetch(keys).data, data)
    assert device.journal.index("kernel") < device.journal.index("copied out")
    if path == "shm":
        names = ("kernel", "copied out", "event ended", "Commit")
        assert order(device, *names) == list(names)
        assert device.has_registered(1)
        assert "registered" in device.journal
    assert not device.broken


def test_layers_are_read_after_their_kernels_and_committed_after_all_copies(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    space = make(transport=noted(store, device), device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    made = [Tensor(np.zeros((BLOCKS, LAYER_BYTES), np.uint8)) for _ in range(LAYERS)]
    with space.push_layers(keys) as push:
        for layer in range(LAYERS):
            array, computed = made[layer].array, by_layer(data)[layer]
            device.launch(f"kernel {layer}", partial(np.copyto, array, computed))
            push.put(layer, made[layer])
        assert push.commit().stored == BLOCKS
    assert np.array_equal(space.fetch(keys).data, data)
    last = len(device.journal) - 1 - device.journal[::-1].index("copied out")
    assert device.journal.index("Commit") > last
    assert not device.broken


# ---------------------------------------------------------------- kernels that do not end


class Clock:
    """100 s go by with each look at an event."""

    def __init__(self, device: RecordingDevice) -> None:
        self._ahead_ns = 0
        device.asked = self._move

    def _move(self) -> None:
        self._ahead_ns += 100 * 10**9

    def __call__(self) -> int:
        return time.monotonic_ns() + self._ahead_ns


@pytest.mark.parametrize("path", PATHS)
def test_a_deadline_is_kept_behind_a_kernel_that_does_not_end(
    make: MakeClient, store: FakeStore, device: RecordingDevice, path: str
) -> None:
    """And nothing is queued or pinned meanwhile, that would have to be waited for."""
    store.shared_memory = path == "shm"
    clock = Clock(device)
    space = make(transport=store.transport, device=device, clock=clock).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    space.push(keys[:2], data[:2])
    device.stuck = True
    out = Tensor(np.zeros_like(data))
    layers = [Tensor(np.zeros((BLOCKS, LAYER_BYTES), np.uint8)) for _ in range(LAYERS)]
    fetched = space.fetch(keys[:2], out, deadline_ms=600_000)
    assert (fetched.blocks, fetched.reason) == (0, Reason.DEADLINE_EXCEEDED)
    with space.fetch_layers(keys[:2], layers, deadline_ms=600_000) as fetch:
        assert fetch.wait(0) == 0
        assert fetch.result().reason is Reason.DEADLINE_EXCEEDED
    pushed = space.push(keys, Tensor(data), deadline_ms=600_000)
    assert (pushed.stored, pushed.reason) == (0, Reason.DEADLINE_EXCEEDED)
    compared = space.compare(keys[:2], Tensor(data), deadline_ms=600_000)
    assert (compared.blocks, compared.reason) == (0, Reason.DEADLINE_EXCEEDED)
    assert not device.copies.steps
    assert not device.registered
    assert store.wait(lambda s: not s.leases and not s._reservations)
    device.stuck, device.asked = False, lambda: None
    assert space.fetch(keys[:2], out).blocks == 2
    assert space.push(keys, Tensor(data)).stored == 2
    assert not device.broken


def test_a_fetch_by_layers_is_closed_behind_a_kernel_that_does_not_end(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    space = make(transport=store.transport, device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    space.push(keys, data)
    device.stuck, asked = True, threading.Event()
    device.asked = asked.set
    out = [Tensor(np.zeros((BLOCKS, LAYER_BYTES), np.uint8)) for _ in range(LAYERS)]
    fetch = space.fetch_layers(keys, out, deadline_ms=600_000)
    assert asked.wait(10)
    fetch.close()
    assert (fetch.result().blocks, fetch.result().reason) == (0, Reason.CANCELLED)
    assert store.wait(lambda s: not s.leases)
    assert not device.broken


def test_a_push_by_layers_ends_behind_a_kernel_that_does_not_end(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    clock = Clock(device)
    space = make(transport=store.transport, device=device, clock=clock).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    device.stuck = True  # for longer than any reservation lives
    with space.push_layers(keys, deadline_ms=600_000) as push:
        for layer in range(LAYERS):
            push.put(layer, Tensor(by_layer(data)[layer]))
        pushed = push.commit()
    assert (pushed.stored, pushed.reason) == (0, Reason.LEASE_EXPIRED)
    assert store.wait(lambda s: not s._reservations)
    asked = threading.Event()
    device.asked = asked.set
    with space.push_layers(keys, deadline_ms=600_000) as push:
        push.put(0, Tensor(by_layer(data)[0]))
        assert asked.wait(10)
    assert not device.copies.steps
    assert store.wait(lambda s: not s._reservations)
    assert not device.broken


# ---------------------------------------------------------------- ends


def test_a_device_that_is_lost_makes_misses_and_skipped_pushes(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    space = make(transport=store.transport, device=device).space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    space.push(keys[:2], data[:2])
    device.lost = True
    fetched = space.fetch(keys[:2], Tensor(np.zeros_like(data)))
    assert (fetched.blocks, fetched.reason) == (0, Reason.INTERNAL)
    fetch = space.fetch_layers(keys[:2], [Tensor(layer) for layer in by_layer(data)])
    assert (fetch.wait(0), fetch.result().blocks) == (0, 0)
    assert space.push(keys, Tensor(data)).stored == 0
    assert store.wait(lambda s: not s._reservations)
    with space.push_layers(keys) as push:
        for layer in range(LAYERS):
            push.put(layer, Tensor(by_layer(data)[layer]))
        assert push.commit().reason is Reason.INTERNAL
    assert space.lookup(keys).blocks == 2
    assert store.wait(lambda s: not s.leases and not s._reservations)


def test_regions_are_unregistered_before_they_are_unmapped(
    make: MakeClient, store: FakeStore, device: RecordingDevice
) -> None:
    client = make(transport=store.transport, device=device)
    space = client.space(MODEL)
    keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
    space.push(keys, Tensor(data))
    out = Tensor(np.zeros_like(data))
    assert space.fetch(keys, out).blocks == BLOCKS
    assert device.has_registered(2), "the region, and staging"
    store.unmap()
    assert store.wait(lambda s: bool(s.unmapped))
    assert len(device.registered) == 1
    client.close()
    assert not device.registered
    assert not device.broken


def test_a_registration_ends_when_no_copy_is_under_way(
    store: FakeStore, device: RecordingDevice
) -> None:
    with clients("threads") as make:
        space = make(transport=store.transport, device=device).space(MODEL)
        keys, data = space.keys(tokens(BLOCKS)), rows(BLOCKS, BLOCK_BYTES)
        space.push(keys, data)
        space.fetch(keys, Tensor(np.zeros_like(data)))
        session, _ = space._core.root.link().peek()
        assert session is not None
        assert session.memory is not None
        (region,) = session.memory._regions.values()
        pin = region.pin
        assert isinstance(pin, Pin)
        assert device.has_registered(1)
        assert pin.use()
        assert not pin.end()
        assert not region.drop()
        assert device.registered
        left = threading.Timer(0.0, pin.leave)
        left.start()
        assert pin.end(10)
        assert not device.registered
        assert not pin.use()
        assert pin.end()
        assert region.drop()
        assert not device.broken


def test_tensors_that_do_not_fit_are_misuse(store: FakeStore, device: RecordingDevice) -> None:
    with clients("threads") as make:
        space = make(transport=store.transport, device=device).space(MODEL)
        keys = space.keys(tokens(2))
        short = Tensor(np.zeros((2, BLOCK_BYTES - 2), np.uint8))
        few = Tensor(np.zeros((1, BLOCK_BYTES), np.uint8))
        for wrong in (short, few, Tensor(np.zeros((), np.uint8))):
            for call in (space.fetch, space.push):
                with pytest.raises(BadRequest):
                    call(keys, wrong)
        with pytest.raises(BadRequest):
            space.fetch_layers(keys, [short] * LAYERS)
    assert not store.requests["Acquire"]
