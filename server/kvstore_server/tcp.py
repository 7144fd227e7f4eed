"""The listener of the data service over TCP, and what is read again at SIGHUP.

    tcp = Tcp(settings, read(settings), limits, clock, servicers)
    await tcp.start() ... await tcp.reload() ... await tcp.stop(grace_s)

Bounds. A handshake has five seconds; connections are bounded by `CONNECTIONS_MAX`, those that have
not shaken hands yet included; a connection that is idle for ten minutes or an hour old is asked to
come again, and with that shows its certificate again. gRPC bounds neither the connections of one
address nor a sender that is slow within a call's deadline.

No admin service, whatever the certificate: its verbs reach every tenant's blocks, and an operator
has a shell on the node. On the event loop's thread; files are read on another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvstore.clock import Clock
from kvstore.config import Limits, Settings
from kvstore.model.reasons import Reason, StartError
from kvstore_server import identity, servicer, tls
from kvstore_server.door import Door, Methods
from kvstore_server.listeners import HANDSHAKE_MS, STREAMS_SPARE
from kvstore_server.logs import event
from kvstore_server.malformed import Tolerant

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 1_024
"""At most; an eighth of the file descriptors where those are fewer."""
IDLE_MS: Final = 600_000
AGE_MS: Final = 3_600_000
STREAMS_PER_CONNECTION: Final = 128
SETTING: Final = "tcp.listen"

RELOADS, RELOADS_FAILED = "reloads", "reloads_failed"


class Files(NamedTuple):
    """What the files of the settings say."""

    material: tls.Material
    identity: identity.Identity


def read(settings: Settings) -> Files | None:
    """None without TCP. Raises StartError, which names the setting: of what cannot be read, is not
    safe, or contradicts itself.
    """
    if settings.tcp.address is None:
        return None
    return Files(tls.load(settings.tcp), identity.load(settings))


class Tcp:
    """One gRPC server for all tenants that may come over TCP."""

    def __init__(
        self,
        settings: Settings,
        files: Files,
        limits: Limits,
        clock: Clock,
        servicers: Mapping[str, servicer.StoreServicer],
    ) -> None:
        """Binds the port, which answers only after `start`. Raises StartError if it cannot."""
        self._settings = settings
        self._loading = asyncio.Lock()
        self._reader = ThreadPoolExecutor(1, "kvstore-reload")
        self._credentials = tls.Credentials(files.material)
        self._health = health.aio.HealthServicer()
        self._services = ["", "kvstore.v1.Store"]
        calls_max = limits.concurrent_calls_max + limits.sessions_max + STREAMS_SPARE
        self._door = Door(
            files.identity,
            {tenant: self._methods(one) for tenant, one in servicers.items()},
            clock,
            calls_per_tenant_max=calls_max,
        )
        self._reloads: Counter[str] = Counter({RELOADS: 0, RELOADS_FAILED: 0})
        self._server = grpc.aio.server(options=_options(limits))
        self._server.add_generic_rpc_handlers((self._door,))
        self.address = self._bind()

    @property
    def counts(self) -> dict[str, int]:
        """What has happened, by a closed set of names."""
        return {**self._door.counts, **self._reloads}

    async def start(self) -> None:
        await self._server.start()
        for service in self._services:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def announce_end(self) -> None:
        """Health says NOT_SERVING from now on; calls are still taken."""
        for service in self._services:
            await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls; those under way get `grace_s` to end, then are cancelled."""
        await self._server.stop(grace_s)
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def reload(self) -> bool:
        """Reads certificates and tokens again. If anything in them is wrong all stays as it was."""
        async with self._loading:
            loop = asyncio.get_running_loop()
            try:
                files = await loop.run_in_executor(self._reader, read, self._settings)
            except StartError as error:
                self._reloads[RELOADS_FAILED] += 1
                event(
                    log,
                    logging.ERROR,
                    "certificates and tokens stay as they were",
                    setting=error.setting,
                    why=error.detail,
                )
                return False
            assert files is not None
            self._credentials.exchange(files.material)
            ended = self._door.exchange(files.identity)
            self._reloads[RELOADS] += 1
            event(log, logging.INFO, "certificates and tokens were read again", calls_ended=ended)
            return True

    def _methods(self, one: servicer.StoreServicer) -> Methods:
        """All that a tenant can call: his data service, health and reflection."""
        methods = Methods()
        servicer.register(one, cast(grpc.aio.Server, methods))
        patched = cast(
            grpc.aio.Server, Tolerant(cast(grpc.aio.Server, methods), one.refuse_malformed)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, patched)
        names = ["kvstore.v1.Store", health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflected = reflection.aio.ReflectionServicer(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(  # type: ignore[no-untyped-call]
            reflected, patched
        )
        return methods

    def _bind(self) -> str:
        address = self._settings.tcp.address
        assert address is not None, "there is a listener only with tcp.listen"
        host, port = address
        shown = f"[{host}]" if ":" in host else host
        bound = 0
        with contextlib.suppress(RuntimeError):
            bound = self._server.add_secure_port(f"{shown}:{port}", self._credentials.of_grpc)
        if not bound:
            detail = f"cannot listen on {shown}:{port}: taken, or no address of this machine"
            raise StartError(Reason.START_SOCKET, detail, SETTING)
        return f"{shown}:{bound}"


def connections_max() -> int:
    """How many may be open. Descriptors are left for the sockets and the memory of others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, soft // 8)


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", connections_max()),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_connection_age_ms", AGE_MS),
        # A peer that has vanished without a word is found out in a minute.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # of clients that find out, too
        ("grpc.keepalive_time_ms", 40_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.so_reuseport", 0),
    ]
