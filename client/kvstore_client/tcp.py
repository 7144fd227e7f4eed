"""Targets on another machine: gRPC over TCP with TLS, this client's certificate, and a token.

There is no TCP without all of them. The daemon hands no memory over: bytes come by Fetch and Push.

Certificates belong to a connection: when one of their files has changed the connection ends, and
the next call makes another. The token goes with each call, and is read again when its file has
changed. Neither is ever part of an error, a log or a `repr`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

import grpc

from kvstore.model.reasons import BadRequest, Reason
from kvstore_client.channel import (
    CallFailed,
    GrpcTransport,
    Metadata,
    Transport,
    socket_path,
)
from kvstore_client.config import TLS_FILES, ClientConfig

__all__ = ["TcpTransport", "opener", "tcp_address"]

LOOK_S = 1.0
"""How often it is looked whether a certificate has changed, at most."""
FILE_BYTES_MAX = 1 << 20
_SCHEME = "tcp://"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^/:\s\[\]]+):(\d{1,5})")


def tcp_address(target: str | os.PathLike[str]) -> str | None:
    """HOST:PORT of "tcp://HOST:PORT" or "HOST:PORT"; None for a target of any other kind.
    BadRequest for tcp:// with anything else behind it.
    """
    if not isinstance(target, str):
        return None
    address = target.removeprefix(_SCHEME)
    match = _ADDRESS.fullmatch(address)
    if match is not None and match[1] != "unix" and 0 < int(match[2]) <= 65535:
        return address
    if target.startswith(_SCHEME):
        raise BadRequest(Reason.BAD_NAME, f"{target!r} is not tcp://HOST:PORT", "target")
    return None


def opener(target: str | os.PathLike[str], config: ClientConfig) -> Callable[[], Transport]:
    """What makes a connection to a target. BadRequest if it is none, or for want of a file."""
    address = tcp_address(target)
    if address is None:
        path = socket_path(target)
        return lambda: GrpcTransport(path, config.connect_timeout_ms)
    for name in TLS_FILES:
        if not getattr(config, name):
            raise BadRequest(
                Reason.BAD_NAME, f"a target over TCP needs {name}: there is no TCP without", name
            )
    token = TokenFile(config.token_file)
    return lambda: TcpTransport(address, config, token)


class _Seen(NamedTuple):
    """What tells that a file is another one now, without reading it."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int


class TokenFile:
    """The last line of a file, as of now. For several threads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: _Seen | None = None
        self._token = ""

    def token(self) -> str:
        """Raises CallFailed if there is none: a token that was read before ends with its file."""
        seen = _look(self._path, "token_file")
        if seen != self._seen:
            lines = _read(self._path, "token_file").split()
            if not lines:
                raise _unusable("token_file", self._path, "is empty")
            # Two threads may read it at once; what they find is one and the same.
            self._token, self._seen = lines[-1].decode("ascii", "replace"), seen
        return self._token

    def forget(self) -> None:
        """It was refused: the next call reads it again."""
        self._seen = None


class TcpTransport(GrpcTransport):
    """A gRPC channel over TLS. It has no fd socket."""

    def __init__(
        self,
        address: str,
        config: ClientConfig,
        token: TokenFile,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(address, config.connect_timeout_ms)
        self._config = config
        self._token = token
        self._clock_s = clock_s
        self._look_at_s = 0.0
        self._seen: list[_Seen] = []
        name = config.tls_server_name
        self._options += (("grpc.ssl_target_name_override", name),) if name else ()
        # A peer that is gone without a word: calls find out in half a minute, not in a quarter of
        # an hour.
        self._options += (("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000))

    def _checked(self, target: str) -> str:
        return target

    def _open(self) -> grpc.Channel:
        self._seen = self._looked()
        config = self._config
        _check(config)
        credentials = grpc.ssl_channel_credentials(
            _read(config.tls_ca_file, "tls_ca_file"),
            _read(config.tls_key_file, "tls_key_file"),
            _read(config.tls_cert_file, "tls_cert_file"),
        )
        return grpc.secure_channel(f"dns:///{self._path}", credentials, options=self._options)

    def _metadata(self) -> Metadata:
        return (("authorization", f"Bearer {self._token.token()}"),)

    def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        self._renew()
        try:
            return super().unary(method, request, timeout_s)
        except CallFailed as failure:
            if failure.reason is Reason.PERMISSION_DENIED:
                self._token.forget()
            raise

    def _renew(self) -> None:
        """Ends the connection when a certificate has changed: with it the session, and the next
        call makes both anew.
        """
        now_s = self._clock_s()
        if self._channel is None or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        # While a file is away, or only one of a pair is new, what is there still serves.
        with contextlib.suppress(CallFailed):
            if self._looked() != self._seen:
                _check(self._config)
                self.break_off()

    def _looked(self) -> list[_Seen]:
        names = [name for name in TLS_FILES if name.startswith("tls_")]
        return [_look(getattr(self._config, name), name) for name in names]

    def _knock(self) -> None:
        """Only gRPC's own attempt tells: a bare connection would count at the daemon's door."""

    def dial_memory(self, timeout_s: float) -> socket.socket:
        raise OSError("there is no shared memory over TCP")


def _check(config: ClientConfig) -> None:
    """That the files are what they should be. gRPC would say so on stderr only, each time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file, _no_passphrase)
    except (OSError, ValueError) as error:
        why = f"is no key of {config.tls_cert_file}: {_reason(error)}"
        raise _unusable("tls_key_file", config.tls_key_file, why) from None
    try:
        context.load_verify_locations(config.tls_ca_file)
    except (OSError, ValueError) as error:
        why = f"holds no authority: {_reason(error)}"
        raise _unusable("tls_ca_file", config.tls_ca_file, why) from None


def _no_passphrase() -> str:
    """In place of OpenSSL's question on the terminal."""
    raise ValueError("it has a passphrase")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return str(getattr(error, "strerror", None) or error)


def _look(path: str, name: str) -> _Seen:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unusable(name, path, f"cannot be read: {error.strerror}") from None
    return _Seen(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _read(path: str, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError as error:
        raise _unusable(name, path, f"cannot be read: {error.strerror}") from None


def _unusable(name: str, path: str, why: str) -> CallFailed:
    return CallFailed(Reason.UNAVAILABLE, f"{name}: {path} {why}", outage=True)
