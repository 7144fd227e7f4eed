"""Numbers that can be trusted, memory that may not be locked, and ids that name nothing."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding
from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2, fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from kvstore_server.exposition import tenant_label
from tests.daemon import Daemon, DaemonDied, make_daemon, start_daemon
from tests.e2e.stage import BLOCK_TOKENS, Prompt, model, until
from tests.field.conftest import Start
from tests.field.rules import metrics, until_loaded
from tests.rawclient import RawAdmin, RawClient, Refused, channel, reason, refused_as

pytestmark = pytest.mark.process

MIB = 1 << 20
MODEL = model()
BLOCK_BYTES = 4096
CONFIG = ClientConfig(deadline_ms=5_000)


# ---------------------------------------------------------------- P35


class Tally:
    """What a script has done, by the metrics that should say so. `blocks` are those in memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()

    def looked(self, tenant: str, asked: int, found: int) -> None:
        result, tenant = "hit" if found else "miss", tenant_label(tenant)
        self.counts[f'kvstore_lookups_total{{result="{result}",tenant="{tenant}"}}'] += 1
        self.counts[f'kvstore_lookup_tokens_total{{tenant="{tenant}"}}'] += asked * BLOCK_TOKENS
        hits = f'kvstore_hit_tokens_total{{tenant="{tenant}",tier="host"}}'
        self.counts[hits] += found * BLOCK_TOKENS

    def loaded(self, tenant: str, blocks: int, why: Reason = Reason.OK) -> None:
        """`blocks` were copied; they count as loaded only if all went well."""
        tenant = tenant_label(tenant)
        self.counts[f'kvstore_loads_total{{reason="{why.name}",tenant="{tenant}"}}'] += 1
        good = blocks if why is Reason.OK else 0
        self.counts[f'kvstore_loaded_tokens_total{{tenant="{tenant}"}}'] += good * BLOCK_TOKENS
        self.counts[f'kvstore_loaded_bytes_total{{tenant="{tenant}"}}'] += blocks * BLOCK_BYTES

    def wrong(self, daemon: Daemon) -> dict[str, tuple[float, float]]:
        """(said, done) of each number that is not what was done."""
        said = metrics(daemon)
        families = {name.partition("{")[0] for name in self.counts}
        counted = {name for name in said if name.partition("{")[0] in families}
        wanted: dict[str, float] = dict.fromkeys(counted, 0.0) | dict(self.counts)
        wanted |= {
            f'kvstore_tenant_blocks{{tenant="{tenant_label(tenant)}"}}': n
            for tenant, n in self.blocks.items()
        }
        wanted['kvstore_tier_blocks{tier="host"}'] = self.blocks.total()
        wanted['kvstore_tier_block_bytes{tier="host"}'] = self.blocks.total() * BLOCK_BYTES
        return {n: (said.get(n, 0.0), v) for n, v in wanted.items() if said.get(n, 0.0) != v}


