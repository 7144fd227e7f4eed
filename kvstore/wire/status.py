"""Errors to gRPC statuses and back: one table, used by the daemon's RPC boundary and the SDK's
error mapping.

A status tells the kind; the trailing metadata `kvstore-error-bin` holds an ErrorDetail with the
reason, its origin, the detail and the setting to change. Pure but for grpc's StatusCode enum.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from kvstore.model.reasons import KVStoreError, Reason
from kvstore.wire.v1 import store_pb2 as pb

DETAIL_KEY = "kvstore-error-bin"

RETRY_AFTER_MS = 100
"""Hint with a refusal for lack of room: about the time in which leases of running requests end."""

_CODES: dict[Reason, grpc.StatusCode] = {
    Reason.SESSION_UNKNOWN: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.PROTOCOL_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_SUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.SPACE_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.LEASE_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.SPACE_CLOSED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LEASE_EXPIRED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NO_DURABLE_TIER: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.HELD_FOR_REVIEW: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ABORTED: grpc.StatusCode.ABORTED,
    Reason.REGION_UNKNOWN: grpc.StatusCode.ABORTED,
    Reason.TOO_MANY_KEYS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.PART_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.LIMIT_LEASES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.LIMIT_SESSIONS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.LIMIT_QUEUE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NO_SPACE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.VIEW_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.PIN_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

_REASONS: dict[grpc.StatusCode, Reason] = {
    grpc.StatusCode.UNAVAILABLE: Reason.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: Reason.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.MESSAGE_TOO_LARGE,
    grpc.StatusCode.UNAUTHENTICATED: Reason.SESSION_UNKNOWN,
    grpc.StatusCode.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.NOT_SUPPORTED,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.BAD_REQUEST,
}


def code_of(reason: Reason) -> grpc.StatusCode:
    """The status for a reason; INVALID_ARGUMENT for those that say what is wrong with a request."""
    return _CODES.get(reason, grpc.StatusCode.INVALID_ARGUMENT)


def detail_of(error: KVStoreError) -> bytes:
    """The encoded ErrorDetail of an error."""
    retry_after_ms = RETRY_AFTER_MS if error.reason.is_retryable else 0
    return pb.ErrorDetail(
        reason=pb.Reason.ValueType(int(error.reason)),
        origin=error.reason.origin.value,
        detail=error.detail,
        setting=error.setting or "",
        retry_after_ms=retry_after_ms,
    ).SerializeToString()


def reason_of(code: grpc.StatusCode, metadata: object) -> tuple[Reason, str]:
    """(reason, detail) of a failed call: from the ErrorDetail if there is one, else from the status
    alone."""
    for key, value in metadata if isinstance(metadata, tuple | list) else ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                parsed = pb.ErrorDetail.FromString(value)
            except DecodeError:
                break
            return Reason.from_wire(parsed.reason), parsed.detail
    return _REASONS.get(code, Reason.UNAVAILABLE), code.name
