"""Who comes in over TCP: which tenant a certificate's name and a token belong to, together.

    identity = load(settings)
    identity.entry(names, authorization) -> Entry | None

A token is random text of 256 bits or more, so that one SHA-256 of it is as good as a slow hash;
only that is kept. Every stored token is compared, each in constant time, whatever is found. A token
of one tenant does not come in with a certificate of another.

Pure but for the files that `load` reads. On the event loop's thread, and `load` on another.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.config import Settings
from kvstore.config.knob import wrong
from kvstore_server import secretfiles

TOKEN_CHARS_MIN = 43
"""256 bits in base64 without padding."""
TOKEN_CHARS_MAX = 512
DIFFERENT_CHARS_MIN = 8
"""Of random text of that length it is never less, in hexadecimal neither; of a word often."""
TOKENS_MAX = 64
"""Of one tenant: each is compared at each call."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750, b64token
_SCHEME = "bearer "


class Entry(NamedTuple):
    """What somebody was let in by. It holds no secret: of a token its hash."""

    tenant: str
    name: str
    token_digest: bytes


class Identity:
    """The tokens and certificate names of all tenants, of one reading of the files."""

    def __init__(
        self,
        tokens: Mapping[str, Sequence[bytes]],
        names: Mapping[str, str],
        equal: Callable[[bytes, bytes], bool] = hmac.compare_digest,
    ) -> None:
        """tokens: SHA-256 digests by tenant. names: tenant by certificate name."""
        self._equal = equal
        self._tokens = [(digest, tenant) for tenant, some in tokens.items() for digest in some]
        self._names = dict(names)

    def entry(self, names: Sequence[str], presented: str) -> Entry | None:
        """Who that is; None for every way not to be anybody.

        names: of the certificate. presented: what `bearer` found, "" for nothing.
        """
        digest = _digest(presented)
        tenant = ""
        for stored, owner in self._tokens:
            # No `break`: where a token stands in the list is nobody's business.
            if self._equal(stored, digest):
                tenant = owner
        own = [name for name in names if self._names.get(name) == tenant]
        return Entry(tenant, own[0], digest) if tenant and own else None

    def still_lets_in(self, entry: Entry) -> bool:
        """Whether what `entry` came in by is still good."""
        known = any(self._equal(entry.token_digest, digest) for digest, _ in self._tokens)
        return known and self._names.get(entry.name) == entry.tenant


def bearer(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    """The token in a call's metadata; "" if there is none, or more than one."""
    found = [value for key, value in metadata if key == "authorization"]
    if len(found) != 1 or not isinstance(found[0], str):
        return ""
    scheme, token = found[0][: len(_SCHEME)], found[0][len(_SCHEME) :]
    if scheme.lower() != _SCHEME or len(token) > TOKEN_CHARS_MAX or not token.isascii():
        return ""
    return token


def load(settings: Settings) -> Identity:
    """Reads the tenants' token files. Raises StartError, which names the setting."""
    tokens: dict[str, list[bytes]] = {}
    names: dict[str, str] = {}
    owners: dict[bytes, str] = {}
    for tenant, one in settings.tenants.items():
        if not one.token_file:
            continue
        setting = f"tenants.{tenant}.token_file"
        tokens[tenant] = [_digest(token) for token in _tokens(one.token_file, setting)]
        for digest in tokens[tenant]:
            if owners.setdefault(digest, tenant) != tenant:
                raise wrong(
                    setting,
                    f"a token in {one.token_file} is the tenant {owners[digest]!r}'s already: a "
                    "token belongs to one tenant",
                )
        names |= dict.fromkeys(one.certificate_names, tenant)
    return Identity(tokens, names)


def _tokens(path: str, setting: str) -> Iterator[str]:
    text = secretfiles.read(path, setting, secret=True).decode("ascii", "replace")
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise wrong(setting, f"{path} holds no token")
    if len(found) > TOKENS_MAX:
        detail = f"{path} holds {len(found)} tokens, {TOKENS_MAX} at most"
        raise wrong(setting, detail)
    for token in found:
        detail = ""
        if not _TOKEN.fullmatch(token):
            detail = "has characters that no token has"
        elif not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
            detail = f"has {len(token)} characters, not {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX}"
        elif len(set(token)) < DIFFERENT_CHARS_MIN:
            detail = "is not random"
        if detail:
            detail = f"a token in {path} {detail}: make one with `kvstore token`"
            raise wrong(setting, detail)
        yield token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
