"""A fetch by layers, step by step: what is known between two layers, and what a change, a close or
the deadline in between makes of the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, Space
from kvstore_client.layer_writes import LayerPushing
from kvstore_client.layers import LayerCopying
from kvstore_client.space_layers import fetch_layers, push_layers
from kvstore_client.testing import FakeClock, FakeStore
from tests.client_kit import model, rows, tokens

LAYERS = 4
MODEL = model(layers=LAYERS)
LAYER_BYTES = 2048
BLOCKS = 5
DATA = rows(BLOCKS, LAYERS * LAYER_BYTES)
BY_LAYER = DATA.reshape(BLOCKS, LAYERS, LAYER_BYTES).swapaxes(0, 1)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    fake = FakeStore(capacity_blocks=16)
    yield fake
    fake.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def space(store: FakeStore, clock: FakeClock) -> Iterator[Space]:
    with Client("/fake", transport=store.transport, clock=clock) as client:
        space = client.space(MODEL)
        space.push(tokens(BLOCKS), DATA)
        yield space


def fetching(
    space: Space, heard: Callable[[LayerCopying], object]
) -> tuple[LayerCopying, NDArray[np.uint8]]:
    """A fetch that has begun. `heard` is called in the copying thread after each layer."""
    core = space._core
    out = np.zeros((LAYERS, BLOCKS, LAYER_BYTES), np.uint8)
    deadline = core.root.deadline(None)
    copying = core.root.run(
        fetch_layers(
            core,
            space.keys(tokens(BLOCKS)),
            out,
            deadline=deadline,
            part=False,
            layers_at_once=1,
            wait_ms=0,
            request_id="",
        ),
        deadline,
    )
    copying.listen(lambda: heard(copying))
    copying.start()
    return copying, out


def test_a_layer_is_there_while_the_next_one_is_not_yet_copied(space: Space) -> None:
    used = threading.Event()
    copying, out = fetching(space, lambda _: used.wait(60.0))
    assert copying.wait(0) == BLOCKS
    assert np.array_equal(out[0], BY_LAYER[0])
    assert copying.blocks_of(1) is None
    assert not out[1:].any(), "nothing of the next layer is copied while this one is used"
    assert copying.result() is None
    used.set()
    assert copying.wait_end().blocks == BLOCKS
    assert np.array_equal(out, BY_LAYER)


def test_a_block_that_changes_between_two_layers_is_a_miss_from_there_on(
    space: Space, store: FakeStore
) -> None:
    """The layers before were right; the caller hears of it before it uses the next one's bytes."""
    dropped = space.keys(tokens(BLOCKS))[2:3]

    def heard(copying: LayerCopying) -> None:
        if copying.blocks_of(1) is not None:
            store.drop(dropped)

    copying, out = fetching(space, heard)
    assert [copying.wait(layer) for layer in range(LAYERS)] == [BLOCKS, BLOCKS, 2, 2]
    assert np.array_equal(out[:2], BY_LAYER[:2])
    assert np.array_equal(out[:, :2], BY_LAYER[:, :2])
    done = copying.wait_end()
    assert (done.blocks, done.reason) == (2, Reason.GENERATION_CHANGED)


def test_memory_that_goes_in_between_is_a_miss(space: Space, store: FakeStore) -> None:
    """The daemon closes all regions and hangs up after the first layer."""

    def heard(copying: LayerCopying) -> None:
        if copying.blocks_of(0) is not None and copying.blocks_of(1) is None:
            store.drop(space.keys(tokens(BLOCKS)))
            store.restart()

    copying, out = fetching(space, heard)
    assert [copying.wait(layer) for layer in range(LAYERS)] == [BLOCKS, 0, 0, 0]
    assert np.array_equal(out[0], BY_LAYER[0])
    assert copying.wait_end().blocks == 0


def test_a_fetch_that_is_stopped_copies_no_further_layer(space: Space, store: FakeStore) -> None:
    copying, out = fetching(space, lambda copying: copying.stop())
    assert copying.wait(0) == BLOCKS
    assert copying.wait(1) == 0
    done = copying.close()
    assert (done.blocks, done.reason) == (0, Reason.CANCELLED)
    assert not out[1:].any()


def test_the_deadline_ends_it_between_two_layers(
    space: Space, clock: FakeClock, store: FakeStore
) -> None:
    copying, out = fetching(space, lambda _: clock.advance(10.0))
    assert [copying.wait(layer) for layer in range(LAYERS)] == [BLOCKS, 0, 0, 0]
    done = copying.wait_end()
    assert (done.blocks, done.reason) == (0, Reason.DEADLINE_EXCEEDED)
    assert not out[1:].any()
    assert store.wait(lambda s: not s.leases), "the lease was given back"
    assert store.reports[-1].reason == pb.REASON_DEADLINE_EXCEEDED
    assert store.reports[-1].blocks == 0


def test_a_closed_client_has_no_threads_to_copy_with(space: Space, store: FakeStore) -> None:
    core = space._core
    copying, _ = fetching(space, lambda _: None)
    copying.close()
    deadline = core.root.deadline(None)
    prepared = fetch_layers(
        core,
        space.keys(tokens(BLOCKS)),
        None,
        deadline=deadline,
        part=False,
        layers_at_once=1,
        wait_ms=0,
        request_id="",
    )
    late = core.root.run(prepared, deadline)
    core.root.close()
    late.start()
    done = late.wait_end()
    assert (done.blocks, done.reason) == (0, Reason.UNAVAILABLE)


def pushing(space: Space) -> LayerPushing:
    core = space._core
    deadline = core.root.deadline(None)
    keys = [b"%032d" % number for number in range(BLOCKS)]
    asked = push_layers(
        core,
        [BlockKey(key) for key in keys],
        deadline=deadline,
        first_block=0,
        attempt=0,
        durable=False,
        request_id="",
    )
    return core.root.run(asked, deadline)


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
def test_what_a_close_took_out_of_the_line_is_not_committed(space: Space, how: str) -> None:
    """`close` in one thread while `commit` waits in another: the staging holds whatever it held."""
    push, let_go = pushing(space), threading.Event()
    workers = space._core.root.workers()
    for _ in range(space._core.root.config.async_threads):
        workers.submit(let_go.wait, 60.0)
    for layer in range(LAYERS):
        push.put(layer, BY_LAYER[layer])
    commit = push.prepared()
    if how == "cancelled":
        assert all(copy.cancel() for copy in push.copies())
        let_go.set()
    else:
        let_go.set()
        push.settle()
        push._stopped.set()
    pushed = space._core.root.run(commit, push.deadline)
    assert (pushed.stored, pushed.reason) == (0, Reason.ABORTED)
    assert space.lookup(list(push._request.keys)).blocks == 0
