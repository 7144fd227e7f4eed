"""Each guard of a real daemon at its warn and at its stop line: metric, log, what is bypassed, and
that it comes back by itself when the cause has gone. Faults are the daemon's world, not its code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.fingerprint import Verdict
from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon, make_daemon
from tests.e2e import guarded_daemon
from tests.e2e.guarded_daemon import World
from tests.e2e.stage import Prompt, model, until
from tests.faults import SEGMENTS, Fault
from tests.rawclient import RawAdmin
from tests.torture.watching import http

pytestmark = [pytest.mark.process, pytest.mark.slow]

MIB = 1 << 20
BLOCK = 64 << 10
MODEL = model(BLOCK)
BLOCKS = 16
OK, WARN, PROBE, STOP = range(4)
WAIT_S = 30.0
CONFIG = ClientConfig(deadline_ms=20_000)
Start = Callable[..., Daemon]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path).device as device:
        world = World(tmp_path)
        world.device = device
        yield world


@pytest.fixture
def start(tmp_path: Path, world: World) -> Iterator[Start]:
    """Starts the daemon of this world: memory for two prompts, and a disk."""
    started: list[Daemon] = []

    def start(**settings: Any) -> Daemon:
        settings = {
            "host__capacity_bytes": "4MiB",
            "host__staging_bytes": "1MiB",
            "disk__path": str(tmp_path / "disk"),
            "disk__capacity_bytes": "64MiB",
            "guards__hold_s": 0.3,
            "guards__samples_min": 8,
            **settings,
        }
        daemon = make_daemon(tmp_path, environ=world.environ, **settings)
        daemon.module = guarded_daemon.MODULE
        started.append(daemon)
        return daemon.start()

    yield start
    for daemon in started:
        if daemon.alive:
            daemon.kill()


def read(daemon: Daemon, metric: str, guard: str, tier: str = "", tenant: str = "") -> float:
    name = f'kvstore_guard_{metric}{{guard="{guard}",tenant="{tenant}",tier="{tier}"}}'
    found = re.search(rf"^{re.escape(name)} (\S+)$", http(daemon, "/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else -1.0


def until_state(daemon: Daemon, wanted: int, guard: str, tier: str = "", tenant: str = "") -> None:
    until(
        f"guard {guard} is {wanted}",
        lambda: read(daemon, "state", guard, tier, tenant) == wanted,
        WAIT_S,
    )


def said(daemon: Daemon, what: str, guard: str) -> bool:
    """Whether the log has the line of a guard."""
    shown = re.compile(rf'guard {re.escape(what)}.* guard="{guard}"')
    return any(shown.search(line) for line in daemon.log().splitlines())


def push(daemon: Daemon, prompt: Prompt, *, durable: bool = False) -> Reason:
    with Client(daemon.data_socket, config=CONFIG) as client:
        space = client.space(prompt.fingerprint)
        return Reason(space.push(prompt.keys, np.stack(prompt.rows()), durable=durable).reason)


def fetch(daemon: Daemon, prompt: Prompt, config: ClientConfig = CONFIG) -> int:
    """Blocks that are there; they must be right."""
    with Client(daemon.data_socket, config=config) as client:
        got = client.space(prompt.fingerprint).fetch(prompt.keys)
        shorter = Prompt(prompt.fingerprint, 0, 0)
        shorter.keys = prompt.keys[: got.blocks]
        shorter.assert_right(list(got.data[: got.blocks]))
        return int(got.blocks)


def on_disk(daemon: Daemon, count: int) -> list[Prompt]:
    """Prompts of which memory has the last two at most, and the disk all."""
    prompts = [Prompt(MODEL, 100 + number, BLOCKS) for number in range(count)]
    left = list(prompts)

    def all_durable() -> bool:
        while left and push(daemon, left[0], durable=True) is Reason.OK:
            del left[0]
        return not left

    until("all are durable", all_durable, WAIT_S)
    return prompts


# ---------------------------------------------------------------------- levels


def test_memory_warns_and_at_its_stop_line_nothing_new_is_taken_in(
    world: World, start: Start
) -> None:
    daemon = start(disk__path="", guards__memory_free_stop_bytes=100 * MIB)
    first, second = (Prompt(MODEL, seed, 4) for seed in (1, 2))
    world.set(memory_free_bytes=300 * MIB)
    until_state(daemon, WARN, "memory")
    assert said(daemon, "past its warn line", "memory")
    assert push(daemon, first) is Reason.OK
    world.set(memory_free_bytes=50 * MIB)
    until_state(daemon, STOP, "memory")
    assert said(daemon, "past its stop line", "memory")
    assert push(daemon, second) is Reason.DECLINED_GUARD
    assert fetch(daemon, first) == 4, "what is there is served"
    world.set(memory_free_bytes=900 * MIB)
    until_state(daemon, OK, "memory")
    assert push(daemon, second) is Reason.OK
    assert read(daemon, "stops_total", "memory") == read(daemon, "warnings_total", "memory") == 1


def test_bytes_warn_and_at_their_stop_line_nothing_is_saved(world: World, start: Start) -> None:
    daemon = start(guards__disk_free_stop_bytes=100 * MIB)
    first, second = (Prompt(MODEL, seed, 4) for seed in (1, 2))
    world.set(disk_free_bytes=200 * MIB)
    until_state(daemon, WARN, "bytes", "disk")
    assert said(daemon, "past its warn line", "bytes")
    assert push(daemon, first, durable=True) is Reason.OK
    world.set(disk_free_bytes=90 * MIB)
    until_state(daemon, STOP, "bytes", "disk")
    assert said(daemon, "past its stop line", "bytes")
    assert push(daemon, second, durable=True) is Reason.DECLINED_GUARD
    assert fetch(daemon, first) == fetch(daemon, second) == 4
    world.set(disk_free_bytes=900 * MIB)
    until_state(daemon, OK, "bytes", "disk")
    assert push(daemon, second, durable=True) is Reason.OK


def test_writes_warn_and_at_their_stop_line_nothing_is_saved_until_the_day_is_over(
    world: World, start: Start
) -> None:
    daemon = start(disk__endurance_bytes_per_day="2MiB")
    prompts = [Prompt(MODEL, seed, 4) for seed in range(12)]
    assert push(daemon, prompts[0], durable=True) is Reason.OK
    used = float(daemon_value(daemon, "kvstore_disk_written_day_bytes"))
    for prompt in prompts[1 : int(1.9 * MIB // used)]:
        assert push(daemon, prompt, durable=True) is Reason.OK
    until_state(daemon, WARN, "writes", "disk")
    assert said(daemon, "past its warn line", "writes")
    wanted = float(daemon_value(daemon, "kvstore_disk_save_chance_wanted"))
    assert 0 < wanted <= 1, "what is saved by itself has to promise more"
    until(
        "the budget is used",
        lambda: any(push(daemon, one, durable=True) is not Reason.OK for one in prompts),
    )
    until_state(daemon, STOP, "writes", "disk")
    assert said(daemon, "past its stop line", "writes")
    world.set(wall_ahead_s=25 * 3_600)
    until_state(daemon, OK, "writes", "disk")
    assert push(daemon, prompts[-1], durable=True) is Reason.OK


def daemon_value(daemon: Daemon, name: str) -> str:
    found = re.search(rf"^{name} (\S+)$", http(daemon, "/metrics")[1], re.MULTILINE)
    assert found, name
    return found[1]


def test_held_fingerprints_warn_and_at_their_stop_line_no_further_one_is_held(
    world: World, start: Start
) -> None:
    daemon = start(disk__path="", guards__held_stop=2)
    with Client(daemon.data_socket, config=CONFIG) as client:

        def offered(number: int) -> tuple[Verdict, Reason]:
            status = client.space(model(name=f"m{number}", revision=None)).status()
            return status.verdict, status.reason

        assert offered(1)[0] is Verdict.HELD
        until_state(daemon, WARN, "held")
        assert said(daemon, "past its warn line", "held")
        assert offered(2)[0] is Verdict.HELD
        until_state(daemon, STOP, "held")
        assert said(daemon, "past its stop line", "held")
        assert offered(3) == (Verdict.INCOMPATIBLE, Reason.DECLINED_GUARD)
        assert offered(1)[0] is Verdict.HELD, "which is held already"
        with RawAdmin(daemon.admin_socket) as admin:
            for review in admin.call("Reviews").reviews:
                admin.call("Review", review_id=review.review_id, who="ann", why="done")
        until_state(daemon, OK, "held")
        assert offered(3)[0] is Verdict.HELD


# ---------------------------------------------------------------------- rates


def test_read_errors_warn(world: World, start: Start) -> None:
    daemon = start(guards__errors_stop_share=1.0)
    prompts = on_disk(daemon, 6)
    world.device.set(Fault(("read",), SEGMENTS, error="EIO", chance=0.2))
    until(
        "it warns",
        lambda: (
            [fetch(daemon, one) for one in prompts]
            and read(daemon, "warnings_total", "read_errors", "disk") >= 1
        ),
        WAIT_S,
    )
    assert said(daemon, "past its warn line", "read_errors")


def test_read_errors_stop_reading_until_the_device_is_back(world: World, start: Start) -> None:
    daemon = start(guards__samples_min=4)
    prompts = on_disk(daemon, 6)
    world.device.set(Fault(("read",), SEGMENTS, error="EIO"))
    until(
        "it stops",
        lambda: (
            [fetch(daemon, one) for one in prompts]
            and read(daemon, "stops_total", "read_errors", "disk") >= 1
        ),
        WAIT_S,
    )
    assert said(daemon, "past its stop line", "read_errors")
    assert fetch(daemon, Prompt(MODEL, 100, BLOCKS)) < BLOCKS, "a miss, not an error"
    world.device.clear()
    until("all is loaded", lambda: all(fetch(daemon, one) == BLOCKS for one in prompts), WAIT_S)
    until_state(daemon, OK, "read_errors", "disk")


def test_write_errors_warn(world: World, start: Start) -> None:
    daemon = start(guards__errors_stop_share=1.0)
    on_disk(daemon, 2)
    world.device.set(Fault(("write",), SEGMENTS, error="EIO"))
    assert push(daemon, Prompt(MODEL, 1, 4), durable=True) is not Reason.OK
    until_state(daemon, WARN, "write_errors", "disk")
    assert said(daemon, "past its warn line", "write_errors")


def test_write_errors_stop_saving_until_the_device_is_back(world: World, start: Start) -> None:
    daemon = start(guards__samples_min=4)
    world.device.set(Fault(("write",), SEGMENTS, error="EIO"))
    lost = Prompt(MODEL, 1, BLOCKS)
    assert push(daemon, lost, durable=True) is not Reason.OK
    until("it stops", lambda: read(daemon, "stops_total", "write_errors", "disk") >= 1, WAIT_S)
    assert said(daemon, "past its stop line", "write_errors")
    assert fetch(daemon, lost) > 0, "memory has what came before the refusal"
    world.device.clear()
    until("it is saved", lambda: push(daemon, lost, durable=True) is Reason.OK, WAIT_S)
    until_state(daemon, OK, "write_errors", "disk")


def test_damage_warns(world: World, start: Start) -> None:
    daemon = start(guards__corrupt_stop_share=1.0)
    prompts = on_disk(daemon, 6)
    world.device.set(Fault(("read",), SEGMENTS, lie="flip", chance=0.2))
    until(
        "it warns",
        lambda: (
            [fetch(daemon, one) for one in prompts]
            and read(daemon, "warnings_total", "corrupt", "disk") >= 1
        ),
        WAIT_S,
    )
    assert said(daemon, "past its warn line", "corrupt")
    with RawAdmin(daemon.admin_socket) as admin:
        assert not admin.call("Reviews").reviews


def test_damage_stops_reading_and_holds_the_fingerprint_for_a_person(
    world: World, start: Start
) -> None:
    daemon = start()
    prompts = on_disk(daemon, 6)
    other = Prompt(model(BLOCK, name="other"), 7, BLOCKS)
    assert push(daemon, other, durable=True) is Reason.OK
    world.device.set(Fault(("read",), SEGMENTS, lie="flip"))
    with RawAdmin(daemon.admin_socket) as admin:

        def reviews() -> list[Any]:
            for one in prompts:
                fetch(daemon, one)
            return list(admin.call("Reviews").reviews)

        (review,) = until("it is held", reviews, WAIT_S)
    assert read(daemon, "stops_total", "corrupt", "disk") >= 1
    assert said(daemon, "past its stop line", "corrupt")
    assert "came back damaged" in review.doubt
    world.device.clear()
    with Client(daemon.data_socket, config=CONFIG) as client:
        status = client.space(MODEL).status()
    assert (status.verdict, status.reason) == (Verdict.INCOMPATIBLE, Reason.HELD_FOR_REVIEW)
    assert [fetch(daemon, one) for one in prompts] == [0] * len(prompts)
    assert push(daemon, Prompt(MODEL, 9, 4)) is Reason.HELD_FOR_REVIEW
    daemon.kill()
    daemon.start()
    assert [fetch(daemon, one) for one in prompts] == [0] * len(prompts), "also after kill -9"
    until("another model's is loaded", lambda: fetch(daemon, other) == BLOCKS, WAIT_S)
    with RawAdmin(daemon.admin_socket) as admin:
        (review,) = admin.call("Reviews").reviews
        admin.call("Review", review_id=review.review_id, approve=True, who="ann", why="new disk")
    until("the rest is served", lambda: sum(fetch(daemon, one) for one in prompts) > 0, WAIT_S)
    until_state(daemon, OK, "corrupt", "disk")


# ---------------------------------------------------------------------- loads


def slow_loads(world: World, daemon: Daemon, us_per_token: float, times: int) -> list[Prompt]:
    """Fetches prompts from a disk that takes a second a read, as a client that prefills a token in
    `us_per_token`. Eight read at a time: a prompt takes two seconds.
    """
    config = ClientConfig(deadline_ms=20_000, prefill=PrefillCost(us_per_token, 0.0))
    prompts = on_disk(daemon, 6)
    world.device.set(Fault(("read",), SEGMENTS, delay_s=1.0))
    for prompt in prompts[:times]:
        fetch(daemon, prompt, config)
    return prompts


def test_loads_that_lose_warn(world: World, start: Start) -> None:
    """16 blocks of 16 tokens: 3.6 ms of prefill at 14 us a token, two seconds of loading."""
    daemon = start(guards__load_stop_ratio=900.0, guards__samples_min=4)
    slow_loads(world, daemon, 14.0, 1)
    until_state(daemon, WARN, "load", "disk", "default")
    assert said(daemon, "past its warn line", "load")


def test_loads_that_lose_are_not_advised_until_they_win_again(world: World, start: Start) -> None:
    daemon = start(guards__load_stop_ratio=4.0, guards__samples_min=4, guards__hold_s=6)
    prompts = slow_loads(world, daemon, 50.0, 2)
    until_state(daemon, STOP, "load", "disk", "default")
    assert said(daemon, "past its stop line", "load")
    gentle = ClientConfig(deadline_ms=20_000, prefill=PrefillCost(1e6, 0.0))
    with Client(daemon.data_socket, config=gentle) as client:
        space = client.space(MODEL)
        reasons = {space.lookup(one.keys).plan.reason for one in prompts}
    assert Reason.DECLINED_GUARD in reasons
    world.device.clear()

    def loads_win() -> bool:
        for one in prompts:
            fetch(daemon, one, gentle)
        return read(daemon, "state", "load", "disk", "default") == OK

    until("loads are advised again", loads_win, WAIT_S)
