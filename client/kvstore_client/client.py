"""The client for threads: a thin driver of the operations in `calls`, `reads`, `writes`.

    with Client("/run/kvstore/data.sock") as client:
        space = client.space(fingerprint)
        hit = space.lookup(tokens)
        fetched = space.fetch(hit, out)
        ... compute the rest ...
        space.push(tokens, data, first_block=fetched.blocks)

The data path never raises because of the store: an outage, a deadline, a refusal is a miss or a
skipped push, with the reason in the result. Misuse raises BadRequest. Each call returns by its
deadline. One client may be used from several threads, and goes on with the same objects when the
daemon restarts and after a fork.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from kvstore.model.cost import PrefillCost
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.keys import BlockKey, Extras, Tokens
from kvstore.model.plan import Overlap
from kvstore_client import calls, space_layers
from kvstore_client.channel import CallFailed, Transport
from kvstore_client.config import ClientConfig
from kvstore_client.device import Driver
from kvstore_client.layers import LayerFetch, LayerPush
from kvstore_client.outcomes import report_of
from kvstore_client.results import (
    Compared,
    Connection,
    Fetched,
    Hit,
    KeyExplanation,
    Presence,
    Pushed,
    Rank,
    SpaceStatus,
)
from kvstore_client.root import Prepared, Root, typed_error
from kvstore_client.spaces import KeysOrHit, SpaceCore, TokensOrKeys
from kvstore_client.tolerance import Tolerance
from kvstore_client.views import Views

__all__ = ["Client", "Space"]

T = TypeVar("T")


class Client:
    """A connection to the daemon of this node; made when it is first needed.

    target: path of the data socket, with or without `unix:`. engine_id: for the daemon's trace, at
    most 128 bytes. group: 1 to 64 bytes that all processes of one engine instance share; their
    leases and writes belong together. None: this process alone. transport, clock, device: for
    tests.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        config: ClientConfig | None = None,
        engine_id: str = "",
        group: bytes | None = None,
        transport: Callable[[], Transport] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        device: Driver | None = None,
    ) -> None:
        self._root = Root(target, config, engine_id, group, transport, clock, device)
        self._finalizer = weakref.finalize(self, self._root.close)

    def space(self, fingerprint: Fingerprint, rank: int | Rank = 0) -> Space:
        """The blocks of a model; makes no call. `rank`: the part of each block that this process
        fills (its index, or the process's place in the engine). BadRequest if there is none.
        """
        return Space(SpaceCore(self._root, fingerprint, rank))

    def connection(self, deadline_ms: int | None = None) -> Connection:
        """Connects if it is not yet, and tells how: shared memory or byte streams, and why."""
        deadline = self._root.deadline(deadline_ms)
        prepared = Prepared(
            lambda context: calls.connection(),
            lambda reason, detail, _: Connection("", reason, detail=detail),
        )
        return self._root.run(prepared, deadline)

    def close(self) -> None:
        """Ends the session; views that are open become invalid. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Space:
    """The blocks of one model for one tenant, for several threads. Made by `Client.space`."""

    def __init__(self, core: SpaceCore) -> None:
        self._core = core

    def _run(self, prepare: Callable[[], Prepared[T]], deadline_ms: int | None = None) -> T:
        deadline = self._core.root.deadline(deadline_ms)
        self._core.root.link()  # a closed client is misuse, whatever the arguments
        return self._core.root.run(prepare(), deadline)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all parts together."""
        return self._core.spec.layout.block_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of this rank's part of a block."""
        return self._core.spec.layout.part_bytes

    @property
    def block_tokens(self) -> int:
        return self._core.spec.block_tokens

    def keys(
        self, tokens: Tokens, *, salt: bytes = b"", extras: Extras | None = None
    ) -> list[BlockKey]:
        """The keys of the full blocks of a prompt: about 1 us a block. No call.

        salt: of the request; prompts with different salts share nothing. extras: what else decides
        the content (adapter, images). BadRequest: see kvstore.model.keys.chain.
        """
        return self._core.keys(tokens, salt=salt, extras=extras)

    def status(self, *, deadline_ms: int | None = None) -> SpaceStatus:
        """What the daemon says to the fingerprint: in use, held (why, and the id to approve), or
        refused (which fields differ).
        """
        return self._run(self._core.status, deadline_ms)

    def lookup(
        self,
        tokens_or_keys: TokensOrKeys,
        *,
        prefill: PrefillCost | None = None,
        overlap: Overlap = Overlap.SERIAL,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Hit:
        """How much of a prompt is stored, and how much of that is worth loading. No side effect.

        prefill: the model's prefill cost; None: the configured or calibrated one (see
        `observe_prefill`); without any the plan loads all and says COST_UNKNOWN.
        overlap: what the engine can do at the same time; decides where the plan cuts the hit.
        """
        return self._run(
            lambda: self._core.lookup(tokens_or_keys, prefill, overlap, request_id), deadline_ms
        )

    def presence(
        self, keys: Sequence[BlockKey], *, request_id: str = "", deadline_ms: int | None = None
    ) -> Presence:
        """Which of these blocks are there, each for itself: for a cache that needs the last blocks
        of a prompt and not those before. Counts as no prompt, and nothing is weighed.
        """
        return self._run(lambda: self._core.presence(keys, request_id), deadline_ms)

    def fetch(
        self,
        keys: KeysOrHit,
        out: Any = None,
        *,
        part: bool = False,
        wait_ms: int = 0,
        all_or_nothing: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Fetched:
        """Copies blocks into `out`, first to last, until one is not there.

        keys: or a Hit, of which the blocks that its plan advises are fetched.
        out: array or tensor (of the CPU or a GPU) in C order whose first dimension counts blocks
            and whose row has block_bytes (part_bytes with `part`), of any type; or, in the CPU's
            memory, a list of as many writable buffers. None: a new uint8 [n, block_bytes] of the
            n blocks that came, slower by its page faults.
        part: only this rank's part of each block.
        wait_ms: wait so long for blocks that others are writing. What a slower tier has is loaded
            in any case, as far as the deadline allows.
        all_or_nothing: all blocks or none, as for ranks that must agree. Needs shared memory.
        """
        return self._run(
            lambda: self._core.fetch(
                keys,
                out,
                part=part,
                wait_ms=wait_ms,
                all_or_nothing=all_or_nothing,
                request_id=request_id,
            ),
            deadline_ms,
        )

    def fetch_tensors(
        self,
        keys: KeysOrHit,
        *,
        wait_ms: int = 0,
        all_or_nothing: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Fetched:
        """As `fetch` into new memory, with `data` as a CPU tensor of the model's type: [n, layers,
        2, kv_heads, block_tokens, head_size], or [n, layers, block_tokens, latent] for MLA; with a
        dimension for the parts after the first where there are several. Needs torch.
        """
        self._core.check_tensors()
        fetched = self.fetch(
            keys,
            wait_ms=wait_ms,
            all_or_nothing=all_or_nothing,
            request_id=request_id,
            deadline_ms=deadline_ms,
        )
        return self._core.tensors(fetched)

    def fetch_layers(
        self,
        keys: KeysOrHit,
        out: Any = None,
        *,
        part: bool = False,
        layers_at_once: int = 1,
        wait_ms: int = 0,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> LayerFetch:
        """As `fetch`, with the blocks copied layer by layer in the background: see `layers`.

        Returns when the blocks are leased. One lease for all layers; the deadline is that of the
        whole. A client that cannot map the daemon's memory gets all layers at once.

        out: one array or tensor (of the CPU or a GPU) a layer, of any type and strides, the first
            dimension counting blocks and a row having the layer's bytes: K and V, of each rank that
            has the layer one after the other (a second dimension, if the array is not in C order).
            A flat buffer of rows in the CPU's memory, too. With `part` only the layers and bytes of
            this rank. None: a new uint8 [layers, n, bytes], the result's `data`.
        layers_at_once: how many are copied, verified and told of together.
        BadRequest(NOT_SUPPORTED) for an element order whose inside only the engine knows.
        """
        deadline = self._core.root.deadline(deadline_ms)
        self._core.root.link()
        prepared = space_layers.fetch_layers(
            self._core,
            keys,
            out,
            deadline=deadline,
            part=part,
            layers_at_once=layers_at_once,
            wait_ms=wait_ms,
            request_id=request_id,
        )
        return LayerFetch(self._core.root.run(prepared, deadline))

    @contextlib.contextmanager
    def view(
        self,
        keys: KeysOrHit,
        *,
        wait_ms: int = 0,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Iterator[Views]:
        """Blocks in place, without a copy, for the time of a `with`. See `Views`."""
        views = self._run(lambda: self._core.view(keys, wait_ms, request_id), deadline_ms)
        try:
            yield views
        finally:
            views.end()

    def push(
        self,
        tokens_or_keys: TokensOrKeys,
        data: Any,
        *,
        first_block: int = 0,
        attempt: int = 0,
        durable: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Pushed:
        """Stores the blocks of a prompt from `first_block` on; those that are there are skipped.

        tokens_or_keys: the whole prompt from its first block on.
        data: array or tensor (of the CPU or a GPU) in C order, [blocks - first_block, part_bytes]
            or rows of that many bytes; in the CPU's memory also a flat buffer of them or a list of
            buffers; or `fill(block, target)`, which writes block number `block` of the prompt into
            a uint8 [part_bytes] and is called only for wanted blocks. What it raises comes out of
            here, and nothing of its window is stored.
        attempt: with the group, the write group: parts of two attempts never mix.
        durable: return when a durable tier has the blocks.
        """
        return self._run(
            lambda: self._core.push(
                tokens_or_keys,
                data,
                first_block=first_block,
                attempt=attempt,
                durable=durable,
                request_id=request_id,
            ),
            deadline_ms,
        )

    def push_layers(
        self,
        tokens_or_keys: TokensOrKeys,
        *,
        first_block: int = 0,
        attempt: int = 0,
        durable: bool = False,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> LayerPush:
        """As `push`, with the blocks handed over layer by layer while they are computed: see
        `layers`. What is stored becomes readable at the commit, all at once.

        deadline_ms: from here to the commit; what is computed in between takes its time. The blocks
        are those of one reservation: what finds no room in the session's staging is skipped.
        """
        deadline = self._core.root.deadline(deadline_ms)
        self._core.root.link()
        prepared = space_layers.push_layers(
            self._core,
            tokens_or_keys,
            deadline=deadline,
            first_block=first_block,
            attempt=attempt,
            durable=durable,
            request_id=request_id,
        )
        return LayerPush(self._core.root.run(prepared, deadline))

    def report(
        self,
        hit: Hit,
        fetched: Fetched | None = None,
        *,
        first_token_ms: float = 0.0,
        prefill_ms: float = 0.0,
        computed_tokens: int | None = None,
        prompt_tokens: int = 0,
        failed: bool = False,
        request_id: str = "",
    ) -> bool:
        """Tells what became of a request, whichever side it was on, for `kvstore report`. Makes no
        call and never waits; True if the daemon will be told: some time soon, with the releases, or
        once one answers. False: the client is being closed.

        hit, fetched: of its lookup and of its load, None: nothing was loaded. first_token_ms,
        prefill_ms: 0 if they are not measured; the latter calibrates, too (see observe_prefill).
        computed_tokens: None: the prompt less what was loaded. prompt_tokens: 0: as the lookup knew
        it. failed: the engine did not answer the request. BadRequest for figures that cannot be.
        """
        return self._core.report(
            report_of(
                hit,
                fetched,
                block_tokens=self.block_tokens,
                first_token_ms=first_token_ms,
                prefill_ms=prefill_ms,
                computed_tokens=computed_tokens,
                prompt_tokens=prompt_tokens,
                failed=failed,
                request_id=request_id,
            )
        )

    def compare(
        self,
        tokens_or_keys: TokensOrKeys,
        computed: Any,
        *,
        first_block: int = 0,
        tolerance: Tolerance | None = None,
        request_id: str = "",
        deadline_ms: int | None = None,
    ) -> Compared:
        """Compares stored blocks of a prompt with computed ones, and tells the daemon: a mismatch
        holds the fingerprint for review. For a Hit with `audit`, after computing the prompt.

        computed: as `data` of `push`, from block `first_block` on: numbers of the model's type as
            bytes, arrays or a `fill`. tolerance: None: see kvstore_client.tolerance.
        """
        return self._run(
            lambda: self._core.compare(
                tokens_or_keys,
                computed,
                first_block=first_block,
                tolerance=tolerance,
                request_id=request_id,
            ),
            deadline_ms,
        )

    def explain(
        self, keys: Sequence[BlockKey], *, deadline_ms: int | None = None
    ) -> list[KeyExplanation]:
        """Why each key hits or misses. Raises Unavailable when nobody answers, KVStoreError for a
        refusal: there is no explanation without a daemon.
        """
        try:
            return self._run(lambda: self._core.explain(keys), deadline_ms)
        except CallFailed as failure:
            raise typed_error(failure) from None

    def observe_prefill(
        self, prompt_tokens: int, cached_tokens: int, elapsed_ms: float
    ) -> PrefillCost | None:
        """Tells that tokens [cached_tokens, prompt_tokens) took so long to compute. Returns the
        cost that lookups use from now on; None while there were too few.
        """
        self._core.prefill.observe(prompt_tokens, cached_tokens, elapsed_ms * 1e3)
        return self._core.prefill.cost()
