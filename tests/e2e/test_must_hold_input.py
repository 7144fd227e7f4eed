"""Bad input: a typed error or a miss each; the daemon lives, stays flat and loses nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire import convert, status
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon, start_daemon
from tests.e2e.stage import (
    BLOCK_TOKENS,
    Prompt,
    altered,
    assert_quiet,
    model,
    open_sockets,
    record,
    resident_bytes,
    until,
)
from tests.rawclient import (
    RawAdmin,
    RawClient,
    Refused,
    bytes_method,
    channel,
    reason,
    refused_as,
)

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
Note = Callable[[str, object], None]

MODEL = model()
CANARY = Prompt(MODEL, 1, blocks=16)
FLAT_BYTES = 24 << 20
"""Growth that is no leak: allocator arenas, the trace ring, gRPC's buffers."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all: what one test leaves behind, the next one would find."""
    folder = tmp_path_factory.mktemp("input")
    with start_daemon(folder, host__capacity_bytes="32MiB", trace__ring_records=256) as daemon:
        with RawClient(daemon.data_socket, group=b"canary") as client:
            space = client.open(MODEL).space_id
            assert client.put(space, CANARY.keys, CANARY.rows()).visible == 16
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[RawClient]:
    with RawClient(daemon.data_socket) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_lost(daemon: Daemon) -> Iterator[None]:
    """After each test: alive, the blocks of before are there, nobody holds anything."""
    instance = instance_of(daemon)
    yield
    assert daemon.alive
    assert instance_of(daemon) == instance
    with RawClient(daemon.data_socket, group=b"canary") as client:
        CANARY.assert_right(client.get(client.open(MODEL).space_id, CANARY.keys))
    with RawAdmin(daemon.admin_socket) as admin:
        assert_quiet(admin)
    assert "failed: a defect" not in daemon.log()
    assert "Traceback" not in daemon.log()


def instance_of(daemon: Daemon) -> bytes:
    with RawAdmin(daemon.admin_socket) as admin:
        return bytes(admin.stats().instance_id)


def refusal(call: Callable[[], Any], *reasons: Reason) -> Refused:
    """The call is refused with one of these reasons, its origin and a text."""
    with pytest.raises(Refused) as refused:
        call()
    assert refused.value.reason in reasons, refused.value
    assert refused.value.detail.origin == refused.value.reason.origin.value
    assert refused.value.text
    return refused.value


def outcome(call: Callable[[], Any]) -> tuple[Any, Refused | None]:
    """(reply, None) or (None, refusal), where both are allowed."""
    try:
        return call(), None
    except Refused as refused:
        return None, refused


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("tokens", [0, 1, BLOCK_TOKENS - 1])
def test_a_prompt_without_a_full_block_is_nothing_to_do(daemon: Daemon, tokens: int) -> None:
    with Client(daemon.data_socket) as sdk:
        space = sdk.space(MODEL)
        hit = space.lookup(list(range(tokens)))
        assert (hit.blocks, hit.tokens, hit.reason) == (0, 0, Reason.NOTHING_TO_DO)
        assert space.fetch(hit).blocks == 0
        pushed = space.push(list(range(tokens)), np.empty((0, space.part_bytes), np.uint8))
        assert (pushed.stored, pushed.reason) == (0, Reason.NOTHING_TO_DO)


def test_calls_without_keys_are_nothing_to_do(client: RawClient) -> None:
    space = client.open(MODEL).space_id
    hit = client.lookup(space, [])
    assert (hit.hit_blocks, reason(hit.reason)) == (0, Reason.NOTHING_TO_DO)
    assert client.acquire(space, []).lease_id == 0
    assert client.reserve(space, []).lease_id == 0
    assert len(client.explain(space, []).keys) == 0
    assert client.release().released == 0
    assert client.fetch(space, [])[-1].header.block == 0


