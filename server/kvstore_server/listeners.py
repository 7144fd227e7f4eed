"""The gRPC servers on unix sockets: one a tenant and one for the operator, each with health and
reflection.

A `Gate` is one socket path with its lock, from before it is bound until after it is gone: gRPC
removes the path when a server stops, and the lock makes sure that it is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import quote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvstore.config import Limits, Settings
from kvstore.model.reasons import Reason, StartError
from kvstore.model.sockets import FD_SUFFIX
from kvstore_server import locks
from kvstore_server.boundary import Context
from kvstore_server.malformed import Tolerant

HANDSHAKE_MS = 5_000
STREAMS_SPARE = 64  # calls beyond the bound are refused with a reason by the boundary, not by gRPC
WINDOW_BYTES = 1 << 20
READ_BYTES = 32 << 10

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class Gate:
    """A locked socket path and who may use it."""

    path: str
    setting: str
    mode: int
    gid: int | None
    lock: locks.SocketLock


class Gates:
    """All socket paths of the daemon, locked. `data` by tenant."""

    def __init__(self, settings: Settings) -> None:
        """Raises StartError: START_LOCKED if another daemon has one of them."""
        self._all: list[Gate] = []
        self._writers_trusted = settings.server.trust_folder_writers
        passable = any(t.mode_bits & 0o077 for t in settings.tenants.values())
        folder = locks.prepare_folder(
            settings.server.runtime_dir,
            passable=passable or bool(settings.admin.mode_bits & 0o077),
            setting="server.runtime_dir",
            writers_trusted=self._writers_trusted,
        )
        try:
            self.data = {
                name: self._lock(
                    settings.server.runtime_dir,
                    folder,
                    settings.data_socket(name),
                    f"tenants.{name}",
                    tenant.mode_bits,
                    tenant.group,
                )
                for name, tenant in settings.tenants.items()
            }
            self.admin = self._lock(
                settings.server.runtime_dir,
                folder,
                settings.admin_socket,
                "admin",
                settings.admin.mode_bits,
                "",
            )
        except BaseException:
            self.unlock()
            raise

    def clear_stale(self) -> None:
        """Removes what a dead daemon left. Raises StartError if what is there is not that."""
        for gate in self._all:
            for path in (gate.path, f"{gate.path}{FD_SUFFIX}"):
                locks.clear_stale(path, gate.setting)

    def remove(self) -> None:
        """Removes our sockets."""
        locks.remove_sockets(
            [path for gate in self._all for path in (gate.path, f"{gate.path}{FD_SUFFIX}")]
        )

    def unlock(self) -> None:
        """Lets others have the paths."""
        for gate in self._all:
            gate.lock.close()
        self._all.clear()

    def _lock(
        self, runtime_dir: str, folder: str, path: str, table: str, mode: int, group: str
    ) -> Gate:
        setting = f"{table}.socket"
        inside = os.path.relpath(path, os.path.normpath(runtime_dir))
        real = os.path.join(folder, inside)
        parent = os.path.dirname(real)
        prepared = locks.prepare_folder(
            parent,
            passable=bool(mode & 0o077),
            setting=setting,
            writers_trusted=self._writers_trusted,
        )
        if prepared != parent:
            detail = f"{parent} leads out of {folder}"
            raise StartError(Reason.START_SOCKET, detail, setting)
        gid = locks.group_id(group, f"{table}.group")
        gate = Gate(real, setting, mode, gid, locks.SocketLock(real, setting))
        self._all.append(gate)
        return gate


class Listener:
    """One gRPC server on one gate."""

    def __init__(
        self,
        gate: Gate,
        limits: Limits,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        refuse: Callable[[str, Context], Awaitable[None]],
    ) -> None:
        """Binds the socket, which answers only after `start`. Raises StartError if it cannot.

        `refuse(op, context)` ends a call of health or reflection that cannot be parsed.
        """
        self._health = health.aio.HealthServicer()
        self._services = ["", *services]
        calls_max = limits.concurrent_calls_max + limits.sessions_max + STREAMS_SPARE
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=calls_max, options=_options(limits, calls_max)
        )
        register(self._server)
        patched = cast(grpc.aio.Server, Tolerant(self._server, refuse))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, patched)
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflected = reflection.aio.ReflectionServicer(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(  # type: ignore[no-untyped-call]
            reflected, patched
        )
        try:
            with locks.closed_umask():
                self._server.add_insecure_port(f"unix:{quote(gate.path)}")
        except RuntimeError:
            detail = f"cannot listen on {gate.path}"
            raise StartError(Reason.START_SOCKET, detail, gate.setting) from None
        locks.open_up(gate.path, gate.mode, gate.gid, gate.setting)

    async def start(self) -> None:
        await self._server.start()
        for service in self._services:
            await self._health.set(service, _SERVING)

    async def announce_end(self) -> None:
        """Health says NOT_SERVING from now on; calls are still taken."""
        for service in self._services:
            await self._health.set(service, _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls; those under way get `grace_s` to end, then are cancelled."""
        await self._server.stop(grace_s)


class Serving(Protocol):
    """What listens, whatever on."""

    async def start(self) -> None: ...

    async def announce_end(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


async def stop_all(listeners: Sequence[Serving], grace_s: float, hurry: asyncio.Event) -> None:
    """Stops them together, at once as soon as `hurry` is set."""
    stops = asyncio.gather(*(listener.stop(grace_s) for listener in listeners))
    waiting = asyncio.ensure_future(hurry.wait())
    either: set[asyncio.Future[Any]] = {stops, waiting}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not stops.done():
        stops.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stops
        await asyncio.gather(*(listener.stop(0) for listener in listeners))


def _options(limits: Limits, calls_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_concurrent_streams", calls_max),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # With it two daemons would share a path without an error, and answer in turns.
        ("grpc.so_reuseport", 0),
        # A socket of this machine has no bandwidth to be probed for: a long prompt's keys (256 KiB)
        # come in one window, read in few pieces. A third of gRPC's processor time for them.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.experimental.tcp_min_read_chunk_size", READ_BYTES),
        ("grpc.experimental.tcp_read_chunk_size", READ_BYTES),
    ]
