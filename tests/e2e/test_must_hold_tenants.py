"""Tenants: what is another's looks like what never was, and nobody takes another's share."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore.testing.payload import LINE_BYTES, payload, tag_of
from kvstore.wire import convert
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon, start_daemon
from tests.e2e.stage import Bytes, Prompt, assert_quiet, model, record
from tests.rawclient import CALL_S, FdChannel, RawAdmin, RawClient, Refused, reason, refused_as

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
Note = Callable[[str, object], None]

SMALL, LARGE = model(1 << 16, name="small"), model(1 << 20, name="large")
CAPACITY = 48 << 20
PUTS = 200
REGION = (4 << 20) + 4096
"""Of 1 MiB slots: what a tenant lacks at most because memory changes hands by regions."""


def two_tenants(
    daemons: Daemons, capacity_bytes: int = CAPACITY, staging_bytes: int | None = None
) -> Daemon:
    return daemons(
        host__capacity_bytes=capacity_bytes,
        host__staging_bytes=staging_bytes,
        tenants__a__socket="a.sock",
        tenants__b__socket="b.sock",
    )


# ---------------------------------------------------------------- shares


def tenant_bytes(admin: RawAdmin, name: str) -> tuple[int, int]:
    (found,) = [one for one in admin.stats().tenants if one.tenant == name]
    return found.used_bytes, found.quota_bytes


def share_bytes(admin: RawAdmin, name: str) -> float:
    """The tenant's quota, of what staging leaves for blocks."""
    stats = admin.stats()
    host = stats.tiers[0]
    quotas = sum(one.quota_bytes for one in stats.tenants)
    left = host.capacity_bytes - host.staging_bytes
    return tenant_bytes(admin, name)[1] * min(1.0, left / quotas)