def test_the_longest_prompt_goes_through(daemon: Daemon, record_property: Note) -> None:
    tokens = np.arange(131_072, dtype=np.uint32)
    small = altered(model(), "encoding", block_tokens=16)
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=10_000)) as sdk:
        space = sdk.space(small)
        keys = space.keys(tokens)
        assert len(keys) == 8_192
        missed = space.lookup(tokens)
        assert (missed.blocks, missed.reason) == (0, Reason.MISS_NEVER_STORED)
        rows = np.zeros((8_192, space.part_bytes), np.uint8)
        rows[:, 0] = np.arange(8_192) % 251
        pushed = space.push(tokens, rows)  # 32 MiB: more than fits, the tail is left out
        assert 0 < pushed.stored < 8_192
        started = time.monotonic()
        hit = space.lookup(tokens)
        record(record_property, "lookup_131072_tokens", time.monotonic() - started)
        assert 0 < hit.blocks <= pushed.stored
        fetched = space.fetch(hit)
        assert fetched.blocks == hit.blocks
        assert (np.asarray(fetched.data)[: hit.blocks, 0] == rows[: hit.blocks, 0]).all()
    with RawClient(daemon.data_socket, group=b"canary") as client:  # it may have been evicted
        client.put(client.open(MODEL).space_id, CANARY.keys, CANARY.rows())


# ---------------------------------------------------------------- keys


def key_calls(client: RawClient, space: int, packed: bytes) -> dict[str, Callable[[], Any]]:
    """Every call that takes keys."""
    keys = [packed]
    reserve = pb.ReserveRequest(session=client.secret, space_id=space, chain=packed)
    return {
        "Lookup": lambda: client.lookup(space, keys),
        "Acquire": lambda: client.acquire(space, keys),
        "Reserve": lambda: client.reserve(space, keys),
        "Fetch": lambda: client.fetch(space, keys),
        "Push": lambda: client.push([pb.PushChunk(reserve=reserve)]),
        "Explain": lambda: client.explain(space, keys),
    }


@pytest.mark.parametrize("length", [1, 31, 33, 63, 65, 1_000])
def test_keys_of_a_wrong_length_are_refused(client: RawClient, length: int) -> None:
    space = client.open(MODEL).space_id
    for call in key_calls(client, space, bytes(length)).values():
        refusal(call, Reason.BAD_KEY_LENGTH)
    with Client(client.data_socket) as sdk:
        for keys in ([bytes(length)], [bytes(32), bytes(length)]):
            with pytest.raises(BadRequest) as misuse:
                sdk.space(MODEL).lookup(keys)
            assert misuse.value.reason is Reason.BAD_KEY_LENGTH


def test_a_key_more_than_allowed_is_refused_with_the_limit(client: RawClient) -> None:
    space = client.open(MODEL).space_id
    limit = client.welcome.limits.keys_per_call_max
    for call in key_calls(client, space, bytes(32 * (limit + 1))).values():
        assert refusal(call, Reason.TOO_MANY_KEYS).detail.setting == "limits.keys_per_call_max"
    assert client.lookup(space, [bytes(32)] * limit).hit_blocks == 0


def test_a_million_keys_are_refused_and_the_connection_lives(
    daemon: Daemon, client: RawClient, record_property: Note
) -> None:
    space = client.open(MODEL).space_id
    million = bytes(32 * 1_000_000)
    for call in key_calls(client, space, million).values():  # buffers grow once
        with pytest.raises(Refused):
            call()
    before = resident_bytes(daemon.pid)
    for _ in range(3):
        for call in key_calls(client, space, million).values():
            with pytest.raises(Refused) as refused:
                call()
            assert status.reason_of(refused.value.code, ()) == (
                Reason.MESSAGE_TOO_LARGE,
                "RESOURCE_EXHAUSTED",
            )
    grown = resident_bytes(daemon.pid) - before
    record(record_property, "growth_by_million_keys", grown / (1 << 20), "MiB")
    assert grown < FLAT_BYTES
    CANARY.assert_right(client.get(space, CANARY.keys))
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=15_000)) as sdk:
        keys = [os.urandom(32)] * 1_000_000
        hit = sdk.space(MODEL).lookup(keys)
        assert hit.blocks == 0
        assert hit.reason in (Reason.MISS_NEVER_STORED, Reason.TOO_MANY_KEYS)


def test_messages_of_the_largest_size_leave_no_memory_behind(
    daemon: Daemon, client: RawClient
) -> None:
    space = client.open(MODEL).space_id
    packed = bytes(32 * 400_000)
    before = resident_bytes(daemon.pid)
    for _ in range(4):
        for call in key_calls(client, space, packed).values():
            refusal(call, Reason.TOO_MANY_KEYS)

    def flat() -> bool:
        for _ in range(200):  # gRPC lets go of buffers bit by bit, as calls come
            client.lookup(space, CANARY.keys)
        return resident_bytes(daemon.pid) - before < FLAT_BYTES

    until("what they took is given back", flat)


