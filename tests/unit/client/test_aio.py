"""What only asyncio has: cancellation, a loop that goes on, more operations than threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.model.reasons import Reason, Unavailable
from kvstore_client import AsyncClient, AsyncSpace, ClientConfig
from kvstore_client.aio_layers import AsyncLayerPush
from kvstore_client.testing import FakeStore, FakeTransport
from tests.client_kit import model, rows, tokens
from tests.device_double import RecordingDevice

MODEL = model()
BLOCK_BYTES = 4096
WAIT_S = 10.0


@pytest.fixture
def store() -> Iterator[FakeStore]:
    fake = FakeStore(capacity_blocks=64)
    yield fake
    fake.close()


class Gate:
    """Holds calls of one method back until it is opened."""

    def __init__(self, store: FakeStore, method: str) -> None:
        self._store = store
        self._method = method
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, method: str, request: Any) -> Any:
        if method == self._method:
            self.reached.set()
            assert self.open.wait(WAIT_S)
        return self._store.answer(method, request)

    def transport(self) -> Callable[[], Any]:
        return FakeTransport.factory(self, self._store.dial)


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_S)


async def test_a_cancelled_call_ends_its_lease_and_copies_nothing(store: FakeStore) -> None:
    gate = Gate(store, "Acquire")
    async with AsyncClient("/fake", transport=gate.transport()) as client:
        space = client.space(MODEL)
        await space.push(tokens(4), rows(4, BLOCK_BYTES))
        out = np.zeros((4, BLOCK_BYTES), np.uint8)
        fetching = asyncio.create_task(space.fetch(space.keys(tokens(4)), out))
        await reached(gate.reached)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching  # at once: nothing of the caller's is in use
        assert not gate.open.is_set()
        gate.open.set()
        assert await asyncio.to_thread(store.wait, lambda s: s.requests["Release"] > 0)
        assert not store.leases
        assert not out.any()


async def test_a_cancelled_call_waits_for_what_touches_the_callers_memory(
    store: FakeStore,
) -> None:
    async with AsyncClient("/fake", transport=store.transport) as client:
        space = client.space(MODEL)
        filling, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def fill(index: int, target: Any) -> None:
            filling.set()
            assert go_on.wait(WAIT_S)
            ended.set()

        pushing = asyncio.create_task(space.push(tokens(1), fill))
        await reached(filling)
        pushing.cancel()
        await asyncio.sleep(0)
        assert not pushing.done()
        pushing.cancel()  # twice does not hurry it
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        assert ended.is_set()
        assert await asyncio.to_thread(store.wait, lambda s: not s._reservations)
        assert (await space.lookup(tokens(1))).blocks == 0


async def test_the_loop_goes_on_while_calls_wait(store: FakeStore) -> None:
    gate = Gate(store, "Lookup")
    async with AsyncClient("/fake", transport=gate.transport()) as client:
        space = client.space(MODEL)
        prompt = tokens(50_000)  # 50 ms of hashing
        looking = asyncio.create_task(space.lookup(prompt))
        longest, last = 0.0, time.perf_counter()
        while not gate.reached.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        assert not looking.done()
        gate.open.set()
        assert (await looking).reason is Reason.MISS_NEVER_STORED
        assert longest < 0.5


class Ids(list[int]):
    """Token ids that remember which threads have looked at them."""

    def __init__(self, ids: Any) -> None:
        super().__init__(ids)
        self.threads: set[int] = set()

    def __len__(self) -> int:
        self.threads.add(threading.get_ident())
        return super().__len__()

    def __iter__(self) -> Iterator[int]:
        self.threads.add(threading.get_ident())
        return super().__iter__()


class IdsOnDevice(RecordingDevice):
    def owns(self, data: object) -> bool:
        return isinstance(data, Ids) or super().owns(data)


CALLS: list[Callable[[AsyncSpace, Ids], Any]] = [
    lambda space, ids: space.push_layers(ids),
    lambda space, ids: space.lookup(ids),
    lambda space, ids: space.push(ids, rows(4, BLOCK_BYTES)),
    lambda space, ids: space.compare(ids, rows(4, BLOCK_BYTES)),
]


@pytest.mark.parametrize("call", CALLS)
async def test_tokens_are_hashed_in_another_thread_unless_a_device_has_them(
    store: FakeStore, call: Callable[[AsyncSpace, Ids], Any]
) -> None:
    """On a device they are right only on the stream of the thread that has made them."""
    here = threading.get_ident()
    for device, expected in ((RecordingDevice(), False), (IdsOnDevice(), True)):
        async with AsyncClient("/fake", transport=store.transport, device=device) as client:
            ids = Ids(list(tokens(4)))
            await call(client.space(MODEL), ids)
            assert ids.threads
            assert (here in ids.threads) is expected
            assert not expected or ids.threads == {here}


class OutOfLayers:
    """Arrays that remember which threads have asked for them."""

    def __init__(self, arrays: Any) -> None:
        self.arrays, self.threads = arrays, set[int]()

    def __iter__(self) -> Iterator[Any]:
        self.threads.add(threading.get_ident())
        return iter(self.arrays)


async def test_a_fetch_by_layers_looks_at_where_it_goes_in_another_thread(store: FakeStore) -> None:
    async with AsyncClient("/fake", transport=store.transport) as client:
        space = client.space(MODEL)
        out = OutOfLayers(np.zeros((2, 4, 2048), np.uint8))
        async with await space.fetch_layers(space.keys(tokens(4)), out) as fetch:
            assert fetch.blocks == 0
        assert out.threads
        assert threading.get_ident() not in out.threads


async def test_calls_beyond_the_threads_wait_and_give_up_at_their_deadline(
    store: FakeStore,
) -> None:
    gate = Gate(store, "Lookup")
    config = ClientConfig(async_threads=1)
    async with AsyncClient("/fake", transport=gate.transport(), config=config) as client:
        space = client.space(MODEL)
        first = asyncio.create_task(space.lookup(tokens(1)))
        await reached(gate.reached)
        late = await space.fetch(space.keys(tokens(1)), deadline_ms=20)
        assert (late.blocks, late.reason) == (0, Reason.DEADLINE_EXCEEDED)
        assert (await space.push(tokens(1), rows(1, BLOCK_BYTES), deadline_ms=20)).stored == 0
        with pytest.raises(Unavailable):
            await space.explain(space.keys(tokens(1)), deadline_ms=20)
        gate.open.set()
        assert (await first).reason is Reason.MISS_NEVER_STORED
        assert store.requests["Acquire"] == store.requests["Reserve"] == 0


async def test_a_view_that_was_cancelled_is_released(store: FakeStore) -> None:
    gate = Gate(store, "Acquire")
    async with AsyncClient("/fake", transport=gate.transport()) as client:
        space = client.space(MODEL)
        await space.push(tokens(2), rows(2, BLOCK_BYTES))

        async def look() -> None:
            async with space.view(space.keys(tokens(2))):
                raise AssertionError("it was cancelled")

        looking = asyncio.create_task(look())
        await reached(gate.reached)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        gate.open.set()
        assert await asyncio.to_thread(store.wait, lambda s: s.requests["Release"] > 0)
        assert not store.leases


class HeldPush:
    """A push whose `close` waits for a copy."""

    wanted, layers = (), 0

    def __init__(self) -> None:
        self.closing, self.copied, self.closed = (threading.Event() for _ in range(3))

    def close(self) -> None:
        self.closing.set()
        assert self.copied.wait(WAIT_S)
        self.closed.set()


async def test_a_cancelled_close_of_a_push_waits_for_what_reads_the_callers_memory() -> None:
    held: Any = HeldPush()
    push = AsyncLayerPush(held, lambda pushing: pytest.fail("it is not committed"))
    closing = asyncio.create_task(push.close())
    await reached(held.closing)
    for _ in range(2):
        closing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not closing.done()
    held.copied.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert held.closed.is_set()


def test_one_client_in_several_loops(store: FakeStore) -> None:
    client = AsyncClient("/fake", transport=store.transport)
    space = client.space(MODEL)

    async def stored() -> int:
        await space.push(tokens(2), rows(2, BLOCK_BYTES))
        return (await space.lookup(tokens(2))).blocks

    assert [asyncio.run(stored()) for _ in range(3)] == [2, 2, 2]
    asyncio.run(client.close())
