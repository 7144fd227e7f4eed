"""One client process of the soak: looks up, fetches and verifies, pushes, holds views; reports
counts as JSON lines.

Run by tests.soak: `python -m tests.soak.worker TARGET SEED WRITER TRAFFIC`. It is killed at any
moment, so it holds nothing that only it could clean up.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.testing.payload import Finding, check, payload, tag_of
from kvstore_client import BlockKey, Client, ClientConfig, Space
from tests.bench.models import fingerprint

TENANT = "default"
WRITERS = 4
PROMPTS = 160
BLOCKS_MAX = 24
REPORT_EVERY_S = 0.5

SMALL = fingerprint("soak-64KiB", layers=8, kv_heads=2, head_size=64)
LARGE = fingerprint("soak-256KiB", layers=16, kv_heads=4, head_size=64)

Bytes = NDArray[np.uint8]


class Traffic:
    """Which prompts are asked for. zipf: a few often, most rarely, as real ones are; uniform: all
    alike; scan: one after the other, the worst for whoever keeps what was used last; mixed: each of
    them for a while.
    """

    def __init__(self, kind: str, rng: np.random.Generator, prompts: int) -> None:
        self._kind = kind
        self._rng = rng
        self._prompts = prompts
        self._next = int(rng.integers(prompts))
        self._made = 0

    def prompt(self) -> int:
        self._made += 1
        kind = self._kind
        if kind == "mixed":
            kind = ("scan", "zipf", "uniform")[self._made // self._prompts % 3]
        if kind == "zipf":
            return min(self._prompts - 1, int(self._rng.zipf(1.3)) - 1)
        if kind == "uniform":
            return int(self._rng.integers(self._prompts))
        self._next = (self._next + 1) % self._prompts
        return self._next


class Blocks:
    """What blocks hold: every writer leaves bytes of its own for the same key. wrong: called with
    each finding.
    """

    def __init__(self, writer: int, writers: int, wrong: Callable[[Finding, bytes], None]) -> None:
        self._writer = writer
        self._writers = range(writers)
        self._wrong = wrong
        self.counts: Counter[str] = Counter()

    def rows(self, model: Fingerprint, keys: Sequence[bytes]) -> Bytes:
        length = layout_of(model).block_bytes
        return np.stack([payload(self._tag(model, key, self._writer), length) for key in keys])

    def verify(self, data: Bytes, model: Fingerprint, key: bytes) -> None:
        finding = check(data, [self._tag(model, key, writer) for writer in self._writers])
        self.counts["blocks verified"] += 1
        if finding is not Finding.RIGHT:
            self.counts["wrong"] += 1
            self._wrong(finding, key)

    @staticmethod
    def _tag(model: Fingerprint, key: bytes, writer: int) -> bytes:
        return tag_of(TENANT, model.digest, key, writer)


class Worker:
    """Plays requests over a shared set of prompts; `counts` is for who reports."""

    def __init__(
        self,
        client: Client,
        seed: int,
        blocks: Blocks,
        *,
        traffic: str = "zipf",
        models: Sequence[Fingerprint] = (SMALL, LARGE),
        prompts: int = PROMPTS,
        blocks_max: int = BLOCKS_MAX,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._blocks = blocks
        self._traffic = Traffic(traffic, self._rng, prompts)
        self._blocks_max = blocks_max
        self._spaces: list[tuple[Space, Fingerprint]] = [
            (client.space(model), model) for model in models
        ]

    @property
    def counts(self) -> Counter[str]:
        return self._blocks.counts

    def request(self) -> None:
        space, model = self._spaces[int(self._rng.integers(len(self._spaces)))]
        keys = self._prompt(space)
        kind = self._rng.random()
        if kind < 0.1:
            held = self._view(space, model, keys)
        elif kind < 0.3:
            held = self._fetch_layers(space, model, keys)
        else:
            held = self._fetch(space, model, keys)
        if held < len(keys):
            self._push(space, model, keys, held)
        self.counts["requests"] += 1

    def _prompt(self, space: Space) -> list[BlockKey]:
        blocks = int(self._rng.integers(1, self._blocks_max + 1))
        tokens = prompt_tokens(self._traffic.prompt(), self._blocks_max)
        return space.keys(tokens[: blocks * 16])

    def _fetch(self, space: Space, model: Fingerprint, keys: list[BlockKey]) -> int:
        out = np.empty((len(keys), layout_of(model).block_bytes), np.uint8)
        fetched = space.fetch(keys, out)
        for index in range(fetched.blocks):
            self._blocks.verify(out[index], model, keys[index])
        self.counts[f"fetch {fetched.reason.name}"] += 1
        return fetched.blocks

    def _fetch_layers(self, space: Space, model: Fingerprint, keys: list[BlockKey]) -> int:
        """Some are closed on the way, as by an engine that gives a request up."""
        layers = layout_of(model).layers
        out = np.empty((layers, len(keys), layout_of(model).block_bytes // layers), np.uint8)
        given_up = int(self._rng.integers(8 * layers))
        good = len(keys)
        with space.fetch_layers(keys, out) as fetch:
            for layer in range(layers):
                told = fetch.wait(layer)
                if told > good:
                    raise AssertionError("a layer has more blocks than the one before")
                good = told
                if layer == given_up:
                    self.counts["fetches by layers given up"] += 1
                    return len(keys)
            fetched = fetch.result()
        rows = np.ascontiguousarray(out.swapaxes(0, 1)).reshape(len(keys), -1)
        for index in range(fetched.blocks):
            self._blocks.verify(rows[index], model, keys[index])
        self.counts[f"fetch by layers {fetched.reason.name}"] += 1
        return fetched.blocks

    def _view(self, space: Space, model: Fingerprint, keys: list[BlockKey]) -> int:
        with space.view(keys) as views:
            copies = [np.array(array) for array in views.arrays]
            held = views.blocks
        if views.valid:
            for index in range(held):
                self._blocks.verify(copies[index], model, keys[index])
        self.counts["views" if views.valid else "views invalid"] += 1
        return held

    def _push(self, space: Space, model: Fingerprint, keys: list[BlockKey], first: int) -> None:
        rows = self._blocks.rows(model, keys[first:])
        if self._rng.random() < 0.2:
            layers = layout_of(model).layers
            by_layer = np.asarray(rows).reshape(len(keys) - first, layers, -1).swapaxes(0, 1)
            with space.push_layers(keys, first_block=first) as push:
                for layer in range(layers):
                    push.put(layer, by_layer[layer])
                pushed = push.commit()
        else:
            pushed = space.push(keys, rows, first_block=first)
        self.counts["blocks stored"] += pushed.stored
        self.counts[f"push {pushed.reason.name}"] += 1


def prompt_tokens(number: int, blocks: int) -> NDArray[np.uint32]:
    """The tokens of a prompt, 16 a block."""
    return np.random.default_rng(number).integers(0, 2**31, blocks * 16, dtype=np.uint32)


def say(line: Mapping[str, object]) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    target, seed, writer, traffic = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    blocks = Blocks(writer, WRITERS, lambda what, key: say({"wrong": what.value, "key": key.hex()}))
    with Client(target, config=ClientConfig(deadline_ms=5_000)) as client:
        worker = Worker(client, seed, blocks, traffic=traffic)
        reported = time.monotonic()
        while True:
            worker.request()
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                say({"counts": worker.counts})
                worker.counts.clear()


if __name__ == "__main__":
    main()
