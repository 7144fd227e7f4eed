"""Lifetime on the unhappy path: what is dropped, cancelled, timed out, aborted, killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import AsyncClient, Client, ClientConfig
from tests.daemon import Daemon
from tests.e2e.stage import Child, Prompt, model, record, until
from tests.field.child import child
from tests.field.conftest import Start
from tests.field.content import assert_right, push, rows_of
from tests.field.rules import SLACK, Punctual, in_time, metrics, rounds
from tests.rawclient import CALL_S, RawAdmin, RawClient, Refused

pytestmark = pytest.mark.process

Note = Callable[[str, object], None]

MODEL = model()
CONFIG = ClientConfig(deadline_ms=5_000)


def leases(admin: RawAdmin) -> int:
    stats = admin.stats()
    return int(stats.read_leases + stats.view_leases + stats.write_leases)


def fill_up(client: Client, room_bytes: int, *, seed: int) -> None:
    """Puts twice what there is room for; each put succeeds."""
    space = Punctual(client.space(MODEL))
    for number in range(2 * room_bytes // (64 * 4096)):
        keys = Prompt(MODEL, seed + number, 64).keys
        pushed = space.push(keys, rows_of(MODEL, keys))
        assert (pushed.stored, pushed.reason) == (64, Reason.OK), pushed


# ---------------------------------------------------------------- P14


class Careless:
    """What clients do that do not take care, each way once a call."""

    def __init__(self, daemon: Daemon, client: Client, rng: random.Random) -> None:
        self.daemon = daemon
        self.client = client
        self.rng = rng
        self.prompt = Prompt(MODEL, 14, 48)
        self.rows = np.stack(self.prompt.rows())
        self.space = client.space(MODEL)
        self.fresh = 1_000_000
        self.usual_ms = 0.0
        """What a push takes here and now, so that deadlines fall into all of it."""
        self.outcomes: Counter[str] = Counter()

    def some(self) -> list[Any]:
        first = self.rng.randrange(40)
        return self.prompt.keys[first : first + self.rng.randrange(1, 9)]

    def new(self) -> Prompt:
        self.fresh += 1
        return Prompt(MODEL, self.fresh, 8)

    def drop_the_object(self) -> None:
        entered = self.space.view(self.some())
        views = entered.__enter__()
        self.outcomes["dropped"] += len(views.arrays)
        del entered, views

    def vanish(self) -> None:
        """Leases of each kind, then the sockets are closed without a word."""
        client = RawClient(self.daemon.data_socket, group=b"vanishes")
        space = client.open(MODEL).space_id
        client.acquire(space, self.some())
        client.acquire(space, self.some(), view=True)
        assert client.reserve(space, self.new().keys).lease_id
        client.vanish()
        self.outcomes["vanished"] += 1

    def time_out(self) -> None:
        started = time.monotonic()
        assert self.space.push(self.new().keys, self.rows[:8]).stored == 8
        self.usual_ms = 1e3 * (time.monotonic() - started)
        deadline_ms = self.rng.randint(1, max(3, int(1.2 * self.usual_ms)))
        calls: tuple[Callable[[], Any], ...] = (
            lambda: self.space.fetch(self.some(), deadline_ms=deadline_ms),
            lambda: self.space.push(self.new().keys, self.rows[:8], deadline_ms=deadline_ms),
        )
        for _ in range(5):
            answer = in_time(self.rng.choice(calls), deadline_ms)
            self.outcomes[f"timed out: {answer.reason.name}"] += 1

    def cancel(self) -> None:
        asyncio.run(self._cancel())

    async def _cancel(self) -> None:
        async with AsyncClient(self.daemon.data_socket, config=CONFIG) as client:
            space = client.space(MODEL)
            await space.lookup(self.some())
            for _ in range(4):
                calls = [
                    space.fetch(self.some()),
                    space.fetch(self.new().keys, wait_ms=4_000),
                    space.push(self.new().keys, self.rows[:8]),
                ]
                tasks = [asyncio.create_task(call) for call in calls]
                await asyncio.sleep(self.rng.uniform(0, 0.005))
                for task in tasks:
                    task.cancel()
                answers = await asyncio.gather(*tasks, return_exceptions=True)
                gone = sum(isinstance(one, asyncio.CancelledError) for one in answers)
                self.outcomes["cancelled"] += gone
                # The next calls of this very client are as good as ever.
                assert (await space.fetch(self.prompt.keys[:2])).blocks == 2

    def abort(self) -> None:
        def fill(index: int, target: Any) -> None:
            raise KeyError("given up")

        with pytest.raises(KeyError):
            self.space.push(self.new().keys, fill)
        self.outcomes["aborted"] += 1

    def exit_the_process(self) -> None:
        with Child("hold", self.daemon.data_socket, f"x{self.fresh}", "alone") as one:
            one.hear()
            one.kill()
        self.outcomes["killed"] += 1


def test_p14_careless_clients_keep_no_capacity(
    daemons: Start, tmp_path: Path, record_property: Note
) -> None:
    seed = 20_240_314
    print(f"seed {seed}")
    daemon = daemons(
        host__capacity_bytes="8MiB",
        host__staging_bytes="1MiB",
        disk__path=str(tmp_path / "disk"),
        disk__capacity_bytes="64MiB",
    )
    with (
        Client(daemon.data_socket, config=CONFIG) as client,
        RawAdmin(daemon.admin_socket) as admin,
    ):
        one = Careless(daemon, client, random.Random(seed))
        assert push(Punctual(one.space), MODEL, one.prompt.keys, durable=True) == 48
        one.exit_the_process()
        ways = (one.drop_the_object, one.vanish, one.time_out, one.time_out, one.cancel, one.abort)
        for _ in range(rounds(80, 10_000)):
            one.rng.choice(ways)()
        print(dict(one.outcomes))
        assert one.outcomes["cancelled"] > 0
        assert one.outcomes["timed out: DEADLINE_EXCEEDED"] > 0
        # With the client still there: what it lost ends by itself, soon after its deadline.
        started = time.monotonic()
        until("no lease is left", lambda: leases(admin) == 0)
        record(record_property, "leases_gone_after", time.monotonic() - started)
        fill_up(client, 7 << 20, seed=140_000)
        assert admin.stats().tiers[0].evictions > 0
        # And what only the disk has by now is brought back.
        assert 1 in one.space.lookup(one.prompt.keys).tiers
        fetched = Punctual(one.space).fetch(one.prompt.keys)
        assert fetched.blocks == 48, fetched
        assert_right(fetched.data, MODEL, one.prompt.keys, 48)


# ---------------------------------------------------------------- P15


def room(daemon: Daemon) -> tuple[float, ...]:
    now = metrics(daemon)
    names = ("tier_used_bytes", "tier_free_slots", "tier_blocks", "tier_regions")
    return tuple(now[f'kvstore_{name}{{tier="host"}}'] for name in names)


def test_p15_what_is_planned_and_never_run_leaves_no_hole(daemons: Start) -> None:
    daemon = daemons()
    prompts = [Prompt(MODEL, 15_000 + number, 16) for number in range(8)]
    with RawClient(daemon.data_socket) as client, Client(daemon.data_socket, config=CONFIG) as sdk:
        space = client.open(MODEL).space_id
        client.put(space, prompts[0].keys[:8], prompts[0].rows()[:8])
        client.staging_map()
        before = room(daemon)
        for turn in range(rounds(160, 10_000)):
            prompt = prompts[turn % 8]
            leased = client.acquire(space, prompt.keys)
            assert leased.blocks == (8 if turn % 8 == 0 else 0)
            reserved = client.reserve(space, prompt.keys, request_id="again")
            assert len(reserved.wanted) // 4 == 16 - leased.blocks
            assert client.abort(reserved.lease_id).known
            if leased.lease_id:
                assert client.release(leased.lease_id).released == 1
            answers = [
                client.lookup(space, prompt.keys, request_id="again").SerializeToString()
                for _ in range(5 if turn < 100 else 1)
            ]
            assert len(set(answers)) == 1
        assert room(daemon) == before
        there = Punctual(sdk.space(MODEL))
        for prompt in prompts:
            pushed = there.push(prompt.keys, np.stack(prompt.rows()))
            assert (pushed.stored, pushed.reserved) == (8 if prompt is prompts[0] else 16, 0)
            assert there.lookup(prompt.keys).blocks == 16
            prompt.assert_right(list(there.fetch(prompt.keys).data))


# ---------------------------------------------------------------- P16


class Race:
    """Commit, abort, deadline and disconnection meet at one reservation of four blocks."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.path = daemon.data_socket
        self.rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.owners: dict[bytes, Prompt] = {}

    def run(self, pool: ThreadPoolExecutor, owner: RawClient, peer: RawClient, seed: int) -> None:
        prompt = Prompt(MODEL, 160_000 + seed, 4)
        dies = seed % 4 == 0
        writer = RawClient(self.path, group=b"race") if dies else owner
        try:
            space = writer.open(MODEL).space_id
            ttl_ms = self.rng.choice((1, 2, 3, 1_000))
            reserved = until(
                "it is reserved",
                lambda: self.reserve((writer, owner, peer), space, prompt, ttl_ms),
            )
            writer.fill(reserved, prompt.rows())
            contenders: list[Callable[[], Any]] = [
                lambda: writer.commit(reserved.lease_id),
                lambda: peer.abort(reserved.lease_id),
                writer.vanish if dies else lambda: peer.release(reserved.lease_id),
            ]
            start = threading.Barrier(3)
            waits = [self.rng.uniform(0, 0.003) for _ in contenders]
            jobs = list(zip(waits, contenders, strict=True))
            answers = list(pool.map(lambda job: self.one(start, *job), jobs))
        finally:
            if dies:
                writer.close()
        found = self.settled(peer, space, prompt)
        there = sum(row is not None for row in found)
        assert there in (0, 4), "some blocks of a commit and not the others"
        said = answers[0]
        if isinstance(said, pb.CommitReply):  # an abort that came too late only ends the waiting
            assert there == said.visible + said.waiting, (answers, there)
        elif not dies:
            assert there == 0, (answers, there)
        if there:
            prompt.assert_right(found)
        else:  # nobody's any more: the next writer gets them
            assert peer.put(space, prompt.keys, prompt.rows()).visible == 4
        self.outcomes["committed" if there else "given up"] += 1

    @staticmethod
    def reserve(clients: tuple[RawClient, ...], space: int, prompt: Prompt, ttl_ms: int) -> Any:
        """By the first client. Of those that vanished the memory is free once this process, by
        another connection, says that it has unmapped it.
        """
        for client in clients:
            client.unmap()
        reserved = clients[0].reserve(space, prompt.keys, ttl_ms=ttl_ms)
        assert reserved.lease_id or reserved.reason == pb.REASON_STAGING_BUSY, reserved
        return reserved if reserved.lease_id else None

    @staticmethod
    def settled(peer: RawClient, space: int, prompt: Prompt) -> list[Any]:
        """The blocks once nobody is about to publish them."""
        until(
            "the race is over",
            lambda: 255 not in peer.lookup(space, prompt.keys).tiers,
        )
        return list(peer.get(space, prompt.keys))

    @staticmethod
    def one(start: threading.Barrier, wait_s: float, call: Callable[[], Any]) -> Any:
        start.wait(CALL_S)
        time.sleep(wait_s)
        try:
            return call()
        except (Refused, grpc.RpcError, ValueError) as error:
            return error


