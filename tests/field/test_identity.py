"""Is it really the same content? Keys, adapters, images, tenants, types, weights that changed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.keys import chain
from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import AsyncClient, Client, ClientConfig, ContentItem, Extras, Fingerprint
from tests.daemon import Daemon
from tests.e2e.stage import BLOCK_TOKENS, Prompt, altered, model, record, until
from tests.field.child import child
from tests.field.conftest import Start
from tests.field.content import hit, push, rows_of
from tests.field.rules import FULL, Punctual, metrics, rounds, total, until_loaded
from tests.rawclient import CALL_S, RawAdmin, RawClient, Refused, channel

pytestmark = pytest.mark.process

Note = Callable[[str, object], None]

MODEL = model()
CONFIG = ClientConfig(deadline_ms=5_000)
TOKENS = list(range(8 * BLOCK_TOKENS))
BLOCKS = 8


@contextlib.contextmanager
def spaces(daemon: Daemon) -> Iterator[Callable[[Fingerprint], Punctual]]:
    """One client; its spaces by fingerprint."""
    with Client(daemon.data_socket, config=CONFIG) as client:
        yield lambda fingerprint: Punctual(client.space(fingerprint))


# ---------------------------------------------------------------- P01


def test_p01_what_one_process_put_another_one_hits(daemons: Start) -> None:
    daemon = daemons()
    with child("golden", daemon.data_socket, "put", hash_seed="0") as writer:
        put = writer.hear()
    for seed in ("4294967295", "1", "random")[: rounds(1, 3)]:
        with child("golden", daemon.data_socket, "get", hash_seed=seed) as reader:
            assert reader.hear() == put
    assert put["done"] == put["blocks"] > 200


# ---------------------------------------------------------------- P02


def test_p02_only_the_same_adapter_hits(daemons: Start) -> None:
    base = MODEL
    x = altered(base, "identity", adapter_name="x", adapter_digest="digest-1")
    y = altered(base, "identity", adapter_name="y", adapter_digest="digest-2")
    renamed = altered(base, "identity", adapter_name="x", adapter_digest="digest-3")
    unnamed = altered(base, "identity", adapter_name="x")
    reloaded = altered(base, "identity", adapter_name="x", adapter_digest="digest-1")
    daemon = daemons()
    with spaces(daemon) as space:
        keys = space(x).keys(TOKENS)
        assert push(space(x), x, keys) == BLOCKS
        for other in (base, y, renamed, unnamed):
            assert space(other).lookup(keys).blocks == 0
            assert space(other).fetch(keys).blocks == 0
        named = [one.field for one in space(renamed).lookup(keys).differences]
        assert named == ["identity.adapter_digest"]
    with spaces(daemon) as space:
        assert hit(space(reloaded), reloaded, keys) == BLOCKS
        # A name alone is no identity: what is written under it is nobody else's.
        assert space(unnamed).status().reason is Reason.HELD_FOR_REVIEW


def test_p02_adapters_of_one_engine_have_keys_of_their_own(daemons: Start) -> None:
    """Where the engine serves many adapters with one fingerprint, the keys tell them apart."""
    with spaces(daemons()) as space:
        here = space(MODEL)
        base = here.keys(TOKENS)
        x, y = (here.keys(TOKENS, extras=Extras(adapter_digest=bytes([n]) * 32)) for n in (1, 2))
        reloaded = here.keys(TOKENS, extras=Extras(adapter_digest=bytes([1]) * 32))
        assert push(here, MODEL, x) == BLOCKS
        assert here.lookup(base).blocks == here.lookup(y).blocks == 0
        assert hit(here, MODEL, reloaded) == BLOCKS


# ---------------------------------------------------------------- P03, P04


def image(digest: bytes) -> Extras:
    """An image behind the placeholder tokens of blocks 3 to 5."""
    return Extras(items=(ContentItem(digest, 3 * BLOCK_TOKENS + 2, 2 * BLOCK_TOKENS),))


def partly_equal(one: bytes) -> list[bytes]:
    """Digests that share their first, last or middle 4, 8, 16 hex digits with `one`."""
    made = []
    for kept in (2, 4, 8):
        for start in (0, len(one) - kept, len(one) // 2 - kept // 2):
            other = bytearray(byte ^ 0xFF for byte in one)
            other[start : start + kept] = one[start : start + kept]
            made.append(bytes(other))
    return made


def test_p03_other_images_behind_the_same_placeholders_miss(daemons: Start) -> None:
    seed = 20_240_103
    print(f"seed {seed}")
    rng = random.Random(seed)
    with spaces(daemons()) as space:
        here = space(MODEL)
        one = rng.randbytes(32)
        assert push(here, MODEL, here.keys(TOKENS, extras=image(one))) == BLOCKS
        others = partly_equal(one) + [rng.randbytes(32) for _ in range(rounds(100, 100_000))]
        for other in others:
            keys = here.keys(TOKENS, extras=image(other))
            found = here.lookup(keys)
            assert found.blocks == 3  # the text before the image is shared
        for other in others[:20]:
            assert hit(here, MODEL, here.keys(TOKENS, extras=image(other))) == 3
            assert push(here, MODEL, here.keys(TOKENS, extras=image(other))) == BLOCKS - 3
        assert hit(here, MODEL, here.keys(TOKENS, extras=image(one))) == BLOCKS


def test_p03_malformed_extras_are_refused_and_nothing_is_stored(daemons: Start) -> None:
    daemon = daemons()
    with spaces(daemon) as space:
        here = space(MODEL)
        digest: Any
        for digest in (None, "", "text", b"", b"short", 7, [b"x" * 32]):
            with pytest.raises(BadRequest) as misuse:
                here.keys(TOKENS, extras=image(digest))
            assert misuse.value.reason is Reason.BAD_EXTRAS
        extras: Any
        for extras in ({}, {"adapter_digest": b"x" * 32}, b"x" * 32, "x", [], 0):
            with pytest.raises(BadRequest) as misuse:
                here.keys(TOKENS, extras=extras)
            assert misuse.value.reason is Reason.BAD_EXTRAS
    assert total(daemon, "kvstore_tier_blocks") == 0


def test_p04_embedding_prompts_of_equal_length_miss_each_other(daemons: Start) -> None:
    zeros = [0] * len(TOKENS)

    def embedding(digest: bytes, tokens: int = len(TOKENS)) -> Extras:
        return Extras(items=(ContentItem(digest, 0, tokens),), content_in_tokens=False)

    daemon = daemons()
    with spaces(daemon) as space:
        here = space(MODEL)
        one, other = (here.keys(zeros, extras=embedding(bytes([n]) * 32)) for n in (1, 2))
        assert push(here, MODEL, one) == BLOCKS
        assert here.lookup(other).blocks == here.lookup(here.keys(zeros)).blocks == 0
        assert hit(here, MODEL, one) == BLOCKS
        # Without a digest of all of it there are no keys: neither a put nor a hit.
        for extras in (
            Extras(content_in_tokens=False),
            embedding(bytes(32), len(TOKENS) - 1),
            Extras(adapter_digest=bytes(32), content_in_tokens=False),
        ):
            with pytest.raises(BadRequest) as misuse:
                here.keys(zeros, extras=extras)
            assert misuse.value.reason is Reason.UNCACHEABLE
    assert metrics(daemon)['kvstore_tier_blocks{tier="host"}'] == BLOCKS


# ---------------------------------------------------------------- P06, P07


def two_tenants(daemons: Start, **settings: Any) -> Daemon:
    return daemons(tenants__a__socket="a.sock", tenants__b__socket="b.sock", **settings)


def test_p06_no_verb_of_the_operator_is_served_to_tenants(daemons: Start) -> None:
    daemon = two_tenants(daemons)
    methods = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods
    assert len(methods) >= 12
    for path in daemon.data_sockets.values():
        with channel(path) as wire:
            for method in methods:
                call: Any = getattr(admin_pb2_grpc.AdminStub(wire), method.name)
                request = getattr(admin_pb2, method.input_type.name)()
                with pytest.raises(grpc.RpcError) as refused:
                    call(request, timeout=CALL_S)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def cancelled_calls(path: str, keys: list[Any], rows: Any) -> None:
    """A fetch and a push that are cancelled while they are under way."""
    async with AsyncClient(path, config=CONFIG) as client:
        space = client.space(MODEL)
        assert (await space.lookup(keys)).blocks == len(keys)
        calls: list[Any] = [space.fetch(keys), space.push(keys[::-1], rows), space.lookup(keys)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_p07_salted_blocks_are_let_go_on_every_path(daemons: Start) -> None:
    """Two tenants with salts take and end leases by each path; then their blocks can be evicted."""
    daemon = two_tenants(daemons)

    def fill(index: int, target: Any) -> None:
        raise KeyError("given up")

    for tenant in "ab":
        path = daemon.data_sockets[tenant]
        with Client(path, config=CONFIG) as client:
            space = Punctual(client.space(MODEL))
            for salt in (b"one", b"two" * 100):
                keys = space.keys(TOKENS, salt=salt)
                assert push(space, MODEL, keys) == BLOCKS
                assert hit(space, MODEL, keys) == BLOCKS
                with client.space(MODEL).view(keys) as views:
                    assert len(views.arrays) == BLOCKS
                with pytest.raises(KeyError):
                    space.push(space.keys(TOKENS, salt=salt + b"!"), fill)
                asyncio.run(cancelled_calls(path, keys, rows_of(MODEL, keys)))
    with RawAdmin(daemon.admin_socket) as admin:
        until("no lease is left", lambda: not _leases(admin))
        # A release that matches nothing says so.
        with RawClient(daemon.data_sockets["a"]) as a, RawClient(daemon.data_sockets["b"]) as b:
            held = a.acquire(a.open(MODEL).space_id, chain(TOKENS, BLOCK_TOKENS, salt=b"one"))
            assert held.blocks == BLOCKS
            for number in (held.lease_id, held.lease_id + 1_000, 0, 2**63):
                answer = b.release(number)
                assert (answer.released, answer.unknown) == (0, 1)
            assert admin.stats().read_leases == 1
            assert a.release(held.lease_id).released == 1
        for tenant in "ab":
            fill_up(daemon.data_sockets[tenant], 8 << 20)


def fill_up(path: str, room_bytes: int, fingerprint: Fingerprint = MODEL, seed: int = 9_000) -> int:
    """Puts twice what there is room for; every block of it is stored. How many there were."""
    stored = 0
    with Client(path, config=CONFIG) as client:
        space = Punctual(client.space(fingerprint))
        for number in range(2 * room_bytes // (64 * Prompt(fingerprint, 0, 0).block_bytes)):
            keys = Prompt(fingerprint, seed + number, 64).keys
            pushed = space.push(keys, rows_of(fingerprint, keys))
            assert pushed.stored == 64, pushed
            stored += pushed.stored
    return stored


def _leases(admin: RawAdmin) -> int:
    stats = admin.stats()
    return int(stats.read_leases + stats.view_leases + stats.write_leases)


# ---------------------------------------------------------------- P08


def test_p08_other_kv_types_miss_and_wrong_sizes_are_refused(daemons: Start) -> None:
    own = {"element_order": "own", "layout_version": "1", "attention_backend": "a", "cpu_isa": "-"}
    types = {
        name: altered(MODEL, "encoding", kv_dtype=name, scales_digest=scales, **own)
        for name, scales in (
            ("bfloat16", None),
            ("float16", None),
            ("float8_e4m3fn", "unit"),
            ("float8_e5m2", "unit"),
        )
    }
    daemon = daemons()
    with spaces(daemon) as space:
        keys = space(MODEL).keys(TOKENS)
        for written, fingerprint in enumerate(types.values(), 1):
            assert push(space(fingerprint), fingerprint, keys) == BLOCKS
            for other in list(types.values())[written:]:
                missed = space(other).lookup(keys)
                assert missed.blocks == space(other).fetch(keys).blocks == 0
                assert "encoding.kv_dtype" in [one.field for one in missed.differences]
        for fingerprint in types.values():  # each has its own bytes, although the keys are equal
            assert hit(space(fingerprint), fingerprint, keys) == BLOCKS
        # Twice as long as blocks of one byte an element.
        more = space(MODEL).keys(TOKENS[::-1])
        with pytest.raises(BadRequest) as misuse:
            space(types["float8_e5m2"]).push(more, rows_of(types["bfloat16"], more))
        assert misuse.value.reason is Reason.BAD_SIZE
    with RawClient(daemon.data_socket) as client:
        number = client.open(types["float8_e5m2"]).space_id
        reserve = pb.ReserveRequest(session=client.secret, space_id=number, chain=more[0])
        chunks = [
            pb.PushChunk(reserve=reserve),
            pb.PushChunk(header=pb.ChunkHeader(block=0), payload=bytes(4096)),
            pb.PushChunk(commit=True),
        ]
        with pytest.raises(Refused) as refused:
            client.push(chunks)
        assert refused.value.reason is Reason.BAD_SIZE
        assert client.lookup(number, more).hit_blocks == 0


# ---------------------------------------------------------------- P09

Verb = Callable[[RawAdmin, str, int], Any]
VERBS: dict[str, Verb] = {
    "epoch": lambda admin, name, space: admin.call("SetWeightEpoch", model_name=name, epoch=1),
    "model": lambda admin, name, space: admin.call("Invalidate", model_name=name),
    "space": lambda admin, name, space: admin.call("Invalidate", space_id=space),
    "everything": lambda admin, name, space: admin.call("Invalidate", everything=True),
}
"""By model name or space id."""
GENERATION = model(1 << 14)
OLD = [Prompt(GENERATION, seed, 40) for seed in range(5)]
"""200 blocks of the old weights."""
LATE = [Prompt(GENERATION, seed, 40) for seed in range(100, 108)]


def with_disk(daemons: Start, path: Path, **settings: Any) -> Daemon:
    return daemons(disk__path=str(path), disk__capacity_bytes="64MiB", **settings)


def hits(daemon: Daemon, prompts: list[Prompt]) -> int:
    """Blocks of these prompts that anybody can see or read, whatever the daemon says to the
    fingerprint.
    """
    found = 0
    with Client(daemon.data_socket, config=CONFIG) as client:
        for prompt in prompts:
            space = Punctual(client.space(prompt.fingerprint))
            found += space.lookup(prompt.keys).blocks + space.fetch(prompt.keys).blocks
    return found


@pytest.mark.parametrize("verb", sorted(VERBS) if FULL else ["epoch", "model"])
def test_p09_old_weights_stay_gone_when_killed_at_the_reply(
    daemons: Start, tmp_path: Path, record_property: Note, verb: str
) -> None:
    """200 blocks on disk and some on their way; invalidate, kill -9 at the reply, restart."""
    daemon = with_disk(daemons, tmp_path / "disk")
    with Client(daemon.data_socket, config=CONFIG) as client:
        space = Punctual(client.space(GENERATION))
        for prompt in OLD:
            assert push(space, GENERATION, prompt.keys, durable=True) == 40
        assert hits(daemon, OLD) == 2 * 200
        assert metrics(daemon)['kvstore_tier_blocks{tier="disk"}'] == 200
        saving = [threading.Thread(target=save, args=(space, prompt)) for prompt in LATE]
        with RawAdmin(daemon.admin_socket) as admin, RawClient(daemon.data_socket) as raw:
            number = raw.open(GENERATION).space_id
            for thread in saving:
                thread.start()
            VERBS[verb](admin, "small", number)
            replied = time.monotonic()
            daemon.signal(signal.SIGKILL)
            took_ms = 1e3 * (time.monotonic() - replied)
            daemon.kill()
            record(record_property, f"killed_after_{verb}", took_ms, "ms")
        for thread in saving:
            thread.join()
    daemon.restart()
    assert hits(daemon, OLD) == 0, "while the index is loaded"
    until_loaded(daemon)
    assert hits(daemon, OLD) == 0
    # What reached the daemon after the verb is of a new generation; only an epoch forbids it.
    if verb == "epoch":
        assert hits(daemon, LATE) == 0
        with Client(daemon.data_socket, config=CONFIG) as client:
            assert client.space(GENERATION).status().reason is Reason.MISS_EPOCH_STALE
        return
    with Client(daemon.data_socket, config=CONFIG) as client:
        space = Punctual(client.space(GENERATION))
        assert push(space, GENERATION, OLD[0].keys) == 40
        assert hit(space, GENERATION, OLD[0].keys) == 40


def save(space: Any, prompt: Prompt) -> None:
    """A durable put, whatever becomes of it."""
    space.push(prompt.keys, np.stack(prompt.rows()), durable=True, deadline_ms=2_000)


def test_p09_what_was_reserved_before_is_never_visible(daemons: Start, tmp_path: Path) -> None:
    """Reserved before each verb, committed durably across it and after it; then a restart."""
    daemon = with_disk(daemons, tmp_path / "disk")
    old: list[Prompt] = []
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        for name in sorted(VERBS, key=lambda name: name == "everything"):
            fingerprint = altered(GENERATION, "identity", model_name=name)
            across, after = (Prompt(fingerprint, seed, 40) for seed in (1, 2))
            space = client.open(fingerprint).space_id
            leases = []
            for prompt in (across, after):
                reserved = client.reserve(space, prompt.keys)
                client.fill(reserved, prompt.rows())
                leases.append(reserved.lease_id)
            request = pb.CommitRequest(session=client.secret, lease_id=leases[0], durable=True)
            in_flight = client.stub.Commit.future(request, timeout=CALL_S)
            VERBS[name](admin, name, space)
            with contextlib.suppress(Refused):
                assert client.commit(leases[1], durable=True).visible == 0
            with contextlib.suppress(grpc.RpcError):
                in_flight.result()
            old += [across, after]
            assert hits(daemon, old) == 0
    daemon.kill()
    daemon.restart()
    assert hits(daemon, old) == 0
    until_loaded(daemon)
    assert hits(daemon, old) == 0


def test_p09_blocks_that_are_being_demoted_stay_gone(
    daemons: Start, tmp_path: Path, record_property: Note
) -> None:
    """Invalidated while memory overflows onto the disk, then killed."""
    seed = 20_240_909
    print(f"seed {seed}")
    rng = random.Random(seed)
    daemon = with_disk(daemons, tmp_path / "disk")
    saves_seen = on_disk = 0.0
    for turn in range(rounds(2, 50)):
        prompts = [Prompt(GENERATION, 1_000 * turn + number, 40) for number in range(30)]
        with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
            space = client.open(GENERATION).space_id
            for prompt in prompts:
                client.put(space, prompt.keys, prompt.rows())
            saves_seen += total(daemon, "kvstore_saves_in_flight")
            on_disk += metrics(daemon)['kvstore_tier_blocks{tier="disk"}']
            time.sleep(rng.uniform(0, 0.01))
            VERBS[("model", "space", "everything")[turn % 3]](admin, "small", space)
            daemon.kill()
        daemon.restart()
        assert hits(daemon, prompts) == 0
        until_loaded(daemon)
        assert hits(daemon, prompts) == 0
    record(record_property, "saves_in_flight_when_invalidated", saves_seen, "saves")
    assert on_disk > 0
