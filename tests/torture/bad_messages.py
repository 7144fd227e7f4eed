"""Messages that gRPC delivers and the daemon must refuse, or answer as it would any client: valid
requests of every verb of both services with something wrong in them.

The verbs are those of the descriptors, so that a new one is covered. What a mutation makes may
still be a valid order of the operator; those that would take something from the well-behaved client
are not sent (`_harmful`).
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kvstore.model.reasons import Reason
from kvstore.wire import convert, status
from kvstore.wire.v1 import admin_pb2, fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon
from tests.e2e.stage import model
from tests.rawclient import RawAdmin, RawClient, channel
from tests.torture.base import Outcome
from tests.torture.watching import SAME_MAX

IN_FLIGHT = 24
CALL_S = 8.0
MILLION_KEYS = bytes(32 * 1_000_000)
MODEL = model(name="attacked")
UNTYPED = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.OK)
NUMBERS = (
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_ENUM,
    FieldDescriptor.TYPE_BOOL,
)


@dataclass(frozen=True)
class Verb:
    """One method of a service."""

    service: str
    name: str
    request: type[Message]
    reply: type[Message]
    takes_stream: bool
    gives_stream: bool

    @property
    def path(self) -> str:
        return f"/kvstore.v1.{self.service}/{self.name}"


def verbs() -> list[Verb]:
    """Every method of the data service and of the operator's."""
    found = []
    for module, service in ((pb, "Store"), (admin_pb2, "Admin")):
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            found.append(
                Verb(
                    service,
                    method.name,
                    _class_of(method.input_type),
                    _class_of(method.output_type),
                    method.client_streaming,
                    method.server_streaming,
                )
            )
    return found


def _class_of(descriptor: Any) -> type[Message]:
    module = pb if hasattr(pb, descriptor.name) else admin_pb2
    found: type[Message] = getattr(module, descriptor.name)
    return found


# ---------------------------------------------------------------- bytes of a message


