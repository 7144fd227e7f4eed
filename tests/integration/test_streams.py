"""Fetch and Push: the bytes, the order, and peers that are slow, wrong or gone."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore.model.record import Outcome, Stage
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.streams import CHUNK_BYTES
from tests.e2e.stage import Bytes, Prompt, model
from tests.integration.polling import within
from tests.integration.stack import Stack
from tests.rawclient import RawClient, Refused, reason

MODEL = model()
BIG = model(8 << 20, name="big")
"""Blocks of four messages."""
PROMPT = Prompt(MODEL, 1, blocks=8)
SOON_S = 5.0


def blocks_of(chunks: Sequence[pb.FetchChunk]) -> list[Bytes]:
    """The whole blocks of a Fetch, in their order; what is left of the last one is dropped."""
    block_bytes = chunks[0].header.block_bytes
    pending = bytearray()
    for chunk in chunks[1:]:
        if not chunk.payload:
            continue
        at = chunk.header.block * block_bytes + chunk.header.offset
        assert at == len(pending), "chunks come in order, without a gap"
        assert len(chunk.payload) <= CHUNK_BYTES
        over = chunk.header.offset + len(chunk.payload)
        assert over <= block_bytes or over % block_bytes == 0, "a part of one block, or whole ones"
        pending += chunk.payload
    whole = len(pending) // block_bytes
    data = np.frombuffer(bytes(pending[: whole * block_bytes]), np.uint8)
    return list(data.reshape(whole, block_bytes))


def pushes(
    client: RawClient, space: int, prompt: Prompt, *, piece: int = 1 << 20, commit: bool = True
) -> Iterator[pb.PushChunk]:
    """A whole push of a prompt."""
    reserve = pb.ReserveRequest(
        session=client.secret, space_id=space, chain=b"".join(prompt.keys), request_id="push-1"
    )
    yield pb.PushChunk(reserve=reserve)
    for index, row in enumerate(prompt.rows()):
        for offset in range(0, len(row), piece):
            header = pb.ChunkHeader(block=index, offset=offset)
            yield pb.PushChunk(header=header, payload=row[offset : offset + piece].tobytes())
    if commit:
        yield pb.PushChunk(commit=True)


# ---------------------------------------------------------------- fetch


@pytest.mark.parametrize("fingerprint", [MODEL, BIG], ids=["one message", "four messages"])
def test_fetch_gives_the_bytes_and_seals_each_block(
    make_stack: Callable[..., Stack], fingerprint: pb.Fingerprint
) -> None:
    stack = make_stack(capacity_bytes=256 << 20)
    prompt = Prompt(fingerprint, 2, blocks=3)  # type: ignore[arg-type]
    with RawClient(stack.socket()) as client:
        space = client.open(fingerprint).space_id  # type: ignore[arg-type]
        client.put(space, prompt.keys, prompt.rows())
        chunks = client.fetch(space, prompt.keys, request_id="f-1")
        first, last = chunks[0].header, chunks[-1].header
        assert first.fingerprint_digest == prompt.fingerprint.digest
        assert first.block_bytes == prompt.block_bytes
        assert (last.block, reason(last.reason)) == (3, Reason.OK)
        prompt.assert_right(blocks_of(chunks))
        assert stack.held() == (0, 0, 0)
        (record,) = stack.records("fetch")
        assert (record.outcome, record.asked, record.handed_on) == (Outcome.HIT, 3, 3)
        assert record.request_id == "f-1"
        assert record.elapsed_ns[Stage.MOVEMENT] > 0


def test_what_is_encoded_by_hand_is_what_generated_code_encodes(
    client: RawClient,
) -> None:
    space = client.open(MODEL).space_id
    client.put(space, PROMPT.keys, PROMPT.rows())
    request = pb.FetchRequest(
        session=client.secret, space_id=space, keys=b"".join(PROMPT.keys)
    ).SerializeToString()
    bare = client.channel.unary_stream(
        "/kvstore.v1.Store/Fetch", lambda data: data, lambda data: data
    )
    messages = list(bare(request, timeout=SOON_S))
    assert len(messages) == 3, "the first, all blocks, the last"
    for message in messages:
        parsed = pb.FetchChunk.FromString(message)
        header, payload = convert.decode_fetch_chunk(message)
        assert header == parsed.header
        assert bytes(payload) == parsed.payload


def test_fetch_gives_the_leading_run_and_says_why_it_ends(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    client.put(space, PROMPT.keys[:3], PROMPT.rows()[:3])
    chunks = client.fetch(space, PROMPT.keys)
    assert len(blocks_of(chunks)) == 3
    end = chunks[-1].header
    assert (end.block, reason(end.reason)) == (3, Reason.MISS_NEVER_STORED)
    assert stack.records("fetch")[-1].outcome is Outcome.PARTIAL
    chunks = client.fetch(space, PROMPT.keys[3:])
    assert (len(chunks), chunks[-1].header.block) == (2, 0)
    assert reason(chunks[-1].header.reason) is Reason.MISS_NEVER_STORED
    record = stack.records("fetch")[-1]
    assert (record.outcome, record.departed) == (Outcome.MISS, Stage.PLAN)
    chunks = client.fetch(space, [])
    assert reason(chunks[-1].header.reason) is Reason.NOTHING_TO_DO


def test_fetch_waits_for_a_writer(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    reserved = client.reserve(space, PROMPT.keys)
    client.fill(reserved, PROMPT.rows())
    request = pb.FetchRequest(
        session=client.secret, space_id=space, keys=b"".join(PROMPT.keys), wait_ms=60_000
    )
    stream = client.stub.Fetch(request, timeout=60)
    assert within(SOON_S, lambda: stack.active() == 1)
    assert client.commit(reserved.lease_id).visible == 8
    PROMPT.assert_right(blocks_of(list(stream)))


def test_a_reader_who_goes_leaves_no_lease(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(capacity_bytes=256 << 20)
    prompt = Prompt(BIG, 3, blocks=8)
    with RawClient(stack.socket()) as client:
        space = client.open(BIG).space_id
        client.put(space, prompt.keys, prompt.rows())
        request = pb.FetchRequest(session=client.secret, space_id=space, keys=b"".join(prompt.keys))
        stream = client.stub.Fetch(request, timeout=60)
        next(stream)
        next(stream)
        assert stack.held()[0] == 1
        stream.cancel()
        assert within(SOON_S, lambda: stack.held() == (0, 0, 0))
        assert within(SOON_S, lambda: stack.active() == 0)
        assert stack.records("fetch")[-1].reason is Reason.CANCELLED


def test_a_reader_who_stops_reading_holds_no_block_for_long(
    make_stack: Callable[..., Stack],
) -> None:
    """Without a deadline of his own, he has as long as a lease lives; then his place is free."""
    stack = make_stack(capacity_bytes=256 << 20, lease_ttl_ms=300, reserve_ttl_ms=300)
    prompt = Prompt(BIG, 4, blocks=8)
    with RawClient(stack.socket()) as client:
        space = client.open(BIG).space_id
        client.put(space, prompt.keys, prompt.rows())
        request = pb.FetchRequest(session=client.secret, space_id=space, keys=b"".join(prompt.keys))
        stream = client.stub.Fetch(request)
        next(stream)
        start = time.monotonic()
        assert within(SOON_S, lambda: stack.held() == (0, 0, 0) and stack.active() == 0)
        assert time.monotonic() - start < 1.0
        record = stack.records("fetch")[-1]
        assert record.reason is Reason.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError) as ended:
            for _ in stream:
                pass
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("size", [8 << 20, 4 << 20], ids=["slots filled anew", "regions closed"])
def test_a_slow_reader_is_never_given_another_block(
    make_stack: Callable[..., Stack], size: int
) -> None:
    """His lease runs out in the middle, and others use the memory; nothing false is sent."""
    stack = make_stack(capacity_bytes=128 << 20, lease_ttl_ms=200)
    prompt = Prompt(BIG, 5, blocks=4)
    with RawClient(stack.socket()) as client:
        space = client.open(BIG).space_id
        client.put(space, prompt.keys, prompt.rows())
        request = pb.FetchRequest(session=client.secret, space_id=space, keys=b"".join(prompt.keys))
        stream = client.stub.Fetch(request, timeout=60)
        chunks = [next(stream)]
        assert within(SOON_S, lambda: stack.held()[0] == 0)
        others = model(size, name="others")
        theirs = client.open(others).space_id
        for seed in range(100, 132):
            other = Prompt(others, seed, blocks=1)
            client.put(theirs, other.keys, other.rows())
        assert client.lookup(space, prompt.keys).hit_blocks == 0
        chunks += stream
        last = chunks[-1].header
        assert reason(last.reason) is Reason.GENERATION_CHANGED
        rows = blocks_of(chunks[:-1])
        assert len(rows) == last.block < 4
        prompt.assert_right(rows)


def test_a_space_that_closes_ends_the_stream(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(capacity_bytes=256 << 20)
    prompt = Prompt(BIG, 6, blocks=8)
    with RawClient(stack.socket()) as client:
        space = client.open(BIG).space_id
        client.put(space, prompt.keys, prompt.rows())
        request = pb.FetchRequest(session=client.secret, space_id=space, keys=b"".join(prompt.keys))
        stream = client.stub.Fetch(request, timeout=60)
        next(stream)
        stack.ask(lambda: stack.store.core.set_epoch("big", 1, "", 0))
        *_, last = stream
        assert reason(last.header.reason) is Reason.SPACE_CLOSED
        assert last.header.block < 8


# ---------------------------------------------------------------- push


def test_push_stores_what_it_streams(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    reply = client.push(pushes(client, space, PROMPT, piece=1_000))
    assert (reply.stored, reply.present, reply.failed) == (8, 0, 0)
    assert reason(reply.reason) is Reason.OK
    PROMPT.assert_right(client.get(space, PROMPT.keys))
    (record,) = stack.records("push")
    assert (record.outcome, record.request_id, record.departed) == (
        Outcome.STORED, "push-1", None,
    )  # fmt: skip
    again = client.push(pushes(client, space, PROMPT))
    assert (again.stored, again.present) == (0, 8)
    assert stack.held() == (0, 0, 0)


def test_bytes_of_blocks_that_are_not_wanted_are_dropped(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    client.put(space, PROMPT.keys[:3], PROMPT.rows()[:3])
    forged = Prompt(MODEL, 77, blocks=3).rows() + PROMPT.rows()[3:]

    def chunks() -> Iterator[pb.PushChunk]:
        reserve = pb.ReserveRequest(
            session=client.secret, space_id=space, chain=b"".join(PROMPT.keys)
        )
        yield pb.PushChunk(reserve=reserve)
        for index, row in enumerate(forged):
            header = pb.ChunkHeader(block=index)
            yield pb.PushChunk(header=header, payload=row.tobytes())
        header = pb.ChunkHeader(block=2**32 - 1, offset=2**64 - 1)
        yield pb.PushChunk(header=header, payload=b"beyond")
        yield pb.PushChunk(commit=True)

    reply = client.push(chunks())
    assert (reply.stored, reply.present) == (5, 3)
    PROMPT.assert_right(client.get(space, PROMPT.keys))


@pytest.mark.parametrize("first", ["nothing", "no reserve"])
def test_a_push_begins_with_a_reservation(stack: Stack, client: RawClient, first: str) -> None:
    chunks = [] if first == "nothing" else [pb.PushChunk(commit=True)]
    with pytest.raises(Refused) as refused:
        client.push(chunks)
    assert refused.value.reason is Reason.BAD_REQUEST
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert stack.records("push")[-1].departed is Stage.INPUT


def test_a_push_that_breaks_off_is_an_abort(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    with pytest.raises(Refused) as refused:
        client.push(pushes(client, space, PROMPT, commit=False))
    assert refused.value.reason is Reason.ABORTED
    assert refused.value.code is grpc.StatusCode.ABORTED
    with pytest.raises(Refused) as short:
        client.push([*list(pushes(client, space, PROMPT))[:-2], pb.PushChunk(commit=True)])
    assert short.value.reason is Reason.ABORTED
    assert "block 7 has 0 of 4096 bytes" in short.value.detail.detail
    assert stack.held() == (0, 0, 0)
    assert client.lookup(space, PROMPT.keys).hit_blocks == 0
    assert client.push(pushes(client, space, PROMPT)).stored == 8


def test_a_push_whose_writer_goes_or_stalls_is_an_abort(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(reserve_ttl_ms=300)
    with RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        for cancel in (True, False):
            feed: queue.Queue[pb.PushChunk] = queue.Queue()
            for chunk in list(pushes(client, space, PROMPT))[:4]:
                feed.put(chunk)
            call = client.stub.Push.future(iter(feed.get, None))
            assert within(SOON_S, lambda: stack.held()[2] == 1)
            if cancel:
                call.cancel()
            assert within(SOON_S, lambda: stack.held()[2] == 0)
            assert within(SOON_S, lambda: stack.active() == 0)
            # To the daemon, a caller who goes has only ended his stream.
            why = Reason.ABORTED if cancel else Reason.DEADLINE_EXCEEDED
            assert stack.records("push")[-1].reason in (why, Reason.CANCELLED)
            feed.put(pb.PushChunk(commit=True))
        assert client.push(pushes(client, space, PROMPT)).stored == 8


def test_a_push_without_a_first_message_ends_with_its_time(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(reserve_ttl_ms=200)
    with RawClient(stack.socket()) as client:
        feed: queue.Queue[pb.PushChunk] = queue.Queue()
        call = client.stub.Push.future(iter(feed.get, None))
        assert within(SOON_S, lambda: stack.active() == 1)
        with pytest.raises(grpc.RpcError) as ended:
            call.result(SOON_S)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert stack.active() == 0
        feed.put(pb.PushChunk())


def test_what_a_push_writes_never_lands_in_another_reservation(
    stack: Stack, client: RawClient
) -> None:
    """The stream's reservation is given up while it streams; its staging goes to the next one."""
    space = client.open(MODEL).space_id
    feed: queue.Queue[pb.PushChunk] = queue.Queue()
    forged = Prompt(MODEL, 66, blocks=8)
    chunks = list(pushes(client, space, forged))
    for chunk in chunks[:2]:
        feed.put(chunk)
    call = client.stub.Push.future(iter(feed.get, None), timeout=60)
    assert within(SOON_S, lambda: stack.held()[2] == 1)
    lease_id = stack.ask(lambda: next(iter(stack.store.core.books.leases)).id)
    assert client.abort(lease_id).known
    reserved = client.reserve(space, PROMPT.keys)
    client.fill(reserved, PROMPT.rows())
    for chunk in chunks[2:]:
        feed.put(chunk)
    with pytest.raises(grpc.RpcError):
        call.result(SOON_S)
    assert stack.records("push")[-1].reason is Reason.LEASE_EXPIRED
    assert client.commit(reserved.lease_id).visible == 8
    PROMPT.assert_right(client.get(space, PROMPT.keys))


def test_an_endless_push_is_cut_at_its_deadline(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    junk = pb.PushChunk(header=pb.ChunkHeader(block=900), payload=os.urandom(1 << 16))

    def endless() -> Iterator[pb.PushChunk]:
        yield from list(pushes(client, space, PROMPT))[:3]
        while True:
            yield junk

    start = time.monotonic()
    with pytest.raises(grpc.RpcError) as ended:
        client.stub.Push(endless(), timeout=0.3)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - start < 1.0
    assert within(SOON_S, lambda: stack.active() == 0)
    assert stack.held() == (0, 0, 0)


def test_a_push_that_is_refused_stores_nothing(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    blocks = stack.limits.staging_bytes // 4096
    assert client.reserve(space, Prompt(MODEL, 8, blocks=blocks).keys).lease_id
    reply = client.push(pushes(client, space, PROMPT))
    assert (reply.stored, reason(reply.reason)) == (0, Reason.STAGING_BUSY)
    record = stack.records("push")[-1]
    assert (record.departed, record.outcome) == (Stage.PLAN, Outcome.SKIPPED)
