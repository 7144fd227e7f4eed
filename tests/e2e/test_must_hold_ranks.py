"""Blocks of several parts: all ranks of one attempt of one engine make a block, or nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore.model.layout import layout_of
from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding, check, payload
from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon
from tests.e2e.stage import Bytes, Child, Prompt, assert_quiet, model, until
from tests.rawclient import RawAdmin, RawClient, Refused, reason

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
TWO = model(1 << 16, name="two-ranks", ranks=2)
PART = layout_of(TWO).part_bytes
BLOCKS = 8


class Engine:
    """Two rank sessions of one engine instance, and what they write."""

    def __init__(self, daemon: Daemon, stack: ExitStack, group: bytes, version: int) -> None:
        self.version = version
        self.ranks = [
            stack.enter_context(RawClient(daemon.data_socket, group=group)) for _ in range(2)
        ]
        (self.space,) = {rank.open(TWO).space_id for rank in self.ranks}

    def reserve(self, rank: int, prompt: Prompt, attempt: int = 0) -> tuple[int, int]:
        """(lease, wanted blocks); the parts are written already."""
        reserved = self.ranks[rank].reserve(self.space, prompt.keys, part=rank, attempt=attempt)
        if reserved.lease_id:
            self.ranks[rank].fill(reserved, parts(prompt, rank, self.version))
        return reserved.lease_id, len(reserved.wanted) // 4

    def commit(self, rank: int, lease: int) -> tuple[int, int, int, Reason]:
        done = self.ranks[rank].commit(lease)
        return done.visible, done.waiting, done.failed, reason(done.reason)

    def put(self, prompt: Prompt, attempt: int) -> None:
        leases = [self.reserve(rank, prompt, attempt)[0] for rank in range(2)]
        assert all(leases)
        assert self.commit(0, leases[0])[:2] == (0, len(prompt.keys))
        assert self.commit(1, leases[1])[:2] == (len(prompt.keys), 0)


def parts(prompt: Prompt, rank: int, version: int) -> list[Bytes]:
    """The rank's part of each block: bytes that say key, rank and writer."""
    return [
        payload(prompt.tag(index, 10 * version + rank), PART) for index in range(len(prompt.keys))
    ]


def visible(client: RawClient, space: int, prompt: Prompt, version: int) -> int:
    """How many blocks can be read; each must be of both ranks of this writer."""
    rows = client.get(space, prompt.keys)
    for index, row in enumerate(rows):
        if row is not None:
            halves = np.split(row, 2)
            for rank, half in enumerate(halves):
                tags = [prompt.tag(index, 10 * version + rank)]
                assert check(half, tags) is Finding.RIGHT, (index, rank)
    return sum(row is not None for row in rows)


@pytest.fixture
def daemon(daemons: Daemons) -> Daemon:
    return daemons(host__capacity_bytes="32MiB")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("first", [0, 1])
def test_nothing_is_visible_until_both_ranks_committed(
    daemon: Daemon, stack: ExitStack, first: int
) -> None:
    engine = Engine(daemon, stack, b"e1", 1)
    other = Engine(daemon, stack, b"reader", 0)
    prompt = Prompt(TWO, 1, BLOCKS)
    leases = {}
    for rank in (first, 1 - first):
        leases[rank], wanted = engine.reserve(rank, prompt)
        assert wanted == BLOCKS
        assert visible(other.ranks[0], other.space, prompt, 1) == 0
    assert engine.commit(first, leases[first]) == (0, BLOCKS, 0, Reason.OK)
    for client in (other.ranks[0], *engine.ranks):
        assert visible(client, engine.space, prompt, 1) == 0
        hit = client.lookup(engine.space, prompt.keys)
        assert hit.hit_blocks == 0
        assert reason(hit.reason) is Reason.MISS_IN_PROGRESS
    assert engine.commit(1 - first, leases[1 - first]) == (BLOCKS, 0, 0, Reason.OK)
    for client in (other.ranks[0], *engine.ranks):
        assert visible(client, engine.space, prompt, 1) == BLOCKS


def test_a_reader_that_waits_gets_the_block_when_the_last_part_comes(
    daemon: Daemon, stack: ExitStack
) -> None:
    engine = Engine(daemon, stack, b"e1", 1)
    prompt = Prompt(TWO, 2, BLOCKS)
    leases = [engine.reserve(rank, prompt)[0] for rank in range(2)]
    engine.commit(0, leases[0])
    reader = stack.enter_context(RawClient(daemon.data_socket, group=b"reader"))
    space = reader.open(TWO).space_id
    request = pb.AcquireRequest(
        session=reader.secret, space_id=space, keys=b"".join(prompt.keys), wait_ms=10_000
    )
    waiting = reader.stub.Acquire.future(request, timeout=15)
    assert not waiting.done()
    engine.commit(1, leases[1])
    assert waiting.result().leased_blocks == BLOCKS
    reader.release(waiting.result().lease_id)
    assert visible(reader, space, prompt, 1) == BLOCKS


def test_parts_of_two_engines_never_make_one_block(daemon: Daemon, stack: ExitStack) -> None:
    one = Engine(daemon, stack, b"e1", 1)
    two = Engine(daemon, stack, b"e2", 2)
    prompt = Prompt(TWO, 3, BLOCKS)
    lease_one, _ = one.reserve(0, prompt)
    lease_two, wanted = two.reserve(1, prompt)  # the part that is missing, of another instance
    assert (lease_two, wanted) == (0, 0)
    assert one.commit(0, lease_one)[:2] == (0, BLOCKS)
    assert two.reserve(1, prompt) == (0, 0)
    # Nor by committing, aborting or releasing what is the other one's.
    for client in two.ranks:
        with pytest.raises(Refused) as refused:
            client.commit(lease_one)
        assert refused.value.reason is Reason.LEASE_UNKNOWN
        assert not client.abort(lease_one).known
        assert client.release(lease_one).unknown == 1
    assert visible(two.ranks[0], two.space, prompt, 1) == 0
    lease, wanted = one.reserve(1, prompt)
    assert wanted == BLOCKS
    assert one.commit(1, lease)[0] == BLOCKS
    assert visible(two.ranks[0], two.space, prompt, 1) == BLOCKS


