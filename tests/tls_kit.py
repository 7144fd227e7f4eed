"""Certificates, tokens and channels for tests of the TCP listener. Keys are made by the test, and
die with its folder.

    pki = Pki(tmp_path)
    daemon = daemons(**pki.settings("a", "b"))
    with pki.channel(daemon.ready["tcp"], "a") as channel: ...
"""

from __future__ import annotations

import contextlib
import datetime
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import trustme
from click.testing import CliRunner

from kvstore.cli import token as token_command
from kvstore_client import ClientConfig

HOST = "localhost"
NO_TOKEN = ""


class Pki:
    """Two authorities, one of them unknown to the daemon; a certificate and a token for each
    tenant, whose name in the certificate is `engine-TENANT`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pki"
        self.folder.mkdir(mode=0o700)
        self.authority = trustme.CA(organization_name="kvstore tests")
        self.stranger = trustme.CA(organization_name="someone else")
        for name in ("ca", "clients"):  # what clients go by, and what the daemon does
            self.path(name).write_bytes(self.authority.cert_pem.bytes())
        self.issue("daemon", HOST, "127.0.0.1")

    def path(self, name: str) -> Path:
        return self.folder / name

    def issue(
        self,
        file: str,
        *names: str,
        common_name: str | None = None,
        by: trustme.CA | None = None,
        days: float | None = None,
    ) -> None:
        """Writes FILE.crt and FILE.key. `days`: until it ends, from now; negative: it has ended."""
        until = None
        if days is not None:
            now = datetime.datetime.now(datetime.timezone.utc)
            until = now + datetime.timedelta(days=days)
        made = (by or self.authority).issue_cert(*names, common_name=common_name, not_after=until)
        self.path(f"{file}.crt").write_bytes(b"".join(b.bytes() for b in made.cert_chain_pems))
        key = self.path(f"{file}.key")
        key.touch(mode=0o600)
        key.write_bytes(made.private_key_pem.bytes())

    def token(self, file: str) -> str:
        """Adds a token to FILE.token, as the command does; that token."""
        path = self.path(f"{file}.token")
        done = CliRunner().invoke(token_command.command, [str(path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return path.read_text().split()[-1]

    def tenant(self, name: str) -> str:
        """Certificate and token of a tenant; the token."""
        self.issue(name, f"engine-{name}")
        return self.token(name)

    def settings(self, *tenants: str) -> dict[str, Any]:
        """Settings of a daemon with these tenants, as `start_daemon` takes them; what they need is
        made.
        """
        found: dict[str, Any] = {
            "tcp__listen": "127.0.0.1:0",
            "tcp__cert_file": self.path("daemon.crt"),
            "tcp__key_file": self.path("daemon.key"),
            "tcp__client_ca_file": self.path("clients"),
        }
        for tenant in tenants:
            self.tenant(tenant)
            found[f"tenants__{tenant}__token_file"] = self.path(f"{tenant}.token")
            found[f"tenants__{tenant}__client_names"] = f"engine-{tenant}"
        return found

    def config(self, tenant: str, **more: Any) -> ClientConfig:
        """A client's, of this tenant."""
        files = {
            "tls_ca_file": "ca",
            "tls_cert_file": f"{tenant}.crt",
            "tls_key_file": f"{tenant}.key",
            "token_file": f"{tenant}.token",
        }
        paths = {name: str(self.path(file)) for name, file in files.items()}
        return ClientConfig(**{**paths, **more})

    def credentials(self, certificate: str | None, token: str) -> grpc.ChannelCredentials:
        """Of a bare channel. certificate: FILE, or none at all. token: "" for none."""
        pem: tuple[bytes | None, bytes | None] = (None, None)
        if certificate is not None:
            key, chain = (self.path(f"{certificate}.{end}") for end in ("key", "crt"))
            pem = (key.read_bytes(), chain.read_bytes())
        tls = grpc.ssl_channel_credentials(self.path("ca").read_bytes(), *pem)
        if not token:
            return tls
        return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(token))

    @contextlib.contextmanager
    def channel(
        self, address: str, certificate: str | None, token: str | None = None
    ) -> Iterator[grpc.Channel]:
        """A bare channel; the token of the certificate's tenant unless one is given."""
        if token is None:
            token = self.path(f"{certificate}.token").read_text().split()[-1]
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.ssl_target_name_override", HOST),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", -1),
        ]
        credentials = self.credentials(certificate, token)
        with grpc.secure_channel(address, credentials, options=options) as channel:
            yield channel

    def tls(self, certificate: str | None) -> ssl.SSLContext:
        """Of a socket without gRPC."""
        context = ssl.create_default_context(cafile=str(self.path("ca")))
        context.set_alpn_protocols(["h2"])
        if certificate is not None:
            files = (self.path(f"{certificate}.{end}") for end in ("crt", "key"))
            context.load_cert_chain(*map(str, files))
        return context


def address_of(daemon: Any) -> tuple[str, int]:
    """(host, port) of a daemon's TCP listener."""
    host, port = daemon.ready["tcp"].rsplit(":", 1)
    return host, int(port)


Call = Callable[..., Any]
