"""Two tenants and every verb of the data service: what is another's looks like what never was, in
code, text and details, whatever is asked, and nothing of it has an effect (field case P06).

The verbs come from the service's descriptor, their requests from the names of its fields, so that a
new verb is covered without a change here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2, fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.exposition import tenant_label
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, held, model
from tests.rawclient import CALL_S, FdChannel, RawAdmin, RawClient, Refused, channel, refused_as
from tests.torture.bad_messages import Verb, verbs
from tests.torture.base import Outcome
from tests.torture.watching import check_rows

NEVER = 10**9 + 7
"""An id that was given to nobody."""
BLOCKS = 8
SHARED_PROMPTS, SHARED_BLOCKS = 24, 2
SECRET_NAME, SECRET_REVISION = "model-of-a-that-b-must-not-learn", "revision-of-a-4711"
MODEL_A = model(name=SECRET_NAME, revision=SECRET_REVISION)
"""Of tenant a alone. Both open SHARED, each as its own."""
SHARED = model(name="shared")
OWN_FIELDS = frozenset({"key", "lease_id", "offsets", "staging_region_id", "age_s", "mark"})
"""Of a reply: those that name what is the caller's own, or the key that was asked for."""

Answer = list[bytes] | tuple[Any, ...]


@dataclass(frozen=True)
class Names:
    """What a request names."""

    session: bytes
    space: int
    lease: int
    region: int
    keys: bytes


@dataclass
class Holder:
    """Tenant a: blocks in two spaces, a read lease, a reservation."""

    client: RawClient
    prompt: Prompt
    shared: list[Prompt]
    space: int
    lease: int
    reserved: int
    region: int

    def names(self, session: bytes, lease: int) -> Names:
        return Names(session, self.space, lease, self.region, b"".join(self.prompt.keys))


def hold(daemon: Daemon, seed: int, *, stored: bool) -> Holder:
    """Tenant a with something to lose; what it stores, it stores durably. `stored`: it did before
    a restart.
    """
    client = RawClient(daemon.data_sockets["a"])
    prompt = Prompt(MODEL_A, seed, BLOCKS, tenant="a")
    shared = [
        Prompt(SHARED, seed + 1 + n, SHARED_BLOCKS, tenant="a") for n in range(SHARED_PROMPTS)
    ]
    for one in [] if stored else [prompt, *shared]:
        reserved = client.reserve(client.open(one.fingerprint).space_id, one.keys)
        client.fill(reserved, one.rows())
        client.commit(reserved.lease_id, durable=True)
    space = client.open(MODEL_A).space_id
    leased = client.acquire(space, prompt.keys)
    written = client.reserve(space, [os.urandom(32)]).lease_id
    return Holder(client, prompt, shared, space, leased.lease_id, written, leased.places[0].region)


def matrix(
    daemon: Daemon,
    seed: int,
    outcome: Outcome,
    *,
    stored: bool = False,
    wire: grpc.Channel | None = None,
) -> list[bytes]:
    """Everything that tenant b can ask; returns what must be in no log. `wire`: b comes by it, not
    through the socket.
    """
    a = hold(daemon, seed, stored=stored)
    try:
        with (
            RawClient(daemon.data_sockets["b"], wire=wire) as b,
            RawAdmin(daemon.admin_socket) as admin,
        ):
            b.open(model(name="of-b"))  # so that its own ids differ from a's
            before = _state(admin)
            data_verbs = [verb for verb in verbs() if verb.service == "Store"]
            for verb, shared in zip(data_verbs, a.shared, strict=False):
                _verb(verb, a, shared, b, outcome)
                outcome.trials += 1
            if len(data_verbs) > len(a.shared):
                outcome.failed.append(f"{len(data_verbs)} verbs, {len(a.shared)} prompts for them")
            if wire is None:
                _memory(daemon, a, b, outcome)
            _operator(daemon, b, outcome)
            after = _state(admin)
            if before != after:
                outcome.failed.append(f"what tenant b asked had an effect: {before} became {after}")
        _nothing_lost(a, outcome)
        keys = [key for prompt in (a.prompt, *a.shared) for key in prompt.keys]
        return [*keys, a.client.secret]
    finally:
        a.client.close()


