"""One client process of the soak: looks up, fetches and verifies, pushes, holds views; reports
counts as JSON lines.

Run by tests.soak: `python -m tests.soak.worker TARGET SEED WRITER`. It is killed at any moment, so
it holds nothing that only it could clean up.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import numpy as np

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


class Worker:
    """Plays requests over a shared set of prompts; every writer leaves bytes of its own for the
    same key."""

    def __init__(self, client: Client, seed: int, writer: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._writer = writer
        self._spaces: list[tuple[Space, Fingerprint]] = [
            (client.space(model), model) for model in (SMALL, LARGE)
        ]
        self.counts: Counter[str] = Counter()

    def request(self) -> None:
        space, model = self._spaces[int(self._rng.integers(2))]
        keys = self._prompt(space)
        if self._rng.random() < 0.1:
            held = self._view(space, model, keys)
        else:
            held = self._fetch(space, model, keys)
        if held < len(keys):
            self._push(space, model, keys, held)
        self.counts["requests"] += 1

    def _prompt(self, space: Space) -> list[BlockKey]:
        # Skewed, as real prompts are: a few are asked for often, most are rare.
        number = min(PROMPTS - 1, int(self._rng.zipf(1.3)) - 1)
        tokens = np.random.default_rng(number).integers(0, 2**31, BLOCKS_MAX * 16, dtype=np.uint32)
        return space.keys(tokens[: int(self._rng.integers(1, BLOCKS_MAX + 1)) * 16])

    def _fetch(self, space: Space, model: Fingerprint, keys: list[BlockKey]) -> int:
        out = np.empty((len(keys), layout_of(model).block_bytes), np.uint8)
        fetched = space.fetch(keys, out)
        for index in range(fetched.blocks):
            self._verify(out[index], model, keys[index])
        self.counts[f"fetch {fetched.reason.name}"] += 1
        return fetched.blocks

    def _view(self, space: Space, model: Fingerprint, keys: list[BlockKey]) -> int:
        with space.view(keys) as views:
            copies = [np.array(array) for array in views.arrays]
            held = views.blocks
        if views.valid:
            for index in range(held):
                self._verify(copies[index], model, keys[index])
        self.counts["views" if views.valid else "views invalid"] += 1
        return held

    def _push(self, space: Space, model: Fingerprint, keys: list[BlockKey], first: int) -> None:
        length = layout_of(model).block_bytes
        rows = np.stack(
            [payload(self._tag(model, key, self._writer), length) for key in keys[first:]]
        )
        pushed = space.push(keys, rows, first_block=first)
        self.counts["blocks stored"] += pushed.stored
        self.counts[f"push {pushed.reason.name}"] += 1

    def _verify(self, data: np.ndarray, model: Fingerprint, key: bytes) -> None:
        finding = check(data, [self._tag(model, key, writer) for writer in range(WRITERS)])
        self.counts["blocks verified"] += 1
        if finding is not Finding.RIGHT:
            self.counts["wrong"] += 1
            print(json.dumps({"wrong": finding.value, "key": key.hex()[:8]}), flush=True)

    @staticmethod
    def _tag(model: Fingerprint, key: bytes, writer: int) -> bytes:
        return tag_of(TENANT, model.digest, key, writer)


def main() -> None:
    target, seed, writer = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Client(target, config=ClientConfig(deadline_ms=5_000)) as client:
        worker = Worker(client, seed, writer)
        reported = time.monotonic()
        while True:
            worker.request()
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                print(json.dumps({"counts": worker.counts}), flush=True)
                worker.counts.clear()


if __name__ == "__main__":
    main()
