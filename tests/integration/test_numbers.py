"""Numbers that can be trusted: a scripted run whose every counter the test computes by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.exposition import tenant_label
from tests.e2e.stage import BLOCK_TOKENS, Prompt, altered, model
from tests.integration.stack import Stack
from tests.rawclient import RawClient, Refused, reason

MODEL = model()
BLOCK_BYTES = 4096


class Expected:
    """What the counters have to be. `calls` by operation and reason."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.more: Counter[str] = Counter()

    def call(self, op: str, why: Reason, times: int = 1) -> None:
        self.calls[op, why.name] += times

    def assert_equal(self, found: dict[str, float]) -> None:
        """Every counter is as expected, and there is none that is not."""
        wanted = {
            f'kvstore_requests_total{{op="{op}",reason="{why}"}}': float(count)
            for (op, why), count in self.calls.items()
        }
        wanted |= {f"kvstore_{name}": float(count) for name, count in self.more.items() if count}
        counted = {
            name: value
            for name, value in found.items()
            if "seconds_sum" not in name and "request_seconds" not in name and value
        }
        # What was predicted for a load depends on how fast this machine was until then.
        predicted_s = counted.pop('kvstore_plan_load_seconds_total{decision="recompute"}')
        assert predicted_s > counted['kvstore_plan_recompute_seconds_total{decision="recompute"}']
        assert counted == pytest.approx(wanted)
        # Latencies count the same calls, by operation and result.
        by_op: Counter[str] = Counter()
        for (op, _), count in self.calls.items():
            by_op[op] += count
        for op, count in by_op.items():
            prefix = f'kvstore_request_seconds_count{{op="{op}",'
            timed = sum(value for name, value in found.items() if name.startswith(prefix))
            assert timed == count, op
        assert all(value >= 0 for value in found.values())


def test_a_scripted_run_is_counted_exactly(stack: Stack) -> None:
    want = Expected()
    tokens = 'lookup_tokens_total{tenant="default"}'
    hits = 'hit_tokens_total{tenant="default",tier="host"}'
    prompt, other = Prompt(MODEL, 1, blocks=8), Prompt(MODEL, 2, blocks=4)

    def looked(result: str, asked: int, found: int) -> None:
        want.more[f'lookups_total{{tenant="default",result="{result}"}}'] += 1
        want.more[tokens] += asked * BLOCK_TOKENS
        want.more[hits] += found * BLOCK_TOKENS

    with RawClient(stack.socket()) as client:
        want.call("attach", Reason.OK)
        space = client.open(MODEL).space_id
        want.call("open", Reason.OK)

        # Misses, asked twice: each is a lookup of its own.
        for _ in range(2):
            assert client.lookup(space, prompt.keys).hit_blocks == 0
            want.call("lookup", Reason.MISS_NEVER_STORED)
            looked("miss", 8, 0)

        # A put of six blocks, the second time nothing is wanted.
        assert client.put(space, prompt.keys[:6], prompt.rows()[:6]).visible == 6
        want.call("reserve", Reason.OK, 2)
        want.call("commit", Reason.OK)
        assert not client.put(space, prompt.keys[:6], prompt.rows()[:6]).visible

        # A put that is given up; its late commit, and its abort said twice.
        given_up = client.reserve(space, other.keys)
        want.call("reserve", Reason.OK)
        for _ in range(2):
            client.abort(given_up.lease_id)
            want.call("abort", Reason.OK)
        with pytest.raises(Refused):
            client.commit(given_up.lease_id)
        want.call("commit", Reason.LEASE_UNKNOWN)

        # A partial hit, a full one, and one that is declined.
        assert client.lookup(space, prompt.keys).hit_blocks == 6
        want.call("lookup", Reason.HIT)
        looked("hit", 8, 6)
        assert client.lookup(space, prompt.keys[:6]).hit_blocks == 6
        want.call("lookup", Reason.HIT)
        looked("hit", 6, 6)
        cheap = pb.PrefillCost(a_us_per_token=1e-3)
        client.lookup(space, prompt.keys[:6], prefill=cheap)
        want.call("lookup", Reason.DECLINED_RECOMPUTE_FASTER)
        looked("declined", 6, 0)
        want.more['declined_tokens_total{tenant="default"}'] += 6 * BLOCK_TOKENS
        prefill = 'plan_recompute_seconds_total{decision="recompute"}'
        want.more[prefill] = 6 * BLOCK_TOKENS * 1e-3 * 1e-6  # type: ignore[assignment]

        # A load that succeeds; its release is sent again, as after a lost answer.
        load = report(client.acquire(space, prompt.keys[:6]).lease_id, blocks=6, tokens=96)
        want.call("acquire", Reason.OK)
        for released in (1, 0):
            assert client.call("Release", load).released == released
            want.call("release", Reason.OK)
        loaded = 'loads_total{tenant="default",reason="%s"}'
        want.more[loaded % "OK"] += 1
        want.more[loaded % "LEASE_UNKNOWN"] += 1
        want.more['loaded_tokens_total{tenant="default"}'] += 96
        want.more['loaded_bytes_total{tenant="default"}'] += 6 * BLOCK_BYTES
        want.more['prefill_saved_seconds_total{tenant="default"}'] += 2

        # A load that fails: no tokens, no time saved.
        failed = report(
            client.acquire(space, prompt.keys[:6]).lease_id,
            blocks=0,
            tokens=96,
            why=Reason.GENERATION_CHANGED,
        )
        want.call("acquire", Reason.OK)
        client.call("Release", failed)
        want.call("release", Reason.OK)
        want.more[loaded % "GENERATION_CHANGED"] += 1

        # Two reports of one lease are one load; one of nobody's lease is none.
        twice = report(client.acquire(space, prompt.keys[:2]).lease_id, blocks=2, tokens=32)
        twice.reports.append(twice.reports[0])
        twice.reports.append(pb.LoadReport(lease_id=9_999, tokens=7, reason=pb.REASON_OK))
        want.call("acquire", Reason.OK)
        client.call("Release", twice)
        want.call("release", Reason.OK)
        want.more[loaded % "OK"] += 1
        want.more[loaded % "LEASE_UNKNOWN"] += 2
        want.more['loaded_tokens_total{tenant="default"}'] += 32
        want.more['loaded_bytes_total{tenant="default"}'] += 2 * BLOCK_BYTES
        want.more['prefill_saved_seconds_total{tenant="default"}'] += 2
        want.more['client_copy_seconds_count{tenant="default"}'] += 6

        # A miss by fingerprint, and a fingerprint that is held.
        stranger = client.open(altered(MODEL, "encoding", kv_dtype="float16")).space_id
        assert client.lookup(stranger, prompt.keys[:6]).hit_blocks == 0
        want.call("open", Reason.OK)
        want.call("lookup", Reason.MISS_INCOMPATIBLE)
        looked("miss", 6, 0)
        want.more['fingerprint_rejections_total{field="encoding.kv_dtype"}'] += 1
        client.open(model(revision=None))
        want.call("open", Reason.HELD_FOR_REVIEW)
        want.more["fingerprints_held_total"] += 1

        # Refusals.
        with pytest.raises(Refused):
            client.lookup(77, prompt.keys)
        want.call("lookup", Reason.SPACE_UNKNOWN)
        with pytest.raises(Refused):
            client.lookup(space, [b"short"])
        want.call("lookup", Reason.BAD_KEY_LENGTH)
        client.detach()
        want.call("detach", Reason.OK)
        with pytest.raises(Refused):
            client.lookup(space, prompt.keys)
        want.call("lookup", Reason.SESSION_UNKNOWN)

    want.assert_equal(stack.counters())
    # The trace has one record a call, with the same reasons; a release's is that of its loads.
    traced = Counter((record.verb, record.reason.name) for record in stack.records())
    assert sum(count for (verb, _), count in traced.items() if verb == "release") == 4
    for key in [key for key in (*traced, *want.calls) if key[0] == "release"]:
        traced.pop(key, None)
        want.calls.pop(key, None)
    assert traced == want.calls


