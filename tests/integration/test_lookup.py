"""Lookup over gRPC: groups that agree, the plan in the reply, and what the trace keeps of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence

import pytest

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.model.reasons import Reason
from kvstore.model.record import Outcome, Stage
from kvstore.wire.v1 import store_pb2 as pb
from tests.e2e.stage import BLOCK_TOKENS, Prompt, altered, model
from tests.integration.polling import within
from tests.integration.stack import HOST_BYTES_PER_SECOND, Stack
from tests.rawclient import RawClient, Refused, reason

MODEL = model()
WINDOW = altered(model(8192), "geometry", cache_group="window", window_tokens=64)
"""Another group of the same model, whose blocks are twice as large."""
BLOCKS = 16
PROMPT = Prompt(MODEL, 1, blocks=BLOCKS)
WINDOW_PROMPT = Prompt(WINDOW, 2, blocks=BLOCKS)


def store(client: RawClient, prompt: Prompt, present: Sequence[bool]) -> int:
    """Puts the blocks of a prompt that are to be present; gives the space."""
    space = client.open(prompt.fingerprint).space_id
    rows = prompt.rows()
    for index, wanted in enumerate(present):
        if wanted:
            client.put(space, prompt.keys[index : index + 1], rows[index : index + 1])
    return space


def ask(client: RawClient, *queries: pb.Query, **more: object) -> pb.LookupReply:
    reply: pb.LookupReply = client.call("Lookup", pb.LookupRequest(queries=queries, **more))  # type: ignore[arg-type]
    return reply


def query(space: int, prompt: Prompt, *, window: int | None = None) -> pb.Query:
    if window is None:
        return pb.Query(space_id=space, keys=b"".join(prompt.keys))
    return pb.Query(
        space_id=space,
        keys=b"".join(prompt.keys),
        rule=pb.HIT_RULE_TRAILING,
        trailing_blocks=window,
    )


# ---------------------------------------------------------------- hits


def test_a_lookup_tells_the_leading_run_and_what_ends_it(stack: Stack, client: RawClient) -> None:
    present = [True] * 5 + [False] + [True] * 2 + [False] * 8
    space = store(client, PROMPT, present)
    reply = ask(client, query(space, PROMPT), request_id="l-1", prompt_tokens=260)
    (hit,) = reply.groups
    assert (hit.hit_blocks, reply.agreed_tokens) == (5, 80)
    assert hit.tiers == bytes(map(int, present))
    assert reason(hit.reason) is Reason.MISS_NEVER_STORED
    assert hit.fingerprint_digest == MODEL.digest
    (record,) = stack.records("lookup")
    assert (record.outcome, record.reason, record.departed) == (
        Outcome.PARTIAL, Reason.HIT, None,
    )  # fmt: skip
    assert (record.unit, record.asked, record.handed_on) == ("tokens", 256, 80)
    fields = json.loads(record.to_json_line())
    assert fields["input_length"] == 260
    assert len(fields["hash_ids"]) == BLOCKS
    assert fields["stages_us"].keys() == {"input", "preconditions", "plan", "verification"}


def test_what_is_being_written_is_told_apart(client: RawClient) -> None:
    space = store(client, PROMPT, [True, True])
    assert client.reserve(space, PROMPT.keys[:4]).lease_id
    (hit,) = ask(client, query(space, PROMPT)).groups
    assert hit.tiers == b"\x01\x01\xff\xff" + bytes(12)
    assert (hit.hit_blocks, reason(hit.reason)) == (2, Reason.MISS_IN_PROGRESS)


def test_a_miss_has_its_reason_and_its_fields(stack: Stack, client: RawClient) -> None:
    space = store(client, PROMPT, [True] * 3)
    other = client.open(altered(MODEL, "identity", weights_revision="r2")).space_id
    (hit,) = ask(client, query(other, PROMPT)).groups
    assert (hit.hit_blocks, reason(hit.reason)) == (0, Reason.MISS_INCOMPATIBLE)
    assert [d.field for d in hit.differences] == ["identity.weights_revision"]
    record = stack.records("lookup")[-1]
    assert (record.outcome, record.departed) == (Outcome.MISS, Stage.PRECONDITIONS)
    assert record.fields == ("identity.weights_revision",)
    stack.ask(lambda: stack.store.core.invalidate(space_id=space, keys=PROMPT.keys[:1], now_ns=0))
    (hit,) = ask(client, query(space, PROMPT)).groups
    assert reason(hit.reason) is Reason.MISS_INVALIDATED
    assert stack.records("lookup")[-1].departed is Stage.PLAN


def test_a_prompt_without_a_full_block_is_nothing_to_do(stack: Stack, client: RawClient) -> None:
    space = store(client, PROMPT, [])
    reply = ask(client, pb.Query(space_id=space))
    assert reason(reply.groups[0].reason) is Reason.NOTHING_TO_DO
    assert reason(reply.plan.reason) is Reason.NOTHING_TO_DO
    assert stack.records("lookup")[-1].reason is Reason.NOTHING_TO_DO


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("full", "window", "agreed"),
    [
        ([True] * 16, [True] * 16, 16),
        ([True] * 16, [False] * 12 + [True] * 4, 16),
        ([True] * 16, [False] * 8 + [True] * 4 + [False] * 4, 12),
        ([True] * 10 + [False] * 6, [False] * 8 + [True] * 4 + [False] * 4, 0),
        ([True] * 12 + [False] * 4, [False] * 8 + [True] * 8, 12),
        ([True] * 16, [True] * 2 + [False] * 14, 2),
        ([True] * 16, [False] * 16, 0),
        ([False] + [True] * 15, [True] * 16, 0),
    ],
)
def test_groups_agree_on_what_all_of_them_can_serve(
    client: RawClient, full: list[bool], window: list[bool], agreed: int
) -> None:
    spaces = store(client, PROMPT, full), store(client, WINDOW_PROMPT, window)
    reply = ask(client, query(spaces[0], PROMPT), query(spaces[1], WINDOW_PROMPT, window=4))
    assert reply.agreed_tokens == agreed * BLOCK_TOKENS
    assert [group.tiers for group in reply.groups] == [bytes(full), bytes(window)]
    assert reply.plan.load_blocks == agreed
    # The order in which groups are named changes nothing.
    reply = ask(client, query(spaces[1], WINDOW_PROMPT, window=4), query(spaces[0], PROMPT))
    assert reply.agreed_tokens == agreed * BLOCK_TOKENS
    assert reply.plan.load_blocks == agreed


def test_a_window_group_alone_is_served_by_its_window(stack: Stack, client: RawClient) -> None:
    """The blocks before the window are absent or being written: no tier is named for them."""
    space = store(client, WINDOW_PROMPT, [False] * 8 + [True] * 8)
    assert client.reserve(space, WINDOW_PROMPT.keys[:2]).lease_id
    reply = ask(client, query(space, WINDOW_PROMPT, window=4))
    assert reply.agreed_tokens == 16 * BLOCK_TOKENS
    assert reply.plan.load_blocks == 16
    assert reply.plan.ideal_load_ms == pytest.approx(
        4 * layout_of(WINDOW).block_bytes / HOST_BYTES_PER_SECOND * 1e3, rel=0.01
    )
    assert stack.records("lookup")[-1].reason is Reason.HIT


def test_groups_of_other_block_sizes_agree_on_multiples(client: RawClient) -> None:
    wide = Prompt(
        dataclasses.replace(
            altered(MODEL, "encoding", block_tokens=64),
            geometry=dataclasses.replace(MODEL.geometry, cache_group="wide"),
        ),
        3,
        blocks=4,
    )
    spaces = store(client, PROMPT, [True] * 11), store(client, wide, [True] * 4)
    reply = ask(client, query(spaces[0], PROMPT), query(spaces[1], wide))
    assert (reply.agreed_tokens, reply.plan.load_blocks) == (128, 8)
    reply = ask(client, query(spaces[1], wide), query(spaces[0], PROMPT))
    assert (reply.agreed_tokens, reply.plan.load_blocks) == (128, 2)


# ---------------------------------------------------------------- plan


def load_ms(fingerprint: Fingerprint, blocks: int) -> float:
    """What the bound bytes / bandwidth says."""
    return blocks * layout_of(fingerprint).block_bytes / HOST_BYTES_PER_SECOND * 1e3


def test_the_plan_without_a_cost_loads_and_says_so(stack: Stack, client: RawClient) -> None:
    space = store(client, PROMPT, [True] * BLOCKS)
    plan = ask(client, query(space, PROMPT), prompt_tokens=300).plan
    assert reason(plan.reason) is Reason.COST_UNKNOWN
    assert (plan.load_blocks, plan.recompute_tokens, plan.recompute_ms) == (16, 44, 0)
    assert plan.ideal_load_ms == pytest.approx(load_ms(MODEL, 16), rel=0.01)
    assert plan.load_ms > plan.ideal_load_ms
    assert plan.bytes_per_second == pytest.approx(HOST_BYTES_PER_SECOND, rel=0.01)
    fields = json.loads(stack.records("lookup")[-1].to_json_line())
    assert fields["plan"]["reason"] == "COST_UNKNOWN"


def test_the_plan_loads_what_is_slower_to_compute(client: RawClient) -> None:
    space = store(client, PROMPT, [True] * BLOCKS)
    cost = pb.PrefillCost(a_us_per_token=1_000, b_us_per_token2=1)
    plan = ask(client, query(space, PROMPT), prefill=cost, prompt_tokens=300).plan
    assert reason(plan.reason) is Reason.OK
    assert plan.load_blocks == 16
    assert plan.recompute_ms == pytest.approx((1_000 * 256 + 256**2) / 1e3)


def test_the_plan_declines_what_is_faster_to_compute(stack: Stack, client: RawClient) -> None:
    space = store(client, PROMPT, [True] * BLOCKS)
    cost = pb.PrefillCost(a_us_per_token=0.001)
    reply = ask(client, query(space, PROMPT), prefill=cost, prompt_tokens=256)
    assert reply.groups[0].hit_blocks == 16, "it is there all the same"
    assert reason(reply.plan.reason) is Reason.DECLINED_RECOMPUTE_FASTER
    assert reply.plan.load_blocks == 0
    assert reply.plan.recompute_tokens == 256
    assert reply.plan.load_ms > reply.plan.recompute_ms > 0
    record = stack.records("lookup")[-1]
    assert (record.outcome, record.departed) == (Outcome.DECLINED, Stage.PLAN)
    counters = stack.counters()
    assert counters['kvstore_declined_tokens_total{tenant="default"}'] == 256
    assert 'kvstore_hit_tokens_total{tenant="default",tier="host"}' not in counters


def test_the_plan_cuts_the_hit_for_what_the_engine_can_do_at_once(client: RawClient) -> None:
    space = store(client, PROMPT, [True] * BLOCKS)
    cost = pb.PrefillCost(a_us_per_token=5.0)  # 1.3 ms, which take about 0.6 to load
    plans = {
        overlap: ask(
            client, query(space, PROMPT), prefill=cost, prompt_tokens=256, overlap=overlap
        ).plan
        for overlap in (pb.OVERLAP_SERIAL, pb.OVERLAP_TAIL)
    }
    serial, tail = plans[pb.OVERLAP_SERIAL], plans[pb.OVERLAP_TAIL]
    assert (serial.load_blocks, serial.head_blocks, serial.tail_blocks) == (BLOCKS, BLOCKS, 0)
    (host,) = serial.tiers
    assert (host.tier, host.found_blocks, host.load_blocks) == (1, BLOCKS, BLOCKS)
    assert host.load_ms == pytest.approx(serial.load_ms) == serial.total_ms
    assert serial.compute_only_ms == pytest.approx(1.28)
    assert tail.head_blocks == 0
    assert 0 < tail.tail_blocks == tail.load_blocks < BLOCKS
    assert tail.computed_blocks + tail.tail_blocks == BLOCKS
    assert tail.total_ms < serial.total_ms
    with pytest.raises(Refused) as refused:
        ask(client, query(space, PROMPT), overlap=9)
    assert refused.value.reason is Reason.BAD_REQUEST


@pytest.mark.parametrize("tokens", [0, 1, 2**32 - 1])
def test_any_length_of_a_prompt_is_planned_for(client: RawClient, tokens: int) -> None:
    space = store(client, PROMPT, [True] * 4)
    for cost in (None, pb.PrefillCost(a_us_per_token=1e9, b_us_per_token2=1e9)):
        plan = ask(client, query(space, PROMPT), prefill=cost, prompt_tokens=tokens).plan
        assert plan.load_blocks == 4
        assert not math.isnan(plan.recompute_ms)


def test_a_measured_load_moves_the_next_plan(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack()
    with RawClient(stack.socket()) as client:
        space = store(client, PROMPT, [True] * BLOCKS)
        before = ask(client, query(space, PROMPT)).plan.bytes_per_second

        def load(elapsed_s: float, claimed_s: float) -> None:
            leased = client.acquire(space, PROMPT.keys)
            within(elapsed_s, lambda: False)
            report = pb.LoadReport(
                lease_id=leased.lease_id,
                blocks=BLOCKS,
                copy_us=int(claimed_s * 1e6),
                load_us=int(claimed_s * 1e6),
                predicted_us=1_000,
                reason=pb.REASON_OK,
            )
            client.call("Release", pb.ReleaseRequest(lease_ids=[leased.lease_id], reports=[report]))

        for _ in range(30):
            load(0, 50)
        same = ask(client, query(space, PROMPT)).plan
        assert same.load_ms < 1, "longer than since its lease was asked for: that teaches nothing"
        for _ in range(20):
            load(0.02, 0.02)
        after = ask(client, query(space, PROMPT)).plan
        assert after.load_ms > 5
        assert after.bytes_per_second <= before
