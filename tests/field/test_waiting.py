"""Waiting: a daemon that is restarted or frozen, and ranks that have to agree."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.model.layout import layout_of
from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding, check, payload
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig, Rank
from tests.e2e.stage import Prompt, model, record, seconds_until, until
from tests.field.conftest import Start
from tests.field.content import hit, rows_of
from tests.field.rules import SLACK, Punctual, rounds, until_loaded
from tests.rawclient import RawAdmin, RawClient, Refused

pytestmark = pytest.mark.process

Note = Callable[[str, object], None]

MODEL = model()

# ---------------------------------------------------------------- P20


def test_p20_one_client_outlives_twenty_daemons(
    daemons: Start, tmp_path: Path, record_property: Note
) -> None:
    """TERM and KILL by turns. What a durable push said is stored is there after each."""
    daemon = daemons(disk__path=str(tmp_path / "disk"), disk__capacity_bytes="64MiB")
    durable: list[list[Any]] = []
    worst_s = 0.0
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=2_000)) as client:
        space = Punctual(client.space(MODEL), 2_000)
        for turn in range(rounds(4, 20)):
            keys = Prompt(MODEL, 20_000 + turn, 8).keys
            assert space.push(keys, rows_of(MODEL, keys), durable=True).stored == 8
            durable.append(keys)
            with client.space(MODEL).view(keys) as views:
                assert views.valid
                old = views
                # Pushed while it ends: said to be stored only if it was.
                pushing = threading.Thread(target=push_until_away, args=(space, turn))
                pushing.start()
                if turn % 2:
                    daemon.kill()
                else:
                    assert daemon.stop() == 0
                pushing.join()
                daemon.start()
                back_s = seconds_until("the client is of use", lambda: of_use(space))
                worst_s = max(worst_s, back_s)
                assert not old.valid, "a view of a daemon that is no more"
            until_loaded(daemon)
            for kept in durable:
                assert hit(space, MODEL, kept) == 8
    record(record_property, "works_after_readiness", worst_s)
    assert worst_s < 1.0 * SLACK


def of_use(space: Any) -> bool:
    """A put that is said to be stored can be read."""
    keys = Prompt(MODEL, time.monotonic_ns(), 2).keys
    if space.push(keys, rows_of(MODEL, keys)).stored < 2:
        return False
    assert hit(space, MODEL, keys) == 2
    return True


def push_until_away(space: Any, turn: int) -> None:
    """Pushes until the daemon is away; a push that was stored is there as long as it lives."""
    for number in range(2_000):
        keys = Prompt(MODEL, 21_000_000 + 10_000 * turn + number, 4).keys
        pushed = space.push(keys, rows_of(MODEL, keys))
        assert pushed.reason is not Reason.INTERNAL, pushed
        if pushed.stored < 4:
            return
        found = space.lookup(keys)
        if found.reason is not Reason.OK:
            assert not found.reason.is_miss, found
            return
        assert found.blocks == 4


# ---------------------------------------------------------------- P21


def test_p21_a_frozen_daemon_costs_a_deadline_and_then_next_to_nothing(
    daemons: Start, record_property: Note
) -> None:
    daemon = daemons()
    config = ClientConfig(deadline_ms=200)
    keys = Prompt(MODEL, 21, 8).keys
    with Client(daemon.data_socket, config=config) as client:
        space = Punctual(client.space(MODEL), 200)
        until("stored", lambda: space.push(keys, rows_of(MODEL, keys)).reason is Reason.OK)
        assert hit(space, MODEL, keys) == 8
        frozen_at = time.monotonic()
        daemon.signal(signal.SIGSTOP)
        try:
            calls: list[Callable[[], Any]] = [
                lambda: space.lookup(keys),
                lambda: space.fetch(keys),
                lambda: space.push(Prompt(MODEL, 22, 8).keys, rows_of(MODEL, keys)),
                space.status,
            ]
            answers = [call() for call in calls]  # none is late: see `Punctual`
            assert all(one.reason is not Reason.OK for one in answers)
            until("the breaker is open", lambda: calls[0]().reason is Reason.BREAKER_OPEN)
            quick: list[float] = []
            while time.monotonic() - frozen_at < rounds(2, 8):
                started = time.monotonic()
                answer = random.choice(calls)()
                quick.append(time.monotonic() - started)
                assert answer.reason is Reason.BREAKER_OPEN, answer
                time.sleep(0.002)
        finally:
            daemon.signal(signal.SIGCONT)
        back_s = seconds_until("the breaker is closed", lambda: space.fetch(keys).blocks == 8)
        assert hit(space, MODEL, keys) == 8
    median_s = float(np.median(quick))
    record(record_property, "call_while_the_breaker_is_open", median_s)
    record(record_property, "closed_after_recovery", back_s)
    assert len(quick) > 20
    assert median_s < 0.001 * SLACK
    assert back_s < 2.0 * SLACK


# ---------------------------------------------------------------- P24

FOUR = model(1 << 14, name="four-ranks", ranks=4)
PART_BYTES = layout_of(FOUR).part_bytes
BLOCKS = 8


class Engine:
    """Four rank sessions of one engine instance; the first is the scheduler's, too."""

    def __init__(self, path: str, stack: ExitStack, group: bytes) -> None:
        self.ranks = [stack.enter_context(RawClient(path, group=group)) for _ in range(4)]
        (self.space,) = {rank.open(FOUR).space_id for rank in self.ranks}
        self.attempt = 0

    def put(self, prompt: Prompt, ranks: int = 4) -> int:
        """The parts of so many ranks; how many blocks are visible then."""
        self.attempt += 1
        visible = 0
        for rank in range(ranks):
            client = self.ranks[rank]
            reserved = client.reserve(self.space, prompt.keys, part=rank, attempt=self.attempt)
            if reserved.lease_id:
                client.fill(reserved, parts(prompt, rank))
                visible += client.commit(reserved.lease_id).visible
        return visible