def fill_up(client: Client, admin: RawAdmin) -> list[bytes]:
    """Tenant a's 64 KiB blocks until they are evicted; the tags of all that was ever written."""
    space = client.space(SMALL)
    tags = []
    for number in range(CAPACITY // (32 << 16) + 8):
        prompt = Prompt(SMALL, 1_000 + number, blocks=32, tenant="a")
        tags += [prompt.tag(index) for index in range(32)]
        space.push(prompt.keys, np.stack(prompt.rows()))
    assert admin.stats().tiers[0].evictions > 0
    return tags


def foreign_lines(client: RawClient, tags: np.ndarray) -> int:
    """Lines in any region that this client was ever given which carry one of `tags`."""
    found = 0
    for mapped in client.regions.values():
        lines = np.asarray(mapped.memory.u8).reshape(-1, LINE_BYTES)[:, :8]
        words = np.ascontiguousarray(lines).view("<u8").reshape(-1)
        found += int(np.isin(words, tags).sum())
    return found


def words(tags: list[bytes]) -> np.ndarray:
    return np.array([int.from_bytes(tag[:8], "little") for tag in tags], "<u8")


def map_all(client: RawClient) -> None:
    """Asks for every region id that could exist, and maps what is given."""
    for region_id in range(1, 400):
        if region_id not in client.regions:
            reply, fds = client.the_fd().ask(get_region=fd_pb2.GetRegion(region_id=region_id))
            if fds:
                client.adopt(reply.region, fds[0])
            else:
                assert reason(reply.reason) is Reason.REGION_UNKNOWN


@pytest.mark.parametrize("staging_bytes", [1 << 20, None], ids=["small-staging", "usual-staging"])
def test_another_tenant_gets_its_share_within_200_puts(
    daemons: Daemons, record_property: Note, staging_bytes: int | None
) -> None:
    daemon = two_tenants(daemons, staging_bytes=staging_bytes)
    with RawAdmin(daemon.admin_socket) as admin:
        with (
            Client(daemon.data_sockets["a"], config=ClientConfig(deadline_ms=10_000)) as a,
            RawClient(daemon.data_sockets["b"]) as b,
        ):
            tags = words(fill_up(a, admin))
            assert len(set(tags.tolist())) > 500
            space = b.open(LARGE).space_id
            stored, enough_at = 0, 0
            own: list[bytes] = []
            for number in range(1, PUTS + 1):
                prompt = Prompt(LARGE, 50_000 + number, blocks=1, tenant="b")
                stored += b.put(space, prompt.keys, prompt.rows()).visible
                row = b.get(space, prompt.keys)[0]
                if row is not None:
                    prompt.assert_right([row])
                own.append(prompt.tag(0))
                share = share_bytes(admin, "b")
                if not enough_at and tenant_bytes(admin, "b")[0] > share - REGION:
                    enough_at = number
                b.unmap()
            used, quota = tenant_bytes(admin, "b")
            record(record_property, "puts_until_quota_share", enough_at, "puts")
            record(record_property, "share_of_quota", used / quota, "ratio")
            record(record_property, "share_of_what_staging_leaves", used / share, "ratio")
            record(record_property, "blocks_stored_of_200", stored, "blocks")
            assert enough_at, f"{used} of {quota} bytes after {PUTS} puts"
            map_all(b)
            assert len(b.regions) >= 4
            assert foreign_lines(b, tags) == 0
            assert foreign_lines(b, words(own)) > 0, "the search finds nothing at all"
            # The first one keeps its share, too, and its blocks are right.
            assert tenant_bytes(admin, "a")[0] > share_bytes(admin, "a") - REGION
        assert_quiet(admin)


def test_memory_that_changes_hands_is_never_seen_by_its_next_owner(daemons: Daemons) -> None:
    """Two tenants push one another out, over and over; neither ever maps a byte of the other."""
    daemon = two_tenants(daemons, 16 << 20)
    seed = 4_242
    print(f"seed {seed}")
    written: dict[str, list[bytes]] = {"a": [], "b": []}
    with (
        RawAdmin(daemon.admin_socket) as admin,
        RawClient(daemon.data_sockets["a"]) as a,
        RawClient(daemon.data_sockets["b"]) as b,
    ):
        rng = np.random.default_rng(seed)
        clients = {"a": a, "b": b}
        for turn in range(40):
            name = "ab"[int(rng.integers(2))]
            client = clients[name]
            fingerprint = (SMALL, LARGE, model(4096))[int(rng.integers(3))]
            space = client.open(fingerprint).space_id
            blocks = int(min((4 << 20) // Prompt(fingerprint, 0, 1).block_bytes, 128))
            prompt = Prompt(fingerprint, seed + turn, blocks, tenant=name)
            client.put(space, prompt.keys, prompt.rows())
            written[name] += [prompt.tag(index) for index in range(blocks)]
            client.get(space, prompt.keys)
            for each in clients.values():
                each.unmap()
        for name, other in (("a", "b"), ("b", "a")):
            map_all(clients[name])
            assert foreign_lines(clients[name], words(written[other])) == 0
            assert foreign_lines(clients[name], words(written[name])) > 0
        assert admin.stats().tiers[0].evictions > 0


# ---------------------------------------------------------------- look-alikes

NEVER = 10**9 + 7
"""An id that was never given to anybody."""
NOBODY = bytes(16)


@dataclass(frozen=True)
class Names:
    """What a request names: of the other tenant, or of nobody."""

    session: bytes
    space: int
    lease: int
    region: int


Calls = Callable[[RawClient, Names], Any]
KEYS = Prompt(SMALL, 77, blocks=4, tenant="a").keys
PACKED = b"".join(KEYS)


def _unary(method: str, request: Callable[[bytes, Names], Any]) -> tuple[Calls, Calls]:
    """(as oneself, naming another's things; as the other's session)."""

    def call(client: RawClient, message: Any) -> Any:
        return refused_as(lambda: getattr(client.stub, method)(message, timeout=CALL_S))

    return (
        lambda client, names: call(client, request(client.secret, names)),
        lambda client, names: call(client, request(names.session, names)),
    )


def _stream(method: str, request: Callable[[bytes, Names], Any]) -> tuple[Calls, Calls]:
    def call(client: RawClient, message: Any) -> Any:
        return refused_as(lambda: list(getattr(client.stub, method)(message, timeout=CALL_S)))

    return (
        lambda client, names: call(client, request(client.secret, names)),
        lambda client, names: call(client, request(names.session, names)),
    )


def _push(secret: bytes, names: Names) -> Iterator[pb.PushChunk]:
    reserve = pb.ReserveRequest(session=secret, space_id=names.space, chain=PACKED)
    return iter(
        [
            pb.PushChunk(reserve=reserve),
            pb.PushChunk(header=pb.ChunkHeader(block=0), payload=bytes(1 << 16)),
            pb.PushChunk(commit=True),
        ]
    )


CALLS: dict[str, tuple[Calls, Calls]] = {
    "Detach": _unary("Detach", lambda secret, names: pb.DetachRequest(session=secret)),
    "Open": _unary(
        "Open",
        lambda secret, names: pb.OpenRequest(
            session=secret, fingerprint=convert.fingerprint_to_wire(model(name="own"))
        ),
    ),
    "Lookup": _unary(
        "Lookup",
        lambda secret, names: pb.LookupRequest(
            session=secret, queries=[pb.Query(space_id=names.space, keys=PACKED)]
        ),
    ),
    "Acquire": _unary(
        "Acquire",
        lambda secret, names: pb.AcquireRequest(session=secret, space_id=names.space, keys=PACKED),
    ),
    "Release": _unary(
        "Release",
        lambda secret, names: pb.ReleaseRequest(
            session=secret,
            lease_ids=[names.lease],
            reports=[
                pb.LoadReport(lease_id=names.lease, blocks=4, copy_us=10, reason=pb.REASON_OK)
            ],
        ),
    ),
    "Reserve": _unary(
        "Reserve",
        lambda secret, names: pb.ReserveRequest(session=secret, space_id=names.space, chain=PACKED),
    ),
    "Commit": _unary(
        "Commit", lambda secret, names: pb.CommitRequest(session=secret, lease_id=names.lease)
    ),
    "Abort": _unary(
        "Abort", lambda secret, names: pb.AbortRequest(session=secret, lease_id=names.lease)
    ),
    "Fetch": _stream(
        "Fetch",
        lambda secret, names: pb.FetchRequest(session=secret, space_id=names.space, keys=PACKED),
    ),
    "Push": _unary("Push", _push),
    "Explain": _unary(
        "Explain",
        lambda secret, names: pb.ExplainRequest(session=secret, space_id=names.space, keys=PACKED),
    ),
}


def answer(call: Calls, client: RawClient, names: Names) -> Any:
    """All that a caller sees: the reply's bytes, or status, text and metadata."""
    try:
        reply = call(client, names)
    except Refused as refused:
        return refused.answer
    messages = reply if isinstance(reply, list) else [reply]
    return [message.SerializeToString(deterministic=True) for message in messages]


def test_every_call_of_the_service_is_covered() -> None:
    service = pb.DESCRIPTOR.services_by_name["Store"]
    methods = {method.name for method in service.methods}
    # Attach names nothing that could be another's.
    assert methods == {*CALLS, "Attach"}


def put_and_hold(client: RawClient) -> Names:
    """Tenant a's blocks with a lease of each kind; names of them."""
    space = client.open(SMALL).space_id
    prompt = Prompt(SMALL, 77, blocks=4, tenant="a")
    client.put(space, prompt.keys, prompt.rows())
    leased = client.acquire(space, prompt.keys)
    return Names(client.secret, space, leased.lease_id, leased.places[0].region)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all methods."""
    folder = tmp_path_factory.mktemp("tenants")
    with two_tenants(partial(start_daemon, folder), 32 << 20) as daemon:
        yield daemon


@pytest.mark.parametrize("method", sorted(CALLS))
def test_another_tenants_things_look_like_none(shared: Daemon, method: str) -> None:
    daemon = shared
    nobody = Names(NOBODY, NEVER, NEVER, NEVER)
    with (
        RawAdmin(daemon.admin_socket) as admin,
        RawClient(daemon.data_sockets["a"]) as a,
        RawClient(daemon.data_sockets["b"]) as b,
    ):
        names = put_and_hold(a)
        written = a.reserve(names.space, [os.urandom(32)]).lease_id
        before = admin.stats()
        as_oneself, as_the_other = CALLS[method]
        b.open(model(name="warm"))  # so that its own ids differ from the other's
        if method not in ("Detach", "Open"):  # these name nothing but the session
            for theirs in (names, Names(names.session, names.space, written, names.region)):
                assert answer(as_oneself, b, theirs) == answer(as_oneself, b, nobody)
        stolen = answer(as_the_other, b, names)
        assert stolen == answer(as_the_other, b, nobody)
        assert stolen[0] == grpc.StatusCode.UNAUTHENTICATED.name
        # And nothing of it had any effect.
        after = admin.stats()
        assert after.read_leases == before.read_leases == 1
        assert after.write_leases == before.write_leases == 1
        assert after.tenants[0].blocks == before.tenants[0].blocks >= 4
        assert a.commit(written).visible == 1
        assert a.release(names.lease).released == 1


def test_another_tenants_memory_is_not_handed_over(daemons: Daemons) -> None:
    daemon = two_tenants(daemons, 32 << 20)
    with (
        RawClient(daemon.data_sockets["a"]) as a,
        RawClient(daemon.data_sockets["b"]) as b,
    ):
        names = put_and_hold(a)
        answers = []
        for region_id in (names.region, a.staging_map().info.region_id, NEVER):
            reply, fds = b.the_fd().ask(get_region=fd_pb2.GetRegion(region_id=region_id))
            assert not fds
            reply.seq = 0
            answers.append(reply.SerializeToString())
        assert len(set(answers)) == 1
        # Staging is a session's own: there is none for one that has not reserved.
        reply, fds = b.the_fd().ask(get_staging=fd_pb2.GetStaging())
        assert not fds
        assert reason(reply.reason) is Reason.REGION_UNKNOWN
        # A secret of the other tenant opens no fd socket either.
        said = []
        for secret in (names.session, NOBODY, b"", b"x" * 100):
            fd = FdChannel(daemon.data_sockets["b"])
            said.append(fd.hello(secret).SerializeToString())
            fd.close()
        assert len(set(said)) == 1
        assert reason(fd_pb2.FdReply.FromString(said[0]).reason) is Reason.PERMISSION_DENIED


def test_one_prompt_of_two_tenants_is_two_blocks(daemons: Daemons) -> None:
    """Equal fingerprint, equal keys, other bytes: each reads its own; an offer tells nothing."""
    daemon = two_tenants(daemons, 32 << 20)
    with (
        RawAdmin(daemon.admin_socket) as admin,
        RawClient(daemon.data_sockets["a"]) as a,
        RawClient(daemon.data_sockets["b"]) as b,
    ):
        mine = Prompt(SMALL, 77, blocks=4, tenant="a")
        theirs = Prompt(SMALL, 77, blocks=4, tenant="b")
        assert mine.keys == theirs.keys
        space_a, space_b = a.open(SMALL).space_id, b.open(SMALL).space_id
        assert space_a != space_b
        a.put(space_a, mine.keys, mine.rows())
        missed = b.lookup(space_b, theirs.keys)
        assert missed.hit_blocks == 0
        assert reason(missed.reason) is Reason.MISS_NEVER_STORED
        other = b.open(model(1 << 16, name="small", revision="r2"))
        assert [d.field for d in other.differences] == ["identity.weights_revision"]  # its own
        near = b.lookup(other.space_id, mine.keys)
        assert reason(near.reason) is Reason.MISS_NEVER_STORED
        assert not near.differences
        offer = pb.ExplainRequest(fingerprint=convert.fingerprint_to_wire(SMALL), keys=PACKED)
        explained = b.call("Explain", offer)
        assert {reason(key.reason) for key in explained.keys} == {Reason.MISS_NEVER_STORED}
        assert b.reserve(space_b, theirs.keys).present == 0
        b.put(space_b, theirs.keys, theirs.rows())
        mine.assert_right(a.get(space_a, mine.keys))
        seen = admin.call("Explain", tenant="b", space_id=space_a, keys=PACKED)
        assert {reason(key.reason) for key in seen.keys} == {Reason.MISS_NEVER_STORED}


def test_secrets_are_not_guessable_and_not_logged(daemons: Daemons) -> None:
    daemon = two_tenants(daemons, 32 << 20)
    with RawClient(daemon.data_sockets["a"]) as a, RawAdmin(daemon.admin_socket) as admin:
        put_and_hold(a)
        shown = daemon.log() + "".join(admin.call("Trace").records) + str(admin.stats())
        assert a.secret.hex() not in shown
        for key in KEYS:
            assert key.hex()[:10] not in shown
        assert re.search(r"[0-9a-f]{64}", "".join(admin.call("Trace").records)) is None


def test_calls_of_two_tenants_at_once_do_not_mix(daemons: Daemons) -> None:
    """One request id and one attempt for all; each answer belongs to its caller."""
    daemon = two_tenants(daemons, 32 << 20)
    failures: list[str] = []

    def work(name: str, number: int) -> None:
        with RawClient(daemon.data_sockets[name], group=b"same") as client:
            space = client.open(SMALL).space_id
            for turn in range(6):
                prompt = Prompt(SMALL, 600 + turn, blocks=8, tenant=name)
                client.put(space, prompt.keys, prompt.rows(), request_id="same", attempt=1)
                for index, row in enumerate(client.get(space, prompt.keys, request_id="same")):
                    if row is not None and not is_of(prompt, index, row):
                        failures.append(f"{name}{number} {turn} {index}")

    threads = [
        threading.Thread(target=work, args=(name, number)) for name in "ab" for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with RawAdmin(daemon.admin_socket) as admin:
        assert_quiet(admin)


def is_of(prompt: Prompt, index: int, row: Bytes) -> bool:
    tag = tag_of(prompt.tenant, prompt.fingerprint.digest, prompt.keys[index], 0)
    return bool(np.array_equal(row, payload(tag, len(row))))
