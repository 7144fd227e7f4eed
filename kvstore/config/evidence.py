"""Settings of evidence: which requests are served, and which hits are audited."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.config.knob import knob
from kvstore.model.sampling import SALT_BYTES_MAX, Sampling


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the traffic is served, so that the rest can be compared with it."""

    share: Annotated[
        float,
        knob(
            "Share of requests that are served from the store, by a hash of their last block. The "
            "others are held out: looked up, decided and recorded, but nothing is loaded. 0: "
            "shadow mode, nothing is ever loaded.",
            when="it is to be shown that the store helps, and `kvstore report` is to say so.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    salt: Annotated[
        str,
        knob(
            "Text that decides, with serve.share and audit.share, which requests are chosen; "
            f"at most {SALT_BYTES_MAX} bytes of UTF-8.",
            when="another sample of the same traffic is wanted, or tenants should not be able to "
            "tell which of their prompts are held out.",
        ),
    ] = ""


class AuditSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Hits whose caller is asked to compute all the same, and to compare."""

    share: Annotated[
        float,
        knob(
            "Share of served hits, by a hash of their last block, that the engine computes anew "
            "and compares with the stored blocks; blocks that differ hold their fingerprint for "
            "review. An audited request gains nothing from the store.",
            when="stored bytes are to be checked against the model itself.",
            ge=0,
            le=1,
        ),
    ] = 0.0


def sampling_of(serve: ServeSettings, audit: AuditSettings) -> Sampling:
    """The settings as what decides."""
    return Sampling(serve.share, audit.share, serve.salt.encode())
