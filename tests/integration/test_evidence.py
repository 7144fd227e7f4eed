"""Shadow mode, the held-out share, reports and audits, over the wire: real servicers, store and
memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.model.reasons import Reason
from kvstore.model.sampling import Arm, Sampling
from kvstore.wire.v1 import store_pb2 as pb
from tests.e2e.stage import BLOCK_TOKENS, Prompt, model
from tests.integration.stack import Stack
from tests.rawclient import RawClient, reason, refused_as

MODEL = model()
BLOCKS = 8
HALF = Sampling(serve_share=0.5, salt=b"test")
DEAR = pb.PrefillCost(a_us_per_token=10_000)
"""So that any load is worth it."""

Make = Callable[..., Stack]


@contextmanager
def attached(make_stack: Make, sampling: Sampling) -> Iterator[tuple[Stack, RawClient]]:
    stack = make_stack(sampling=sampling)
    with RawClient(stack.socket()) as client:
        yield stack, client


def stored(client: RawClient, seed: int, blocks: int = BLOCKS) -> tuple[int, Prompt]:
    prompt = Prompt(MODEL, seed, blocks=blocks)
    space = client.open(MODEL).space_id
    client.put(space, prompt.keys, prompt.rows())
    return space, prompt


def ask(client: RawClient, space: int, prompt: Prompt, **more: Any) -> pb.LookupReply:
    query = pb.Query(space_id=space, keys=b"".join(prompt.keys))
    request = pb.LookupRequest(queries=[query], prefill=DEAR, **more)
    reply: pb.LookupReply = client.call("Lookup", request)
    return reply


def seeds_of(arm: Arm, count: int, sampling: Sampling = HALF) -> list[int]:
    found: list[int] = []
    seed = 0
    while len(found) < count:
        if sampling.arm(Prompt(MODEL, seed, blocks=BLOCKS).keys[-1]) is arm:
            found.append(seed)
        seed += 1
    return found


def test_shadow_mode_looks_up_and_records_but_loads_nothing(make_stack: Make) -> None:
    with attached(make_stack, Sampling(serve_share=0)) as (stack, client):
        space, prompt = stored(client, 1)
        reply = ask(client, space, prompt, prompt_tokens=300, request_id="r")
        assert (reply.arm, reply.agreed_tokens) == (pb.ARM_SHADOW, BLOCKS * BLOCK_TOKENS)
        assert reply.groups[0].hit_blocks == BLOCKS, "what is there is told"
        assert (reply.plan.load_blocks, reply.plan.recompute_tokens) == (0, 300)
        assert reason(reply.plan.reason) is Reason.DECLINED_SHADOW
        leased = client.call(
            "Acquire", pb.AcquireRequest(space_id=space, keys=b"".join(prompt.keys))
        )
        assert not leased.lease_id
        assert reason(leased.reason) is Reason.DECLINED_SHADOW
        chunks = client.fetch(space, prompt.keys)
        assert [reason(chunk.header.reason) for chunk in chunks] == [Reason.DECLINED_SHADOW]
        (record,) = stack.records("lookup")
        fields = json.loads(record.to_json_line())
        assert (fields["outcome"], fields["reason"]) == ("declined", "DECLINED_SHADOW")
        assert fields["evidence"]["arm"] == "shadow"
        would = fields["evidence"]["would_load"]
        assert (would["blocks"], would["tokens"]) == (BLOCKS, BLOCKS * BLOCK_TOKENS)
        assert would["bytes"] == sum(row.nbytes for row in prompt.rows())
        plan = fields["plan"]
        assert would["saved_ms"] == pytest.approx(plan["recompute_ms"] - plan["load_ms"], abs=0.01)
        flat = stack.ask(stack.metrics.flat)
        assert flat['kvstore_lookups_total{tenant="default",result="declined"}'] == 1
        assert flat['kvstore_withheld_lookups_total{arm="shadow"}'] == 1
        assert flat['kvstore_withheld_tokens_total{arm="shadow"}'] == BLOCKS * BLOCK_TOKENS
        assert not any(name.startswith("kvstore_hit_tokens_total") for name in flat)
        assert not any('declined_tokens_total{tenant="default"}' in name for name in flat)


def test_pushes_go_on_in_shadow_mode(make_stack: Make) -> None:
    with attached(make_stack, Sampling(serve_share=0)) as (_, client):
        space, prompt = stored(client, 1)
        again = client.reserve(space, prompt.keys)
        assert (again.present, bool(again.lease_id)) == (BLOCKS, False)


def test_a_miss_is_a_miss_on_either_side(make_stack: Make) -> None:
    with attached(make_stack, Sampling(serve_share=0)) as (stack, client):
        space, _ = stored(client, 1)
        reply = ask(client, space, Prompt(MODEL, 99, blocks=BLOCKS))
        assert reason(reply.groups[0].reason) is Reason.MISS_NEVER_STORED
        assert reason(reply.plan.reason) is Reason.NOTHING_TO_DO
        (record,) = stack.records("lookup")
        assert record.reason is Reason.MISS_NEVER_STORED


def test_a_held_out_request_stays_held_out_and_the_others_are_served(make_stack: Make) -> None:
    with attached(make_stack, HALF) as (_, client):
        for seed in seeds_of(Arm.HELD_OUT, 3):
            space, prompt = stored(client, seed)
            for _again in range(2):
                reply = ask(client, space, prompt, request_id=f"out-{seed}")
                assert (reply.arm, reply.plan.load_blocks) == (pb.ARM_HELD_OUT, 0)
                assert reason(reply.plan.reason) is Reason.DECLINED_HOLDOUT
            keys = b"".join(prompt.keys)
            leased = client.call(
                "Acquire", pb.AcquireRequest(space_id=space, keys=keys, request_id=f"out-{seed}")
            )
            assert not leased.lease_id
            assert reason(leased.reason) is Reason.DECLINED_HOLDOUT
        for seed in seeds_of(Arm.APPLIED, 3):
            space, prompt = stored(client, seed)
            reply = ask(client, space, prompt, request_id=f"in-{seed}")
            assert (reply.arm, reply.plan.load_blocks) == (pb.ARM_APPLIED, BLOCKS)
            rows = client.get(space, prompt.keys)
            assert all(row is not None for row in rows)


def test_a_prompt_in_several_calls_is_on_one_side(make_stack: Make) -> None:
    with attached(make_stack, HALF) as (_, client):
        (seed,) = seeds_of(Arm.APPLIED, 1)
        space, prompt = stored(client, seed)
        head = next(n for n in range(1, BLOCKS) if HALF.arm(prompt.keys[n - 1]) is Arm.HELD_OUT)
        query = pb.Query(space_id=space, keys=b"".join(prompt.keys[:head]))
        for last_key, arm in ((b"", pb.ARM_HELD_OUT), (prompt.keys[-1], pb.ARM_APPLIED)):
            request = pb.LookupRequest(queries=[query], last_key=last_key)
            assert client.call("Lookup", request).arm == arm
        wrong = pb.LookupRequest(queries=[query], last_key=b"short")
        error = refused(lambda: client.call("Lookup", wrong))
        assert error is Reason.BAD_KEY_LENGTH


def refused(call: Callable[[], Any]) -> Reason:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the reason is what is compared
        refused_as(call)
    return caught.value.reason  # type: ignore[attr-defined,no-any-return]


# ---------------------------------------------------------------- reports


def report(last_key: bytes, space: int, **more: Any) -> pb.RequestReport:
    return pb.RequestReport(space_id=space, last_key=last_key, **more)


def compared(**more: Any) -> pb.AuditReport:
    return pb.AuditReport(**{"key": bytes(32), "blocks": 1, **more})


def test_a_report_is_recorded_with_its_side_and_counted(make_stack: Make) -> None:
    with attached(make_stack, HALF) as (stack, client):
        sides = {arm: seeds_of(arm, 1)[0] for arm in (Arm.APPLIED, Arm.HELD_OUT)}
        reports = []
        for arm, seed in sides.items():
            space, prompt = stored(client, seed)
            reports.append(
                report(
                    prompt.keys[-1],
                    space,
                    request_id=f"q-{arm.name}",
                    prompt_tokens=200,
                    found_tokens=128,
                    tier=1,
                    computed_tokens=72,
                    first_token_us=30_000,
                    prefill_us=20_000,
                    failed=arm is Arm.HELD_OUT,
                )
            )
        client.call("Release", pb.ReleaseRequest(requests=reports))
        records = [json.loads(one.to_json_line()) for one in stack.records("report")]
        assert [one["evidence"]["arm"] for one in records] == ["applied", "held_out"]
        figures = records[0]["evidence"]["request"]
        assert (figures["tier"], figures["computed_tokens"]) == ("host", 72)
        assert (figures["first_token_us"], figures["prefill_us"]) == (30_000, 20_000)
        assert records[0]["input_length"] == 200
        assert "hash_ids" not in records[0], "a replay would take it for a request"
        flat = stack.ask(stack.metrics.flat)
        assert flat['kvstore_reported_requests_total{arm="held_out",outcome="failed"}'] == 1
        assert flat['kvstore_first_token_seconds_sum{arm="applied"}'] == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"requests": [pb.RequestReport()]}, Reason.BAD_KEY_LENGTH),
        ({"requests": [report(bytes(32), 1, request_id="x" * 200)]}, Reason.BAD_NAME),
        ({"audits": [compared(blocks=0)]}, Reason.BAD_SIZE),
        ({"audits": [compared(mismatched=2)]}, Reason.BAD_SIZE),
        ({"audits": [compared(worst=-1)]}, Reason.BAD_SIZE),
        ({"audits": [compared(worst=float("nan"))]}, Reason.BAD_SIZE),
        ({"audits": [compared(key=bytes(3))]}, Reason.BAD_KEY_LENGTH),
        ({"requests": [report(bytes(32), 1)] * 257}, Reason.BAD_SIZE),
        ({"audits": [compared()] * 257}, Reason.BAD_SIZE),
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_one_is_refused(
    client: RawClient, stack: Stack, wrong: dict[str, Any], why: Reason
) -> None:
    assert refused(lambda: client.call("Release", pb.ReleaseRequest(**wrong))) is why
    assert not stack.records("report")
    assert not stack.records("audit")


def test_figures_beyond_reason_are_bounded(client: RawClient, stack: Stack) -> None:
    huge = report(bytes(32), 1, loaded_bytes=2**64 - 1, first_token_us=2**64 - 1, tier=99)
    client.call("Release", pb.ReleaseRequest(requests=[huge]))
    (record,) = stack.records("report")
    figures = json.loads(record.to_json_line())["evidence"]["request"]
    assert (figures["loaded_bytes"], figures["tier"]) == (1 << 50, "none")
    assert figures["first_token_us"] == 86_400_000_000


# ---------------------------------------------------------------- audits


def test_some_hits_are_to_be_audited_and_no_others(make_stack: Make) -> None:
    sampling = Sampling(audit_share=0.5)
    with attached(make_stack, sampling) as (_, client):
        seen = set()
        for seed in range(12):
            space, prompt = stored(client, seed)
            reply = ask(client, space, prompt)
            assert reply.audit == sampling.audited(prompt.keys[-1])
            seen.add(reply.audit)
            assert not ask(client, space, Prompt(MODEL, 500 + seed, blocks=BLOCKS)).audit
        assert seen == {True, False}


def test_a_held_out_request_is_not_audited(make_stack: Make) -> None:
    with attached(make_stack, Sampling(serve_share=0, audit_share=1)) as (_, client):
        space, prompt = stored(client, 1)
        assert not ask(client, space, prompt).audit


def audit(space: int, key: bytes, mismatched: int) -> pb.ReleaseRequest:
    one = pb.AuditReport(space_id=space, key=key, blocks=4, mismatched=mismatched, worst=7.5)
    return pb.ReleaseRequest(audits=[one])


def test_blocks_that_match_hold_nothing(client: RawClient, stack: Stack) -> None:
    space, prompt = stored(client, 1)
    reply = client.call("Release", audit(space, prompt.keys[0], 0))
    assert not reply.review_id
    assert ask(client, space, prompt).plan.load_blocks == BLOCKS
    flat = stack.ask(stack.metrics.flat)
    assert flat['kvstore_audited_blocks_total{outcome="match"}'] == 4
    assert flat['kvstore_audited_blocks_total{outcome="mismatch"}'] == 0


def test_a_mismatch_holds_the_fingerprint_and_says_why(client: RawClient, stack: Stack) -> None:
    space, prompt = stored(client, 1)
    reply = client.call("Release", audit(space, prompt.keys[0], 1))
    assert reply.review_id
    (row,) = stack.ask(stack.store.core.reviews)
    assert (row.review_id, row.blocks) == (reply.review_id, BLOCKS)
    assert prompt.keys[0][:4].hex() in row.doubt
    assert refused(lambda: ask(client, space, prompt)) is Reason.SPACE_CLOSED
    opened = client.open(MODEL)
    assert reason(opened.reason) is Reason.HELD_BY_AUDIT
    assert (opened.space_id, opened.review_id) == (0, reply.review_id)
    again = client.call("Release", audit(space, prompt.keys[0], 1))
    assert not again.review_id, "it is held already"


def test_another_tenants_space_is_not_held(make_stack: Make) -> None:
    stack = make_stack(tenants=("default", "other"))
    with RawClient(stack.socket()) as client, RawClient(stack.socket("other")) as stranger:
        space, prompt = stored(client, 1)
        stranger.open(MODEL)
        assert not stranger.call("Release", audit(space, prompt.keys[0], 1)).review_id
        assert ask(client, space, prompt).plan.load_blocks == BLOCKS


def test_the_salt_is_no_part_of_what_is_answered() -> None:
    """Two deployments split the same keys differently: nothing of a key alone tells its side."""
    keys = [hashlib.sha256(bytes([n])).digest() for n in range(64)]
    assert [HALF.arm(k) for k in keys] != [HALF._replace(salt=b"other").arm(k) for k in keys]