class Watch:
    """Scrapes now and then: nothing is negative, no counter falls, hits are among the asked."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._before: dict[str, float] = {}

    def look(self) -> dict[str, float]:
        now = metrics(self._daemon)
        assert not [name for name, value in now.items() if value < 0]
        fallen = [
            name
            for name, value in self._before.items()
            if "_total" in name and now.get(name, 0.0) < value
        ]
        assert not fallen
        asked = _by_tenant(now, "kvstore_lookup_tokens_total")
        hits = _by_tenant(now, "kvstore_hit_tokens_total")
        assert all(hits[tenant] <= asked[tenant] for tenant in hits), (hits, asked)
        self._before = now
        return now


def _by_tenant(found: dict[str, float], family: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, value in found.items():
        if name.partition("{")[0] == family:
            sums[name.partition('tenant="')[2].partition('"')[0]] += int(value)
    return sums


def script(space: Any, raw: RawClient, tenant: str, seed: int, done: Tally) -> Prompt:
    """Known hits, misses, retries, aborts and failed loads; `seed` makes the prompt longer."""
    prompt, absent = Prompt(MODEL, seed, blocks=8 + seed), Prompt(MODEL, 100 + seed, blocks=3)
    rows, blocks = np.stack(prompt.rows()), 8 + seed
    for _ in range(2):  # a retry under the same id is asked again, and counted again
        assert space.lookup(prompt.keys, request_id="same").blocks == 0
        done.looked(tenant, blocks, 0)
    assert space.push(prompt.keys[:6], rows[:6]).stored == 6
    assert space.push(prompt.keys[:6], rows[:6]).present == 6
    done.blocks[tenant] += 6
    for asked in (blocks, 6, 2):
        assert space.lookup(prompt.keys[:asked]).blocks == min(asked, 6)
        done.looked(tenant, asked, min(asked, 6))
    mixed = [*prompt.keys[:4], *absent.keys, *prompt.keys[4:6]]
    assert space.lookup(mixed).blocks == 4
    done.looked(tenant, len(mixed), 4)
    assert space.fetch(prompt.keys).blocks == 6
    done.loaded(tenant, 6)
    assert space.fetch(absent.keys).blocks == 0  # no lease, so no load
    with pytest.raises(ZeroDivisionError):
        space.push(absent.keys, _raises)
    assert space.push(prompt.keys, rows[6:], first_block=6).stored == blocks - 6
    done.blocks[tenant] += blocks - 6
    # Loads that fail, and one that is told twice.
    space_id = raw.open(MODEL).space_id
    for why in (Reason.GENERATION_CHANGED, Reason.DEADLINE_EXCEEDED):
        leased = raw.acquire(space_id, prompt.keys)
        told = pb.LoadReport(
            lease_id=leased.lease_id, blocks=blocks, tokens=blocks * BLOCK_TOKENS, copy_us=9
        )
        told.reason = pb.Reason.ValueType(why)
        release = pb.ReleaseRequest(lease_ids=[leased.lease_id], reports=[told])
        for known in (1, 0):
            assert raw.call("Release", release).released == known
            done.loaded(tenant, blocks * known, why)
    return prompt


def _raises(index: int, target: Any) -> None:
    raise ZeroDivisionError("the engine's own")


def test_p35_every_number_is_the_one_computed(daemons: Start, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk__path": str(tmp_path / "disk"), "disk__capacity_bytes": "64MiB"}
    disk |= {"tenants__one__socket": "one.sock", "tenants__two__socket": "two.sock"}
    daemon = daemons(**disk)
    watch, done = Watch(daemon), Tally()
    first = watch.look()
    prompts: list[tuple[str, Prompt]] = []
    for seed, tenant in enumerate(("one", "two", "one")):
        path = daemon.data_sockets[tenant]
        with Client(path, config=CONFIG) as client, RawClient(path, group=b"raw") as raw:
            prompts.append((tenant, script(client.space(MODEL), raw, tenant, seed, done)))
            watch.look()
    # Releases, and the reports in them, are sent behind the calls.
    with contextlib.suppress(AssertionError):  # what differs is said below
        until("all is counted", lambda: not done.wrong(daemon))
    assert not done.wrong(daemon)
    with RawAdmin(daemon.admin_socket) as admin:
        stats = admin.stats()
        assert {t.tenant: t.blocks for t in stats.tenants if t.blocks} == dict(done.blocks)
        assert sum(t.used_bytes for t in stats.tenants) == stats.tiers[0].used_bytes
        assert sum(t.blocks for t in stats.tenants) == stats.tiers[0].blocks
        assert all(t.hit_tokens <= t.lookup_tokens for t in stats.tenants)

    for end in (daemon.stop, daemon.kill):
        end()
        daemon.start()
        until_loaded(daemon)
        watch = Watch(daemon)
        now = watch.look()
        # Another process counts from 0, and has what is there: nothing in memory, all on disk.
        assert not [n for n, v in now.items() if n.startswith("kvstore_lookup") and v]
        capacity = 'kvstore_tier_capacity_bytes{tier="host"}'
        assert now[capacity] == first[capacity] == 16 * MIB
        assert now['kvstore_tier_blocks{tier="host"}'] == 0
        assert now["kvstore_sessions"] == 0
        with RawAdmin(daemon.admin_socket) as admin:
            tier = next(one for one in admin.stats().tiers if one.name == "disk")
            assert tier.capacity_bytes == 64 * MIB
            assert tier.blocks == done.blocks.total()
            assert tier.block_bytes >= tier.blocks * BLOCK_BYTES
        for tenant, prompt in prompts:
            blocks = len(prompt.keys)
            with Client(daemon.data_sockets[tenant], config=CONFIG) as client:
                space = client.space(MODEL)
                said = {(one.reason, one.tier) for one in space.explain(prompt.keys)}
                assert said == {(Reason.HIT, "disk")}
                fetched = space.fetch(prompt.keys)
                assert fetched.blocks == blocks
                for index, row in enumerate(fetched.data):
                    assert prompt.finding(index, row) is Finding.RIGHT, (tenant, index)
        # What was read came into memory, and is counted there as well.
        now = watch.look()
        assert now['kvstore_tier_blocks{tier="host"}'] == done.blocks.total()
        assert now['kvstore_tier_blocks{tier="disk"}'] == done.blocks.total()


# ---------------------------------------------------------------- G2


def unprivileged() -> tuple[str, ...]:
    """Runs a command that may lock 64 KiB of memory and no more."""
    limit = ("prlimit", "--memlock=65536:65536", "--")
    if os.geteuid() != 0:
        return limit
    without = "-ipc_lock"
    return ("setpriv", f"--bounding-set={without}", f"--inh-caps={without}", "--", *limit)


def test_g2_memory_that_may_not_be_locked_is_said_and_used(tmp_path: Path) -> None:
    prompt = Prompt(MODEL, 2, blocks=16)
    with start_daemon(
        tmp_path,
        argv_prefix=unprivileged(),
        host__capacity_bytes="16MiB",
        host__mlock="auto",
    ) as daemon:
        assert metrics(daemon)["kvstore_host_locked_bytes"] == 0
        (warning,) = [line for line in daemon.log().splitlines() if "host.mlock" in line]
        assert "WARNING" in warning.upper()
        assert "65536" in warning or "64 KiB" in warning, warning
        # All processes of a group see the same, unlocked memory: none is left out.
        for group in (b"group", b"group", b"other"):
            with Client(daemon.data_socket, config=CONFIG, group=group) as client:
                space = client.space(MODEL)
                assert client.connection().transport == "shm"
                space.push(prompt.keys, np.stack(prompt.rows()))
                fetched = space.fetch(prompt.keys)
                assert fetched.blocks == 16
                assert prompt.finding(15, fetched.data[15]) is Finding.RIGHT
        assert metrics(daemon)["kvstore_host_locked_bytes"] == 0
        assert daemon.stop() == 0


def test_g2_a_daemon_that_has_to_lock_refuses(tmp_path: Path) -> None:
    daemon = make_daemon(
        tmp_path,
        argv_prefix=unprivileged(),
        host__capacity_bytes="16MiB",
        host__mlock="require",
    )
    with daemon, pytest.raises(DaemonDied) as died:
        daemon.start()
    assert died.value.code == 2
    line = next(x for x in died.value.output.splitlines() if x.startswith("kvstored: "))
    assert "host.mlock" in line
    assert not list((tmp_path / "run").glob("*.sock"))


# ---------------------------------------------------------------- G3

INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: 32,
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_INT64: 64,
    FieldDescriptor.CPPTYPE_UINT64: 64,
    FieldDescriptor.CPPTYPE_ENUM: 32,
}
TYPED = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "ABORTED",
    "RESOURCE_EXHAUSTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "CANCELLED",  # by this client itself, under the same nonce
}
ENDS_THE_DAEMON = {"Drain"}
STREAMS = {"Attach", "Push"}
"""Attach has numbers of versions only: tests/e2e/test_must_hold_input.py. Push: see below."""


def varint(value: int) -> bytes:
    """As the wire has it: a negative one takes ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def altered_messages(
    descriptor: Any, base: bytes, values: list[int], depth: int = 0
) -> Iterator[tuple[str, bytes]]:
    """`base` with each number in it, or in a message within it, replaced by each value. Of a field
    that is there twice the last one counts.
    """
    for field in descriptor.fields:
        tag = varint(field.number << 3)
        if field.cpp_type in INTEGERS:
            for value in values:
                yield f"{field.name}={value}", base + tag + varint(value)
        elif field.message_type is not None and depth < 2 and "ingerprint" not in field.name:
            for name, inner in altered_messages(field.message_type, b"", values, depth + 1):
                nested = varint(field.number << 3 | 2) + varint(len(inner)) + inner
                yield f"{field.name}.{name}", base + nested


