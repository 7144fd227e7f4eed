"""Clients that die, stop and wake late: nothing of theirs stays, nothing of others is harmed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding
from tests.daemon import Daemon
from tests.e2e.stage import Child, Prompt, assert_quiet, held, model, record, until
from tests.rawclient import RawAdmin, RawClient, reason

pytestmark = pytest.mark.process

Daemons = Callable[..., Daemon]
Note = Callable[[str, object], None]

FREED_S = 1.0
"""What is promised; tests allow ten times of it and record what it was."""
SLACK = 10


def flood(daemon: Daemon, stop: threading.Event, *, seed: int) -> None:
    """Puts new blocks until told to stop, so that everything that may be evicted is."""
    with RawClient(daemon.data_socket, group=b"flood") as client:
        space = client.open(model()).space_id
        while not stop.is_set():
            prompt = Prompt(model(), seed, blocks=256)
            client.put(space, prompt.keys, prompt.rows())
            seed += 1


@contextmanager
def flooding(daemon: Daemon, seed: int = 10_000) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=flood, args=(daemon, stop), kwargs={"seed": seed})
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def evict_everything(daemon: Daemon, capacity_bytes: int, *, seed: int) -> None:
    """Puts twice what fits."""
    with RawClient(daemon.data_socket, group=b"evict") as client:
        space = client.open(model()).space_id
        for number in range(2 * capacity_bytes // (512 * 4096)):
            prompt = Prompt(model(), seed + number, blocks=512)
            client.put(space, prompt.keys, prompt.rows())


# ---------------------------------------------------------------- death


@pytest.mark.parametrize("fork", ["alone", "fork"])
def test_what_a_killed_client_held_is_freed(
    daemons: Daemons, record_property: Note, fork: str
) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    with RawAdmin(daemon.admin_socket) as admin:
        worst = 0.0
        for turn in range(3):
            with Child("hold", daemon.data_socket, f"g{turn}", fork) as child:
                said = child.hear()
                before = held(admin.stats())
                assert before["read_leases"] == 16
                assert before["view_leases"] == 8
                assert before["write_leases"] == 8
                assert before["sessions"] == 1
                assert admin.stats().spaces_held == 1
                assert bool(said["forked"]) == (fork == "fork")
                started = time.monotonic()
                child.kill()
                assert_quiet(admin, 4096, FREED_S * SLACK)
                worst = max(worst, time.monotonic() - started)
                if said["forked"]:
                    assert Path(f"/proc/{said['forked']}").exists()  # it keeps all open, still
                spaces = admin.call("Spaces").spaces
                assert said["held_space"] not in [space.space_id for space in spaces]
                assert admin.stats().spaces_held == 0
        record(record_property, f"freed_after_kill_{fork}", worst)
        # What it had reserved is nobody's: others can put the very same blocks.
        with RawClient(daemon.data_socket, group=b"heir") as client:
            space = client.open(model()).space_id
            prompt = Prompt(model(), int.from_bytes(b"g0", "little"), blocks=24)
            stored = client.put(space, prompt.keys, prompt.rows())
            assert reason(stored.reason) is Reason.OK
            prompt.assert_right(client.get(space, prompt.keys))
        assert_quiet(admin, 4096)


def test_held_space_ends_with_its_group_not_with_one_session(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    incomplete = model(revision=None)
    with (
        RawAdmin(daemon.admin_socket) as admin,
        RawClient(daemon.data_socket, group=b"g0") as peer,
    ):
        with Child("hold", daemon.data_socket, "g0", "alone") as child:
            child.hear()
            assert peer.open(incomplete).review_id
            child.kill()
        until("the child's session ended", lambda: admin.stats().sessions == 1)
        assert admin.stats().spaces_held == 2  # the peer is of the same group
        peer.detach()
        until("held spaces ended", lambda: admin.stats().spaces_held == 0)
        states = {one.state for one in admin.call("Reviews", all=True).reviews}
        assert states == {"ended"}


def test_a_client_without_fd_socket_is_freed_with_its_connection(
    daemons: Daemons, record_property: Note
) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    prompt = Prompt(model(), seed=5, blocks=8)
    with RawAdmin(daemon.admin_socket) as admin:
        client = RawClient(daemon.data_socket, fd=False)
        space = client.open(model()).space_id
        assert client.reserve(space, prompt.keys).lease_id
        assert admin.stats().write_leases == 1
        client.close()
        record(record_property, "freed_after_disconnect", assert_quiet(admin, 4096))


def test_many_deaths_leave_nothing_and_delay_nobody(
    daemons: Daemons, record_property: Note
) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    with RawAdmin(daemon.admin_socket) as admin:
        slowest = 0.0
        with children_that_hold(daemon, 6) as children:
            for child in children:
                child.hear()
            assert admin.stats().sessions == 6
            for child in children:
                child.kill()
                started = time.monotonic()
                admin.stats()
                slowest = max(slowest, time.monotonic() - started)
            assert_quiet(admin, 4096, FREED_S * SLACK)
        record(record_property, "slowest_call_while_clients_die", slowest)
        assert slowest < 1.0


@contextmanager
def children_that_hold(daemon: Daemon, count: int) -> Iterator[list[Child]]:
    children = [Child("hold", daemon.data_socket, f"m{n}", "alone") for n in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.end()


# ---------------------------------------------------------------- waking late


def test_a_stopped_reader_wakes_to_a_miss(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes="8MiB")
    prompt = Prompt(model(), seed=1, blocks=16)
    with RawClient(daemon.data_socket) as client:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        with Child("late_reader", daemon.data_socket, 100, 1) as child:
            assert child.hear()["leased"] == 16
            child.stop()
            with RawAdmin(daemon.admin_socket) as admin:
                until("the lease ended", lambda: not admin.stats().read_leases)
            evict_everything(daemon, 8 << 20, seed=5_000)
            assert client.get(space, prompt.keys) == [None] * 16
            child.wake()
            said = child.ask()
            assert said["findings"] == {"miss": 16}
            assert said["unknown"] == 1  # its lease was gone: it is told so


def test_a_reader_stopped_at_random_moments_never_takes_other_bytes(
    daemons: Daemons, record_property: Note
) -> None:
    daemon = daemons(host__capacity_bytes="8MiB")
    prompt = Prompt(model(), seed=2, blocks=16)
    seed = 20_240_229
    rng = random.Random(seed)
    print(f"seed {seed}")
    with RawClient(daemon.data_socket) as client, flooding(daemon):
        space = client.open(model()).space_id
        with Child("reader", daemon.data_socket, 2, 6) as child:
            child.hear()
            end = time.monotonic() + 6.5
            version = 0
            while time.monotonic() < end and version < 63:
                client.put(space, prompt.keys, prompt.rows(version))
                version += 1
                time.sleep(rng.uniform(0.0, 0.03))
                child.stop()
                time.sleep(rng.uniform(0.03, 0.12))  # longer than its lease of 20 ms
                child.wake()
            findings = child.hear(60)["findings"]
    for name in ("right", "changed", "absent", "wrong"):
        record(record_property, f"stopped_reader_{name}", findings.get(name, 0), "blocks")
    assert findings.get("wrong", 0) == 0
    assert findings.get("right", 0) > 0
    if not findings.get("changed", 0):
        pytest.skip("chance: no slot was reused between a lease and its check in this run")


def test_a_stopped_writer_cannot_alter_a_published_block(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    prompt = Prompt(model(), seed=3, blocks=8)
    own = Prompt(model(), seed=4, blocks=1)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        with Child("late_writer", daemon.data_socket, 100, 3) as child:
            assert child.hear()["wanted"] == 8
            child.stop()
            assert client.reserve(space, prompt.keys).reserved == 8  # it is still its turn
            # Its deadline passes: the keys are free, and somebody else publishes them.
            until(
                "the reservation expired",
                lambda: client.put(space, prompt.keys, prompt.rows()).visible == 8,
            )
            prompt.assert_right(client.get(space, prompt.keys))
            child.wake()
            assert child.ask()["commit"] == "LEASE_EXPIRED"
            for _ in range(20):
                prompt.assert_right(client.get(space, prompt.keys))
                own.assert_right(client.get(space, own.keys))
        client.close()
        assert_quiet(admin, 4096)


def test_a_view_is_never_overwritten_under_its_holder(
    daemons: Daemons, record_property: Note
) -> None:
    daemon = daemons(host__capacity_bytes="8MiB", limits__lease_ttl_ms=100)
    prompt = Prompt(model(), seed=6, blocks=64)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        view = client.acquire(space, prompt.keys, view=True)
        assert view.reply.ttl_ms == 0
        slots = [client.region(p.region).slot(p.slot, 4096) for p in view.places]
        with flooding(daemon):
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                for index, slot in enumerate(slots):
                    assert prompt.finding(index, slot) is Finding.RIGHT
        evict_everything(daemon, 8 << 20, seed=70_000)
        evictions = admin.stats().tiers[0].evictions
        record(record_property, "evictions_beside_a_view", evictions, "blocks")
        assert evictions > 2_000
        for index, (slot, place) in enumerate(zip(slots, view.places, strict=True)):
            assert prompt.finding(index, slot) is Finding.RIGHT
            assert client.region(place.region).generation(place.slot) == place.generation
        # Invalidated, the blocks are invisible at once; what the holder sees stays what it was.
        admin.call("Invalidate", space_id=space, keys=b"".join(prompt.keys), why="test")
        assert client.get(space, prompt.keys) == [None] * 64
        evict_everything(daemon, 8 << 20, seed=90_000)
        for index, slot in enumerate(slots):
            assert prompt.finding(index, slot) is Finding.RIGHT
        assert client.release(view.lease_id).released == 1
        client.close()
        assert_quiet(admin, 4096)


def test_views_are_bounded_and_freed(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes="8MiB")
    prompt = Prompt(model(), seed=7, blocks=600)
    with RawClient(daemon.data_socket) as client:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        limit = client.welcome.limits.view_bytes_per_session_max // 4096
        assert limit == 512
        views = [
            client.acquire(space, prompt.keys[n * 64 : n * 64 + 64], view=True) for n in range(8)
        ]
        assert sum(view.blocks for view in views) == limit
        over = client.acquire(space, prompt.keys[:1], view=True)
        assert over.lease_id == 0
        assert over.reason is Reason.VIEW_LIMIT
        assert client.release(*[view.lease_id for view in views]).released == 8
        assert client.acquire(space, prompt.keys[:64], view=True).blocks == 64


def test_a_client_cannot_change_what_it_reads(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes="16MiB")
    prompt = Prompt(model(), seed=8, blocks=1)
    with RawClient(daemon.data_socket) as client:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        with Child("tamper", daemon.data_socket, 8) as child:
            ways = child.hear()["ways"]
        done = [way for way, outcome in ways.items() if outcome == "done"]
        assert not done
        prompt.assert_right(client.get(space, prompt.keys))


# ---------------------------------------------------------------- memory of the dead


def test_closed_memory_of_a_living_client_is_not_reused(daemons: Daemons) -> None:
    """A client that was told to unmap and does not keeps its bytes from others until it dies."""
    daemon = daemons(
        host__capacity_bytes="16MiB",
        tenants__a__socket="a.sock",
        tenants__b__socket="b.sock",
    )
    prompt = Prompt(model(), seed=9, blocks=3_000, tenant="a")
    with (
        RawAdmin(daemon.admin_socket) as admin,
        RawClient(daemon.data_sockets["b"]) as b,
    ):
        with RawClient(daemon.data_sockets["a"]) as a:
            space = a.open(model()).space_id
            a.put(space, prompt.keys, prompt.rows())
            for _ in range(3):
                leased = a.acquire(space, prompt.keys)
                a.copy(leased)  # maps every region
                a.release(leased.lease_id)
            tags = {
                index: row.copy() for index, row in enumerate(a.copy(leased)) if row is not None
            }
            assert tags
            other = Prompt(model(1 << 16), seed=10, blocks=160, tenant="b")
            there = b.open(model(1 << 16)).space_id
            for _ in range(20):
                b.put(there, other.keys, other.rows(), patience_s=0)
            closing = admin.stats().tiers[0].closing_regions
            assert closing > 0
            # Still mapped, still the old bytes: memory that a process can see is given to nobody.
            for index, place in enumerate(leased.places):
                if index in tags and place.region in a.regions:
                    row = a.regions[place.region].slot(place.slot, 4096)
                    assert (row == tags[index]).all()
        until("the memory of the ended client is free", lambda: not held_closing(admin))

        def quota_reached() -> bool:
            b.put(there, other.keys, other.rows())
            return admin.stats().tenants[1].used_bytes > 5 << 20

        until("the other tenant has its share", quota_reached)


def held_closing(admin: RawAdmin) -> int:
    return int(admin.stats().tiers[0].closing_regions)


def test_death_during_a_commit_publishes_all_or_nothing(daemons: Daemons) -> None:
    daemon = daemons(host__capacity_bytes="32MiB")
    seed = 77
    rng = random.Random(seed)
    print(f"seed {seed}")
    fingerprint = model(1 << 16)
    outcomes: set[int] = set()
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(fingerprint).space_id
        for turn in range(12):
            prompt = Prompt(fingerprint, 1_000 + turn, blocks=32)
            after_s = rng.uniform(0.0, 0.002)
            with Child("die_in_commit", daemon.data_socket, 1_000 + turn, after_s) as child:
                child.process.wait(30)
            until("the dead writer's leases ended", lambda: not admin.stats().write_leases)
            until("copies ended", lambda: not admin.stats().copies_in_flight)
            rows = client.get(space, prompt.keys)
            there = sum(row is not None for row in rows)
            assert there in (0, 32)
            outcomes.add(there)
            if there:
                prompt.assert_right(rows)
            else:
                assert client.put(space, prompt.keys, prompt.rows()).visible == 32
        client.close()
        assert_quiet(admin, 1 << 16)
    print(f"blocks found after death in commit: {sorted(outcomes)}")
