"""A session with one daemon process, and the deadline of an operation: what all modules share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvstore.model.reasons import Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import AttachStream, CallFailed, Transport
from kvstore_client.pools import Pools
from kvstore_client.regions import Memory

__all__ = ["Clock", "Deadline", "Session", "end_session", "session_of"]

SECRET_BYTES = 16
NS_PER_MS = 1_000_000

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Deadline:
    """One budget that all steps of an operation share."""

    until_ns: int
    clock: Clock

    def left_s(self) -> float:
        """Seconds; never negative."""
        return max(0.0, (self.until_ns - self.clock()) / 1e9)

    def left_ms(self) -> int:
        return int(self.left_s() * 1e3)

    @property
    def passed(self) -> bool:
        return self.clock() >= self.until_ns


@dataclass(eq=False, slots=True)
class Session:
    """One session with one daemon process. Everything that was learnt in it is void with it."""

    secret: bytes
    instance_id: bytes
    daemon_version: str
    tiers: tuple[str, ...]
    limits: pb.Limits
    transport: Transport
    memory: Memory | None = None
    stream: AttachStream | None = None
    detail: str = ""
    fd_fetch: bool = False
    """Whether bytes of a lease can be had over the fd socket, as far as is known."""
    nonces: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Names for calls that grant a lease: see `steps.granted`."""
    spaces: dict[bytes, Any] = field(default_factory=dict)
    pools: Pools = field(default_factory=Pools)

    @property
    def keys_per_call_max(self) -> int:
        return max(1, self.limits.keys_per_call_max or 1)


def session_of(welcome: pb.Welcome, transport: Transport) -> Session:
    """The session that a Welcome describes. Raises CallFailed if it is none."""
    if len(welcome.session) != SECRET_BYTES or not welcome.instance_id:
        raise CallFailed(Reason.INTERNAL, "the daemon's Welcome is incomplete", outage=True)
    return Session(
        secret=welcome.session,
        instance_id=welcome.instance_id,
        daemon_version=welcome.daemon_version,
        tiers=tuple(welcome.tiers),
        limits=welcome.limits,
        transport=transport,
        fd_fetch=welcome.fd_socket and welcome.fd_fetch,
        pools=Pools(tuple(welcome.device_uuids)),
    )


def end_session(session: Session) -> None:
    """Gives back everything of it that is in this process. Idempotent."""
    if session.memory is not None:
        session.memory.close()
    if session.stream is not None:
        session.stream.end()
    session.transport.close()
