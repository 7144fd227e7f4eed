"""Length-prefixed framing: the one way in which fields become bytes that are hashed.

It promises that two different lists of fields never give the same bytes: each field is preceded by
its length (u32, little endian), so no field can run into the next. Joined strings do not have this
property.
"""

from __future__ import annotations

from struct import pack

from kvstore.model.reasons import BadRequest, Reason

FIELD_BYTES_MAX = 2**32 - 1


def frame(*fields: bytes) -> bytes:
    """Each field as u32 length, little endian, and its bytes. BadRequest if one is not bytes or 4
    GiB or longer.
    """
    out: list[bytes] = []
    for field in fields:
        if type(field) is not bytes:
            raise BadRequest(
                Reason.BAD_REQUEST, f"a framed field must be bytes, not {type(field).__name__}"
            )
        if len(field) > FIELD_BYTES_MAX:
            raise BadRequest(Reason.BAD_SIZE, f"a framed field of {len(field)} bytes is too long")
        out.append(pack("<I", len(field)))
        out.append(field)
    return b"".join(out)
