"""The client for asyncio: the same operations, driven in threads of its own.

The loop's thread never hashes, copies or waits, unless a GPU has the token ids: they are right only
on the stream of the thread that has made them. A cancelled call ends its leases, and does not
return to the caller while a copy into the caller's memory is under way.

gRPC's own asyncio client is not used: its poller thread stays inside gRPC for good, and a fork of
such a process leaves the child broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from kvstore.model.cost import PrefillCost
from kvstore.model.fingerprint import Fingerprint, Verdict
from kvstore.model.keys import BlockKey, Extras, Tokens
from kvstore.model.plan import Overlap
from kvstore.model.reasons import Reason
from kvstore_client import calls, space_layers
from kvstore_client.aio_layers import AsyncLayerFetch, AsyncLayerPush
from kvstore_client.channel import CallFailed, Transport
from kvstore_client.config import ClientConfig
from kvstore_client.device import Driver
from kvstore_client.layer_writes import LayerPushing
from kvstore_client.outcomes import report_of
from kvstore_client.results import (
    NO_ADVICE,
    Compared,
    Connection,
    Fetched,
    Hit,
    KeyExplanation,
    Presence,
    Pushed,
    Rank,
    SpaceStatus,
)
from kvstore_client.root import Prepared, Root, typed_error
from kvstore_client.session import Deadline
from kvstore_client.spaces import KeysOrHit, SpaceCore, TokensOrKeys
from kvstore_client.steps import (
    Local,
    Step,
    Stream,
)
from kvstore_client.tolerance import Tolerance
from kvstore_client.views import Views

__all__ = ["AsyncClient", "AsyncSpace"]

GRACE_S = 0.05
"""An operation keeps its deadline by itself; this long after it one that is stuck in line is given
up."""

T = TypeVar("T")


class _Progress:
    """Where an operation is, seen from the loop. It stops before its next step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._in_memory = False

    def may_go_on(self, step: Step | None) -> bool:
        with self._lock:
            if not self._stopped:
                self._in_memory = isinstance(step, Local | Stream)
            return not self._stopped

    def stop(self) -> bool:
        """True if the caller's memory is in use until the operation has ended."""
        with self._lock:
            self._stopped = True
            return self._in_memory


async def _run(
    root: Root,
    prepare: Callable[[], Prepared[T]],
    deadline_ms: int | None,
    late: Callable[[], T] | None,
) -> T:
    """Runs an operation in the client's threads. `late` makes the result of one that never began;
    None: Unavailable is raised.
    """
    return await _drive(root, prepare, root.deadline(deadline_ms), late)


async def _run_prepared(root: Root, prepared: Prepared[T], deadline: Deadline) -> T:
    """The same for one whose failure makes a result that says so."""
    failed = prepared.failed
    assert failed is not None
    late = Reason.DEADLINE_EXCEEDED
    return await _drive(root, lambda: prepared, deadline, lambda: failed(late, late.text, ()))


async def _drive(
    root: Root, prepare: Callable[[], Prepared[T]], deadline: Deadline, late: Callable[[], T] | None
) -> T:
    workers = root.workers()
    progress = _Progress()

    def work() -> T:
        if not progress.may_go_on(None):
            raise CallFailed(Reason.CANCELLED)
        return root.run(prepare(), deadline, progress.may_go_on)

    future = asyncio.get_running_loop().run_in_executor(workers, work)
    try:
        done, _ = await asyncio.wait({future}, timeout=deadline.left_s() + GRACE_S)
        if not done:
            await _stop(progress, future)
    except asyncio.CancelledError:
        await _stop(progress, future)
        raise
    if not future.done():
        if late is None:
            raise typed_error(CallFailed(Reason.DEADLINE_EXCEEDED, "all async_threads are busy"))
        return late()
    try:
        return future.result()
    except CallFailed as failure:
        raise typed_error(failure) from None
    finally:
        del future, done  # it holds what it raises, which holds this frame: see `steps.drive`


async def _stop(progress: _Progress, future: asyncio.Future[Any]) -> None:
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    in_memory = progress.stop()
    while in_memory and not future.done():
        # Copies are short; whoever cancels twice waits for them as well.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({future})


