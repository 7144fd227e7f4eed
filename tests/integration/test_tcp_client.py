"""Both clients over TCP against real daemons: what they promise on a socket, they promise there."""

from __future__ import annotations

import multiprocessing
import socket
import threading
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
from tests.tls_kit import Pki

pytestmark = pytest.mark.process

MODEL = model()
BIG = model("big", layers=8, heads=8, head_size=128)  # 128 KiB
SOON_S = 20.0


@pytest.fixture(params=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with clients(request.param) as maker:
        yield maker


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


Start = Callable[..., Daemon]


def target(daemon: Daemon) -> str:
    return f"tcp://{daemon.ready['tcp']}"


def test_round_trip_in_windows_larger_than_staging(
    make: MakeClient, daemons: Start, pki: Pki
) -> None:
    daemon = daemons(host__staging_bytes="1MiB", **pki.settings("a"))
    client = make(target(daemon), config=pki.config("a", deadline_ms=20_000))
    space = client.space(BIG)
    prompt, data = tokens(40), rows(40, space.block_bytes)  # 5 MiB
    connection = client.connection()
    assert (connection.transport, connection.reason) == ("stream", Reason.OK)
    pushed = space.push(prompt, data)
    assert (pushed.stored, pushed.reason) == (40, Reason.OK)
    assert space.push(prompt, data).present == 40
    out = np.zeros_like(data)
    hit = space.lookup(prompt)
    assert (hit.blocks, hit.tokens) == (40, len(prompt))
    fetched = space.fetch(hit, out)
    assert (fetched.blocks, fetched.reason) == (40, Reason.OK)
    assert np.array_equal(out, data)
    assert [one.reason for one in space.explain(space.keys(prompt))] == [Reason.HIT] * 40
    # What the socket of the same tenant has, and only of the same.
    by_socket = make(daemon.data_sockets["a"]).space(BIG)
    assert np.array_equal(by_socket.fetch(by_socket.keys(prompt)).data, data)


def test_misses_and_refusals_are_values(make: MakeClient, daemons: Start, pki: Pki) -> None:
    daemon = daemons(**pki.settings("a", "b"))
    first = make(target(daemon), config=pki.config("a")).space(MODEL)
    prompt, data = tokens(6), rows(6, first.block_bytes)
    assert first.push(prompt, data).stored == 6
    other = make(target(daemon), config=pki.config("b")).space(MODEL)
    assert other.lookup(prompt).blocks == 0
    assert other.fetch(other.keys(prompt)).reason is Reason.MISS_NEVER_STORED
    assert other.push(prompt, rows(6, first.block_bytes, 1)).stored == 6
    assert np.array_equal(first.fetch(first.keys(prompt)).data, data)
    with_wrong_token = pki.config("a", token_file=str(pki.path("b.token")))
    stranger = make(target(daemon), config=with_wrong_token).space(MODEL)
    assert stranger.lookup(prompt).reason is Reason.PERMISSION_DENIED
    assert stranger.fetch(stranger.keys(prompt)).blocks == 0
    assert stranger.push(prompt, data).stored == 0


def test_memory_is_refused_where_it_was_asked_for(
    make: MakeClient, daemons: Start, pki: Pki
) -> None:
    daemon = daemons(**pki.settings("a"))
    client = make(target(daemon), config=pki.config("a", transport="shm"))
    connection = client.connection()
    assert connection.reason is Reason.NOT_SUPPORTED
    assert "fd socket" in connection.detail


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_same_object_survives_restarts(make: MakeClient, daemons: Start, pki: Pki) -> None:
    listen = f"127.0.0.1:{free_port()}"
    daemon = daemons(**{**pki.settings("a"), "tcp__listen": listen})
    space = make(f"tcp://{listen}", config=pki.config("a", deadline_ms=5_000)).space(MODEL)
    prompt, data = tokens(4), rows(4, space.block_bytes)
    assert space.push(prompt, data).stored == 4
    for end in (daemon.kill, daemon.stop):
        end()
        assert space.lookup(prompt).blocks == 0
        assert space.push(prompt, data).stored == 0
        daemon.start()
        assert within(SOON_S, lambda: space.push(prompt, data).stored == 4)
        assert np.array_equal(space.fetch(space.keys(prompt)).data, data)


def test_a_client_that_has_gone_leaves_nothing(daemons: Start, pki: Pki) -> None:
    daemon = daemons(**pki.settings("a"))
    with RawAdmin(daemon.admin_socket) as admin:
        with Client(target(daemon), config=pki.config("a")) as client:
            assert client.connection().transport == "stream"
            assert admin.stats().sessions == 1
        assert within(SOON_S, lambda: admin.stats().sessions == 0)


def test_one_client_in_many_threads(daemons: Start, pki: Pki) -> None:
    daemon = daemons(host__capacity_bytes="128MiB", **pki.settings("a"))
    failures: list[object] = []
    with Client(target(daemon), config=pki.config("a", deadline_ms=20_000)) as client:
        space = client.space(MODEL)

        def work(number: int) -> None:
            for turn in range(10):
                seed = number % 4 * 100 + turn
                prompt, data = tokens(4, seed), rows(4, space.block_bytes, seed)
                space.push(prompt, data)
                fetched = space.fetch(space.keys(prompt), wait_ms=5_000)
                if fetched.blocks != 4 or not np.array_equal(fetched.data, data):
                    failures.append((number, turn, fetched))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert failures == []


def _in_a_child(space: Any, prompt: Any, answers: Any) -> None:
    answers.put(space.lookup(prompt).blocks)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_works_and_disturbs_nobody(daemons: Start, pki: Pki) -> None:
    daemon = daemons(**pki.settings("a"))
    with Client(target(daemon), config=pki.config("a", deadline_ms=10_000)) as client:
        space = client.space(MODEL)
        prompt = tokens(4)
        assert space.push(prompt, rows(4, space.block_bytes)).stored == 4
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_in_a_child, args=(space, prompt, answers))
        child.start()
        assert answers.get(timeout=60) == 4
        child.join(60)
        assert child.exitcode == 0
        assert within(SOON_S, lambda: space.lookup(prompt).blocks == 4)


def test_no_secret_is_logged(
    daemons: Start, pki: Pki, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon = daemons(server__log_level="debug", **pki.settings("a"))
    secrets = [pki.path("a.token").read_text().strip(), pki.path("a.key").read_text()[60:100]]
    configs: list[ClientConfig] = [
        pki.config("a"),
        pki.config("a", tls_server_name="another"),
        pki.config("a", tls_key_file=str(pki.path("daemon.key"))),
    ]
    with caplog.at_level("DEBUG"):
        for config in configs:
            with Client(target(daemon), config=config) as client:
                shown = f"{client.connection()} {client.space(MODEL).lookup(tokens(2))}"
                assert not any(secret in shown for secret in secrets)
    out, err = capfd.readouterr()
    texts = [caplog.text, out, err, daemon.log()]
    assert not any(secret in text for secret in secrets for text in texts)
