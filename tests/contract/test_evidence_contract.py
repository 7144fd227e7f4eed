"""Held-out look-ups, reports and audits, as both clients have them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.sampling import Arm
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import ClientConfig, Tolerance
from kvstore_client.releases import Release, Releases, request_of
from kvstore_client.testing import FakeStore, FakeTransport
from tests.client_kit import BLOCK_TOKENS, MakeClient, clients, model, rows, tokens

MODEL = model()
BLOCK_BYTES = 4096


@pytest.fixture(params=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with clients(request.param) as maker:
        yield maker


@pytest.fixture
def store() -> Iterator[FakeStore]:
    fake = FakeStore(capacity_blocks=64, staging_bytes=16 * BLOCK_BYTES)
    yield fake
    fake.close()


def numbers(blocks: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of plain bfloat16 numbers: bits at random would be all sizes, and none at all."""
    values = np.random.default_rng(seed).standard_normal((blocks, BLOCK_BYTES // 2))
    bits = values.astype(np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16).view(np.uint8)


def test_a_held_out_hit_loads_nothing_and_says_why(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt = tokens(4)
    space.push(prompt, rows(4, BLOCK_BYTES))
    store.withhold = True
    hit = space.lookup(prompt)
    assert (hit.arm, hit.blocks, hit.keys_to_load) == (Arm.HELD_OUT, 4, ())
    assert hit.plan.reason is Reason.DECLINED_HOLDOUT
    asked = store.requests["Acquire"]
    fetched = space.fetch(hit)
    assert (fetched.blocks, fetched.reason) == (0, Reason.DECLINED_HOLDOUT)
    assert store.requests["Acquire"] == asked
    assert space.push(prompt, rows(4, BLOCK_BYTES)).present == 4, "pushes go on"


def test_a_hit_knows_its_prompt(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt = tokens(3)
    assert space.lookup(prompt).prompt_tokens == 3 * BLOCK_TOKENS
    hit = space.lookup(space.keys(prompt))
    assert (hit.prompt_tokens, hit.arm, hit.audit) == (0, Arm.APPLIED, False)


def test_a_report_goes_with_the_releases(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt = tokens(4)
    space.push(prompt, rows(4, BLOCK_BYTES))
    hit = space.lookup(prompt)
    fetched = space.fetch(hit)
    assert space.report(
        hit, fetched, first_token_ms=12.5, prefill_ms=3, request_id="r-1", prompt_tokens=20
    )
    assert store.wait(lambda one: bool(one.outcomes))
    (sent,) = store.outcomes
    assert (sent.request_id, sent.prompt_tokens, sent.found_tokens) == ("r-1", 20, 16)
    assert (sent.loaded_tokens, sent.computed_tokens, sent.loaded_bytes) == (16, 4, 4 * BLOCK_BYTES)
    assert (sent.first_token_us, sent.prefill_us, sent.tier) == (12_500, 3_000, 1)
    assert sent.last_key == hit.keys[-1]
    assert sent.space_id
    assert sent.load_us > 0
    assert not sent.failed


def test_a_report_of_a_prefill_calibrates_its_cost(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    hit = space.lookup(tokens(2))
    truth = PrefillCost(100.0, 0.05)
    for count in (100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800):
        cached = count // 4
        took_ms = truth.prefill_us(count, cached) / 1e3
        told = {"prompt_tokens": count, "computed_tokens": count - cached, "prefill_ms": took_ms}
        space.report(hit, **told)
        space.report(hit, **(told | {"prefill_ms": 9 * took_ms}), failed=True)
    cost = space.observe_prefill(0, 0, 1.0)  # none, which is ignored
    assert cost is not None
    assert cost.a_us_per_token == pytest.approx(truth.a_us_per_token, rel=0.01)
    assert cost.b_us_per_token2 == pytest.approx(truth.b_us_per_token2, rel=0.01)


def test_a_report_of_what_was_held_out_says_so(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt = tokens(4)
    space.push(prompt, rows(4, BLOCK_BYTES))
    store.withhold = True
    hit = space.lookup(prompt)
    assert space.report(hit, first_token_ms=80, failed=True)
    assert store.wait(lambda one: bool(one.outcomes))
    (sent,) = store.outcomes
    assert (sent.loaded_tokens, sent.computed_tokens, sent.failed) == (0, 16, True)
    assert Reason.from_wire(sent.reason) is Reason.DECLINED_HOLDOUT


def test_a_report_waits_for_a_daemon_and_a_closed_client_takes_none(
    make: MakeClient, store: FakeStore
) -> None:
    space = make(transport=store.transport).space(MODEL)
    hit = space.lookup(tokens(2))
    store.restart()
    client = make(transport=store.transport)
    other = client.space(MODEL)
    assert other.report(hit, first_token_ms=1, failed=True, request_id="hurt")
    assert not store.outcomes
    other.lookup(tokens(2))
    assert store.wait(lambda one: bool(one.outcomes))
    (sent,) = store.outcomes
    assert (sent.request_id, sent.failed, sent.space_id) == ("hurt", True, 0)
    assert sent.last_key == hit.keys[-1]
    client.close()
    with pytest.raises(BadRequest, match="closed"):
        other.report(hit, first_token_ms=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_token_ms": -1},
        {"first_token_ms": float("nan")},
        {"prefill_ms": float("inf")},
        {"prefill_ms": True},
        {"computed_tokens": 1.5},
        {"prompt_tokens": -1},
        {"request_id": "x" * 129},
        {"fetched": "nothing"},
    ],
)
def test_a_report_that_cannot_be_is_misuse(
    make: MakeClient, store: FakeStore, wrong: dict[str, Any]
) -> None:
    space = make(transport=store.transport).space(MODEL)
    hit = space.lookup(tokens(2))
    with pytest.raises(BadRequest):
        space.report(hit, **wrong)
    with pytest.raises(BadRequest):
        space.report("a hit")


# ---------------------------------------------------------------- audits


def test_an_audit_is_asked_for_with_the_hit(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt = tokens(4)
    space.push(prompt, numbers(4))
    store.ask_for_audits = True
    assert space.lookup(prompt).audit
    assert not space.lookup(tokens(4, seed=5)).audit


def test_equal_blocks_are_compared_and_reported(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt, data = tokens(4), numbers(4)
    space.push(prompt, data)
    found = space.compare(prompt, data, request_id="a-1")
    assert (found.blocks, found.mismatched, found.first, found.worst) == (4, 0, None, 0)
    assert found.reason is Reason.OK
    (audit,) = store.audits
    assert (audit.blocks, audit.mismatched, audit.request_id) == (4, 0, "a-1")
    assert audit.key == space.keys(prompt)[0]
    assert store.wait(lambda one: bool(one.reports))
    assert {report.tokens for report in store.reports} == {0}, "nothing was saved by it"


def test_a_block_that_differs_is_named(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt, data = tokens(5), numbers(5)
    stored = data.copy()
    stored[3] = numbers(1, seed=9)[0]
    space.push(prompt, stored)
    found = space.compare(prompt, data[1:], first_block=1)
    assert (found.blocks, found.mismatched, found.first) == (4, 1, 3)
    assert found.worst > 1
    (audit,) = store.audits
    assert audit.key == space.keys(prompt)[3]
    assert audit.worst == pytest.approx(found.worst)
    lenient = space.compare(prompt, data, tolerance=Tolerance(0.0, 1e6))
    assert lenient.mismatched == 0


def test_only_what_is_stored_is_compared(make: MakeClient, store: FakeStore) -> None:
    space = make(transport=store.transport).space(MODEL)
    prompt, data = tokens(4), numbers(4)
    keys = space.keys(prompt)
    space.push(prompt, data)
    store.drop(keys[2:3])
    seen: list[int] = []

    def fill(index: int, row: Any) -> None:
        seen.append(index)
        row[:] = data[index]

    found = space.compare(keys, fill)
    assert (found.blocks, found.reason, seen) == (2, Reason.MISS_NEVER_STORED, [0, 1])
    store.drop(keys)
    nothing = space.compare(keys, fill)
    assert (nothing.blocks, nothing.reason) == (0, Reason.MISS_NEVER_STORED)
    assert len(store.audits) == 1
    assert space.compare(keys, data[:0], first_block=4).reason is Reason.NOTHING_TO_DO


def test_an_audit_never_raises_for_the_store_but_for_its_caller(
    make: MakeClient, store: FakeStore
) -> None:
    config = ClientConfig(deadline_ms=300)
    space = make("/nowhere/data.sock", config=config).space(MODEL)
    assert space.compare(tokens(2), numbers(2)).blocks == 0
    space = make(transport=store.transport).space(MODEL)
    space.push(tokens(2), numbers(2))
    with pytest.raises(BadRequest):
        space.compare(tokens(2), numbers(2)[:, :-2])
    with pytest.raises(BadRequest):
        space.compare(tokens(2), numbers(2), first_block=3)
    with pytest.raises(ZeroDivisionError):
        space.compare(tokens(2), lambda index, row: 1 // 0)


def test_a_prompt_of_several_calls_is_known_by_its_last_block(make: MakeClient) -> None:
    """Else its windows would be on different sides."""
    store = FakeStore(capacity_blocks=64, keys_per_call_max=2)
    asked: list[bytes] = []

    def answer(method: str, request: Any) -> Any:
        if method == "Lookup":
            asked.append(request.last_key)
        return store.answer(method, request)

    try:
        space = make(transport=FakeTransport.factory(answer, store.dial)).space(MODEL)
        prompt = tokens(5)
        keys = space.keys(prompt)
        space.push(prompt, rows(5, BLOCK_BYTES))
        assert space.lookup(prompt).blocks == 5
        assert asked == [keys[-1]] * 3
        asked.clear()
        space.lookup(keys[:2])
        assert asked == [b""], "the call's own last key says it"
    finally:
        store.close()


def test_no_more_reports_go_in_a_call_than_the_daemon_takes() -> None:
    session: Any = SimpleNamespace(secret=b"s")
    waiting = Releases()
    outcomes = [pb.RequestReport(request_id=str(index)) for index in range(600)]

    def add_all() -> None:
        for index, outcome in enumerate(outcomes):
            waiting.add(Release(session, 1 + index), 0)
            waiting.add(Release(session, 0, outcome=outcome), 0)

    add_all()
    calls = [request_of(batch) for batch in iter(lambda: waiting.take(session), [])]
    assert [len(call.requests) for call in calls] == [256, 256, 88]
    assert [lease for call in calls for lease in call.lease_ids] == list(range(1, 601))
    add_all()
    assert [one.outcome for one in waiting.end(session)] == outcomes[-256:], "the last ones"


def test_a_report_that_was_not_sent_is_not_said_twice() -> None:
    """What was measured may have arrived with an answer that did not."""
    session: Any = object()
    waiting = Releases()
    outcome = pb.RequestReport(request_id="r")
    batch = [Release(session, 0, outcome=outcome), Release(session, 7, pb.LoadReport(lease_id=7))]
    waiting.put_back(batch, 0, heard=True)
    assert waiting.take(session) == [Release(session, 7)]
    waiting.add(batch[0], 0)
    assert waiting.end(session) == [batch[0]], "but one that waits goes with the goodbye"
