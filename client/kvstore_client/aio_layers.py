"""Transfers by layers, for asyncio: the same handles as `kvstore_client.layers`, with coroutines.

The loop's thread neither copies nor waits. A coroutine that is cancelled ends nothing: that is what
`close` is for, and the end of `async with`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from kvstore_client.layer_writes import LayerPushing
from kvstore_client.layers import GRACE_S, LayerCopying
from kvstore_client.results import Fetched, Pushed

__all__ = ["AsyncLayerFetch", "AsyncLayerPush"]

T = TypeVar("T")


class AsyncLayerFetch:
    """As LayerFetch. Made by `AsyncSpace.fetch_layers`."""

    def __init__(self, copying: LayerCopying) -> None:
        self._copying = copying
        copying.start()
        self.blocks = copying.blocks
        self.layers = copying.layers

    async def wait(self, layer: int) -> int:
        """See LayerFetch.wait."""
        number = self._copying.checked(layer)
        known = await self._until(lambda: self._copying.blocks_of(number))
        return known or 0

    async def result(self) -> Fetched:
        """See LayerFetch.result."""
        await self._until(self._copying.result)
        return await self._closed()

    async def close(self) -> None:
        """See LayerFetch.close. Cancelled or not, it returns when `out` is not written any more."""
        await self._closed()

    async def _closed(self) -> Fetched:
        self._copying.stop()
        return await _to_its_end(self._copying.close)

    async def _until(self, look: Callable[[], T | None]) -> T | None:
        """What `look` gives once it is something, None at the deadline."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def heard() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(changed.set)

        self._copying.listen(heard)
        try:
            while (found := look()) is None:
                try:
                    left_s = self._copying.deadline.left_s() + GRACE_S
                    await asyncio.wait_for(changed.wait(), left_s)
                except asyncio.TimeoutError:
                    return look()
                changed.clear()
            return found
        finally:
            self._copying.unlisten(heard)

    async def __aenter__(self) -> AsyncLayerFetch:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        copying = getattr(self, "_copying", None)
        if copying is not None:
            copying.stop()


async def _to_its_end(close: Callable[[], T]) -> T:
    """Runs it in a thread, and returns when it has ended, cancelled or not: until then the
    caller's memory is in use.
    """
    closing = asyncio.ensure_future(asyncio.to_thread(close))
    try:
        return await asyncio.shield(closing)
    except asyncio.CancelledError:
        while not closing.done():
            # A piece is short; whoever cancels twice waits for it as well.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({closing})
        raise


class AsyncLayerPush:
    """As LayerPush. Made by `AsyncSpace.push_layers`."""

    def __init__(
        self, pushing: LayerPushing, run: Callable[[LayerPushing], Awaitable[Pushed]]
    ) -> None:
        self._pushing = pushing
        self._run = run
        self.wanted = pushing.wanted
        self.layers = pushing.layers

    def put(self, layer: int, data: Any) -> None:
        """See LayerPush.put; returns at once, and is no coroutine."""
        self._pushing.put(layer, data)

    async def commit(self) -> Pushed:
        """See LayerPush.commit."""
        self._pushing.check_complete()
        copies = {asyncio.wrap_future(one) for one in self._pushing.copies()}
        if copies:
            await asyncio.wait(copies)  # not in a thread that they may need
            for one in copies:
                one.cancelled() or one.exception()  # `settle` says it
        return self._pushing.ended(await self._run(self._pushing))

    async def close(self) -> None:
        """See LayerPush.close. Cancelled or not, it returns when `data` is not read any more."""
        await _to_its_end(self._pushing.close)

    async def __aenter__(self) -> AsyncLayerPush:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
