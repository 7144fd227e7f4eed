"""Load for the dashboard: engines that share prefixes and verify every block, and beside them the
cases that an operator should see: another revision, a fingerprint without one, too many clients, a
prefill that is cheaper than any load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.model.cost import PrefillCost
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.testing.payload import Finding, check, payload, tag_of
from kvstore_client import Client, ClientConfig
from tests.bench.models import fingerprint
from tests.daemon import Daemon
from tests.rawclient import Gone, RawClient, Refused

MODEL = fingerprint("dashboard-64KiB", layers=8, kv_heads=2, head_size=64)
BLOCK_TOKENS = 16
SHARED_BLOCKS, OWN_BLOCKS = 16, 8
PREFIXES, PROMPTS = 6, 240
ENGINES = 2
CROWD = 8
"""More than `prometheus_kit.daemon_in` lets in."""
COST = PrefillCost(120.0, 0.002)
"""About an 8B model on one accelerator, per token; the load is far cheaper."""
CHEAP = PrefillCost(1e-3, 0.0)
CONFIG = ClientConfig(deadline_ms=5_000, prefill=COST)


def prompt(number: int) -> NDArray[np.uint32]:
    """A system prompt that a few share, then a question of its own."""
    shared = np.random.default_rng(number % PREFIXES)
    own = np.random.default_rng(1_000 + number)
    high = 2**31
    return np.concatenate(
        [
            shared.integers(0, high, SHARED_BLOCKS * BLOCK_TOKENS, dtype=np.uint32),
            own.integers(0, high, OWN_BLOCKS * BLOCK_TOKENS, dtype=np.uint32),
        ]
    )


class Engine:
    """One client: looks up, fetches and verifies what is there, pushes the rest. `wrong` are blocks
    that were not what was committed.
    """

    def __init__(self, client: Client, seed: int) -> None:
        self._space = client.space(MODEL)
        self._other = client.space(_altered(weights_revision="another"))
        self._unknown = client.space(_altered(weights_revision=None))
        self._rng = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()

    def request(self) -> None:
        tokens = prompt(min(PROMPTS - 1, int(self._rng.zipf(1.2)) - 1))
        hit = self._space.lookup(tokens)
        fetched = self._space.fetch(hit)
        keys = self._space.keys(tokens)
        for key, data in zip(keys[: fetched.blocks], fetched.data, strict=True):
            right = check(data, [_tag(key)]) is Finding.RIGHT
            self.counts["verified" if right else "wrong"] += 1
        first = fetched.blocks
        if first < len(keys):
            rows = np.stack([payload(_tag(key), _BLOCK_BYTES) for key in keys[first:]])
            self.counts["stored"] += self._space.push(keys, rows, first_block=first).stored
        self.counts["requests"] += 1

    def strange(self) -> None:
        """What should not happen often."""
        tokens = prompt(0)
        self._other.lookup(tokens)
        self._unknown.status()
        self._space.lookup(tokens, prefill=CHEAP)


_BLOCK_BYTES = layout_of(MODEL).block_bytes


def _tag(key: bytes) -> bytes:
    return tag_of("default", MODEL.digest, key, 0)


def _altered(weights_revision: str | None) -> Fingerprint:
    identity = dataclasses.replace(MODEL.identity, weights_revision=weights_revision)
    return dataclasses.replace(MODEL, identity=identity)


def crowd(target: str) -> None:
    """Clients come until one is refused, or the daemon is away, and go."""
    with contextlib.ExitStack() as attached, contextlib.suppress(Refused, Gone, OSError):
        for _ in range(CROWD):
            attached.enter_context(RawClient(target))


class Load:
    """Engines in threads until the end of a `with`. pause_s: between two requests of one."""

    def __init__(self, daemon: Daemon, *, pause_s: float = 0.02, strange_every: int = 20) -> None:
        self._target = daemon.data_socket  # which a daemon has again after a restart
        self._pause_s = pause_s
        self._strange_every = strange_every
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(ENGINES)]
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        try:
            with Client(self._target, config=CONFIG) as client:
                engine = Engine(client, number)
                for request in self._numbers():
                    engine.request()
                    if request % self._strange_every == 0:
                        engine.strange()
                        if number == 0:
                            crowd(self._target)
                self.counts += engine.counts
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _numbers(self) -> Iterator[int]:
        number = 0
        while not self._stop.wait(self._pause_s):
            yield number
            number += 1
