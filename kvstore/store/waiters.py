"""Calls that wait for a lease: until the core says that it is ready, until it ends, or until their
time is over. On the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Waiters:
    """Who waits for which lease, by session. Several calls may wait for one lease."""

    def __init__(self) -> None:
        self._by_lease: dict[int, dict[asyncio.Future[None], int]] = {}

    def __len__(self) -> int:
        return len(self._by_lease)

    async def wait(self, lease_id: int, session_id: int, wait_ns: int) -> bool:
        """Waits for `wake`; False if `wait_ns` is over first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._by_lease.setdefault(lease_id, {})
        waiting[future] = session_id
        try:
            woken, _ = await asyncio.wait((future,), timeout=wait_ns / 1e9)
        finally:
            del waiting[future]
            if not waiting:
                self._by_lease.pop(lease_id, None)
        return bool(woken)

    def wake(self, lease_ids: Iterable[int]) -> None:
        """These leases are ready, or are over."""
        for lease_id in lease_ids:
            for future in self._by_lease.get(lease_id, ()):
                _wake(future)

    def wake_session(self, session_id: int) -> None:
        """The session is over, and every lease of it."""
        for waiting in self._by_lease.values():
            for future, waiter in waiting.items():
                if waiter == session_id:
                    _wake(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
