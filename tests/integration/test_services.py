"""The data service over gRPC: each call's good path and its refusals, and what each leaves in the
trace.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from kvstore.core.core import Core
from kvstore.core.leases import Session
from kvstore.core.reads import Reads
from kvstore.model.reasons import Reason
from kvstore.model.record import Outcome, Stage
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from tests.e2e.stage import Prompt, altered, model
from tests.integration.polling import within
from tests.integration.stack import Stack
from tests.rawclient import RawAdmin, RawClient, Refused, reason, refused_as

MODEL = model()
PROMPT = Prompt(MODEL, 1, blocks=8)
SOON_S = 5.0

Call = Callable[[], Any]


@pytest.fixture
def space(client: RawClient) -> int:
    """A space with the first four of the prompt's eight blocks."""
    space = client.open(MODEL).space_id
    assert client.put(space, PROMPT.keys[:4], PROMPT.rows()[:4]).visible == 4
    return space


def refusal(call: Call, code: grpc.StatusCode, why: Reason) -> pb.ErrorDetail:
    """The detail of a call that is refused so."""
    with pytest.raises(Refused) as refused:
        call()
    assert refused.value.code is code, refused.value
    assert refused.value.reason is why, refused.value
    detail = refused.value.detail
    assert detail.origin == why.origin.value
    assert detail.detail
    assert bool(detail.retry_after_ms) == why.is_retryable
    return detail


def last(stack: Stack, verb: str) -> Any:
    """The last record of a verb, once it is there (a refusal's may come after its status)."""
    assert within(SOON_S, lambda: stack.records(verb))
    return stack.records(verb)[-1]


# ---------------------------------------------------------------- sessions


def test_attach_welcomes_with_limits_and_ids(stack: Stack, client: RawClient) -> None:
    welcome = client.welcome
    assert (len(welcome.session), len(welcome.instance_id)) == (16, 16)
    assert welcome.instance_id == stack.store.instance_id
    assert list(welcome.tiers) == ["host"]
    assert welcome.fd_socket
    limits, sent = stack.limits, welcome.limits
    assert sent.keys_per_call_max == limits.keys_per_call_max
    assert sent.message_bytes_max == limits.message_bytes_max
    assert sent.staging_bytes == limits.staging_bytes
    assert (sent.lease_ttl_ms_max, sent.reserve_ttl_ms_max) == (30_000, 30_000)
    record = last(stack, "attach")
    assert (record.reason, record.outcome, record.engine_id) == (Reason.OK, Outcome.DONE, "raw")


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"major": 2}, grpc.StatusCode.FAILED_PRECONDITION, Reason.PROTOCOL_VERSION),
        ({"group": b""}, grpc.StatusCode.INVALID_ARGUMENT, Reason.BAD_NAME),
        ({"group": bytes(65)}, grpc.StatusCode.INVALID_ARGUMENT, Reason.BAD_NAME),
        ({"engine_id": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT, Reason.BAD_NAME),
        ({"engine_id": "a\nb"}, grpc.StatusCode.INVALID_ARGUMENT, Reason.BAD_NAME),
    ],
)
def test_attach_refuses(
    stack: Stack, change: dict[str, Any], code: grpc.StatusCode, why: Reason
) -> None:
    refusal(lambda: RawClient(stack.socket(), **change), code, why)
    record = last(stack, "attach")
    assert (record.outcome, record.departed, record.reason) == (Outcome.REFUSED, Stage.INPUT, why)
    assert stack.ask(lambda: stack.store.session_count) == 0


