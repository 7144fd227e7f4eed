"""Fetch and view: leases, copies out of the daemon's memory, and what makes them trustworthy.
A client that cannot map it has the daemon send what the lease holds (`fdreads`).

A copy counts only if the slot's generation, read *after* the copy, is still the one that the lease
named: the daemon changes it before it writes the first byte of anything else. The leading run of
blocks for which that holds is the result; nothing after it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import gather
from kvstore.model.cost import PrefillCost
from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.arrays import Bytes, Rows
from kvstore_client.calls import (
    SPACE_GONE,
    TOKENS_MAX,
    Binding,
    SpaceSpec,
    check_digest,
    check_open,
    in_space,
    lease_ttl_ms,
    touch_before,
)
from kvstore_client.channel import CallFailed
from kvstore_client.fdreads import NotServed, lease_read
from kvstore_client.mapped import Region
from kvstore_client.pools import Access
from kvstore_client.session import Session
from kvstore_client.steps import (
    Context,
    Local,
    MapRegion,
    Operation,
    Rpc,
    Stream,
    granted,
)
from kvstore_client.streams import download_blocks

__all__ = [
    "PIECE_BYTES",
    "Copied",
    "FetchRequest",
    "Run",
    "ViewLease",
    "absence",
    "acquire_request",
    "fetch",
    "fetch_in",
    "load_report",
    "mapped_run",
    "view",
]

PIECE_BYTES = 64 << 20
"""Copied at a time, 10-15 ms: the deadline is looked at in between."""
ANSWER_MARGIN_MS = 20
"""Left of the deadline for the answer of a daemon that waits."""


@dataclass(slots=True)
class Copied:
    """How far a fetch has come."""

    blocks: int = 0
    bytes: int = 0
    copy_ns: int = 0
    load_ns: int = 0
    """From asking for each lease until the last of its bytes was verified."""
    reason: Reason = Reason.OK
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What to fetch into which rows. `span`: the bytes of each block that are wanted, None: all."""

    keys: Sequence[BlockKey]
    rows: Rows
    span: slice | None
    wait_ms: int
    all_or_nothing: bool
    request_id: str
    prefill: PrefillCost | None
    predicted_ms: float = 0.0
    """Of loading all of the keys, by a plan; 0: nothing was predicted."""
    audit: bool = False
    """Nothing is saved by it: the blocks are looked at, not used."""
    prompt_tokens: int = 0
    """Of the whole prompt; 0: unknown. What is kept follows from it."""


@dataclass(slots=True)
class ViewLease:
    """Blocks in place, under a lease that has no deadline."""

    session: Session
    lease_id: int
    reason: Reason
    detail: str = ""
    arrays: list[Bytes] = field(default_factory=list)
    run: Run | None = None

    def unchanged(self) -> bool:
        """Whether the blocks are still those that were leased."""
        memory = self.session.memory
        if self.run is None:
            return True
        return memory is not None and memory.alive and self.run.unchanged() == self.run.blocks


@dataclass(slots=True)
class Run:
    """The leading blocks of a lease: slots of mapped regions."""

    blocks: int
    sources: list[tuple[Bytes, NDArray[np.intp]]]  # the bytes are empty where they are in a pool
    generations: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]  # region's, expected
    regions: list[Region]  # one each; none of this process's own bytes

    def unchanged(self, first: int = 0, end: int | None = None) -> int:
        """How many of blocks [first, end) from `first` on have the generation of the lease."""
        good = begin = 0
        stop = self.blocks if end is None else end
        for (_, slots), (now, expected) in zip(self.sources, self.generations, strict=True):
            low, high = max(first, begin), min(stop, begin + slots.size)
            if low < high:
                window = slice(low - begin, high - begin)
                same = now[slots[window]] == expected[window]
                if not same.all():
                    return good + int(np.argmin(same))
                good += high - low
            begin += slots.size
        return good

    def window(
        self, first: int, end: int, span: slice | None = None
    ) -> tuple[list[tuple[Bytes, NDArray[np.intp]]], list[Region]]:
        """Blocks [first, end): their sources, with the bytes `span` of each, and regions."""
        sources: list[tuple[Bytes, NDArray[np.intp]]] = []
        regions: list[Region] = []
        begin = 0
        for number, (slots2d, slots) in enumerate(self.sources):
            low, high = max(first, begin), min(end, begin + slots.size)
            if low < high:
                source = slots2d if span is None else slots2d[:, span]
                sources.append((source, slots[low - begin : high - begin]))
                regions += self.regions[number : number + 1]
            begin += slots.size
        return sources, regions

    def in_pools(self, end: int) -> int:
        """How many of the first `end` blocks are in pools."""
        sources, regions = self.window(0, end)
        return sum(
            slots.size
            for (_, slots), region in zip(sources, regions, strict=False)
            if region.pool is not None
        )


