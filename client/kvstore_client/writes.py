"""Push: reserve, fill, commit, window by window of the session's staging.

Nothing that is not complete becomes visible: a reservation that is not committed is given up, by us
at once or by the daemon. The daemon says which blocks it wants; the others are there already or are
being written by somebody else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvstore import gather
from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.calls import (
    SPACE_GONE,
    Binding,
    SpaceSpec,
    check_digest,
    check_open,
    in_space,
    lease_ttl_ms,
    touch_before,
)
from kvstore_client.channel import CallFailed
from kvstore_client.device import DeviceFill
from kvstore_client.mapped import Staging
from kvstore_client.results import Pushed
from kvstore_client.session import Session
from kvstore_client.steps import (
    Context,
    Local,
    MapStaging,
    Operation,
    Pause,
    Rpc,
    Stream,
    UserError,
    granted,
)
from kvstore_client.streams import Fill, RowsFill, upload_blocks

__all__ = [
    "STAGING_PAUSES_MS",
    "PushRequest",
    "Tally",
    "Window",
    "asked_to_commit",
    "push",
    "reserve_request",
    "waited",
    "window_of",
]

STAGING_PAUSES_MS = (5, 10, 20)
"""A session's first push asks for memory that the daemon may have to take from blocks before it is
there: a few milliseconds, so it is asked again. Others who have it may keep it for longer.
"""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Blocks `first_block` to the end of the chain; `fill` writes the part of one of them."""

    keys: Sequence[BlockKey]
    fill: Fill
    first_block: int
    attempt: int
    durable: bool
    request_id: str

    @property
    def offered(self) -> int:
        return len(self.keys) - self.first_block


@dataclass(slots=True)
class Tally:
    """Counts over all windows; `present` and `reserved` as of the first look at each block."""

    stored: int = 0
    waiting: int = 0
    failed: int = 0
    present: int = 0
    reserved: int = 0
    reason: Reason = Reason.OK
    detail: str = ""
    mark: int = 0

    @property
    def committed(self) -> int:
        """Blocks of commits that were made, whatever became of them."""
        return self.stored + self.waiting + self.failed

    def add(self, done: pb.CommitReply, window: Window) -> None:
        """What became of a window's blocks. Raises CallFailed for an answer that cannot be."""
        if done.visible + done.waiting + done.failed > window.wanted.size:
            raise CallFailed(Reason.INTERNAL, "more blocks were committed than reserved")
        self.stored += done.visible
        self.waiting += done.waiting
        self.failed += done.failed
        reason = Reason.from_wire(done.reason)
        if reason is not Reason.OK:
            self.reason = reason

    def pushed(self, offered: int) -> Pushed:
        """The result; blocks that another writer gave up meanwhile and we stored count once."""
        settled = self.committed
        present = min(self.present, offered - settled)
        reserved = min(self.reserved, offered - settled - present)
        skipped = offered - settled - present - reserved
        reason = self.reason
        if reason is Reason.OK and skipped:
            reason = Reason.UNSPECIFIED
        return Pushed(
            self.stored, present, reserved, self.failed, skipped, self.waiting, reason, self.detail
        )


@dataclass(frozen=True, slots=True)
class Window:
    """What one reservation wants: indexes into its chain, and offsets in staging."""

    lease_id: int
    wanted: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    part_bytes: int


def push(context: Context, spec: SpaceSpec, request: PushRequest) -> Operation[Pushed]:
    """Stores what the daemon wants of the offered blocks."""

    def attempt(session: Session, binding: Binding) -> Operation[Pushed]:
        return _push(context, spec, session, binding, request)

    return (yield from in_space(spec, attempt))


def _push(
    context: Context, spec: SpaceSpec, session: Session, binding: Binding, request: PushRequest
) -> Operation[Pushed]:
    tally = Tally()
    try:
        limit = session.keys_per_call_max
        for start in range(0, len(request.keys), limit):
            chain = request.keys[start : start + limit]
            first = max(0, request.first_block - start)
            if first >= len(chain):
                continue
            if session.memory is None:
                steps = _push_streams(context, spec, session, binding, request, start, tally)
            else:
                steps = _push_chain(context, spec, session, binding, request, start, tally)
            yield from steps
            if tally.reason is not Reason.OK:
                break
        yield from touch_before(session, binding, request.keys, start)
    except CallFailed as failure:
        if failure.reason in SPACE_GONE and not tally.committed:
            raise
        # What was committed before stays.
        tally.reason, tally.detail = failure.reason, failure.detail
    return tally.pushed(request.offered)