def test_p16_one_of_commit_abort_deadline_and_disconnection_wins(daemons: Start) -> None:
    daemon = daemons(host__capacity_bytes="24MiB")
    race = Race(daemon, 16)
    print("seed 16")
    count = rounds(120, 5_000)
    with (
        RawClient(daemon.data_socket, group=b"race") as owner,
        RawClient(daemon.data_socket, group=b"race") as peer,
        ThreadPoolExecutor(3) as pool,
    ):
        for seed in range(count):
            race.run(pool, owner, peer, seed)
        print(dict(race.outcomes))
        assert len(race.outcomes) == 2, race.outcomes
        # No slot has two owners: the places of all live blocks differ, and each holds its own.
        space = owner.open(MODEL).space_id
        prompts = [Prompt(MODEL, 160_000 + seed, 4) for seed in range(count)]
        leases_held, places = [], []
        for prompt in prompts[-600:]:
            leased = owner.acquire(space, prompt.keys)
            leases_held.append(leased.lease_id)
            for index, row in enumerate(owner.copy(leased)):
                if row is not None:
                    assert prompt.finding(index, row) is Finding.RIGHT
                    places.append(leased.places[index][:2])
        assert len(places) == len(set(places)) > 400
        owner.release(*filter(None, leases_held))


# ---------------------------------------------------------------- P18


