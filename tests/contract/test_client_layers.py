"""What both clients promise of transfers by layers, whatever the daemon does: one suite, on the
client for threads and the one for asyncio, and over all ways that bytes come.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import ClientConfig
from kvstore_client.fakestore import RESERVE_TTL_MS
from kvstore_client.testing import NEVER, FakeClock, FakeStore, FakeTransport, refusal
from tests.client_kit import BLOCK_TOKENS, MakeClient, clients, model, rows, tokens

LAYERS = 3
MODEL = model(layers=LAYERS)
LAYER_BYTES = 2048
BLOCK_BYTES = LAYERS * LAYER_BYTES
PATHS = ("shm", "stream", "grpc")


@pytest.fixture(params=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with clients(request.param) as maker:
        yield maker


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[FakeStore]:
    callspec = getattr(request.node, "callspec", None)
    path = None if callspec is None else callspec.params.get("path")
    fake = FakeStore(
        capacity_blocks=64, staging_bytes=8 * BLOCK_BYTES, shared_memory=path != "grpc"
    )
    yield fake
    fake.close()


def config(path: str = "auto", **more: Any) -> ClientConfig:
    transport: Any = "stream" if path == "grpc" else path
    return ClientConfig(transport=transport, **more)


def answered(
    store: FakeStore, answer: Callable[[str, Any], Any], clock: FakeClock | None = None
) -> Callable[[], Any]:
    """Connections on which `answer` may answer instead of the store: None leaves it to that."""

    def chosen(method: str, request: Any) -> Any:
        given = answer(method, request)
        return store.answer(method, request) if given is None else given

    return FakeTransport.factory(chosen, store.dial, clock)


def by_layer(data: NDArray[np.uint8], layers: int = LAYERS) -> NDArray[np.uint8]:
    """Blocks of one part, [n, block_bytes], as [layers, n, layer_bytes]."""
    split: NDArray[np.uint8] = data.reshape(len(data), layers, -1).swapaxes(0, 1)
    return split


# ---------------------------------------------------------------- fetch


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_each_layer_has_its_bytes_when_it_is_waited_for(
    make: MakeClient, store: FakeStore, path: str, at_once: int
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    prompt, data = tokens(6), rows(6, BLOCK_BYTES)
    space.push(prompt, data)
    out = np.zeros((LAYERS, 6, LAYER_BYTES), np.uint8)
    hit = space.lookup(prompt)
    with space.fetch_layers(hit, out, layers_at_once=at_once, request_id="r-1") as fetch:
        assert (fetch.blocks, fetch.layers) == (6, LAYERS)
        for layer in range(LAYERS):
            assert fetch.wait(layer) == 6
            assert np.array_equal(out[layer], by_layer(data)[layer])
        fetched = fetch.result()
    assert (fetched.blocks, fetched.tokens, fetched.reason) == (6, 6 * BLOCK_TOKENS, Reason.OK)
    assert fetched.data is out
    assert fetched.bytes == data.nbytes
    assert fetched.total_ms >= fetched.copy_ms > 0
    assert store.wait(lambda s: not s.leases)
    if path == "shm":
        assert store.requests["Acquire"] == 1
        assert store.wait(lambda s: bool(s.reports))
        report = store.reports[0]
        assert (report.blocks, report.request_id, report.reason) == (6, "r-1", pb.REASON_OK)


def test_layers_go_where_an_array_has_them_whatever_its_strides(
    make: MakeClient, store: FakeStore
) -> None:
    """K and V with heads before tokens, as engines keep them: no copy afterwards."""
    space = make(transport=store.transport).space(MODEL)
    prompt, data = tokens(5), rows(5, BLOCK_BYTES)
    keys = space.keys(prompt)
    for number in (3, 0, 4, 1, 2):  # slots that do not follow one another
        space.push([*keys[:number], keys[number]], data[: number + 1], first_block=number and 0)
    whole = np.zeros((LAYERS, 2, 2, 5 * BLOCK_TOKENS, 64), np.int16)
    places = whole.reshape(LAYERS, 2, 2, 5, BLOCK_TOKENS, 64).transpose(0, 3, 1, 2, 4, 5)
    assert space.fetch_layers(keys, places).result().blocks == 5
    expected = by_layer(data).reshape(LAYERS, 5, 2, 2, BLOCK_TOKENS, 128).view(np.int16)
    assert np.array_equal(places, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strided", [False, True])
def test_a_layer_of_several_ranks_is_put_together(
    make: MakeClient, store: FakeStore, path: str, strided: bool
) -> None:
    sharded = model(ranks=2, layers=LAYERS)
    client = make(transport=store.transport, config=config(path))
    prompt, data = tokens(3), [rows(3, BLOCK_BYTES // 2, seed=rank) for rank in range(2)]
    for rank in range(2):
        client.space(sharded, rank).push(prompt, data[rank])
    space = client.space(sharded, 1)
    width = LAYER_BYTES // 2
    out = np.zeros((LAYERS, 3, 2, width * (1 + strided)), np.uint8)[..., :width]
    assert space.fetch_layers(space.keys(prompt), out).result().blocks == 3
    for rank in range(2):
        assert np.array_equal(out[:, :, rank], by_layer(data[rank]))
    own = np.zeros((LAYERS, 3, width), np.uint8)
    fetched = space.fetch_layers(space.keys(prompt), own, part=True).result()
    assert (fetched.blocks, fetched.bytes) == (3, own.nbytes)
    assert np.array_equal(own, by_layer(data[1]))


@pytest.mark.parametrize("path", PATHS)
def test_a_fetch_by_layers_ends_at_the_first_block_that_is_not_there(
    make: MakeClient, store: FakeStore, path: str
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    keys, data = space.keys(tokens(6)), rows(6, BLOCK_BYTES)
    space.push(keys, data)
    store.drop(keys[4:5])
    fetch = space.fetch_layers(keys)
    assert [fetch.blocks, *map(fetch.wait, range(LAYERS))] == [4] * (LAYERS + 1)
    fetched = fetch.result()
    assert (fetched.blocks, fetched.reason) == (4, Reason.MISS_NEVER_STORED)
    assert np.array_equal(fetched.data, by_layer(data)[:, :4])
    missed = space.fetch_layers(keys[4:])
    assert (missed.blocks, missed.wait(0)) == (0, 0)
    assert missed.result().reason is Reason.MISS_NEVER_STORED
    assert store.wait(lambda s: not s.leases)


def test_a_block_that_changed_before_the_copy_is_a_miss_from_there_on(
    make: MakeClient, store: FakeStore
) -> None:
    keys: list[bytes] = []

    def answer(method: str, request: Any) -> Any:
        if method != "Acquire":
            return None
        reply = store.answer(method, request)
        store.drop(keys[2:3])  # between the lease and the copy
        return reply

    space = make(transport=answered(store, answer)).space(MODEL)
    keys += space.keys(tokens(5))
    data = rows(5, BLOCK_BYTES)
    space.push(keys, data)
    fetch = space.fetch_layers(keys)
    assert fetch.blocks == 5
    assert [fetch.wait(layer) for layer in range(LAYERS)] == [2, 2, 2]
    fetched = fetch.result()
    assert (fetched.blocks, fetched.reason) == (2, Reason.GENERATION_CHANGED)
    assert np.array_equal(fetched.data, by_layer(data)[:, :2])
    assert store.wait(lambda s: not s.leases)


def test_more_keys_than_a_call_may_have_are_leased_in_several(make: MakeClient) -> None:
    store = FakeStore(capacity_blocks=64, keys_per_call_max=7)
    space = make(transport=store.transport).space(MODEL)
    keys, data = space.keys(tokens(20)), rows(20, BLOCK_BYTES)
    space.push(keys, data)
    fetched = space.fetch_layers(keys).result()
    assert fetched.blocks == 20
    assert np.array_equal(fetched.data, by_layer(data))
    store.drop(keys[9:10])
    again = space.fetch_layers(keys)
    assert (again.blocks, again.wait(1)) == (9, 9)
    assert again.result().reason is Reason.MISS_NEVER_STORED
    assert store.wait(lambda s: not s.leases and len(s.reports) == 5)
    assert [one.blocks for one in store.reports] == [7, 7, 6, 7, 2]
    store.close()


def test_memory_that_this_process_does_not_have_is_a_miss(
    make: MakeClient, store: FakeStore
) -> None:
    wide = model(layers=16_384, heads=256, head_size=256)
    space = make(transport=store.transport).space(wide)
    fetch = space.fetch_layers([bytes(32)] * (1 << 16))  # a PiB: more than there are addresses
    assert (fetch.blocks, fetch.layers, fetch.wait(0)) == (0, 16_384, 0)
    assert fetch.result().reason is Reason.NO_SPACE
    assert not store.requests["Acquire"]


def test_what_a_closed_or_dropped_fetch_leased_is_given_back(
    make: MakeClient, store: FakeStore
) -> None:
    seed = 7
    rng = random.Random(seed)
    space = make(transport=store.transport, config=config(deadline_ms=60_000)).space(MODEL)
    keys, data = space.keys(tokens(6)), rows(6, BLOCK_BYTES)
    space.push(keys, data)
    for turn in range(60):
        out = np.zeros((LAYERS, 6, LAYER_BYTES), np.uint8)
        fetch = space.fetch_layers(keys, out)
        if rng.random() < 0.5:
            fetch.wait(0)
        if rng.random() < 0.5:
            fetch.close()
            kept = out.copy()
            assert fetch.result().reason in (Reason.OK, Reason.CANCELLED), (seed, turn)
            assert np.array_equal(out, kept)
        del fetch
    assert store.wait(lambda s: not s.leases), seed


def test_a_fetch_by_layers_of_nothing_or_declined_makes_no_call(
    make: MakeClient, store: FakeStore
) -> None:
    space = make(transport=store.transport).space(MODEL)
    fetch = space.fetch_layers([])
    assert (fetch.blocks, fetch.wait(2)) == (0, 0)
    assert fetch.result().reason is Reason.NOTHING_TO_DO
    push = space.push_layers([])
    assert push.wanted == ()
    assert push.commit().reason is Reason.NOTHING_TO_DO
    assert not store.requests["Acquire"]
    assert not store.requests["Reserve"]


def test_a_forked_childs_handles_are_misses_and_the_parents_go_on(store: FakeStore) -> None:
    with clients("threads") as make:
        space = make(transport=store.transport, config=config(deadline_ms=20_000)).space(MODEL)
        keys, data = space.keys(tokens(6)), rows(6, BLOCK_BYTES)
        space.push(keys[:3], data[:3])
        fetch = space.fetch_layers(keys[:3])
        push = space.push_layers(keys, first_block=3)
        for layer in range(LAYERS):
            push.put(layer, by_layer(data)[layer, 3:])
        pid = os.fork()
        if not pid:
            try:
                good = (fetch.wait(0), fetch.result().blocks) == (0, 0)
                fetch.close()
                pushed = push.commit()
                good = good and (pushed.stored, pushed.reason) == (0, Reason.UNAVAILABLE)
                push.close()
                del fetch, push
                os._exit(0 if good else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [fetch.wait(layer) for layer in range(LAYERS)] == [3] * LAYERS
        assert np.array_equal(fetch.result().data, by_layer(data[:3]))
        assert push.commit().stored == 3
        assert np.array_equal(space.fetch(keys).data, data)
        assert store.wait(lambda s: not s.leases)


# ---------------------------------------------------------------- push


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strided", [False, True])
def test_layers_that_were_put_are_stored_at_the_commit(
    make: MakeClient, store: FakeStore, path: str, strided: bool
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    keys, data = space.keys(tokens(6)), rows(6, BLOCK_BYTES)
    space.push(keys[:2], data[:2])
    with space.push_layers(keys, first_block=1) as push:
        assert push.layers == LAYERS
        assert push.wanted[-4:] == (2, 3, 4, 5)
        for layer in (2, 0, 1):
            given = by_layer(data)[layer, 1:]
            put = given.reshape(5, 2, 2, BLOCK_TOKENS, -1) if strided else given.copy()
            push.put(layer, put.view(np.int16) if strided else put)
            assert space.lookup(keys).blocks == 2, "nothing is visible before the commit"
        pushed = push.commit()
    assert (pushed.stored, pushed.present, pushed.reason) == (4, 1, Reason.OK)
    fetched = space.fetch(keys)
    assert fetched.blocks == 6
    assert np.array_equal(fetched.data, data)


def test_what_finds_no_room_in_one_reservation_is_skipped(
    make: MakeClient, store: FakeStore
) -> None:
    space = make(transport=store.transport).space(MODEL)
    keys, data = space.keys(tokens(12)), rows(12, BLOCK_BYTES)
    with space.push_layers(keys) as push:
        assert push.wanted == tuple(range(8))
        for layer in range(LAYERS):
            push.put(layer, by_layer(data)[layer])
        pushed = push.commit()
    assert (pushed.stored, pushed.skipped, pushed.reason) == (8, 4, Reason.STAGING_BUSY)
    assert space.push(keys, data).stored == 4
    assert np.array_equal(space.fetch(keys).data, data)


def test_a_rank_puts_the_layers_of_its_part(make: MakeClient, store: FakeStore) -> None:
    sharded = model(ranks=2, layers=LAYERS)
    client = make(transport=store.transport)
    prompt, data = tokens(3), [rows(3, BLOCK_BYTES // 2, seed=rank) for rank in range(2)]
    for rank in range(2):
        push = client.space(sharded, rank).push_layers(prompt)
        for layer in range(LAYERS):
            push.put(layer, by_layer(data[rank])[layer])
        pushed = push.commit()
        assert (pushed.waiting, pushed.stored) == ((3, 0) if rank == 0 else (0, 3))
    space = client.space(sharded, 0)
    fetched = space.fetch(space.keys(prompt))
    assert np.array_equal(fetched.data, np.concatenate(data, axis=1))


def test_what_was_not_committed_is_given_up(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    keys, data = space.keys(tokens(3)), rows(3, BLOCK_BYTES)
    with space.push_layers(keys) as push:
        push.put(0, by_layer(data)[0])
    assert store.wait(lambda s: not s._reservations)
    dropped = space.push_layers(keys)
    dropped.put(1, by_layer(data)[1])
    del dropped
    assert store.wait(lambda s: not s._reservations)
    assert space.lookup(keys).blocks == 0
    assert push.commit().reason is Reason.ABORTED
    assert space.push(keys, data).stored == 3


# ---------------------------------------------------------------- misuse and faults


def test_misuse_by_layers_raises_before_any_call(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    keys = space.keys(tokens(2))
    short = np.zeros((LAYERS, 2, LAYER_BYTES - 1), np.uint8)
    wrong: list[Callable[[], Any]] = [
        lambda: space.fetch_layers(keys, short),
        lambda: space.fetch_layers(keys, np.zeros((LAYERS, 1, LAYER_BYTES), np.uint8)),
        lambda: space.fetch_layers(keys, np.zeros((LAYERS - 1, 2, LAYER_BYTES), np.uint8)),
        lambda: space.fetch_layers(keys, 7),
        lambda: space.fetch_layers(keys, [bytes(2 * LAYER_BYTES)] * LAYERS),
        lambda: space.fetch_layers(keys, layers_at_once=0),
        lambda: space.fetch_layers(keys, wait_ms=-1),
        lambda: space.fetch_layers([b"short"]),
        lambda: space.push_layers(keys, first_block=3),
        lambda: space.push_layers([*keys, keys[0]]),
        lambda: space.push_layers(keys, deadline_ms=0),
    ]
    for call in wrong:
        with pytest.raises(BadRequest):
            call()
    assert not store.requests["Attach"]
    own = Fingerprint(
        MODEL.identity, MODEL.geometry, MODEL.encoding.__class__("bfloat16", 4, "engine/1")
    )
    assert layout_of(own).piece_bytes is None
    for call in (make().space(own).fetch_layers, make().space(own).push_layers):
        with pytest.raises(BadRequest) as raised:
            call(keys)
        assert raised.value.reason is Reason.NOT_SUPPORTED


def test_a_layer_is_put_once_and_all_of_them_before_the_commit(
    make: MakeClient, store: FakeStore
) -> None:
    space = make(transport=store.transport).space(MODEL)
    keys, data = space.keys(tokens(2)), by_layer(rows(2, BLOCK_BYTES))
    with space.push_layers(keys) as push:
        push.put(0, data[0])
        for layer, given in ((0, data[0]), (LAYERS, data[0]), (1, data[1, :1]), (-1, data[0])):
            with pytest.raises(BadRequest):
                push.put(layer, given)
        with pytest.raises(BadRequest, match="layer 1 was not put"):
            push.commit()
        push.put(1, data[1])
        push.put(2, data[2])
        assert push.commit().stored == 2
        with pytest.raises(BadRequest):
            push.put(2, data[2])
    fetch = space.fetch_layers(keys)
    for number in (-1, LAYERS, 1.0):
        with pytest.raises(BadRequest):
            fetch.wait(number)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["Attach", "Open", "Acquire", "Fetch", "Reserve", "Commit"])
@pytest.mark.parametrize("kind", ["unavailable", "garbage", "refusal"])
def test_no_fault_of_the_daemon_raises(
    make: MakeClient, store: FakeStore, path: str, method: str, kind: str
) -> None:
    def answer(called: str, request: Any) -> Any:
        if called != method:
            return None
        if kind == "garbage":
            return b"\xff\xff\xff"
        return refusal(Reason.UNAVAILABLE if kind == "unavailable" else Reason.LIMIT_LEASES)

    space = make(transport=answered(store, answer), config=config(path)).space(MODEL)
    keys, data = space.keys(tokens(3)), rows(3, BLOCK_BYTES)
    with space.push_layers(keys) as push:
        for layer in range(LAYERS):
            push.put(layer, by_layer(data)[layer])
        pushed = push.commit()
    total = pushed.stored + pushed.skipped + pushed.present + pushed.reserved
    assert total == 3
    with space.fetch_layers(keys) as fetch:
        reached = [fetch.wait(layer) for layer in range(LAYERS)]
        fetched = fetch.result()
    assert fetched.blocks == min(reached)
    if fetched.blocks:
        assert np.array_equal(
            fetched.data[:, : fetched.blocks], by_layer(data)[:, : fetched.blocks]
        )
    else:
        assert fetched.reason is not Reason.OK
    assert store.wait(lambda s: not s.leases and not s._reservations)


def test_no_answer_is_a_miss_by_layers_at_the_deadline(make: MakeClient, store: FakeStore) -> None:
    clock = FakeClock()

    def answer(method: str, request: Any) -> Any:
        return NEVER if method in ("Acquire", "Reserve") else None

    client = make(transport=answered(store, answer, clock), clock=clock)
    space = client.space(MODEL)
    keys = space.keys(tokens(3))
    fetch = space.fetch_layers(keys, deadline_ms=500)
    assert (fetch.blocks, fetch.result().reason) == (0, Reason.DEADLINE_EXCEEDED)
    push = space.push_layers(keys, deadline_ms=500)
    pushed = push.commit()
    assert (pushed.skipped, pushed.reason) == (3, Reason.DEADLINE_EXCEEDED)


def test_layers_that_come_after_the_deadline_are_skipped(
    make: MakeClient, store: FakeStore
) -> None:
    clock = FakeClock()
    space = make(transport=store.transport, clock=clock).space(MODEL)
    keys, data = space.keys(tokens(3)), by_layer(rows(3, BLOCK_BYTES))
    with space.push_layers(keys, deadline_ms=500) as push:
        clock.advance(1.0)
        for layer in range(LAYERS):
            push.put(layer, data[layer])
        pushed = push.commit()
    assert (pushed.stored, pushed.skipped) == (0, 3)
    assert pushed.reason is Reason.DEADLINE_EXCEEDED
    assert space.lookup(keys).blocks == 0


def test_layers_that_come_after_the_reservation_are_not_copied(
    make: MakeClient, store: FakeStore
) -> None:
    """The deadline is later: the daemon takes the room back by its own limit."""
    clock = FakeClock()
    space = make(transport=store.transport, clock=clock).space(MODEL)
    keys, data = space.keys(tokens(3)), by_layer(rows(3, BLOCK_BYTES))
    with space.push_layers(keys, deadline_ms=4 * RESERVE_TTL_MS) as push:
        push.put(0, data[0])
        clock.advance(RESERVE_TTL_MS / 1e3)
        for layer in range(1, LAYERS):
            push.put(layer, data[layer])
        pushed = push.commit()
    assert (pushed.stored, pushed.reason) == (0, Reason.LEASE_EXPIRED)
    assert "limits.lease_ttl_ms" in pushed.detail
    assert space.lookup(keys).blocks == 0


def test_a_daemon_that_ends_in_between_is_a_miss(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    keys, data = space.keys(tokens(3)), rows(3, BLOCK_BYTES)
    push = space.push_layers(keys)
    store.restart()
    for layer in range(LAYERS):
        push.put(layer, by_layer(data)[layer])
    pushed = push.commit()
    assert (pushed.stored, pushed.skipped) == (0, 3)
    fetch = space.fetch_layers(keys)
    assert fetch.result().blocks == 0
