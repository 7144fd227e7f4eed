"""Threads that may hang in a device, and do not keep the process from ending.

concurrent.futures joins its threads when the interpreter ends; one that waits for a disk that never
answers would hold a daemon up for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThreads(Executor):
    """An executor of daemon threads, started as they are needed."""

    def __init__(self, workers: int, name: str) -> None:
        self._workers = workers
        self._name = name
        self._guard = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # the caller's, who asks the future
                future.set_exception(error)

        with self._guard:
            if self._ended:
                raise RuntimeError("these threads have ended")
            self._calls.put(call)
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._workers:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._guard:
            if not self._ended:
                self._ended = True
                if cancel_futures:
                    self._drop()
                for _ in self._threads:
                    self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _drop(self) -> None:
        while True:
            try:
                self._calls.get_nowait()
            except queue.Empty:
                return

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._guard:
                self._idle += 1


class LooseThreads(ThreadPoolExecutor):
    """Device threads where an event loop wants its default executor; nobody waits for their end."""

    def __init__(self, workers: int, name: str) -> None:
        super().__init__(1)  # which starts none by itself
        self._threads_of_device = DeviceThreads(workers, name)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads_of_device.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads_of_device.shutdown(wait=False, cancel_futures=cancel_futures)
        super().shutdown(wait=False)