def test_parts_of_two_attempts_never_make_one_block(daemon: Daemon, stack: ExitStack) -> None:
    engine = Engine(daemon, stack, b"e1", 1)
    prompt = Prompt(TWO, 4, BLOCKS)
    lease, _ = engine.reserve(0, prompt, attempt=1)
    assert engine.reserve(1, prompt, attempt=2) == (0, 0)
    engine.commit(0, lease)
    assert engine.reserve(1, prompt, attempt=2) == (0, 0)
    assert visible(engine.ranks[0], engine.space, prompt, 1) == 0
    # The first attempt is given up before its second rank came; the next one may have the keys.
    engine.ranks[1].reserve(engine.space, prompt.keys, part=1, attempt=1)
    second = engine.ranks[1].reserve(engine.space, prompt.keys, part=1, attempt=1)
    assert second.reserved == BLOCKS  # its own reservation is under way already
    engine.ranks[1].detach()
    fresh = Engine(daemon, stack, b"e1", 2)
    fresh.put(prompt, attempt=2)
    assert visible(fresh.ranks[0], fresh.space, prompt, 2) == BLOCKS


@pytest.mark.parametrize("committed", ["before its commit", "after its commit"])
def test_one_ranks_death_aborts_the_whole(daemon: Daemon, stack: ExitStack, committed: str) -> None:
    prompt = Prompt(TWO, 5, BLOCKS)
    engine = Engine(daemon, stack, b"rank", 1)
    lease, _ = engine.reserve(0, prompt, attempt=9)
    with RawAdmin(daemon.admin_socket) as admin:
        with Child("rank", daemon.data_socket, 5, 9, committed.split()[0]) as child:
            assert child.hear()["wanted"] == BLOCKS
            assert engine.ranks[0].lookup(engine.space, prompt.keys).hit_blocks == 0
            child.kill()
        until("the dead rank's session ended", lambda: admin.stats().sessions == 2)
        done = engine.commit(0, lease)
        assert done[0] == 0
        assert done[3] in (Reason.WRITE_GROUP_FAILED, Reason.OK)
        assert done[2] == BLOCKS
        assert visible(engine.ranks[0], engine.space, prompt, 1) == 0
        engine.put(prompt, attempt=10)
        assert visible(engine.ranks[0], engine.space, prompt, 1) == BLOCKS
        stack.close()
        assert_quiet(admin, 1 << 16)


def test_one_ranks_abort_or_expiry_aborts_the_whole(daemon: Daemon, stack: ExitStack) -> None:
    engine = Engine(daemon, stack, b"e1", 1)
    for attempt, way in enumerate(("abort", "expire"), start=1):
        prompt = Prompt(TWO, 10 + attempt, BLOCKS)
        lease, _ = engine.reserve(0, prompt, attempt=attempt)
        assert engine.commit(0, lease)[1] == BLOCKS
        ttl_ms = 50 if way == "expire" else 0
        second = engine.ranks[1].reserve(
            engine.space, prompt.keys, part=1, attempt=attempt, ttl_ms=ttl_ms
        )
        if way == "abort":
            assert engine.ranks[1].abort(second.lease_id).known

        def given_up(prompt: Prompt = prompt) -> bool:
            hit = engine.ranks[0].lookup(engine.space, prompt.keys)
            return reason(hit.reason) is not Reason.MISS_IN_PROGRESS

        until("the write group was given up", given_up)
        assert visible(engine.ranks[0], engine.space, prompt, 1) == 0
        if way == "expire":
            with pytest.raises(Refused) as refused:
                engine.commit(1, second.lease_id)
            assert refused.value.reason is Reason.LEASE_EXPIRED
        engine.put(prompt, attempt=100 + attempt)
        assert visible(engine.ranks[0], engine.space, prompt, 1) == BLOCKS


def test_parts_that_are_not_in_the_layout_are_refused(daemon: Daemon, stack: ExitStack) -> None:
    engine = Engine(daemon, stack, b"e1", 1)
    prompt = Prompt(TWO, 20, 1)
    for part in (2, 7, 2**32 - 1):
        refusal = engine.ranks[0].reserve(engine.space, prompt.keys, part=part)
        assert refusal.lease_id == 0
        assert reason(refusal.reason) is Reason.BAD_PART


def test_a_group_misses_together(daemon: Daemon, stack: ExitStack) -> None:
    """All-or-nothing acquire: with one block gone every rank gets nothing."""
    engine = Engine(daemon, stack, b"e1", 1)
    prompt = Prompt(TWO, 21, BLOCKS)
    engine.put(prompt, attempt=1)
    with RawAdmin(daemon.admin_socket) as admin:
        admin.call("Invalidate", space_id=engine.space, keys=prompt.keys[3], why="test")
    for rank in engine.ranks:
        assert rank.acquire(engine.space, prompt.keys, all_or_nothing=True).lease_id == 0
        assert rank.acquire(engine.space, prompt.keys[:3], all_or_nothing=True).blocks == 3
        assert rank.acquire(engine.space, prompt.keys).blocks == BLOCKS - 1