def test_keys_given_twice_are_one_block(client: RawClient) -> None:
    space = client.open(MODEL).space_id
    key = os.urandom(32)
    prompt = Prompt(MODEL, 5, blocks=3)
    reserved = client.reserve(space, [key, key, key])
    client.fill(reserved, prompt.rows())
    assert client.commit(reserved.lease_id).visible >= 1
    rows = client.get(space, [key, key, key])
    assert all(row is not None and (row == rows[0]).all() for row in rows)


# ---------------------------------------------------------------- numbers


def varint(value: int) -> bytes:
    """As the wire has it; negative ones take ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31)]
NUMBER_FIELDS: dict[str, tuple[Any, dict[str, int]]] = {
    "Lookup": (pb.LookupRequest, {"prompt_tokens": 5}),
    "Acquire": (pb.AcquireRequest, {"space_id": 2, "mode": 4, "ttl_ms": 5}),
    "Reserve": (
        pb.ReserveRequest,
        {"space_id": 2, "first_block": 4, "part": 5, "attempt": 6, "ttl_ms": 7},
    ),
    "Commit": (pb.CommitRequest, {"lease_id": 2}),
    "Abort": (pb.AbortRequest, {"lease_id": 2}),
    "Release": (pb.ReleaseRequest, {"lease_ids": 2}),
    "Explain": (pb.ExplainRequest, {"space_id": 2}),
}


@pytest.mark.parametrize("method", sorted(NUMBER_FIELDS))
def test_numbers_of_any_size_are_answered(client: RawClient, method: str) -> None:
    space = client.open(MODEL).space_id
    message, fields = NUMBER_FIELDS[method]
    key = os.urandom(32)
    base: dict[str, Any] = {"session": client.secret}
    if method == "Lookup":
        base["queries"] = [pb.Query(space_id=space, keys=key)]
    elif method == "Reserve":
        base |= {"space_id": space, "chain": key}
    elif method == "Acquire":
        base |= {"space_id": space, "keys": key}
    encoded = message(**base).SerializeToString()
    held = pb.DESCRIPTOR.services_by_name["Store"].methods_by_name[method].output_type.name
    with bytes_method(client.data_socket, method) as call:
        for field in fields.values():
            for value in NUMBERS:
                request = encoded + number(field, value)
                encoded_reply, refused = outcome(lambda request=request: call(request))  # type: ignore[misc]
                if refused is not None:
                    untyped = (Reason.INTERNAL, Reason.UNSPECIFIED)
                    assert refused.reason not in untyped, (field, value)
                    continue
                reply = getattr(pb, held).FromString(encoded_reply)
                if getattr(reply, "lease_id", 0):
                    client.release(reply.lease_id)


def test_report_numbers_do_not_break_the_metrics(daemon: Daemon, client: RawClient) -> None:
    space = client.open(MODEL).space_id
    for value in (float("nan"), float("inf"), float("-inf"), -1.0, 1e308):
        lease_id = client.acquire(space, CANARY.keys).lease_id
        report = pb.LoadReport(
            lease_id=lease_id, blocks=2**32 - 1, copy_us=2**64 - 1, tokens=2**32 - 1,
            prefill_saved_us=value, reason=pb.REASON_OK,
        )  # fmt: skip
        request = pb.ReleaseRequest(lease_ids=[lease_id], reports=[report])
        _, refused = outcome(lambda request=request: client.call("Release", request))  # type: ignore[misc]
        if refused is not None:
            assert refused.reason in (Reason.BAD_SIZE, Reason.BAD_REQUEST)
            client.release(lease_id)
    text = metrics(daemon)
    values = [line.split()[-1] for line in text.splitlines() if line.startswith("kvstore_")]
    assert not [value for value in values if value in ("NaN", "+Inf", "-Inf") or value[0] == "-"]
    hit = client.lookup(space, CANARY.keys, prompt_tokens=256)
    assert hit.hit_blocks == 16


def metrics(daemon: Daemon) -> str:
    with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
        return text


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_prefill_costs_that_are_none_are_refused(client: RawClient, cost: float) -> None:
    space = client.open(MODEL).space_id
    prefill = pb.PrefillCost(a_us_per_token=cost)
    refusal(lambda: client.lookup(space, CANARY.keys, prefill=prefill), Reason.BAD_SIZE)


def test_a_negative_size_is_misuse_of_the_sdk(daemon: Daemon) -> None:
    with Client(daemon.data_socket) as sdk:
        space = sdk.space(MODEL)
        keys = CANARY.keys
        rows = np.stack(CANARY.rows())
        misuses: list[Callable[[], Any]] = [
            lambda: space.push(keys, rows, first_block=-1),
            lambda: space.push(keys, rows, first_block=17),
            lambda: space.push(keys, rows[:3]),
            lambda: space.push(keys, rows[:, :100]),
            lambda: space.push(keys, rows, attempt=-1),
            lambda: space.fetch(keys, np.empty((3, 4096), np.uint8)),
            lambda: space.fetch(keys, np.empty((16, 4095), np.uint8)),
            lambda: space.fetch(keys, wait_ms=-1),
            lambda: space.lookup(keys, deadline_ms=-1),
            lambda: space.lookup([-1] * 32),
            lambda: space.lookup([2**32] * 32),
            lambda: ClientConfig(deadline_ms=-5),
            lambda: sdk.space(MODEL, rank=-1),
            lambda: sdk.space(MODEL, rank=1),
        ]
        for misuse in misuses:
            with pytest.raises(BadRequest):
                misuse()
        assert space.fetch(keys).blocks == 16


# ---------------------------------------------------------------- sizes


def test_a_part_over_the_bound_is_refused(client: RawClient) -> None:
    staging = client.welcome.limits.staging_bytes
    assert client.welcome.limits.part_bytes_max == staging
    for size in (staging // 2, staging):
        wide = Prompt(model(size, name="wide"), size, blocks=1)
        assert client.put(client.open(wide.fingerprint).space_id, wide.keys, wide.rows()).visible
    for size in (2 * staging, 8 * staging, 64 * staging):
        fingerprint = model(size, name="wide")
        space = client.open(fingerprint).space_id
        reserved = client.reserve(space, [os.urandom(32)])
        assert reserved.lease_id == 0
        assert reason(reserved.reason) is Reason.PART_TOO_LARGE
        push = pb.ReserveRequest(session=client.secret, space_id=space, chain=os.urandom(32))
        streamed = client.push([pb.PushChunk(reserve=push), pb.PushChunk(commit=True)])
        assert (streamed.stored, reason(streamed.reason)) == (0, Reason.PART_TOO_LARGE)
    with Client(client.data_socket) as sdk:
        wide = Prompt(model(2 * staging, name="wide"), 3, blocks=1)
        pushed = sdk.space(wide.fingerprint).push(wide.keys, np.stack(wide.rows()))
        assert (pushed.stored, pushed.reason) == (0, Reason.PART_TOO_LARGE)
        assert sdk.space(wide.fingerprint).fetch(wide.keys).blocks == 0


def test_pushed_payloads_that_do_not_fit_are_refused(client: RawClient) -> None:
    space = client.open(MODEL).space_id

    def chunks(*pieces: tuple[int, int, int], commit: bool = True) -> list[pb.PushChunk]:
        keys = os.urandom(64)
        first = pb.ReserveRequest(session=client.secret, space_id=space, chain=keys)
        stream = [pb.PushChunk(reserve=first)]
        for block, offset, length in pieces:
            header = pb.ChunkHeader(block=block, offset=offset)
            stream.append(pb.PushChunk(header=header, payload=bytes(length)))
        return [*stream, pb.PushChunk(commit=True)] if commit else stream

    good = client.push(chunks((0, 0, 4096), (1, 0, 4096)))
    assert good.stored == 2
    for wrong in (
        [(0, 0, 4097)],
        [(0, 1, 4095)],
        [(0, 2**63, 8)],
        [(0, 0, 4096), (0, 4096, 1)],
        [(0, 0, 4096), (0, 0, 4096)],
    ):
        refusal(lambda wrong=wrong: client.push(chunks(*wrong)), Reason.BAD_SIZE)  # type: ignore[misc]
    for short in ([], [(0, 0, 4096)], [(0, 0, 4096), (1, 0, 4095)], [(7, 0, 4096)]):
        refusal(lambda short=short: client.push(chunks(*short)), Reason.ABORTED)  # type: ignore[misc]
    broken_off = chunks((0, 0, 4096), (1, 0, 4096), commit=False)
    refusal(lambda: client.push(broken_off), Reason.ABORTED)
    refusal(lambda: client.push([]), Reason.SESSION_UNKNOWN, Reason.BAD_REQUEST)


def test_long_and_odd_names_are_refused_or_work(daemon: Daemon) -> None:
    for name in ("x" * 129, "a\nb", "a\0b", "\u2028", "é" * 65):
        refusal(lambda name=name: RawClient(daemon.data_socket, engine_id=name), Reason.BAD_NAME)  # type: ignore[misc]
    for group in (b"", b"g" * 65):
        refusal(
            lambda group=group: RawClient(daemon.data_socket, group=group),  # type: ignore[misc]
            Reason.BAD_NAME,
            Reason.BAD_SIZE,
        )
    with RawClient(daemon.data_socket, engine_id="../../etc/ü 模型", group=bytes(64)) as client:
        for name in ("../../../etc/passwd", "模型 🦙", "a" * 256, "a/b", "%s{}", "\u202ex"):
            opened = client.open(model(name=name))
            assert opened.space_id, name
        for name in ("", "a" * 257, "a\nb", "a\0"):
            fingerprint = convert.fingerprint_to_wire(MODEL)
            fingerprint.identity.model_name = name
            request = pb.OpenRequest(fingerprint=fingerprint)
            refusal(
                lambda request=request: client.call("Open", request),  # type: ignore[misc]
                Reason.BAD_NAME,
                Reason.BAD_FINGERPRINT,
            )
    assert "passwd" not in metrics(daemon)


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("minor", [0, 1, 7, 2**32 - 1])
def test_any_minor_version_is_spoken_with(daemon: Daemon, minor: int) -> None:
    with RawClient(daemon.data_socket, minor=minor) as client:
        assert client.welcome.protocol_minor <= minor
        CANARY.assert_right(client.get(client.open(MODEL).space_id, CANARY.keys))


@pytest.mark.parametrize("major", [0, 2, 2**32 - 1])
def test_another_major_version_is_refused(daemon: Daemon, major: int) -> None:
    refused = refusal(lambda: RawClient(daemon.data_socket, major=major), Reason.PROTOCOL_VERSION)
    assert refused.code is grpc.StatusCode.FAILED_PRECONDITION
    assert str(major) in refused.text


def test_what_a_newer_peer_says_is_ignored_or_refused(client: RawClient) -> None:
    space = client.open(MODEL).space_id
    unknown = number(999, 7) + varint(998 << 3 | 2) + varint(5) + b"later"
    query = pb.Query(space_id=space, keys=b"".join(CANARY.keys)).SerializeToString() + unknown
    with bytes_method(client.data_socket, "Lookup") as call:
        head = varint(1 << 3 | 2) + varint(16) + client.secret
        body = head + varint(2 << 3 | 2) + varint(len(query)) + query + unknown
        reply = pb.LookupReply.FromString(call(body))
        assert reply.groups[0].hit_blocks == 16
    # An enum value of tomorrow.
    for rule in (3, 77, 2**31 - 1):
        query_of_tomorrow = pb.Query(space_id=space, keys=CANARY.keys[0])
        query_of_tomorrow.rule = rule  # type: ignore[assignment]
        lookup = pb.LookupRequest(queries=[query_of_tomorrow])
        refusal(lambda lookup=lookup: client.call("Lookup", lookup), Reason.BAD_REQUEST)  # type: ignore[misc]
    acquire = pb.AcquireRequest(space_id=space, keys=CANARY.keys[0])
    acquire.mode = 9  # type: ignore[assignment]
    answered, refused = outcome(lambda: client.call("Acquire", acquire))
    if refused is not None:
        assert refused.reason is Reason.BAD_REQUEST
    else:
        assert answered.ttl_ms, "an unknown mode must not become a hold without end"
        client.release(answered.lease_id)
    report = pb.LoadReport(blocks=1, copy_us=1)
    report.reason = 9_999  # type: ignore[assignment]
    client.call("Release", pb.ReleaseRequest(reports=[report]))


def test_a_method_that_is_not_there_is_unimplemented(client: RawClient) -> None:
    with bytes_method(client.data_socket, "Defragment") as call:
        with pytest.raises(Refused) as refused:
            call(b"")
        assert refused.value.code is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- garbage

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SEED = 20_260_301
CONNECTIONS = 1_500


def garbage(rng: random.Random) -> bytes:
    """Noise, and near misses: broken HTTP/2, text, frames that lie about their length."""
    noise = rng.randbytes(rng.choice((0, 1, 3, 4, 9, 64, 700)))
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\x04\0\0\0\0\0"
    frame = struct.pack(">I", rng.randrange(1 << 24))[1:] + noise[:6]
    hello = fd_pb2.FdRequest(seq=1, hello=fd_pb2.FdHello(session=noise[:16])).SerializeToString()
    kinds = (
        noise,
        preface + noise,
        preface + settings + frame + noise,
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + noise,
        struct.pack("<I", rng.choice((0, 1, 65_536, 65_537, 2**31, 2**32 - 1))) + noise,
        struct.pack("<I", len(noise)) + noise,
        struct.pack("<I", len(hello)) + hello,
        struct.pack("<I", len(hello)) + hello[:-1],
    )
    return rng.choice(kinds)


def throw(path: str, data: bytes, rng: random.Random) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        try:
            sock.connect(path)
            sock.sendall(data)
            if rng.random() < 0.2:
                sock.shutdown(socket.SHUT_WR)
            if rng.random() < 0.2:
                sock.settimeout(0.01)
                sock.recv(100)
        except OSError:
            pass  # cut off, as it should be


@pytest.mark.parametrize("way", ["data", "fd"])
def test_garbage_on_the_sockets_harms_nobody(
    daemon: Daemon, record_property: Note, way: str
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    path = daemon.data_socket + (".fd" if way == "fd" else "")
    for _ in range(300):
        throw(path, garbage(rng), rng)
    before, files = resident_bytes(daemon.pid), open_sockets(daemon.pid)
    written = len(daemon.log())
    slowest = 0.0
    with RawAdmin(daemon.admin_socket) as admin:
        for index in range(CONNECTIONS):
            throw(path, garbage(rng), rng)
            if index % 50 == 0:
                started = time.monotonic()
                admin.stats()
                slowest = max(slowest, time.monotonic() - started)
    until("connections are closed", lambda: open_sockets(daemon.pid) <= files + 8)
    grown = resident_bytes(daemon.pid) - before
    record(record_property, f"growth_by_garbage_{way}", grown / (1 << 20), "MiB")
    record(record_property, f"slowest_call_beside_garbage_{way}", slowest)
    assert grown < FLAT_BYTES
    assert slowest < 1.0
    assert len(daemon.log()) - written < 4_096, "what a stranger sends fills no log"


def test_garbage_of_a_session_ends_only_that_session(daemon: Daemon, client: RawClient) -> None:
    rng = random.Random(SEED)
    with RawAdmin(daemon.admin_socket) as admin:
        for turn in range(20):
            bad = RawClient(daemon.data_socket, group=b"bad%d" % turn)
            space = bad.open(MODEL).space_id
            assert bad.acquire(space, CANARY.keys).lease_id
            bad.the_fd().sock.sendall(struct.pack("<I", 2**31 + turn) + rng.randbytes(64))
            until("its session ended", lambda: admin.stats().read_leases == 0)
            bad.close()
        assert admin.stats().sessions == 1
    CANARY.assert_right(client.get(client.open(MODEL).space_id, CANARY.keys))


def test_noise_as_messages_is_refused(daemon: Daemon, client: RawClient) -> None:
    """Well-formed gRPC, ill-formed protobuf: a typed error each, for every method."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    allowed = (Reason.BAD_REQUEST, Reason.SESSION_UNKNOWN, Reason.PROTOCOL_VERSION)
    seen: set[Reason] = set()
    for method in pb.DESCRIPTOR.services_by_name["Store"].methods:
        streams = method.name in ("Attach", "Fetch")
        with bytes_method(client.data_socket, method.name, streams=streams) as call:
            for _ in range(40):
                noise = rng.randbytes(rng.randrange(1, 200))
                seen.add(refusal(lambda noise=noise: call(noise), *allowed).reason)  # type: ignore[misc]
    assert Reason.BAD_REQUEST in seen
    assert "BAD_REQUEST" in metrics(daemon)


