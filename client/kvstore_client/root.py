"""What both clients stand on: the link of this process, deadlines, copy threads, forks.

One root a client. It makes a link when one is needed, and another one in a forked child.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import countOf
from typing import Generic, TypeVar

import kvstore
from kvstore.model.fingerprint import Difference, Fingerprint
from kvstore.model.keys import KEY_BYTES, BlockKey
from kvstore.model.layout import layout_of
from kvstore.model.reasons import BadRequest, KVStoreError, Reason, Unavailable
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import steps
from kvstore_client.calls import SpaceSpec, connection_of
from kvstore_client.channel import CallFailed, Transport
from kvstore_client.config import ClientConfig, check_deadline_ms
from kvstore_client.device import Driver, TorchCuda
from kvstore_client.forks import watch_forks
from kvstore_client.link import PROTOCOL_MAJOR, PROTOCOL_MINOR, Link
from kvstore_client.results import Connection, Rank
from kvstore_client.session import NS_PER_MS, Clock, Deadline
from kvstore_client.steps import (
    Context,
    Operation,
    Step,
    UserError,
)
from kvstore_client.tcp import opener

__all__ = ["Prepared", "Root", "check_text", "typed_error"]

GROUP_BYTES = 16
GROUP_BYTES_MAX = 64
ENGINE_ID_BYTES_MAX = 128

T = TypeVar("T")
Failed = Callable[[Reason, str, tuple[Difference, ...]], T]


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """An operation whose arguments were found right. `failed` None: its failures are raised."""

    start: Callable[[Context], Operation[T]]
    failed: Failed[T] | None


class Root:
    """See the module's docstring."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        config: ClientConfig | None,
        engine_id: str,
        group: bytes | None,
        open_transport: Callable[[], Transport] | None = None,
        clock: Clock = time.monotonic_ns,
        device: Driver | None = None,
    ) -> None:
        self.device: Driver = TorchCuda() if device is None else device
        config = ClientConfig() if config is None else config
        if not isinstance(config, ClientConfig):
            raise BadRequest(Reason.BAD_REQUEST, "config must be a ClientConfig", "config")
        self.config = config
        self.clock = clock
        opening = opener(target, config)  # a wrong target is misuse, whatever the transport
        self._open_transport = open_transport or opening
        self._attach = _attach_request(engine_id, group)
        self._closed = False
        self._pid = os.getpid()
        self._link = self._new_link()
        self._copiers: ThreadPoolExecutor | None = None
        self._workers: ThreadPoolExecutor | None = None
        watch_forks(self)

    def _new_link(self) -> Link:
        return Link(self.config, self._attach, self._open_transport, self.clock)

    # ---------------------------------------------------------------- running operations

    def deadline(self, deadline_ms: int | None) -> Deadline:
        """From now on; the configured one for None."""
        if deadline_ms is None:
            deadline_ms = self.config.deadline_ms
        else:
            check_deadline_ms(deadline_ms)
        return Deadline(self.clock() + deadline_ms * NS_PER_MS, self.clock)

    def run(
        self,
        prepared: Prepared[T],
        deadline: Deadline,
        may_go_on: Callable[[Step], bool] = lambda step: True,
    ) -> T:
        """Runs an operation in this thread, until its deadline at most."""
        link = self.link()
        context = Context(deadline, link.release, link.unheard, link.lost, self._copy_executor())
        operation = prepared.start(context)
        if prepared.failed is not None:
            operation = steps.guarded(operation, prepared.failed)
        try:
            return steps.drive(operation, link, deadline, may_go_on)
        except UserError as user:
            error = user.error
        try:
            # Not in the handler: there it would get the UserError, which holds it, as its context.
            raise error
        finally:
            del error  # nor a circle with this frame: see `drive`

    def link(self) -> Link:
        """This process's link. BadRequest after `close`."""
        if os.getpid() != self._pid:
            self.after_fork_in_child()
        if self._closed:
            raise BadRequest(Reason.BAD_REQUEST, "the client is closed")
        return self._link

    def connection(self) -> Connection:
        """How it is connected now, without a call."""
        session, failure = self.link().peek()
        if session is None:
            return Connection("", failure.reason, detail=failure.detail)
        return connection_of(session)

    def _copy_executor(self) -> ThreadPoolExecutor | None:
        if self.config.copy_threads == 1:
            return None
        if self._copiers is None:
            self._copiers = ThreadPoolExecutor(1, "kvstore-copy")
        return self._copiers

    def workers(self) -> ThreadPoolExecutor:
        """The threads of an asyncio client's operations."""
        self.link()
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self.config.async_threads, "kvstore-async")
        return self._workers

    def close(self) -> None:
        """Ends the session. Idempotent; of no effect on the parent's when called in a child."""
        if os.getpid() != self._pid:
            self.after_fork_in_child()
        if self._closed:
            return
        self._closed = True
        self._link.close()
        for executor in (self._copiers, self._workers):
            if executor is not None:
                executor.shutdown(wait=False)

    # ---------------------------------------------------------------- forks

    def before_fork(self) -> None:
        self._link.before_fork()

    def break_off(self) -> None:
        self._link.break_off()

    def last_before_fork(self) -> None:
        self._link.last_before_fork()

    def after_fork_in_child(self) -> None:
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._link.abandon_in_child()
        self._link = self._new_link()
        self._copiers = self._workers = None