def _state(admin: RawAdmin) -> dict[str, Any]:
    """What a's share of the store is."""
    stats = admin.stats()
    (tenant,) = [one for one in stats.tenants if one.tenant == "a"]
    spaces = {s.space_id: s.state for s in admin.call("Spaces").spaces if s.tenant == "a"}
    gauges = {name: value for name, value in held(stats).items() if "lease" in name}
    counted = {
        name: value
        for name, value in stats.counters.items()
        if f'tenant="{tenant_label("a")}"' in name and ("lookup" in name or "load" in name)
    }
    return {"blocks": tenant.blocks, "spaces": spaces, "gauges": gauges, "counters": counted}


def _nothing_lost(a: Holder, outcome: Outcome) -> None:
    for prompt in (a.prompt, *a.shared):
        space = a.client.open(prompt.fingerprint).space_id
        rows = a.client.get(space, prompt.keys)
        check_rows(outcome, prompt, [row for row in rows if row is not None], "tenant a")
        if any(row is None for row in rows):
            outcome.failed.append("tenant a lost blocks by what tenant b asked")
    if a.client.commit(a.reserved).visible != 1 or a.client.release(a.lease).released != 1:
        outcome.failed.append("tenant a lost its leases by what tenant b asked")


# ---------------------------------------------------------------- one verb


def _verb(verb: Verb, a: Holder, shared: Prompt, b: RawClient, outcome: Outcome) -> None:
    """As itself naming a's things; with a's session; and for keys that a has, in a space of its
    own. `shared`: for this verb alone, since what b does with a key is b's own history of it.
    """
    fresh = os.urandom(32 * BLOCKS)
    nobody = Names(b.secret, NEVER, NEVER, NEVER, fresh)
    if verb.name != "Detach":
        for lease in (a.lease, a.reserved):
            theirs = a.names(b.secret, lease)
            for keys in (theirs.keys, fresh):
                named = Names(b.secret, theirs.space, lease, theirs.region, keys)
                _equal(verb, b, named, Names(*(*_ids(nobody), keys)), "another's ids", outcome)
    if _takes(verb, "session"):
        stolen = a.names(a.client.secret, a.lease)
        unknown = Names(bytes(range(16)), stolen.space, stolen.lease, stolen.region, stolen.keys)
        said = _equal(verb, b, stolen, unknown, "another's session", outcome)
        if not isinstance(said, tuple) or said[0] != grpc.StatusCode.UNAUTHENTICATED.name:
            outcome.failed.append(f"{verb.name} with another's session answers {said!r:.200}")
        if verb.name != "Detach" and _ask(verb, b, nobody) == said:
            outcome.failed.append(f"{verb.name} answers its own session as a foreign one")
    if _takes(verb, "keys") or _takes(verb, "chain"):
        own = b.open(SHARED).space_id
        theirs = Names(b.secret, own, 0, 0, b"".join(shared.keys))
        unheard = Names(b.secret, own, 0, 0, os.urandom(32 * SHARED_BLOCKS))
        _equal(verb, b, theirs, unheard, "another's keys", outcome)


def _ids(names: Names) -> tuple[bytes, int, int, int]:
    return names.session, names.space, names.lease, names.region


def _takes(verb: Verb, field: str) -> bool:
    """Whether a field of this name is anywhere in the request."""

    def has(descriptor: Any, depth: int = 0) -> bool:
        return any(
            one.name == field
            or (one.message_type is not None and depth < 3 and has(one.message_type, depth + 1))
            for one in descriptor.fields
        )

    return has(verb.request.DESCRIPTOR)


def _equal(
    verb: Verb, b: RawClient, theirs: Names, nobody: Names, what: str, outcome: Outcome
) -> Answer:
    """The answers to both are one and the same, and tell nothing of a."""
    said, constant = _ask(verb, b, theirs), _ask(verb, b, nobody)
    outcome.counts["answers_compared"] += 1
    if said != constant:
        outcome.failed.append(f"{verb.name} by {what}: {said!r:.300} is not {constant!r:.300}")
    if SECRET_NAME in repr(said) or SECRET_REVISION in repr(said):
        outcome.failed.append(f"{verb.name} by {what} tells tenant b a's names: {said!r:.300}")
    return said


def _ask(verb: Verb, client: RawClient, names: Names) -> Answer:
    """All that a caller sees: the messages, but for what is its own, or status, text, metadata."""
    request = filled(verb.request, names)
    try:
        replies = _call(verb, client, request)
    except Refused as refused:
        return refused.answer
    seen = []
    for message in replies:
        lease = getattr(message, "lease_id", 0)
        if lease:  # of its own: given back, so that the next answer is not that of a second try
            client.release(lease)
        seen.append(_neutral(message).SerializeToString(deterministic=True))
    return seen