def test_noise_to_the_other_services_is_refused_and_not_logged(daemon: Daemon) -> None:
    """Health, reflection and the operator's verbs: whoever may connect could fill the log else."""
    written = len(daemon.log())
    for path in (daemon.data_socket, daemon.admin_socket):
        with channel(path) as wire:
            calls: list[Any] = [
                wire.unary_unary("/grpc.health.v1.Health/Check"),
                lambda noise, wire=wire: next(
                    wire.unary_stream("/grpc.health.v1.Health/Watch")(noise)
                ),
                lambda noise, wire=wire: next(wire.stream_stream(REFLECTION)(iter([noise]))),
            ]
            if path == daemon.admin_socket:
                calls.append(wire.unary_unary("/kvstore.v1.Admin/Pin"))
            for call in calls:
                for noise in (b"\xff", b"\x0f\xff", b"\x0a\xff\xff"):
                    refusal(
                        lambda call=call, noise=noise: refused_as(lambda: call(noise)),  # type: ignore[misc]
                        Reason.BAD_REQUEST,
                    )
    assert len(daemon.log()) == written


def test_a_broken_message_in_a_push_is_refused(client: RawClient) -> None:
    space = client.open(MODEL).space_id
    reserve = pb.ReserveRequest(session=client.secret, space_id=space, chain=os.urandom(32))
    first = pb.PushChunk(reserve=reserve).SerializeToString()
    call: Any = client.channel.stream_unary("/kvstore.v1.Store/Push")
    for messages in ([b"\xff"], [first, b"\xff"], [first, b"", b"\x0a\x7f"]):
        refusal(
            lambda messages=messages: refused_as(lambda: call(iter(messages), timeout=10)),  # type: ignore[misc]
            Reason.BAD_REQUEST,
        )


