"""Audits: what is stored is compared with what the caller computed, and the daemon is told.

A mismatch makes the daemon hold the fingerprint for review: nobody reads its blocks until a person
decides. An operation, see `steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.arrays import Bytes
from kvstore_client.calls import SpaceSpec, opened
from kvstore_client.channel import CallFailed
from kvstore_client.device import DeviceFill
from kvstore_client.reads import FetchRequest, fetch
from kvstore_client.results import Compared
from kvstore_client.steps import Context, Local, Operation, Rpc
from kvstore_client.streams import Fill
from kvstore_client.tolerance import RowDifference, Tolerance, differences

__all__ = ["CompareRequest", "compare"]

WINDOW_BYTES = 32 << 20
"""Of blocks that are fetched and compared at a time."""
WORST_MAX = 1e12
"""What an infinite difference is reported as."""


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """What to compare. fill: writes the computed part of a block of the prompt into a row, as for a
    push. span: the bytes of each block that are this rank's part, None: all."""

    keys: Sequence[BlockKey]
    first_block: int
    fill: Fill
    row_bytes: int
    span: slice | None
    tolerance: Tolerance | None
    request_id: str


def compare(context: Context, spec: SpaceSpec, request: CompareRequest) -> Operation[Compared]:
    """Fetches the leading run from `first_block` on, compares it and reports."""
    fill = request.fill
    if isinstance(fill, DeviceFill):
        yield Local(lambda: fill.await_kernels(lambda: _check(context)))
    window = max(1, WINDOW_BYTES // request.row_bytes)
    found: list[RowDifference] = []
    reason, detail = Reason.OK, ""
    for start in range(request.first_block, len(request.keys), window):
        keys = request.keys[start : start + window]
        rows = np.empty((len(keys), request.row_bytes), np.uint8)
        asked = FetchRequest(
            keys=keys,
            rows=rows,
            span=request.span,
            wait_ms=0,
            all_or_nothing=False,
            request_id=request.request_id,
            prefill=None,
            audit=True,
        )
        done = yield from fetch(context, spec, asked)
        if done.blocks:
            found += yield Local(_comparing(spec, request, start, rows[: done.blocks]))
        if done.blocks < len(keys):
            reason, detail = done.reason, done.detail
            break
    if not found:
        return Compared(0, 0, 0.0, None, reason, detail=detail)
    return (yield from _report(spec, request, found, reason, detail))


def _check(context: Context) -> None:
    if context.deadline.passed:
        raise CallFailed(Reason.DEADLINE_EXCEEDED, "computing took too long")


def _comparing(
    spec: SpaceSpec, request: CompareRequest, start: int, stored: Bytes
) -> Callable[[], list[RowDifference]]:
    def run() -> list[RowDifference]:
        computed = np.empty_like(stored)
        for number, row in enumerate(computed):
            request.fill(start + number, row)
        kv_dtype = spec.fingerprint.encoding.kv_dtype
        return differences(stored, computed, kv_dtype, request.tolerance, spec.layout.piece_bytes)

    return run


def _report(
    spec: SpaceSpec,
    request: CompareRequest,
    found: Sequence[RowDifference],
    reason: Reason,
    detail: str,
) -> Operation[Compared]:
    wrong = [number for number, one in enumerate(found) if one.mismatch]
    worst = max(one.worst for one in found)
    first = request.first_block + wrong[0] if wrong else None
    session, binding = yield from opened(spec)
    audit = pb.AuditReport(
        space_id=binding.space_id,
        key=request.keys[request.first_block if first is None else first],
        blocks=len(found),
        mismatched=len(wrong),
        worst=min(worst, WORST_MAX),
        request_id=request.request_id,
    )
    message = pb.ReleaseRequest(session=session.secret, audits=[audit])
    reply: pb.ReleaseReply = yield Rpc(session, "Release", message, pb.ReleaseReply)
    return Compared(len(found), len(wrong), worst, first, reason, reply.review_id, detail)