def test_sessions_over_the_limit_are_told_when_to_retry(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(sessions_max=1)
    with RawClient(stack.socket()):
        detail = refusal(
            lambda: RawClient(stack.socket()),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.LIMIT_SESSIONS,
        )
    assert detail.setting == "limits.sessions_max"


def test_a_stream_is_the_session_of_a_client_without_an_fd_socket(stack: Stack) -> None:
    client = RawClient(stack.socket(), fd=False)
    space = client.open(MODEL).space_id
    assert client.reserve(space, PROMPT.keys).lease_id
    assert stack.active() == 0, "a stream that only lives is no call under way"
    client.end_stream()
    assert within(SOON_S, lambda: stack.ask(lambda: stack.store.session_count) == 0)
    assert stack.held() == (0, 0, 0)
    refusal(
        lambda: client.lookup(space, PROMPT.keys),
        grpc.StatusCode.UNAUTHENTICATED,
        Reason.SESSION_UNKNOWN,
    )
    client.close()
    assert [record.reason for record in stack.records("attach")] == [Reason.OK]


def test_detach_ends_the_session_and_its_waiting_calls(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    assert client.reserve(space, PROMPT.keys).lease_id
    request = pb.AcquireRequest(
        session=client.secret, space_id=space, keys=b"".join(PROMPT.keys), wait_ms=60_000
    )
    waiting = client.stub.Acquire.future(request, timeout=60)
    assert within(SOON_S, lambda: stack.active() == 1)
    client.detach()
    reply = waiting.result(timeout=SOON_S)
    assert reason(reply.reason) is Reason.SESSION_UNKNOWN
    assert stack.held() == (0, 0, 0)
    refusal(client.detach, grpc.StatusCode.UNAUTHENTICATED, Reason.SESSION_UNKNOWN)


def test_a_drain_tells_the_streams_and_lets_reads_end(stack: Stack) -> None:
    with RawClient(stack.socket(), fd=False) as streaming, RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        client.put(space, PROMPT.keys, PROMPT.rows())
        streaming.open(MODEL)
        leased = streaming.acquire(space, PROMPT.keys)
        stack.ask(stack.store.drain)
        assert reason(streaming.next_event().notice.reason) is Reason.DRAINING
        assert streaming.lookup(space, PROMPT.keys).hit_blocks == 8
        refused = client.reserve(space, Prompt(MODEL, 2, blocks=1).keys)
        assert (refused.lease_id, reason(refused.reason)) == (0, Reason.DRAINING)
        assert refused.retry_after_ms
        refusal(lambda: RawClient(stack.socket()), grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)
        streaming.release(leased.lease_id)
        with pytest.raises(StopIteration):
            streaming.next_event()


SECRETS = [b"", b"x", bytes(16), bytes(64)]


@pytest.mark.parametrize("secret", SECRETS, ids=len)
def test_every_call_needs_a_session(stack: Stack, client: RawClient, secret: bytes) -> None:
    service = pb.DESCRIPTOR.services_by_name["Store"]
    for method in service.methods:
        if method.name == "Attach":
            continue
        request: Any = getattr(pb, method.input_type.name)()
        if method.name == "Push":
            request = iter([pb.PushChunk(reserve=pb.ReserveRequest(session=secret))])
        else:
            request.session = secret
        call = getattr(client.stub, method.name)

        def run(call: Any = call, request: Any = request, name: str = method.name) -> Any:
            reply = call(request, timeout=SOON_S)
            return list(reply) if name == "Fetch" else reply

        refusal(
            lambda run=run: refused_as(run),  # type: ignore[misc]
            grpc.StatusCode.UNAUTHENTICATED,
            Reason.SESSION_UNKNOWN,
        )
        record = last(stack, method.name.lower())
        assert (record.departed, record.outcome) == (Stage.INPUT, Outcome.REFUSED)


# ---------------------------------------------------------------- open


def test_open_binds_a_fingerprint(stack: Stack, client: RawClient) -> None:
    opened = client.open(MODEL)
    assert opened.verdict == pb.VERDICT_MATCH
    assert opened.fingerprint_digest == MODEL.digest
    assert (opened.block_bytes, opened.slot_bytes, opened.parts) == (4096, 4096, 1)
    assert not opened.differences
    assert client.open(MODEL).space_id == opened.space_id
    other = client.open(altered(MODEL, "identity", weights_revision="r2"))
    assert other.space_id != opened.space_id
    assert [(d.field, d.stored, d.offered) for d in other.differences] == [
        ("identity.weights_revision", "r1", "r2")
    ]


def test_open_holds_what_is_incomplete(stack: Stack, client: RawClient) -> None:
    held = client.open(model(revision=None))
    assert (held.verdict, reason(held.reason)) == (pb.VERDICT_HELD, Reason.HELD_FOR_REVIEW)
    assert list(held.missing) == ["identity.weights_revision"]
    assert held.space_id
    assert held.review_id
    record = last(stack, "open")
    assert record.departed is Stage.PRECONDITIONS
    assert record.fields == ("identity.weights_revision",)
    assert stack.counters()["kvstore_fingerprints_held_total"] == 1


def test_open_refuses_a_stale_epoch_with_the_field(stack: Stack, client: RawClient) -> None:
    client.open(MODEL)
    stack.ask(lambda: stack.store.core.set_epoch("small", 5, "", 0))
    refused = client.open(MODEL)
    assert (refused.verdict, refused.space_id) == (pb.VERDICT_INCOMPATIBLE, 0)
    assert reason(refused.reason) is Reason.MISS_EPOCH_STALE
    (difference,) = refused.differences
    assert (difference.field, difference.stored, difference.offered) == (
        "identity.weight_epoch", "5", "0",
    )  # fmt: skip
    record = last(stack, "open")
    assert record.departed is Stage.PRECONDITIONS
    rejections = 'kvstore_fingerprint_rejections_total{field="identity.weight_epoch"}'
    assert stack.counters()[rejections] == 1


def test_open_refuses_what_is_malformed(client: RawClient) -> None:
    offer = convert.fingerprint_to_wire(MODEL)
    for group, field, value in (
        ("identity", "model_name", ""),
        ("geometry", "attention", "linear"),
        ("geometry", "layers", 0),
        ("encoding", "kv_dtype", "float3"),
        ("encoding", "block_tokens", 0),
        ("placement", "tensor_parallel", 2**32 - 1),
    ):
        wrong = pb.Fingerprint()
        wrong.CopyFrom(offer)
        setattr(getattr(wrong, group), field, value)
        with pytest.raises(Refused) as refused:
            client.call("Open", pb.OpenRequest(fingerprint=wrong))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.reason in (Reason.BAD_FINGERPRINT, Reason.BAD_NAME)
        assert refused.value.detail.setting == f"{group}.{field}"
    with pytest.raises(Refused) as refused:
        client.call("Open", pb.OpenRequest())
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


# ---------------------------------------------------------------- leases


def test_acquire_tells_places_and_regions(stack: Stack, client: RawClient, space: int) -> None:
    leased = client.acquire(space, PROMPT.keys[:4], ttl_ms=1_000, request_id="r-1")
    assert (leased.blocks, leased.reason) == (4, Reason.OK)
    assert leased.reply.ttl_ms == 1_000
    assert leased.reply.fingerprint_digest == MODEL.digest
    assert leased.block_bytes == 4096
    assert {r.region_id for r in leased.reply.regions} == {p.region for p in leased.places}
    Prompt.assert_right(PROMPT, client.copy(leased))
    record = last(stack, "acquire")
    assert (record.outcome, record.departed, record.request_id) == (Outcome.HIT, None, "r-1")
    assert (record.unit, record.asked, record.handed_on) == ("blocks", 4, 4)
    assert json.loads(record.to_json_line())["stages_us"].keys() == {
        "input", "preconditions", "movement", "verification",
    }  # fmt: skip
    assert (
        client.release(leased.lease_id, 77).SerializeToString()
        == pb.ReleaseReply(released=1, unknown=1).SerializeToString()
    )


def test_a_record_counts_what_comes_before_a_gap(
    stack: Stack, client: RawClient, space: int
) -> None:
    absent = bytes(32)
    for first, rest, counted in ((2, 2, 2), (0, 3, 0)):
        keys = [*PROMPT.keys[:first], absent, *PROMPT.keys[first : first + rest]]
        leased = client.acquire(space, keys)
        assert (leased.blocks, leased.reason) == (first + rest, Reason.MISS_NEVER_STORED)
        record = last(stack, "acquire")
        assert (record.asked, record.handed_on) == (len(keys), counted)
        client.release(leased.lease_id)


def test_a_lease_is_no_longer_than_the_setting(client: RawClient, space: int) -> None:
    for asked, given in ((0, 30_000), (1, 1), (2**32 - 1, 30_000)):
        assert client.acquire(space, PROMPT.keys[:4], ttl_ms=asked).reply.ttl_ms == given
    assert client.acquire(space, PROMPT.keys[:4], view=True, ttl_ms=5).reply.ttl_ms == 0
    for asked, given in ((0, 30_000), (5, 5), (2**32 - 1, 30_000)):
        assert client.reserve(space, PROMPT.keys[:5], ttl_ms=asked).ttl_ms == given


def test_a_lease_ends_when_it_was_said_to(stack: Stack, client: RawClient, space: int) -> None:
    for wait_ms in (0, 60_000):
        assert client.acquire(space, PROMPT.keys[:4], ttl_ms=50, wait_ms=wait_ms).lease_id
        assert within(SOON_S, lambda: stack.held()[0] == 0)


def test_acquire_takes_what_is_there_and_says_why_not_the_rest(
    stack: Stack, client: RawClient, space: int
) -> None:
    leased = client.acquire(space, PROMPT.keys)
    assert (leased.blocks, leased.reason) == (4, Reason.MISS_NEVER_STORED)
    record = last(stack, "acquire")
    assert (record.outcome, record.departed) == (Outcome.PARTIAL, Stage.PLAN)
    whole = client.acquire(space, PROMPT.keys, all_or_nothing=True)
    assert (whole.lease_id, whole.blocks) == (0, 0)
    assert whole.reason is Reason.MISS_NEVER_STORED, "of the first absent block, not the first"
    assert last(stack, "acquire").outcome is Outcome.MISS
    nothing = client.acquire(space, [])
    assert (nothing.lease_id, nothing.reason) == (0, Reason.NOTHING_TO_DO)


def test_acquire_names_the_fields_in_which_the_holder_differs(
    client: RawClient, space: int
) -> None:
    other = client.open(altered(MODEL, "encoding", kv_dtype="float16")).space_id
    leased = client.acquire(other, PROMPT.keys[:4])
    assert (leased.lease_id, leased.reason) == (0, Reason.MISS_INCOMPATIBLE)
    assert [d.field for d in leased.reply.differences] == ["encoding.kv_dtype"]


def test_acquire_waits_for_a_writer(stack: Stack, client: RawClient, space: int) -> None:
    reserved = client.reserve(space, PROMPT.keys)
    client.fill(reserved, PROMPT.rows())
    stack.hold()
    commit = client.stub.Commit.future(
        pb.CommitRequest(session=client.secret, lease_id=reserved.lease_id), timeout=60
    )
    acquire = client.stub.Acquire.future(
        pb.AcquireRequest(
            session=client.secret, space_id=space, keys=b"".join(PROMPT.keys), wait_ms=60_000
        ),
        timeout=60,
    )
    assert within(SOON_S, lambda: stack.active() == 2)
    assert client.acquire(space, PROMPT.keys[4:]).reason is Reason.MISS_IN_PROGRESS
    stack.let_go()
    assert acquire.result(SOON_S).leased_blocks == 8
    assert commit.result(SOON_S).visible == 4


@pytest.mark.parametrize("asked_ms", [60_000, 2**32 - 1])
def test_a_wait_ends_before_the_callers_deadline(
    client: RawClient, space: int, asked_ms: int
) -> None:
    assert client.reserve(space, PROMPT.keys).lease_id
    request = pb.AcquireRequest(
        session=client.secret, space_id=space, keys=b"".join(PROMPT.keys), wait_ms=asked_ms
    )
    for timeout_s in (0.25, 1.0, 4.0):  # a busy machine may spend more than the margin elsewhere
        start = time.monotonic()
        try:
            reply = client.stub.Acquire(request, timeout=timeout_s)
        except grpc.RpcError:
            continue
        assert timeout_s * 0.8 <= time.monotonic() - start < timeout_s + 0.1
        assert (reply.leased_blocks, reason(reply.reason)) == (4, Reason.MISS_IN_PROGRESS)
        return
    pytest.fail("no answer came before its deadline")


def test_a_wait_holds_blocks_no_longer_than_a_lease(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(lease_ttl_ms=150)
    with RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        client.put(space, PROMPT.keys[:4], PROMPT.rows()[:4])
        assert client.reserve(space, PROMPT.keys).lease_id
        request = pb.AcquireRequest(
            session=client.secret, space_id=space, keys=b"".join(PROMPT.keys), wait_ms=2**32 - 1
        )
        start = time.monotonic()
        assert client.stub.Acquire(request, timeout=3_600).leased_blocks == 4
        assert 0.1 < time.monotonic() - start < SOON_S
        assert within(SOON_S, lambda: stack.held()[0] == 0)


def test_a_caller_who_goes_leaves_no_lease(stack: Stack, client: RawClient, space: int) -> None:
    assert client.reserve(space, PROMPT.keys).lease_id
    for view in (pb.LEASE_MODE_COPY, pb.LEASE_MODE_VIEW):
        request = pb.AcquireRequest(
            session=client.secret,
            space_id=space,
            keys=b"".join(PROMPT.keys),
            mode=view,
            wait_ms=60_000,
        )
        waiting = client.stub.Acquire.future(request)
        assert within(SOON_S, lambda: stack.active() == 1)
        waiting.cancel()
        assert within(SOON_S, lambda: stack.active() == 0)
        assert stack.held()[:2] == (0, 0)
        record = last(stack, "acquire")
        assert (record.reason, record.outcome) == (Reason.CANCELLED, Outcome.FAILED)


def test_a_caller_who_goes_during_a_commit_has_committed(
    stack: Stack, client: RawClient, space: int
) -> None:
    reserved = client.reserve(space, PROMPT.keys)
    client.fill(reserved, PROMPT.rows())
    stack.hold()
    commit = client.stub.Commit.future(
        pb.CommitRequest(session=client.secret, lease_id=reserved.lease_id), timeout=60
    )
    assert within(SOON_S, lambda: stack.active() == 1)
    commit.cancel()
    assert within(SOON_S, lambda: stack.active() == 0)
    stack.let_go()
    assert within(SOON_S, lambda: stack.held() == (0, 0, 0))
    PROMPT.assert_right(client.get(space, PROMPT.keys))


def test_views_are_bounded_in_bytes(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(view_bytes_per_session_max=6 * 4096)
    with RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        client.put(space, PROMPT.keys, PROMPT.rows())
        first = client.acquire(space, PROMPT.keys, view=True)
        assert (first.blocks, first.reason) == (6, Reason.VIEW_LIMIT)
        record = last(stack, "acquire")
        assert (record.departed, record.outcome) == (Stage.PLAN, Outcome.PARTIAL)
        second = client.acquire(space, PROMPT.keys, view=True)
        assert (second.lease_id, second.reason) == (0, Reason.VIEW_LIMIT)
        client.release(first.lease_id)
        assert client.acquire(space, PROMPT.keys[:6], view=True).blocks == 6


def test_leases_are_bounded_in_number(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(leases_per_session_max=2)
    with RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        client.put(space, PROMPT.keys, PROMPT.rows())
        leases = [client.acquire(space, PROMPT.keys).lease_id for _ in range(2)]
        assert client.acquire(space, PROMPT.keys).reason is Reason.LIMIT_LEASES
        refused = client.reserve(space, Prompt(MODEL, 3, blocks=1).keys)
        assert reason(refused.reason) is Reason.LIMIT_LEASES
        assert refused.retry_after_ms
        with pytest.raises(Refused) as too_many:
            client.release(1, 2, 3)
        assert too_many.value.detail.setting == "limits.leases_per_session_max"
        assert client.release(*leases).released == 2


def test_an_unknown_mode_or_rule_is_refused(client: RawClient, space: int) -> None:
    acquire = pb.AcquireRequest(space_id=space, keys=PROMPT.keys[0])
    acquire.mode = 9  # type: ignore[assignment]
    query = pb.Query(space_id=space, keys=PROMPT.keys[0])
    query.rule = 9  # type: ignore[assignment]
    for method, request in (
        ("Acquire", acquire),
        ("Lookup", pb.LookupRequest(queries=[query])),
        ("Lookup", pb.LookupRequest()),
        ("Lookup", pb.LookupRequest(queries=[pb.Query(space_id=space)] * 17)),
    ):
        refusal(
            lambda m=method, r=request: client.call(m, r),  # type: ignore[misc]
            grpc.StatusCode.INVALID_ARGUMENT,
            Reason.BAD_REQUEST,
        )


# ---------------------------------------------------------------- writing


def test_reserve_tells_what_is_wanted(stack: Stack, client: RawClient, space: int) -> None:
    reserved = client.reserve(space, PROMPT.keys, first=2, request_id="r-2")
    assert list(convert.unpack_u32(reserved.wanted)) == [4, 5, 6, 7]
    assert len(set(convert.unpack_u64(reserved.offsets))) == 4
    assert (reserved.present, reserved.reserved, reserved.part_bytes) == (2, 0, 4096)
    record = last(stack, "reserve")
    assert (record.outcome, record.asked, record.handed_on) == (Outcome.STORED, 6, 4)
    assert record.request_id == "r-2"
    again = client.reserve(space, PROMPT.keys, attempt=1)
    assert (again.lease_id, again.present, again.reserved) == (0, 4, 4)
    assert last(stack, "reserve").outcome is Outcome.SKIPPED
    assert client.abort(reserved.lease_id).known
    assert not client.abort(reserved.lease_id).known
    assert client.reserve(space, PROMPT.keys).present == 4


def test_reserve_refuses_for_lack_of_room_with_a_hint(stack: Stack, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    blocks = stack.limits.staging_bytes // 4096
    first = client.reserve(space, Prompt(MODEL, 4, blocks=blocks + 10).keys)
    assert len(first.wanted) // 4 == blocks
    assert reason(first.reason) is Reason.STAGING_BUSY
    assert first.retry_after_ms
    second = client.reserve(space, Prompt(MODEL, 5, blocks=2).keys)
    assert (second.lease_id, reason(second.reason)) == (0, Reason.STAGING_BUSY)
    assert second.retry_after_ms
    record = last(stack, "reserve")
    assert (record.departed, record.reason, record.outcome) == (
        Stage.PLAN, Reason.STAGING_BUSY, Outcome.SKIPPED,
    )  # fmt: skip


def test_a_part_that_is_none_is_refused(client: RawClient, space: int) -> None:
    for part in (1, 2**32 - 1):
        refused = client.reserve(space, PROMPT.keys, part=part)
        assert (refused.lease_id, reason(refused.reason)) == (0, Reason.BAD_PART)
    refusal(
        lambda: client.reserve(space, PROMPT.keys, first=9),
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.BAD_SIZE,
    )
    assert client.reserve(space, PROMPT.keys, first=8).lease_id == 0


def test_commit_refusals_are_typed(stack: Stack, client: RawClient, space: int) -> None:
    for lease_id in (0, 99, 2**64 - 1):
        refusal(
            lambda lease_id=lease_id: client.commit(lease_id),  # type: ignore[misc]
            grpc.StatusCode.NOT_FOUND,
            Reason.LEASE_UNKNOWN,
        )
    assert last(stack, "commit").departed is Stage.PRECONDITIONS
    reserved = client.reserve(space, PROMPT.keys)
    client.fill(reserved, PROMPT.rows())
    refusal(
        lambda: client.commit(reserved.lease_id, durable=True),
        grpc.StatusCode.FAILED_PRECONDITION,
        Reason.NO_DURABLE_TIER,
    )
    assert client.commit(reserved.lease_id).visible == 4
    late = client.reserve(space, Prompt(MODEL, 6, blocks=2).keys, ttl_ms=1)
    core = stack.store.core
    assert within(SOON_S, lambda: not stack.ask(lambda: core.is_reserved(1, late.lease_id)))
    refusal(
        lambda: client.commit(late.lease_id),
        grpc.StatusCode.FAILED_PRECONDITION,
        Reason.LEASE_EXPIRED,
    )
    record = last(stack, "commit")
    assert (record.departed, record.outcome) == (Stage.PRECONDITIONS, Outcome.REFUSED)


def test_a_block_is_invisible_until_it_is_committed(stack: Stack) -> None:
    """Sixteen readers poll while one writer fills a block slice by slice."""
    big = model(1 << 20, name="big")
    prompt = Prompt(big, 9, blocks=2)
    wrong: list[object] = []
    seen: list[bool] = []
    over = threading.Event()

    def read() -> None:
        with RawClient(stack.socket(), group=os.urandom(8)) as reader:
            space = reader.open(big).space_id
            while True:
                last_round = over.is_set()
                try:
                    rows = reader.get(space, prompt.keys)
                except Refused as error:
                    wrong.append(error)
                    return
                if any(row is not None for row in rows):
                    seen.append(last_round)
                    try:
                        prompt.assert_right(rows)
                    except AssertionError as error:
                        wrong.append(error)
                if last_round:
                    return

    with RawClient(stack.socket()) as writer:
        space = writer.open(big).space_id
        readers = [threading.Thread(target=read) for _ in range(16)]
        for reader in readers:
            reader.start()
        reserved = writer.reserve(space, prompt.keys)
        rows = prompt.rows()
        for index, offset in enumerate(convert.unpack_u64(reserved.offsets)):
            for start in range(0, 1 << 20, 1 << 14):
                writer.write(int(offset) + start, rows[index][start : start + (1 << 14)])
                assert not seen, "a block was seen before its commit"
        stack.hold()
        commit = writer.stub.Commit.future(
            pb.CommitRequest(session=writer.secret, lease_id=reserved.lease_id), timeout=60
        )
        assert within(SOON_S, lambda: stack.ask(lambda: len(stack.mover._waiting)) == 2)
        assert not seen, "a block was seen before its copy"
        stack.let_go()
        assert commit.result(SOON_S).visible == 2
        over.set()
        for reader in readers:
            reader.join(60)
    assert wrong == []
    assert seen.count(True) == 16, "every reader saw both blocks in its last round"


# ---------------------------------------------------------------- keys, spaces, bounds


def key_calls(client: RawClient, space: int, packed: bytes) -> Iterator[tuple[str, Call]]:
    """Every unary call that takes keys."""
    yield "lookup", lambda: client.lookup(space, [packed])
    yield "acquire", lambda: client.acquire(space, [packed])
    yield "reserve", lambda: client.reserve(space, [packed])
    yield "fetch", lambda: client.fetch(space, [packed])
    yield "explain", lambda: client.explain(space, [packed])


def test_keys_are_checked_by_every_call(stack: Stack, client: RawClient, space: int) -> None:
    many = bytes(32 * (stack.limits.keys_per_call_max + 1))
    for verb, call in key_calls(client, space, bytes(33)):
        refusal(call, grpc.StatusCode.INVALID_ARGUMENT, Reason.BAD_KEY_LENGTH)
        assert last(stack, verb).departed is Stage.PRECONDITIONS
    for _, call in key_calls(client, space, many):
        detail = refusal(call, grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TOO_MANY_KEYS)
        assert detail.setting == "limits.keys_per_call_max"
        assert "16385" in detail.detail


def test_a_space_of_nobody_and_one_of_another_tenant_look_alike(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(tenants=("one", "two"))
    with RawClient(stack.socket("one")) as owner, RawClient(stack.socket("two")) as other:
        theirs = owner.open(MODEL).space_id
        owner.put(theirs, PROMPT.keys, PROMPT.rows())
        leased = owner.acquire(theirs, PROMPT.keys)
        answers = set()
        for space in (theirs, 4_711, 0, 2**64 - 1):
            for _, call in key_calls(other, space, PROMPT.keys[0]):
                with pytest.raises(Refused) as refused:
                    call()
                answers.add(refused.value.answer)
                assert refused.value.reason is Reason.SPACE_UNKNOWN
                assert refused.value.code is grpc.StatusCode.NOT_FOUND
        assert len(answers) == 1
        assert other.release(leased.lease_id).unknown == 1
        assert other.open(MODEL).space_id != theirs
        assert other.get(other.open(MODEL).space_id, PROMPT.keys) == [None] * 8
        # The secret of one tenant is none on the other's socket.
        owner_channel, other.secret = other.secret, owner.secret
        refusal(lambda: other.open(MODEL), grpc.StatusCode.UNAUTHENTICATED, Reason.SESSION_UNKNOWN)
        other.secret = owner_channel


def test_a_closed_space_is_named_as_such(stack: Stack, client: RawClient, space: int) -> None:
    stack.ask(lambda: stack.store.core.set_epoch("small", 1, "", 0))
    for verb, call in key_calls(client, space, PROMPT.keys[0]):
        if verb == "explain":
            continue
        refusal(call, grpc.StatusCode.FAILED_PRECONDITION, Reason.SPACE_CLOSED)
        assert last(stack, verb).departed is Stage.PRECONDITIONS
    explained = client.explain(space, PROMPT.keys[:1])
    assert reason(explained.reason) is Reason.SPACE_CLOSED
    assert reason(explained.keys[0].reason) is Reason.MISS_EPOCH_STALE


def test_a_message_over_the_bound_is_refused(stack: Stack, client: RawClient) -> None:
    with pytest.raises(Refused) as refused:
        client.lookup(1, [bytes(stack.limits.message_bytes_max + 1)])
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.open(MODEL).space_id, "the connection lives"


def test_calls_over_the_bound_are_refused_at_once(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(concurrent_calls_max=2)
    with RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        assert client.reserve(space, PROMPT.keys).lease_id
        request = pb.AcquireRequest(
            session=client.secret, space_id=space, keys=PROMPT.keys[0], wait_ms=60_000
        )
        waiting = [client.stub.Acquire.future(request, timeout=60) for _ in range(2)]
        assert within(SOON_S, lambda: stack.active() == 2)
        detail = refusal(
            lambda: client.lookup(space, PROMPT.keys),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.LIMIT_QUEUE,
        )
        assert detail.setting == "limits.concurrent_calls_max"
        for call in waiting:
            call.cancel()
        assert within(SOON_S, lambda: stack.active() == 0)
        assert client.lookup(space, PROMPT.keys).hit_blocks == 0


def test_a_request_id_is_bounded_and_found_in_the_trace(
    stack: Stack, client: RawClient, space: int
) -> None:
    client.lookup(space, PROMPT.keys[:4], request_id="ü-1")
    (record,) = stack.ask(lambda: stack.ring.select(request_id="ü-1"))
    assert (record.verb, record.outcome) == ("lookup", Outcome.HIT)
    for wrong in ("x" * 129, "é" * 65, "a\nb", "\0"):
        refusal(
            lambda wrong=wrong: client.lookup(space, PROMPT.keys[:1], request_id=wrong),  # type: ignore[misc]
            grpc.StatusCode.INVALID_ARGUMENT,
            Reason.BAD_NAME,
        )
    report = pb.LoadReport(request_id="x" * 100_000)
    refusal(
        lambda: client.call("Release", pb.ReleaseRequest(reports=[report])),
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.BAD_NAME,
    )
    line = json.dumps([record.to_dict() for record in stack.records()])
    assert PROMPT.keys[0].hex() not in line
    assert len(line) < 100_000, "no record keeps what was too long"


class BrokenReads(Reads):
    """A planted defect: one key cannot be looked up."""

    def lookup(self, session: Session, space_id: int, keys: Sequence[bytes]) -> bytes:
        if bytes(32) in keys:
            raise ZeroDivisionError
        return super().lookup(session, space_id, keys)


class BrokenCore(Core):
    reads_type = BrokenReads


def test_a_defect_costs_its_own_call_only(
    make_stack: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    stack = make_stack(core_type=BrokenCore)
    with RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        client.put(space, PROMPT.keys, PROMPT.rows())
        detail = refusal(
            lambda: client.lookup(space, [bytes(32)]), grpc.StatusCode.INTERNAL, Reason.INTERNAL
        )
        assert detail.origin == "defect"
        assert "ZeroDivisionError" not in detail.detail
        record = last(stack, "lookup")
        assert (record.reason, record.outcome) == (Reason.INTERNAL, Outcome.FAILED)
        PROMPT.assert_right(client.get(space, PROMPT.keys))
        assert stack.active() == 0
    assert [r.levelname for r in caplog.records if "a defect" in r.getMessage()] == ["ERROR"]


# ---------------------------------------------------------------- explain


def test_explain_tells_why(stack: Stack, client: RawClient, space: int) -> None:
    other = client.open(altered(MODEL, "identity", weights_revision="r2")).space_id
    explained = client.explain(space, [PROMPT.keys[0], PROMPT.keys[7]])
    first, absent = explained.keys
    assert (reason(first.reason), first.tier) == (Reason.HIT, "host")
    assert first.key == PROMPT.keys[0][:4].hex()
    assert first.generation > 0
    assert (reason(absent.reason), absent.age_s) == (Reason.MISS_NEVER_STORED, -1.0)
    (nearest,) = client.explain(other, PROMPT.keys[:1]).keys
    assert reason(nearest.reason) is Reason.MISS_INCOMPATIBLE
    assert [d.field for d in nearest.differences] == ["identity.weights_revision"]


def test_explain_an_offer_opens_nothing(stack: Stack, client: RawClient, space: int) -> None:
    spaces = stack.ask(lambda: len(stack.store.core.spaces()))
    other = altered(MODEL, "identity", weights_revision="r9")
    for offer, verdict, why in (
        (MODEL, pb.VERDICT_MATCH, Reason.OK),
        (other, pb.VERDICT_MATCH, Reason.MISS_INCOMPATIBLE),
        (model(revision=None), pb.VERDICT_HELD, Reason.HELD_FOR_REVIEW),
    ):
        request = pb.ExplainRequest(
            fingerprint=convert.fingerprint_to_wire(offer), keys=PROMPT.keys[0]
        )
        reply = client.call("Explain", request)
        assert (reply.verdict, reason(reply.reason)) == (verdict, why)
        assert [d.field for d in reply.differences] == ["identity.weights_revision"][
            : offer is other
        ]
        assert reply.detail
        assert len(reply.keys) == (offer is MODEL)
    assert stack.ask(lambda: len(stack.store.core.spaces())) == spaces


def test_explaining_many_keys_lets_others_in(stack: Stack, client: RawClient, space: int) -> None:
    keys = [os.urandom(32) for _ in range(stack.limits.keys_per_call_max)]
    with stack.turns() as turns:
        assert len(client.explain(space, keys).keys) == len(keys)
    assert len(turns) > 100


# ---------------------------------------------------------------- answers that were not heard


@pytest.mark.parametrize("method", ["acquire", "reserve"])
def test_what_a_nonce_was_granted_ends_by_it(stack: Stack, method: str) -> None:
    prompt = Prompt(MODEL, 71, blocks=4)
    with RawClient(stack.socket()) as client, RawAdmin(stack.admin_socket) as admin:
        space = client.open(MODEL).space_id
        client.put(space, prompt.keys[:2], prompt.rows()[:2])
        staging = client.welcome.limits.staging_bytes
        for nonce in range(1, 2 * staging // 4096):  # of staging, too, nothing stays behind
            assert getattr(client, method)(space, prompt.keys, nonce=nonce).lease_id, nonce
            answer = client.call("Release", pb.ReleaseRequest(unheard=[nonce]))
            assert (answer.released, answer.unknown) == (1, 0)
        stats = admin.stats()
        assert stats.read_leases == stats.write_leases == 0
        # One that comes after it was given up is refused, and holds nothing.
        client.call("Release", pb.ReleaseRequest(unheard=[10**9, 0]))
        with pytest.raises(Refused) as refused:
            getattr(client, method)(space, prompt.keys, nonce=10**9)
        assert refused.value.reason is Reason.CANCELLED
        stats = admin.stats()
        assert stats.read_leases == stats.write_leases == 0


def test_what_comes_before_a_chain_is_a_key_and_a_count(stack: Stack) -> None:
    prompt = Prompt(MODEL, 72, blocks=2)
    with RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        for parent, start in ((b"", 1), (bytes(32), 0), (bytes(31), 1), (bytes(64), 2)):
            with pytest.raises(Refused) as refused:
                client.reserve(space, prompt.keys, parent=parent, chain_start=start)
            assert refused.value.reason is Reason.BAD_KEY_LENGTH
        more: dict[str, Any] = {"parent": bytes(32), "chain_start": 2**32 - 1, "since": 2**64 - 1}
        reserved = client.reserve(space, prompt.keys, **more)
        assert reserved.mark > 0
        client.fill(reserved, prompt.rows())
        assert client.commit(reserved.lease_id).visible == 2
