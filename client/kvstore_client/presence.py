"""Which of some keys are there, each for itself: for caches that need a prompt's last blocks only.

An operation, as those of `calls`. Weighs nothing and counts as no prompt: that is `lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.calls import Binding, SpaceSpec, check_digest, in_space
from kvstore_client.channel import CallFailed
from kvstore_client.results import Presence
from kvstore_client.session import Session
from kvstore_client.steps import Operation, Rpc

__all__ = ["presence"]

NOT_THERE = b"\x00\xff"
"""Codes of what is absent and of what is being written."""


def presence(spec: SpaceSpec, keys: Sequence[BlockKey], *, request_id: str) -> Operation[Presence]:
    """More keys than one call may have are asked in several."""
    return (
        yield from in_space(
            spec, lambda session, binding: _presence(session, binding, keys, request_id)
        )
    )


def _presence(
    session: Session, binding: Binding, keys: Sequence[BlockKey], request_id: str
) -> Operation[Presence]:
    there: list[bool] = []
    absent = Presence((), Reason.OK)
    for start in range(0, len(keys), session.keys_per_call_max):
        part = keys[start : start + session.keys_per_call_max]
        query = pb.Query(space_id=binding.space_id, keys=b"".join(part), rule=pb.HIT_RULE_BITMAP)
        request = pb.LookupRequest(session=session.secret, queries=[query], request_id=request_id)
        reply: pb.LookupReply = yield Rpc(session, "Lookup", request, pb.LookupReply)
        if len(reply.groups) != 1:
            raise CallFailed(Reason.INTERNAL, f"{len(reply.groups)} answers to one query")
        hit = reply.groups[0]
        check_digest(binding, hit.fingerprint_digest)
        if len(hit.tiers) > len(part):
            raise CallFailed(Reason.INTERNAL, "the answer contradicts itself")
        there += [code not in NOT_THERE for code in hit.tiers.ljust(len(part), b"\0")]
        reason = Reason.from_wire(hit.reason)
        if absent.reason is Reason.OK and reason is not Reason.OK:
            absent = Presence((), reason, convert.differences_from_wire(hit.differences))
    return absent._replace(there=tuple(there))