def _call(verb: Verb, client: RawClient, request: Any) -> list[Any]:
    method: Callable[..., Any] = getattr(client.stub, verb.name)
    if verb.takes_stream:
        end = pb.PushChunk(commit=True)
        return [refused_as(lambda: method(iter([request, end]), timeout=CALL_S))]
    if verb.name == "Attach":
        stream = method(request, timeout=CALL_S)
        first = refused_as(lambda: next(stream))
        stream.cancel()
        return [pb.AttachEvent(welcome=pb.Welcome(limits=first.welcome.limits))]
    if verb.gives_stream:
        return refused_as(lambda: list(method(request, timeout=CALL_S)))
    return [refused_as(lambda: method(request, timeout=CALL_S))]


def filled(message: type[Any], names: Names, depth: int = 0) -> Any:
    """A request of which each field has what its name says; of others the default."""
    request = message()
    values: dict[str, Any] = {
        "session": names.session,
        "space_id": names.space,
        "lease_id": names.lease,
        "lease_ids": [names.lease],
        "region_id": names.region,
        "keys": names.keys,
        "chain": names.keys,
        "blocks": 4,
        "copy_us": 10,
        "protocol_major": 1,
        "group_id": b"tenants",
    }
    for field in message.DESCRIPTOR.fields:
        if field.name == "fingerprint":
            if message is pb.OpenRequest:
                request.fingerprint.CopyFrom(convert.fingerprint_to_wire(model(name="of-b")))
        elif field.message_type is not None:
            if depth < 3 and field.name != "prefill":
                inner = filled(getattr(pb, field.message_type.name), names, depth + 1)
                if field.label == field.LABEL_REPEATED:
                    getattr(request, field.name).append(inner)
                else:
                    getattr(request, field.name).CopyFrom(inner)
        elif field.name in values:
            value = values[field.name]
            if isinstance(value, list):
                getattr(request, field.name).extend(value)
            else:
                setattr(request, field.name, value)
    if message is pb.PushChunk:
        request.ClearField("header")
    return request


def _neutral(message: Any) -> Any:
    """Without what names the caller's own."""
    copy = type(message)()
    copy.CopyFrom(message)
    _clear(copy)
    return copy


def _clear(message: Any) -> None:
    for field, value in list(message.ListFields()):
        if field.name in OWN_FIELDS:
            message.ClearField(field.name)
        elif field.message_type is not None:
            for inner in value if field.label == field.LABEL_REPEATED else [value]:
                _clear(inner)


# ---------------------------------------------------------------- other ways


def _memory(daemon: Daemon, a: Holder, b: RawClient, outcome: Outcome) -> None:
    """The fd socket hands over no memory of another, and takes nobody else's secret."""
    staging = a.client.staging_map().info.region_id
    answers = []
    for region_id in (a.region, staging, NEVER):
        reply, fds = b.the_fd().ask(get_region=fd_pb2.GetRegion(region_id=region_id))
        if fds:
            outcome.failed.append(f"tenant b was given region {region_id}")
        reply.seq = 0
        answers.append(reply.SerializeToString())
        b.the_fd().unmapped(region_id)
    secrets = (a.client.secret, bytes(range(16)), b"")
    for secret in secrets:
        stranger = FdChannel(daemon.data_sockets["b"])
        reply = stranger.hello(secret)
        reply.seq = 0
        answers.append(reply.SerializeToString())
        stranger.close()
    outcome.counts["answers_compared"] += len(answers)
    if len(set(answers[:3])) != 1 or len(set(answers[3:])) != 1:
        outcome.failed.append("the fd socket answers for another's things as for no other")


def _operator(daemon: Daemon, b: RawClient, outcome: Outcome) -> None:
    """No verb of the operator's is on a tenant's socket, and none of the tenants' on his."""
    with channel(daemon.admin_socket) as admin:
        for wire, service, module in ((b.channel, "Admin", admin_pb2), (admin, "Store", pb)):
            for method in module.DESCRIPTOR.services_by_name[service].methods:
                call: Any = wire.stream_stream(f"/kvstore.v1.{service}/{method.name}")
                try:
                    refused_as(lambda call=call: list(call(iter([b""]), timeout=CALL_S)))  # type: ignore[misc]
                    outcome.failed.append(f"{method.name} answers on the wrong socket")
                except Refused as refused:
                    if refused.code is not grpc.StatusCode.UNIMPLEMENTED:
                        outcome.failed.append(f"{method.name} on the wrong socket: {refused}")
                outcome.counts["answers_compared"] += 1
