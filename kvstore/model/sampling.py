"""Which requests are served, held out or audited: decided by a hash, so that the same request is
always on the same side.

Pure. A request is known by the key of its last block, which stands for all its tokens; that of its
first block would put everybody who has one system prompt on one side. The salt is the deployment's
own: who knows the tokens alone cannot tell on which side a request will be.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Final, NamedTuple

from kvstore.model.reasons import Reason

__all__ = ["ALL_SERVED", "Arm", "Sampling", "share_point"]

SALT_BYTES_MAX: Final = 64
"""Of BLAKE2b's key."""
_POINTS: Final = 2**64


class Arm(enum.IntEnum):
    """The side of a comparison that a request is on. The numbers are those of the wire."""

    UNSPECIFIED = 0
    APPLIED = 1
    HELD_OUT = 2
    """Looked up, decided and recorded, but nothing is loaded."""
    SHADOW = 3
    """The same of every request."""

    @property
    def withheld(self) -> bool:
        """Whether nothing is to be loaded."""
        return self in (Arm.HELD_OUT, Arm.SHADOW)

    @property
    def reason(self) -> Reason:
        """What a withheld request is told; OK for others."""
        return _REASONS.get(self, Reason.OK)


_REASONS: Final = {
    Arm.HELD_OUT: Reason.DECLINED_HOLDOUT,
    Arm.SHADOW: Reason.DECLINED_SHADOW,
}


class Sampling(NamedTuple):
    """The shares, from 0 to 1, and the salt as bytes (at most `SALT_BYTES_MAX`)."""

    serve_share: float = 1.0
    audit_share: float = 0.0
    salt: bytes = b""

    def arm(self, last_key: bytes) -> Arm:
        """The side of a request whose last block has this key."""
        if self.serve_share >= 1:
            return Arm.APPLIED
        if self.serve_share <= 0:
            return Arm.SHADOW
        served = share_point(last_key, self.salt, b"kvstore/arm") < self.serve_share
        return Arm.APPLIED if served else Arm.HELD_OUT

    def audited(self, last_key: bytes) -> bool:
        """Whether a served hit is in the audited sample, whichever requests are served."""
        if self.audit_share <= 0:
            return False
        return share_point(last_key, self.salt, b"kvstore/audit") < self.audit_share


ALL_SERVED: Final = Sampling()


def share_point(last_key: bytes, salt: bytes, purpose: bytes) -> float:
    """A number of [0, 1), evenly distributed over keys, independent for each purpose (at most 16
    bytes): BLAKE2b with the salt as its key (RFC 7693), 64 bits.
    """
    digest = hashlib.blake2b(last_key, digest_size=8, key=salt, person=purpose).digest()
    # Exact in a float only to 53 bits; the lower ones would round 1 - 2^-64 up to 1.
    return (int.from_bytes(digest, "big") >> 11) / (_POINTS >> 11)
