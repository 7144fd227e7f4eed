"""What both clients promise, whatever the daemon does: one suite, run on the client for threads and
on the one for asyncio, and where it matters over shared memory, over the fd socket alone, and over
gRPC alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Overlap
from kvstore.model.reasons import BadRequest, Reason, Unavailable
from kvstore.model.record import Outcome
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import AsyncClient, Client, ClientConfig, Rank
from kvstore_client.testing import NEVER, FakeClock, FakeStore, FakeTransport, refusal
from tests.client_kit import BLOCK_TOKENS, MakeClient, clients, model, rows, tokens

MODEL = model()
BLOCK_BYTES = 4096
PATHS = ("shm", "stream", "grpc")
"""How bytes come: out of mapped memory, through the fd socket, as gRPC messages."""


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
    """`path`: one of PATHS, or "auto". The store decides between the last two."""
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


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize("path", PATHS)
def test_what_was_pushed_is_fetched(make: MakeClient, store: FakeStore, path: str) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    prompt, data = tokens(6), rows(6, BLOCK_BYTES)
    assert space.lookup(prompt).blocks == 0
    pushed = space.push(prompt, data)
    assert (pushed.stored, pushed.reason, pushed.skipped) == (6, Reason.OK, 0)
    hit = space.lookup(prompt)
    assert (hit.blocks, hit.tokens, hit.reason) == (6, 6 * BLOCK_TOKENS, Reason.OK)
    assert hit.plan.reason is Reason.COST_UNKNOWN
    out = np.zeros_like(data)
    fetched = space.fetch(hit, out)
    assert (fetched.blocks, fetched.reason) == (6, Reason.OK)
    assert fetched.data is out
    assert np.array_equal(out, data)
    assert fetched.bytes == data.nbytes
    assert fetched.total_ms >= fetched.copy_ms > 0


@pytest.mark.parametrize("path", PATHS)
def test_a_fetch_ends_at_the_first_block_that_is_not_there(
    make: MakeClient, store: FakeStore, path: str
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    prompt, data = tokens(6), rows(6, BLOCK_BYTES)
    keys = space.keys(prompt)
    space.push(keys, data)
    store.drop(keys[3:4])
    out = np.zeros_like(data)
    fetched = space.fetch(keys, out)
    assert (fetched.blocks, fetched.reason) == (3, Reason.MISS_NEVER_STORED)
    assert np.array_equal(out[:3], data[:3])
    assert space.fetch(keys[3:], out).blocks == 0
    pushed = space.push(keys, data)
    assert (pushed.stored, pushed.present) == (1, 5)


def test_presence_says_of_each_key_whether_it_is_there(make: MakeClient) -> None:
    """In several calls, too; and a daemon that is away has nothing."""
    store = FakeStore(capacity_blocks=64, keys_per_call_max=4)
    client = make(transport=store.transport)
    space = client.space(MODEL)
    keys = space.keys(tokens(6))
    space.push(keys, rows(6, BLOCK_BYTES))
    assert space.presence(keys) == ((True,) * 6, Reason.OK, (), "")
    store.drop([keys[0], keys[4]])
    found = space.presence(keys)
    assert found.there == (False, True, True, True, False, True)
    assert found.reason is Reason.MISS_NEVER_STORED
    assert space.presence(keys[::-1]).there == found.there[::-1]
    assert space.presence([]) == ((), Reason.NOTHING_TO_DO, (), "")
    with pytest.raises(BadRequest):
        space.presence([b"short"])
    store.close()


def test_where_nobody_answers_nothing_is_present(make: MakeClient, store: FakeStore) -> None:
    def answer(method: str, request: Any) -> Any:
        return grpc.StatusCode.UNAVAILABLE if method == "Lookup" else None

    space = make(transport=answered(store, answer)).space(MODEL)
    found = space.presence(space.keys(tokens(3)))
    assert found.there == (False,) * 3
    assert found.reason is Reason.UNAVAILABLE


@pytest.mark.parametrize("path", PATHS)
def test_a_push_larger_than_staging_goes_in_windows(
    make: MakeClient, store: FakeStore, path: str
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    prompt, data = tokens(30), rows(30, BLOCK_BYTES)
    keys = space.keys(prompt)
    space.push(keys[:3], data[:3])
    pushed = space.push(keys, data[1:], first_block=1)
    assert (pushed.stored, pushed.present, pushed.skipped) == (27, 2, 0)
    assert pushed.reason is Reason.OK
    fetched = space.fetch(keys)
    assert fetched.blocks == 30
    assert np.array_equal(fetched.data, data)


@pytest.mark.parametrize("path", PATHS)
def test_a_full_store_takes_what_fits_and_says_why_not_more(make: MakeClient, path: str) -> None:
    store = FakeStore(capacity_blocks=10, staging_bytes=8 * BLOCK_BYTES)
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    pushed = space.push(tokens(14), rows(14, BLOCK_BYTES))
    assert (pushed.stored, pushed.skipped, pushed.reason) == (10, 4, Reason.NO_SPACE)
    store.close()


def test_more_keys_than_a_call_may_have_are_split(make: MakeClient) -> None:
    store = FakeStore(capacity_blocks=64, keys_per_call_max=7)
    space = make(transport=store.transport).space(MODEL)
    prompt, data = tokens(40), rows(40, BLOCK_BYTES)
    keys = space.keys(prompt)
    assert space.push(keys, data).stored == 40
    hit = space.lookup(prompt, prefill=PrefillCost(10.0, 0.0))
    assert (hit.blocks, hit.plan.load_blocks) == (40, 40)
    fetched = space.fetch(hit)
    assert fetched.blocks == 40
    assert np.array_equal(fetched.data, data)
    assert len(space.explain(keys)) == 40
    store.drop(keys[20:21])
    assert space.lookup(prompt).blocks == 20
    assert space.fetch(keys).blocks == 20
    assert space.fetch(keys, all_or_nothing=True).reason is Reason.TOO_MANY_KEYS
    store.close()


def test_a_prompt_of_several_calls_is_weighed_call_by_call(make: MakeClient) -> None:
    store = FakeStore(capacity_blocks=64, keys_per_call_max=7)
    asked: list[int] = []

    def answer(method: str, request: Any) -> Any:
        if method != "Lookup":
            return None
        reply = store.answer(method, request)
        asked.append(request.before_tokens // BLOCK_TOKENS)
        assert request.prefill.a_us_per_token == 10.0
        reply.plan.load_ms, reply.plan.total_ms, reply.plan.compute_only_ms = 2.0, 50.0, 90.0
        reply.plan.reason = pb.REASON_OK
        if len(asked) == 3:
            reply.plan.load_blocks = 4
        return reply

    space = make(transport=answered(store, answer)).space(MODEL)
    prompt = tokens(28)
    space.push(prompt, rows(28, BLOCK_BYTES))
    hit = space.lookup(prompt, prefill=PrefillCost(10.0, 0.0), overlap=Overlap.TAIL)
    assert asked == [0, 7, 14, 21]
    assert hit.blocks == 28
    assert hit.plan.load_blocks == 18, "nothing after the first block that is not to be loaded"
    assert (hit.plan.load_ms, hit.plan.total_ms) == (6.0, 54.0)
    assert hit.plan.compute_only_ms == 90.0
    assert space.fetch(hit).predicted_ms == 6.0
    store.close()


@pytest.mark.parametrize("path", PATHS)
def test_the_stretches_of_a_long_prompt_are_said_to_be_one(make: MakeClient, path: str) -> None:
    """Each names what comes before it; then they are named again, so that the head leaves last."""
    store = FakeStore(capacity_blocks=64, keys_per_call_max=7, shared_memory=path != "grpc")
    said: list[pb.ReserveRequest] = []

    def answer(method: str, request: Any) -> Any:
        reserves = method == "Reserve" or method == "Push"
        if not reserves:
            return None
        reserve = request if method == "Reserve" else request[0].reserve
        said.append(reserve)
        reply = store.answer(method, request)
        reply.mark = 100 + len(said)
        return reply

    space = make(transport=answered(store, answer), config=config(path)).space(MODEL)
    prompt, data = tokens(20), rows(20, BLOCK_BYTES)
    keys = space.keys(prompt)
    assert space.push(keys, data).stored == 20
    written = [one for one in said if one.first_block * 32 < len(one.chain)]
    assert {one.chain_start for one in written} == {0, 7, 14}
    for one in said:
        assert one.parent == (keys[one.chain_start - 1] if one.chain_start else b"")
        assert one.chain == b"".join(keys[one.chain_start : one.chain_start + 7])
    assert [one.since for one in written] == [0] + [101] * (len(written) - 1)
    assert [one.chain_start for one in said[len(written) :]] == [7, 0]
    assert said[: len(written)] == written
    said.clear()
    assert space.fetch(keys).blocks == 20
    assert [one.chain_start for one in said] == ([] if path == "grpc" else [7, 0])
    store.close()


@pytest.mark.parametrize("call", ["push", "fetch", "view"])
def test_what_an_unheard_answer_granted_is_given_back(
    make: MakeClient, store: FakeStore, call: str
) -> None:
    clock = FakeClock()
    method = "Reserve" if call == "push" else "Acquire"
    lost = 0

    def answer(name: str, request: Any) -> Any:
        nonlocal lost
        if name != method or lost == 3:
            return None
        lost += 1
        assert store.answer(name, request).lease_id
        return NEVER

    transport = answered(store, answer, clock)
    client = make(transport=transport, clock=clock, config=config(breaker_failures=100))
    space = client.space(MODEL)
    with clients("threads") as others:
        others(transport=store.transport).space(MODEL).push(tokens(4), rows(4, BLOCK_BYTES))
    for number in range(3):
        if call == "fetch":
            assert space.fetch(space.keys(tokens(4))).blocks == 0
        elif call == "view":
            with space.view(space.keys(tokens(4))) as views:
                assert (views.blocks, views.reason) == (0, Reason.DEADLINE_EXCEEDED)
        else:
            new = tokens(2, seed=10 + number)
            assert space.push(new, rows(2, BLOCK_BYTES)).reason is Reason.DEADLINE_EXCEEDED
    assert lost == 3
    assert space.fetch(space.keys(tokens(4))).blocks == 4
    clock.advance(1.0)
    assert store.wait(lambda s: not s.leases and not s._reservations)
    assert store.requests["Attach"] == 2, "the session goes on"


@pytest.mark.parametrize("path", PATHS)
def test_ranks_fill_their_parts(make: MakeClient, store: FakeStore, path: str) -> None:
    client = make(transport=store.transport, config=config(path))
    spread = model(ranks=2)
    spaces = [client.space(spread, rank=Rank(tensor=rank)) for rank in range(2)]
    prompt = tokens(5)
    parts = [rows(5, BLOCK_BYTES // 2, seed) for seed in range(2)]
    first = spaces[0].push(prompt, parts[0])
    assert (first.stored, first.waiting) == (0, 5)
    assert spaces[0].lookup(prompt).blocks == 0
    last = spaces[1].push(prompt, parts[1])
    assert last.stored + last.waiting == 5
    fetched = spaces[0].fetch(spaces[0].keys(prompt))
    assert np.array_equal(fetched.data, np.concatenate(parts, axis=1))
    for space, part in zip(spaces, parts, strict=True):
        own = space.fetch(space.keys(prompt), part=True)
        assert (own.blocks, own.data.shape) == (5, (5, BLOCK_BYTES // 2))
        assert np.array_equal(own.data, part)


def test_a_rank_with_anothers_bytes_writes_nothing(make: MakeClient, store: FakeStore) -> None:
    client = make(transport=store.transport)
    space = client.space(model(heads=1, head_size=128, ranks=2), rank=Rank(tensor=1))
    pushed = space.push(tokens(3), rows(3, space.part_bytes))
    assert (pushed.skipped, pushed.reason) == (3, Reason.NOTHING_TO_DO)
    assert not store.requests


def test_an_empty_prompt_needs_no_daemon(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    assert space.lookup([]).reason is Reason.NOTHING_TO_DO
    assert space.lookup([1, 2, 3]).reason is Reason.NOTHING_TO_DO
    assert space.fetch([]).reason is Reason.NOTHING_TO_DO
    assert space.push([], rows(0, BLOCK_BYTES)).reason is Reason.NOTHING_TO_DO
    with space.view([]) as views:
        assert views.reason is Reason.NOTHING_TO_DO
    assert not store.requests


def test_a_declined_hit_is_not_loaded(make: MakeClient, store: FakeStore) -> None:
    def answer(method: str, request: Any) -> Any:
        if method != "Lookup":
            return None
        reply = store.answer(method, request)
        reply.plan.load_blocks = 0
        reply.plan.reason = pb.REASON_DECLINED_RECOMPUTE_FASTER
        return reply

    space = make(transport=answered(store, answer)).space(MODEL)
    space.push(tokens(3), rows(3, BLOCK_BYTES))
    hit = space.lookup(tokens(3), prefill=PrefillCost(1.0, 0.0))
    assert hit.blocks == 3
    before = store.requests["Acquire"]
    fetched = space.fetch(hit)
    assert fetched.reason is Reason.DECLINED_RECOMPUTE_FASTER
    assert hit.outcome is fetched.outcome is Outcome.DECLINED
    assert store.requests["Acquire"] == before


def test_a_load_is_held_against_what_its_plan_predicted(make: MakeClient, store: FakeStore) -> None:
    def answer(method: str, request: Any) -> Any:
        if method != "Lookup":
            return None
        reply = store.answer(method, request)
        reply.plan.load_ms = 12.5
        return reply

    client = make(transport=answered(store, answer))
    space = client.space(MODEL)
    space.push(tokens(3), rows(3, BLOCK_BYTES))
    hit = space.lookup(tokens(3), prefill=PrefillCost(1.0, 0.0))
    fetched = space.fetch(hit)
    assert (fetched.blocks, fetched.predicted_ms) == (3, 12.5)
    assert 0 < fetched.load_ms <= fetched.total_ms
    part = space.fetch(hit.keys[:2])
    assert (part.blocks, part.predicted_ms) == (2, 0.0), "nobody predicted that"
    client.close()
    if store.reports:  # not over byte streams, which have no lease to end
        told = [(one.predicted_us, one.load_us >= one.copy_us > 0) for one in store.reports]
        assert told == [(12_500, True), (0, True)]


def test_observed_prefills_become_the_cost_of_lookups(make: MakeClient, store: FakeStore) -> None:
    costs: list[tuple[float, float]] = []

    def answer(method: str, request: Any) -> Any:
        if method == "Lookup" and request.HasField("prefill"):
            costs.append((request.prefill.a_us_per_token, request.prefill.b_us_per_token2))

    space = make(transport=answered(store, answer)).space(MODEL)
    space.lookup(tokens(1))
    assert costs == []
    truth = PrefillCost(20.0, 0.001)
    for length in range(1_000, 21_000, 1_000):
        space.observe_prefill(length, 0, truth.prefill_us(length) / 1e3)
    space.lookup(tokens(1))
    assert costs == [pytest.approx(truth)]


# ---------------------------------------------------------------- views and leases


def test_views_are_the_bytes_in_place_and_read_only(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt, data = tokens(4), rows(4, BLOCK_BYTES)
    space.push(prompt, data)
    with space.view(space.lookup(prompt)) as views:
        assert (views.blocks, views.reason) == (4, Reason.OK)
        assert all(np.array_equal(a, b) for a, b in zip(views.arrays, data, strict=True))
        assert not any(array.flags.writeable for array in views.arrays)
        assert len(store.leases) == 1
        kept = views.arrays[0]
    assert views.valid
    assert views.arrays == []
    assert store.wait(lambda s: not s.leases)
    assert np.array_equal(kept, data[0])


def test_a_view_of_reused_memory_is_not_valid(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    keys = space.keys(tokens(4))
    space.push(keys, rows(4, BLOCK_BYTES))
    with space.view(keys) as views:
        assert views.valid
        store.drop(keys[2:3])
        assert not views.valid
    assert not views.valid


def test_a_view_ends_with_the_daemon(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    keys = space.keys(tokens(2))
    data = rows(2, BLOCK_BYTES)
    space.push(keys, data)
    with space.view(keys) as views:
        store.restart()
        while views.valid:  # until the socket's end has been seen
            pass
        assert np.array_equal(views.arrays[1], data[1])  # still mapped: no crash, but not valid
    assert not views.valid


def test_reused_memory_is_a_miss_and_never_wrong_bytes(make: MakeClient, store: FakeStore) -> None:
    space_of: dict[str, Any] = {}

    def answer(method: str, request: Any) -> Any:
        if method != "Acquire":
            return None
        reply = store.answer(method, request)
        store.drop(space_of["keys"][2:3])  # between the lease and the copy
        return reply

    space = make(transport=answered(store, answer)).space(MODEL)
    keys = space_of["keys"] = space.keys(tokens(5))
    data = rows(5, BLOCK_BYTES)
    space.push(keys, data)
    fetched = space.fetch(keys)
    assert (fetched.blocks, fetched.reason) == (2, Reason.GENERATION_CHANGED)
    assert np.array_equal(fetched.data, data[:2])
    space.push(keys, data)
    again = space.fetch(keys, all_or_nothing=True)
    assert (again.blocks, again.reason) == (0, Reason.GENERATION_CHANGED)


def test_nothing_stays_leased_or_reserved_whatever_was_tried(
    make: MakeClient, store: FakeStore
) -> None:
    seed = 4242
    rng = random.Random(seed)
    space = make(transport=store.transport, config=config(deadline_ms=60_000)).space(MODEL)

    def broken(index: int, target: Any) -> None:
        raise KeyboardInterrupt if index % 2 else ValueError

    for turn in range(150):
        prompt = tokens(rng.randint(1, 6), seed=rng.randint(0, 5))
        kind = rng.choice(("push", "fetch", "view", "fill", "lookup"))
        if kind == "push":
            space.push(prompt, rows(len(prompt) // BLOCK_TOKENS, BLOCK_BYTES))
        elif kind == "fetch":
            space.fetch(space.keys(prompt))
        elif kind == "view":
            with space.view(space.keys(prompt)):
                pass
        elif kind == "fill":
            store.drop(space.keys(prompt)[:1])
            with pytest.raises((ValueError, KeyboardInterrupt)):
                space.push(prompt, broken)
        else:
            for _ in range(5):
                space.lookup(prompt)
        assert len(store.leases) < 100, (seed, turn)
    assert store.wait(lambda s: not s.leases and not s._reservations), seed


def test_the_report_of_a_load_says_what_it_saved(make: MakeClient, store: FakeStore) -> None:
    cost = PrefillCost(100.0, 0.0)
    client = make(transport=store.transport, config=config(prefill=cost))
    space = client.space(MODEL)
    keys = space.keys(tokens(3))
    space.push(keys, rows(3, BLOCK_BYTES))
    space.fetch(keys, request_id="r-1")
    assert store.wait(lambda s: bool(s.reports))
    report = store.reports[0]
    assert (report.blocks, report.tokens, report.request_id) == (3, 3 * BLOCK_TOKENS, "r-1")
    assert report.reason == pb.REASON_OK
    assert report.prefill_saved_us == 3 * BLOCK_TOKENS * 100.0


# ---------------------------------------------------------------- the users' own code


@pytest.mark.parametrize("path", PATHS)
def test_fill_is_called_for_wanted_blocks_only(
    make: MakeClient, store: FakeStore, path: str
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    prompt, data = tokens(6), rows(6, BLOCK_BYTES)
    space.push(prompt[: 2 * BLOCK_TOKENS], data[:2])
    asked: list[int] = []

    def fill(index: int, target: np.ndarray) -> None:
        asked.append(index)
        assert target.flags.writeable
        assert target.shape == (BLOCK_BYTES,)
        target[:] = data[index]

    assert space.push(prompt, fill).stored == 4
    assert asked == [2, 3, 4, 5]
    assert np.array_equal(space.fetch(space.keys(prompt)).data, data)


@pytest.mark.parametrize("path", PATHS)
def test_what_a_fill_raises_comes_out_and_nothing_is_stored(
    make: MakeClient, store: FakeStore, path: str
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)

    def fill(index: int, target: np.ndarray) -> None:
        if index == 2:
            raise ZeroDivisionError("the user's own")
        target.fill(1)

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        space.push(tokens(4), fill)
    assert space.lookup(tokens(4)).blocks == 0
    assert store.wait(lambda s: not s._reservations)
    assert space.push(tokens(4), rows(4, BLOCK_BYTES)).stored == 4


@pytest.mark.parametrize("raises", [True, False])
def test_a_push_that_failed_leaves_no_memory_mapped(store: FakeStore, raises: bool) -> None:
    clock = FakeClock()

    def fill(index: int, target: np.ndarray) -> None:
        if raises:
            raise ZeroDivisionError("the user's own")
        clock.advance(60)

    gc.disable()  # what only it would find is mapped, and counted by the daemon, until then
    try:
        with Client("/fake", transport=store.transport, clock=clock) as client:
            with contextlib.suppress(ZeroDivisionError):
                pushed = client.space(MODEL).push(tokens(4), fill)
                assert pushed.reason is Reason.DEADLINE_EXCEEDED
            assert not store.unmapped
        assert store.wait(lambda s: len(s.unmapped) == 1)
    finally:
        gc.enable()


def test_what_a_coroutine_raises_holds_no_memory(store: FakeStore) -> None:
    targets: list[weakref.ref[np.ndarray]] = []

    def fill(index: int, target: np.ndarray) -> None:
        targets.append(weakref.ref(target))
        raise ZeroDivisionError("the user's own")

    async def push() -> None:
        async with AsyncClient("/fake", transport=store.transport) as client:
            with contextlib.suppress(ZeroDivisionError):
                await client.space(MODEL).push(tokens(4), fill)
            # The thread that ran it may still be on its way out, and tells nobody when it is.
            gone = (store.wait(lambda s: targets[0]() is None, 0.01) for _ in range(500))
            assert any(gone)

    gc.disable()
    try:
        asyncio.run(push())
    finally:
        gc.enable()


def test_misuse_raises_before_any_call(make: MakeClient, store: FakeStore) -> None:
    client = make(transport=store.transport)
    space = client.space(MODEL)
    keys = space.keys(tokens(3))
    readonly = np.zeros((3, BLOCK_BYTES), np.uint8)
    readonly.flags.writeable = False
    misuse: list[Callable[[], Any]] = [
        lambda: space.fetch(keys, np.zeros((3, 100), np.uint8)),
        lambda: space.fetch(keys, np.zeros((2, BLOCK_BYTES), np.uint8)),
        lambda: space.fetch(keys, readonly),
        lambda: space.fetch(keys, [bytearray(BLOCK_BYTES)] * 2),
        lambda: space.fetch(keys, [bytes(BLOCK_BYTES)] * 3),
        lambda: space.fetch(keys, np.zeros((BLOCK_BYTES, 3), np.uint8).T),
        lambda: space.fetch(keys, object()),
        lambda: space.fetch([b"short"]),
        lambda: space.fetch([*keys, "x"]),
        lambda: space.fetch(tokens(3)),
        lambda: space.fetch(keys, wait_ms=-1),
        lambda: space.push(keys, np.zeros((3, 5), np.uint8)),
        lambda: space.push(keys, rows(2, BLOCK_BYTES)),
        lambda: space.push(keys, rows(3, BLOCK_BYTES), first_block=4),
        lambda: space.push(keys, rows(3, BLOCK_BYTES), attempt=-1),
        lambda: space.lookup("text"),
        lambda: space.lookup([1.5] * 8),
        lambda: space.lookup(keys, request_id="x" * 129),
        lambda: space.fetch(keys, request_id="\ud800"),
        lambda: space.lookup(None),
        lambda: space.fetch(None),
        lambda: space.fetch(iter(keys)),
        lambda: space.explain(None),
        lambda: space.lookup(keys, deadline_ms=0),
        lambda: space.lookup(keys, prefill=PrefillCost(-1.0, 0.0)),
        lambda: space.explain([b""]),
        lambda: client.space(MODEL, rank=1),
        lambda: client.space(MODEL, rank=Rank(tensor=3)),
        lambda: client.space("model"),
    ]
    for number, call in enumerate(misuse):
        with pytest.raises(BadRequest):
            call()
        assert not store.requests, number
    client.close()
    with pytest.raises(BadRequest, match="closed"):
        space.lookup(keys)


# ---------------------------------------------------------------- a daemon that misbehaves


def everything(space: Any) -> dict[str, Reason]:
    """One call of each kind on a prompt that is half stored; none of them may raise."""
    keys = space.keys(tokens(4))
    outcome = {
        "status": space.status().reason,
        "lookup": space.lookup(keys).reason,
        "fetch": space.fetch(keys[:2]).reason,
        "push": space.push(keys, rows(4, BLOCK_BYTES)).reason,
    }
    with space.view(keys[:2]) as views:
        outcome["view"] = views.reason
    return outcome


CALLS = {
    "shm": ("Attach", "Open", "Lookup", "Acquire", "Reserve", "Commit", "Release", "Detach"),
    "stream": ("Attach", "Open", "Lookup", "Acquire", "Push", "Release", "Detach"),
    "grpc": ("Attach", "Open", "Lookup", "Fetch", "Push", "Detach"),
}
CASES = [(path, method) for path, methods in CALLS.items() for method in methods]


def fails_at(method: str, wrong: Any, seen: list[str]) -> Callable[[str, Any], Any]:
    def answer(called: str, request: Any) -> Any:
        if called != method:
            return None
        seen.append(called)
        return wrong

    return answer


@pytest.mark.parametrize(("path", "method"), CASES)
def test_no_status_of_any_call_raises(
    make: MakeClient, store: FakeStore, path: str, method: str
) -> None:
    """Every call times every status code, bare and with a reason of the daemon."""
    quiet = make(transport=store.transport, config=config(path)).space(MODEL)
    quiet.push(tokens(2), rows(2, BLOCK_BYTES))
    for code in grpc.StatusCode:
        if code is grpc.StatusCode.OK:
            continue
        store.drop(quiet.keys(tokens(4))[2:])
        seen: list[str] = []
        transport = answered(store, fails_at(method, code, seen))
        client = make(transport=transport, config=config(path, breaker_failures=1_000))
        space = client.space(MODEL)
        outcome = everything(space)
        client.close()
        assert seen, code
        if method in ("Attach", "Open"):
            assert all(reason is not Reason.OK for reason in outcome.values()), (code, outcome)
        if method == "Lookup":
            assert outcome["lookup"] is not Reason.OK, code
        if method in ("Acquire", "Fetch"):
            assert outcome["fetch"] is not Reason.OK, code
        if method in ("Reserve", "Commit", "Push"):
            assert outcome["push"] is not Reason.OK, code


@pytest.mark.parametrize("reason", [r for r in Reason if r is not Reason.UNSPECIFIED])
def test_a_refusal_keeps_its_reason(make: MakeClient, store: FakeStore, reason: Reason) -> None:
    for method in ("Lookup", "Acquire", "Reserve"):
        seen: list[str] = []
        space = make(transport=answered(store, fails_at(method, refusal(reason), seen))).space(
            MODEL
        )
        outcome = everything(space)
        verb = {"Lookup": "lookup", "Acquire": "fetch", "Reserve": "push"}[method]
        if reason is not Reason.SESSION_UNKNOWN:  # where the calls after it need another session
            contradiction = reason in (Reason.OK, Reason.HIT)
            assert outcome[verb] is (Reason.INTERNAL if contradiction else reason)
        assert seen


GARBAGE = [b"\xff" * 7, b"\x0a", bytes(range(256)), b"\x08\x96\x01" * 3]


@pytest.mark.parametrize(("path", "method"), CASES)
def test_no_garbage_raises(make: MakeClient, store: FakeStore, path: str, method: str) -> None:
    quiet = make(transport=store.transport, config=config(path)).space(MODEL)
    quiet.push(tokens(2), rows(2, BLOCK_BYTES))
    for garbage in GARBAGE:
        store.drop(quiet.keys(tokens(4))[2:])
        seen: list[str] = []
        transport = answered(store, fails_at(method, garbage, seen))
        client = make(transport=transport, config=config(path, breaker_failures=1_000))
        everything(client.space(MODEL))
        client.close()
        assert seen


def wrong_shapes(store: FakeStore) -> dict[str, list[Callable[[Any], Any]]]:
    """Answers that parse and lie. Each takes the true answer."""

    def change(**fields: Any) -> Callable[[Any], Any]:
        def changed(reply: Any) -> Any:
            for name, value in fields.items():
                setattr(reply, name, value(reply) if callable(value) else value)
            return reply

        return changed

    def places(*wrong: tuple[int, int, int]) -> Callable[[Any], Any]:
        return change(places=lambda reply: convert.pack_places(wrong))

    def hit(**fields: Any) -> Callable[[Any], Any]:
        def changed(reply: Any) -> Any:
            for name, value in fields.items():
                setattr(reply.groups[0], name, value)
            return reply

        return changed

    return {
        "Open": [
            change(fingerprint_digest=b"x" * 32),
            change(block_bytes=8192),
            change(parts=7),
            change(verdict=99),
            change(space_id=0),
            change(space_id=0, reason=77_777),
        ],
        "Lookup": [
            lambda reply: pb.LookupReply(),
            lambda reply: pb.LookupReply(groups=[*reply.groups, *reply.groups]),
            hit(hit_blocks=100),
            hit(tiers=b"\x01" * 100),
            hit(fingerprint_digest=b"other"),
            hit(hit_blocks=2, tiers=b"\x00\x01"),
            hit(hit_blocks=2, tiers=b"\xff\xff"),
        ],
        "Acquire": [
            change(fingerprint_digest=b""),
            change(block_bytes=1),
            change(places=b""),
            change(places=b"x" * 17),
            places((99, 0, 1), (99, 1, 1)),
            change(places=lambda r: _slots_of(r, 1_000_000)),
            change(places=lambda r: _slots_of(r, 0xFFFF_FFFF)),
            change(lease_id=0),
        ],
        "Reserve": [
            change(wanted=b"abc"),
            change(wanted=b""),
            change(offsets=b"\0" * 8),
            change(wanted=lambda r: convert.pack_u32([3, 2])),
            change(wanted=lambda r: convert.pack_u32([2, 400])),
            change(offsets=lambda r: convert.pack_u64([0, 2**60])),
            change(offsets=lambda r: convert.pack_u64([0, 2**64 - 1])),
            change(part_bytes=1),
            change(staging_region_id=4_000_000),
        ],
        "Commit": [change(visible=1_000), change(reason=123_456)],
    }


def _slots_of(reply: Any, slot: int) -> bytes:
    places = convert.unpack_places(reply.places)
    return convert.pack_places(
        (int(place["region"]), slot, int(place["generation"])) for place in places
    )


@pytest.mark.parametrize("method", ["Open", "Lookup", "Acquire", "Reserve", "Commit"])
def test_no_lie_raises_or_is_believed(make: MakeClient, store: FakeStore, method: str) -> None:
    quiet = make(transport=store.transport).space(MODEL)
    data = rows(4, BLOCK_BYTES)
    quiet.push(tokens(2), data[:2])
    for number, lie in enumerate(wrong_shapes(store)[method]):
        store.drop(quiet.keys(tokens(4))[2:])

        def answer(called: str, request: Any, lie: Callable[[Any], Any] = lie) -> Any:
            return lie(store.answer(called, request)) if called == method else None

        short = config(deadline_ms=300, breaker_failures=1_000)
        client = make(transport=answered(store, answer), config=short)
        space = client.space(MODEL)
        keys = space.keys(tokens(4))
        out = np.zeros((2, BLOCK_BYTES), np.uint8)
        hit, fetched = space.lookup(keys), space.fetch(keys[:2], out)
        pushed = space.push(keys, data)
        assert np.array_equal(out[: fetched.blocks], data[: fetched.blocks]), number
        if method in ("Open", "Lookup"):
            assert hit.blocks == 0, number
        if method in ("Open", "Acquire"):
            assert fetched.blocks == 0, number
        if method in ("Open", "Reserve", "Commit"):
            believed = pushed.stored if (method, number) == ("Commit", 1) else 0
            assert pushed.stored == believed, number  # that one lies about the reason alone
            assert pushed.reason is not Reason.OK, number
        client.close()
        assert quiet.fetch(keys, all_or_nothing=False).blocks in (2, 4), number


def test_streams_that_lie_are_misses(make: MakeClient, store: FakeStore) -> None:
    """Chunks late, twice, out of order, too long, too short, or an end too soon."""
    store.shared_memory = False
    stream = config("stream", breaker_failures=1_000)
    quiet = make(transport=store.transport, config=stream).space(MODEL)
    data = rows(3, BLOCK_BYTES)
    keys = quiet.keys(tokens(3))
    quiet.push(keys, data)

    def cut(chunks: list[Any]) -> list[Any]:
        chunks[2].payload = chunks[2].payload[:-1]
        return chunks

    def longer(chunks: list[Any]) -> list[Any]:
        chunks[2].payload += b"\0"
        return chunks

    def header(index: int, **fields: Any) -> Callable[[list[Any]], list[Any]]:
        def changed(chunks: list[Any]) -> list[Any]:
            for name, value in fields.items():
                setattr(chunks[index].header, name, value)
            return chunks

        return changed

    # (what becomes of the chunks, how many blocks are still right)
    lies: list[tuple[Callable[[list[Any]], list[Any]], int]] = [
        (lambda chunks: [], 0),
        (lambda chunks: chunks[:1], 0),
        (lambda chunks: chunks[1:], 0),
        (lambda chunks: chunks[:-1], 3),
        (lambda chunks: [*chunks[:2], *chunks[3:]], 1),
        (lambda chunks: [*chunks[:2], chunks[1], *chunks[2:]], 1),
        (lambda chunks: [chunks[0], chunks[2], *chunks], 0),
        (lambda chunks: [*chunks[:2], grpc.StatusCode.UNAVAILABLE], 1),
        (lambda chunks: [*chunks[:2], NEVER], 1),
        (lambda chunks: [*chunks[:2], b"\xff\xff\xff"], 1),
        (cut, 1),
        (longer, 1),
        (header(2, offset=1), 1),
        (header(2, block=77), 1),
        (header(0, block_bytes=1), 0),
        (header(0, fingerprint_digest=b"another"), 0),
        (lambda chunks: [*chunks, *chunks], 3),
    ]
    for number, (lie, right) in enumerate(lies):

        def answer(method: str, request: Any, lie: Any = lie) -> Any:
            return lie(store.answer(method, request)) if method == "Fetch" else None

        space = make(transport=answered(store, answer), config=stream).space(MODEL)
        fetched = space.fetch(keys)
        assert fetched.blocks == right, (number, fetched.reason)
        assert (fetched.reason is Reason.OK) == (number == len(lies) - 1), number
        assert np.array_equal(fetched.data, data[:right]), number


def recut(chunks: list[Any], payload_bytes: int) -> list[Any]:
    """The same stream in messages of another size."""
    first, *middle, last = chunks
    data = b"".join(chunk.payload for chunk in middle)
    cut = [
        pb.FetchChunk(
            header=pb.ChunkHeader(block=at // BLOCK_BYTES, offset=at % BLOCK_BYTES),
            payload=data[at : at + payload_bytes],
        )
        for at in range(0, len(data), payload_bytes)
    ]
    return [first, *cut, last]


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize(
    ("payload_bytes", "right"),
    [
        (BLOCK_BYTES // 4, 5),
        (BLOCK_BYTES, 5),
        (2 * BLOCK_BYTES, 5),
        (9 * BLOCK_BYTES, 5),
        (3 * BLOCK_BYTES // 2, 0),  # ends inside a block that it did not begin
    ],
)
def test_streams_may_be_cut_in_many_ways(
    make: MakeClient, store: FakeStore, payload_bytes: int, right: int, part: bool
) -> None:
    def answer(method: str, request: Any) -> Any:
        return recut(store.answer(method, request), payload_bytes) if method == "Fetch" else None

    store.shared_memory = False
    space = make(transport=answered(store, answer), config=config("stream")).space(MODEL)
    data = rows(5, BLOCK_BYTES)
    assert space.push(tokens(5), data).stored == 5
    fetched = space.fetch(space.keys(tokens(5)), part=part)
    assert fetched.blocks == right, fetched
    assert np.array_equal(fetched.data, data[:right])


def test_newer_daemons_are_understood(make: MakeClient, store: FakeStore) -> None:
    """Fields and reasons that this version does not know change nothing else."""
    unknown = b"\xf2\x7f\x03new"  # field 2046, length-delimited

    def answer(method: str, request: Any) -> Any:
        reply = store.answer(method, request)
        if method == "Attach":
            reply.welcome.protocol_minor = 9
        if method == "Lookup":
            reply.groups[0].reason = 9_999
        return reply.SerializeToString() + unknown if hasattr(reply, "DESCRIPTOR") else reply

    space = make(transport=answered(store, answer)).space(MODEL)
    assert space.push(tokens(2), rows(2, BLOCK_BYTES)).stored == 2
    hit = space.lookup(tokens(2))
    assert (hit.blocks, hit.reason) == (2, Reason.UNSPECIFIED)
    assert space.fetch(hit).blocks == 2


def test_another_major_version_is_said(make: MakeClient, store: FakeStore) -> None:
    refused = refusal(Reason.PROTOCOL_VERSION)
    seen: list[str] = []
    transport = answered(store, fails_at("Attach", refused, seen))
    space = make(transport=transport, config=config(breaker_failures=2)).space(MODEL)
    for _ in range(6):
        assert space.lookup(tokens(1)).reason is Reason.PROTOCOL_VERSION


# ---------------------------------------------------------------- a daemon that is away


def test_no_answer_is_a_miss_at_the_deadline(make: MakeClient, store: FakeStore) -> None:
    for method in ("Attach", "Open", "Lookup", "Acquire", "Reserve", "Commit"):
        clock = FakeClock()
        seen: list[str] = []
        transport = answered(store, fails_at(method, NEVER, seen), clock)
        client = make(transport=transport, clock=clock, config=config(breaker_failures=1_000))
        space = client.space(MODEL)
        began_ns = clock()
        verb = {"Acquire": "fetch", "Reserve": "push", "Commit": "push"}.get(method, "lookup")
        keys = space.keys(tokens(1))
        if verb == "push":
            result = space.push(keys, rows(1, BLOCK_BYTES), deadline_ms=700)
        else:
            result = getattr(space, verb)(keys, deadline_ms=700)
        assert result.reason is Reason.DEADLINE_EXCEEDED, method
        assert clock() - began_ns <= 700_000_000, method
        assert seen


def test_steps_share_one_deadline(make: MakeClient, store: FakeStore) -> None:
    clock = FakeClock()

    def answer(method: str, request: Any) -> None:
        if method in ("Open", "Reserve", "Commit"):
            clock.advance(0.2)

    client = make(transport=answered(store, answer, clock), clock=clock)
    space = client.space(MODEL)
    prompt = tokens(40)  # five windows of 0.4 s each
    pushed = space.push(prompt, rows(40, BLOCK_BYTES), deadline_ms=1_000)
    assert pushed.reason is Reason.DEADLINE_EXCEEDED
    assert 8 <= pushed.stored < 40
    assert pushed.stored + pushed.skipped == 40


def test_the_breaker_opens_and_closes_again(make: MakeClient, store: FakeStore) -> None:
    away = [True]

    def answer(method: str, request: Any) -> Any:
        return grpc.StatusCode.UNAVAILABLE if away[0] else None

    short = config(breaker_failures=3, breaker_retry_ms=10)
    space = make(transport=answered(store, answer), config=short).space(MODEL)
    reasons = [space.lookup(tokens(1)).reason for _ in range(20)]
    assert reasons[0] is Reason.UNAVAILABLE
    assert Reason.BREAKER_OPEN in reasons
    away[0] = False
    assert store.wait(lambda s: s.requests["Attach"] > 0)  # the probe, by itself
    while (reason := space.lookup(tokens(1)).reason) is Reason.BREAKER_OPEN:
        pass
    assert reason is Reason.MISS_NEVER_STORED


def test_calls_fail_at_once_while_the_breaker_is_open(make: MakeClient) -> None:
    clock = FakeClock()
    calls: list[str] = []

    def answer(method: str, request: Any) -> Any:
        calls.append(method)
        return grpc.StatusCode.UNAVAILABLE

    client = make(
        transport=FakeTransport.factory(answer), clock=clock, config=config(breaker_failures=1)
    )
    space = client.space(MODEL)
    assert space.lookup(tokens(1)).reason is Reason.UNAVAILABLE
    for _ in range(50):
        assert space.lookup(tokens(1)).reason is Reason.BREAKER_OPEN
        assert space.push(tokens(1), rows(1, BLOCK_BYTES)).reason is Reason.BREAKER_OPEN
    assert calls == ["Attach"]  # the clock stands still: no probe is due


def test_the_same_object_goes_on_with_another_daemon(make: MakeClient, store: FakeStore) -> None:
    client = make(transport=store.transport)
    space = client.space(MODEL)
    prompt, data = tokens(3), rows(3, BLOCK_BYTES)
    for _ in range(5):
        assert space.push(prompt, data).stored == 3
        stale = space.lookup(prompt)
        assert stale.blocks == 3
        store.restart()
        # A hint from before the restart promises nothing.
        assert space.fetch(stale).blocks == 0
        while space.lookup(prompt).reason is not Reason.MISS_NEVER_STORED:
            pass
        assert client.connection().instance_id == store.instance_id


def close_spaces(store: FakeStore) -> None:
    store.drop(key for space in store._spaces.values() for key in list(space.slots))
    store._spaces.clear()


@pytest.mark.parametrize("path", PATHS)
def test_a_closed_space_is_opened_again_by_the_same_call(
    make: MakeClient, store: FakeStore, path: str
) -> None:
    space = make(transport=store.transport, config=config(path)).space(MODEL)
    prompt, data = tokens(2), rows(2, BLOCK_BYTES)
    keys = space.keys(prompt)
    calls: list[Callable[[], Reason]] = [
        lambda: space.lookup(prompt).reason,
        lambda: space.fetch(keys).reason,
        lambda: space.explain(keys)[0].reason,
    ]
    for call in calls:
        assert space.push(prompt, data).stored == 2
        close_spaces(store)
        assert call() is Reason.MISS_NEVER_STORED
    close_spaces(store)
    assert space.push(prompt, data).stored == 2
    if path == "shm":
        close_spaces(store)
        with space.view(keys) as views:
            assert views.reason is Reason.MISS_NEVER_STORED


@pytest.mark.parametrize("path", PATHS)
def test_the_first_call_after_a_raised_epoch_says_so(
    make: MakeClient, store: FakeStore, path: str
) -> None:
    raised: list[bool] = []

    def answer(method: str, request: Any) -> Any:
        if method == "Open" and raised:
            return pb.OpenReply(reason=pb.REASON_MISS_EPOCH_STALE)
        return None

    space = make(transport=answered(store, answer), config=config(path)).space(MODEL)
    prompt, data = tokens(2), rows(2, BLOCK_BYTES)
    keys = space.keys(prompt)

    def view() -> Reason:
        with space.view(keys) as views:
            reason: Reason = views.reason
            return reason

    for call in (
        lambda: space.lookup(prompt).reason,
        lambda: space.fetch(keys).reason,
        lambda: space.push(prompt, data).reason,
        *([view] if path == "shm" else []),
    ):
        raised.clear()
        assert space.push(prompt, data).stored == 2
        raised.append(True)
        close_spaces(store)
        assert call() is Reason.MISS_EPOCH_STALE
        assert call() is Reason.MISS_EPOCH_STALE


def test_a_space_that_closes_again_and_again_is_no_endless_call(
    make: MakeClient, store: FakeStore
) -> None:
    gone = refusal(Reason.SPACE_CLOSED)
    space = make(
        transport=answered(store, lambda method, request: gone if method == "Lookup" else None)
    ).space(MODEL)
    assert space.lookup(tokens(2)).reason is Reason.SPACE_CLOSED
    assert (store.requests["Open"], store.requests["Attach"]) == (2, 1)


def test_explain_and_connection(make: MakeClient, store: FakeStore) -> None:
    client = make(transport=store.transport)
    space = client.space(MODEL)
    keys = space.keys(tokens(2))
    space.push(keys[:1], rows(1, BLOCK_BYTES))
    found = space.explain(keys)
    assert [one.reason for one in found] == [Reason.HIT, Reason.MISS_NEVER_STORED]
    assert found[0].key == keys[0].hex()[:8]
    assert client.connection().transport == "shm"

    gone = make(
        transport=FakeTransport.factory(lambda method, request: grpc.StatusCode.UNAVAILABLE)
    )
    assert gone.connection().reason is Reason.UNAVAILABLE
    with pytest.raises(Unavailable):
        gone.space(MODEL).explain(keys)


def test_a_held_fingerprint_says_what_is_missing(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(model(revision=None))
    status = space.status()
    assert (status.verdict.value, status.reason) == ("held", Reason.HELD_FOR_REVIEW)
    assert status.missing == ("identity.weights_revision",)
    assert space.push(tokens(1), rows(1, BLOCK_BYTES)).stored == 1


def test_shared_memory_is_fallen_back_from_only_where_allowed(make: MakeClient) -> None:
    store = FakeStore(shared_memory=False)
    client = make(transport=store.transport)
    connection = client.connection()
    assert (connection.transport, connection.reason) == ("stream", Reason.OK)
    assert "gRPC" in connection.detail
    space = client.space(MODEL)
    space.push(tokens(2), rows(2, BLOCK_BYTES))
    assert space.fetch(space.keys(tokens(2))).blocks == 2
    with space.view(space.keys(tokens(2))) as views:
        assert (views.blocks, views.reason) == (0, Reason.NOT_SUPPORTED)
    strict = make(transport=store.transport, config=config("shm")).space(MODEL)
    assert strict.lookup(tokens(2)).reason is Reason.NOT_SUPPORTED
    store.close()
