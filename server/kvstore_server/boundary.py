"""The RPC boundary: what every call passes on its way in and out.

Admission (a bounded number of calls at once), the session, the record with its five stages, the
mapping of errors to statuses, the metrics. The one place of the daemon that catches everything: a
defect costs its own call, never the daemon. The servicers' methods are short bodies that run inside
`Boundary.run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc

from kvstore.config import Limits
from kvstore.model.fingerprint import Difference
from kvstore.model.keys import KEY_BYTES, unpack_keys
from kvstore.model.reasons import BadRequest, KVStoreError, NoSpace, Reason
from kvstore.model.record import Record, RecordBuilder, Ring
from kvstore.model.sampling import ALL_SERVED, Sampling
from kvstore.store import NS_PER_MS, Session, Store
from kvstore.wire import status
from kvstore_server.logs import Throttled
from kvstore_server.metrics import Metrics

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")

TEXT_BYTES_MAX = 128
DETAIL_CHARS_MAX = 512
"""Of an error's text: it travels in trailing metadata, which gRPC bounds."""
DEADLINE_MARGIN_NS = 10 * NS_PER_MS
"""An answer is sent this long before the caller's deadline, so that it still arrives."""


@dataclass(slots=True)
class Call:
    """One call under way: who asks, until when, and the record that its body fills.

    send: sends a message of a streamed answer, and waits while the reader is slow. answered: the
    record is finished; what is left of the call is a stream that only lives.
    """

    until_ns: int
    record: RecordBuilder
    send: Callable[[Any], Awaitable[None]]
    session: Session | None = None
    reason: Reason = Reason.OK
    tier: str = ""
    answered: bool = False

    def the_session(self) -> Session:
        assert self.session is not None, "the body of a call with a session"
        return self.session


