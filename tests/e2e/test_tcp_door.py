"""The door to the data service over TCP, of a real daemon: who does not come in hears one thing,
whatever he tries, and all of it is exchanged while the daemon runs.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvstore.model.reasons import Reason
from kvstore.wire import status
from kvstore.wire.v1 import admin_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client
from tests.client_kit import model, rows, tokens
from tests.daemon import Daemon, DaemonDied, make_daemon
from tests.integration.polling import within
from tests.tls_kit import HOST, Pki, address_of
from tests.torture.watching import http

pytestmark = pytest.mark.process

CALL_S = 20.0
CLOSED_S = 10.0
"""More than a handshake may take."""
EXIT_SETTINGS = 2
HEALTH = "/grpc.health.v1.Health/Check"
Metadata = Sequence[tuple[str, str]]


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def daemon(pki: Pki, daemons: Callable[..., Daemon]) -> Daemon:
    return daemons(**pki.settings("a", "b"))


def methods() -> list[str]:
    """Every method that there is, and some that there are not."""
    files = (pb, admin_pb2, health_pb2, reflection_pb2)
    found = [
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    return [*found, "/kvstore.v1.Store/Steal", "/other.Service/Lookup", "/x"]


def ask(
    channel: grpc.Channel, method: str, metadata: Metadata = (), messages: Sequence[bytes] = (b"",)
) -> tuple[Any, ...]:
    """All that a caller is told: code, text, metadata of both kinds; ("OK",) if it was let in and
    served.
    """
    opened: Any = channel.stream_stream(method)
    call = opened(iter(messages), metadata=tuple(metadata), timeout=CALL_S)
    try:
        next(call, None)
        call.cancel()
        return ("OK",)
    except grpc.RpcError:
        initial, trailing = (
            tuple(map(tuple, m or ())) for m in (call.initial_metadata(), call.trailing_metadata())
        )
        return call.code().name, call.details(), initial, trailing


def bearer(token: str) -> Metadata:
    return [("authorization", f"Bearer {token}")]


# ---------------------------------------------------------------- the handshake


def first_bytes(daemon: Daemon, context: ssl.SSLContext) -> bytes:
    """What the daemon sends inside TLS before it is asked anything: HTTP/2 begins with SETTINGS."""
    with socket.create_connection(address_of(daemon), timeout=CLOSED_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=HOST) as wrapped:
                return wrapped.recv(1)
        except (ssl.SSLError, ConnectionError):
            return b""


def test_without_a_certificate_of_the_authority_there_is_no_handshake(
    daemon: Daemon, pki: Pki
) -> None:
    assert first_bytes(daemon, pki.tls("a")) != b""
    pki.issue("stranger", "engine-a", by=pki.stranger)
    pki.issue("ended", "engine-a", days=-1)
    for certificate in (None, "stranger", "ended"):
        assert first_bytes(daemon, pki.tls(certificate)) == b"", certificate
        with pki.channel(daemon.ready["tcp"], certificate, pki.token("a")) as channel:
            answer = ask(channel, HEALTH)
        assert answer[0] == grpc.StatusCode.UNAVAILABLE.name, "there was HTTP/2"
    with socket.create_connection(address_of(daemon), timeout=CLOSED_S) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := plain.recv(4096):
                said += piece
    assert b"HTTP" not in said
    assert len(said) <= 7, "no more than an alert of TLS"


# ---------------------------------------------------------------- the constant answer


def test_whoever_does_not_come_in_hears_one_thing_of_every_method(daemon: Daemon, pki: Pki) -> None:
    a, b = (pki.path(f"{name}.token").read_text().strip() for name in ("a", "b"))
    ended = a
    pki.path("a.token").unlink()
    a = pki.token("a")
    reloaded(daemon, 1)
    pki.issue("unknown", "engine-c")
    pki.issue("none", common_name="engine-a")  # of a common name alone, and that of a
    pki.issue("both", "engine-x", common_name="engine-a")  # where there are others it is no name
    tried: list[tuple[str, Metadata, Sequence[bytes]]] = [
        ("a", (), (b"",)),
        ("a", bearer(""), (b"",)),
        ("a", bearer("wrong" * 10), (b"",)),
        ("a", bearer(b), (b"",)),
        ("b", bearer(a), (b"",)),
        ("a", bearer(ended), (b"",)),
        ("unknown", bearer(a), (b"",)),
        ("both", bearer(a), (b"",)),
        ("a", [("authorization", f"Basic {a}")], (b"",)),
        ("a", [("authorization", a)], (b"",)),
        ("a", [*bearer(a), *bearer(b)], (b"",)),
        ("a", bearer(a[:-1]), (b"",)),
        ("a", bearer(b), (b"\xff" * 20,)),
        ("a", bearer(b), (b"x" * (1 << 20),)),
        ("a", bearer(b), ()),
        ("a", bearer(b), (b"", b"")),
    ]
    heard: dict[tuple[Any, ...], tuple[str, str]] = {}
    for certificate, metadata, messages in tried:
        with pki.channel(daemon.ready["tcp"], certificate, "") as channel:
            for method in methods():
                heard.setdefault(ask(channel, method, metadata, messages), (certificate, method))
    assert len(heard) == 1, heard
    ((code, _, _, trailing),) = heard
    assert code == grpc.StatusCode.UNAUTHENTICATED.name
    assert [key for key, _ in trailing] == [status.DETAIL_KEY]
    with pki.channel(daemon.ready["tcp"], "a", "") as channel:
        for method in methods():
            assert ask(channel, method, bearer(a)) not in heard, method
    with pki.channel(daemon.ready["tcp"], "none", "") as channel:
        assert ask(channel, HEALTH, bearer(a)) == ("OK",)
    text = daemon.log() + metrics(daemon)
    assert not any(token in text for token in (a, b, ended))


def test_no_message_of_a_stranger_is_waited_for(daemon: Daemon, pki: Pki) -> None:
    """He who never sends his message holds no place: he is answered before."""

    over = threading.Event()

    def messages() -> Iterator[bytes]:
        over.wait(CALL_S)
        yield b""

    with pki.channel(daemon.ready["tcp"], "a", "") as channel:
        for method in ("/kvstore.v1.Store/Lookup", "/kvstore.v1.Store/Push"):
            opened: Any = channel.stream_stream(method)
            call = opened(messages(), timeout=CALL_S)
            with pytest.raises(grpc.RpcError):
                next(call)
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not over.is_set()
        over.set()


def test_whoever_comes_in_sees_health_and_no_verb_of_the_operator(daemon: Daemon, pki: Pki) -> None:
    with pki.channel(daemon.ready["tcp"], "a") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.v1.Store"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        admin = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
        unknown = ask(channel, "/kvstore.v1.Store/Steal")
        assert unknown[0] == grpc.StatusCode.UNIMPLEMENTED.name
        for method in admin.methods:
            assert ask(channel, f"/{admin.full_name}/{method.name}") == unknown
        request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        reflect: Any = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        listed = reflect(iter([request]), timeout=CALL_S)
        names = {one.name for one in next(listed).list_services_response.service}
        assert "kvstore.v1.Store" in names
        assert "kvstore.v1.Admin" not in names


# ---------------------------------------------------------------- exchanged while it runs


def metrics(daemon: Daemon) -> str:
    return http(daemon, "/metrics")[1]


def counted(daemon: Daemon, event: str) -> float:
    for line in metrics(daemon).splitlines():
        if line.startswith(f'kvstore_tcp_events_total{{event="{event}"}}'):
            return float(line.split()[-1])
    raise AssertionError(f"no metric counts {event}")


def reloaded(daemon: Daemon, times: int, event: str = "reloads") -> None:
    daemon.signal(signal.SIGHUP)
    assert within(CALL_S, lambda: counted(daemon, event) == times), daemon.log()


def test_tokens_are_exchanged_without_a_restart(daemon: Daemon, pki: Pki) -> None:
    old = pki.path("a.token").read_text().strip()
    new = pki.token("a")
    with pki.channel(daemon.ready["tcp"], "a", "") as channel:
        assert ask(channel, HEALTH, bearer(new))[0] == "UNAUTHENTICATED"
        reloaded(daemon, 1)
        for token in (old, new):
            assert ask(channel, HEALTH, bearer(token)) == ("OK",)
        attached = [attach(channel, token) for token in (old, new)]
        pki.path("a.token").write_text(new)
        reloaded(daemon, 2)
        # On this very connection, and of the calls that are under way.
        assert ask(channel, HEALTH, bearer(old))[0] == "UNAUTHENTICATED"
        assert ask(channel, HEALTH, bearer(new)) == ("OK",)
        with pytest.raises(grpc.RpcError):
            next(attached[0])
        assert attached[0].code() is grpc.StatusCode.UNAUTHENTICATED
        assert attached[1].is_active()
        attached[1].cancel()
    assert counted(daemon, "calls_revoked") == 1


def attach(channel: grpc.Channel, token: str) -> Any:
    """A session; its stream."""
    request = pb.AttachRequest(protocol_major=1, group_id=b"g").SerializeToString()
    method: Any = channel.unary_stream("/kvstore.v1.Store/Attach")
    stream = method(request, metadata=tuple(bearer(token)))
    assert pb.AttachEvent.FromString(next(stream)).welcome.session
    return stream


def test_a_reload_that_cannot_be_used_leaves_all_as_it_was(daemon: Daemon, pki: Pki) -> None:
    token = pki.path("a.token").read_text().strip()
    good = {
        name: pki.path(name).read_bytes()
        for name in ("a.token", "b.token", "daemon.key", "clients")
    }
    spoilt: list[tuple[str, Callable[[Path], Any], str]] = [
        ("a.token", lambda path: path.write_text(""), "tenants.a.token_file"),
        ("b.token", lambda path: path.write_text(token), "tenants.b.token_file"),
        ("a.token", lambda path: path.chmod(0o644), "tenants.a.token_file"),
        ("a.token", lambda path: path.unlink(), "tenants.a.token_file"),
        ("daemon.key", lambda path: path.write_text("garbage"), "tcp.key_file"),
        ("clients", lambda path: path.write_text("garbage"), "tcp.client_ca_file"),
    ]
    for times, (name, spoil, setting) in enumerate(spoilt, 1):
        path = pki.path(name)
        # What is new and right beside it is not taken either.
        extra = pki.token("b") if name != "b.token" else ""
        spoil(path)
        reloaded(daemon, times, "reloads_failed")
        assert f'"{setting}"' in daemon.log().splitlines()[-1]
        with pki.channel(daemon.ready["tcp"], "a", token) as channel:
            assert ask(channel, HEALTH) == ("OK",)
        if extra:
            with pki.channel(daemon.ready["tcp"], "b", extra) as channel:
                assert ask(channel, HEALTH)[0] == "UNAUTHENTICATED"
        for other, content in good.items():
            pki.path(other).touch(mode=0o600)
            pki.path(other).chmod(0o600)
            pki.path(other).write_bytes(content)
    assert counted(daemon, "reloads") == 0
    assert token not in daemon.log()
    reloaded(daemon, 1)


def test_certificates_and_authorities_are_exchanged_without_a_restart(
    daemon: Daemon, pki: Pki
) -> None:
    with pki.channel(daemon.ready["tcp"], "a") as before:
        assert ask(before, HEALTH) == ("OK",)
        # Another authority for the clients, another certificate of the daemon's own.
        first = certificate_of(daemon, pki.tls("a"))
        pki.issue("daemon", HOST)
        pki.path("clients").write_bytes(pki.stranger.cert_pem.bytes())
        reloaded(daemon, 1)
        assert first_bytes(daemon, pki.tls("a")) == b""
        pki.issue("a2", "engine-a", by=pki.stranger)
        assert certificate_of(daemon, pki.tls("a2")) != first
        with pki.channel(
            daemon.ready["tcp"], "a2", pki.path("a.token").read_text().strip()
        ) as after:
            assert ask(after, HEALTH) == ("OK",)
        # A connection keeps what it was made with, until it is an hour old.
        assert ask(before, HEALTH) == ("OK",)


def certificate_of(daemon: Daemon, context: ssl.SSLContext) -> bytes:
    with (
        socket.create_connection(address_of(daemon), timeout=CLOSED_S) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as wrapped,
    ):
        assert wrapped.recv(1) != b""
        assert wrapped.selected_alpn_protocol() == "h2"
        return wrapped.getpeercert(binary_form=True) or b""


def test_a_client_goes_on_through_all_of_it(daemon: Daemon, pki: Pki) -> None:
    """The same objects: a token that is exchanged, one that comes too late, another certificate."""
    shown = pki.path("a.shown")
    shown.write_bytes(pki.path("a.token").read_bytes())
    config = pki.config("a", token_file=str(shown))
    with Client(f"tcp://{daemon.ready['tcp']}", config=config) as client:
        space = client.space(model())
        prompt, data = tokens(6), rows(6, space.block_bytes)
        assert space.push(prompt, data).stored == 6

        def hits() -> bool:
            return space.lookup(prompt).blocks == 6

        assert hits()
        # The next one, in the daemon first; then the old one out of it.
        new = pki.token("a")
        reloaded(daemon, 1)
        assert hits()
        shown.write_text(new)
        pki.path("a.token").write_text(new)
        reloaded(daemon, 2)
        assert within(CALL_S, hits)
        # In the wrong order: until the client's file has it all is a miss, and nothing is raised.
        pki.path("a.token").unlink()
        newest = pki.token("a")
        reloaded(daemon, 3)
        assert within(CALL_S, lambda: space.lookup(prompt).reason is Reason.PERMISSION_DENIED)
        assert space.fetch(space.keys(prompt)).blocks == 0
        shown.write_text(newest)
        assert within(CALL_S, hits)
        pki.issue("a", "engine-a")
        assert within(CALL_S, hits)


# ---------------------------------------------------------------- what does not start


@pytest.mark.parametrize(
    ("spoil", "setting"),
    [
        (lambda pki: pki.path("daemon.key").chmod(0o640), "tcp.key_file"),
        (lambda pki: pki.path("daemon.crt").unlink(), "tcp.cert_file"),
        (lambda pki: pki.path("clients").write_text(""), "tcp.client_ca_file"),
        (lambda pki: pki.path("a.token").write_text(""), "tenants.a.token_file"),
        (lambda pki: pki.path("a.token").write_text("letmein"), "tenants.a.token_file"),
        (lambda pki: pki.path("b.token").chmod(0o604), "tenants.b.token_file"),
        (
            lambda pki: pki.path("b.token").write_text(pki.path("a.token").read_text()),
            "tenants.b.token_file",
        ),
    ],
)
def test_a_daemon_that_would_not_be_safe_does_not_start(
    tmp_path: Path, pki: Pki, spoil: Callable[[Pki], None], setting: str
) -> None:
    daemon = make_daemon(tmp_path, **pki.settings("a", "b"))
    spoil(pki)
    with pytest.raises(DaemonDied) as died:
        daemon.start()
    assert died.value.code == EXIT_SETTINGS
    assert f"kvstored: {setting}: " in died.value.output


def test_a_port_that_is_taken_is_told_by_its_setting(tmp_path: Path, pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = pki.settings("a") | {"tcp__listen": f"127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(DaemonDied) as died:
            make_daemon(tmp_path, **settings).start()
    assert died.value.code == EXIT_SETTINGS
    assert "kvstored: tcp.listen: cannot listen on" in died.value.output
