"""Transfers by layers against a real daemon: bytes, leases, and a store that evicts meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig
from tests.client_kit import MakeClient, clients, model, rows, tokens
from tests.daemon import Daemon
from tests.integration.polling import within
from tests.rawclient import RawAdmin

pytestmark = pytest.mark.process

LAYERS = 8
BIG = model("big", layers=LAYERS, heads=8, head_size=128)  # 128 KiB

Start = Callable[..., Daemon]


@pytest.fixture(params=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with clients(request.param) as maker:
        yield maker


def by_layer(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    split: NDArray[np.uint8] = data.reshape(len(data), LAYERS, -1).swapaxes(0, 1)
    return split


@pytest.mark.parametrize("path", ["shm", "stream"])
def test_layers_go_in_and_come_back(make: MakeClient, daemons: Start, path: str) -> None:
    daemon = daemons(host__capacity_bytes="64MiB")
    config = ClientConfig(transport=path, deadline_ms=20_000)  # type: ignore[arg-type]
    space = make(daemon.data_socket, config=config).space(BIG)
    keys, data = space.keys(tokens(20)), rows(20, space.block_bytes)
    with space.push_layers(keys) as push:
        for layer in range(LAYERS):
            push.put(layer, by_layer(data)[layer])
        pushed = push.commit()
    assert pushed.stored == len(push.wanted) > 0
    space.push(keys, data)  # what found no room in one reservation
    out = np.zeros((LAYERS, 20, space.block_bytes // LAYERS), np.uint8)
    with space.fetch_layers(space.lookup(keys), out) as fetch:
        for layer in range(LAYERS):
            assert fetch.wait(layer) == 20
            assert np.array_equal(out[layer], by_layer(data)[layer])
        assert fetch.result().reason is Reason.OK
    abandoned = space.push_layers(space.keys(tokens(3, 9)))
    abandoned.close()
    with RawAdmin(daemon.admin_socket) as admin:
        assert within(5.0, lambda: not admin.stats().read_leases)
        assert within(5.0, lambda: not admin.stats().write_leases)


def test_no_layer_is_wrong_while_the_store_evicts(daemons: Start) -> None:
    """A store that holds a third of what is pushed: whatever a layer is
    said to have is what was committed."""
    daemon = daemons(host__capacity_bytes="32MiB")
    config = ClientConfig(deadline_ms=20_000)
    seed, count = 11, 12
    done = threading.Event()

    def write() -> None:
        chance = random.Random(seed)
        with Client(daemon.data_socket, config=config) as client:
            space = client.space(BIG)
            while not done.is_set():
                number = chance.randrange(40)
                space.push(tokens(count, number), rows(count, space.block_bytes, number))

    writer = threading.Thread(target=write)
    writer.start()
    blocks = 0
    try:
        with Client(daemon.data_socket, config=config) as client:
            space, chance = client.space(BIG), random.Random(seed + 1)
            for turn in range(150):
                number = chance.randrange(40)
                expected = by_layer(rows(count, space.block_bytes, number))
                out = np.zeros((LAYERS, count, space.block_bytes // LAYERS), np.uint8)
                with space.fetch_layers(space.keys(tokens(count, number)), out) as fetch:
                    for layer in range(LAYERS):
                        good = fetch.wait(layer)
                        same = np.array_equal(out[layer, :good], expected[layer, :good])
                        assert same, (seed, turn, layer)
                    blocks += fetch.result().blocks
    finally:
        done.set()
        writer.join(60)
    assert blocks > count, "some were there"
