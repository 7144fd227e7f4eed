"""The HTTP side: what it answers while the loop lives, and that it tells when the loop does not."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvstore.model.reasons import Reason, StartError
from kvstore_server.exposition import Snapshot, StoreCollector
from kvstore_server.health import (
    CONNECTION_S_MAX,
    CONNECTIONS_MAX,
    HealthApp,
    HealthServer,
    OnLoop,
)
from kvstore_server.metrics import Metrics
from tests.unit.server.test_metrics import STORE

DEADLINE_S = 10.0


@dataclass
class Served:
    server: HealthServer
    state: str = "ready"

    def get_now(self, path: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(f"http://{self.server.address}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    async def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        return await asyncio.to_thread(self.get_now, path, method)


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """Its parameter: how long a connection may take, in seconds."""
    on_loop = OnLoop(asyncio.get_running_loop(), timeout_s=0.2)
    metrics = Metrics()
    registry = CollectorRegistry()
    registry.register(
        StoreCollector(lambda: on_loop(lambda: Snapshot(metrics.snapshot(), STORE, {}, 0)))
    )
    app = HealthApp(registry, on_loop, lambda: made.state)
    connection_s = getattr(request, "param", CONNECTION_S_MAX)
    made = Served(HealthServer(("127.0.0.1", 0), app, connection_s=connection_s))
    made.server.start()
    yield made
    await asyncio.to_thread(made.server.close)


async def test_a_daemon_that_serves(served: Served) -> None:
    assert await served.get("/healthz") == (200, "ready\n")
    assert await served.get("/readyz") == (200, "ready\n")
    status, text = await served.get("/metrics")
    assert status == 200
    names = {family.name for family in parse_text(text)}
    assert "kvstore_tier_used_bytes" in names


async def test_a_daemon_that_drains_is_alive_but_not_ready(served: Served) -> None:
    served.state = "draining"
    assert await served.get("/healthz") == (200, "draining\n")
    assert await served.get("/readyz") == (503, "draining\n")


async def test_other_paths_and_methods(served: Served) -> None:
    assert (await served.get("/"))[0] == 404
    assert (await served.get("/metrics/../x"))[0] == 404
    assert (await served.get("/healthz", "POST"))[0] == 405


async def test_an_accept_header_that_is_none_is_refused_without_a_traceback(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    def ask(accept: bytes) -> bytes:
        with connect(served) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nAccept: " + accept + b"\r\n\r\n")
            return sock.recv(64)

    for version in (b"\xff", b"1.x", b"", b"1.0.0; escaping=\xff"):
        answer = await asyncio.to_thread(ask, b"application/openmetrics-text; version=" + version)
        assert answer.split()[1] in (b"200", b"406")
    assert capfd.readouterr().err == ""
    assert (await served.get("/metrics"))[0] == 200


async def test_a_stuck_loop_is_told(served: Served) -> None:
    answers: dict[str, int] = {}
    done = threading.Event()

    def ask() -> None:
        for path in ("/healthz", "/readyz", "/metrics"):
            answers[path] = served.get_now(path)[0]
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert done.wait(DEADLINE_S)  # on purpose not awaited: this blocks the loop
    thread.join()
    assert answers == {"/healthz": 503, "/readyz": 503, "/metrics": 503}
    assert (await served.get("/healthz"))[0] == 200


def connect(served: Served) -> socket.socket:
    host, port = served.server.address.split(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


async def test_silent_connections_make_room_for_a_probe(served: Served) -> None:
    silent = [connect(served) for _ in range(CONNECTIONS_MAX + 1)]
    try:
        assert await asyncio.to_thread(silent[0].recv, 1) == b"", "the oldest one is cut"
        assert await served.get("/healthz") == (200, "ready\n")
        assert await asyncio.to_thread(silent[1].recv, 1) == b""
        silent[-1].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        answer = await asyncio.to_thread(silent[-1].recv, 65_536)
        assert answer.startswith(b"HTTP/1.0 200"), "the youngest ones are served"
        assert served.server.counts == {"accepted": len(silent) + 1, "cut": 2}
    finally:
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("served", [0.1], indirect=True)
async def test_a_request_that_comes_byte_by_byte_is_cut(served: Served) -> None:
    def dribble() -> int:
        with connect(served) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
            sock.settimeout(0.01)
            for sent in range(int(DEADLINE_S / 0.01)):
                try:
                    sock.sendall(b"a")
                    if sock.recv(1) == b"":
                        return sent
                except TimeoutError:
                    continue
                except OSError:
                    return sent
        raise AssertionError("it is still served")

    assert await asyncio.to_thread(dribble) > 0


def test_an_address_in_use_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartError) as caught:
            HealthServer(("127.0.0.1", taken.getsockname()[1]), lambda *_: [])  # type: ignore[arg-type]
    assert caught.value.reason is Reason.START_SOCKET
    assert caught.value.setting == "http.listen"
