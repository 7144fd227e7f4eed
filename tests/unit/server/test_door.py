"""The door of the TCP listener without gRPC: what is asked of a call before it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from kvstore.model.reasons import Reason
from kvstore.testing.clock import ManualClock
from kvstore.wire import status
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Context
from kvstore_server.door import REFUSAL, REFUSAL_CODE, Door, Methods, certificate_names
from kvstore_server.identity import Identity
from tests.unit.server.test_identity import digest

TOKEN_A, TOKEN_B = "a" * 60, "b" * 60
METHOD = "/x.Y/Echo"


class Aborted(Exception):
    """As gRPC's own: it ends the call."""


class FakeContext:
    """What the door uses of a call's context."""

    def __init__(self, name: str, token: str) -> None:
        self._name = name
        self._token = token
        self.sent: list[bytes] = []
        self.aborted: tuple[Any, ...] = ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [b"n"], "x509_subject_alternative_name": [self._name.encode()]}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),) if self._token else ()

    def peer(self) -> str:
        return "ipv4:10.0.0.9:1"

    async def write(self, message: bytes) -> None:
        self.sent.append(message)

    async def abort(self, code: Any, text: str = "", trailing_metadata: Any = ()) -> None:
        self.aborted = (code, text, trailing_metadata)
        raise Aborted


class Messages:
    """A peer's messages; counts how many were taken. `stuck`: none ever comes."""

    def __init__(self, *messages: bytes, stuck: bool = False) -> None:
        self._messages = list(messages)
        self._stuck = stuck
        self.taken = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.taken += 1
        if self._stuck:
            await asyncio.Event().wait()
        if not self._messages:
            raise StopAsyncIteration
        return self._messages.pop(0)


def methods(tenant: bytes, entered: asyncio.Event | None = None) -> Methods:
    """A tenant's service of one method, which says whose it is."""

    async def echo(request: bytes, context: Any) -> bytes:
        if entered is not None:
            entered.set()
            await asyncio.Event().wait()
        return tenant + request

    def decode(data: bytes) -> bytes:
        return b"(" + data

    def encode(reply: bytes) -> bytes:
        return reply + b")"

    found = Methods()
    handler = grpc.unary_unary_rpc_method_handler(echo, decode, encode)
    found.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("x.Y", {"Echo": handler})])
    return found


def door(entered: asyncio.Event | None = None, **more: Any) -> Door:
    identity = Identity(
        {"a": [digest(TOKEN_A)], "b": [digest(TOKEN_B)]}, {"name-a": "a", "name-b": "b"}
    )
    tenants = {"a": methods(b"A", entered), "b": methods(b"B", entered)}
    return Door(identity, tenants, ManualClock(), **{"calls_per_tenant_max": 2, **more})


async def call(
    at: Door, context: FakeContext, messages: Messages, method: str = METHOD
) -> FakeContext:
    class Details:
        pass

    details: Any = Details()
    details.method = method
    handler = at.service(details)
    try:
        await handler.stream_stream(messages, cast(Context, context))
    except Aborted:
        assert context.aborted
    return context


async def test_each_tenant_meets_its_own_servicer() -> None:
    at = door()
    for tenant, token, said in (("a", TOKEN_A, b"A(hello)"), ("b", TOKEN_B, b"B(hello)")):
        context = await call(at, FakeContext(f"name-{tenant}", token), Messages(b"hello"))
        assert context.sent == [said]
    assert at.counts["calls"] == 2


async def test_of_a_stranger_nothing_is_read_and_nothing_is_told() -> None:
    at = door()
    heard = set()
    for name, token in (
        ("name-a", ""),
        ("name-a", TOKEN_B),
        ("name-b", TOKEN_A),
        ("name-c", TOKEN_A),
        ("name-a", "c" * 60),
    ):
        for method in (METHOD, "/x.Y/Nothing", "/kvstore.v1.Admin/Stats", ""):
            messages = Messages(b"hello", stuck=True)
            context = await call(at, FakeContext(name, token), messages, method)
            assert (context.sent, messages.taken) == ([], 0)
            heard.add(context.aborted)
    ((code, text, trailing),) = heard
    assert code is REFUSAL_CODE
    assert text == str(REFUSAL)
    ((key, detail),) = trailing
    assert key == status.DETAIL_KEY
    assert Reason.from_wire(pb.ErrorDetail.FromString(detail).reason) is Reason.PERMISSION_DENIED
    assert at.counts["calls_refused"] == 20
    assert at.counts["calls"] == 0


async def test_whoever_is_let_in_hears_that_there_is_no_such_method() -> None:
    context = await call(door(), FakeContext("name-a", TOKEN_A), Messages(), "/x.Y/Nothing")
    assert context.aborted[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_that_was_left_out_is_an_empty_one() -> None:
    context = await call(door(), FakeContext("name-a", TOKEN_A), Messages())
    assert context.sent == [b"A()"]


async def test_a_message_that_does_not_come_gives_its_place_back() -> None:
    at = door(first_message_s=0.0)
    for _ in range(5):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(
                call(at, FakeContext("name-a", TOKEN_A), Messages(stuck=True))
            )
    assert at.counts["calls_too_many"] == 0


async def test_one_tenant_takes_no_place_of_another() -> None:
    entered = asyncio.Event()
    at = door(entered)
    tasks = []
    for _ in range(2):
        entered.clear()
        under_way = call(at, FakeContext("name-a", TOKEN_A), Messages(b"x"))
        tasks.append(asyncio.ensure_future(under_way))
        await entered.wait()
    context = await call(at, FakeContext("name-a", TOKEN_A), Messages(b"x"))
    assert context.aborted[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    entered.clear()
    tasks.append(asyncio.ensure_future(call(at, FakeContext("name-b", TOKEN_B), Messages(b"x"))))
    await entered.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert at.counts["calls_too_many"] == 1


async def test_calls_end_with_the_token_that_they_came_in_by() -> None:
    entered = asyncio.Event()
    at = door(entered)
    contexts = {
        name: FakeContext(f"name-{name}", token) for name, token in (("a", TOKEN_A), ("b", TOKEN_B))
    }
    tasks = []
    for context in contexts.values():
        entered.clear()
        tasks.append(asyncio.ensure_future(call(at, context, Messages(b"x"))))
        await entered.wait()
    left = Identity({"b": [digest(TOKEN_B)]}, {"name-a": "a", "name-b": "b"})
    assert at.exchange(left) == 1
    await tasks[0]
    assert contexts["a"].aborted[0] is REFUSAL_CODE
    assert not tasks[1].done()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert at.counts["calls_revoked"] == 1


@pytest.mark.parametrize(
    ("properties", "names"),
    [
        ({}, []),
        ({"x509_common_name": [b"n"]}, ["n"]),
        ({"x509_common_name": [b"n"], "x509_subject_alternative_name": [b"s", b"t"]}, ["s", "t"]),
        ({"x509_common_name": [b"n"], "x509_subject_alternative_name": []}, ["n"]),
        ({"x509_common_name": [b"\xff"]}, ["\ufffd"]),
        ({"x509_common_name": [b"n\0m"]}, ["n\0m"]),
    ],
)
def test_the_names_of_a_certificate(properties: dict[str, list[bytes]], names: list[str]) -> None:
    class Known:
        def auth_context(self) -> dict[str, list[bytes]]:
            return properties

    assert certificate_names(cast(Context, Known())) == names
