"""Every reason is provoked by some test, and the trace names the first stage that departed.

`WIRE` has those that a daemon answers: each is provoked here over its sockets, and its record is
looked at. `ELSEWHERE` has the others, with the test that provokes each or why nothing can yet.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from kvstore.model.reasons import Reason
from kvstore.model.record import Stage
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon, start_daemon
from tests.e2e.stage import ROOT, Prompt, altered, model, until
from tests.rawclient import CALL_S, RawAdmin, RawClient, Refused, reason, refused_as

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]

MODEL = model()
TWO = model(1 << 13, name="two", ranks=2)


@dataclass
class Scene:
    """A daemon with one prompt stored, and a client."""

    daemon: Daemon
    client: RawClient
    admin: RawAdmin
    seed: int
    others: list[RawClient] = field(default_factory=list)
    space: int = 0

    def __post_init__(self) -> None:
        self.space = self.client.open(MODEL).space_id
        self.stored = Prompt(MODEL, self.seed, blocks=8)
        self.client.put(self.space, self.stored.keys, self.stored.rows())

    def other(self, group: bytes = b"other") -> RawClient:
        client = RawClient(self.daemon.data_socket, group=group)
        self.others.append(client)
        return client

    def fresh(self, blocks: int = 4) -> list[bytes]:
        return [os.urandom(32) for _ in range(blocks)]

    def under_way(self, blocks: int = 4) -> list[bytes]:
        """Keys that somebody else has reserved."""
        keys, other = self.fresh(blocks), self.other()
        until("it is reserved", lambda: other.reserve(self.space, keys).lease_id)
        return keys

    def lookup(self, keys: list[bytes], **more: Any) -> Reason:
        return reason(self.client.lookup(self.space, keys, **more).reason)


def refused(call: Callable[[], Any]) -> Reason:
    """Of a call that ends with a status."""
    with pytest.raises(Refused) as error:
        call()
    return error.value.reason


# ---------------------------------------------------------------- how each comes about


def never_stored(scene: Scene) -> Reason:
    return scene.lookup(scene.fresh())


def hit(scene: Scene) -> Reason:
    assert scene.client.lookup(scene.space, scene.stored.keys).hit_blocks == 8
    return Reason.HIT


def nothing_to_do(scene: Scene) -> Reason:
    return scene.lookup([])


def stored(scene: Scene) -> Reason:
    return reason(scene.client.reserve(scene.space, scene.fresh()).reason)


def aborted(scene: Scene) -> Reason:
    request = pb.ReserveRequest(
        session=scene.client.secret, space_id=scene.space, chain=os.urandom(32)
    )
    return refused(lambda: scene.client.push([pb.PushChunk(reserve=request)]))


def cancelled(scene: Scene) -> Reason:
    keys = scene.under_way()
    request = pb.AcquireRequest(
        session=scene.client.secret, space_id=scene.space, keys=b"".join(keys), wait_ms=10_000
    )
    waiting = scene.client.stub.Acquire.future(request, timeout=CALL_S)
    until("it waits", lambda: scene.admin.stats().read_leases == 1)
    waiting.cancel()
    until("it was given up", lambda: scene.admin.stats().read_leases == 0)
    return Reason.CANCELLED


def deadline_exceeded(scene: Scene) -> Reason:
    """A commit that waits for another rank is not one: it answers. A reader that never reads is,
    unless the word that its own clock ran out comes before the daemon's has.
    """
    big = Prompt(model(1 << 20, name="big"), scene.seed, blocks=6)
    space = scene.client.open(big.fingerprint).space_id
    for _ in range(2):
        scene.client.put(space, big.keys, big.rows())
    request = pb.FetchRequest(session=scene.client.secret, space_id=space, keys=b"".join(big.keys))
    for _ in range(20):
        stream = scene.client.stub.Fetch(request, timeout=0.5)
        next(stream)
        time.sleep(0.7)
        stream.cancel()
        if scene.admin.call("Trace", last=1, outcome="DEADLINE_EXCEEDED").records:
            break
    return Reason.DEADLINE_EXCEEDED


def evicted(scene: Scene) -> Reason:
    for number in range(24):
        prompt = Prompt(MODEL, 10_000 + number, blocks=256)
        scene.client.put(scene.space, prompt.keys, prompt.rows())
    return scene.lookup(list(scene.stored.keys))


def incompatible(scene: Scene) -> Reason:
    space = scene.client.open(model(revision="r2")).space_id
    return reason(scene.client.lookup(space, scene.stored.keys).reason)


def stale(scene: Scene) -> Reason:
    scene.admin.call("SetWeightEpoch", model_name="tuned", epoch=9, why="test")
    old = altered(model(name="tuned"), "identity", weight_epoch=8)
    return reason(scene.client.open(old).reason)


def invalidated(scene: Scene) -> Reason:
    packed = b"".join(scene.stored.keys)
    scene.admin.call("Invalidate", space_id=scene.space, keys=packed, why="test")
    return scene.lookup(list(scene.stored.keys))


def in_progress(scene: Scene) -> Reason:
    keys = scene.under_way()
    return scene.lookup(keys)


def recompute_faster(scene: Scene) -> Reason:
    query = pb.Query(space_id=scene.space, keys=b"".join(scene.stored.keys))
    cheap = pb.PrefillCost(a_us_per_token=1e-6)
    request = pb.LookupRequest(queries=[query], prefill=cheap, prompt_tokens=129)
    return reason(scene.client.call("Lookup", request).plan.reason)


def held(scene: Scene) -> Reason:
    return reason(scene.client.open(model(name="held", revision=None)).reason)


def rejected(scene: Scene) -> Reason:
    fingerprint = model(name=f"rejected-{scene.seed}", revision=None)
    review_id = scene.client.open(fingerprint).review_id
    scene.admin.call("Review", review_id=review_id, approve=False, who="test")
    return reason(scene.client.open(fingerprint).reason)


def expired(scene: Scene) -> Reason:
    lease = scene.client.reserve(scene.space, scene.fresh(), ttl_ms=10).lease_id
    time.sleep(0.15)
    return refused(lambda: scene.client.commit(lease))


def lease_unknown(scene: Scene) -> Reason:
    return refused(lambda: scene.client.commit(10**12))


def session_unknown(scene: Scene) -> Reason:
    request = pb.LookupRequest(session=bytes(16))
    return refused(lambda: refused_as(lambda: scene.client.stub.Lookup(request, timeout=CALL_S)))


def space_unknown(scene: Scene) -> Reason:
    return refused(lambda: scene.client.lookup(10**12, scene.fresh()))


def space_closed(scene: Scene) -> Reason:
    space = scene.client.open(model(name="closed")).space_id
    scene.admin.call("Invalidate", model_name="closed", why="test")
    return refused(lambda: scene.client.lookup(space, scene.fresh()))


def generation_changed(scene: Scene) -> Reason:
    """The reader finds out; the daemon learns of it with the release."""
    lease = scene.client.acquire(scene.space, scene.stored.keys).lease_id
    report = pb.LoadReport(lease_id=lease, blocks=0, reason=pb.REASON_GENERATION_CHANGED)
    scene.client.call("Release", pb.ReleaseRequest(lease_ids=[lease], reports=[report]))
    return Reason.GENERATION_CHANGED


def group_failed(scene: Scene) -> Reason:
    space = scene.client.open(TWO).space_id
    peer = scene.other(b"engine")
    peer.open(TWO)
    keys = scene.fresh()
    lease = scene.client.reserve(space, keys, part=0).lease_id
    peer.reserve(space, keys, part=1)
    peer.detach()
    return reason(scene.client.commit(lease).reason)


def no_space(scene: Scene) -> Reason:
    """All of it is leased."""
    for number in range(17):
        prompt = Prompt(MODEL, 20_000 + number, blocks=256)
        scene.client.put(scene.space, prompt.keys, prompt.rows(), patience_s=0)
        scene.client.acquire(scene.space, prompt.keys)
    return reason(scene.client.reserve(scene.space, scene.fresh()).reason)


def staging_busy(scene: Scene) -> Reason:
    blocks = scene.client.welcome.limits.staging_bytes // 4096
    scene.client.reserve(scene.space, scene.fresh(blocks))
    return reason(scene.client.reserve(scene.space, scene.fresh()).reason)


def view_limit(scene: Scene) -> Reason:
    limit = scene.client.welcome.limits.view_bytes_per_session_max // 4096
    for number in range(limit // 256):
        prompt = Prompt(MODEL, 30_000 + number, blocks=256)
        scene.client.put(scene.space, prompt.keys, prompt.rows())
        assert scene.client.acquire(scene.space, prompt.keys, view=True).blocks == 256
    return scene.client.acquire(scene.space, scene.stored.keys, view=True).reason


def limit_leases(scene: Scene) -> Reason:
    most = scene.client.welcome.limits.leases_per_session_max
    request = pb.AcquireRequest(
        session=scene.client.secret, space_id=scene.space, keys=scene.stored.keys[0]
    )
    for _ in range(most // 500):
        calls = [scene.client.stub.Acquire.future(request, timeout=CALL_S) for _ in range(500)]
        assert all(call.result().lease_id for call in calls)
    return scene.client.acquire(scene.space, scene.stored.keys).reason


def limit_sessions(scene: Scene) -> Reason:
    for _ in range(5):
        scene.other()
    return refused(lambda: RawClient(scene.daemon.data_socket))


def limit_queue(scene: Scene) -> Reason:
    keys = scene.under_way()
    request = pb.AcquireRequest(
        session=scene.client.secret, space_id=scene.space, keys=b"".join(keys), wait_ms=10_000
    )
    waiting = [scene.client.stub.Acquire.future(request, timeout=CALL_S) for _ in range(8)]
    until("they wait", lambda: scene.admin.stats().read_leases == 8)
    try:
        return refused(lambda: scene.lookup(keys))
    finally:
        for call in waiting:
            call.cancel()


def draining(scene: Scene) -> Reason:
    scene.client.acquire(scene.space, scene.stored.keys)
    scene.admin.call("Drain", grace_s=5)
    until("it drains", lambda: scene.admin.stats().state == "draining")
    return reason(scene.client.reserve(scene.space, scene.fresh()).reason)


def no_durable_tier(scene: Scene) -> Reason:
    reserved = scene.client.reserve(scene.space, scene.fresh())
    return refused(lambda: scene.client.commit(reserved.lease_id, durable=True))


def bad_request(scene: Scene) -> Reason:
    return refused(lambda: scene.client.call("Lookup", pb.LookupRequest()))


def bad_key_length(scene: Scene) -> Reason:
    return refused(lambda: scene.client.lookup(scene.space, [b"short"]))


def bad_size(scene: Scene) -> Reason:
    return refused(lambda: scene.client.reserve(scene.space, scene.fresh(2), first=3))


def too_many_keys(scene: Scene) -> Reason:
    most = scene.client.welcome.limits.keys_per_call_max
    return refused(lambda: scene.client.lookup(scene.space, [bytes(32)] * (most + 1)))


def part_too_large(scene: Scene) -> Reason:
    size = 2 * scene.client.welcome.limits.part_bytes_max
    space = scene.client.open(model(size, name="wide")).space_id
    return reason(scene.client.reserve(space, scene.fresh()).reason)


def bad_part(scene: Scene) -> Reason:
    return reason(scene.client.reserve(scene.space, scene.fresh(), part=1).reason)


def bad_fingerprint(scene: Scene) -> Reason:
    fingerprint = convert.fingerprint_to_wire(MODEL)
    fingerprint.geometry.attention = "none"
    return refused(lambda: scene.client.call("Open", pb.OpenRequest(fingerprint=fingerprint)))


def bad_name(scene: Scene) -> Reason:
    return refused(lambda: RawClient(scene.daemon.data_socket, engine_id="a\nb"))


def protocol_version(scene: Scene) -> Reason:
    return refused(lambda: RawClient(scene.daemon.data_socket, major=99))


def not_supported(scene: Scene) -> Reason:
    return reason(scene.client.open(altered(MODEL, "encoding", codec="zip")).reason)


class Row(NamedTuple):
    """How it is provoked, and the first stage that departs; None: it is no trouble."""

    provoke: Callable[[Scene], Reason]
    departs: Stage | None
    settings: Mapping[str, Any] = MappingProxyType({})


PLAN, INPUT, PRECONDITIONS = Stage.PLAN, Stage.INPUT, Stage.PRECONDITIONS
MOVEMENT, VERIFICATION = Stage.MOVEMENT, Stage.VERIFICATION

WIRE: dict[Reason, Row] = {
    Reason.OK: Row(stored, None),
    Reason.HIT: Row(hit, None),
    Reason.NOTHING_TO_DO: Row(nothing_to_do, None),
    Reason.ABORTED: Row(aborted, MOVEMENT),
    Reason.CANCELLED: Row(cancelled, PLAN),
    Reason.MISS_NEVER_STORED: Row(never_stored, PLAN),
    Reason.MISS_EVICTED: Row(evicted, PLAN),
    Reason.MISS_INCOMPATIBLE: Row(incompatible, PRECONDITIONS),
    Reason.MISS_EPOCH_STALE: Row(stale, PRECONDITIONS),
    Reason.MISS_INVALIDATED: Row(invalidated, PLAN),
    Reason.MISS_IN_PROGRESS: Row(in_progress, PLAN),
    Reason.DECLINED_RECOMPUTE_FASTER: Row(recompute_faster, PLAN),
    Reason.HELD_FOR_REVIEW: Row(held, PRECONDITIONS),
    Reason.REJECTED_BY_REVIEW: Row(rejected, PRECONDITIONS),
    Reason.LEASE_EXPIRED: Row(expired, PRECONDITIONS),
    Reason.LEASE_UNKNOWN: Row(lease_unknown, PRECONDITIONS),
    Reason.SESSION_UNKNOWN: Row(session_unknown, INPUT),
    Reason.SPACE_UNKNOWN: Row(space_unknown, PRECONDITIONS),
    Reason.SPACE_CLOSED: Row(space_closed, PRECONDITIONS),
    Reason.GENERATION_CHANGED: Row(generation_changed, VERIFICATION),
    Reason.WRITE_GROUP_FAILED: Row(group_failed, VERIFICATION),
    Reason.NO_SPACE: Row(no_space, PLAN),
    Reason.STAGING_BUSY: Row(staging_busy, PLAN),
    Reason.VIEW_LIMIT: Row(view_limit, PLAN),
    Reason.LIMIT_LEASES: Row(limit_leases, PLAN),
    Reason.LIMIT_SESSIONS: Row(limit_sessions, PRECONDITIONS, {"limits__sessions_max": 6}),
    Reason.LIMIT_QUEUE: Row(limit_queue, INPUT, {"limits__concurrent_calls_max": 8}),
    Reason.DEADLINE_EXCEEDED: Row(deadline_exceeded, VERIFICATION),
    Reason.DRAINING: Row(draining, PLAN, {"server__drain_grace_s": 3}),
    Reason.NO_DURABLE_TIER: Row(no_durable_tier, PRECONDITIONS),
    Reason.BAD_REQUEST: Row(bad_request, PRECONDITIONS),
    Reason.BAD_KEY_LENGTH: Row(bad_key_length, PRECONDITIONS),
    Reason.BAD_SIZE: Row(bad_size, PRECONDITIONS),
    Reason.TOO_MANY_KEYS: Row(too_many_keys, PRECONDITIONS),
    Reason.PART_TOO_LARGE: Row(part_too_large, PRECONDITIONS),
    Reason.BAD_PART: Row(bad_part, PRECONDITIONS),
    Reason.BAD_FINGERPRINT: Row(bad_fingerprint, PRECONDITIONS),
    Reason.BAD_NAME: Row(bad_name, INPUT),
    Reason.PROTOCOL_VERSION: Row(protocol_version, INPUT),
    Reason.NOT_SUPPORTED: Row(not_supported, PRECONDITIONS),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("reasons")
    with start_daemon(folder, host__capacity_bytes="16MiB") as daemon:
        yield daemon


def rows() -> Iterator[Any]:
    for wanted in WIRE:
        yield pytest.param(wanted, id=wanted.name)


@pytest.mark.parametrize("wanted", list(rows()))
def test_provoked_and_traced(shared: Daemon, daemons: Daemons, wanted: Reason) -> None:
    row = WIRE[wanted]
    daemon = daemons(host__capacity_bytes="16MiB", **row.settings) if row.settings else shared
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        scene = Scene(daemon, client, admin, seed=int(wanted))
        try:
            assert row.provoke(scene) is wanted
            find = partial(admin.call, "Trace", last=1, outcome=wanted.name)
            (line,) = until("there is a record", lambda: find().records)
        finally:
            for other in scene.others:
                other.close()
    record = json.loads(line)
    assert record["reason"] == wanted.name
    assert record["origin"] == wanted.origin.value
    assert record["departed"] == (None if row.departs is None else row.departs.name.lower())


def test_a_cost_that_is_unknown_is_said_in_the_plan(shared: Daemon) -> None:
    with RawClient(shared.data_socket) as client, RawAdmin(shared.admin_socket) as admin:
        scene = Scene(shared, client, admin, seed=1)
        query = pb.Query(space_id=scene.space, keys=b"".join(scene.stored.keys))
        request = pb.LookupRequest(queries=[query], prompt_tokens=200, request_id="cost")
        assert reason(client.call("Lookup", request).plan.reason) is Reason.COST_UNKNOWN
        (line,) = admin.call("Trace", request_id="cost").records
        assert json.loads(line)["plan"]["reason"] == "COST_UNKNOWN"


def test_pins_are_bounded(shared: Daemon) -> None:
    """The operator's own calls leave no record: it reads the answer."""
    with RawClient(shared.data_socket) as client, RawAdmin(shared.admin_socket) as admin:
        space = client.open(MODEL).space_id
        pins: list[int] = []
        for number in range(20):
            prompt = Prompt(MODEL, 40_000 + number, blocks=256)
            client.put(space, prompt.keys, prompt.rows())
            pinned = admin.call("Pin", space_id=space, keys=b"".join(prompt.keys))
            pins.append(pinned.pin_id)
            if reason(pinned.reason) is Reason.PIN_LIMIT:
                break
        for pin_id in pins:
            admin.call("Unpin", pin_id=pin_id)
        assert reason(pinned.reason) is Reason.PIN_LIMIT