def _push_chain(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    request: PushRequest,
    start: int,
    tally: Tally,
) -> Operation[None]:
    """The windows of one stretch of the chain that fits into a call."""
    chain = request.keys[start : start + session.keys_per_call_max]
    first = max(0, request.first_block - start)
    first_look = True
    pauses = iter(STAGING_PAUSES_MS)
    while first < len(chain):
        message = reserve_request(context, spec, session, binding, request, chain, first, start)
        message.since = tally.mark
        step = Rpc(session, "Reserve", message, pb.ReserveReply)
        reply: pb.ReserveReply = yield from granted(context, step)
        check_open(reply.reason)
        tally.mark = tally.mark or reply.mark
        if first_look:
            tally.present += reply.present
            tally.reserved += reply.reserved
            first_look = False
        tally.reason = Reason.from_wire(reply.reason)
        if not reply.lease_id:
            if (yield from waited(context, tally.reason, pauses)):
                continue
            return
        first = yield from _fill_and_commit(
            context, spec, session, request, start, first, len(chain), reply, tally
        )
        if tally.reason is Reason.OK or tally.failed:
            return
        if tally.reason in (Reason.STAGING_BUSY, Reason.NO_SPACE):
            tally.reason = Reason.OK  # there was progress: another window
            continue
        return


def waited(context: Context, reason: Reason, pauses: Iterator[int]) -> Operation[bool]:
    """Whether to ask again for staging, now that some time has passed."""
    pause_ms = next(pauses, 0) if reason is Reason.STAGING_BUSY else 0
    if not 0 < pause_ms < context.deadline.left_ms():
        return False
    yield Pause(pause_ms)
    return True


def reserve_request(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    request: PushRequest,
    chain: Sequence[BlockKey],
    first: int,
    start: int,
) -> pb.ReserveRequest:
    """Asks for room for `chain` from `first` on; `start`: where it begins in the prompt."""
    return pb.ReserveRequest(
        session=session.secret,
        space_id=binding.space_id,
        chain=b"".join(chain),
        first_block=first,
        part=spec.part,
        attempt=request.attempt,
        ttl_ms=lease_ttl_ms(context),
        request_id=request.request_id,
        parent=request.keys[start - 1] if start else b"",
        chain_start=start,
        durable=request.durable,
    )


def _fill_and_commit(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    request: PushRequest,
    start: int,
    first: int,
    count: int,
    reply: pb.ReserveReply,
    tally: Tally,
) -> Operation[int]:
    """One window; returns the first block after it. Whatever happens, the reservation ends."""
    committed = False
    try:
        window = window_of(spec, reply, first, count)
        if window.wanted.size:
            yield from _fill_window(context, session, request, start, reply, window)
        elif not request.durable:
            raise CallFailed(Reason.INTERNAL, "a reservation of nothing")
        done = yield from asked_to_commit(session, request, window)
        committed = True
    finally:
        if not committed:
            context.release(session, reply.lease_id, None)
    tally.add(done, window)
    return int(window.wanted[-1]) + 1 if window.wanted.size else count


def asked_to_commit(
    session: Session, request: PushRequest, window: Window
) -> Operation[pb.CommitReply]:
    """The call that publishes what a window holds."""
    commit = pb.CommitRequest(
        session=session.secret,
        lease_id=window.lease_id,
        durable=request.durable,
        request_id=request.request_id,
    )
    done: pb.CommitReply = yield Rpc(session, "Commit", commit, pb.CommitReply)
    return done


def _fill_window(
    context: Context,
    session: Session,
    request: PushRequest,
    start: int,
    reply: pb.ReserveReply,
    window: Window,
) -> Operation[None]:
    staging: Staging = yield MapStaging(session, reply.staging_region_id)
    try:
        yield Local(lambda: _fill(context, staging, window, start, request.fill))
    except UserError:
        # The caller may well push these blocks again at once: not left to the release.
        abort = pb.AbortRequest(session=session.secret, lease_id=window.lease_id)
        with contextlib.suppress(CallFailed):
            yield Rpc(session, "Abort", abort, pb.AbortReply)
        raise


def window_of(spec: SpaceSpec, reply: pb.ReserveReply, first: int, count: int) -> Window:
    """Raises CallFailed unless the reservation is one that can be filled."""
    part_bytes = spec.layout.part_bytes
    sizes = len(reply.wanted) % 4 == 0 and len(reply.wanted) * 2 == len(reply.offsets)
    if not sizes or reply.part_bytes != part_bytes:
        raise CallFailed(Reason.INTERNAL, "the reservation contradicts itself")
    wanted = convert.unpack_u32(reply.wanted)
    if not wanted.size:
        return Window(reply.lease_id, wanted, convert.unpack_u64(reply.offsets), part_bytes)
    if wanted[0] < first or wanted[-1] >= count or not (wanted[1:] > wanted[:-1]).all():
        raise CallFailed(Reason.INTERNAL, "the reservation wants blocks that were not offered")
    return Window(reply.lease_id, wanted, convert.unpack_u64(reply.offsets), part_bytes)


