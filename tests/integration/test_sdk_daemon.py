"""The client against real daemons on real sockets: what only processes can show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig
from tests.client_kit import MakeClient, clients, model, rows, tokens
from tests.daemon import Daemon
from tests.integration.polling import within
from tests.rawclient import RawAdmin

pytestmark = pytest.mark.process

MODEL = model()
BIG = model("big", layers=8, heads=8, head_size=128)  # 128 KiB
ROOT = Path(__file__).resolve().parents[2]
SLACK_S = 1.0
"""Ten times the slack that is promised (100 ms): machines that run tests are shared and busy."""


@pytest.fixture(params=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with clients(request.param) as maker:
        yield maker


Start = Callable[..., Daemon]


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    result = call()
    return result, time.monotonic() - began


def run_child(
    verb: str, daemon: Daemon, environ: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "server", ROOT / "client")))
    env = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.sdk_child", verb, daemon.data_socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**env, "PYTHONPATH": path, **(environ or {})},
    )


def answer_of(verb: str, daemon: Daemon, environ: dict[str, str] | None = None) -> Any:
    child = run_child(verb, daemon, environ)
    out, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert "Traceback" not in errors, errors
    return json.loads(out.splitlines()[-1])


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("path", ["shm", "stream"])
def test_round_trip_in_windows_larger_than_staging(
    make: MakeClient, daemons: Start, path: str
) -> None:
    daemon = daemons(host__capacity_bytes="64MiB", host__staging_bytes="1MiB")
    config = ClientConfig(transport=path, deadline_ms=20_000)  # type: ignore[arg-type]
    client = make(daemon.data_socket, config=config)
    space = client.space(BIG)
    prompt, data = tokens(40), rows(40, space.block_bytes)  # 5 MiB
    assert client.connection().transport == path
    pushed = space.push(prompt, data)
    assert (pushed.stored, pushed.reason) == (40, Reason.OK)
    assert space.push(prompt, data).present == 40
    out = np.zeros_like(data)
    fetched = space.fetch(space.lookup(prompt), out)
    assert (fetched.blocks, fetched.reason) == (40, Reason.OK)
    assert np.array_equal(out, data)


def test_views_and_their_leases(make: MakeClient, daemons: Start) -> None:
    daemon = daemons()
    space = make(daemon.data_socket).space(MODEL)
    prompt, data = tokens(6), rows(6, space.block_bytes)
    space.push(prompt, data)
    with RawAdmin(daemon.admin_socket) as admin:
        with space.view(space.keys(prompt)) as views:
            assert all(np.array_equal(a, b) for a, b in zip(views.arrays, data, strict=True))
            assert admin.stats().view_leases == 1
        assert views.valid
        assert within(2.0, lambda: admin.stats().view_leases == 0)


def test_one_client_in_many_threads(daemons: Start) -> None:
    daemon = daemons(host__capacity_bytes="128MiB")
    failures: list[object] = []
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=20_000)) as client:
        space = client.space(MODEL)

        def work(number: int) -> None:
            for turn in range(20):
                seed = number % 4 * 100 + turn
                prompt, data = tokens(4, seed), rows(4, space.block_bytes, seed)
                space.push(prompt, data)
                fetched = space.fetch(space.keys(prompt), wait_ms=5_000)
                if not np.array_equal(fetched.data[: fetched.blocks], data[: fetched.blocks]):
                    failures.append((seed, "wrong"))
                if fetched.blocks != 4:
                    failures.append((seed, fetched.reason))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []


# ---------------------------------------------------------------- daemons that end


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "restarts"), [("threads", 20), ("asyncio", 3)])
def test_the_same_object_survives_restarts(kind: str, restarts: int, daemons: Start) -> None:
    daemon = daemons()
    with clients(kind) as make:
        _restart_and_go_on(make(daemon.data_socket), daemon, restarts)


def _restart_and_go_on(client: Any, daemon: Daemon, restarts: int) -> None:
    space = client.space(MODEL)
    prompt, data = tokens(3), rows(3, space.block_bytes)
    for turn in range(restarts + 1):
        if turn:
            if turn % 2:
                daemon.kill()
            daemon.restart()
            ready = time.monotonic()
            assert within(5.0, lambda: space.lookup(prompt).reason is Reason.MISS_NEVER_STORED)
            assert time.monotonic() - ready <= 10.0, turn  # promised: 1 s
        assert space.push(prompt, data).stored == 3, turn
        fetched = space.fetch(space.keys(prompt))
        assert fetched.blocks == 3
        assert np.array_equal(fetched.data, data)


def test_calls_while_the_daemon_is_away_fail_fast(make: MakeClient, daemons: Start) -> None:
    daemon = daemons()
    space = make(daemon.data_socket).space(MODEL)
    keys = space.keys(tokens(2))
    space.push(keys, rows(2, space.block_bytes))
    with space.view(keys) as views:
        daemon.kill()
        assert within(1.0, lambda: not views.valid)
        data = [array.copy() for array in views.arrays]  # in place still: it does not crash
    assert len(data) == 2
    for _ in range(5):
        result, seconds = timed(lambda: space.fetch(keys, deadline_ms=500))
        assert result.blocks == 0
        assert seconds < 0.5 + SLACK_S
    assert space.fetch(keys).reason is Reason.BREAKER_OPEN
    times = sorted(timed(lambda: space.lookup(keys))[1] for _ in range(200))
    assert times[100] < 0.01  # promised: 1 ms
    daemon.start()
    assert within(1.0, lambda: space.lookup(keys).reason is Reason.MISS_NEVER_STORED)


def test_an_idle_client_lets_go_of_a_dead_daemons_memory(daemons: Start) -> None:
    daemon = daemons()
    child = run_child("idle", daemon)
    assert child.stdin is not None
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["mapped"] >= 2
    daemon.kill()
    child.stdin.write("\n")
    child.stdin.flush()
    after = json.loads(child.stdout.readline())
    assert after["mapped"] == 0
    assert after["seconds"] <= 10.0  # promised: 1 s
    child.communicate("\n", timeout=20)
    assert child.returncode == 0


def test_a_frozen_daemon_costs_deadlines_and_then_nothing(make: MakeClient, daemons: Start) -> None:
    daemon = daemons()
    space = make(daemon.data_socket).space(MODEL)
    keys, data = space.keys(tokens(2)), rows(2, 4096)
    space.push(keys, data)
    held = space.view(keys)
    views = held.__enter__()
    daemon.signal(signal.SIGSTOP)
    try:
        for verb in (
            lambda: space.lookup(keys, deadline_ms=300),
            lambda: space.fetch(keys, deadline_ms=300),
            lambda: space.push(space.keys(tokens(2, 5)), data, deadline_ms=300),
        ):
            result, seconds = timed(verb)
            assert result.reason in (Reason.DEADLINE_EXCEEDED, Reason.BREAKER_OPEN)
            assert seconds <= 0.3 + SLACK_S
        assert space.lookup(keys).reason is Reason.BREAKER_OPEN
        assert timed(lambda: space.lookup(keys))[1] < 0.1
    finally:
        daemon.signal(signal.SIGCONT)
    assert within(2.0, lambda: space.lookup(keys).blocks == 2)
    assert views.valid  # the same daemon, the same session: the lease is still held
    assert all(np.array_equal(a, b) for a, b in zip(views.arrays, data, strict=True))
    held.__exit__(None, None, None)


def test_a_daemon_that_is_frozen_from_the_start(make: MakeClient, daemons: Start) -> None:
    daemon = daemons()
    daemon.signal(signal.SIGSTOP)
    try:
        space = make(daemon.data_socket).space(MODEL)
        result, seconds = timed(lambda: space.lookup(tokens(1), deadline_ms=400))
        assert result.reason is Reason.DEADLINE_EXCEEDED
        assert seconds <= 0.4 + SLACK_S
    finally:
        daemon.signal(signal.SIGCONT)
    assert within(2.0, lambda: space.lookup(tokens(1)).reason is Reason.MISS_NEVER_STORED)


def test_a_daemon_that_drains_takes_no_pushes(make: MakeClient, daemons: Start) -> None:
    daemon = daemons()
    space = make(daemon.data_socket).space(MODEL)
    space.push(tokens(1), rows(1, space.block_bytes))
    daemon.signal(signal.SIGTERM)
    pushed = space.push(tokens(3, 1), rows(3, space.block_bytes))
    assert pushed.stored == 0 or pushed.reason is Reason.OK
    assert daemon.wait() == 0
    assert not space.push(tokens(3, 2), rows(3, space.block_bytes)).stored


# ---------------------------------------------------------------- forks


@pytest.mark.parametrize("support", [None, "1"])
def test_a_forked_child_works_and_disturbs_nobody(daemons: Start, support: str | None) -> None:
    environ = {} if support is None else {"GRPC_ENABLE_FORK_SUPPORT": support}
    said = answer_of("fork", daemons(), environ)
    assert said["stored"] == 8
    for child in said["children"]:
        assert child.pop("inherited") <= 1, said  # what the parent views, and no staging
        assert child == {"blocks": 8, "right": True, "pushed": 2, "why": "OK"}, said
    assert said["view_valid"]
    assert said["parent"] == 8
    assert said["same_session"]


@pytest.mark.parametrize("support", [None, "1"])
def test_a_fork_in_the_middle_of_calls(daemons: Start, support: str | None) -> None:
    environ = {} if support is None else {"GRPC_ENABLE_FORK_SUPPORT": support}
    said = answer_of("fork_while_busy", daemons(host__capacity_bytes="128MiB"), environ)
    assert [child["blocks"] for child in said["children"]] == [8] * 12, said
    assert said["parent"] == 8
    assert said["slowest"] < 5.0


def test_a_child_without_fork_support_misses_at_once(daemons: Start) -> None:
    said = answer_of("fork_without_support", daemons(), {"GRPC_ENABLE_FORK_SUPPORT": "0"})
    child = said["child"]
    assert (child["blocks"], child["why"]) == (0, "UNAVAILABLE"), said
    assert "GRPC_ENABLE_FORK_SUPPORT" in child["detail"]
    assert child["seconds"] < 1.0 + SLACK_S
    assert said["parent"] == 2


def test_forks_of_asyncio_and_stream_clients(daemons: Start) -> None:
    daemon = daemons()
    good = {"blocks": 4, "why": "OK"}
    assert answer_of("fork_asyncio", daemon) == {"child": good, "parent": good}
    assert answer_of("fork_stream", daemon) == {"children": [good] * 5, "parent": 4}
