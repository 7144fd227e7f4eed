"""Settings of what other machines can reach: metrics over HTTP, the data service over TCP.

TCP is off until it is configured, and there is no TCP without TLS, client certificates and tokens.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.config.knob import address, knob

HTTP_LISTEN = "127.0.0.1:9472"


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics and health."""

    listen: Annotated[
        str,
        knob(
            "HOST:PORT of /metrics, /healthz and /readyz. Port 0: any free one, told in the ready "
            "record; so is the default where another daemon has it. Empty: no HTTP.",
            when="Prometheus or the kubelet comes from elsewhere, or two daemons share a host.",
        ),
    ] = HTTP_LISTEN

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port), or None when HTTP is off. Raises StartError if it is neither."""
        return address("http.listen", self.listen)


class TcpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The data service over TCP, with client certificates and tokens. Never the admin service."""

    listen: Annotated[
        str,
        knob(
            "HOST:PORT of the data service for tenants that have a token_file and client_names. "
            "Port 0: any free one, told in the ready record. Empty: no TCP.",
            when="engines run where the sockets cannot be mounted; they get byte streams only.",
        ),
    ] = ""
    cert_file: Annotated[
        str,
        knob(
            "The daemon's certificate and what leads from it to its authority, PEM. Read again at "
            "SIGHUP, like all files of TLS and tokens.",
            when="tcp.listen is set.",
        ),
    ] = ""
    key_file: Annotated[
        str,
        knob(
            "Private key of tcp.cert_file, PEM, without a passphrase, readable by the daemon's "
            "user alone.",
            when="tcp.listen is set.",
        ),
    ] = ""
    client_ca_file: Annotated[
        str,
        knob(
            "Authorities that sign the clients' certificates, PEM. One for this alone.",
            when="tcp.listen is set.",
        ),
    ] = ""

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port), or None when TCP is off. Raises StartError if it is neither."""
        return address("tcp.listen", self.listen)
