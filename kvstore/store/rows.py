"""Durable rows on their way to the ledger: written in batches by a worker thread, answered by
ticket. On the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.core.effects import Persist
from kvstore.ledger import Ledger

log = logging.getLogger(__name__)


class Rows:
    """The queue of rows and who waits for them."""

    def __init__(self, ledger: Ledger, on_written: Callable[[int], None]) -> None:
        """`on_written(ticket)` is called for each row, also for one that could not be written."""
        self._ledger = ledger
        self._on_written = on_written
        self._queue: list[Persist] = []
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._left: dict[int, int] = {}
        self._failed: set[int] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return self._task is not None

    def add(self, row: Persist) -> None:
        """Takes a row; `start` sends it on its way."""
        self._queue.append(row)
        self._left[row.ticket] = self._left.get(row.ticket, 0) + 1

    def start(self) -> None:
        """Begins to write what is queued, unless a writer is at it."""
        if self._queue and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def durable(self, ticket: int) -> bool:
        """Waits until every row with this ticket is written (0: none has).

        False: the ledger is volatile, or writing failed.
        """
        if ticket not in self._left:
            return self._ledger.durable
        loop = asyncio.get_running_loop()
        future = self._waiting.setdefault(ticket, loop.create_future())
        return await asyncio.shield(future)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                rows = [(row.table, row.key, row.value) for row in batch]
                try:
                    await loop.run_in_executor(None, self._ledger.put_many, rows)
                except OSError:
                    log.exception("writing %d rows failed: see the setting state.path", len(rows))
                    self._failed.update(row.ticket for row in batch)
                for row in batch:
                    self._written(row.ticket)
        finally:
            self._task = None

    def _written(self, ticket: int) -> None:
        self._on_written(ticket)
        self._left[ticket] -= 1
        if self._left[ticket]:
            return
        del self._left[ticket]
        written = self._ledger.durable and ticket not in self._failed
        self._failed.discard(ticket)
        future = self._waiting.pop(ticket, None)
        if future is not None and not future.done():
            future.set_result(written)
