"""The offer of a model whose weights have no name yet.

A person who approves an incomplete offer names its weights, and the daemon takes that name for each
later offer that is equal. Without the weights two models may be equal in everything else: a folder
whose files were replaced, weights made up in memory, an update in place. So that an approval cannot
speak for weights that its author never saw, such an offer carries a mark of its own, and an
approval covers the one object that made it. Used by the engine adapters.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Final

from kvstore.model.fields import NAME_BYTES_MAX
from kvstore.model.fingerprint import Fingerprint

__all__ = ["new_mark", "offer_of"]

MARK_BYTES: Final = 8


def new_mark() -> str:
    """What no other process has, nor another object of this one: 64 random bits in hex."""
    return secrets.token_hex(MARK_BYTES)


def offer_of(fingerprint: Fingerprint, mark: str) -> Fingerprint:
    """The fingerprint itself if its weights have a name; else one that this mark makes unique.

    The mark is a part of `identity.config_digest`: a field that no converter bridges and that
    nothing else is looked up by. One without a config digest is returned as it is, since an
    approval does not complete it.
    """
    identity = fingerprint.identity
    if identity.weights_revision is not None or identity.config_digest is None:
        return fingerprint
    text = f"with unnamed weights {mark}: {identity.config_digest}".encode()
    marked = text[:NAME_BYTES_MAX].decode("utf-8", "ignore")
    identity = dataclasses.replace(identity, config_digest=marked)
    return dataclasses.replace(fingerprint, identity=identity)
