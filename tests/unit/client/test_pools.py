"""Pools of GPU memory that the daemon lends, on a double whose copies happen when they are waited
for: what is named, opened, copied and compared in which order, and what happens if it cannot be.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import shm
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.pools import Access, Pool
from kvstore_client.regions import Memory
from kvstore_client.testing import FakeTransport
from tests.client_kit import MakeClient, clients, model, rows, tokens
from tests.device_double import RecordingDevice, Tensor
from tests.pool_store import UUID, PoolStore

LAYERS = 3
MODEL = model(layers=LAYERS)
LAYER_BYTES = 2048
BLOCK_BYTES = LAYERS * LAYER_BYTES
BLOCKS = 4
DATA = rows(BLOCKS, BLOCK_BYTES)


@pytest.fixture(params=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make(kind: str) -> Iterator[MakeClient]:
    with clients(kind) as maker:
        yield maker


@pytest.fixture
def store() -> Iterator[PoolStore]:
    fake = PoolStore(capacity_blocks=32, staging_bytes=16 * BLOCK_BYTES)
    yield fake
    fake.close()


@pytest.fixture
def device(kind: str) -> RecordingDevice:
    double = RecordingDevice()
    double.remote = kind == "asyncio"
    return double


class Stage:
    """A client with blocks in the store, `risen` of them in the pool."""

    def __init__(
        self, make: MakeClient, store: PoolStore, device: RecordingDevice, risen: int = BLOCKS
    ) -> None:
        def answer(method: str, request: Any) -> Any:
            if method == "Acquire":
                device.note(f"Acquire {request.device_uuid}")
            if method == "Release" and request.lease_ids:
                device.note("Release")
            return store.answer(method, request)

        transport = FakeTransport.factory(answer, store.dial)
        self.client = make(transport=transport, device=device)
        self.space = self.client.space(MODEL)
        self.keys = self.space.keys(tokens(BLOCKS))
        self.space.push(self.keys, DATA)
        store.rise(self.keys[:risen])
        device.journal.clear()

    def fetch(self, **more: Any) -> tuple[Any, NDArray[np.uint8]]:
        out = Tensor(np.zeros_like(DATA))
        fetched = self.space.fetch(self.keys, out, **more)
        assert np.array_equal(out.array[: fetched.blocks], DATA[: fetched.blocks]), "wrong bytes"
        return fetched, out.array

    def memory(self) -> Memory:
        core: Any = self.space._core
        session, _ = core.root.link().peek()
        assert session is not None
        memory: Memory = session.memory
        return memory


def raising(error: Exception) -> None:
    raise error


# ---------------------------------------------------------------- the order


def test_a_fetch_names_its_gpu_opens_the_pool_once_and_releases_after_the_event(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    for _ in range(3):
        fetched, _ = stage.fetch()
        assert (fetched.blocks, fetched.reason) == (BLOCKS, Reason.OK)
        assert store.wait(lambda s: not s.leases)
    journal = [entry for entry in device.journal if entry != "hold"]
    one = [f"Acquire {UUID}", *["copied from a pool"] * BLOCKS, "event ended", "Release"]
    assert journal == [one[0], "pool opened", *one[1:], *one, *one]
    assert stage.client.connection().pools == ((UUID,), 3 * BLOCKS, 0, "")
    stage.client.close()
    assert device.journal[-1] == "pool closed"
    assert not device.broken


def test_blocks_in_pools_and_in_host_memory_come_in_one_fetch(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device, risen=0)
    store.rise([stage.keys[1], stage.keys[3]])
    fetched, _ = stage.fetch()
    assert (fetched.blocks, fetched.reason) == (BLOCKS, Reason.OK)
    assert stage.client.connection().pools.blocks == 2
    assert device.journal.count("copied in") == device.journal.count("copied from a pool") == 2
    assert not device.broken


def test_layers_come_out_of_a_pool_under_one_lease(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device, risen=3)
    # As an engine has it: heads before tokens, so that no row is contiguous.
    whole = np.zeros((LAYERS, 2, 2, BLOCKS, 4, 64), np.int16)
    out = [Tensor(layer.transpose(2, 0, 1, 3, 4)) for layer in whole]
    by_layer = DATA.reshape(BLOCKS, LAYERS, -1).swapaxes(0, 1)
    with stage.space.fetch_layers(stage.keys, out) as fetch:
        for layer in range(LAYERS):
            assert fetch.wait(layer) == BLOCKS
            got = np.ascontiguousarray(out[layer].array).reshape(BLOCKS, -1).view(np.uint8)
            assert np.array_equal(got, by_layer[layer])
        assert fetch.result().blocks == BLOCKS
    assert store.named == [UUID]
    assert stage.client.connection().pools.blocks == 3
    assert not device.broken


def test_generations_are_compared_after_the_event_of_a_pools_copy(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    device.landed = lambda: store.drop(stage.keys[2:3])
    fetched, _ = stage.fetch()
    assert (fetched.blocks, fetched.reason) == (2, Reason.GENERATION_CHANGED)
    assert stage.client.connection().pools.blocks == 2
    assert not device.broken


def test_who_reads_into_host_memory_names_no_gpu(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    assert np.array_equal(stage.space.fetch(stage.keys).data, DATA)
    with stage.space.view(stage.keys) as views:
        assert views.blocks == BLOCKS
    half = [Tensor(np.zeros((BLOCKS, LAYER_BYTES), np.uint8)) for _ in range(LAYERS - 1)]
    host = np.zeros((BLOCKS, LAYER_BYTES), np.uint8)
    with stage.space.fetch_layers(stage.keys, [*half, host]) as fetch:
        assert fetch.result().blocks == BLOCKS
    assert set(store.named) == {""}
    assert "pool opened" not in device.journal


# ---------------------------------------------------------------- what cannot be


FAILURES: dict[str, Callable[[PoolStore, RecordingDevice], None]] = {
    "no bindings": lambda store, device: setattr(
        device, "pooling", lambda: raising(OSError("the extra `gpu` is not installed"))
    ),
    "no way to that GPU": lambda store, device: setattr(device, "readable_uuid", "GPU-2"),
    "an import that is refused": lambda store, device: setattr(
        device, "opening", lambda: raising(OSError("CUDA_ERROR_NOT_SUPPORTED"))
    ),
    "no access to it": lambda store, device: setattr(
        device, "admitting", lambda: raising(OSError("CUDA_ERROR_INVALID_DEVICE"))
    ),
    "too small a pool": lambda store, device: setattr(store, "mapped_bytes", 4096),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_cannot_be_opened_comes_by_way_of_host_memory(
    make: MakeClient,
    store: PoolStore,
    device: RecordingDevice,
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    FAILURES[what](store, device)
    stage = Stage(make, store, device)
    for _ in range(3):
        fetched, _ = stage.fetch()
        assert (fetched.blocks, fetched.reason) == (BLOCKS, Reason.OK)
    assert store.named.count(UUID) <= 1, "it is tried once a session"
    assert store.wait(lambda s: not s.leases)
    told = [one.message for one in caplog.records if "through CPU memory" in one.message]
    expected = 0 if what == "no way to that GPU" else 1
    assert len(told) == expected
    pools = stage.client.connection().pools
    assert (pools.blocks, pools.refused, bool(pools.detail)) == (0, expected, bool(expected))
    stage.client.close()
    assert device.journal.count("pool opened") == device.journal.count("pool closed")
    assert not device.broken


def test_a_pool_that_was_just_closed_is_asked_for_again_by_way_of_host_memory(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    store.lends = False
    fetched, _ = stage.fetch()
    assert (fetched.blocks, fetched.reason) == (BLOCKS, Reason.OK)
    assert store.named == [UUID, ""]
    assert store.wait(lambda s: len(s.unmapped) == 1), "its file was mapped, and is given back"
    assert store.wait(lambda s: not s.leases)
    store.lends = True
    store.rise(stage.keys)
    fetched, _ = stage.fetch()
    assert fetched.blocks == BLOCKS
    assert stage.client.connection().pools.blocks == BLOCKS


def test_a_copy_that_cannot_be_queued_is_a_miss_and_the_last_of_its_kind(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    device.copying = lambda: raising(OSError("CUDA_ERROR_INVALID_VALUE"))
    fetched, _ = stage.fetch()
    assert (fetched.blocks, fetched.reason) == (0, Reason.NOT_SUPPORTED)
    fetched, _ = stage.fetch()
    assert (fetched.blocks, fetched.reason) == (BLOCKS, Reason.OK)
    assert store.named == [UUID, ""]
    assert store.wait(lambda s: not s.leases)
    assert stage.client.connection().pools.refused == 1
    assert not device.broken


def test_places_in_pools_that_nobody_asked_for_are_misses(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    assert stage.fetch()[0].blocks == BLOCKS
    store.forces = True
    assert stage.space.fetch(stage.keys).blocks == 0
    other = Stage(make, store, device)
    assert other.space.fetch(other.keys).blocks == 0
    assert store.wait(lambda s: not s.leases)


def test_all_who_wait_for_a_region_hear_that_it_is_refused(store: PoolStore) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    class Slow(RecordingDevice):
        def open(self, memory: pb.DeviceMemory, fd: int | None, place: str) -> Any:
            asked.set()
            may_answer.wait(60)
            raise OSError("CUDA_ERROR_NOT_SUPPORTED")

        def current_stream(self, tensor: Any) -> Any:
            return self.compute  # of four threads

    with clients("threads") as make, ThreadPoolExecutor(4) as threads:
        stage = Stage(make, store, Slow())
        first = threads.submit(stage.fetch, deadline_ms=60_000)
        assert asked.wait(60)
        others = [threads.submit(stage.fetch, deadline_ms=60_000) for _ in range(3)]
        assert store.wait(lambda s: store.named.count(UUID) == 4)
        may_answer.set()
        for one in (first, *others):
            assert one.result(30)[0].blocks == BLOCKS


# ---------------------------------------------------------------- ends


def test_a_pool_is_unmapped_after_the_last_copy(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    closing = threading.Event()

    def landed() -> None:
        if closing.is_set():
            return
        closing.set()
        memory = stage.memory()
        (region,) = [one for one in memory._regions.values() if one.pool is not None]
        store.close_pools()
        while not region.gone:
            os.sched_yield()
        assert isinstance(region.pool, Pool)
        assert not region.pool.end(), "a copy is under way"
        device.note("closed by the daemon")

    device.landed = landed
    stage.fetch()
    assert store.wait(lambda s: bool(s.unmapped))
    ends = [one for one in device.journal if one in ("closed by the daemon", "pool closed")]
    assert ends == ["closed by the daemon", "pool closed"]
    assert stage.fetch()[0].blocks == BLOCKS
    assert not device.broken


def test_a_session_that_hangs_up_closes_its_pools_and_the_next_one_opens_them_anew(
    make: MakeClient, store: PoolStore, device: RecordingDevice
) -> None:
    stage = Stage(make, store, device)
    assert stage.fetch()[0].blocks == BLOCKS
    memory = stage.memory()
    store.hang_up()
    memory._thread.join(10)
    assert device.journal[-1] == "pool closed"
    assert stage.fetch()[0].blocks == BLOCKS
    assert device.journal.count("pool opened") == 2
    assert stage.client.connection().pools.blocks == BLOCKS
    memory = stage.memory()
    store.restart()
    memory._thread.join(10)
    assert stage.fetch()[0].blocks == 0, "another daemon, without blocks"
    assert device.journal.count("pool closed") == 2
    assert not device.broken


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_closes_a_pool() -> None:
    device, file = RecordingDevice(), shm.create_region(4096, "kvstore-test")
    memory = pb.DeviceMemory(device_uuid=UUID, mapped_bytes=4096)
    ended, dropped = (Access(UUID, device, "here").open(memory, file.fd) for _ in range(2))
    assert ended.use()
    child = os.fork()
    if not child:
        right = not ended.use() and ended.end()
        del ended, dropped
        os._exit(0 if right and "pool closed" not in device.journal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not ended.end(), "it is in use"
    ended.leave()
    assert ended.end()
    assert not ended.use()
    assert device.journal.count("pool closed") == 1
    del dropped
    assert device.journal.count("pool closed") == 2
    file.close()