class Ids:
    """Every number that a call takes, at the edge of what there is and far beyond it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.canary = Prompt(MODEL, 77, blocks=8)
        self.raw = RawClient(daemon.data_socket, group=b"ids")
        self.space = self.raw.open(MODEL).space_id
        self.raw.put(self.space, self.canary.keys, self.canary.rows())
        leased = self.raw.acquire(self.space, self.canary.keys)
        region = self.raw.region(leased.places[0].region).info
        self.raw.release(leased.lease_id)
        self.regions = {region.region_id}
        ends = [region.slots - 1, region.slots, region.region_id + 1_000]
        self.values = [*ends, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -1, -(2**31)]

    def base(self, method: MethodDescriptor) -> bytes:
        """A request of this method that is right, as far as it needs to be."""
        fields = method.input_type.fields_by_name
        given: dict[str, Any] = {
            "session": self.raw.secret,
            "space_id": self.space,
            "keys": self.canary.keys[0],
            "chain": os.urandom(32),
            "mode": 1,
            "model_name": "nobody's",
            "who": "test",
            "why": "test",
        }
        module = pb if method.containing_service.name == "Store" else admin_pb2
        message = getattr(module, method.input_type.name)
        return bytes(message(**{k: v for k, v in given.items() if k in fields}).SerializeToString())

    def assert_unharmed(self) -> None:
        self.canary.assert_right(self.raw.get(self.space, self.canary.keys))


@pytest.fixture
def ids(daemons: Start) -> Iterator[Ids]:
    made = Ids(daemons())
    yield made
    made.assert_unharmed()
    made.raw.close()


@pytest.mark.parametrize("service", ["Store", "Admin"])
def test_g3_a_number_that_names_nothing_is_a_typed_error(ids: Ids, service: str) -> None:
    module: Any = pb if service == "Store" else admin_pb2
    path = ids.daemon.data_socket if service == "Store" else ids.daemon.admin_socket
    seen: Counter[str] = Counter()
    with channel(path) as wire:
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            if method.name in STREAMS | ENDS_THE_DAEMON:
                continue
            name = f"/kvstore.v1.{service}/{method.name}"
            call: Callable[[bytes], Any] = _one(wire, name, streams=method.server_streaming)
            for what, message in altered_messages(method.input_type, ids.base(method), ids.values):
                refused = refusal_of(call, message)
                seen["answered" if refused is None else refused.reason.name] += 1
                if refused is not None:
                    where = f"{method.name} {what}: {refused}"
                    assert refused.code.name in TYPED, where
                    assert refused.reason not in (Reason.INTERNAL, Reason.UNSPECIFIED), where
            ids.assert_unharmed()
            held = ids.raw.acquire(ids.space, ids.canary.keys)
            assert ids.raw.release(held.lease_id).released == 1
    print(dict(seen))
    assert seen.total() > 5 * len(ids.values)
    assert seen["SPACE_UNKNOWN"] >= len(ids.values)


def refusal_of(call: Callable[[bytes], Any], message: bytes) -> Refused | None:
    try:
        call(message)
    except Refused as refused:
        return refused
    return None


def _one(wire: Any, name: str, *, streams: bool) -> Callable[[bytes], Any]:
    call: Any = (wire.unary_stream if streams else wire.unary_unary)(name)
    if streams:
        return lambda message: refused_as(lambda: list(call(message, timeout=20)))
    return lambda message: refused_as(lambda: call(message, timeout=20))


def test_g3_leases_and_regions_that_are_nobodys(ids: Ids) -> None:
    """What a refusal means: nothing was freed, committed or handed over."""
    raw = ids.raw
    view = raw.acquire(ids.space, ids.canary.keys, view=True)
    reserved = raw.reserve(ids.space, Prompt(MODEL, 78, blocks=2).keys)
    taken = {view.lease_id, reserved.lease_id}
    for value in [v % 2**64 for v in ids.values if v % 2**64 not in taken]:
        with pytest.raises(Refused) as refused:
            raw.commit(value)
        assert refused.value.reason is Reason.LEASE_UNKNOWN
        assert not raw.abort(value).known
        assert (raw.release(value).released, raw.release(value).unknown) == (0, 1)
        told = pb.LoadReport(lease_id=value, blocks=2**32 - 1, tokens=2**32 - 1, copy_us=2**63)
        assert raw.call("Release", pb.ReleaseRequest(reports=[told])).released == 0
        if value < 2**32 and value not in ids.regions:
            reply, fds = raw.the_fd().ask(get_region=fd_pb2.GetRegion(region_id=value))
            assert (reason(reply.reason), fds) == (Reason.REGION_UNKNOWN, [])
            raw.the_fd().unmapped(value)  # has no answer, and no effect
    # Offsets of a chain, and chunks of a stream, beyond what was offered.
    chain = Prompt(MODEL, 79, blocks=2).keys
    for first in (3, 2**31, 2**32 - 1):
        with pytest.raises(Refused) as refused:
            raw.reserve(ids.space, chain, first=first)
        assert refused.value.reason is Reason.BAD_SIZE
    for block, offset in ((2, 0), (2**32 - 1, 0), (0, BLOCK_BYTES), (0, 2**63), (0, 2**64 - 1)):
        begin = pb.ReserveRequest(session=raw.secret, space_id=ids.space, chain=b"".join(chain))
        header = pb.ChunkHeader(block=block, offset=offset)
        chunks = [pb.PushChunk(reserve=begin), pb.PushChunk(header=header, payload=b"x" * 64)]
        with pytest.raises(Refused) as refused:
            raw.push([*chunks, pb.PushChunk(commit=True)])
        assert refused.value.code.name in TYPED
        assert refused.value.reason is not Reason.INTERNAL
    # What was held all the while is held still.
    assert [row is not None for row in raw.copy(view)] == [True] * 8
    assert raw.release(view.lease_id).released == 1
    assert raw.abort(reserved.lease_id).known
    assert convert.unpack_u32(reserved.wanted).tolist() == [0, 1]