def _fill(context: Context, staging: Staging, window: Window, start: int, fill: Fill) -> None:
    last = staging.total_bytes - window.part_bytes
    if int(window.offsets.max()) > last:
        raise CallFailed(Reason.INTERNAL, "the reservation is outside of the staging region")
    try:
        memory = staging.memory.u8
    except ValueError:
        raise CallFailed(Reason.REGION_UNKNOWN, "the staging region was closed") from None
    blocks = list(zip(window.wanted.tolist(), window.offsets.tolist(), strict=True))

    write = fill.begin if isinstance(fill, DeviceFill) else fill

    def run(part: Sequence[tuple[int, int]]) -> None:
        for index, offset in part:
            _check(context)
            write(start + index, memory[offset : offset + window.part_bytes])

    if isinstance(fill, DeviceFill):
        fill.await_kernels(lambda: _check(context))
        with fill.into(staging):
            run(blocks)
        return
    large = len(blocks) > 1 and len(blocks) * window.part_bytes >= gather.PARALLEL_BYTES
    if context.executor is not None and large and isinstance(fill, RowsFill):
        gather.in_halves(run, blocks, context.executor)
    else:
        run(blocks)


def _check(context: Context) -> None:
    if context.deadline.passed:
        raise CallFailed(Reason.DEADLINE_EXCEEDED, "filling took too long")


# ---------------------------------------------------------------- byte streams


def _push_streams(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    request: PushRequest,
    start: int,
    tally: Tally,
) -> Operation[None]:
    """As `_push_chain`, with a stream for each window. What is wanted is not known beforehand: a
    lookup tells which blocks need not be sent.
    """
    if request.durable:
        raise CallFailed(Reason.NOT_SUPPORTED, "a durable push needs shared memory")
    chain = request.keys[start : start + session.keys_per_call_max]
    first = max(0, request.first_block - start)
    absent = yield from _absent(session, binding, chain, first)
    tally.present += len(chain) - first - len(absent)
    part_bytes = spec.layout.part_bytes
    step = max(1, session.limits.staging_bytes // (2 * part_bytes))
    at, pauses = 0, iter(STAGING_PAUSES_MS)
    while at < len(absent):
        window = absent[at : at + step]
        end = window[-1] + 1
        message = reserve_request(
            context, spec, session, binding, request, chain[:end], window[0], start
        )
        message.since = tally.mark
        timeout_s = context.deadline.left_s()

        def run(
            message: pb.ReserveRequest = message,
            window: list[int] = window,
            timeout_s: float = timeout_s,
        ) -> bytes:
            def fill(index: int, target: NDArray[np.uint8]) -> None:
                request.fill(start + index, target)

            if isinstance(request.fill, DeviceFill):
                request.fill.await_kernels(lambda: _check(context))
            return upload_blocks(session, message, window, part_bytes, fill, timeout_s)

        data: bytes = yield Stream(session, run)
        reply = _push_reply(data, len(window))
        check_open(reply.reason)
        tally.mark = tally.mark or reply.mark
        tally.reason = Reason.from_wire(reply.reason)
        if not reply.stored and (yield from waited(context, tally.reason, pauses)):
            continue
        between = end - window[0] - len(window)
        if len(spec.layout.parts) == 1:
            tally.stored += reply.stored
        else:
            tally.waiting += reply.stored  # or visible, if the other parts were there
        tally.failed += reply.failed
        tally.present += max(0, reply.present - between)
        tally.reserved += reply.reserved
        if tally.reason is not Reason.OK:
            return
        at += step


def _absent(
    session: Session, binding: Binding, chain: Sequence[BlockKey], first: int
) -> Operation[list[int]]:
    """Indexes of the offered blocks that are not there."""
    message = pb.LookupRequest(
        session=session.secret,
        queries=[
            pb.Query(space_id=binding.space_id, keys=b"".join(chain), rule=pb.HIT_RULE_BITMAP)
        ],
    )
    reply: pb.LookupReply = yield Rpc(session, "Lookup", message, pb.LookupReply)
    if len(reply.groups) != 1:
        raise CallFailed(Reason.INTERNAL, f"{len(reply.groups)} answers to one query")
    check_digest(binding, reply.groups[0].fingerprint_digest)
    codes = reply.groups[0].tiers[: len(chain)].ljust(len(chain), b"\0")
    return [index for index in range(first, len(chain)) if codes[index] in (0, 255)]


def _push_reply(data: bytes, offered: int) -> pb.PushReply:
    try:
        reply = pb.PushReply.FromString(data)
    except (DecodeError, TypeError) as error:
        raise CallFailed(Reason.INTERNAL, "the answer is no PushReply", outage=True) from error
    if reply.stored + reply.failed > offered:
        raise CallFailed(Reason.INTERNAL, "more blocks were stored than sent")
    return reply
