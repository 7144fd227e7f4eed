"""The store behind an engine that has threads of its own for storage, which wait for the answer.

Pages of the engine's memory are moved by its keys: `exists`, `load`, `store`. Bytes are copied
once, between the daemon's memory and the pieces of the engine's pages.

Promises:
- A call returns by its deadline, and raises nothing because of the store: what is not there in time
  is a miss, or is not stored.
- `load` answers how many pages from the first one on hold what was stored; pages behind them may
  hold anything. `store` answers True only if the store has all pages, or another writer is storing
  them.
- After `reset` nothing that was stored before is found.

Knows no engine: `sglang` drives it, and so do the tests.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.model.keys import BlockKey
from kvstore.model.reasons import Reason
from kvstore_client.client import Space
from kvstore_client.engines.async_tier import Spaces
from kvstore_client.engines.refusals import Refusals
from kvstore_client.engines.tier_values import Deadlines

__all__ = ["Page", "PageStore"]

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Page = Sequence[Bytes]
"""The pieces of one page, in the order in which they are stored: uint8, any sizes."""

KEYS_MAX: Final = 65_536
"""Keys that are remembered: a prompt's are asked for, loaded and stored in three calls."""
SCRATCH_BYTES: Final = 16 << 20
"""Of blocks that are fetched before they are copied to where the engine wants them."""
IN_PLACE_NOT: Final = frozenset({Reason.NOT_SUPPORTED, Reason.VIEW_LIMIT})
"""Of a view: the blocks have to be fetched instead."""