def fetch(context: Context, spec: SpaceSpec, request: FetchRequest) -> Operation[Copied]:
    """Copies the leading run of the keys' blocks. Keys beyond one call's limit go in windows."""

    def attempt(session: Session, binding: Binding) -> Operation[Copied]:
        return fetch_in(context, spec, session, binding, request)

    return (yield from in_space(spec, attempt))


def fetch_in(
    context: Context, spec: SpaceSpec, session: Session, binding: Binding, request: FetchRequest
) -> Operation[Copied]:
    """The same in a space that is open."""
    done = Copied()
    if session.memory is not None or session.fd_fetch:
        try:
            return (yield from _fetch_leased(context, spec, session, binding, request, done))
        except NotServed:
            pass  # nobody speaks there: the slower way is left
    if request.all_or_nothing:
        raise CallFailed(Reason.NOT_SUPPORTED, "all_or_nothing needs the daemon's fd socket")
    run = download_blocks(context, session, binding, spec, request, done)
    yield Stream(session, run)
    if not done.blocks:
        check_open(done.reason)
    return done


def _fetch_leased(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    request: FetchRequest,
    done: Copied,
) -> Operation[Copied]:
    """With a lease for each window of keys. Raises NotServed: as for now, the bytes of a lease
    cannot be had; what is `done` by then is good.
    """
    limit = session.keys_per_call_max
    if request.all_or_nothing and len(request.keys) > limit:
        raise CallFailed(Reason.TOO_MANY_KEYS, f"all_or_nothing takes {limit} keys at most")
    for start in range(0, len(request.keys), limit):
        keys = request.keys[start : start + limit]
        try:
            yield from _fetch_window(context, spec, session, binding, request, keys, done)
        except CallFailed as failure:
            if failure.reason in SPACE_GONE and not done.blocks:
                raise
            # What was copied and verified before stays good.
            done.reason, done.detail = failure.reason, failure.detail
        if done.blocks < start + len(keys):
            break
    yield from touch_before(session, binding, request.keys, start)
    if request.all_or_nothing and done.blocks < len(request.keys):
        done.blocks = done.bytes = 0
    return done


def _fetch_window(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    request: FetchRequest,
    keys: Sequence[BlockKey],
    done: Copied,
) -> Operation[None]:
    begun_ns = time.perf_counter_ns()
    acquire = acquire_request(context, session, binding, keys, request)
    step = Rpc(session, "Acquire", acquire, pb.AcquireReply)
    reply: pb.AcquireReply = yield from granted(context, step)
    if not reply.lease_id:
        check_open(reply.reason)
        done.reason = absence(reply)
        return
    before = done.blocks
    outcome = Reason.INTERNAL
    copied_ns = done.copy_ns
    try:
        if session.memory is None:
            places = _leading_places(spec, binding, reply, len(keys))
            blocks = len(places)
            if blocks:
                read = lease_read(context, session, reply.lease_id, blocks, spec, request, done)
                yield Stream(session, read)
        else:
            run = yield from mapped_run(context, spec, session, binding, reply, len(keys))
            blocks = run.blocks
            yield Local(lambda: _copy(context, run, request, done))
        outcome = done.reason
        if done.reason is Reason.OK and blocks < len(keys):
            done.reason = absence(reply)
    except NotServed:
        outcome = Reason.UNAVAILABLE
        raise
    except CallFailed as failure:
        outcome = failure.reason
        raise
    finally:
        took_ns = time.perf_counter_ns() - begun_ns
        done.load_ns += took_ns
        report = load_report(
            reply.lease_id, spec, request, done.blocks - before, done.blocks, outcome
        )
        report.copy_us = (done.copy_ns - copied_ns) // 1_000
        report.load_us = took_ns // 1_000
        if request.predicted_ms and done.blocks - before == len(keys):
            share = len(keys) / len(request.keys)
            report.predicted_us = int(request.predicted_ms * 1e3 * share)
        context.release(session, reply.lease_id, report)


