"""Lengths and names at their limits: half blocks, rounding, large messages, odd names."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.model.fingerprint import UNIT_SCALES
from kvstore.model.layout import layout_of
from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire import convert, status
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig, Fingerprint
from tests.daemon import DaemonDied, make_daemon
from tests.e2e.stage import BLOCK_TOKENS, Prompt, altered, model, record
from tests.field.conftest import Start
from tests.field.content import assert_right, hit, push, rows_of
from tests.field.rules import Punctual, metrics, rounds, total, until_loaded
from tests.rawclient import RawClient, Refused, reason

pytestmark = pytest.mark.process

Note = Callable[[str, object], None]

MODEL = model()
CONFIG = ClientConfig(deadline_ms=5_000)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2**31, tokens).tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------- P10


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_p10_a_half_block_is_never_stored_nor_served(daemons: Start, transport: Any) -> None:
    config = ClientConfig(deadline_ms=5_000, transport=transport)
    half = prompt(3 * BLOCK_TOKENS + BLOCK_TOKENS // 2)
    longer = half + prompt(2 * BLOCK_TOKENS, seed=1)
    other = half + prompt(2 * BLOCK_TOKENS, seed=2)
    daemon = daemons()
    with Client(daemon.data_socket, config=config) as client:
        space = Punctual(client.space(MODEL))
        keys = space.keys(half)
        assert len(keys) == 3
        # An engine hands over its fourth block as it is, half filled.
        rows = np.concatenate([rows_of(MODEL, keys), np.full((1, space.block_bytes), 0xEE, "u1")])
        pushed = space.push(half, rows)
        assert (pushed.stored, pushed.skipped) == (3, 0)
        assert metrics(daemon)['kvstore_tier_blocks{tier="host"}'] == 3
        for asked in (half, other, half[: 3 * BLOCK_TOKENS], longer, half + [7] * 7):
            found = space.lookup(asked)
            assert (found.blocks, found.tokens) == (3, 3 * BLOCK_TOKENS)
            assert hit(space, MODEL, space.keys(asked)) == 3
        pushed = space.push(longer, rows_of(MODEL, space.keys(longer)))
        assert (pushed.stored, pushed.present) == (2, 3)
        assert hit(space, MODEL, space.keys(longer)) == 5
        assert hit(space, MODEL, space.keys(longer[: 4 * BLOCK_TOKENS + 1])) == 4
        assert hit(space, MODEL, space.keys(other)) == 3


# ---------------------------------------------------------------- P11


def test_p11_every_length_is_counted_exactly(daemons: Start) -> None:
    with Client(daemons().data_socket, config=CONFIG) as client:
        space = Punctual(client.space(MODEL))
        for length in range(3 * BLOCK_TOKENS + 2):
            tokens = prompt(length, seed=length)
            keys, blocks = space.keys(tokens), length // BLOCK_TOKENS
            assert space.lookup(tokens).blocks == 0
            pushed = space.push(tokens, rows_of(MODEL, keys))
            assert (pushed.stored, pushed.skipped, pushed.failed) == (blocks, 0, 0)
            found = space.lookup(tokens)
            assert (found.blocks, found.tokens) == (blocks, blocks * BLOCK_TOKENS)
            assert found.reason is (Reason.OK if blocks else Reason.NOTHING_TO_DO)
            fetched = space.fetch(found)
            assert (fetched.blocks, fetched.tokens) == (blocks, blocks * BLOCK_TOKENS)
            assert_right(fetched.data, MODEL, keys, blocks)


def test_p11_a_batch_goes_through_the_smallest_staging(daemons: Start) -> None:
    """256 requests of 3 blocks and a token, where staging takes one block at a time."""
    daemon = daemons(host__staging_bytes=layout_of(MODEL).block_bytes)
    prompts = [
        prompt(3 * BLOCK_TOKENS + 1, seed=1_000 + number) for number in range(rounds(64, 256))
    ]
    with Client(daemon.data_socket, config=CONFIG) as client:
        space = Punctual(client.space(MODEL))

        def put(tokens: list[int]) -> Any:
            return space.push(tokens, rows_of(MODEL, space.keys(tokens)))

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(put, prompts))
        for pushed in answers:
            given = pushed.stored + pushed.present + pushed.reserved + pushed.skipped
            assert (given, pushed.failed, pushed.waiting) == (3, 0, 0), pushed
            assert pushed.reason in (Reason.OK, Reason.STAGING_BUSY), pushed
        assert sum(pushed.stored for pushed in answers) == total(daemon, "kvstore_tier_blocks")
        for tokens, pushed in zip(prompts, answers, strict=True):
            assert hit(space, MODEL, space.keys(tokens)) == pushed.stored
            assert put(tokens).stored == 3 - pushed.stored  # alone, nothing is busy
            assert hit(space, MODEL, space.keys(tokens)) == 3


# ---------------------------------------------------------------- P12


def test_p12_the_sdk_splits_what_is_too_large_for_a_call(
    daemons: Start, record_property: Note
) -> None:
    daemon = daemons(limits__keys_per_call_max=100)
    stored = 250
    with Client(daemon.data_socket, config=CONFIG) as client:
        space = Punctual(client.space(MODEL))
        tokens = np.arange(2_000_000, dtype=np.uint32)
        keys = space.keys(tokens)
        assert len(keys) == 125_000
        assert push(space, MODEL, keys[:stored]) == stored
        started = time.monotonic()
        found = space.lookup(tokens)
        record(record_property, "lookup_2_million_tokens", time.monotonic() - started)
        assert (found.blocks, found.tokens) == (stored, stored * BLOCK_TOKENS)
        batch = keys[:100_000]
        out = np.empty((stored + 1, space.block_bytes), np.uint8)
        assert space.fetch(batch[: stored + 1], out).blocks == stored
        assert_right(out, MODEL, keys, stored)
        # A prompt that is longer than the tier and a call keeps the head that fits, whole.
        blank = np.zeros(space.block_bytes, np.uint8)
        pushed = space.push(batch, lambda block, target: np.copyto(target, blank))
        assert pushed.reason is Reason.NO_SPACE, pushed
        parts = (pushed.stored, pushed.present, pushed.reserved, pushed.failed, pushed.skipped)
        assert sum(parts) == 100_000, pushed
        kept = pushed.stored + pushed.present
        assert (pushed.present, pushed.failed) == (stored, 0)
        assert kept == metrics(daemon)['kvstore_tier_blocks{tier="host"}'] > 3_000
        assert space.lookup(batch).blocks == space.fetch(batch[: kept + 1]).blocks == kept
        # What comes after it takes the tail first.
        assert push(space, MODEL, Prompt(MODEL, 12, 64).keys) == 64
        assert kept - 64 - 64 <= space.lookup(batch).blocks < kept
    daemon = daemons()  # as it comes: 16,384 keys a call
    with Client(daemon.data_socket, config=CONFIG) as client:
        space = Punctual(client.space(MODEL))
        assert push(space, MODEL, keys[:20]) == 20
        assert space.lookup(tokens).blocks == space.lookup(batch).blocks == 20
        assert len(space.explain(keys[:20_000])) == 20_000


def of_bytes(block_bytes: int) -> Fingerprint:
    """One token a block, so that every even number of bytes is possible."""
    heads = max(1, block_bytes >> 17)
    return altered(
        altered(MODEL, "geometry", kv_heads=heads, head_size=block_bytes // 2 // heads),
        "encoding",
        kv_dtype="float8_e4m3fn",
        scales_digest=UNIT_SCALES,
        block_tokens=1,
    )


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_p12_a_block_at_the_limit_goes_and_one_beyond_is_refused(
    daemons: Start, transport: Any
) -> None:
    limit = 1 << 16
    daemon = daemons(host__staging_bytes=limit)
    config = ClientConfig(deadline_ms=5_000, transport=transport)
    with Client(daemon.data_socket, config=config) as client:
        small = Punctual(client.space(MODEL))
        keys = small.keys(prompt(8 * BLOCK_TOKENS))
        assert push(small, MODEL, keys) == 8
        for size in (limit - 2, limit, limit + 2, 64 * limit):
            fingerprint = of_bytes(size)
            assert layout_of(fingerprint).block_bytes == size
            space = Punctual(client.space(fingerprint))
            key = space.keys([size])
            row = np.random.default_rng(size).integers(0, 256, (1, size), np.uint8)
            pushed = space.push(key, row)
            if size <= limit:
                assert (pushed.stored, pushed.reason) == (1, Reason.OK), pushed
                assert (space.fetch(key).data[:1] == row).all()
            else:
                assert (pushed.stored, pushed.reason) == (0, Reason.PART_TOO_LARGE), pushed
                assert space.lookup(key).blocks == 0
            assert hit(small, MODEL, keys) == 8
        assert client.connection().transport == transport


def test_p12_a_message_too_large_ends_no_other_stream(daemons: Start) -> None:
    daemon = daemons()
    first, rest = threading.Event(), threading.Event()
    one = Prompt(MODEL, 1, 2)

    def slowly(client: RawClient, space: int) -> Iterator[pb.PushChunk]:
        reserve = pb.ReserveRequest(session=client.secret, space_id=space, chain=b"".join(one.keys))
        rows = one.rows()
        yield pb.PushChunk(reserve=reserve)
        yield pb.PushChunk(header=pb.ChunkHeader(block=0), payload=rows[0].tobytes())
        first.set()
        assert rest.wait(20)
        yield pb.PushChunk(header=pb.ChunkHeader(block=1), payload=rows[1].tobytes())
        yield pb.PushChunk(commit=True)

    with RawClient(daemon.data_socket) as client, ThreadPoolExecutor(1) as pool:
        space = client.open(MODEL).space_id
        limit = client.welcome.limits.message_bytes_max
        streaming = pool.submit(client.push, slowly(client, space))
        try:
            assert first.wait(20)
            for beyond in (-1_000, 1):
                chunk = pb.PushChunk(payload=bytes(limit + beyond))
                query = pb.Query(space_id=space, keys=bytes(limit + beyond))
                for call in (
                    lambda chunk=chunk: client.push([chunk]),
                    lambda query=query: client.call("Lookup", pb.LookupRequest(queries=[query])),
                ):
                    with pytest.raises(Refused) as refused:
                        call()
                    typed = refused.value.reason
                    if beyond > 0:
                        typed, _ = status.reason_of(refused.value.code, ())
                        assert typed is Reason.MESSAGE_TOO_LARGE
                    assert typed is not Reason.INTERNAL
        finally:
            rest.set()
        assert streaming.result(20).stored == 2
        one.assert_right(client.get(space, one.keys))


# ---------------------------------------------------------------- P13

MARK = "qzx"
"""In every name, to be searched for."""


def names() -> dict[str, str]:
    """Odd names, each with the mark."""

    def padded(size_bytes: int, filler: str = "n") -> str:
        return MARK + filler * (size_bytes - len(MARK))

    return {
        "empty": "",
        "1 byte": "q",
        "255 bytes": padded(255),
        "256 bytes": padded(256),
        "257 bytes": padded(257),
        "4096 bytes": padded(4096),
        "slash": f"/{MARK}/a/b/",
        "dots": f"../../{MARK}/..",
        "NUL": f"{MARK}\0x",
        "newline": f"{MARK}\nlevel=error",
        "emoji": f"{MARK} \U0001f600 \U0001f468\u200d\U0001f469",
        "right to left": f"{MARK}\u202eabc\u200f\u05d0",
        "line separator": f"{MARK}\u2028",
        "quotes": f"{MARK}\"}}'{{\\",
        "percent": f"{MARK}%s%n%(x)s{{}}",
        "surrogate": f"{MARK}\ud800",
    }


FIELDS = (
    "identity.model_name",
    "identity.adapter_name",
    "identity.weights_revision",
    "geometry.cache_group",
)
EVERYWHERE = {"empty", "256 bytes", "dots", "newline", "right to left"}
"""Kinds that are tried in each field."""
REFUSED = {"empty", "257 bytes", "4096 bytes", "NUL", "newline", "line separator", "surrogate"}


def named(field: str, name: str) -> Fingerprint:
    group, _, attribute = field.partition(".")
    base = altered(MODEL, "identity", adapter_name="x", adapter_digest="d")
    return altered(base, group, **{attribute: name})


def test_p13_a_name_works_in_full_or_is_refused_at_once(daemons: Start, tmp_path: Path) -> None:
    daemon = daemons(disk__path=str(tmp_path / "disk"), disk__capacity_bytes="64MiB")
    kept: list[tuple[Fingerprint, list[Any]]] = []
    with Client(daemon.data_socket, config=CONFIG) as client:
        for kind, name in names().items():
            for field in FIELDS if kind in EVERYWHERE else FIELDS[:1]:
                if kind in REFUSED and not (kind == "empty" and field == "geometry.cache_group"):
                    with pytest.raises(BadRequest) as misuse:
                        client.space(named(field, name))
                    assert misuse.value.reason is Reason.BAD_NAME, kind
                    assert misuse.value.setting == field
                    continue
                fingerprint = named(field, name)
                space = Punctual(client.space(fingerprint))
                keys = space.keys(prompt(2 * BLOCK_TOKENS, seed=len(kept)))
                stored = push(space, fingerprint, keys, durable=True)
                assert stored == 2, (kind, field, space.status())
                kept.append((fingerprint, keys))
    assert MARK not in "".join(metrics(daemon))
    assert daemon.stop() == 0
    daemon.restart()
    until_loaded(daemon)
    with Client(daemon.data_socket, config=CONFIG) as client:
        for fingerprint, keys in kept:
            assert hit(Punctual(client.space(fingerprint)), fingerprint, keys) == 2
    assert len(kept) == len(set(names()) - REFUSED) + 3 * 3 + 1
    assert MARK not in "".join(metrics(daemon))
    assert not [path for path in tmp_path.rglob("*") if MARK in path.name]
    assert "\u202e" not in daemon.log()


def test_p13_refused_names_flood_neither_log_nor_metrics(daemons: Start) -> None:
    """What the SDK would not send, again and again."""
    daemon = daemons()
    rng = random.Random(13)
    with RawClient(daemon.data_socket) as client:
        client.open(MODEL)
        lines, series = 0, 0
        for turn in range(rounds(100, 2_000)):
            if turn == 20:
                lines, series = len(daemon.log().splitlines()), len(metrics(daemon))
            message = convert.fingerprint_to_wire(MODEL)
            name = "\n" + MARK + str(rng.random())
            message.identity.model_name = name * (1 + turn % 3)
            with pytest.raises(Refused) as refused:
                client.call("Open", pb.OpenRequest(fingerprint=message))
            assert refused.value.reason in (Reason.BAD_NAME, Reason.BAD_FINGERPRINT)
        assert len(daemon.log().splitlines()) <= lines + 2
        assert len(metrics(daemon)) == series
        assert MARK not in "".join(metrics(daemon))
        for group in (b"", b"g" * 65):
            with pytest.raises(Refused):
                RawClient(daemon.data_socket, group=group)
        # Legal names, one after the other, have no series of their own.
        for number in range(rounds(40, 1_000)):
            opened = client.open(model(name=f"{MARK}{number}"))
            assert reason(opened.reason) is Reason.OK
            series = series if number else len(metrics(daemon))
        assert len(metrics(daemon)) == series
        assert MARK not in "".join(metrics(daemon))


@pytest.mark.parametrize("kind", ["4096 bytes", "slash", "dots", "newline", "emoji"])
def test_p13_a_tenants_odd_name_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    name = names()[kind]
    odd: dict[str, Any] = {f"tenants__{name}__socket": "odd.sock"}
    daemon = make_daemon(tmp_path, **odd)
    with daemon, pytest.raises(DaemonDied) as caught:
        daemon.start()
    assert caught.value.code == 2
    assert "tenant" in caught.value.output
    assert len(caught.value.output) < 2_000
    assert not list(tmp_path.rglob("*.sock"))


def test_p13_a_long_socket_path_is_refused_with_its_setting(tmp_path: Path) -> None:
    folder = tmp_path / ("n" * 100)
    folder.mkdir()
    with make_daemon(folder) as daemon, pytest.raises(DaemonDied) as caught:
        daemon.start()
    assert caught.value.code == 2
    assert "server.runtime_dir" in caught.value.output