def report(
    lease_id: int, *, blocks: int, tokens: int, why: Reason = Reason.OK
) -> pb.ReleaseRequest:
    load = pb.LoadReport(
        lease_id=lease_id,
        blocks=blocks,
        copy_us=500,
        reason=pb.Reason.ValueType(why),
        tokens=tokens,
        prefill_saved_us=2e6,
    )
    return pb.ReleaseRequest(lease_ids=[lease_id], reports=[load])


def test_tenants_are_counted_apart_and_add_up(make_stack: Any) -> None:
    stack: Stack = make_stack(tenants=("one", "two"))
    prompt = Prompt(MODEL, 3, blocks=5)
    for tenant, times in (("one", 2), ("two", 3)):
        with RawClient(stack.socket(tenant)) as client:
            space = client.open(MODEL).space_id
            client.put(space, prompt.keys, prompt.rows())
            for _ in range(times):
                client.lookup(space, prompt.keys)
    counters = stack.counters()
    for name in ("lookup_tokens_total", "hit_tokens_total"):
        found = {
            tenant: sum(
                value
                for key, value in counters.items()
                if key.startswith(f'kvstore_{name}{{tenant="{tenant_label(tenant)}"')
            )
            for tenant in ("one", "two")
        }
        assert found == {"one": 2 * 5 * BLOCK_TOKENS, "two": 3 * 5 * BLOCK_TOKENS}
    assert counters['kvstore_requests_total{op="lookup",reason="HIT"}'] == 5


def test_gauges_are_what_is_there(stack: Stack) -> None:
    prompt = Prompt(MODEL, 4, blocks=6)
    with RawClient(stack.socket()) as client, RawClient(stack.socket(), group=b"two") as second:
        space = client.open(MODEL).space_id
        second.open(model(revision=None))
        client.put(space, prompt.keys, prompt.rows())
        client.acquire(space, prompt.keys)
        client.acquire(space, prompt.keys, view=True)
        assert reason(client.reserve(space, Prompt(MODEL, 5, blocks=2).keys).reason) is Reason.OK
        stats = stack.ask(stack.store.core.stats)
        pool = stats.pools[0]
        assert (stats.sessions, stats.spaces_open, stats.spaces_held) == (2, 1, 1)
        assert (stats.read_leases, stats.view_leases, stats.write_leases) == (1, 1, 1)
        assert (pool.blocks, pool.block_bytes) == (6, 6 * BLOCK_BYTES)
        assert pool.staging_bytes == stack.limits.staging_bytes
        assert pool.used_bytes <= pool.capacity_bytes
        assert stats.tenants[0].blocks == 6
    assert stack.ask(lambda: stack.store.session_count) in (0, 1, 2)
