"""What tests of the client share: small models, a store in this process, and one face for both
clients, so that one suite runs on them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.model.fingerprint import (
    ORDER_HEADS,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
    attention_kind,
)
from kvstore_client import AsyncClient, Client
from kvstore_client.aio_layers import AsyncLayerFetch, AsyncLayerPush

BLOCK_TOKENS = 4


def model(
    name: str = "m",
    *,
    layers: int = 2,
    heads: int = 2,
    head_size: int = 64,
    ranks: int = 1,
    revision: str | None = "r1",
) -> Fingerprint:
    """Blocks of layers x 2 x heads x 4 x head_size x 2 bytes: 4 KiB as it stands."""
    return Fingerprint(
        Identity(name, weights_revision=revision, config_digest="c"),
        Geometry(attention_kind(heads, heads), layers, heads, head_size),
        Encoding("bfloat16", BLOCK_TOKENS, ORDER_HEADS),
        Placement(tensor_parallel=ranks),
    )


def tokens(blocks: int, seed: int = 0) -> NDArray[np.uint32]:
    """A prompt of so many whole blocks."""
    return np.random.default_rng(seed).integers(0, 2**31, blocks * BLOCK_TOKENS, dtype=np.uint32)


def rows(blocks: int, row_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Bytes to store, another for each seed."""
    return np.random.default_rng(seed + 77).integers(0, 256, (blocks, row_bytes), dtype=np.uint8)


class Blocking:
    """An AsyncClient or AsyncSpace with the face of the client for threads."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name == "space":
            return lambda *args, **more: Blocking(value(*args, **more), self._loop)
        if not asyncio.iscoroutinefunction(value):
            return value
        return lambda *args, **more: self._faced(
            self._loop.run_until_complete(value(*args, **more))
        )

    def _faced(self, result: Any) -> Any:
        """A handle has coroutines, too."""
        is_handle = isinstance(result, AsyncLayerFetch | AsyncLayerPush)
        return Blocking(result, self._loop) if is_handle else result

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @contextlib.contextmanager
    def view(self, *args: Any, **more: Any) -> Iterator[Any]:
        entering = self._inner.view(*args, **more)
        views = self._loop.run_until_complete(entering.__aenter__())
        try:
            yield views
        finally:
            self._loop.run_until_complete(entering.__aexit__(None, None, None))


MakeClient = Callable[..., Any]


@contextlib.contextmanager
def clients(kind: str) -> Iterator[MakeClient]:
    """Makes clients of a kind ("threads" or "asyncio"); all are closed at the end."""
    made: list[Any] = []
    loop = asyncio.new_event_loop()

    def make(target: str = "/fake", **more: Any) -> Any:
        if kind == "threads":
            client: Any = Client(target, **more)
        else:
            client = Blocking(AsyncClient(target, **more), loop)
        made.append(client)
        return client

    try:
        yield make
    finally:
        for client in made:
            client.close()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
