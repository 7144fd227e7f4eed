"""Certificates of the daemon: what is wrong with them is told at the start, by the setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from kvstore.config import TcpSettings
from kvstore.model.reasons import StartError
from kvstore_server import tls
from tests.tls_kit import Pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def settings(pki: Pki, **other: str) -> TcpSettings:
    files = {"cert_file": "daemon.crt", "key_file": "daemon.key", "client_ca_file": "ca"}
    paths = {name: str(pki.path(file)) for name, file in {**files, **other}.items()}
    return TcpSettings(listen="127.0.0.1:0", **paths)


def test_what_belongs_together_is_taken(pki: Pki) -> None:
    material = tls.load(settings(pki))
    assert material.key == pki.path("daemon.key").read_bytes()
    assert b"PRIVATE" not in repr(material).encode()
    credentials = tls.Credentials(material)
    pki.issue("other", "localhost")
    credentials.exchange(tls.load(settings(pki, cert_file="other.crt", key_file="other.key")))


def _without_key(pki: Pki) -> None:
    pki.path("daemon.key").unlink()


def _open_key(pki: Pki) -> None:
    pki.path("daemon.key").chmod(0o644)


def _another_key(pki: Pki) -> None:
    pki.issue("other", "localhost")
    pki.path("daemon.key").write_bytes(pki.path("other.key").read_bytes())


def _key_with_a_passphrase(pki: Pki) -> None:
    plain = pki.path("daemon.key").read_bytes()
    key = serialization.load_pem_private_key(plain, None)
    pki.path("daemon.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


def _key_is_garbage(pki: Pki) -> None:
    pki.path("daemon.key").write_text("garbage")


def _certificate_is_empty(pki: Pki) -> None:
    pki.path("daemon.crt").write_text("\n")


def _certificate_is_a_key(pki: Pki) -> None:
    pki.path("daemon.crt").write_bytes(pki.path("daemon.key").read_bytes())


def _certificate_is_cut(pki: Pki) -> None:
    whole = pki.path("daemon.crt").read_bytes()
    pki.path("daemon.crt").write_bytes(whole[: len(whole) // 2])


def _writable_certificate(pki: Pki) -> None:
    pki.path("daemon.crt").chmod(0o666)


def _no_authority(pki: Pki) -> None:
    pki.path("ca").unlink()


def _authority_is_garbage(pki: Pki) -> None:
    pki.path("ca").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def _authority_is_none(pki: Pki) -> None:
    """The daemon's own certificate: nobody could be verified against it."""
    pki.path("ca").write_bytes(pki.path("daemon.crt").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "setting"),
    [
        (_without_key, "tcp.key_file"),
        (_open_key, "tcp.key_file"),
        (_another_key, "tcp.key_file"),
        (_key_with_a_passphrase, "tcp.key_file"),
        (_key_is_garbage, "tcp.key_file"),
        (_certificate_is_empty, "tcp.cert_file"),
        (_certificate_is_a_key, "tcp.cert_file"),
        (_certificate_is_cut, "tcp.cert_file"),
        (_writable_certificate, "tcp.cert_file"),
        (_no_authority, "tcp.client_ca_file"),
        (_authority_is_garbage, "tcp.client_ca_file"),
        (_authority_is_none, "tcp.client_ca_file"),
    ],
)
def test_what_is_wrong_is_told_by_its_setting(
    pki: Pki, spoil: Callable[[Pki], None], setting: str
) -> None:
    spoil(pki)
    with pytest.raises(StartError) as caught:
        tls.load(settings(pki))
    assert caught.value.setting == setting
    assert "PRIVATE" not in caught.value.detail


def test_a_chain_and_several_authorities_are_taken(pki: Pki) -> None:
    child = pki.authority.create_child_ca()
    pki.issue("daemon", "localhost", by=child)
    both = trustme.CA().cert_pem.bytes() + pki.authority.cert_pem.bytes()
    pki.path("ca").write_bytes(both)
    assert tls.load(settings(pki)).authorities == both
