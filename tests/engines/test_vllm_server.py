"""vLLM's OpenAI-compatible server with the store, over HTTP: an answer of its prefix from another
engine, its metrics, and its request's id in the daemon's trace.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, _python_path
from tests.engines.engine_child import QUIET
from tests.engines.kit import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    PATIENT,
    START_S,
    STORED_TOKENS,
    Engine,
    check_ended_well,
    connector,
    kvstore_tier,
    prompts,
    until_has,
)
from tests.engines.nursery import Child, fork
from tests.rawclient import RawAdmin

pytestmark = pytest.mark.timeout(900)

ASKED = prompts(2, seed=61)


class Server:
    """One on a free port of the loopback."""

    def __init__(self, model: Path, target: str, log: Path) -> None:
        self.port = free_port()
        self.log = log
        self.engine_id = f"test-{secrets.token_hex(8)}"
        tier = kvstore_tier(target, **PATIENT)
        transfer = {**connector(tier), "engine_id": self.engine_id}
        environ = {**os.environ, **QUIET, "PYTHONPATH": _python_path(os.environ)}
        arguments = {
            "model": str(model),
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": str(self.port),
            "dtype": "float32",
            "block-size": str(BLOCK_TOKENS),
            "max-model-len": "2048",
            "max-num-seqs": "4",
            "kv-cache-memory-bytes": str(64 << 20),
            "prefix-caching-hash-algo": "sha256_cbor",
            "kv-transfer-config": json.dumps(transfer),
        }
        flags = [f"--{name}={value}" for name, value in arguments.items()]
        flags += ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
        with log.open("ab") as sink, Path(os.devnull).open("rb") as nothing:
            self.process: Child = fork(
                "tests.engines.server_child",
                *flags,
                environ=environ,
                stdin=nothing.fileno(),
                stdout=sink.fileno(),
                stderr=sink.fileno(),
            )

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """(status, text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            sent = {"Content-Type": "application/json", **headers}
            connection.request(method, path, body and json.dumps(body), sent)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    def wait_up(self) -> None:
        end = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.text()[-4000:]
            assert time.monotonic() < end, self.text()[-4000:]
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health")[0] == 200:
                    return
            time.sleep(0.1)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """As a supervisor does; what it leaves behind then is killed and cleared away."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except TimeoutError:
                self.process.kill()
                raise
        for file in Path("/dev/shm").glob(f"vllm_offload_{self.engine_id}*.mmap"):
            file.unlink()


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@pytest.fixture(scope="module")
def computed(model: Path, engines: Callable[..., Engine], daemon: Daemon) -> list[list[int]]:
    """The answers of an engine that has stored what it computed, and ended."""
    daemon.start(START_S)
    engine = engines(model, target=daemon.data_socket)
    tokens: list[list[int]] = engine.generate(ASKED)["tokens"]
    until_has(engine, daemon, *ASKED)
    check_ended_well(engine)
    return tokens


@pytest.fixture(scope="module")
def server(
    model: Path, daemon: Daemon, computed: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    one = Server(model, daemon.data_socket, tmp_path_factory.mktemp("server") / "server.log")
    one.wait_up()
    yield one
    one.stop()


def test_a_client_is_answered_from_what_another_engine_computed(
    server: Server, computed: list[list[int]]
) -> None:
    for index, (prompt, tokens) in enumerate(zip(ASKED, computed, strict=True)):
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"X-Request-Id": f"asked-{index}"}
        status, text = server.ask("POST", "/v1/completions", body, **headers)
        assert status == 200, text
        reply = json.loads(text)
        assert reply["choices"][0]["token_ids"] == tokens
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == STORED_TOKENS


def test_its_metrics_tell_what_was_restored(server: Server) -> None:
    status, text = server.ask("GET", "/metrics")
    assert status == 200
    restored = len(ASKED) * STORED_TOKENS
    assert metric(text, "vllm:external_prefix_cache_hits_total") == restored
    loaded = metric(text, "vllm:kvstore_tier_chunks_total", 'outcome="load_loaded"')
    assert loaded == restored // BLOCK_TOKENS
    hits = metric(text, "vllm:kv_offload_tiering_chunk_hits_total", 'tier="1:KVStoreTier"')
    assert hits == restored // BLOCK_TOKENS


def metric(text: str, name: str, label: str = "") -> float:
    """Its value in Prometheus' format."""
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"{name}{{") and label in line
    ]
    assert found, [line for line in text.splitlines() if line.startswith("vllm:kv")]
    return sum(found)


def test_the_daemons_trace_names_the_clients_request(server: Server, daemon: Daemon) -> None:
    with RawAdmin(daemon.admin_socket) as admin:
        records = [json.loads(line) for line in admin.call("Trace", last=1_000).records]
    verbs = {
        record["verb"]
        for record in records
        if record["engine_id"].startswith(server.engine_id) and "asked-0" in record["request_id"]
    }
    assert {"lookup", "acquire"} <= verbs, verbs
