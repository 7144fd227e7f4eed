"""Opening a space, lookup, status, explain: the operations that move no blocks.

`reads` and `writes` move blocks. All are generators, see `steps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.model.cost import PrefillCost
from kvstore.model.fingerprint import Difference, Fingerprint, Verdict
from kvstore.model.keys import BlockKey
from kvstore.model.layout import Layout
from kvstore.model.plan import Overlap, TierPlan
from kvstore.model.reasons import Reason
from kvstore.model.sampling import Arm
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import CallFailed
from kvstore_client.results import (
    NO_ADVICE,
    Connection,
    Hit,
    KeyExplanation,
    LoadAdvice,
    SpaceStatus,
)
from kvstore_client.session import Session
from kvstore_client.steps import Connect, Context, Operation, Refusal, Rpc

__all__ = [
    "TOKENS_MAX",
    "Binding",
    "Refused",
    "SpaceSpec",
    "check_digest",
    "check_open",
    "connection",
    "explain",
    "in_space",
    "lease_ttl_ms",
    "lookup",
    "missed",
    "opened",
    "status",
    "touch_before",
]

T = TypeVar("T")

SPACE_GONE = frozenset({Reason.SPACE_UNKNOWN, Reason.SPACE_CLOSED})


# ---------------------------------------------------------------- spaces


@dataclass(frozen=True, slots=True)
class SpaceSpec:
    """What a user asked for: a fingerprint, and which part of its blocks this process fills."""

    fingerprint: Fingerprint
    layout: Layout
    part: int

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens


@dataclass(frozen=True, slots=True)
class Binding:
    """What the daemon made of it, in one session. space_id 0: refused."""

    space_id: int
    verdict: Verdict
    reason: Reason
    digest: bytes
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]
    review_id: int
    detail: str


class Refused(Refusal):
    """The fingerprint was not accepted."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding.reason, binding.detail, binding.differences)
        self.binding = binding


def opened(spec: SpaceSpec) -> Operation[tuple[Session, Binding]]:
    """The space, opened in the current session if it is not yet. Raises Refused."""
    session: Session = yield Connect()
    binding: Binding | None = session.spaces.get(spec.fingerprint.digest)
    if binding is None:
        request = pb.OpenRequest(
            session=session.secret, fingerprint=convert.fingerprint_to_wire(spec.fingerprint)
        )
        reply: pb.OpenReply = yield Rpc(session, "Open", request, pb.OpenReply)
        binding = _binding(spec, reply)
        if not binding.space_id:
            # Not remembered: an operator may decide otherwise at any moment.
            raise Refused(binding)
        session.spaces[spec.fingerprint.digest] = binding
    return session, binding


def _binding(spec: SpaceSpec, reply: pb.OpenReply) -> Binding:
    reason = Reason.from_wire(reply.reason)
    verdict = convert.verdict_from_wire(reply.verdict)
    if reply.space_id:
        # An incomplete fingerprint may have been completed by an operator: then the digest is that
        # of the complete one. Any other digest is another model's.
        completed = bool(spec.fingerprint.missing())
        if not completed and reply.fingerprint_digest != spec.fingerprint.digest:
            raise CallFailed(Reason.INTERNAL, "the daemon opened a space of another fingerprint")
        if reply.block_bytes != spec.layout.block_bytes or reply.parts != len(spec.layout.parts):
            raise CallFailed(Reason.INTERNAL, "the daemon's blocks have another layout")
        if verdict not in (Verdict.MATCH, Verdict.HELD):
            raise CallFailed(Reason.INTERNAL, f"a space with the verdict {verdict.value}")
    elif reason in (Reason.OK, Reason.UNSPECIFIED):
        reason = Reason.INTERNAL
    return Binding(
        reply.space_id,
        verdict if reply.space_id else Verdict.INCOMPATIBLE,
        reason,
        reply.fingerprint_digest,
        convert.differences_from_wire(reply.differences),
        tuple(reply.missing),
        reply.review_id,
        reply.detail,
    )


TTL_MARGIN_MS = 50
TOKENS_MAX = 0xFFFF_FFFF
"""Of a prompt, as a message tells its length."""


def lease_ttl_ms(context: Context) -> int:
    """A lease for a copy is of no use beyond the call's own deadline."""
    return context.deadline.left_ms() + TTL_MARGIN_MS


def touch_before(
    session: Session, binding: Binding, keys: Sequence[BlockKey], start: int
) -> Operation[None]:
    """Names a prompt's blocks before `start` once more, where they went in several calls, from its
    tail to its head: what was used last leaves last, and of a prompt that has to be the head.
    """
    limit = session.keys_per_call_max
    with contextlib.suppress(CallFailed):  # nothing but their order is at stake
        for first in range(start - limit, -1, -limit):
            chain = keys[first : first + limit]
            message = pb.ReserveRequest(
                session=session.secret,
                space_id=binding.space_id,
                chain=b"".join(chain),
                first_block=len(chain),
                parent=keys[first - 1] if first else b"",
                chain_start=first,
            )
            yield Rpc(session, "Reserve", message, pb.ReserveReply)


