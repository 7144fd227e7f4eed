"""Push by layers: one reservation whose blocks are filled layer by layer while an engine computes,
and one commit at the end.

Nothing is visible before the commit. Staging is given back only when no copy writes into it any
more. What finds no room in one reservation is skipped: it can be pushed whole afterwards. A client
that cannot map the daemon's memory gathers the blocks here, and pushes them at the commit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore import gather
from kvstore.model.fingerprint import Difference
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import writes
from kvstore_client.arrays import Bytes, strided_of
from kvstore_client.calls import Binding, SpaceSpec, check_open, in_space
from kvstore_client.channel import CallFailed
from kvstore_client.device import DeviceFill, DeviceRows
from kvstore_client.mapped import Staging
from kvstore_client.results import Pushed
from kvstore_client.root import Prepared, Root
from kvstore_client.session import NS_PER_MS, Deadline, Session
from kvstore_client.steps import Context, MapStaging, Operation, Release, Rpc, granted
from kvstore_client.streams import Fill, RowsFill
from kvstore_client.writes import PushRequest, Tally, Window

__all__ = ["LayerPushing", "LayerReservation", "reserve"]

CLOSED: Final = "it was not committed"
TOO_LATE: Final = "the layers came too late"
EXPIRED: Final = "the layers came when the daemon's limits.lease_ttl_ms was over"


class LayerReservation:
    """Room for the wanted blocks: a part each, in staging or in this process. One that is dropped
    ends with its last reference, so never while a copy writes into it.

    wanted: indexes into the prompt's blocks. memory, offsets: where the part of each begins.
    """

    def __init__(self, wanted: list[int], memory: Bytes, offsets: list[int]) -> None:
        self.wanted, self.memory, self.offsets = wanted, memory, offsets
        self.session: Session | None = None
        self.window: Window | None = None
        self.staging: Staging | None = None
        self.release: Release | None = None
        """Set while the daemon has to be told of the end."""
        self.until: Deadline | None = None
        """When the daemon takes the room back; None: never."""
        self._pid = os.getpid()

    def end(self) -> None:
        """When no copy is under way: gives the room back, unless a commit did. Idempotent."""
        release, self.release = self.release, None
        self.memory = np.empty(0, np.uint8)
        if release is not None and os.getpid() == self._pid:
            assert self.session is not None
            assert self.window is not None
            release(self.session, self.window.lease_id, None)

    def __del__(self) -> None:
        if getattr(self, "release", None) is not None:
            self.end()


Reserved = tuple[LayerReservation | None, Tally]


def reserve(context: Context, spec: SpaceSpec, request: PushRequest) -> Operation[Reserved]:
    """Reserves what the daemon wants and has room for."""

    def attempt(session: Session, binding: Binding) -> Operation[Reserved]:
        return _reserve(context, spec, session, binding, request)

    return (yield from in_space(spec, attempt))


def _reserve(
    context: Context, spec: SpaceSpec, session: Session, binding: Binding, request: PushRequest
) -> Operation[Reserved]:
    tally = Tally()
    if session.memory is None:
        return _gathered(spec, request), tally
    limit = session.keys_per_call_max
    start = request.first_block // limit * limit
    chain, first = request.keys[start : start + limit], request.first_block - start
    pauses = iter(writes.STAGING_PAUSES_MS)
    while True:
        asked_ns = context.deadline.clock()
        message = writes.reserve_request(
            context, spec, session, binding, request, chain, first, start
        )
        reply: pb.ReserveReply = yield from granted(
            context, Rpc(session, "Reserve", message, pb.ReserveReply)
        )
        check_open(reply.reason)
        tally.present, tally.reserved = reply.present, reply.reserved
        tally.reason = Reason.from_wire(reply.reason)
        if reply.lease_id:
            break
        if not (yield from writes.waited(context, tally.reason, pauses)):
            return None, tally
    kept = False
    try:
        window = writes.window_of(spec, reply, first, len(chain))
        if not window.wanted.size and not request.durable:
            raise CallFailed(Reason.INTERNAL, "a reservation of nothing")
        memory: Bytes = np.empty(0, np.uint8)
        staging: Staging | None = None
        if window.wanted.size:
            staging = yield MapStaging(session, reply.staging_region_id)
            assert staging is not None
            memory = _memory_of(staging, window)
        wanted = [start + index for index in window.wanted.tolist()]
        held = LayerReservation(wanted, memory, window.offsets.tolist())
        held.session, held.window, held.staging = session, window, staging
        held.release = context.release
        if ttl_ms := session.limits.reserve_ttl_ms_max:
            held.until = Deadline(asked_ns + ttl_ms * NS_PER_MS, context.deadline.clock)
        kept = True
    finally:
        if not kept:
            context.release(session, reply.lease_id, None)
    if tally.reason is Reason.OK and start + limit < len(request.keys):
        tally.reason = Reason.TOO_MANY_KEYS
    return held, tally


def _memory_of(staging: Staging, window: Window) -> Bytes:
    if int(window.offsets.max()) > staging.total_bytes - window.part_bytes:
        raise CallFailed(Reason.INTERNAL, "the reservation is outside of the staging region")
    try:
        return staging.memory.u8
    except ValueError:
        raise CallFailed(Reason.REGION_UNKNOWN, "the staging region was closed") from None


def _gathered(spec: SpaceSpec, request: PushRequest) -> LayerReservation:
    size = spec.layout.part_bytes
    try:
        memory = np.empty(request.offered * size, np.uint8)
    except (MemoryError, ValueError):
        raise CallFailed(
            Reason.NO_SPACE, f"no memory for {request.offered} blocks of {size} bytes"
        ) from None
    wanted = list(range(request.first_block, len(request.keys)))
    return LayerReservation(wanted, memory, [number * size for number in range(len(wanted))])


def _commit(
    context: Context,
    spec: SpaceSpec,
    request: PushRequest,
    held: LayerReservation,
    tally: Tally,
) -> Operation[Pushed]:
    session, window = held.session, held.window
    if session is None or window is None:
        rows = held.memory.reshape(-1, spec.layout.part_bytes)
        filled = PushRequest(
            keys=request.keys,
            fill=RowsFill(rows, request.first_block),
            first_block=request.first_block,
            attempt=request.attempt,
            durable=request.durable,
            request_id=request.request_id,
        )
        return (yield from writes.push(context, spec, filled))
    tally.add((yield from writes.asked_to_commit(session, request, window)), window)
    held.release = None  # a commit ends it
    return tally.pushed(request.offered)


class LayerPushing:
    """What both clients' handles of a push stand on. For one thread at a time."""

    def __init__(
        self,
        root: Root,
        spec: SpaceSpec,
        request: PushRequest,
        deadline: Deadline,
        held: LayerReservation | None,
        tally: Tally,
    ) -> None:
        part = spec.layout.part(spec.part)
        self.first_layer, self.layers = part.first_layer, part.layers
        self.wanted: tuple[int, ...] = () if held is None else tuple(held.wanted)
        self.deadline = deadline
        self._root, self._spec, self._request = root, spec, request
        self._held, self._tally = held, tally
        self._put: set[int] = set()
        self._copies: list[Future[None]] = []
        self._failure: tuple[Reason, str] | None = None
        self._stopped = threading.Event()
        self._result: Pushed | None = None
        self._pid = os.getpid()

    @property
    def root(self) -> Root:
        """Whose threads copy, and whose session it is."""
        return self._root

    def put(self, layer: int, data: Any) -> None:
        """See LayerPush.put."""
        if type(layer) is not int or not 0 <= layer < self.layers or layer in self._put:
            raise BadRequest(
                Reason.BAD_PART,
                f"layer is an int from 0 to {self.layers - 1}, each put once",
                "layer",
            )
        if self._result is not None:
            raise BadRequest(Reason.BAD_REQUEST, "the push has ended")
        spec = self._spec
        spans = spec.layout.layer_spans(self.first_layer + layer, spec.part)
        first, count, device = self._request.first_block, self._request.offered, self._root.device
        fill: Fill
        if device.owns(data):
            fill = DeviceFill(DeviceRows(device, data, count, spans, "data"), first)
        else:
            rows = strided_of(data, count, spans, name="data", writable=False)
            fill = _rows_fill(rows, spans[0], first)
        self._put.add(layer)
        held = self._held
        if held is None or os.getpid() != self._pid:
            return
        try:
            work = _filling(held, fill, spans[0], self._why_not)
            self._copies.append(self._root.workers().submit(work))
        except (KVStoreError, RuntimeError) as error:  # closed, or no thread to be had
            self._failure = Reason.UNAVAILABLE, str(error)

    def _why_not(self, held: LayerReservation) -> tuple[Reason, str] | None:
        """Why nothing may be copied any more; None while it may."""
        if self._stopped.is_set():
            return Reason.ABORTED, CLOSED
        if self.deadline.passed:
            return Reason.DEADLINE_EXCEEDED, TOO_LATE
        if held.until is not None and held.until.passed:
            return Reason.LEASE_EXPIRED, EXPIRED
        return None

    def copies(self) -> list[Future[None]]:
        """What is under way."""
        return self._copies

    def settle(self) -> None:
        """Waits for the copies: each ends by itself at the deadline or soon after `close`."""
        if os.getpid() != self._pid:
            return
        wait(self._copies)
        for one in self._copies:
            if one.cancelled():
                self._failure = Reason.ABORTED, CLOSED
                continue
            error = one.exception()
            if isinstance(error, CallFailed):
                self._failure = error.reason, error.detail
            elif error is not None:
                self._failure = Reason.INTERNAL, f"{type(error).__name__}: {error}"
        self._copies = []

    def check_complete(self) -> None:
        """BadRequest while a layer is missing."""
        missing = [layer for layer in range(self.layers) if layer not in self._put]
        if missing and self.wanted and self._result is None:
            raise BadRequest(Reason.BAD_REQUEST, f"layer {missing[0]} was not put", "layer")

    def prepared(self) -> Prepared[Pushed]:
        """The commit, once the copies have ended. BadRequest while a layer is missing."""
        self.check_complete()

        def start(context: Context) -> Operation[Pushed]:
            self.settle()
            held, self._held = self._held, None
            if self._result is not None or held is None or os.getpid() != self._pid:
                yield from ()
                return self._result or self._skipped(self._tally.reason, self._tally.detail)
            try:
                if self._stopped.is_set():  # by a `close` meanwhile, which waits for no commit
                    raise CallFailed(Reason.ABORTED, CLOSED)
                if self._failure is not None:
                    raise CallFailed(*self._failure)
                return (yield from _commit(context, self._spec, self._request, held, self._tally))
            finally:
                held.end()

        def failed(reason: Reason, detail: str, _: tuple[Difference, ...]) -> Pushed:
            return self._skipped(reason, detail)

        return Prepared(start, failed)

    def _skipped(self, reason: Reason, detail: str) -> Pushed:
        if os.getpid() != self._pid:
            reason, detail = Reason.UNAVAILABLE, "the push belongs to the process that was forked"
        tally = Tally(present=self._tally.present, reserved=self._tally.reserved)
        tally.reason, tally.detail = reason, detail
        return tally.pushed(self._request.offered)

    def ended(self, result: Pushed) -> Pushed:
        """What came of it; the first result stays."""
        self._result = self._result or result
        return self._result

    def commit(self) -> Pushed:
        """See LayerPush.commit."""
        return self.ended(self._root.run(self.prepared(), self.deadline))

    def close(self) -> None:
        """See LayerPush.close."""
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        for one in self._copies:
            one.cancel()
        self.settle()
        held, self._held = self._held, None
        if held is not None:
            held.end()
        self.ended(self._skipped(Reason.ABORTED, CLOSED))


def _rows_fill(rows: NDArray[Any], span: slice, first_block: int) -> Fill:
    pieces = gather.pieces_of(rows, [span])[0]

    def fill(index: int, target: Bytes) -> None:
        source = pieces[index - first_block]
        np.copyto(target.view(source.dtype).reshape(source.shape), source)

    return fill


def _filling(
    held: LayerReservation,
    fill: Fill,
    span: slice,
    why_not: Callable[[LayerReservation], tuple[Reason, str] | None],
) -> Callable[[], None]:
    """Work that copies one layer of all wanted blocks to where they go."""

    def check() -> None:
        if why := why_not(held):
            raise CallFailed(*why)

    def each(write: Fill) -> None:
        for index, offset in zip(held.wanted, held.offsets, strict=True):
            check()
            write(index, held.memory[offset + span.start : offset + span.stop])

    def work() -> None:
        if isinstance(fill, DeviceFill):
            fill.await_kernels(check)
            with fill.into(held.staging):
                each(fill.begin)
        else:
            each(fill)

    return work