def test_p18_equal_ids_of_many_clients_do_not_mix(daemons: Start) -> None:
    """Eight clients, some of one engine, all with one request id and one attempt; some die."""
    daemon = daemons()
    failures: list[str] = []
    ready = threading.Barrier(8)

    def work(number: int) -> None:
        # Two pairs share an engine, too; four are engines of their own.
        group = b"engine-%d" % (number // 2 if number < 4 else number)
        rng = random.Random(number)
        client = RawClient(daemon.data_socket, group=group, engine_id="same")
        space = client.open(MODEL).space_id
        ready.wait(CALL_S)
        for turn in range(rounds(12, 200)):
            own = Prompt(MODEL, 180_000 + 1_000 * number + turn, number + 1)
            everyones = Prompt(MODEL, 189_000 + turn, 4)
            for prompt in (own, everyones):
                more: dict[str, Any] = {"request_id": "same", "attempt": 1}
                done = client.put(space, prompt.keys, prompt.rows(), **more)
                if prompt is own and done.visible != number + 1:
                    failures.append(f"{number}: {done.visible} blocks stored of its own")
                hit = client.lookup(space, prompt.keys, request_id="same").hit_blocks
                if prompt is own and hit != number + 1:
                    failures.append(f"{number}: a hit of {hit} blocks")
                for index, row in enumerate(client.get(space, prompt.keys, request_id="same")):
                    if row is not None and prompt.finding(index, row) is not Finding.RIGHT:
                        failures.append(f"{number}: block {index} of {turn}")
            if number % 3 == 2 and turn and rng.random() < 0.3:
                client.acquire(space, own.keys, view=True, request_id="same")
                client.reserve(space, Prompt(MODEL, turn, 4).keys, request_id="same", attempt=1)
                client.vanish()
                client = RawClient(daemon.data_socket, group=group, engine_id="same")
        client.close()

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(work, number) for number in range(8)]:
            job.result()
    assert failures == []
    with RawAdmin(daemon.admin_socket) as admin:
        until("nothing is left", lambda: leases(admin) == admin.stats().sessions == 0)
        traced = admin.call("Trace", request_id="same").records
        assert len(traced) > 8 * 12


