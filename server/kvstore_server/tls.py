"""The daemon's side of TLS: certificate, key, the clients' authorities; exchanged at run time.

    material = load(settings.tcp)          # checked by OpenSSL before gRPC sees it
    credentials = Credentials(material)    # .of_grpc for the listener
    credentials.exchange(load(...))        # for the handshakes from now on

gRPC (BoringSSL) makes the handshake: TLS 1.2 or 1.3, a client certificate required and verified
against `tcp.client_ca_file`. Connections that are there keep what they were made with.
"""

from __future__ import annotations

import os
import ssl
import threading
from typing import NamedTuple

import grpc

from kvstore.config import TcpSettings
from kvstore.config.knob import wrong
from kvstore_server import secretfiles

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


class Material(NamedTuple):
    """PEM, as read."""

    certificate: bytes
    key: bytes
    authorities: bytes

    def __repr__(self) -> str:
        return "Material(...)"  # the key is nobody's to read


def load(settings: TcpSettings) -> Material:
    """Reads and checks the three files. Raises StartError, which names the setting."""
    certificate = _certificates(settings.cert_file, "tcp.cert_file")
    key = secretfiles.read(settings.key_file, "tcp.key_file", secret=True)
    authorities = _certificates(settings.client_ca_file, "tcp.client_ca_file")
    _check_pair(certificate, key, settings)
    known = _parsed(authorities, settings.client_ca_file, "tcp.client_ca_file")
    if not known.get_ca_certs(binary_form=True):
        detail = f"{settings.client_ca_file} holds no certificate of an authority"
        raise wrong("tcp.client_ca_file", detail)
    return Material(certificate, key, authorities)


class Credentials:
    """gRPC's credentials of a server, with the newest material for each handshake."""

    def __init__(self, material: Material) -> None:
        self._lock = threading.Lock()
        self._next: Material | None = None
        self.of_grpc: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(material),
            self._newest,  # type: ignore[arg-type]  # None is how it says that nothing is new
            require_client_authentication=True,
        )

    def exchange(self, material: Material) -> None:
        """From the next handshake on."""
        with self._lock:
            self._next = material

    def _newest(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake, in a thread of its own; None: as before."""
        with self._lock:
            material, self._next = self._next, None
        return None if material is None else _configuration(material)


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], material.authorities)


def _certificates(path: str, setting: str) -> bytes:
    pem = secretfiles.read(path, setting, secret=False)
    if _CERTIFICATE not in pem:
        raise wrong(setting, f"{path} holds no certificate in PEM")
    return pem


def _parsed(pem: bytes, path: str, setting: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise wrong(setting, f"{path} is damaged: it cannot be parsed as PEM") from None
    return context


def _check_pair(certificate: bytes, key: bytes, settings: TcpSettings) -> None:
    """That the key is the certificate's. OpenSSL takes paths: it gets those of memory, so that what
    was checked is what is used.
    """
    context = _parsed(certificate, settings.cert_file, "tcp.cert_file")
    with _Memory(certificate) as certificate_path, _Memory(key) as key_path:
        try:
            context.load_cert_chain(certificate_path, key_path, password=_no_passphrase)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or "not PEM, or with a passphrase"
            detail = f"{settings.key_file} is no key of {settings.cert_file}: {reason}"
            raise wrong("tcp.key_file", detail) from None


def _no_passphrase() -> str:
    """In place of OpenSSL's question on the terminal."""
    raise ValueError("the key has a passphrase")


class _Memory:
    """A path to bytes that are in no file system."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> str:
        self._fd = os.memfd_create("kvstore-pem", os.MFD_CLOEXEC)
        os.write(self._fd, self._content)
        return f"/proc/self/fd/{self._fd}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