class AsyncClient:
    """As `Client`, with coroutines. Not bound to a loop."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        config: ClientConfig | None = None,
        engine_id: str = "",
        group: bytes | None = None,
        transport: Callable[[], Transport] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        device: Driver | None = None,
    ) -> None:
        self._root = Root(target, config, engine_id, group, transport, clock, device)
        self._finalizer = weakref.finalize(self, self._root.close)

    def space(self, fingerprint: Fingerprint, rank: int | Rank = 0) -> AsyncSpace:
        """See Client.space."""
        return AsyncSpace(SpaceCore(self._root, fingerprint, rank))

    async def connection(self, deadline_ms: int | None = None) -> Connection:
        """See Client.connection."""
        prepared = Prepared(
            lambda context: calls.connection(),
            lambda reason, detail, _: Connection("", reason, detail=detail),
        )
        return await _run(
            self._root,
            lambda: prepared,
            deadline_ms,
            lambda: Connection("", Reason.DEADLINE_EXCEEDED),
        )

    async def close(self) -> None:
        """See Client.close."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncSpace:
    """As `Space`, with coroutines; the arguments and results are described there."""

    def __init__(self, core: SpaceCore) -> None:
        self._core = core

    @property
    def block_bytes(self) -> int:
        return self._core.spec.layout.block_bytes

    @property
    def part_bytes(self) -> int:
        return self._core.spec.layout.part_bytes

    @property
    def block_tokens(self) -> int:
        return self._core.spec.block_tokens

    def _prepared_for(
        self, given: tuple[Any, ...], prepare: Callable[[], Prepared[T]]
    ) -> Callable[[], Prepared[T]]:
        """The same, but here and now for a GPU's tensor: its current stream is this thread's."""
        if not any(map(self._core.root.device.owns, given)):
            return prepare
        prepared = prepare()
        return lambda: prepared

    async def _prepared_layers(
        self, given: tuple[Any, ...], prepare: Callable[[], Prepared[T]]
    ) -> Prepared[T]:
        """What `prepare` makes, in another thread, since it hashes and allocates. It comes first: a
        result that tells of a failure needs it.
        """
        return await asyncio.to_thread(self._prepared_for(given, prepare))

    def keys(
        self, tokens: Tokens, *, salt: bytes = b"", extras: Extras | None = None
    ) -> list[BlockKey]:
        """See Space.keys. In this thread: about 1 us a block."""
        return self._core.keys(tokens, salt=salt, extras=extras)

    async def status(self, *, deadline_ms: int | None = None) -> SpaceStatus:
        return await _run(
            self._core.root,
            self._core.status,
            deadline_ms,
            lambda: SpaceStatus(Verdict.INCOMPATIBLE, Reason.DEADLINE_EXCEEDED),
        )

    async def lookup(
        self,
        tokens_or_keys: TokensOrKeys,
        *,
        prefill: PrefillCost | None = None,
        overlap: Overlap = Overlap.SERIAL,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Hit:
        return await _run(
            self._core.root,
            self._prepared_for(
                (tokens_or_keys,),
                lambda: self._core.lookup(tokens_or_keys, prefill, overlap, request_id),
            ),
            deadline_ms,
            lambda: Hit(0, 0, b"", (), NO_ADVICE, Reason.DEADLINE_EXCEEDED),
        )

    async def presence(
        self, keys: Sequence[BlockKey], *, request_id: str = "", deadline_ms: int | None = None
    ) -> Presence:
        return await _run(
            self._core.root,
            lambda: self._core.presence(keys, request_id),
            deadline_ms,
            lambda: Presence((False,) * len(keys), Reason.DEADLINE_EXCEEDED),
        )

    async def fetch(
        self,
        keys: KeysOrHit,
        out: Any = None,
        *,
        part: bool = False,
        wait_ms: int = 0,
        all_or_nothing: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Fetched:
        prepare = self._prepared_for(
            (out,),
            lambda: self._core.fetch(
                keys,
                out,
                part=part,
                wait_ms=wait_ms,
                all_or_nothing=all_or_nothing,
                request_id=request_id,
            ),
        )
        return await _run(
            self._core.root,
            prepare,
            deadline_ms,
            lambda: Fetched(0, 0, out, Reason.DEADLINE_EXCEEDED),
        )

    async def fetch_tensors(
        self,
        keys: KeysOrHit,
        *,
        wait_ms: int = 0,
        all_or_nothing: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Fetched:
        self._core.check_tensors()
        fetched = await self.fetch(
            keys,
            wait_ms=wait_ms,
            all_or_nothing=all_or_nothing,
            request_id=request_id,
            deadline_ms=deadline_ms,
        )
        return fetched if fetched.data is None else self._core.tensors(fetched)

    async def fetch_layers(
        self,
        keys: KeysOrHit,
        out: Any = None,
        *,
        part: bool = False,
        layers_at_once: int = 1,
        wait_ms: int = 0,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> AsyncLayerFetch:
        deadline = self._core.root.deadline(deadline_ms)
        prepared = await self._prepared_layers(
            tuple(out) if isinstance(out, list | tuple) else (out,),
            lambda: space_layers.fetch_layers(
                self._core,
                keys,
                out,
                deadline=deadline,
                part=part,
                layers_at_once=layers_at_once,
                wait_ms=wait_ms,
                request_id=request_id,
            ),
        )
        return AsyncLayerFetch(await _run_prepared(self._core.root, prepared, deadline))

    @contextlib.asynccontextmanager
    async def view(
        self,
        keys: KeysOrHit,
        *,
        wait_ms: int = 0,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> AsyncIterator[Views]:
        views = await _run(
            self._core.root,
            lambda: self._core.view(keys, wait_ms, request_id),
            deadline_ms,
            lambda: Views(None, None, Reason.DEADLINE_EXCEEDED),
        )
        try:
            yield views
        finally:
            views.end()

    async def push(
        self,
        tokens_or_keys: TokensOrKeys,
        data: Any,
        *,
        first_block: int = 0,
        attempt: int = 0,
        durable: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Pushed:
        """See Space.push. A `fill` is called in one of the client's threads."""
        prepare = self._prepared_for(
            (tokens_or_keys, data),
            lambda: self._core.push(
                tokens_or_keys,
                data,
                first_block=first_block,
                attempt=attempt,
                durable=durable,
                request_id=request_id,
            ),
        )
        return await _run(
            self._core.root,
            prepare,
            deadline_ms,
            lambda: Pushed(0, 0, 0, 0, 0, 0, Reason.DEADLINE_EXCEEDED),
        )

    async def push_layers(
        self,
        tokens_or_keys: TokensOrKeys,
        *,
        first_block: int = 0,
        attempt: int = 0,
        durable: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> AsyncLayerPush:
        root, deadline = self._core.root, self._core.root.deadline(deadline_ms)
        prepared = await self._prepared_layers(
            (tokens_or_keys,),
            lambda: space_layers.push_layers(
                self._core,
                tokens_or_keys,
                deadline=deadline,
                first_block=first_block,
                attempt=attempt,
                durable=durable,
                request_id=request_id,
            ),
        )

        def commit(pushing: LayerPushing) -> Awaitable[Pushed]:
            return _run_prepared(root, pushing.prepared(), deadline)

        return AsyncLayerPush(await _run_prepared(root, prepared, deadline), commit)

    def report(
        self,
        hit: Hit,
        fetched: Fetched | None = None,
        *,
        first_token_ms: float = 0.0,
        prefill_ms: float = 0.0,
        computed_tokens: int | None = None,
        prompt_tokens: int = 0,
        failed: bool = False,
        request_id: str = "",
    ) -> bool:
        """See Space.report. Makes no call."""
        return self._core.report(
            report_of(
                hit,
                fetched,
                block_tokens=self.block_tokens,
                first_token_ms=first_token_ms,
                prefill_ms=prefill_ms,
                computed_tokens=computed_tokens,
                prompt_tokens=prompt_tokens,
                failed=failed,
                request_id=request_id,
            )
        )

    async def compare(
        self,
        tokens_or_keys: TokensOrKeys,
        computed: Any,
        *,
        first_block: int = 0,
        tolerance: Tolerance | None = None,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Compared:
        """See Space.compare. A `fill` is called in one of the client's threads."""
        prepare = self._prepared_for(
            (tokens_or_keys, computed),
            lambda: self._core.compare(
                tokens_or_keys,
                computed,
                first_block=first_block,
                tolerance=tolerance,
                request_id=request_id,
            ),
        )
        return await _run(
            self._core.root,
            prepare,
            deadline_ms,
            lambda: Compared(0, 0, 0.0, None, Reason.DEADLINE_EXCEEDED),
        )

    async def explain(
        self, keys: Sequence[BlockKey], *, deadline_ms: int | None = None
    ) -> list[KeyExplanation]:
        return await _run(self._core.root, lambda: self._core.explain(keys), deadline_ms, None)

    def observe_prefill(
        self, prompt_tokens: int, cached_tokens: int, elapsed_ms: float
    ) -> PrefillCost | None:
        """See Space.observe_prefill."""
        self._core.prefill.observe(prompt_tokens, cached_tokens, elapsed_ms * 1e3)
        return self._core.prefill.cost()
