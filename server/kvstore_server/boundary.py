"""The RPC boundary: what every call passes on its way in and out.

Admission (a bounded number of calls at once), the session, the record with its five stages, the
mapping of errors to statuses, the metrics. The one place of the daemon that catches everything: a
defect costs its own call, never the daemon. The servicers' methods are short bodies that run inside
`Boundary.run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc

from kvstore.config import Limits
from kvstore.model.fingerprint import Difference
from kvstore.model.keys import unpack_keys
from kvstore.model.reasons import BadRequest, KVStoreError, NoSpace, Reason
from kvstore.model.record import RecordBuilder, Ring
from kvstore.store import NS_PER_MS, Session, Store
from kvstore.wire import status
from kvstore_server.logs import Throttled
from kvstore_server.metrics import Metrics

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")

TEXT_BYTES_MAX = 128
DEADLINE_MARGIN_NS = 5 * NS_PER_MS
"""An answer is sent this long before the caller's deadline, so that it still arrives."""
WAIT_NS_DEFAULT = 10_000 * NS_PER_MS
"""How long a call without a deadline may wait."""


@dataclass(slots=True)
class Call:
    """One call under way: who asks, until when, and the record that its body fills."""

    session: Session | None
    until_ns: int
    record: RecordBuilder
    reason: Reason = Reason.OK
    tier: str = ""

    def the_session(self) -> Session:
        assert self.session is not None, "the body of a call with a session"
        return self.session


class Boundary:
    """Runs the bodies of one servicer's calls. Belongs to the event loop's thread."""

    def __init__(self, store: Store, metrics: Metrics, ring: Ring | None, limits: Limits) -> None:
        """`ring` None: calls are counted, but leave no record, as the operator's own."""
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
        )
        self._active = 0

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
        """Runs `body`; a KVStoreError becomes a status with an ErrorDetail."""
        call = self._start(op, context, tenant, request_id)
        self._active += 1
        try:
            self._admit(call, tenant, secret, request_id)
            return await body(call)
        except KVStoreError as error:
            await self._fail(call, context, error)
        except asyncio.CancelledError:
            call.reason = Reason.CANCELLED
            raise
        except Exception:
            log.exception("%s failed: a defect", op)
            call.reason = Reason.INTERNAL
            await self._fail(call, context, KVStoreError(Reason.INTERNAL, "see the daemon's log"))
        finally:
            self._active -= 1
            self._finish(op, call)
        raise AssertionError("aborting a call raises")

    async def stream(
        self,
        op: str,
        context: Context,
        body: Callable[[Call], AsyncIterator[Reply]],
        *,
        tenant: str,
        secret: bytes | None,
        request_id: str = "",
    ) -> AsyncIterator[Reply]:
        """As `run`, for a call that answers with a stream."""
        call = self._start(op, context, tenant, request_id)
        self._active += 1
        try:
            self._admit(call, tenant, secret, request_id)
            async for reply in body(call):
                yield reply
        except KVStoreError as error:
            await self._fail(call, context, error)
        except (asyncio.CancelledError, GeneratorExit):
            call.reason = Reason.CANCELLED
            raise
        except Exception:
            log.exception("%s failed: a defect", op)
            await self._fail(call, context, KVStoreError(Reason.INTERNAL, "see the daemon's log"))
        finally:
            self._active -= 1
            self._finish(op, call)

    def keys(self, packed: bytes, name: str = "keys") -> list[bytes]:
        """Unpacks and bounds the keys of a request."""
        keys = unpack_keys(packed)
        if len(keys) > self.limits.keys_per_call_max:
            raise BadRequest(
                Reason.TOO_MANY_KEYS,
                f"{name} has {len(keys)} keys, {self.limits.keys_per_call_max} at most in a call",
                "limits.keys_per_call_max",
            )
        return list(keys)

    def wait_ns(self, call: Call, wait_ms: int) -> int:
        """How long this call may wait: what it asks for, but not past its own deadline."""
        left_ns = call.until_ns - self.store.clock.monotonic_ns() - DEADLINE_MARGIN_NS
        return max(0, min(wait_ms * NS_PER_MS, left_ns))

    def left_ns(self, call: Call) -> int:
        """How long this call may still take."""
        return max(0, call.until_ns - self.store.clock.monotonic_ns() - DEADLINE_MARGIN_NS)

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

    def _start(self, op: str, context: Context, tenant: str, request_id: str) -> Call:
        now_ns = self.store.clock.monotonic_ns()
        left_s = cast("float | None", context.time_remaining())  # None without a deadline
        left_ns = WAIT_NS_DEFAULT if left_s is None else int(left_s * 1e9)
        record = RecordBuilder(
            op,
            request_id[:TEXT_BYTES_MAX],
            tenant,
            now_ns,
            self.store.clock.wall_s(),
            settings=self._settings,
        )
        return Call(None, now_ns + left_ns, record)

    def _admit(self, call: Call, tenant: str, secret: bytes | None, request_id: str) -> None:
        if self._active > self.limits.concurrent_calls_max:
            raise NoSpace(
                Reason.LIMIT_QUEUE,
                f"{self._active - 1} calls are under way",
                "limits.concurrent_calls_max",
            )
        if secret is not None:
            call.session = self.store.session_by_secret(secret, tenant)
            if call.session is None:
                raise KVStoreError(Reason.SESSION_UNKNOWN, "attach first")
            call.record.engine_id = call.session.engine_id
        bound_text(request_id, "request_id")
        call.record.stage("input", self.store.clock.monotonic_ns())

    async def _fail(self, call: Call, context: Context, error: KVStoreError) -> None:
        call.reason = error.reason
        call.record.fail(error.reason, error.detail)
        await context.abort(
            status.code_of(error.reason),
            str(error),
            trailing_metadata=((status.DETAIL_KEY, status.detail_of(error)),),
        )

    def _finish(self, op: str, call: Call) -> None:
        now_ns = self.store.clock.monotonic_ns()
        record = call.record.finish(call.reason, now_ns)
        if self.ring is not None:
            self.ring.append(record)
        self.metrics.request(op, call.reason, call.tier, record.elapsed_us / 1e6)


def bound_text(text: str, name: str) -> None:
    """Refuses a name from the wire that is too long or not printable."""
    if len(text.encode()) > TEXT_BYTES_MAX or not (text == "" or text.isprintable()):
        raise BadRequest(
            Reason.BAD_NAME, f"{name} is not printable text of {TEXT_BYTES_MAX} bytes at most"
        )
