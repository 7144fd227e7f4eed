"""Durable rows on their way to the ledger: written in batches by a worker thread, answered by
ticket. On the event loop's thread.

A row that could not be written is kept, and tried again by itself and with the next ones: what was
decided holds, and an operator who decides it once more learns whether it is durable by then. What
is said to be durable was looked for: a file may have been removed since it was written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.core.effects import Persist
from kvstore.ledger import Ledger

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Between two tries to write what was kept, and two looks at a ledger."""
SAY_AGAIN_S = 60.0


class Rows:
    """The queue of rows and who waits for them."""

    def __init__(self, ledger: Ledger, on_written: Callable[[int], None]) -> None:
        """`on_written(ticket)` is called for each row, also for one that could not be written."""
        self._ledger = ledger
        self._on_written = on_written
        self._queue: list[Persist] = []
        self._kept: dict[tuple[str, bytes], bytes | None] = {}
        self._left: dict[int, int] = {}
        self._failed: set[int] = set()
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._task: asyncio.Task[None] | None = None
        self._added = self._tried = 0  # rows, since the start
        self._batches: list[asyncio.Future[None]] = []  # who waits for the next one to end
        self._works = True
        self._retry_at_s = self._say_at_s = 0.0

    @property
    def busy(self) -> bool:
        return self._task is not None

    def add(self, row: Persist) -> None:
        """Takes a row; `start` sends it on its way."""
        self._queue.append(row)
        self._added += 1
        self._left[row.ticket] = self._left.get(row.ticket, 0) + 1

    def start(self) -> None:
        """Begins to write what is queued, unless a writer is at it."""
        if self._queue and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())

    def retry(self, *, at_once: bool = False) -> None:
        """Begins to write what was kept, and to look after a ledger that needs it, if that was not
        done just now, or `at_once`. Called now and then.
        """
        if (self._kept or self._ledger.tended) and self._task is None:
            loop = asyncio.get_running_loop()
            if at_once or loop.time() >= self._retry_at_s:
                self._task = loop.create_task(self._write())

    async def durable(self, ticket: int, wait_ns: int) -> bool:
        """Waits until every row with this ticket is written; with ticket 0 (no new row), until all
        that was kept is.

        False: the ledger is volatile, writing failed, or it is not done within `wait_ns`.
        """
        loop = asyncio.get_running_loop()
        if ticket in self._left:
            future = self._waiting.setdefault(ticket, loop.create_future())
            await asyncio.wait((future,), timeout=wait_ns / 1e9)
            return future.done() and future.result()
        if self._kept or self._ledger.tended:
            await self._written_once(wait_ns)
        return self._ledger.durable and self._works and not self._kept

    async def settled(self, wait_ns: int) -> bool:
        """Waits until all rows that were added by now are written, however many come meanwhile.
        False as for `durable`.
        """
        added = self._added
        if self._queue or self._kept or self._ledger.tended or self._task is not None:
            await self._written_once(wait_ns)
        done = self._tried >= added and self._works and not self._kept
        return self._ledger.durable and done

    async def _written_once(self, wait_ns: int) -> None:
        """Waits for one try to write all that there is now."""
        loop = asyncio.get_running_loop()
        added, until_s = self._added, loop.time() + wait_ns / 1e9
        while True:
            if self._task is None:
                self._task = loop.create_task(self._write())
            batch: asyncio.Future[None] = loop.create_future()
            self._batches.append(batch)
            await asyncio.wait((batch,), timeout=max(0.0, until_s - loop.time()))
            if self._tried >= added or not batch.done():
                return

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                batch, self._queue = self._queue, []
                rows = {**self._kept, **{(row.table, row.key): row.value for row in batch}}
                changes = [(table, key, value) for (table, key), value in rows.items()]
                try:
                    await loop.run_in_executor(None, self._ledger.put_many, changes)
                    self._kept, self._works = {}, True
                except OSError as error:
                    self._say(len(rows), error, loop.time())
                    self._kept, self._works = rows, False
                    self._failed.update(row.ticket for row in batch)
                self._retry_at_s = loop.time() + RETRY_S
                self._tried += len(batch)
                for row in batch:
                    self._written(row.ticket)
                self._batch_ended()
                if not self._queue:
                    return
        finally:
            self._task = None
            self._batch_ended()

    def _batch_ended(self) -> None:
        batches, self._batches = self._batches, []
        for batch in batches:
            if not batch.done():
                batch.set_result(None)

    def _say(self, count: int, error: OSError, now_s: float) -> None:
        if now_s >= self._say_at_s:
            self._say_at_s = now_s + SAY_AGAIN_S
            log.error(
                "writing %d rows failed, tried again: see the setting state.path: %s", count, error
            )

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
