"""The tenants matrix on a real daemon, through sockets and over TCP: what is another's looks like
what never was, whatever of the data service is asked. The verbs come from the descriptor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon
from tests.e2e.stage import model
from tests.rawclient import FdChannel, RawClient, Refused, reason
from tests.tls_kit import Pki
from tests.torture import tenants
from tests.torture.bad_messages import verbs
from tests.torture.base import Outcome

pytestmark = pytest.mark.process


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def daemon(tmp_path: Path, pki: Pki, daemons: Callable[..., Daemon]) -> Daemon:
    return daemons(
        disk__path=str(tmp_path / "disk"), disk__capacity_bytes="128MiB", **pki.settings("a", "b")
    )


@pytest.fixture(params=["socket", "tcp"])
def wire(request: pytest.FixtureRequest, daemon: Daemon, pki: Pki) -> Iterator[grpc.Channel | None]:
    """How tenant b comes in; None: through its socket."""
    if request.param == "socket":
        yield None
    else:
        with pki.channel(daemon.ready["tcp"], "b") as channel:
            yield channel


def test_what_is_another_tenants_looks_like_what_never_was(
    daemon: Daemon, wire: grpc.Channel | None
) -> None:
    outcome = Outcome()
    tenants.matrix(daemon, 7, outcome, wire=wire)
    assert outcome.failed == []
    assert outcome.wrong == []
    asked = {verb.name for verb in verbs() if verb.service == "Store"}
    assert asked == {method.name for method in pb.DESCRIPTOR.services_by_name["Store"].methods}
    assert outcome.trials == len(asked)
    assert outcome.counts["answers_compared"] > 5 * len(asked)


def test_a_session_is_unknown_to_every_other_tenant_by_every_way(daemon: Daemon, pki: Pki) -> None:
    """Of a session that was begun over TCP, and of one that was begun on the socket."""
    address = daemon.ready["tcp"]
    with (
        pki.channel(address, "a") as a_wire,
        pki.channel(address, "b") as b_wire,
        RawClient(daemon.data_sockets["a"]) as by_socket,
        RawClient(daemon.data_sockets["a"], wire=a_wire) as by_tcp,
        RawClient(daemon.data_sockets["b"]) as b_by_socket,
        RawClient(daemon.data_sockets["b"], wire=b_wire) as b_by_tcp,
    ):
        assert by_socket.open(model()).space_id == by_tcp.open(model()).space_id
        answers = set()
        for thief in (b_by_socket, b_by_tcp):
            for secret in (by_socket.secret, by_tcp.secret, bytes(16)):
                request = pb.LookupRequest(session=secret, queries=[pb.Query()])
                with pytest.raises(Refused) as refused:
                    thief.call("Lookup", request)
                assert refused.value.reason is Reason.SESSION_UNKNOWN
                answers.add(refused.value.answer)
        assert len(answers) == 1


def test_over_tcp_there_is_no_memory(daemon: Daemon, pki: Pki) -> None:
    with (
        pki.channel(daemon.ready["tcp"], "a") as wire,
        RawClient(daemon.data_sockets["a"], wire=wire) as client,
    ):
        assert client.welcome.fd_socket is False
        space = client.open(model()).space_id
        with pytest.raises(Refused) as refused:
            client.reserve(space, [bytes(31) + b"\1"])
        assert refused.value.reason is Reason.NOT_SUPPORTED
        with contextlib.closing(FdChannel(daemon.data_sockets["b"])) as stranger:
            assert reason(stranger.hello(client.secret).reason) is Reason.PERMISSION_DENIED