def parts(prompt: Prompt, rank: int) -> list[Any]:
    return [payload(prompt.tag(index, rank), PART_BYTES) for index in range(len(prompt.keys))]


def right(prompt: Prompt, index: int, row: Any) -> bool:
    """Each rank's part is its own."""
    split = np.split(row, 4)
    tags = [[prompt.tag(index, rank)] for rank in range(4)]
    return all(check(part, tag) is Finding.RIGHT for part, tag in zip(split, tags, strict=True))


def test_p24_three_of_four_parts_are_a_miss_for_every_rank(daemons: Start) -> None:
    daemon = daemons()
    prompt = Prompt(FOUR, 24, BLOCKS)
    with ExitStack() as stack:
        engine = Engine(daemon.data_socket, stack, b"tp4")
        stranger = Engine(daemon.data_socket, stack, b"other")
        assert engine.put(prompt, ranks=3) == 0
        sdk = stack.enter_context(
            Client(daemon.data_socket, config=ClientConfig(deadline_ms=5_000))
        )
        ranks = [Punctual(sdk.space(FOUR, Rank(tensor=rank))) for rank in range(4)]
        for client in (*engine.ranks, *stranger.ranks):
            assert client.lookup(engine.space, prompt.keys).hit_blocks == 0
            assert client.acquire(engine.space, prompt.keys, all_or_nothing=True).blocks == 0
            assert client.acquire(engine.space, prompt.keys).blocks == 0
        for space in ranks:
            assert space.lookup(prompt.keys).blocks == space.fetch(prompt.keys).blocks == 0
        # The fourth rank of another engine does not complete it.
        reserved = stranger.ranks[3].reserve(engine.space, prompt.keys, part=3, attempt=1)
        assert not reserved.lease_id
        fourth = engine.ranks[3].reserve(engine.space, prompt.keys, part=3, attempt=engine.attempt)
        engine.ranks[3].fill(fourth, parts(prompt, 3))
        assert engine.ranks[3].commit(fourth.lease_id).visible == BLOCKS
        for rank, space in enumerate(ranks):
            fetched = space.fetch(prompt.keys, part=True, all_or_nothing=True)
            assert fetched.blocks == BLOCKS
            for index, row in enumerate(fetched.data):
                assert check(row, [prompt.tag(index, rank)]) is Finding.RIGHT


def test_p24_all_ranks_use_what_one_lease_of_a_request_says(daemons: Start) -> None:
    """Blocks come and go while four ranks ask; one request is one lease, and one number for all."""
    seed = 2_024
    print(f"seed {seed}")
    daemon = daemons()
    prompts = [Prompt(FOUR, 240 + number, BLOCKS) for number in range(4)]
    over = threading.Event()
    numbers: set[int] = set()

    def come_and_go() -> None:
        rng = random.Random(seed)
        with ExitStack() as stack, RawAdmin(daemon.admin_socket) as admin:
            writer = Engine(daemon.data_socket, stack, b"writer")
            while not over.is_set():
                prompt = rng.choice(prompts)
                key = rng.choice(prompt.keys)
                admin.call("Invalidate", space_id=writer.space, keys=key, why="test")
                writer.put(rng.choice(prompts))

    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        engine = Engine(daemon.data_socket, stack, b"tp4")
        for prompt in prompts:
            assert engine.put(prompt) == BLOCKS
        changing = pool.submit(come_and_go)
        rng = random.Random(seed + 1)

        def loaded(rank: RawClient, leased: Any, prompt: Prompt) -> int:
            """The leading run that a rank can load by the scheduler's lease."""
            rows = rank.copy(leased)
            run = next((at for at, row in enumerate(rows) if row is None), len(rows))
            assert all(right(prompt, index, rows[index]) for index in range(run))
            return run

        try:
            for turn in range(rounds(150, 10_000)):
                prompt = rng.choice(prompts)
                one = rng.random() < 0.5
                leased = engine.ranks[0].acquire(
                    engine.space, prompt.keys, all_or_nothing=one, request_id=f"r{turn}"
                )
                jobs = [pool.submit(loaded, rank, leased, prompt) for rank in engine.ranks]
                runs = {job.result() for job in jobs} if leased.lease_id else {0}
                assert len(runs) == 1, runs
                assert not one or runs <= {0, BLOCKS}
                numbers |= runs
                if leased.lease_id:  # any rank of the group may end it, one of them does
                    assert rng.choice(engine.ranks).release(leased.lease_id).released == 1
        finally:
            over.set()
            changing.result()
    print(f"hits seen: {sorted(numbers)}")
    assert len(numbers) > 1


def test_p24_a_lease_of_the_group_is_no_lease_of_others(daemons: Start) -> None:
    daemon = daemons()
    prompt = Prompt(FOUR, 249, BLOCKS)
    with ExitStack() as stack:
        engine = Engine(daemon.data_socket, stack, b"tp4")
        stranger = Engine(daemon.data_socket, stack, b"other")
        assert engine.put(prompt) == BLOCKS
        leased = engine.ranks[0].acquire(engine.space, prompt.keys)
        assert stranger.ranks[0].release(leased.lease_id).unknown == 1
        with pytest.raises(Refused):
            stranger.ranks[0].call("Commit", pb.CommitRequest(lease_id=leased.lease_id))
        assert engine.ranks[3].release(leased.lease_id).released == 1
