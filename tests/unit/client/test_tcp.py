"""Targets over TCP: what is one, what is needed for it, and that no secret is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.model.reasons import BadRequest, Reason
from kvstore_client import AsyncClient, Client, ClientConfig
from kvstore_client.channel import CallFailed, GrpcTransport
from kvstore_client.tcp import TcpTransport, TokenFile, opener, tcp_address
from tests.tls_kit import Pki


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("tcp://node-3:9473", "node-3:9473"),
        ("node-3.example:9473", "node-3.example:9473"),
        ("tcp://10.0.0.3:1", "10.0.0.3:1"),
        ("tcp://[fe80::1]:65535", "[fe80::1]:65535"),
        ("/run/kvstore/data.sock", None),
        ("unix:/run/kvstore/data.sock", None),
        ("unix:123", None),
        ("data.sock", None),
        ("./node:9473", None),
        ("node:99999", None),
    ],
)
def test_targets(target: str, address: str | None) -> None:
    assert tcp_address(target) == address


@pytest.mark.parametrize(
    "target",
    ["tcp://", "tcp://node", "tcp://node:0", "tcp://node:65536", "tcp://a:1/b", "tcp://fe80::1:9"],
)
def test_what_is_no_address_is_misuse(target: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Client(target)
    assert caught.value.setting == "target"


@pytest.mark.parametrize("name", ["tls_ca_file", "tls_cert_file", "tls_key_file", "token_file"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_there_is_no_tcp_without_all_files(
    tmp_path: Path, name: str, kind: type[Client] | type[AsyncClient]
) -> None:
    with pytest.raises(BadRequest) as caught:
        kind("tcp://node:9473", config=Pki(tmp_path).config("a", **{name: ""}))
    assert caught.value.setting == name


def test_sockets_need_none_of_it() -> None:
    assert isinstance(opener("/run/k/data.sock", ClientConfig())(), GrpcTransport)


def test_a_token_is_the_last_line_of_its_file_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old\nnew\n")
    file = TokenFile(str(path))
    assert file.token() == "new"
    path.write_text("old\nnew\nnewest\n")
    assert file.token() == "newest"
    path.unlink()
    with pytest.raises(CallFailed, match="token_file") as caught:
        file.token()
    assert caught.value.outage
    path.write_text("again")
    assert file.token() == "again"
    path.write_text("\n")
    with pytest.raises(CallFailed, match="is empty"):
        file.token()


def test_a_token_that_was_refused_is_read_again(tmp_path: Path) -> None:
    """Also from a file that looks as before: a clock may be coarse."""
    path = tmp_path / "token"
    path.write_text("first")
    file = TokenFile(str(path))
    assert file.token() == "first"
    with path.open("r+") as same:
        same.write("other")
    file.forget()
    assert file.token() == "other"


class Watched(TcpTransport):
    """Counts how often it ended its connection."""

    ended = 0

    def break_off(self) -> None:
        self.ended += 1
        super().break_off()


def test_a_connection_ends_when_its_certificate_has_changed_and_not_before(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.tenant("a")
    now_s = [100.0]
    config = pki.config("a")
    address = "127.0.0.1:9"
    transport = Watched(address, config, TokenFile(config.token_file), lambda: now_s[0])

    def called() -> int:
        with pytest.raises(CallFailed):
            transport.unary("Lookup", b"", 0.001)
        return transport.ended

    assert called() == 0
    now_s[0] += 10
    assert called() == 0
    pki.issue("a", "engine-a")
    now_s[0] += 0.5
    assert called() == 0, "it is looked once a second"
    now_s[0] += 0.5
    assert called() == 1
    # A certificate without its key yet, and one that is away for a moment.
    pki.path("a.key").write_text("half a k")
    now_s[0] += 1
    assert called() == 1
    pki.path("a.crt").rename(pki.path("away"))
    now_s[0] += 1
    assert called() == 1
    transport.close()


@pytest.mark.parametrize("file", ["ca", "a.crt", "a.key", "a.token"])
@pytest.mark.parametrize("how", ["absent", "garbage"])
def test_a_file_that_cannot_be_used_is_a_miss_with_its_name(
    tmp_path: Path, file: str, how: str
) -> None:
    pki = Pki(tmp_path)
    token = pki.tenant("a")
    pki.path(file).unlink()
    if how == "garbage":
        pki.path(file).write_text("" if file == "a.token" else "garbage")
    with Client("tcp://127.0.0.1:9", config=pki.config("a")) as client:
        found = client.connection()
    assert found.reason is Reason.UNAVAILABLE
    assert str(pki.path(file)) in found.detail
    assert token not in found.detail


def test_no_secret_in_what_is_shown(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    token = pki.tenant("a")
    config = pki.config("a")
    file = TokenFile(config.token_file)
    transport = opener("tcp://127.0.0.1:9", config)()
    with pytest.raises(CallFailed) as caught:
        transport.unary("Lookup", b"", 0.5)
    assert file.token() == token
    for shown in (config, file, transport, caught.value, caught.value.detail):
        assert token not in repr(shown)
    transport.close()