def silent_peers(path: str, count: int) -> list[socket.socket]:
    """Connections to an fd socket that say nothing."""
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(count)]
    for sock in silent:
        sock.settimeout(1)
        sock.connect(f"{path}.fd")
    return silent


def test_silent_peers_are_cut(daemon: Daemon, record_property: Note) -> None:
    """Connections that say nothing hold nothing for long, and do not keep others out for good."""
    files = open_sockets(daemon.pid)
    silent = silent_peers(daemon.data_socket, 100)
    try:
        until("they are accepted", lambda: open_sockets(daemon.pid) > files + 32)
        started = time.monotonic()
        until("they are cut", lambda: open_sockets(daemon.pid) <= files + 8, 20)
        record(record_property, "silent_fd_peers_cut", time.monotonic() - started)
    finally:
        for sock in silent:
            sock.close()
    with RawClient(daemon.data_socket) as client:
        assert client.open(MODEL).space_id


def test_silent_peers_of_one_tenant_keep_no_other_out(daemons: Daemons) -> None:
    two = daemons(
        host__capacity_bytes="16MiB", tenants__a__socket="a.sock", tenants__b__socket="b.sock"
    )
    files = open_sockets(two.pid)
    silent = silent_peers(two.data_sockets["a"], 100)
    try:
        until("they are accepted", lambda: open_sockets(two.pid) > files + 32)
        for _ in range(5):
            with RawClient(two.data_sockets["b"]) as client:
                assert client.open(MODEL).space_id
    finally:
        for sock in silent:
            sock.close()


def test_sessions_over_the_limit_are_refused(daemons: Daemons) -> None:
    small = daemons(host__capacity_bytes="16MiB", limits__sessions_max=3)
    clients = [RawClient(small.data_socket) for _ in range(3)]
    refused = refusal(lambda: RawClient(small.data_socket), Reason.LIMIT_SESSIONS)
    assert refused.detail.setting == "limits.sessions_max"
    clients.pop().close()
    with RawAdmin(small.admin_socket) as admin:
        until("one session ended", lambda: admin.stats().sessions == 2)
    clients.append(RawClient(small.data_socket))
    for client in clients:
        client.close()
