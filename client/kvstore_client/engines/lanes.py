"""One thread that runs jobs in order, for engines whose own thread must neither copy nor wait.

Promises: `submit` and `cancel` return at once; what a job raises ends that job and nothing else;
after `wait_idle` or `close` no job touches anything. Used by the engine adapters.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Lane"]

log = logging.getLogger(__name__)

Job = TypeVar("Job")


class Lane(Generic[Job]):
    """Jobs of one kind, one after the other.

    `run`: does a job; it must end by itself, since every call that it makes has a deadline. What it
    raises is handed to `failed`. `threaded` False: nothing runs until `run_one`, for tests.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Job], None],
        failed: Callable[[Job], None],
        *,
        threaded: bool = True,
    ) -> None:
        self._run = run
        self._failed = failed
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def submit(self, job: Job) -> bool:
        """False after `close`: the job will not run."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def cancel(self) -> list[Job]:
        """Takes back the jobs that have not begun."""
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
            return jobs

    def wait_idle(self) -> None:
        """Waits until no job is waiting or under way; a lane without a thread runs them here."""
        while self._thread is None and self.run_one():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def close(self) -> list[Job]:
        """Ends the thread after the job that is under way; returns those that never began."""
        with self._changed:
            self._closed = True
        jobs = self.cancel()
        if self._thread is not None:
            self._thread.join()
        return jobs

    def run_one(self) -> bool:
        """Runs one job in this thread. False if there is none."""
        with self._changed:
            if not self._jobs:
                return False
            job = self._jobs.popleft()
            self._busy = True
        try:
            self._run(job)
        except Exception:  # the fail-open boundary: an engine's thread waits for the job's end
            log.exception("kvstore: a job of an engine's adapter failed")
            self._failed(job)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed and not self._jobs:
                    return
            self.run_one()
