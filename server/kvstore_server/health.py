"""/metrics, /healthz and /readyz over HTTP, in threads beside the event loop.

`/healthz` is 200 while the event loop answers; `/readyz` while the daemon takes requests.
`/metrics` is a snapshot taken on the loop and rendered here. A loop that is stuck for a second
makes all three answer 503: what a supervisor acts on is the loop's life, not this thread's. Nothing
is authenticated: numbers only are shown, on loopback by default.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import logging
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TextIO, TypeVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvstore.model.reasons import Reason, StartError

log = logging.getLogger(__name__)

LOOP_S_MAX = 1.0
CONNECTION_S_MAX = 5.0  # for a client to send its request and to take the answer, all in all
CONNECTIONS_MAX = 16
ACCEPT_RETRY_S = 0.1
_READY = "ready"

T = TypeVar("T")
StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class LoopStuck(Exception):
    """The event loop did not answer in time."""


class OnLoop:
    """Calls functions on the event loop's thread from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float = LOOP_S_MAX) -> None:
        self._loop = loop
        self._timeout_s = timeout_s

    def __call__(self, function: Callable[[], T]) -> T:
        """The function's result. Raises LoopStuck if it was not called within the time."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except Exception as error:  # handed to the thread that asked
                    result.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(call)
            return result.result(self._timeout_s)
        except (concurrent.futures.TimeoutError, RuntimeError) as error:
            result.cancel()
            raise LoopStuck(f"the event loop did not answer: {error}") from error


class HealthApp:
    """The WSGI application. `state` is called on the loop and tells "ready" or what else the daemon
    is."""

    def __init__(
        self, registry: CollectorRegistry, on_loop: OnLoop, state: Callable[[], str]
    ) -> None:
        self._metrics = make_wsgi_app(registry)
        self._on_loop = on_loop
        self._state = state

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _answer(start_response, "405 Method Not Allowed", "only GET")
        try:
            if path == "/metrics":
                return self._numbers(environ, start_response)
            if path == "/healthz":
                return _answer(start_response, "200 OK", self._on_loop(self._state))
            if path == "/readyz":
                state = self._on_loop(self._state)
                ready = "200 OK" if state == _READY else "503 Service Unavailable"
                return _answer(start_response, ready, state)
        except LoopStuck:
            return _answer(start_response, "503 Service Unavailable", "stuck")
        return _answer(start_response, "404 Not Found", "/metrics, /healthz, /readyz")

    def _numbers(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        try:
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        except (TypeError, ValueError):
            # prometheus_client compares the version in the header as it comes.
            return _answer(start_response, "406 Not Acceptable", "no such form of metrics")


class HealthServer:
    """Serves an app in threads. `address` is where it really listens, port 0 resolved; `counts` are
    plain counters for the metrics.
    """

    def __init__(
        self,
        address: tuple[str, int],
        app: HealthApp,
        *,
        connection_s: float = CONNECTION_S_MAX,
    ) -> None:
        """Raises StartError, naming `http.listen`, if it cannot listen there."""
        host, port = address
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(found[0], (str(found[4][0]), int(found[4][1])), connection_s)
        except OSError as error:
            raise StartError(
                Reason.START_SOCKET,
                f"cannot listen on {host}:{port}: {error.strerror}",
                "http.listen",
            ) from None
        self._server.set_app(app)
        shown = f"[{host}]" if ":" in host else host
        self.counts = self._server.counts
        self.address = f"{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvstore-http", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops listening. Requests under way are left to their own threads, which end with the
        process."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread a connection. One that takes too long is cut, and when all threads are taken the
    oldest one makes room: a client that sends a byte now and then keeps no probe out.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: int, address: tuple[str, int], connection_s: float) -> None:
        self.address_family = family
        self._connection_s = connection_s
        self.counts: Counter[str] = Counter()
        self._guard = threading.Lock()
        self._served: dict[socket.socket, float] = {}  # when each came, the oldest first
        # Of those that were cut some may still wait for the event loop.
        self._threads_free = threading.BoundedSemaphore(2 * CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # The base class asks the name service for the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def service_actions(self) -> None:
        """Called by the accepting thread after each accept, and ten times a second."""
        late = time.monotonic() - self._connection_s
        with self._guard:
            self._cut([sock for sock, came in self._served.items() if came < late])

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # No descriptors or memory: the listener stays readable, and the thread would spin.
            self.counts["accept_failed"] += 1
            time.sleep(ACCEPT_RETRY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._threads_free.acquire(blocking=False):
            self.counts["refused"] += 1
            self.shutdown_request(request)
            return
        self.counts["accepted"] += 1
        with self._guard:
            if len(self._served) >= CONNECTIONS_MAX:
                self._cut([next(iter(self._served))])
            self._served[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._guard:
                self._served.pop(request, None)
            self._threads_free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http: a request failed", exc_info=True)

    def _cut(self, sockets: Iterable[socket.socket]) -> None:
        """Its thread finds the end of it, and closes it."""
        for sock in sockets:
            del self._served[sock]
            self.counts["cut"] += 1
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_S_MAX

    def get_stderr(self) -> TextIO:
        """Where wsgiref writes a traceback for each request that failed: nobody bounds those."""
        return cast(TextIO, _Debug())

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class _Debug(io.TextIOBase):
    """Text for the log's lowest level."""

    def write(self, text: str) -> int:
        log.debug("http: %s", text.rstrip())
        return len(text)


def _answer(start_response: StartResponse, status: str, text: str) -> list[bytes]:
    body = f"{text}\n".encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    start_response(status, headers)
    return [body]
