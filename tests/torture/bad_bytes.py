"""What a hostile or broken peer writes to a socket of the daemon: bytes by chance, near misses of
each protocol, and what is well-formed but not meant to be sent. Every function takes its chance
from the generator that it is given.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import NamedTuple

from kvstore.wire.v1 import fd_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM, END_HEADERS = 0x1, 0x4
METHODS = ("Lookup", "Acquire", "Commit", "Push", "Attach", "Open", "Nothing")


class Bytes(NamedTuple):
    """One connection's worth. kind: for the figures; descriptors: how many go with the first
    byte.
    """

    kind: str
    data: bytes
    descriptors: int = 0


Make = Callable[[random.Random], bytes]


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 3, 4, 8, 9, 10, 64, 700, 4096)))


# ---------------------------------------------------------------- HTTP/2


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """A frame of HTTP/2, whose length may be a lie."""
    said = len(payload) if length is None else length
    return (
        struct.pack(">I", said & 0xFFFFFF)[1:] + struct.pack(">BBI", kind, flags, stream) + payload
    )


OPENING = PREFACE + frame(SETTINGS, 0, 0, b"")


def _header(name: bytes, value: bytes) -> bytes:
    """A literal without indexing; both are short."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(rng: random.Random, stream: int = 1) -> bytes:
    """The headers of a gRPC call of the data service."""
    path = b"/kvstore.v1.Store/" + rng.choice(METHODS).encode()
    block = b"".join(
        (
            _header(b":method", b"POST"),
            _header(b":scheme", b"http"),
            _header(b":path", path),
            _header(b":authority", b"x"),
            _header(b"te", b"trailers"),
            _header(b"content-type", b"application/grpc"),
        )
    )
    return frame(HEADERS, END_HEADERS, stream, block)


def half_preface(rng: random.Random) -> bytes:
    return OPENING[: rng.randrange(1, len(OPENING))]


def preface_and_noise(rng: random.Random) -> bytes:
    return PREFACE + noise(rng)


def opening_and_noise(rng: random.Random) -> bytes:
    return OPENING + noise(rng)


def bad_frame(rng: random.Random) -> bytes:
    """A frame of any kind, with flags, stream and payload that do not suit it."""
    payload = rng.randbytes(rng.choice((0, 1, 4, 5, 8, 17, 200)))
    stream = rng.choice((0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1))
    return OPENING + frame(rng.randrange(16), rng.randrange(256), stream, payload) + noise(rng)


def oversize_frame(rng: random.Random) -> bytes:
    length = rng.choice((16_385, 1 << 20, (1 << 24) - 1))
    return OPENING + frame(rng.randrange(10), 0, rng.randrange(3), noise(rng), length)


def bad_headers(rng: random.Random) -> bytes:
    """A header block that cannot be decoded: indexes of nothing, lengths beyond its end."""
    block = rng.choice(
        (
            rng.randbytes(rng.randrange(1, 300)),
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x00\x7f\xff\xff\xff\x0fname",
            b"\x3f\xff\xff\xff\xff\x0f",  # a table size of 4 GiB
            b"\xbe" * 60,
            b"\x00\x84\xff\xff\xff\xff\x00",  # broken Huffman code
        )
    )
    return OPENING + frame(HEADERS, END_HEADERS, 1, block)


_MANY = b"".join(
    _header(b"x-%d" % index, b"%016x" % (index * 2_654_435_761)) for index in range(600)
)


def many_headers(rng: random.Random) -> bytes:
    """More headers than anybody sends, or a header block that never ends."""
    pieces = [frame(HEADERS, 0, 1, _MANY[:16_000])]
    pieces += [frame(CONTINUATION, 0, 1, _MANY[:8_000]) for _ in range(rng.randrange(1, 4))]
    return OPENING + b"".join(pieces)


def bad_call(rng: random.Random) -> bytes:
    """A call whose message lies about its length, its compression, or stops in the middle."""
    head = rng.choice(
        (
            struct.pack(">BI", 0, 2**32 - 1),
            struct.pack(">BI", 1, 12),
            struct.pack(">BI", 255, 7),
            struct.pack(">BI", 0, 500),
            b"\0\0",
        )
    )
    flags = rng.choice((0, END_STREAM))
    return OPENING + call_headers(rng) + frame(DATA, flags, 1, head + noise(rng)[:16_000])


def rapid_reset(rng: random.Random) -> bytes:
    """Calls that are taken back at once."""
    calls = [
        call_headers(rng, stream) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
        for stream in range(1, 2 * rng.randrange(3, 12), 2)
    ]
    return OPENING + b"".join(calls)


def flood(rng: random.Random) -> bytes:
    """Frames that ask for an answer each, or for nothing."""
    kind = rng.choice(
        (
            frame(PING, 0, 0, bytes(8)),
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)),
            frame(PRIORITY, 0, 3, struct.pack(">IB", 1, 7)),
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
            frame(DATA, 0, 1, b""),
        )
    )
    return OPENING + kind * rng.randrange(10, 200)


