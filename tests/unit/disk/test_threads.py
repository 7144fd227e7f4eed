"""Threads that may hang: they run what they are given, and end or are left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from kvstore.tiers.disk.threads import DeviceThreads


def test_calls_run_beside_each_other_and_answer() -> None:
    threads = DeviceThreads(3, "test")
    together = threading.Barrier(3)
    names = set(
        threads.map(lambda _: (together.wait(30), threading.current_thread().name)[1], "abc")
    )
    assert len(names) == 3
    assert list(threads.map(len, ["a", "bb", "ccc", "dddd"])) == [1, 2, 3, 4]
    failed = threads.submit(lambda: 1 // 0)
    assert isinstance(failed.exception(30), ZeroDivisionError)
    assert threads.submit(lambda: threading.current_thread().daemon).result(30)
    threads.shutdown()
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(len, "")


def test_no_more_threads_than_are_needed() -> None:
    threads = DeviceThreads(4, "test")
    before = threading.active_count()
    for _ in range(20):
        threads.submit(len, "").result(30)
    assert threading.active_count() <= before + 4
    threads.shutdown()
    assert threading.active_count() == before


def test_what_has_not_begun_can_be_dropped() -> None:
    threads = DeviceThreads(1, "test")
    go_on = threading.Event()
    running = threads.submit(go_on.wait, 30)
    dropped = threads.submit(len, "")
    threads.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    assert running.result(30)
    threads.shutdown()
    assert not dropped.done()


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    program = (
        "import threading\n"
        "from kvstore.tiers.disk.threads import DeviceThreads\n"
        "DeviceThreads(1, 'test').submit(threading.Event().wait)\n"
        "print('end')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "end\n"


def test_a_loop_ends_while_its_default_executor_hangs() -> None:
    program = (
        "import asyncio, threading\n"
        "from kvstore.tiers.disk.threads import LooseThreads\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.set_default_executor(LooseThreads(2, 'test'))\n"
        "    print(await loop.run_in_executor(None, str, 7))\n"
        "    loop.run_in_executor(None, threading.Event().wait)\n"
        "asyncio.run(main())\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, timeout=60, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"7\n"), done.stderr
