"""Processes that use the client and are forked, killed or frozen: `python -m
tests.integration.sdk_child VERB SOCKET`. Each prints one JSON line and ends with exit code 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore_client import AsyncClient, Client, ClientConfig
from tests.client_kit import model, rows, tokens

MODEL = model()
CHILD_S = 15.0


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs `work` in a forked child; what it returned, or how it failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = {"raised": repr(error)}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    end = time.monotonic() + CHILD_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with os.fdopen(reading, "rb") as pipe:
                data = pipe.read()
            return json.loads(data) if data else {"status": status}
        threading.Event().wait(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return {"hung": True}


def memory_of_the_store() -> int:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return sum("memfd:kvstore" in line for line in maps)


def fork(path: str) -> None:
    """The child works with the same objects, again and again; the parent's session lives on."""
    with Client(path, config=ClientConfig(deadline_ms=5_000)) as client:
        space = client.space(MODEL)
        prompt, data = tokens(8), rows(8, space.block_bytes)
        keys = space.keys(prompt)
        stored = space.push(prompt, data).stored
        instance = client.connection()
        children = []
        with space.view(keys) as views:
            for number in range(6):

                def work(number: int = number) -> dict[str, Any]:
                    inherited = memory_of_the_store()
                    fetched = space.fetch(keys)
                    other = tokens(2, seed=100 + number)
                    pushed = space.push(other, rows(2, space.block_bytes))
                    if number % 2:
                        client.close()
                    return {
                        "blocks": fetched.blocks,
                        "right": bool(np.array_equal(fetched.data, data)),
                        "pushed": pushed.stored,
                        "inherited": inherited,
                        "why": fetched.reason.name,
                    }

                children.append(in_child(work))
            valid = views.valid
        again = space.fetch(keys)
        say(
            stored=stored,
            children=children,
            view_valid=valid,
            parent=again.blocks,
            same_session=client.connection() == instance,
        )


def fork_while_busy(path: str) -> None:
    """Other threads are in the middle of calls, waiting ones too, when the process forks."""
    client = Client(path, config=ClientConfig(deadline_ms=3_000))
    space = client.space(MODEL)
    prompt = tokens(8)
    keys = space.keys(prompt)
    space.push(prompt, rows(8, space.block_bytes))
    absent = space.keys(tokens(3, seed=9))
    stop = threading.Event()
    done = [0, 0, 0]

    def read() -> None:
        while not stop.is_set():
            done[0] += space.fetch(keys).blocks

    def wait() -> None:
        while not stop.is_set():
            space.fetch(absent, wait_ms=2_000)
            done[1] += 1

    def write() -> None:
        while not stop.is_set():
            done[2] += space.push(tokens(4, seed=done[2]), rows(4, space.block_bytes)).stored

    threads = [threading.Thread(target=one) for one in (read, read, wait, write)]
    for thread in threads:
        thread.start()

    def work() -> dict[str, Any]:
        fetched = space.fetch(keys)
        return {"blocks": fetched.blocks, "why": fetched.reason.name}

    children, slowest = [], 0.0
    for _ in range(12):
        began = time.monotonic()
        children.append(in_child(work))
        slowest = max(slowest, time.monotonic() - began)
    stop.set()
    for thread in threads:
        thread.join(10)
    say(children=children, slowest=slowest, parent=space.fetch(keys).blocks, alive=done)
    client.close()


def fork_without_support(path: str) -> None:
    """gRPC's fork handlers are switched off by the environment."""
    client = Client(path, config=ClientConfig(deadline_ms=1_000))
    space = client.space(MODEL)
    keys = space.keys(tokens(2))
    space.push(tokens(2), rows(2, space.block_bytes))

    def work() -> dict[str, Any]:
        began = time.monotonic()
        fetched = space.fetch(keys)
        return {
            "blocks": fetched.blocks,
            "why": fetched.reason.name,
            "detail": fetched.detail,
            "seconds": time.monotonic() - began,
        }

    child = in_child(work)
    say(child=child, parent=space.fetch(keys).blocks)
    client.close()


def fork_asyncio(path: str) -> None:
    """An asyncio client before and after a fork, each process with a loop of its own."""

    async def use(space: Any) -> dict[str, Any]:
        fetched = await space.fetch(space.keys(tokens(4)))
        return {"blocks": fetched.blocks, "why": fetched.reason.name}

    async def first() -> tuple[AsyncClient, Any]:
        client = AsyncClient(path)
        space = client.space(MODEL)
        await space.push(tokens(4), rows(4, space.block_bytes))
        return client, space

    client, space = asyncio.run(first())
    child = in_child(lambda: asyncio.run(use(space)))
    say(child=child, parent=asyncio.run(use(space)))
    asyncio.run(client.close())


def fork_stream(path: str) -> None:
    """A session that lives by its gRPC stream ends before the fork and is made anew."""
    client = Client(path, config=ClientConfig(transport="stream"))
    space = client.space(MODEL)
    keys = space.keys(tokens(4))
    space.push(tokens(4), rows(4, space.block_bytes))

    def work() -> dict[str, Any]:
        fetched = space.fetch(keys)
        return {"blocks": fetched.blocks, "why": fetched.reason.name}

    children = [in_child(work) for _ in range(5)]
    say(children=children, parent=space.fetch(keys).blocks)
    client.close()


def idle(path: str) -> None:
    """Uses the store once, says which memory it maps, and tells when that is gone by itself."""
    client = Client(path)
    space = client.space(MODEL)
    keys = space.keys(tokens(4))
    space.push(tokens(4), rows(4, space.block_bytes))
    space.fetch(keys)
    say(mapped=memory_of_the_store())
    sys.stdin.readline()
    began = time.monotonic()
    while memory_of_the_store() and time.monotonic() - began < 5:
        threading.Event().wait(0.002)
    say(mapped=memory_of_the_store(), seconds=time.monotonic() - began)
    sys.stdin.readline()


VERBS = {
    "fork": fork,
    "fork_asyncio": fork_asyncio,
    "fork_stream": fork_stream,
    "fork_while_busy": fork_while_busy,
    "fork_without_support": fork_without_support,
    "idle": idle,
}

if __name__ == "__main__":
    VERBS[sys.argv[1]](sys.argv[2])