def acquire_request(
    context: Context,
    session: Session,
    binding: Binding,
    keys: Sequence[BlockKey],
    request: FetchRequest,
    device_uuid: str = "",
) -> pb.AcquireRequest:
    """Asks for a copy lease of `keys`, which are some of the request's. device_uuid: of the GPU in
    whose pools they may be.
    """
    left_ms = max(0, context.deadline.left_ms() - ANSWER_MARGIN_MS)
    return pb.AcquireRequest(
        session=session.secret,
        space_id=binding.space_id,
        keys=b"".join(keys),
        mode=pb.LEASE_MODE_COPY,
        ttl_ms=lease_ttl_ms(context),
        wait_ms=min(request.wait_ms, left_ms),
        all_or_nothing=request.all_or_nothing,
        request_id=request.request_id,
        prompt_tokens=min(request.prompt_tokens, TOKENS_MAX),
        device_uuid=device_uuid,
    )


def absence(reply: pb.AcquireReply) -> Reason:
    """Why a lease has not all that was asked for."""
    reason = Reason.from_wire(reply.reason)
    return Reason.UNSPECIFIED if reason is Reason.OK else reason


def mapped_run(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    reply: pb.AcquireReply,
    asked: int,
    access: Access | None = None,
) -> Operation[Run]:
    """The leading run of a lease's places, with its regions mapped. access: by which the pools of
    those that are a device's can be read; None: there are none of them. Raises CallFailed, NoPool.
    """
    places = _leading_places(spec, binding, reply, asked)
    blocks = len(places)
    ids = places["region"]
    starts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist()] if blocks else []
    ends = [*starts[1:], blocks] if blocks else []
    run = Run(blocks, [], [], [])
    for begin, end in zip(starts, ends, strict=True):
        region: Region = yield MapRegion(session, int(ids[begin]), access)
        slots = places["slot"][begin:end].astype(np.intp)
        if int(slots.max()) >= region.slots or region.slot_bytes < reply.block_bytes:
            raise CallFailed(Reason.INTERNAL, "a place is outside of its region")
        source, generations = region.slots2d, region.generations
        pool = None if access is None else region.pool
        if region.gone or not len(generations) or not (len(source) or pool):
            raise CallFailed(Reason.REGION_UNKNOWN)
        if pool is not None and access is not None:
            pool.admit(access.place)
        run.sources.append((source, slots))
        run.generations.append((generations, places["generation"][begin:end]))
        run.regions.append(region)
    return run


def _leading_places(
    spec: SpaceSpec, binding: Binding, reply: pb.AcquireReply, asked: int
) -> NDArray[np.void]:
    """The leading run of a lease's places (see convert.PLACE). Raises CallFailed for an answer that
    does not belong to the question.
    """
    check_digest(binding, reply.fingerprint_digest)
    if reply.block_bytes != spec.layout.block_bytes:
        raise CallFailed(Reason.INTERNAL, "the leased blocks have another size")
    if len(reply.places) != asked * convert.PLACE.size:
        raise CallFailed(Reason.INTERNAL, "the lease does not have a place for each key")
    places = convert.unpack_places(reply.places)
    absent = np.flatnonzero(places["region"] == 0)
    return places[: int(absent[0])] if absent.size else places