class Boundary:
    """Runs the bodies of one servicer's calls. Belongs to the event loop's thread."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        ring: Ring | None,
        limits: Limits,
        sampling: Sampling = ALL_SERVED,
    ) -> None:
        """`ring` None: calls are counted, but leave no record, as the operator's own."""
        self.sampling = sampling
        self.store = store
        self.metrics = metrics
        self.ring = ring
        self.limits = limits
        self.warn = Throttled(log, store.clock)
        # What a record names as the settings that applied.
        self._settings = (
            ("limits.keys_per_call_max", limits.keys_per_call_max),
            ("limits.lease_ttl_ms", limits.lease_ttl_ms),
            ("limits.reserve_ttl_ms", limits.reserve_ttl_ms),
            ("host.staging_bytes", limits.staging_bytes),
            ("serve.share", sampling.serve_share),
            ("audit.share", sampling.audit_share),
        )
        self._active = 0

    # ------------------------------------------------------------------ in and out

    async def run(
        self,
        op: str,
        context: Context,
        body: Callable[[Call], Awaitable[Reply]],
        *,
        tenant: str,
        secret: bytes | None = None,
        request_id: str = "",
    ) -> Reply:
        """Runs `body`; a KVStoreError becomes a status with an ErrorDetail.

        `secret` None: the call has no session, or `body` identifies it.
        """
        call = self._start(op, context, tenant, request_id)
        try:
            if self._active > self.limits.concurrent_calls_max:
                raise NoSpace(
                    Reason.LIMIT_QUEUE,
                    f"{self._active - 1} calls are under way",
                    "limits.concurrent_calls_max",
                )
            if secret is not None:
                self.identify(call, secret, request_id)
                self.stage(call, "input")
            reply = await body(call)
            self.finish(call)
            return reply
        except KVStoreError as error:
            failure = error
        except (asyncio.CancelledError, grpc.aio.BaseError):
            # The caller is gone, or its deadline is over; it hears of neither from us.
            over = self.left_ns(call) <= 0
            call.reason = Reason.DEADLINE_EXCEEDED if over else Reason.CANCELLED
            self.finish(call)
            raise
        except Exception:
            log.exception("%s failed: a defect", op)
            failure = KVStoreError(Reason.INTERNAL, "see the daemon's log")
        await self._refuse(call, context, failure)
        raise AssertionError("aborting a call raises")

    def identify(self, call: Call, secret: bytes, request_id: str) -> None:
        """Finds the session of a call. KVStoreError(SESSION_UNKNOWN), BadRequest(BAD_NAME)."""
        call.session = self.store.session_by_secret(secret, call.record.tenant)
        if call.session is None:
            raise KVStoreError(Reason.SESSION_UNKNOWN, "attach first")
        call.record.engine_id = call.session.engine_id
        bound_text(request_id, "request_id")
        call.record.record.request_id = request_id

    def finish(self, call: Call) -> None:
        """Ends the record, and the place among the calls under way. Idempotent."""
        if call.answered:
            return
        call.answered = True
        self._active -= 1
        record = call.record.finish(call.reason, self.store.clock.monotonic_ns())
        self.keep(record)
        self.metrics.request(record.verb, call.reason, call.tier, record.elapsed_us / 1e6)

    def keep(self, record: Record) -> None:
        """Keeps a finished record for `kvstore trace` and the trace file."""
        if self.ring is not None:
            self.ring.append(record)

    def _start(self, op: str, context: Context, tenant: str, request_id: str) -> Call:
        now_ns = self.store.clock.monotonic_ns()
        left_s = cast("float | None", context.time_remaining())  # None without a deadline
        # Without a deadline a call has as long as a reservation lives.
        left_ns = self.limits.reserve_ttl_ms * NS_PER_MS if left_s is None else int(left_s * 1e9)
        record = RecordBuilder(
            op,
            request_id[:TEXT_BYTES_MAX],  # of a call that is refused before it is looked at
            tenant,
            now_ns,
            self.store.clock.wall_s(),
            settings=self._settings,
        )
        self._active += 1
        return Call(now_ns + left_ns, record, context.write)

    async def _refuse(self, call: Call, context: Context, error: KVStoreError) -> None:
        error.detail = error.detail[:DETAIL_CHARS_MAX]
        call.reason = error.reason
        call.record.fail(error.reason, error.detail)
        # Before the status is sent: a reader who has stopped reading would hold its place with it.
        self.finish(call)
        await context.abort(
            status.code_of(error.reason),
            str(error),
            trailing_metadata=((status.DETAIL_KEY, status.detail_of(error)),),
        )

    # ------------------------------------------------------------------ time

    def left_ns(self, call: Call) -> int:
        """How long this call may still take."""
        return max(0, call.until_ns - self.store.clock.monotonic_ns() - DEADLINE_MARGIN_NS)

    def wait_ns(self, call: Call, wait_ms: int) -> int:
        """How long this call may wait for blocks: what it asks for, but not past its deadline; what
        it holds meanwhile is held no longer than a lease.
        """
        wait_ms = min(wait_ms, self.limits.lease_ttl_ms)
        return min(wait_ms * NS_PER_MS, self.left_ns(call))

    def load_ns(self, call: Call) -> int:
        """How long this call may wait for slower tiers. A tenth of its time is left for the
        client's own copy of what has come.
        """
        return min(self.limits.lease_ttl_ms * NS_PER_MS, self.left_ns(call) * 9 // 10)

    async def within(self, call: Call, streaming: Awaitable[Reply]) -> Reply:
        """Awaits what a slow peer may stretch. KVStoreError(DEADLINE_EXCEEDED)."""
        try:
            return await asyncio.wait_for(streaming, self.left_ns(call) / 1e9)
        except asyncio.TimeoutError:
            raise KVStoreError(Reason.DEADLINE_EXCEEDED, "the peer is slow") from None

    # ------------------------------------------------------------------ what bodies use

    def keys(self, packed: bytes, name: str = "keys") -> list[bytes]:
        """Unpacks and bounds the keys of a request."""
        count = len(packed) // KEY_BYTES
        if count > self.limits.keys_per_call_max:
            raise BadRequest(
                Reason.TOO_MANY_KEYS,
                f"{name} has {count} keys, {self.limits.keys_per_call_max} at most in a call",
                "limits.keys_per_call_max",
            )
        return cast("list[bytes]", unpack_keys(packed))

    def stage(self, call: Call, name: str) -> None:
        """Ends a stage of the call's record."""
        call.record.stage(name, self.store.clock.monotonic_ns())

    def rejected(self, call: Call, reason: Reason, differences: Sequence[Difference]) -> None:
        """Notes a rejection by fingerprint: each field in the record, the log and the metrics."""
        for difference in differences:
            self.metrics.rejection(difference.field)
            self.warn.warning(
                f"rejected {difference.field}",
                "rejected by fingerprint",
                reason=reason.name,
                tenant=call.record.tenant,
                field=difference.field,
                stored=difference.stored,
                offered=difference.offered,
            )
        call.record.differ([difference.field for difference in differences])

    def held(self, call: Call, review_id: int, missing: Sequence[str]) -> None:
        """Notes that an incomplete fingerprint was offered."""
        self.metrics.held_for_review()
        self.warn.warning(
            f"held {review_id}",
            "held for review",
            tenant=call.record.tenant,
            review_id=review_id,
            missing=list(missing),
        )
        call.record.differ(missing)


def bound_text(text: str, name: str, bytes_max: int = TEXT_BYTES_MAX) -> None:
    """Refuses a text from the wire that is too long or not printable."""
    if len(text.encode()) > bytes_max or not (text == "" or text.isprintable()):
        raise BadRequest(
            Reason.BAD_NAME, f"{name} is not printable text of {bytes_max} bytes at most"
        )