def varint(value: int) -> bytes:
    """As the wire has it; negative numbers take ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def length_delimited(field: int, data: bytes, length: int | None = None) -> bytes:
    """A field whose length may be a lie."""
    return varint(field << 3 | 2) + varint(len(data) if length is None else length) + data


def _flipped(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\xff"
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _inserted(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 12)) + data[at:]


def _unknown_field(data: bytes, rng: random.Random) -> bytes:
    later = (
        number(rng.randrange(100, 1 << 29), rng.randrange(1 << 64)),
        length_delimited(rng.randrange(100, 1 << 29), rng.randbytes(40)),
        varint(999 << 3 | 5) + bytes(4),
        varint(999 << 3 | 3) * 50 + varint(999 << 3 | 4) * 50,  # groups within groups
        varint(999 << 3 | 3) * 20_000,  # that never end
    )
    return data + rng.choice(later)


def _broken_tail(data: bytes, rng: random.Random) -> bytes:
    tails = (
        b"\x08" + b"\xff" * 9,
        b"\x08" + b"\xff" * 11,
        b"\x0a\xff",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a" + varint(-1) + b"x",
        b"\x00\x01",
        b"\x0f\xff",
        b"\x07",
    )
    return data + rng.choice(tails)


def _wrong_type(data: bytes, rng: random.Random) -> bytes:
    """A field in another wire type than its own, which protobuf takes as unknown."""
    field = rng.randrange(1, 12)
    return data + rng.choice(
        (number(field, 7), length_delimited(field, b"\xff\xfe"), b"\x09" + bytes(8))
    )


def _doubled(data: bytes, rng: random.Random) -> bytes:
    return data * rng.randrange(2, 5)


def _numbers(data: bytes, rng: random.Random) -> bytes:
    return data + b"".join(number(rng.randrange(1, 12), rng.choice(IDS)) for _ in range(3))


def _noise(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 200))


def _none(data: bytes, rng: random.Random) -> bytes:
    return data


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flipped, _cut, _inserted, _unknown_field, _broken_tail, _wrong_type, _doubled, _numbers,
    _noise, _none,
)  # fmt: skip
IDS = (
    0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -2,
    -(2**31), -(2**63),
)  # fmt: skip


# ---------------------------------------------------------------- sending


class BadMessages:
    """Sends them with a session of its own, some in flight at a time, and judges every answer."""

    def __init__(self, daemon: Daemon, rng: random.Random, outcome: Outcome) -> None:
        self.sent = 0
        self.answers: Counter[str] = Counter()
        self._daemon = daemon
        self._rng = rng
        self._outcome = outcome
        self._verbs = verbs()
        self._channels = {
            "Store": channel(daemon.data_socket),
            "Admin": channel(daemon.admin_socket),
        }
        self._pins: set[int] = set()
        self._flying: deque[tuple[Verb, bytes, Any]] = deque()
        self._said: Counter[str] = Counter()
        self._attach()

    def __enter__(self) -> BadMessages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._land_all()
        if self._daemon.alive:
            with RawAdmin(self._daemon.admin_socket) as admin:
                for pin in self._pins:
                    admin.call("Unpin", pin_id=pin)
        self._client.close()
        for wire in self._channels.values():
            wire.close()

    def _attach(self) -> None:
        self._client = RawClient(self._daemon.data_socket, group=b"attacker")
        self._space = self._client.open(MODEL).space_id

    # ---------------------------------------------------------------- what is sent

    def send(self, count: int) -> None:
        """So many requests, one in each turn for every verb."""
        for verb in itertools.islice(itertools.cycle(self._verbs), count):
            request = self._valid(verb)
            data = self._rng.choice(MUTATIONS)(request.SerializeToString(), self._rng)
            if self._rng.random() < 0.1:
                data = self._rng.choice(MUTATIONS)(data, self._rng)
            self._send(verb, data)
        self._land_all()

    def boundaries(self) -> None:
        """Ids at the edges of what there is, in every number of every verb (field case G3)."""
        with RawAdmin(self._daemon.admin_socket) as admin:
            host = admin.stats().tiers[0]
        slots = int(host.blocks + host.free_slots)
        edges = {slots - 1, slots, slots + 1, int(host.regions), int(host.regions) + 1, *IDS}
        for verb in self._verbs:
            for path in _number_paths(verb.request.DESCRIPTOR):
                for edge in sorted(edges):
                    data = self._valid(verb).SerializeToString() + _nested(path, edge)
                    self._send(verb, data)
        self._land_all()
        for edge in sorted({edge % (1 << 32) for edge in edges}):
            self._client.the_fd().unmapped(edge)
            reply, fds = self._client.the_fd().ask(get_region=fd_pb2.GetRegion(region_id=edge))
            for fd in fds:
                os.close(fd)
            self.answers["fds_given"] += len(fds)
            if bool(fds) != (reply.reason == pb.REASON_OK):
                self._outcome.failed.append(f"region {edge}: {reply.reason} with {len(fds)} fds")

    def large(self) -> None:
        """More keys than a message holds, and messages of the largest size."""
        for verb in self._verbs:
            fields = [f for f in verb.request.DESCRIPTOR.fields if f.name in ("keys", "chain")]
            for field in fields:
                for packed in (MILLION_KEYS, MILLION_KEYS[: 32 * 400_000], MILLION_KEYS[:-1]):
                    request = self._valid(verb)
                    setattr(request, field.name, packed)
                    self._send(verb, request.SerializeToString())
                    self._land_all()

    def _valid(self, verb: Verb) -> Any:
        """A request that the daemon would take, with its fields by chance."""
        request: Any = verb.request()
        for field in verb.request.DESCRIPTOR.fields:
            if self._rng.random() < 0.9 or field.name in ("session", "tenant"):
                self._fill(request, field, 0)
        if verb.name == "SetWeightEpoch":
            request.epoch = 0
        return request

    def _fill(self, message: Any, field: Any, depth: int) -> None:
        value = self._value(field, depth)
        if value is None:
            return
        if field.message_type is not None:
            target = getattr(message, field.name)
            if field.label == FieldDescriptor.LABEL_REPEATED:
                target.add().CopyFrom(value)
            else:
                target.CopyFrom(value)
        elif field.label == FieldDescriptor.LABEL_REPEATED:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)

    def _value(self, field: Any, depth: int) -> Any:
        named = self._named().get(field.name)
        if named is not None:
            return named
        if field.message_type is not None:
            if field.message_type.name == "Fingerprint":
                return convert.fingerprint_to_wire(MODEL)
            if depth > 3:
                return None
            inner = _class_of(field.message_type)()
            for below in field.message_type.fields:
                self._fill(inner, below, depth + 1)
            return inner
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._rng.randbytes(self._rng.choice((0, 1, 16, 31, 33, 64, 500)))
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._rng.choice(("", "x", "a" * 200, "a\nb", "\0", "模型", "../../etc"))
        if field.type == FieldDescriptor.TYPE_DOUBLE:
            return self._rng.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 1e308))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._rng.random() < 0.5
        bits = 32 if field.type == FieldDescriptor.TYPE_UINT32 else 64
        if field.type == FieldDescriptor.TYPE_ENUM:
            return self._rng.choice((0, 1, 2, 3, 77, 2**31 - 1, -1))
        return self._rng.choice(IDS) % (1 << bits)

    def _named(self) -> dict[str, Any]:
        keys = self._rng.randbytes(self._rng.choice((32, 32, 64, 256, 31, 33)))
        return {
            "session": self._client.secret,
            "space_id": self._space,
            "keys": keys,
            "chain": keys,
            "tenant": "default",
            "protocol_major": 1,
            "group_id": b"attacker",
            "wait_ms": self._rng.choice((0, 1, 20)),
            "ttl_ms": self._rng.choice((0, 50, 1_000)),
            "lease_id": self._rng.randrange(1, 3_000),
            "first_block": 0,
        }

    # ---------------------------------------------------------------- answers

    def _send(self, verb: Verb, data: bytes) -> None:
        if _harmful(verb, data):
            data = b"\xff" + data
        self.sent += 1
        wire = self._channels[verb.service]
        if verb.gives_stream:
            # One message is enough, and ends it: a session that was attached goes at once.
            streamed: Any = wire.unary_stream(verb.path)
            stream = streamed(data, timeout=CALL_S)
            try:
                first = next(stream, b"")
                stream.cancel()
                self._answered(verb, data, first, None)
            except grpc.RpcError as error:
                self._answered(verb, data, b"", error)
            return
        if verb.takes_stream:
            commit = pb.PushChunk(commit=True).SerializeToString()
            pushed: Any = wire.stream_unary(verb.path)
            call = pushed.future(iter([data, commit]), timeout=CALL_S)
        else:
            unary: Any = wire.unary_unary(verb.path)
            call = unary.future(data, timeout=CALL_S)
        self._flying.append((verb, data, call))
        if len(self._flying) >= IN_FLIGHT:
            self._land()

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _land(self) -> None:
        verb, data, call = self._flying.popleft()
        try:
            self._answered(verb, data, call.result(), None)
        except grpc.RpcError as error:
            self._answered(verb, data, b"", error)

    def _answered(self, verb: Verb, data: bytes, reply: bytes, error: Any) -> None:
        if error is None:
            self.answers["reply"] += 1
            self._replied(verb, reply)
            return
        code = error.code()
        reason, _ = status.reason_of(code, error.trailing_metadata())
        typed = any(key == status.DETAIL_KEY for key, _ in error.trailing_metadata() or ())
        self.answers[reason.name] += 1
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(data) > 16 << 20:
            return  # gRPC itself refuses what is larger than a message may be
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED
        if late or code in UNTYPED or reason in (Reason.INTERNAL, Reason.UNSPECIFIED) or not typed:
            self._say(verb, f"{code.name}: {error.details()}", data)

    def _replied(self, verb: Verb, reply: bytes) -> None:
        try:
            message: Any = verb.reply.FromString(reply)
        except DecodeError:
            self._say(verb, "a reply that cannot be parsed", reply)
            return
        if verb.name == "Pin" and message.pin_id:
            self._pins.add(message.pin_id)
        if verb.name == "Detach":
            self._land_all()
            self._client.close()
            self._attach()

    def _say(self, verb: Verb, what: str, data: bytes) -> None:
        self._said[verb.name] += 1
        if self._said[verb.name] <= SAME_MAX:
            text = f"{verb.path} of {len(data)} bytes ({data[:48].hex()}): {what}"
            self._outcome.failed.append(text)


def _harmful(verb: Verb, data: bytes) -> bool:
    """Whether it parses as an order that ends the daemon, or takes blocks of others."""
    if verb.name not in ("Drain", "Invalidate", "SetWeightEpoch"):
        return False
    try:
        request: Any = verb.request.FromString(data)
    except DecodeError:
        return False
    if verb.name == "Invalidate":
        return bool(request.everything or request.model_name or not request.keys)
    return verb.name == "Drain" or bool(request.model_name == "good")


def _number_paths(descriptor: Any, depth: int = 0) -> Iterator[tuple[int, ...]]:
    """The field numbers that lead to every number of a message, of messages in it too."""
    for field in descriptor.fields:
        if field.type in NUMBERS:
            yield (field.number,)
        elif field.message_type is not None and depth < 3:
            for path in _number_paths(field.message_type, depth + 1):
                yield (field.number, *path)


def _nested(path: tuple[int, ...], value: int) -> bytes:
    """A number within messages: merged into what is there already."""
    data = number(path[-1], value)
    for field in reversed(path[:-1]):
        data = length_delimited(field, data)
    return data