def broken_rules(rng: random.Random) -> bytes:
    """Well-formed frames in places where they must not be."""
    zero = struct.pack(">I", 0)
    return OPENING + rng.choice(
        (
            frame(CONTINUATION, END_HEADERS, 1, b""),
            frame(DATA, 0, 0, b"x"),
            frame(WINDOW_UPDATE, 0, 0, zero),
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)) * 2,
            frame(SETTINGS, 0, 0, b"x"),
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**32 - 1)),
            frame(SETTINGS, 1, 0, b"x" * 6),
            frame(PUSH_PROMISE, END_HEADERS, 1, zero),
            frame(GOAWAY, 0, 0, bytes(8)) + frame(PING, 0, 0, bytes(8)),
            frame(HEADERS, END_HEADERS, 2, b""),
            call_headers(random.Random(1), 5) + call_headers(random.Random(1), 3),
            frame(HEADERS, END_HEADERS | 0x8, 1, b"\xff"),  # padding longer than the frame
        )
    )


def other_protocol(rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(64),
            b"SSH-2.0-x\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            bytes(64),
        )
    )


HTTP2: tuple[Make, ...] = (
    noise, half_preface, preface_and_noise, opening_and_noise, bad_frame, oversize_frame,
    bad_headers, many_headers, bad_call, rapid_reset, flood, broken_rules, other_protocol,
)  # fmt: skip


# ---------------------------------------------------------------- the fd socket


def _framed(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(data) if length is None else length) + data


def _request(rng: random.Random) -> fd_pb2.FdRequest:
    number = rng.choice((0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1))
    return rng.choice(
        (
            fd_pb2.FdRequest(seq=1, hello=fd_pb2.FdHello(session=rng.randbytes(16))),
            fd_pb2.FdRequest(seq=1, hello=fd_pb2.FdHello(session=rng.randbytes(number % 4000))),
            fd_pb2.FdRequest(seq=number, get_region=fd_pb2.GetRegion(region_id=number)),
            fd_pb2.FdRequest(seq=number, get_staging=fd_pb2.GetStaging()),
            fd_pb2.FdRequest(seq=number, unmapped=fd_pb2.Unmapped(region_id=number)),
            fd_pb2.FdRequest(
                seq=1,
                fetch=fd_pb2.FdFetch(
                    session=rng.randbytes(rng.choice((0, 16, 4_000))),
                    lease_id=rng.choice((0, 1, 2, 2**64 - 1)),
                    first=number,
                    blocks=rng.choice((0, 1, 2**32 - 1)),
                    offset=rng.choice((0, 1, 2**64 - 1)),
                    length=rng.choice((0, 1, 2**64 - 1)),
                ),
            ),
            fd_pb2.FdRequest(),
        )
    )


def fd_lie(rng: random.Random) -> bytes:
    """A length of nothing, of too much, or of more than follows."""
    return _framed(noise(rng), rng.choice((0, 1, 65_536, 65_537, 1 << 24, 2**31, 2**32 - 1)))


def fd_noise(rng: random.Random) -> bytes:
    return _framed(noise(rng)) + noise(rng)


def fd_request(rng: random.Random) -> bytes:
    """A well-formed request of a stranger, alone or before others."""
    return b"".join(_framed(_request(rng).SerializeToString()) for _ in range(rng.randrange(1, 4)))


def fd_damaged(rng: random.Random) -> bytes:
    data = bytearray(_framed(_request(rng).SerializeToString() or b"x"))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data[: rng.randrange(1, len(data) + 1)])


FD: tuple[Make, ...] = (noise, fd_lie, fd_noise, fd_request, fd_damaged, other_protocol)


# ---------------------------------------------------------------- HTTP/1


def http_request(rng: random.Random) -> bytes:
    """A request that is none, too long, or not to be answered."""
    path = rng.choice((b"/healthz", b"/metrics", b"/../../etc/passwd", b"/%00", b"//", b"*"))
    method = rng.choice((b"GET", b"POST", b"HEAD", b"CONNECT", b"BREW", b"\xff", b""))
    version = rng.choice((b"HTTP/1.1", b"HTTP/0.9", b"HTTP/9.9", b"", b"HTTP/1.1 x"))
    extra = rng.choice(
        (
            b"",
            b"Content-Length: -1\r\n",
            b"Content-Length: 99999999999\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"X: " + b"a" * 9_000 + b"\r\n",
            b"".join(b"X-%d: y\r\n" % index for index in range(150)),
            b"no colon\r\n",
            b"Expect: 100-continue\r\n",
            b"Accept: application/openmetrics-text; version=\xff\r\n",
        )
    )
    end = rng.choice((b"\r\n", b"\n", b""))
    return method + b" " + path + b" " + version + b"\r\n" + extra + end


def http_long_line(rng: random.Random) -> bytes:
    return b"GET /" + b"a" * rng.choice((1_000, 65_530, 70_000))


HTTP1: tuple[Make, ...] = (noise, http_request, http_request, http_long_line, preface_and_noise)


def make(makers: tuple[Make, ...], rng: random.Random) -> Bytes:
    """One connection's bytes, of a kind that chance takes."""
    maker = rng.choice(makers)
    descriptors = rng.choice((0, 0, 0, 1, 2, 60)) if makers is FD else 0
    return Bytes(maker.__name__, maker(rng), descriptors)