def spec_of(fingerprint: Fingerprint, rank: int | Rank) -> tuple[SpaceSpec, bool]:
    """A space, and whether this rank is the one that writes its part. BadRequest for no such rank,
    or a fingerprint whose blocks have no fixed layout.
    """
    if not isinstance(fingerprint, Fingerprint):
        raise BadRequest(Reason.BAD_FINGERPRINT, "a space is opened with a Fingerprint")
    layout = layout_of(fingerprint)
    if isinstance(rank, Rank) and type(rank.tensor) is type(rank.pipeline) is int:
        part = layout.part_index(rank.tensor, rank.pipeline)
        return SpaceSpec(fingerprint, layout, part), layout.is_writer(rank.tensor)
    if type(rank) is not int:
        raise BadRequest(Reason.BAD_PART, "rank is the index of a part, or a Rank of ints", "rank")
    layout.part(rank)
    return SpaceSpec(fingerprint, layout, rank), True


def typed_error(failure: CallFailed) -> KVStoreError:
    """The error of a call that has to raise."""
    away = (Reason.BREAKER_OPEN, Reason.DEADLINE_EXCEEDED, Reason.DRAINING, Reason.UNAVAILABLE)
    kind = Unavailable if failure.outage or failure.reason in away else KVStoreError
    return kind(failure.reason, failure.detail)


def check_keys(keys: object) -> tuple[BlockKey, ...] | None:
    """`keys` if they are block keys, None if they are something else (tokens)."""
    if isinstance(keys, list | tuple) and keys and isinstance(keys[0], bytes):
        # Counted over maps: a long prompt has thousands of keys, and this runs on every call. As a
        # tuple they are not copied again, neither for the answer nor as the one window of a call.
        given = tuple(keys)
        all_bytes = countOf(map(type, given), bytes) == len(given)
        if not all_bytes or countOf(map(len, given), KEY_BYTES) != len(given):
            raise BadRequest(
                Reason.BAD_KEY_LENGTH, f"a key is {KEY_BYTES} bytes and nothing else", "keys"
            )
        return given
    return None


def check_text(text: object, bytes_max: int, setting: str) -> None:
    """BadRequest naming `setting` unless it is a str that a message can carry."""
    try:
        # Strictly: a lone surrogate is no text for protobuf.
        fits = type(text) is str and len(text.encode()) <= bytes_max
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise BadRequest(
            Reason.BAD_NAME,
            f"{setting} must be a str of valid Unicode, at most {bytes_max} bytes of UTF-8",
            setting,
        )


def _attach_request(engine_id: str, group: bytes | None) -> pb.AttachRequest:
    if group is None:
        group = secrets.token_bytes(GROUP_BYTES)
    if type(group) is not bytes or not 0 < len(group) <= GROUP_BYTES_MAX:
        raise BadRequest(
            Reason.BAD_NAME, f"group must be bytes, 1 to {GROUP_BYTES_MAX} of them", "group"
        )
    check_text(engine_id, ENGINE_ID_BYTES_MAX, "engine_id")
    return pb.AttachRequest(
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        client_name=f"kvstore-python/{kvstore.__version__}",
        engine_id=engine_id,
        group_id=group,
    )
