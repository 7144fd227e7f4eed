"""kvstore below SGLang's hierarchical cache (HiCache), as its dynamic storage backend.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "interface_v1": 1,
      "module_path": "kvstore_client.engines.sglang", "class_name": "KVStoreBackend",
      "target": "/run/kvstore/data.sock"}'

Promises: nothing is raised into SGLang, whatever the daemon does; a backend that cannot work says
why in the log and answers that it has nothing. Each call returns by its deadline. SGLang calls from
its storage threads, never from the one that schedules. A page counts as loaded only if it holds the
bytes that were stored for its key by a rank with this fingerprint; the run of loaded pages begins
with the first one, and nothing after a miss counts. What was stored before SGLang emptied its
caches, or before an update of its weights was seen, is not found afterwards, and what is stored
after it no other engine finds. Options are those of `options`; see deploy/docs/sglang.md.

Imports SGLang: `import kvstore_client` does not import this module.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.version import __version__ as sglang_version

from kvstore.model.reasons import KVStoreError
from kvstore_client.arrays import Bytes, rows_of
from kvstore_client.engines.model_spaces import ModelSpaces, doubt_of
from kvstore_client.engines.options import Options
from kvstore_client.engines.page_store import PageStore
from kvstore_client.engines.refused import Refused
from kvstore_client.engines.sglang_facts import (
    fingerprint_of,
    key_of,
    weights_folder,
    why_unnamed,
)
from kvstore_client.engines.sglang_pages import HostPages
from kvstore_client.engines.tier_values import Deadlines
from kvstore_client.weights import WeightsDigest

__all__ = ["VERSIONS", "KVStoreBackend"]

log = logging.getLogger("sglang.kvstore")
"""Below SGLang's own loggers, as those of its other backends."""

VERSIONS: Final = {"0.5.23": "kvstore_client.engines.sglang_0_5_23"}
"""Versions of SGLang that were tried, and the module that reads the facts of each."""
SGLANG_OPTIONS: Final = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""Of the extra config, what is meant for SGLang."""
DEADLINE_MS_MAX: Final = 8_000
"""SGLang's flush gives its storage threads 10 s to come back, and fails if they do not."""

FIGURES_MAX: Final = 1_024
"""Of what was moved that wait for SGLang to ask for them, if it ever does."""

T = TypeVar("T")


