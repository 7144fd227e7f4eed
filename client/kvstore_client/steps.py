"""Steps: how an operation says what it wants done, and the driver that does it for both clients.

An operation is a generator that yields a step and gets its answer. It decides; a step does: a call
to the daemon, a piece of memory to be mapped, or local work (a copy). The driver runs it and sends
back its value, or throws what went wrong in. An operation holds nothing that outlives it: leases
are released in its `finally`, without waiting.

`guarded` is the client's fail-open boundary: whatever an answer of the daemon does to an operation,
the result is a value with a reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvstore.model.fingerprint import Difference
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import CallFailed
from kvstore_client.link import Link
from kvstore_client.pools import Access
from kvstore_client.session import Deadline, Session

__all__ = [
    "Connect",
    "Context",
    "Local",
    "MapRegion",
    "MapStaging",
    "Operation",
    "Pause",
    "Refusal",
    "Release",
    "Rpc",
    "Step",
    "Stream",
    "UserError",
    "drive",
    "granted",
    "guarded",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """The session, made if there is none. Answer: Session."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A unary call. Answer: a message of type `reply`."""

    session: Session
    method: str
    request: Message
    reply: type[Message]


@dataclass(frozen=True, slots=True)
class MapRegion:
    """Answer: regions.Region. access: by which its pool is opened, if it is a device's."""

    session: Session
    region_id: int
    access: Access | None = None


@dataclass(frozen=True, slots=True)
class MapStaging:
    """Answer: regions.Staging."""

    session: Session
    region_id: int


@dataclass(frozen=True, slots=True)
class Local:
    """Work in this process that may take a while. Answer: what `run` returns."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Stream:
    """Local work that moves bytes through the session's transport. Answer: what `run` returns."""

    session: Session
    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """A little patience, never beyond the deadline. Answer: None."""

    ms: int


Release = Callable[[Session, int, pb.LoadReport | None], None]
"""Ends a lease without waiting."""

Step = Connect | Rpc | MapRegion | MapStaging | Local | Stream | Pause
Operation = Generator[Step, Any, T]


class Refusal(CallFailed):
    """The daemon refuses for a difference between fingerprints."""

    def __init__(self, reason: Reason, detail: str, differences: tuple[Difference, ...]) -> None:
        super().__init__(reason, detail)
        self.differences = differences


class UserError(Exception):
    """An exception of the user's own code on its way out, through everything that is ours."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class Context:
    """What an operation may use besides its steps. `release` ends a lease without waiting,
    `unheard` what the call with this nonce was granted.
    """

    deadline: Deadline
    release: Release
    unheard: Callable[[Session, int], None]
    lost: Callable[[Session], None]
    executor: Executor | None = None


def granted(context: Context, step: Rpc) -> Operation[Any]:
    """A call that grants a lease. If its answer is not heard, what it was granted is given back."""
    request: Any = step.request
    request.nonce = next(step.session.nonces)
    try:
        return (yield step)
    except CallFailed as failure:
        if failure.outage or failure.reason in (Reason.CANCELLED, Reason.DEADLINE_EXCEEDED):
            context.unheard(step.session, request.nonce)
        raise
    except BaseException:
        context.unheard(step.session, request.nonce)
        raise


def perform(step: Step, link: Link, deadline: Deadline) -> Any:
    """Runs one step. Raises CallFailed, or what a user's code raises."""
    if isinstance(step, Local):
        return step.run()
    if isinstance(step, Rpc):
        return link.call(step.session, step.method, step.request, step.reply, deadline.left_s())
    if isinstance(step, Connect):
        return link.session(deadline)
    if isinstance(step, Stream):
        return link.through(step.session, deadline.left_s(), step.run)
    if isinstance(step, Pause):
        time.sleep(min(step.ms / 1e3, deadline.left_s()))
        return None
    memory = step.session.memory
    if memory is None:
        raise CallFailed(Reason.REGION_UNKNOWN, "this session shares no memory")
    if isinstance(step, MapRegion):
        return memory.region(step.region_id, deadline.left_s(), step.access)
    return memory.staging(step.region_id, deadline.left_s())


def drive(
    operation: Operation[T],
    link: Link,
    deadline: Deadline,
    may_go_on: Callable[[Step], bool] = lambda step: True,
) -> T:
    """Runs an operation to its end in this thread. `may_go_on` False before a step ends it there:
    its leases are released, CallFailed(CANCELLED) is raised.
    """
    answer: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                step = operation.send(answer) if failure is None else operation.throw(failure)
            except StopIteration as stop:
                result: T = stop.value
                return result
            answer, failure = None, None
            if not may_go_on(step):
                operation.close()
                raise CallFailed(Reason.CANCELLED)
            try:
                answer = perform(step, link, deadline)
            except Exception as error:  # for the operation to decide, and for `guarded` at last
                failure = error
            except BaseException:
                operation.close()
                raise
    finally:
        # Its traceback holds this frame, and frames with views of shared memory: a region stays
        # mapped, and counted by the daemon, until the garbage collector finds such a circle.
        failure = None


def guarded(
    operation: Operation[T], failed: Callable[[Reason, str, tuple[Difference, ...]], T]
) -> Operation[T]:
    """The same operation, of which nothing comes out but a value, or the user's own exception."""
    try:
        return (yield from operation)
    except Refusal as refusal:
        return failed(refusal.reason, refusal.detail, refusal.differences)
    except CallFailed as failure:
        return failed(failure.reason, failure.detail, ())
    except UserError:
        raise
    except Exception as error:
        log.exception("kvstore: an operation failed; it counts as a miss")
        return failed(Reason.INTERNAL, f"{type(error).__name__}: {error}", ())
