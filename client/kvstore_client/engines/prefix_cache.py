"""A prefix store for a transformers model in this process: restore what is stored, save what is
new.

    cache = PrefixCache(client, model, fingerprint_of(model, model_name="m", weights_revision=r))
    restored = cache.restore(token_ids)
    made = generate(model, token_ids, restored.cache, 64)
    cache.save([*token_ids, *made.token_ids], made.cache, from_token=restored.tokens)

Promises: `restore` gives a cache of exactly the bytes that were saved for these tokens by a model
with this fingerprint, or none; neither verb raises because of the store, each says why it did
nothing. Imports torch and transformers. For one caller at a time, batch size 1.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore.model.cost import PrefillCost
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.keys import BlockKey
from kvstore.model.layout import layout_of
from kvstore.model.reasons import Reason
from kvstore_client.engines.arriving import Arrival, begin_arrival, can_arrive
from kvstore_client.engines.kv_blocks import BlockCutter, UnsupportedCacheError, rebuild_cache
from kvstore_client.engines.unnamed_weights import new_mark, offer_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache

    from kvstore_client.client import Client
    from kvstore_client.engines.transformers import Generation
    from kvstore_client.results import Compared, Fetched, Hit, Pushed
    from kvstore_client.weights import WeightsDigest

__all__ = ["PrefixCache", "Restored", "Saved"]

AUDITS_MAX: Final = 256
"""Prompts that are remembered to be compared when they are saved."""
_AUDITED: Final = "AUDITED"
_NO_TOKENS: Final = "the prompt has no whole block before its last token"


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` found. `cache` is None (and `tokens` 0) on a miss; `hit` says why.

    `fetch_ms`: request, lease and copy out of the store; `rebuild_ms`: making the cache of it.
    `arrival`: of a cache that is restored layer by layer: `fetch_ms` is then until the lease, and
    `arrival.result()` has what `fetched` has otherwise.
    """

    cache: DynamicCache | None
    found_tokens: int
    hit: Hit | None
    why: str
    size_bytes: int = 0
    fetch_ms: float = 0.0
    rebuild_ms: float = 0.0
    fetched: Fetched | None = None
    arrival: Arrival | None = None

    @property
    def tokens(self) -> int:
        """Of the prompt, in the cache. Of one restored layer by layer whose rest was lost: those
        that `generate` has begun anew with.
        """
        arrival = self.arrival
        kept = None if arrival is None else arrival.salvaged_tokens
        return self.found_tokens if kept is None else kept

    @property
    def load_ms(self) -> float:
        return self.fetch_ms + self.rebuild_ms


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` did. `pushed` is None when the cache could not be cut; `why` says what kept
    it."""

    pushed: Pushed | None
    why: str
    compared: Compared | None = None
    """What an audit of this prompt's stored blocks found; None: none was asked for."""


class PrefixCache:
    """One model's prefixes in the store.

    `fingerprint`: of `model`, see `fingerprint_of`. While its weights revision is unknown and
    `weights` is given, the revision is asked for before each call (never waited for), and blocks
    are held by the daemon for this object alone, whatever a person approves of another. `salt`: the
    cache salt of all prompts (tenants of one application). `prefill`: the cost of computing a
    prompt, so that a hit that is slower than that is not loaded.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        fingerprint: Fingerprint,
        *,
        weights: WeightsDigest | None = None,
        salt: bytes = b"",
        prefill: PrefillCost | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._client = client
        self._model = model
        self._weights = weights
        self._salt = salt
        self._prefill = prefill
        self._clock_ns = clock_ns
        self._mark = new_mark()
        self._use(fingerprint)
        self._block_tokens = fingerprint.encoding.block_tokens
        self._rows: npt.NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._audits: OrderedDict[BlockKey, int] = OrderedDict()

    @property
    def fingerprint(self) -> Fingerprint:
        """As it is offered now; completed as soon as the weights are known."""
        self._complete_fingerprint()
        return offer_of(self._fingerprint, self._mark)

    def restore(
        self, token_ids: Sequence[int], *, request_id: str = "", layerwise: bool = False
    ) -> Restored:
        """A cache of the longest stored prefix of `token_ids`, at least one token short of all.
        None for a prompt that the daemon wants audited: it is computed, and `save` compares.

        layerwise: the cache is returned when its blocks are leased, and each layer is waited for
        when the model reads it: see `engines.arriving`. Pass it to `generate`, which begins anew if
        the store loses the rest. Models that this is not for are restored whole.

        Never raises because of the store.
        """
        self._complete_fingerprint()
        limit = (len(token_ids) - 1) // self._block_tokens
        if limit < 1:
            return Restored(None, 0, None, _NO_TOKENS)
        begun = self._clock_ns()
        keys = self._space.keys(token_ids[: limit * self._block_tokens], salt=self._salt)
        hit = self._space.lookup(keys, prefill=self._prefill, request_id=request_id)
        blocks = len(hit.keys_to_load)
        if not blocks:
            declined = bool(hit.blocks)
            return Restored(None, 0, hit, hit.plan.reason.name if declined else hit.reason.name)
        if hit.audit:
            self._audits[hit.keys[hit.blocks - 1]] = hit.blocks
            if len(self._audits) > AUDITS_MAX:
                self._audits.popitem(last=False)
            return Restored(None, 0, hit, _AUDITED)
        if layerwise and can_arrive(self._model):
            return self._begin(hit, begun, request_id)
        rows = self._rows_for(blocks)
        fetched = self._space.fetch(hit, rows, request_id=request_id)
        fetched_at = self._clock_ns()
        if not fetched.blocks:
            return Restored(None, 0, hit, fetched.reason.name)
        cache = rebuild_cache(
            self._model.config,
            rows[: fetched.blocks],
            block_tokens=self._block_tokens,
            dtype=self._model.dtype,
            device=self._model.device,
        )
        return Restored(
            cache=cache,
            found_tokens=fetched.blocks * self._block_tokens,
            hit=hit,
            why=hit.reason.name,
            size_bytes=fetched.blocks * rows.shape[1],
            fetch_ms=(fetched_at - begun) / 1e6,
            rebuild_ms=(self._clock_ns() - fetched_at) / 1e6,
            fetched=fetched,
        )

    def _begin(self, hit: Hit, begun: int, request_id: str) -> Restored:
        """A cache whose layers are on their way."""
        arrival = begin_arrival(self._space, self._model, hit, request_id=request_id)
        if isinstance(arrival, Reason):
            return Restored(None, 0, hit, arrival.name)
        return Restored(
            cache=arrival.cache(),
            found_tokens=arrival.tokens,
            hit=hit,
            why=hit.reason.name,
            size_bytes=arrival.fetch.blocks * self._space.block_bytes,
            fetch_ms=(self._clock_ns() - begun) / 1e6,
            arrival=arrival,
        )

    def save(
        self,
        token_ids: Sequence[int],
        cache: DynamicCache,
        *,
        from_token: int = 0,
        durable: bool = False,
        request_id: str = "",
    ) -> Saved:
        """Stores the whole blocks of `cache`, which holds the first tokens of `token_ids`.

        `from_token`: where the caller knows nothing new before it, such as `Restored.tokens` (read
        after `generate`, which may have lost some).
        Blocks that the store has already are neither copied nor sent. `durable`: returns when the
        disk has them. Never raises because of the store.
        """
        self._complete_fingerprint()
        first = from_token // self._block_tokens
        try:
            cutter = BlockCutter(cache, self._block_tokens, first * self._block_tokens)
        except UnsupportedCacheError as error:
            return Saved(None, str(error))
        end = min(cutter.end_block, len(token_ids) // self._block_tokens)
        if end <= first:
            return Saved(None, "no new whole block")
        keys = self._space.keys(token_ids[: end * self._block_tokens], salt=self._salt)
        compared = None if first else self._compare(keys, cutter, request_id)
        pushed = self._space.push(
            keys, cutter.cut, first_block=first, durable=durable, request_id=request_id
        )
        return Saved(pushed, pushed.reason.name, compared)

    def _compare(
        self, keys: Sequence[BlockKey], cutter: BlockCutter, request_id: str
    ) -> Compared | None:
        """Compares what was stored of an audited prompt with what was computed for it."""
        for index in range(len(keys) - 1, -1, -1) if self._audits else ():
            blocks = self._audits.pop(keys[index], 0)
            if blocks:
                return self._space.compare(keys[:blocks], cutter.cut, request_id=request_id)
        return None

    def report(
        self,
        restored: Restored,
        made: Generation,
        *,
        prompt_tokens: int,
        request_id: str = "",
    ) -> bool:
        """Tells the daemon how long the request took to its first token, loading included, for
        `kvstore report`. Every request, held out or not. False if nobody will be told.
        """
        if restored.hit is None:
            return False
        arrival = restored.arrival
        return self._space.report(
            restored.hit,
            restored.fetched if arrival is None else arrival.result(),
            first_token_ms=restored.load_ms + made.first_token_ns / 1e6,
            # With layers that were waited for it is not the time of computing alone.
            prefill_ms=made.first_token_ns / 1e6 if arrival is None else 0.0,
            computed_tokens=prompt_tokens - restored.tokens,
            prompt_tokens=prompt_tokens,
            request_id=request_id,
        )

    def _complete_fingerprint(self) -> None:
        if self._weights is None or self._fingerprint.identity.weights_revision is not None:
            return
        revision = self._weights.result_if_ready()
        if revision is not None:
            self._use(self._fingerprint.complete(revision))

    def _use(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self._space = self._client.space(offer_of(fingerprint, self._mark))

    def _rows_for(self, blocks: int) -> npt.NDArray[np.uint8]:
        """`[blocks, block_bytes]`, kept for the next call: first-touch faults cost more than the
        copy."""
        if self._rows.shape[0] < blocks:
            size = layout_of(self._fingerprint).block_bytes
            # Room for the next turns of a conversation; pages that are not touched cost nothing.
            self._rows = np.empty((blocks * 2, size), np.uint8)
        return self._rows[:blocks]