def guarded(otherwise: Callable[..., T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Nothing that goes wrong in a hook gets into SGLang. `otherwise` takes the same arguments."""

    def decorate(hook: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(hook)
        def call(self: KVStoreBackend, *args: Any, **more: Any) -> T:
            try:
                return hook(self, *args, **more)
            except Exception:  # the fail-open boundary
                self._stumbled(hook.__name__)
                return otherwise(*args, **more)

        return call

    return decorate


def _none(*args: Any, **more: Any) -> None:
    return None


def _no_pages(keys: Sequence[str] = (), *args: Any, **more: Any) -> list[bool]:
    return [False] * len(keys)


def _no_transfers(transfers: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KVStoreBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang is untyped here
    """See the module's docstring."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Nothing is reached from here: SGLang hands over its host memory later."""
        self.mem_pool_host: Any = None
        self._config = storage_config
        self._given = dict(getattr(storage_config, "extra_config", None) or {})
        self._v1 = bool(self._given.get("interface_v1", 0))
        self._others: list[str] = []
        self._store: PageStore | None = None
        self._pages: HostPages | None = None
        self._updates: Callable[[], tuple[str, ...]] = tuple
        self._seen: tuple[str, ...] = ()
        self._watching = threading.Lock()
        self._stumbles: dict[str, int] = {}
        self._figures: deque[tuple[str, int, float]] = deque(maxlen=FIGURES_MAX)

    # ---------------------------------------------------------------- start and end

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    @guarded(_none)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Pages with more than the first pool's bytes in them cannot be stored by it alone."""
        if host_pool is self.mem_pool_host and str(host_pool_name) == "kv":
            return
        self._others.append(str(host_pool_name))
        if self._store is not None:
            log.error("kvstore is off from now on: a page has %s as well", host_pool_name)
            self._close()

    def on_host_pools_registered(self) -> None:
        try:
            self._start()
        except (Refused, KVStoreError, ValueError) as error:
            log.error("kvstore is off, the engine goes on without it: %s", error)
        except Exception:  # the fail-open boundary: without a store the engine is whole
            log.exception("kvstore is off, the engine goes on without it")

    def _start(self) -> None:
        if sglang_version not in VERSIONS:
            raise Refused(f"SGLang {sglang_version} is not one of {', '.join(VERSIONS)}")
        given = {name: v for name, v in self._given.items() if name not in SGLANG_OPTIONS}
        options = Options.of(given)
        deadlines = Deadlines(
            options.lookup_deadline_ms, options.load_deadline_ms, options.store_deadline_ms
        )
        if max(deadlines.lookup_ms, deadlines.load_ms, deadlines.store_ms) > DEADLINE_MS_MAX:
            raise Refused(f"a deadline is more than {DEADLINE_MS_MAX} ms")
        reader = importlib.import_module(VERSIONS[sglang_version])
        config, pool = self._config, self.mem_pool_host
        self._seen = reader.updates()
        facts = reader.facts_of(
            sglang_version, config, pool, tuple(self._others), flat=not self._v1
        )
        fingerprint = fingerprint_of(
            facts,
            model_name=options.model_name,
            weights_revision=options.weights_revision,
            weight_epoch=options.weight_epoch,
        )
        folder = weights_folder(facts)
        unknown = fingerprint.identity.weights_revision is None
        if unknown and folder is None:
            log.warning("kvstore: nothing is shared: %s. Set weights_revision", why_unnamed(facts))
        self._pages = HostPages(pool)
        self._updates = reader.updates
        rank = f"dp{config.dp_rank}.pp{config.pp_rank}.tp{config.tp_rank}"
        spaces = ModelSpaces(
            options.client(f"sglang/{rank}"),
            fingerprint,
            weights=WeightsDigest(folder) if unknown and folder is not None else None,
            doubt=lambda: "" if folder is None else doubt_of(folder),
        )
        self._store = PageStore(
            spaces,
            facts.page_bytes,
            key_of,
            deadlines=deadlines,
            durable=bool(options.durable),
        )
        log.info(
            "kvstore at %s for %s: pages of %d tokens, %d bytes, %s",
            options.target,
            fingerprint.identity.model_name,
            facts.page_tokens,
            facts.page_bytes,
            fingerprint.encoding.layout_version,
        )

    @guarded(_none)
    def close(self) -> None:
        self._close()

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            log.info("kvstore: pages by outcome: %s", dict(store.counted()))
            store.close()

    def _stumbled(self, hook: str) -> None:
        count = self._stumbles[hook] = self._stumbles.get(hook, 0) + 1
        if count == 1:
            log.exception("kvstore: %s failed; told once, counts as a miss", hook)

    def _ready(self) -> PageStore | None:
        """The store, after what SGLang does not tell has been looked at: whether it has emptied its
        caches or has other weights. What a call is given was computed before the call: an update
        that comes after the look does not concern it.
        """
        store, pages = self._store, self._pages
        if store is None or pages is None:
            return None
        with self._watching:
            updates = self._updates()
            emptied = pages.emptied()
            if emptied or updates != self._seen:
                self._seen = updates
                store.reset()
        return store

    # ---------------------------------------------------------------- pages in place

    @guarded(lambda *args, **more: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        store = self._ready()
        return 0 if store is None else store.exists(keys)

    @guarded(_no_pages)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        store, pages = self._ready(), self._pages
        if store is None or pages is None or not self._v1:
            return _no_pages(keys)
        begun_s = time.perf_counter()
        loaded = store.load(keys, pages.pieces(host_indices, len(keys)))
        self._moved("prefetch", loaded, begun_s)
        return [index < loaded for index in range(len(keys))]

    @guarded(_no_pages)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        store, pages = self._ready(), self._pages
        if store is None or pages is None or not self._v1:
            return _no_pages(keys)
        prefix = getattr(extra_info, "prefix_keys", None) or ()
        begun_s = time.perf_counter()
        stored = store.store(keys, pages.pieces(host_indices, len(keys)), prefix)
        self._moved("backup", len(keys) if stored else 0, begun_s)
        return [stored] * len(keys)

    # ---------------------------------------------------------------- flat pages

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]) == 1)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        if target_location is None:
            return None
        got = self.batch_get([key], [target_location])
        return got[0]

    @guarded(lambda keys, *args, **more: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Each page's tensor, filled, up to the first one that is not there; None from there on."""
        store = self._ready()
        targets = list(target_locations or ())
        if store is None or not self._flat_is_stored or len(targets) != len(keys):
            return [None] * len(keys)
        rows = _rows(targets, store.page_bytes, writable=True)
        loaded = store.load(keys, [[row] for row in rows])
        return [*targets[:loaded], *[None] * (len(keys) - loaded)]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        data = value if value is not None else target_location
        return bool(data is not None and self.batch_set([key], [data]))

    @guarded(lambda *args, **more: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        store = self._ready()
        data = list(values if values is not None else target_locations or ())
        if store is None or not self._flat_is_stored or len(data) != len(keys):
            return False
        rows = _rows(data, store.page_bytes, writable=False)
        return store.store(keys, [[row] for row in rows])

    @property
    def _flat_is_stored(self) -> bool:
        """Flat pages and pieces are two orders of bytes in one layout (see sglang_facts): there,
        only that is served which the configuration has chosen.
        """
        return not self._v1 or getattr(self.mem_pool_host, "layout", "") != "layer_first"

    # ---------------------------------------------------------------- pages in several pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra: Any = None
    ) -> Any:
        """An engine that asks so is refused (see sglang_facts): nothing is there."""
        return PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return _no_transfers(transfers)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return _no_transfers(transfers)

    # ---------------------------------------------------------------- the rest

    @guarded(_none)
    def clear(self) -> None:
        """What was stored until now is not found by this rank any more, and what it stores from
        now on is for it alone. Blocks of others are not touched.
        """
        store = self._ready()
        if store is not None:
            store.reset()

    def _moved(self, what: str, pages: int, begun_s: float) -> None:
        """Remembers how many pages a call moved and how fast, in GiB/s; the latest ones."""
        if pages and self._store is not None:
            took_s = max(1e-9, time.perf_counter() - begun_s)
            rate = pages * self._store.page_bytes / (1 << 30) / took_s
            self._figures.append((what, pages, rate))

    @guarded(_none)
    def get_stats(self) -> Any:
        """What was moved since the last call, for SGLang's own metrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        stats = StorageMetrics()
        while self._figures:
            what, pages, rate = self._figures.popleft()
            getattr(stats, f"{what}_pgs").append(pages)
            getattr(stats, f"{what}_bandwidth").append(rate)
        return stats


def _rows(tensors: list[Any], page_bytes: int, *, writable: bool) -> list[Bytes]:
    """Flat pages as bytes, the same memory."""
    rows = rows_of(tensors, len(tensors), page_bytes, name="pages", writable=writable)
    return [np.asarray(row) for row in rows]
