"""The admin service as a fake on a unix socket, and a way to run commands against it."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from kvstore.cli import main
from kvstore.model.reasons import KVStoreError
from kvstore.wire import status
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc, store_pb2

Run = Callable[..., Result]

VERBS = {
    "Stats": admin_pb2.StatsReply,
    "Spaces": admin_pb2.SpacesReply,
    "Invalidate": admin_pb2.InvalidateReply,
    "SetWeightEpoch": admin_pb2.SetWeightEpochReply,
    "Pin": admin_pb2.PinReply,
    "Unpin": admin_pb2.UnpinReply,
    "Reviews": admin_pb2.ReviewsReply,
    "Review": admin_pb2.ReviewReply,
    "Explain": store_pb2.ExplainReply,
    "Trace": admin_pb2.TraceReply,
    "Config": admin_pb2.ConfigReply,
    "Drain": admin_pb2.DrainReply,
}


class FakeAdmin:
    """Answers every verb with what a test put into `replies`, and keeps the requests."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.replies: dict[str, Any] = {}
        self.requests: dict[str, list[Any]] = {verb: [] for verb in VERBS}
        self.error: KVStoreError | None = None
        self.code: grpc.StatusCode | None = None

    def answer(self, verb: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests[verb].append(request)
        if self.error is not None:
            context.set_trailing_metadata(((status.DETAIL_KEY, status.detail_of(self.error)),))
            context.abort(status.code_of(self.error.reason), str(self.error))
        if self.code is not None:
            context.abort(self.code, "as the test wants it")
        return self.replies.get(verb, VERBS[verb]())

    def the_request(self, verb: str) -> Any:
        """The one request of this verb."""
        (request,) = self.requests[verb]
        return request


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def admin(folder: Path) -> Iterator[FakeAdmin]:
    """The admin service on `folder`/admin.sock."""
    fake = FakeAdmin(folder / "admin.sock")

    def verb(name: str) -> Callable[[Any, Any, grpc.ServicerContext], Any]:
        return lambda _, request, context: fake.answer(name, request, context)

    servicer = type("Servicer", (admin_pb2_grpc.AdminServicer,), {v: verb(v) for v in VERBS})()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{fake.socket}")
    server.start()
    yield fake
    server.stop(0).wait()


def runner() -> CliRunner:
    """A runner that keeps standard error apart; click before 8.2 has to be told."""
    options: dict[str, Any] = {}
    if "mix_stderr" in inspect.signature(CliRunner).parameters:
        options["mix_stderr"] = False
    return CliRunner(**options)


@pytest.fixture
def run() -> Run:
    """Runs `kvstore ARGUMENTS`; a bug in a command raises here."""

    def invoke(
        *arguments: str,
        code: int = 0,
        input: str | None = None,
        env: dict[str, str] | None = None,
    ) -> Result:
        result = runner().invoke(main, list(arguments), input=input, env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return invoke


@pytest.fixture
def ask(run: Run, folder: Path) -> Run:
    """Runs a command against the fake."""

    def invoke(*arguments: str, code: int = 0, input: str | None = None) -> Result:
        return run(*arguments, "--runtime-dir", str(folder), code=code, input=input)

    return invoke
