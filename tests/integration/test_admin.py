"""The operator's service over gRPC: every verb, its refusals, and what it may cost the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from tests.e2e.stage import Prompt, altered, model
from tests.integration.polling import within
from tests.integration.stack import Stack
from tests.rawclient import RawAdmin, RawClient, Refused, reason, refused_as
from tests.unit.store.stand import FlakyLedger

MODEL = model()
PROMPT = Prompt(MODEL, 1, blocks=8)
SOON_S = 5.0


@pytest.fixture
def admin(stack: Stack) -> Iterator[RawAdmin]:
    with RawAdmin(stack.admin_socket) as admin:
        yield admin


@pytest.fixture
def space(client: RawClient) -> int:
    space = client.open(MODEL).space_id
    assert client.put(space, PROMPT.keys, PROMPT.rows()).visible == 8
    return space


def refusal(call: Callable[[], object], why: Reason) -> pb.ErrorDetail:
    with pytest.raises(Refused) as refused:
        call()
    assert refused.value.reason is why, refused.value
    return refused.value.detail


# ---------------------------------------------------------------- looking


def test_stats_are_what_is_there(
    stack: Stack, client: RawClient, admin: RawAdmin, space: int
) -> None:
    client.acquire(space, PROMPT.keys)
    client.lookup(space, PROMPT.keys)
    stats = admin.stats()
    assert stats.instance_id == client.welcome.instance_id
    assert stats.state == "ready"
    assert (stats.sessions, stats.read_leases, stats.spaces_open) == (1, 1, 1)
    (tier,) = stats.tiers
    assert (tier.name, tier.blocks, tier.block_bytes) == ("host", 8, 8 * 4096)
    assert tier.used_bytes <= tier.capacity_bytes
    (tenant,) = stats.tenants
    assert (tenant.tenant, tenant.blocks) == ("default", 8)
    assert (tenant.hit_tokens, tenant.lookup_tokens) == (128, 128)
    name = 'kvstore_requests_total{op="lookup",reason="HIT"}'
    assert stats.counters[name] == stack.counters()[name] == 1


def test_spaces_are_listed_with_their_fingerprints(
    client: RawClient, admin: RawAdmin, space: int
) -> None:
    held = client.open(model(revision=None))
    rows = {row.space_id: row for row in admin.call("Spaces").spaces}
    assert rows.keys() == {space, held.space_id}
    row = rows[space]
    assert (row.tenant, row.state, row.blocks, row.bytes) == ("default", "open", 8, 8 * 4096)
    assert row.fingerprint.identity.model_name == "small"
    assert row.fingerprint_digest == MODEL.digest
    assert (rows[held.space_id].state, rows[held.space_id].review_id) == ("held", held.review_id)


def test_the_trace_is_filtered_and_bounded(
    stack: Stack, client: RawClient, admin: RawAdmin, space: int
) -> None:
    for index in range(5):
        client.lookup(space, PROMPT.keys, request_id=f"t-{index}")
    (line,) = admin.call("Trace", request_id="t-3").records
    assert json.loads(line)["request_id"] == "t-3"
    last = [json.loads(line)["request_id"] for line in admin.call("Trace", last=2).records]
    assert last == ["t-3", "t-4"]
    assert len(admin.call("Trace", outcome="hit").records) == 5
    assert not admin.call("Trace", outcome="declined").records
    assert len(admin.call("Trace", last=2**32 - 1).records) == len(stack.records())


def test_a_trace_of_long_prompts_fits_into_a_message_and_lets_others_in(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(message_bytes_max=4 << 20)
    with RawClient(stack.socket()) as client, RawAdmin(stack.admin_socket) as admin:
        space = client.open(MODEL).space_id
        keys = Prompt(MODEL, 2, blocks=stack.limits.keys_per_call_max).keys
        for index in range(20):
            client.lookup(space, keys, request_id=f"long-{index}")
        with stack.turns("admin") as turns:
            reply = admin.call("Trace", last=20)
        records = [json.loads(line) for line in reply.records]
        assert 6 <= len(records) < 20
        newest = [f"long-{index}" for index in range(20)][-len(records) :]
        assert [record["request_id"] for record in records] == newest
        assert len(turns) >= len(records), "others had their turn"


def test_the_config_is_told(admin: RawAdmin) -> None:
    assert admin.call("Config").toml == "[host]\n"


def test_explain_for_the_operator(
    make_stack: Callable[..., Stack], client: RawClient, admin: RawAdmin, space: int
) -> None:
    (told,) = admin.call("Explain", space_id=space, keys=PROMPT.keys[0]).keys
    assert reason(told.reason) is Reason.HIT
    refusal(lambda: admin.call("Explain", space_id=99), Reason.SPACE_UNKNOWN)
    refusal(lambda: admin.call("Explain", space_id=space, tenant="nobody"), Reason.BAD_NAME)
    offer = admin.call("Spaces").spaces[0].fingerprint
    reply = admin.call("Explain", fingerprint=offer, keys=PROMPT.keys[0])
    assert reply.verdict == pb.VERDICT_MATCH
    assert reason(reply.keys[0].reason) is Reason.HIT
    two = make_stack(tenants=("one", "two"))
    with RawAdmin(two.admin_socket) as other:
        assert (
            "one, two"
            in refusal(lambda: other.call("Explain", fingerprint=offer), Reason.BAD_NAME).detail
        )


def test_admin_calls_leave_no_record_and_are_counted(stack: Stack, admin: RawAdmin) -> None:
    admin.stats()
    with pytest.raises(Refused):
        admin.call("Pin", space_id=1)
    assert stack.records() == []
    counters = stack.counters()
    assert counters['kvstore_requests_total{op="admin_stats",reason="OK"}'] == 1
    assert counters['kvstore_requests_total{op="admin_pin",reason="SPACE_UNKNOWN"}'] == 1


# ---------------------------------------------------------------- deciding


def test_invalidate_drops_keys_a_space_a_model_or_all(
    client: RawClient, admin: RawAdmin, space: int
) -> None:
    some = admin.call("Invalidate", space_id=space, keys=b"".join(PROMPT.keys[:2]), why="a test")
    assert (some.dropped_blocks, some.spaces) == (2, 1)
    assert client.lookup(space, PROMPT.keys).tiers == b"\0\0" + b"\1" * 6
    whole = admin.call("Invalidate", space_id=space)
    assert (whole.dropped_blocks, whole.spaces) == (6, 1)
    again = client.open(MODEL).space_id
    client.put(again, PROMPT.keys, PROMPT.rows())
    other = client.open(altered(MODEL, "identity", model_name="other")).space_id
    client.put(other, PROMPT.keys, PROMPT.rows())
    assert admin.call("Invalidate", model_name="small").dropped_blocks == 8
    assert client.lookup(other, PROMPT.keys).hit_blocks == 8
    assert admin.call("Invalidate", tenant="default", everything=True).dropped_blocks == 8
    assert not admin.call("Spaces").spaces


def test_invalidate_refuses_what_is_not_one_thing(admin: RawAdmin, space: int) -> None:
    for fields, why in (
        ({}, Reason.BAD_REQUEST),
        ({"space_id": space, "everything": True}, Reason.BAD_REQUEST),
        ({"model_name": "m", "keys": bytes(32)}, Reason.BAD_REQUEST),
        ({"space_id": 99}, Reason.SPACE_UNKNOWN),
        ({"tenant": "nobody", "everything": True}, Reason.BAD_NAME),
        ({"everything": True, "why": "x" * 2_000}, Reason.BAD_NAME),
        ({"space_id": space, "keys": bytes(33)}, Reason.BAD_KEY_LENGTH),
    ):
        refusal(lambda fields=fields: admin.call("Invalidate", **fields), why)  # type: ignore[misc]
    assert admin.stats().tiers[0].blocks == 8


def test_an_epoch_closes_what_is_older_at_once(
    client: RawClient, admin: RawAdmin, space: int
) -> None:
    done = admin.call("SetWeightEpoch", model_name="small", epoch=3, why="new weights")
    assert (done.epoch, done.closed_spaces, done.dropped_blocks) == (3, 1, 8)
    assert not done.durable, "the ledger is volatile"
    refusal(lambda: client.lookup(space, PROMPT.keys), Reason.SPACE_CLOSED)
    assert reason(client.open(MODEL).reason) is Reason.MISS_EPOCH_STALE
    lower = admin.call("SetWeightEpoch", model_name="small", epoch=1)
    assert (lower.epoch, lower.closed_spaces) == (3, 0)
    assert admin.call("Spaces").epoch_floors == {"small": 3}
    new = client.open(altered(MODEL, "identity", weight_epoch=3))
    assert client.put(new.space_id, PROMPT.keys, PROMPT.rows()).visible == 8


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257, "x" * 100_000])
def test_an_epoch_of_a_name_that_is_none_is_refused(admin: RawAdmin, name: str) -> None:
    refusal(lambda: admin.call("SetWeightEpoch", model_name=name, epoch=1), Reason.BAD_NAME)
    refusal(lambda: admin.call("SetWeightEpoch", model_name="m", epoch=2**63), Reason.BAD_SIZE)
    assert not admin.call("Spaces").epoch_floors


def test_a_ledger_that_fails_is_said_to(make_stack: Callable[..., Stack]) -> None:
    ledger = FlakyLedger()
    stack = make_stack(ledger=ledger)
    with RawAdmin(stack.admin_socket) as admin:
        assert admin.call("SetWeightEpoch", model_name="m", epoch=1).durable
        ledger.broken = True
        assert not admin.call("SetWeightEpoch", model_name="m", epoch=2).durable
        assert admin.call("Spaces").epoch_floors == {"m": 2}
        assert not admin.call("SetWeightEpoch", model_name="m", epoch=2).durable
        ledger.broken = False
        assert admin.call("SetWeightEpoch", model_name="m", epoch=2).durable


def test_pins_hold_until_they_are_taken_away(
    client: RawClient, admin: RawAdmin, space: int
) -> None:
    pinned = admin.call("Pin", space_id=space, keys=b"".join(PROMPT.keys))
    assert (pinned.pinned, reason(pinned.reason)) == (8, Reason.OK)
    assert admin.stats().pins == 1
    assert admin.call("Unpin", pin_id=pinned.pin_id).known
    assert not admin.call("Unpin", pin_id=pinned.pin_id).known
    assert not admin.call("Unpin", pin_id=2**64 - 1).known
    assert client.release(pinned.pin_id).unknown == 1, "a pin is no lease of a client"


def test_a_review_decides_over_what_is_held(client: RawClient, admin: RawAdmin) -> None:
    held = client.open(model(revision=None))
    client.put(held.space_id, PROMPT.keys, PROMPT.rows())
    (row,) = admin.call("Reviews").reviews
    assert (row.review_id, row.state, row.blocks) == (held.review_id, "held", 8)
    assert list(row.missing) == ["identity.weights_revision"]
    refusal(lambda: admin.call("Review", review_id=row.review_id, approve=True), Reason.BAD_NAME)
    done = admin.call(
        "Review", review_id=row.review_id, approve=True, revision="r7", who="me", why="I know"
    )
    assert (reason(done.reason), done.space_id) == (Reason.OK, held.space_id)
    assert client.open(model(revision="r7")).space_id == held.space_id
    assert client.lookup(held.space_id, PROMPT.keys).hit_blocks == 8
    again = admin.call("Review", review_id=row.review_id, who="me")
    assert reason(again.reason) is Reason.BAD_REQUEST
    assert not admin.call("Reviews").reviews
    (decided,) = admin.call("Reviews", all=True).reviews
    assert (decided.state, decided.decided_by, decided.revision) == ("approved", "me", "r7")


def test_a_drain_is_passed_on(stack: Stack, client: RawClient, admin: RawAdmin) -> None:
    assert admin.call("Drain", grace_s=1.5).sessions == 1
    assert stack.drains == [1.5]


def test_a_malformed_message_is_refused(stack: Stack, admin: RawAdmin) -> None:
    call: Any = admin.channel.unary_unary("/kvstore.v1.Admin/Stats")
    with pytest.raises(Refused) as refused:
        refused_as(lambda: call(b"\x0f\xff", timeout=SOON_S))
    assert refused.value.reason is Reason.BAD_REQUEST
    assert within(SOON_S, lambda: bool(admin.stats().instance_id))
    refusals = 'kvstore_requests_total{op="admin_stats",reason="BAD_REQUEST"}'
    assert admin.stats().counters[refusals] == 1