# ---------------------------------------------------------------- P19


def test_p19_many_leases_of_the_dead_delay_nobody(daemons: Start, record_property: Note) -> None:
    daemon = daemons()
    deaths, count = rounds(3, 100), rounds(800, 5_000)
    slow: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        with RawAdmin(daemon.admin_socket) as admin, RawClient(daemon.data_socket) as client:
            space = client.open(MODEL).space_id
            keys = Prompt(MODEL, 1, 1).keys
            while not stop.is_set():
                started = time.monotonic()
                admin.stats()
                client.lookup(space, keys)
                slow.append(time.monotonic() - started)
                time.sleep(0.002)

    with contextlib.ExitStack() as stack, RawAdmin(daemon.admin_socket) as admin:
        worst_s = 0.0
        for begun in range(0, deaths, 3):
            dying = [
                stack.enter_context(child("leases", daemon.data_socket, count)) for _ in range(3)
            ]
            assert [one.hear()["leases"] for one in dying] == [count] * 3
            asking = threading.Thread(target=ask)
            stop.clear()
            asking.start()
            try:
                for left, one in enumerate(dying, 1):
                    started = time.monotonic()
                    one.kill()
                    rest = (3 - left) * count
                    until("its leases are gone", lambda rest=rest: leases(admin) <= rest)  # type: ignore[misc]
                    worst_s = max(worst_s, time.monotonic() - started)
                    time.sleep(max(0.0, 0.2 - (time.monotonic() - started)))
            finally:
                stop.set()
                asking.join()
            assert begun < deaths
    record(record_property, "leases_of_the_dead_gone_after", worst_s)
    p99_s = float(np.percentile(slow, 99))
    record(record_property, "p99_of_calls_beside_deaths", p99_s)
    assert worst_s < 1.0 * SLACK
    assert p99_s < 0.1 * SLACK
