"""The operator's verbs under load of real clients, and the numbers: what goes in must come out."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, assert_quiet, model, until
from tests.rawclient import RawAdmin, RawClient, Refused, reason

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
CAPACITY = 8 << 20


def flood(client: RawClient, space: int, seed: int, capacity_bytes: int = CAPACITY) -> None:
    """Puts twice what fits."""
    for number in range(2 * capacity_bytes // (256 * 4096)):
        prompt = Prompt(model(), seed + number, blocks=256)
        client.put(space, prompt.keys, prompt.rows())


def test_pinned_blocks_outlive_a_flood_and_unpinned_ones_do_not(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes=CAPACITY)
    prompt = Prompt(model(), 1, blocks=32)
    packed = b"".join(prompt.keys)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        pinned = admin.call("Pin", space_id=space, keys=packed)
        assert (pinned.pinned, reason(pinned.reason)) == (32, Reason.OK)
        assert admin.stats().pins == 1
        flood(client, space, 1_000)
        prompt.assert_right(client.get(space, prompt.keys))
        assert admin.call("Unpin", pin_id=pinned.pin_id).known
        assert not admin.call("Unpin", pin_id=pinned.pin_id).known
        flood(client, space, 2_000)
        assert client.get(space, prompt.keys) == [None] * 32
        # No more than half of a tier may be pinned; a prefix of what was asked for is.
        filling = Prompt(model(), 3, blocks=1_500)
        client.put(space, filling.keys, filling.rows())
        present = client.lookup(space, filling.keys).hit_blocks
        most = admin.call("Pin", space_id=space, keys=b"".join(filling.keys[:present]))
        assert reason(most.reason) is Reason.PIN_LIMIT
        assert 0 < most.pinned * 4096 <= CAPACITY // 2
        # Pinned blocks can still be invalidated.
        admin.call("Invalidate", space_id=space, why="test")
        assert admin.stats().tiers[0].blocks == 0
        admin.call("Unpin", pin_id=most.pin_id)
        client.close()
        assert_quiet(admin, 4096)


@pytest.mark.parametrize("target", ["space_id", "model_name", "everything", "keys"])
def test_invalidated_blocks_are_invisible_before_the_answer(daemons: Daemons, target: str) -> None:
    """Also those reserved before and committed after, with clients that read and write on."""
    daemon = daemons(host__capacity_bytes=CAPACITY)
    prompt = Prompt(model(), 1, blocks=64)
    kept = Prompt(model(name="kept"), 1, blocks=8)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        other = client.open(model(name="kept")).space_id
        client.put(space, prompt.keys, prompt.rows())
        client.put(other, kept.keys, kept.rows())
        late = Prompt(model(), 2, blocks=4)
        reserved = client.reserve(space, late.keys)
        client.fill(reserved, late.rows())
        packed = b"".join([*prompt.keys, *late.keys])
        requests: dict[str, dict[str, Any]] = {
            "space_id": {"space_id": space},
            "model_name": {"model_name": "small"},
            "everything": {"everything": True},
            "keys": {"space_id": space, "keys": packed},
        }
        dropped = admin.call("Invalidate", why="test", **requests[target])
        assert dropped.dropped_blocks == (72 if target == "everything" else 64)
        try:
            committed = client.commit(reserved.lease_id).visible
        except Refused as refused:
            committed = 0
            print(f"the commit was refused: {refused}")
        assert committed == 0
        again = client.open(model()).space_id
        assert (again == space) == (target == "keys")
        for keys in (prompt.keys, late.keys):
            assert client.get(again, keys) == [None] * len(keys)
        if target == "keys":
            assert reason(client.lookup(again, prompt.keys).reason) is Reason.MISS_INVALIDATED
        if target != "everything":
            kept.assert_right(client.get(other, kept.keys))
        client.put(again, prompt.keys, prompt.rows(1))
        prompt.assert_right(client.get(again, prompt.keys), (1,))
        client.close()
        assert_quiet(admin)


def test_invalidation_beside_writers_never_brings_the_old_back(daemons: Daemons) -> None:
    """Versions of one prompt, each invalidated: after the answer no older one is ever read."""
    daemon = daemons(host__capacity_bytes=CAPACITY)
    prompt = Prompt(model(), 1, blocks=16)
    wrong: list[str] = []
    with RawAdmin(daemon.admin_socket) as admin, RawClient(daemon.data_socket) as writer:
        space = writer.open(model()).space_id
        floor = [0]
        stop = threading.Event()

        def read() -> None:
            with RawClient(daemon.data_socket, group=b"reader") as reader:
                there = reader.open(model()).space_id
                while not stop.is_set():
                    oldest = floor[0]
                    for index, row in enumerate(reader.get(there, prompt.keys)):
                        tags = range(oldest, 200)
                        found = None if row is None else prompt.finding(index, row, tags)
                        if found is not None and found.name != "RIGHT":
                            wrong.append(f"older than {oldest}, or {found}")

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for version in range(60):
            writer.put(space, prompt.keys, prompt.rows(version))
            admin.call("Invalidate", space_id=space, keys=b"".join(prompt.keys), why="next")
            floor[0] = version + 1
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_drain_lets_running_work_end_and_takes_nothing_new(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes=CAPACITY, server__drain_grace_s=10)
    prompt = Prompt(model(), 1, blocks=8)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        late = Prompt(model(), 2, blocks=4)
        reserved = client.reserve(space, late.keys)
        client.fill(reserved, late.rows())
        assert admin.call("Drain", grace_s=10).sessions == 1
        until("it drains", lambda: admin.stats().state == "draining")
        refusal = client.reserve(space, [bytes(32)])
        assert (refusal.lease_id, reason(refusal.reason)) == (0, Reason.DRAINING)
        prompt.assert_right(client.get(space, prompt.keys))
        with pytest.raises(Refused) as refused:
            RawClient(daemon.data_socket)
        assert refused.value.reason is Reason.DRAINING
        assert client.commit(reserved.lease_id).visible == 4
        assert daemon.wait(10) == 0  # well before the grace time: nothing is under way any more


def test_a_client_by_stream_is_told_of_the_drain(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes=CAPACITY, server__drain_grace_s=5)
    with RawClient(daemon.data_socket, fd=False) as client, RawAdmin(daemon.admin_socket) as admin:
        admin.call("Drain")
        event = client.next_event()
        assert reason(event.notice.reason) is Reason.DRAINING
        assert daemon.wait(10) == 0


# ---------------------------------------------------------------- numbers


def metrics(daemon: Daemon) -> dict[str, float]:
    with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def test_counters_equal_what_was_done(daemons: Daemons) -> None:
    """A script with known hits, misses, retries, aborts and failed loads."""
    daemon = daemons(host__capacity_bytes="16MiB")
    prompt = Prompt(model(), 1, blocks=8)
    absent = Prompt(model(), 2, blocks=4)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        for _ in range(3):
            assert client.lookup(space, prompt.keys).hit_blocks == 8  # asked twice is counted twice
        client.lookup(space, [*prompt.keys[:4], *absent.keys])
        client.lookup(space, absent.keys)
        client.lookup(space, [])
        client.abort(client.reserve(space, absent.keys).lease_id)
        assert client.reserve(space, prompt.keys).present == 8
        for loaded in (Reason.OK, Reason.GENERATION_CHANGED):
            leased = client.acquire(space, prompt.keys)
            report = pb.LoadReport(
                lease_id=leased.lease_id, blocks=8, copy_us=50, tokens=128, prefill_saved_us=2_000
            )
            report.reason = pb.Reason.ValueType(loaded)
            release = pb.ReleaseRequest(lease_ids=[leased.lease_id], reports=[report])
            assert client.call("Release", release).released == 1
        assert client.call("Release", release).unknown == 1  # sent again, it counts for nothing
        tokens = 16
        seen = metrics(daemon)
        assert seen['kvstore_lookup_tokens_total{tenant="default"}'] == (24 + 8 + 4) * tokens
        assert seen['kvstore_hit_tokens_total{tenant="default",tier="host"}'] == (24 + 4) * tokens
        assert seen['kvstore_lookups_total{result="hit",tenant="default"}'] == 4
        assert seen['kvstore_lookups_total{result="miss",tenant="default"}'] == 1
        assert seen['kvstore_loads_total{reason="OK",tenant="default"}'] == 1
        # Once with its lease, and once more as what was sent again.
        assert seen['kvstore_loads_total{reason="GENERATION_CHANGED",tenant="default"}'] == 2
        assert seen['kvstore_loaded_tokens_total{tenant="default"}'] == 128
        assert seen['kvstore_prefill_saved_seconds_total{tenant="default"}'] == pytest.approx(0.002)
        assert seen['kvstore_tier_blocks{tier="host"}'] == 8
        assert seen['kvstore_tier_block_bytes{tier="host"}'] == 8 * 4096
        assert all(value >= 0 for value in seen.values())
        (tenant,) = admin.stats().tenants
        assert (tenant.lookup_tokens, tenant.hit_tokens) == (36 * tokens, 28 * tokens)
        before = metrics(daemon)
        client.get(space, prompt.keys)
        after = metrics(daemon)
        fallen = [n for n in before if n.endswith("_total") and after.get(n, 0) < before[n]]
        assert fallen == []
    daemon.kill()
    daemon.start()
    fresh = metrics(daemon)
    assert fresh['kvstore_tier_blocks{tier="host"}'] == 0
    assert fresh["kvstore_sessions"] == 0


def give_up(client: RawClient, reserved: pb.ReserveReply, prompt: Prompt, way: int) -> None:
    """Commits in time or too late, releases, aborts twice, or forgets a reservation."""
    if way == 0:
        client.fill(reserved, prompt.rows())
        with contextlib.suppress(Refused):
            client.commit(reserved.lease_id)
    elif way == 1:
        assert client.release(reserved.lease_id).released == 1
    elif way == 2:
        client.abort(reserved.lease_id)
        assert not client.abort(reserved.lease_id).known


def test_what_comes_in_goes_out_after_everything(daemons: Daemons) -> None:
    """Thousands of requests given up at every point; then all of the capacity is of use again."""
    daemon = daemons(host__capacity_bytes=CAPACITY)
    with RawAdmin(daemon.admin_socket) as admin:
        client = RawClient(daemon.data_socket)
        space = client.open(model()).space_id
        stored = Prompt(model(), 1, blocks=64)
        client.put(space, stored.keys, stored.rows())
        for turn in range(400):
            leased = client.acquire(space, stored.keys[: 1 + turn % 64], view=turn % 2 == 0)
            fresh = Prompt(model(), 100_000 + turn, blocks=4)
            reserved = client.reserve(space, fresh.keys, ttl_ms=20 if turn % 3 else 0)
            for _ in range(2):  # polled twice is leased twice
                client.lookup(space, fresh.keys)
            if reserved.lease_id:
                give_up(client, reserved, fresh, turn % 5)
            else:  # what expires keeps its staging for as long as its writer may still write
                assert reason(reserved.reason) is Reason.STAGING_BUSY
                client.close()
                client = RawClient(daemon.data_socket)
                assert client.open(model()).space_id == space
                continue
            released = client.release(leased.lease_id, leased.lease_id)
            assert (released.released, released.unknown) == (1, 1)
        client.close()
        assert_quiet(admin, 4096, 40)
        with RawClient(daemon.data_socket, group=b"after") as after:
            space = after.open(model()).space_id
            capacity = 0
            for number in range(16):
                prompt = Prompt(model(), 500_000 + number, blocks=256)
                done = after.put(space, prompt.keys, prompt.rows())
                assert done.visible == 256
                capacity = max(capacity, admin.stats().tiers[0].blocks)
            # All but staging (an eighth) and headers.
            assert capacity * 4096 > CAPACITY * 0.8
        assert_quiet(admin, 4096)


def test_the_trace_tells_a_requests_story(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    prompt = Prompt(model(), 1, blocks=4)
    with (
        RawClient(daemon.data_socket, engine_id="engine-7") as client,
        RawAdmin(daemon.admin_socket) as admin,
    ):
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows(), request_id="req-1")
        client.lookup(space, prompt.keys, request_id="req-1", prompt_tokens=80)
        client.get(space, prompt.keys, request_id="req-1")
        records = [json.loads(line) for line in admin.call("Trace", request_id="req-1").records]
        assert [record["verb"] for record in records] == ["reserve", "lookup", "acquire"]
        assert {record["engine_id"] for record in records} == {"engine-7"}
        assert {record["departed"] for record in records} == {None}
        lookup = records[1]
        assert (lookup["outcome"], lookup["asked"], lookup["handed_on"]) == ("hit", 64, 64)
        assert lookup["plan"]["load_blocks"] == 4
        assert len(lookup["hash_ids"]) == 4
        stages = lookup["stages_us"]
        assert sum(stages.values()) == pytest.approx(lookup["total_us"], abs=1.0)
        missed = admin.call("Trace", outcome="MISS_NEVER_STORED").records
        assert missed == []
