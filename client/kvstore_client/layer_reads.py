"""Fetch by layers: all blocks under one lease, copied out one layer after the other, so that an
engine computes a layer while the next one is copied.

A layer counts once the generation of each slot, read after this layer's copy, is still the one that
the lease named. From a block that has changed on, this layer and all later ones are a miss; what
was told of earlier layers was right. A client that cannot map the daemon's memory is given all
layers at once, by `reads`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore import gather
from kvstore.gather import Source
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.arrays import Bytes
from kvstore_client.calls import Binding, SpaceSpec, check_open, in_space, touch_before
from kvstore_client.channel import CallFailed
from kvstore_client.mapped import Region
from kvstore_client.pools import Access, NoPool, Reader
from kvstore_client.reads import (
    PIECE_BYTES,
    Copied,
    FetchRequest,
    Run,
    absence,
    acquire_request,
    fetch_in,
    load_report,
    mapped_run,
)
from kvstore_client.session import Session
from kvstore_client.steps import Context, Local, Operation, Release, Rpc, granted

__all__ = ["HostTarget", "LayerLease", "LayerRequest", "Target", "copy", "fetch_whole", "lease"]


class Target(Protocol):
    """Where one layer of all blocks goes."""

    @property
    def layer_bytes(self) -> int:
        """Of one block."""

    @property
    def reader(self) -> Reader | None:
        """The device whose memory it is; None: host memory."""

    def await_kernels(self, check: Callable[[], None]) -> None:
        """Returns when it may be written. `check` is called meanwhile, and ends it by raising."""

    def begin(self, sources: Sequence[Source], first_row: int, regions: Sequence[Region]) -> None:
        """Begins to copy the blocks of `sources` to the rows from `first_row` on. regions: where
        each of the sources is; none if they are this process's own bytes.
        """

    def settle(self) -> None:
        """Returns when everything that was begun is there."""


@dataclass(frozen=True, slots=True)
class HostTarget:
    """An array [n, ...] of any strides. spans: the layer's bytes in a block."""

    rows: NDArray[Any]
    spans: tuple[slice, ...]

    @property
    def layer_bytes(self) -> int:
        return sum(span.stop - span.start for span in self.spans)

    @property
    def reader(self) -> Reader | None:
        return None

    def await_kernels(self, check: Callable[[], None]) -> None:
        pass

    def begin(self, sources: Sequence[Source], first_row: int, regions: Sequence[Region]) -> None:
        gather.copy_pieces(sources, self.spans, self.rows, first_row)

    def settle(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """What to fetch to where. `fetch.rows` are not used."""

    fetch: FetchRequest
    targets: Sequence[Target]
    layers_at_once: int
    row_bytes: int
    """Of one block, all of its layers."""


@dataclass(slots=True, eq=False)
class _Window:
    """What one lease grants. lease_id 0: bytes of this process."""

    lease_id: int
    asked: int
    run: Run = field(default_factory=lambda: Run(0, [], [], []))
    begun_ns: int = 0


class LayerLease:
    """Leased blocks that are to be copied; the leases end with it. Not for several threads."""

    def __init__(self, session: Session, release: Release, done: Copied) -> None:
        self.done = done
        """What it will have been: all leased blocks, until some turn out to have changed."""
        self.windows: list[_Window] = []
        self.access: Access | None = None
        """By which blocks are read that are in pools."""
        self.session = session
        self._release = release
        self._pid = os.getpid()

    def end(self, report: Callable[[_Window], pb.LoadReport] | None = None) -> None:
        """Gives the leases back. Idempotent; in a forked child the parent's stay."""
        windows, self.windows = self.windows, []
        if os.getpid() != self._pid:
            return
        for window in windows:
            if window.lease_id:
                told = None if report is None else report(window)
                self._release(self.session, window.lease_id, told)

    def count_pools(self) -> None:
        """Of the blocks that came, those out of pools."""
        left = self.done.blocks
        for window in self.windows:
            self.session.pools.read(window.run.in_pools(min(left, window.run.blocks)))
            left -= min(left, window.run.blocks)

    def without_pools(self, window: _Window, failure: CallFailed) -> bool:
        """Gives this lease back, if it is to be asked for again by way of host regions: pools
        cannot be used, or one has just been closed. False: it failed for another reason.
        """
        access, self.access = self.access, None
        if access is None or failure.reason not in (Reason.REGION_UNKNOWN, Reason.NOT_SUPPORTED):
            return False
        if isinstance(failure, NoPool):
            self.session.pools.refuse(access, failure.detail)
        if window in self.windows:
            self.windows.remove(window)
            self._release(self.session, window.lease_id, None)
        return True

    def __del__(self) -> None:
        # Of a call that was cancelled when it had just got its lease.
        if getattr(self, "windows", None):
            self.end()


# ---------------------------------------------------------------- the lease


def lease(context: Context, spec: SpaceSpec, request: LayerRequest) -> Operation[LayerLease]:
    """Leases the leading run of the keys' blocks. More keys than a call may have go in several."""

    def attempt(session: Session, binding: Binding) -> Operation[LayerLease]:
        return _lease(context, spec, session, binding, request)

    return (yield from in_space(spec, attempt))


def _lease(
    context: Context, spec: SpaceSpec, session: Session, binding: Binding, request: LayerRequest
) -> Operation[LayerLease]:
    if session.memory is None:
        return (yield from _all_at_once(context, spec, session, binding, request))
    keys, limit, done = request.fetch.keys, session.keys_per_call_max, Copied()
    held = LayerLease(session, context.release, done)
    held.access = session.pools.access(target.reader for target in request.targets)
    start = 0
    try:
        for start in range(0, len(keys), limit):
            window = _Window(0, len(keys[start : start + limit]))
            try:
                yield from _fill(context, spec, binding, request.fetch, start, window, held)
            except CallFailed as failure:
                if not held.without_pools(window, failure):
                    raise
                window = _Window(0, window.asked)
                yield from _fill(context, spec, binding, request.fetch, start, window, held)
            done.blocks += window.run.blocks
            if window.run.blocks < window.asked:
                break
    except CallFailed as failure:
        if not done.blocks:
            held.end()
            raise
        # What was leased before is good.
        done.reason, done.detail = failure.reason, failure.detail
    except BaseException:
        held.end()
        raise
    yield from touch_before(session, binding, keys, start)
    return held


def _fill(
    context: Context,
    spec: SpaceSpec,
    binding: Binding,
    request: FetchRequest,
    start: int,
    window: _Window,
    held: LayerLease,
) -> Operation[None]:
    window.begun_ns = time.perf_counter_ns()
    keys = request.keys[start : start + window.asked]
    session, access = held.session, held.access
    gpu = "" if access is None else access.uuid
    acquire = acquire_request(context, session, binding, keys, request, gpu)
    step = Rpc(session, "Acquire", acquire, pb.AcquireReply)
    reply: pb.AcquireReply = yield from granted(context, step)
    if not reply.lease_id:
        check_open(reply.reason)
        held.done.reason = absence(reply)
        return
    window.lease_id = reply.lease_id
    held.windows.append(window)
    window.run = yield from mapped_run(context, spec, session, binding, reply, len(keys), access)
    if window.run.blocks < len(keys):
        held.done.reason = absence(reply)


def _all_at_once(
    context: Context, spec: SpaceSpec, session: Session, binding: Binding, request: LayerRequest
) -> Operation[LayerLease]:
    """Without mapped memory: whole blocks first, into memory of this process."""
    count, span = len(request.fetch.keys), request.fetch.span
    size = spec.layout.block_bytes
    try:
        rows = np.empty((count, size), np.uint8)  # pages that are not touched cost nothing
    except (MemoryError, ValueError):
        raise CallFailed(Reason.NO_SPACE, f"no memory for {count} blocks of {size} bytes") from None
    whole = replace(request.fetch, rows=rows if span is None else rows[:, span])
    done: Copied = yield from fetch_in(context, spec, session, binding, whole)
    held = LayerLease(session, context.release, done)
    held.windows.append(_Window(0, count, _run_of(rows, done.blocks)))
    return held


def _run_of(rows: Bytes, blocks: int) -> Run:
    """Rows that nobody else writes, as a run of slots."""
    slots = np.arange(blocks, dtype=np.intp)
    never: NDArray[np.uint64] = np.zeros(blocks, np.uint64)
    return Run(blocks, [(rows, slots)], [(never, never)], [])


def fetch_whole(context: Context, spec: SpaceSpec, request: LayerRequest) -> Operation[Copied]:
    """Lease and copies in one, in the caller's thread. all_or_nothing as in `reads`."""
    held = yield from lease(context, spec, request)
    wanted = len(request.fetch.keys)
    if not held.done.blocks:
        held.end()
        return held.done
    done = yield from copy(context, spec, request, held, lambda layers, blocks: None, lambda: True)
    if request.fetch.all_or_nothing and done.blocks < wanted:
        done.blocks = done.bytes = 0
    return done


# ---------------------------------------------------------------- the copies


def copy(
    context: Context,
    spec: SpaceSpec,
    request: LayerRequest,
    held: LayerLease,
    reached: Callable[[int, int], None],
    may_go_on: Callable[[], bool],
) -> Operation[Copied]:
    """Copies what is leased, and ends the lease. After each range `reached(layers, blocks)` tells
    how many layers are there, and how many leading blocks of the last ones. `may_go_on` False ends
    it with CallFailed(CANCELLED).
    """
    done = held.done
    leased = done.blocks
    outcome, complete = Reason.INTERNAL, False
    try:
        for first in range(0, len(request.targets), request.layers_at_once):
            targets = request.targets[first : first + request.layers_at_once]
            work = _Range(context, request, held, targets, may_go_on)
            yield Local(work.run)
            reached(first + len(targets), done.blocks)
            if not done.blocks:
                break
        complete = True
        outcome = done.reason
    except CallFailed as failure:
        outcome = failure.reason
        if isinstance(failure, NoPool) and held.access is not None:
            held.session.pools.refuse(held.access, failure.detail)
        raise
    finally:
        if not complete:
            done.blocks = 0
        now_ns = time.perf_counter_ns()
        begun_ns = held.windows[0].begun_ns if held.windows else 0
        done.load_ns += now_ns - begun_ns if begun_ns else 0
        done.bytes = done.blocks * request.row_bytes
        held.count_pools()
        held.end(_Reports(spec, request.fetch, done, leased, outcome).next_one)
    return done


@dataclass(slots=True)
class _Range:
    """One range of layers, from all leased slots."""

    context: Context
    request: LayerRequest
    held: LayerLease
    targets: Sequence[Target]
    may_go_on: Callable[[], bool]

    def run(self) -> None:
        """Copies and verifies; `done` has the blocks that are still good."""
        done = self.held.done
        started_ns = time.perf_counter_ns()
        base = 0
        try:
            for target in self.targets:
                target.await_kernels(self._check)
            for window in self.held.windows:
                blocks = min(window.run.blocks, done.blocks - base)
                if blocks <= 0:
                    return  # from a block of an earlier lease on it is a miss
                for target in self.targets:
                    self._begin(window.run, target, base, blocks)
                for target in self.targets:
                    target.settle()
                good = window.run.unchanged(0, blocks)
                if good < blocks:
                    done.blocks, done.reason = base + good, Reason.GENERATION_CHANGED
                    return
                base += blocks
        finally:
            for target in self.targets:
                target.settle()  # whatever happens: nothing is written after the return
            done.copy_ns += time.perf_counter_ns() - started_ns

    def _begin(self, run: Run, target: Target, base: int, blocks: int) -> None:
        """In pieces, so that deadline and close are kept."""
        step = max(1, PIECE_BYTES // max(1, target.layer_bytes))
        for begin in range(0, blocks, step):
            self._check()
            end = min(begin + step, blocks)
            sources, regions = run.window(begin, end)
            target.begin(sources, base + begin, regions)

    def _check(self) -> None:
        if self.context.deadline.passed:
            raise CallFailed(Reason.DEADLINE_EXCEEDED)
        if not self.may_go_on():
            raise CallFailed(Reason.CANCELLED)


@dataclass(slots=True)
class _Reports:
    """What to tell about each lease of a request, in their order."""

    spec: SpaceSpec
    request: FetchRequest
    done: Copied
    leased: int
    outcome: Reason
    before: int = 0

    def next_one(self, window: _Window) -> pb.LoadReport:
        first, self.before = self.before, self.before + window.run.blocks
        blocks = max(0, min(window.run.blocks, self.done.blocks - first))
        report = load_report(
            window.lease_id, self.spec, self.request, blocks, first + blocks, self.outcome
        )
        share = window.run.blocks / max(1, self.leased)
        report.copy_us = int(self.done.copy_ns * share) // 1_000
        report.load_us = int(self.done.load_ns * share) // 1_000
        if self.request.predicted_ms and blocks == window.asked:
            part = window.asked / len(self.request.keys)
            report.predicted_us = int(self.request.predicted_ms * 1e3 * part)
        return report