# ---------------------------------------------------------------- those that come from elsewhere

HERE = "tests/e2e/test_reasons.py"
NOT_YET: dict[Reason, str] = {
    Reason.ALREADY_PRESENT: "a reservation counts present blocks in `present`",
    Reason.ALREADY_RESERVED: "a reservation counts others' blocks in `reserved`",
    Reason.NOT_ADMITTED: "commits are always admitted to memory",
    Reason.QUOTA_EXCEEDED: "quotas are soft: a tenant over its own evicts its own",
    Reason.DECLINED_GUARD: "a guard belongs to the disk tier, which no setting turns on yet",
}
ELSEWHERE: dict[Reason, str] = {
    Reason.UNSPECIFIED: "tests/unit/model/test_reasons.py",
    Reason.COST_UNKNOWN: HERE,
    Reason.DECLINED_HOLDOUT: "tests/integration/test_evidence.py",
    Reason.HELD_BY_AUDIT: "tests/e2e/test_audit.py",
    Reason.DECLINED_SHADOW: "tests/integration/test_evidence.py",
    Reason.MISS_NOT_ADMITTED: "tests/unit/core/test_moves.py",
    Reason.MISS_CORRUPT: "tests/unit/core/test_reads.py",
    Reason.UNCACHEABLE: "tests/unit/model/test_keys.py",
    Reason.REGION_UNKNOWN: "tests/e2e/test_must_hold_tenants.py",
    Reason.PIN_LIMIT: HERE,
    Reason.DISK_FULL: "tests/unit/test_mover.py",
    Reason.COPY_FAILED: "tests/unit/core/test_writes.py",
    Reason.UNAVAILABLE: "tests/e2e/test_must_hold_outages.py",
    Reason.BREAKER_OPEN: "tests/e2e/test_must_hold_outages.py",
    Reason.IO_ERROR: "tests/unit/test_mover.py",
    Reason.MESSAGE_TOO_LARGE: "tests/e2e/test_must_hold_input.py",
    Reason.BAD_TOKENS: "tests/unit/model/test_keys.py",
    Reason.BAD_EXTRAS: "tests/unit/model/test_keys.py",
    Reason.PERMISSION_DENIED: "tests/e2e/test_must_hold_tenants.py",
    Reason.START_MEMORY: "tests/unit/test_memory_budget.py",
    Reason.START_LOCKED: "tests/unit/server/test_locks.py",
    Reason.START_SETTINGS: "tests/unit/test_config.py",
    Reason.START_DISK: "tests/unit/test_ledger.py",
    Reason.START_SOCKET: "tests/unit/server/test_locks.py",
    Reason.INTERNAL: "tests/integration/test_services.py",
}


def test_every_reason_has_its_test() -> None:
    assert set(WIRE) | set(ELSEWHERE) | set(NOT_YET) == set(Reason)
    assert not set(WIRE) & (set(ELSEWHERE) | set(NOT_YET))
    assert not set(ELSEWHERE) & set(NOT_YET)


@pytest.mark.parametrize("wanted", list(ELSEWHERE), ids=lambda wanted: wanted.name)
def test_the_test_elsewhere_is_there(wanted: Reason) -> None:
    text = Path(ROOT, ELSEWHERE[wanted]).read_text(encoding="utf-8")
    assert f"Reason.{wanted.name}" in text


def test_a_reason_that_cannot_occur_yet_does_not(shared: Daemon) -> None:
    """Not in anything that this module's daemon has answered."""
    with RawAdmin(shared.admin_socket) as admin:
        seen = {json.loads(line)["reason"] for line in admin.call("Trace", last=4_000).records}
    assert seen.isdisjoint(wanted.name for wanted in NOT_YET)