def in_space(spec: SpaceSpec, attempt: Callable[[Session, Binding], Operation[T]]) -> Operation[T]:
    """Runs an operation on the open space. One that the daemon has closed meanwhile is opened anew,
    once, so that this call says what became of it. `attempt` raises CallFailed with a reason of
    SPACE_GONE only if it has not got anything done.
    """
    session, binding = yield from opened(spec)
    try:
        return (yield from attempt(session, binding))
    except CallFailed as failure:
        if failure.reason not in SPACE_GONE:
            raise
        session.spaces.pop(spec.fingerprint.digest, None)
    session, binding = yield from opened(spec)
    try:
        return (yield from attempt(session, binding))
    except CallFailed as failure:
        if failure.reason in SPACE_GONE:
            session.spaces.pop(spec.fingerprint.digest, None)
        raise


def check_open(reason: int) -> None:
    """Raises CallFailed if the reason of a reply says that the space is gone."""
    said = Reason.from_wire(reason)
    if said in SPACE_GONE:
        raise CallFailed(said)


def check_digest(binding: Binding, digest: bytes) -> None:
    """Raises CallFailed unless an answer is about the space that was asked."""
    if digest != binding.digest:
        raise CallFailed(Reason.MISS_INCOMPATIBLE, "the answer is about another fingerprint")


def status(spec: SpaceSpec) -> Operation[SpaceStatus]:
    """What the daemon says to the fingerprint now."""
    session: Session = yield Connect()
    session.spaces.pop(spec.fingerprint.digest, None)
    try:
        _, binding = yield from opened(spec)
    except Refused as refused:
        binding = refused.binding
    return SpaceStatus(
        binding.verdict,
        binding.reason,
        binding.differences,
        binding.missing,
        binding.review_id,
        binding.digest,
        binding.detail,
    )


def connection() -> Operation[Connection]:
    """How this client is connected, after connecting if it was not."""
    session: Session = yield Connect()
    return connection_of(session)


def connection_of(session: Session) -> Connection:
    """How a client with this session is connected."""
    return Connection(
        "stream" if session.memory is None else "shm",
        Reason.OK,
        session.instance_id,
        session.daemon_version,
        session.tiers,
        session.detail,
        session.pools.use(),
    )


# ---------------------------------------------------------------- lookup


def lookup(
    spec: SpaceSpec,
    keys: Sequence[BlockKey],
    *,
    prompt_tokens: int,
    prefill: PrefillCost | None,
    overlap: Overlap,
    request_id: str,
) -> Operation[Hit]:
    """How much of a prompt is stored. More keys than one call may have are asked in several, each
    weighed on top of those before it, until one is not to be loaded whole; what can be done at the
    same time is not weighed then.
    """

    def attempt(session: Session, binding: Binding) -> Operation[Hit]:
        return _lookup(
            spec,
            session,
            binding,
            keys,
            prompt_tokens,
            prefill=prefill,
            overlap=overlap,
            request_id=request_id,
        )

    return (yield from in_space(spec, attempt))


def _lookup(
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    keys: Sequence[BlockKey],
    prompt_tokens: int,
    *,
    prefill: PrefillCost | None,
    overlap: Overlap,
    request_id: str,
) -> Operation[Hit]:
    limit = session.keys_per_call_max
    if len(keys) > limit:
        overlap = Overlap.SERIAL
    weighed = True
    blocks, tiers, advice = 0, b"", NO_ADVICE
    reason = Reason.OK
    differences: tuple[Difference, ...] = ()
    arm, audit = Arm.APPLIED, False
    for start in range(0, max(1, len(keys)), limit):
        part = keys[start : start + limit]
        request = pb.LookupRequest(
            session=session.secret,
            queries=[pb.Query(space_id=binding.space_id, keys=b"".join(part))],
            request_id=request_id,
            prompt_tokens=min(prompt_tokens, 0xFFFF_FFFF),
            overlap=_OVERLAPS[overlap] if prefill is not None else pb.OVERLAP_SERIAL,
            last_key=keys[-1] if len(keys) > limit else b"",
            before_tokens=min(start * spec.block_tokens, 0xFFFF_FFFF),
        )
        if prefill is not None:
            request.prefill.a_us_per_token, request.prefill.b_us_per_token2 = prefill
        reply: pb.LookupReply = yield Rpc(session, "Lookup", request, pb.LookupReply)
        hit = _group_hit(binding, reply, len(part))
        arm, audit = arm_of(reply.arm), audit or reply.audit
        blocks += hit.hit_blocks
        tiers += hit.tiers[: hit.hit_blocks]
        if weighed:
            advice = _add(advice, _advice(reply.plan, hit.hit_blocks))
            weighed = reply.plan.load_blocks == len(part)
        reason = Reason.from_wire(hit.reason)
        differences = convert.differences_from_wire(hit.differences)
        if hit.hit_blocks < len(part):
            break
    return Hit(
        blocks=blocks,
        tokens=blocks * spec.block_tokens,
        tiers=tiers.translate(_TIER_OF_CODE),
        keys=tuple(keys),
        plan=advice,
        reason=reason,
        differences=differences,
        prompt_tokens=prompt_tokens,
        arm=arm,
        audit=audit,
    )


