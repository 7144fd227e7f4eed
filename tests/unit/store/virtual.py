"""An event loop whose time is a ManualClock, and a worker pool that works when it is told to.

When nothing is ready to run, the clock jumps to the next timer, so that a wait of minutes takes
none, and ends at exactly its deadline.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvstore.testing.clock import ManualClock


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everything waits, and no timer is set: a deadlock")
        if timeout > 0:
            self._clock.advance_ns(math.ceil(timeout * 1e9))
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's docstring."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_Selector(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.monotonic_ns() / 1e9


class StepPool(ThreadPoolExecutor):
    """Runs what is submitted in the caller's thread: at once, or by `step` if `held`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.held = False
        self._jobs: list[Callable[[], None]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append(lambda: _run(future, work, args, named))
        if not self.held:
            self.step()
        return future

    @property
    def waiting(self) -> int:
        """How much waits to be done."""
        return len(self._jobs)

    def step(self) -> None:
        """Does what is waiting."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()


def _run(
    future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(*args, **named)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