def _copy(context: Context, run: Run, request: FetchRequest, done: Copied) -> None:
    """Copies and verifies in pieces, so that the deadline can be kept."""
    first, rows = done.blocks, request.rows
    width = rows.shape[1] if isinstance(rows, np.ndarray) else len(rows[0]) if rows else 0
    step = max(1, PIECE_BYTES // max(1, width))
    span = request.span
    for begin in range(0, run.blocks, step):
        if context.deadline.passed:
            done.reason = Reason.DEADLINE_EXCEEDED
            return
        end = min(begin + step, run.blocks)
        started_ns = time.perf_counter_ns()
        gather.copy_blocks(
            run.window(begin, end, span)[0],
            rows[first + begin : first + end],
            executor=context.executor,
        )
        good = run.unchanged(begin, end)
        done.copy_ns += time.perf_counter_ns() - started_ns
        done.blocks += good
        done.bytes += good * width
        if good < end - begin:
            done.reason = Reason.GENERATION_CHANGED
            return


def load_report(
    lease_id: int,
    spec: SpaceSpec,
    request: FetchRequest,
    blocks: int,
    end_block: int,
    outcome: Reason,
) -> pb.LoadReport:
    """What was loaded under a lease: `blocks` blocks, the last before `end_block` of the request.
    Times are the caller's to add.
    """
    tokens = 0 if request.audit else blocks * spec.block_tokens
    ends_at = end_block * spec.block_tokens
    saved_us = 0.0
    if request.prefill is not None and tokens:
        saved_us = request.prefill.prefill_us(ends_at, ends_at - tokens)
    return pb.LoadReport(
        lease_id=lease_id,
        blocks=blocks,
        reason=convert.reason_to_wire(outcome),
        tokens=tokens,
        prefill_saved_us=saved_us,
        request_id=request.request_id,
    )


# ---------------------------------------------------------------- views


def view(
    context: Context,
    spec: SpaceSpec,
    keys: Sequence[BlockKey],
    *,
    wait_ms: int,
    request_id: str,
    prompt_tokens: int = 0,
) -> Operation[ViewLease]:
    """Leases blocks in place. The lease is the caller's to release, if its id is not 0."""

    def attempt(session: Session, binding: Binding) -> Operation[ViewLease]:
        left_ms = max(0, context.deadline.left_ms() - ANSWER_MARGIN_MS)
        request = pb.AcquireRequest(
            session=session.secret,
            space_id=binding.space_id,
            keys=b"".join(keys),
            mode=pb.LEASE_MODE_VIEW,
            wait_ms=min(wait_ms, left_ms),
            request_id=request_id,
            prompt_tokens=min(prompt_tokens, TOKENS_MAX),
        )
        return _view(context, spec, session, binding, keys, request)

    return (yield from in_space(spec, attempt))


def _view(
    context: Context,
    spec: SpaceSpec,
    session: Session,
    binding: Binding,
    keys: Sequence[BlockKey],
    request: pb.AcquireRequest,
) -> Operation[ViewLease]:
    if session.memory is None:
        raise CallFailed(Reason.NOT_SUPPORTED, "views need shared memory; fetch instead")
    if len(keys) > session.keys_per_call_max:
        raise CallFailed(Reason.TOO_MANY_KEYS)
    step = Rpc(session, "Acquire", request, pb.AcquireReply)
    reply: pb.AcquireReply = yield from granted(context, step)
    if not reply.lease_id:
        check_open(reply.reason)
        return ViewLease(session, 0, absence(reply))
    kept = False
    try:
        run = yield from mapped_run(context, spec, session, binding, reply, len(keys))
        arrays = _blocks_of(run, reply.block_bytes)
        if run.unchanged() < run.blocks:
            raise CallFailed(Reason.GENERATION_CHANGED)
        kept = True
    finally:
        if not kept:
            context.release(session, reply.lease_id, None)
    reason = Reason.OK if run.blocks == len(keys) else absence(reply)
    return ViewLease(session, reply.lease_id, reason, "", arrays, run)


def _blocks_of(run: Run, block_bytes: int) -> list[Bytes]:
    return [
        slots2d[slot, :block_bytes] for slots2d, slots in run.sources for slot in slots.tolist()
    ]