class PageStore:
    """See the module's docstring. For several threads.

    page_bytes: of one page, all pieces together. key_of: the store's key for an engine's key.
    durable: what is stored is on disk before `store` answers True.
    """

    def __init__(
        self,
        spaces: Spaces,
        page_bytes: int,
        key_of: Callable[[str], BlockKey],
        *,
        deadlines: Deadlines | None = None,
        durable: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._spaces = spaces
        self.page_bytes = page_bytes
        self._key_of = functools.lru_cache(KEYS_MAX)(key_of)
        self._deadlines = deadlines or Deadlines()
        self._durable = durable
        self._clock_ns = clock_ns
        self._counted: Counter[str] = Counter()
        self._refusals = Refusals(log)
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[str]) -> int:
        """How many of the keys, from the first one on, are there and worth loading."""
        if not keys:
            return 0
        hit = self._spaces.current().lookup(self._keys(keys), deadline_ms=self._deadlines.lookup_ms)
        loaded = min(hit.blocks, hit.plan.load_blocks)
        self._count("lookup_hit", loaded)
        self._count("lookup_declined", hit.blocks - loaded)
        self._count("lookup_miss", len(keys) - hit.blocks)
        self._refusals.tell(hit)
        return loaded

    def load(self, keys: Sequence[str], pages: Sequence[Page]) -> int:
        """Fills pages[i] with what keys[i] names. How many, from the first one on, are right.

        ValueError if there are not as many pages as keys, or one has not page_bytes.
        """
        self._check(keys, pages)
        if not keys:
            return 0
        deadline_ns = self._clock_ns() + self._deadlines.load_ms * 1_000_000
        space = self._spaces.current()
        if all(len(page) == 1 for page in pages):
            loaded = self._fetch(space, self._keys(keys), [page[0] for page in pages], deadline_ns)
        else:
            loaded = self._load_pieces(space, keys, pages, deadline_ns)
        self._count("load_loaded", loaded)
        self._count("load_failed", len(keys) - loaded)
        return loaded

    def _load_pieces(
        self, space: Space, keys: Sequence[str], pages: Sequence[Page], deadline_ns: int
    ) -> int:
        """Out of the daemon's memory in one copy; what one session may not look at there, or a
        process that does not map it, through memory of our own.
        """
        names = self._keys(keys)
        done = 0
        while done < len(keys):
            filled = 0
            left_ms = self._left_ms(deadline_ns)
            with space.view(names[done:], deadline_ms=left_ms) as views:
                for block, page in zip(views.arrays, pages[done:], strict=False):
                    if self._clock_ns() >= deadline_ns:
                        return done + filled if views.valid else done
                    _scatter(block, page)
                    filled += 1
            # Looked at after the last byte was read: a change makes all of them doubtful.
            if not views.valid:
                return done
            done += filled
            if views.reason not in IN_PLACE_NOT:
                break
            if not filled:
                return done + self._load_through(space, names[done:], pages[done:], deadline_ns)
        return done

    def _load_through(
        self, space: Space, names: list[BlockKey], pages: Sequence[Page], deadline_ns: int
    ) -> int:
        """Fetches into memory of our own, some blocks at a time, and copies from there."""
        rows = max(1, min(len(names), SCRATCH_BYTES // self.page_bytes))
        scratch = np.empty((rows, self.page_bytes), np.uint8)
        done = 0
        while done < len(names) and self._clock_ns() < deadline_ns:
            wanted = names[done : done + rows]
            fetched = self._fetch(space, wanted, list(scratch[: len(wanted)]), deadline_ns)
            for block, page in zip(scratch[:fetched], pages[done:], strict=False):
                _scatter(block, page)
            done += fetched
            if fetched < len(wanted):
                break
        return done

    def _fetch(
        self, space: Space, names: list[BlockKey], rows: list[Bytes], deadline_ns: int
    ) -> int:
        return space.fetch(names, rows, deadline_ms=self._left_ms(deadline_ns)).blocks

    def store(self, keys: Sequence[str], pages: Sequence[Page], prefix: Sequence[str] = ()) -> bool:
        """Stores the pages. `prefix`: the keys of the prompt before them, if they are known.

        ValueError as for `load`.
        """
        self._check(keys, pages)
        if not keys:
            return True
        chain = self._keys([*prefix, *keys])

        def fill(index: int, target: Bytes) -> None:
            _gather(pages[index - len(prefix)], target)

        pushed = self._spaces.current().push(
            chain,
            fill,
            first_block=len(prefix),
            durable=self._durable,
            deadline_ms=self._deadlines.store_ms,
        )
        kept = pushed.stored + pushed.present + pushed.reserved
        self._count("store_stored", pushed.stored)
        self._count("store_present", pushed.present + pushed.reserved)
        self._count("store_dropped", len(keys) - kept)
        return kept == len(keys)

    def reset(self) -> None:
        """What was stored until now may not be what the engine would compute from now on."""
        self._spaces.reset()
        self._count("reset")

    def close(self) -> None:
        """Ends the session. Idempotent; a call that is under way ends by its deadline."""
        self._spaces.close()

    def counted(self) -> Mapping[str, int]:
        """What happened since the last call, by outcome, in pages (see tier_values.OUTCOMES)."""
        with self._lock:
            counted, self._counted = self._counted, Counter()
        return counted

    def _keys(self, keys: Sequence[str]) -> list[BlockKey]:
        return [self._key_of(key) for key in keys]

    def _left_ms(self, deadline_ns: int) -> int:
        return max(1, (deadline_ns - self._clock_ns()) // 1_000_000)

    def _check(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        for page in pages:
            size = sum(piece.size for piece in page)
            if size != self.page_bytes:
                raise ValueError(f"a page has {size} bytes, not {self.page_bytes}")

    def _count(self, what: str, number: int = 1) -> None:
        if number:
            with self._lock:
                self._counted[what] += number


def _scatter(block: Bytes, page: Page) -> None:
    """A block's bytes into the pieces of a page."""
    begin = 0
    for piece in page:
        np.copyto(piece, block[begin : begin + piece.size])
        begin += piece.size


def _gather(page: Page, block: Bytes) -> None:
    """The pieces of a page, one after the other, into a block."""
    begin = 0
    for piece in page:
        np.copyto(block[begin : begin + piece.size], piece)
        begin += piece.size
