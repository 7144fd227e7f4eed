"""The transport: targets, and every error of gRPC as one kind of failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore_client import AsyncClient, Client
from kvstore_client.channel import CallFailed, GrpcTransport, mapped, socket_path
from kvstore_client.testing import FakeRpcError, refusal


def failure(error: BaseException) -> CallFailed:
    with pytest.raises(CallFailed) as caught, mapped():
        raise error
    return caught.value


@pytest.mark.parametrize(
    "target", ["/run/k/data.sock", "unix:/run/k/data.sock", "unix:///run/k/data.sock"]
)
def test_a_target_is_a_path(target: str) -> None:
    assert socket_path(target) == "/run/k/data.sock"


def test_a_target_may_be_a_path_object() -> None:
    assert socket_path(Path("/run/k/data.sock")) == "/run/k/data.sock"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("", "path"),
        ("unix:", "path"),
        ("http://host:1", "path"),
        ("dns:///h:1", "path"),
        ("a\0b", "path"),
        (None, "not NoneType"),
        (b"/run/k/data.sock", "not bytes"),
        (7, "not int"),
        ("/run/\ud800", "Unicode"),
        ("/run/k/data.sock.fd", "fd socket"),
        ("unix:/" + "n" * 104, "too long for a socket by 1 bytes"),
        ("/" + "\u00fc" * 60, "too long for a socket by 17 bytes"),
    ],
)
def test_anything_else_is_no_target(target: Any, says: str) -> None:
    with pytest.raises(BadRequest, match="the target is the path") as caught:
        socket_path(target)
    assert says in str(caught.value)
    assert (caught.value.reason, caught.value.setting) == (Reason.BAD_NAME, "target")
    for kind in (Client, AsyncClient):
        with pytest.raises(BadRequest, match="the target is the path"):
            kind(target)


def test_the_longest_path_is_a_target() -> None:
    assert len(socket_path("/" + "n" * 103)) + len(".fd") == 107


def test_a_bare_status_is_an_outage_unless_it_is_an_answer() -> None:
    outages = {code for code in grpc.StatusCode if failure(FakeRpcError(code)).outage}
    assert outages == {
        grpc.StatusCode.OK,  # as an error: nobody says that
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }


def test_a_reason_of_the_daemon_is_kept_and_no_outage() -> None:
    for reason in (Reason.SESSION_UNKNOWN, Reason.DRAINING, Reason.NO_SPACE, Reason.INTERNAL):
        got = failure(refusal(reason, "why"))
        assert (got.reason, got.detail, got.outage) == (reason, "why", False)


def test_a_failure_that_says_ok_is_none() -> None:
    error = FakeRpcError(grpc.StatusCode.INTERNAL, KVStoreError(Reason.OK, "all is well"))
    assert failure(error).reason is Reason.INTERNAL


def test_a_closed_channel_is_an_outage() -> None:
    got = failure(ValueError("Cannot invoke RPC on closed channel!"))
    assert (got.reason, got.outage) == (Reason.UNAVAILABLE, True)


def test_nobody_there_is_told_at_once(tmp_path: object) -> None:
    transport = GrpcTransport(f"{tmp_path}/absent.sock")
    with pytest.raises(CallFailed) as caught:
        transport.unary("Lookup", b"", 5.0)
    assert (caught.value.reason, caught.value.outage) == (Reason.UNAVAILABLE, True)
    with pytest.raises(CallFailed):
        transport.attach(b"", 5.0).next_event()
    with pytest.raises(CallFailed):
        list(transport.download(b"", 5.0))
    with pytest.raises(CallFailed):
        transport.upload(iter([b""]), 5.0)
    with pytest.raises(OSError, match="No such file"):
        transport.dial_memory(5.0)
    transport.break_off()  # it stays usable
    with pytest.raises(CallFailed, match="UNAVAILABLE"):
        transport.unary("Lookup", b"", 5.0)
    transport.close()
    transport.close()
    with pytest.raises(CallFailed, match="closed"):
        transport.unary("Lookup", b"", 5.0)