def arm_of(number: int) -> Arm:
    """A side as the wire has it; a daemon that does not tell serves everybody."""
    return Arm(number) if number in (Arm.HELD_OUT, Arm.SHADOW) else Arm.APPLIED


_OVERLAPS = {
    Overlap.SERIAL: pb.OVERLAP_SERIAL,
    Overlap.LAYERWISE: pb.OVERLAP_LAYERWISE,
    Overlap.TAIL: pb.OVERLAP_TAIL,
}
_TIER_OF_CODE = bytes([0, *range(255)])
"""Presence codes of blocks that are there, to tier indexes."""


def _group_hit(binding: Binding, reply: pb.LookupReply, asked: int) -> pb.GroupHit:
    """The answer about the one group that was asked about; raises CallFailed if it is none."""
    if len(reply.groups) != 1:
        raise CallFailed(Reason.INTERNAL, f"{len(reply.groups)} answers to one query")
    hit = reply.groups[0]
    check_digest(binding, hit.fingerprint_digest)
    run = hit.tiers[: hit.hit_blocks]
    if len(hit.tiers) > asked or len(run) != hit.hit_blocks or 0 in run or 255 in run:
        raise CallFailed(Reason.INTERNAL, "the answer contradicts itself")
    return hit


def _advice(plan: pb.Plan, blocks: int) -> LoadAdvice:
    return LoadAdvice(
        min(plan.load_blocks - min(plan.tail_blocks, plan.load_blocks), blocks),
        plan.recompute_tokens,
        plan.load_ms,
        plan.ideal_load_ms,
        plan.recompute_ms,
        Reason.from_wire(plan.reason),
        plan.bytes_per_second,
        plan.computed_blocks,
        plan.tail_blocks,
        plan.total_ms,
        plan.compute_only_ms,
        tuple(
            TierPlan(
                one.tier - 1,
                one.found_blocks,
                one.load_blocks,
                one.bytes,
                one.bytes_per_second,
                one.queued_bytes,
                one.ideal_load_ms,
                one.load_ms,
                one.recompute_ms,
            )
            for one in plan.tiers
            if one.tier
        ),
    )


def _add(one: LoadAdvice, other: LoadAdvice) -> LoadAdvice:
    """The advice for two stretches of a prompt, one after the other."""
    if one is NO_ADVICE:
        return other
    if not other.load_blocks:
        return one
    ideal_ms = one.ideal_load_ms + other.ideal_load_ms
    both_bytes = sum(tier.length_bytes for tier in one.tiers + other.tiers)
    return LoadAdvice(
        one.load_blocks + other.load_blocks,
        other.recompute_tokens,
        one.load_ms + other.load_ms,
        ideal_ms,
        one.recompute_ms + other.recompute_ms,
        other.reason,
        both_bytes / ideal_ms * 1e3 if both_bytes else other.bytes_per_second,
        total_ms=one.load_ms + other.total_ms,
        compute_only_ms=one.compute_only_ms,
        tiers=one.tiers + other.tiers,
    )


def missed(keys: Sequence[BlockKey]) -> Callable[[Reason, str, tuple[Difference, ...]], Hit]:
    """Makes the Hit of a lookup that failed."""

    def failed(reason: Reason, detail: str, differences: tuple[Difference, ...]) -> Hit:
        return Hit(0, 0, b"", tuple(keys), NO_ADVICE, reason, differences, detail)

    return failed


# ---------------------------------------------------------------- explain


def explain(spec: SpaceSpec, keys: Sequence[BlockKey]) -> Operation[list[KeyExplanation]]:
    """Why each key hits or misses. Raises CallFailed: there is no explanation without a daemon."""
    return (yield from in_space(spec, lambda session, binding: _explain(session, binding, keys)))


def _explain(
    session: Session, binding: Binding, keys: Sequence[BlockKey]
) -> Operation[list[KeyExplanation]]:
    found: list[KeyExplanation] = []
    limit = session.keys_per_call_max
    for start in range(0, len(keys), limit):
        request = pb.ExplainRequest(
            session=session.secret,
            space_id=binding.space_id,
            keys=b"".join(keys[start : start + limit]),
        )
        reply: pb.ExplainReply = yield Rpc(session, "Explain", request, pb.ExplainReply)
        found += map(_explanation, reply.keys)
    if len(found) != len(keys):
        raise CallFailed(Reason.INTERNAL, f"{len(found)} explanations for {len(keys)} keys")
    return found


def _explanation(message: pb.KeyExplanation) -> KeyExplanation:
    return KeyExplanation(
        message.key,
        Reason.from_wire(message.reason),
        message.tier,
        message.generation,
        message.leases,
        None if message.age_s < 0 else message.age_s,
        convert.differences_from_wire(message.differences),
        message.detail,
    )
