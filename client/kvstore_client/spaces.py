"""One space, as both clients see it: what the arguments mean, and which operation they start.

Everything that a caller can do wrong is found here, before any call, and raised as BadRequest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from kvstore.model import keys as model_keys
from kvstore.model.cost import PrefillCost, check_cost
from kvstore.model.fingerprint import Difference, Fingerprint, Verdict
from kvstore.model.keys import BlockKey, Extras, Tokens
from kvstore.model.plan import Overlap
from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import audits, calls, layer_reads, presence, reads, writes
from kvstore_client.arrays import Bytes, plain_tokens, rows_of
from kvstore_client.audits import CompareRequest
from kvstore_client.device import DeviceFill, DeviceRows, DeviceTarget
from kvstore_client.layer_reads import LayerRequest
from kvstore_client.prefill import PrefillFit
from kvstore_client.reads import FetchRequest
from kvstore_client.results import (
    Compared,
    Fetched,
    Hit,
    KeyExplanation,
    Presence,
    Pushed,
    Rank,
    SpaceStatus,
)
from kvstore_client.root import Prepared, Root, check_keys, check_text, spec_of
from kvstore_client.steps import (
    Context,
    Operation,
    UserError,
)
from kvstore_client.streams import Fill, RowsFill
from kvstore_client.tolerance import TOLERANCES, Tolerance
from kvstore_client.views import Views
from kvstore_client.writes import PushRequest

__all__ = [
    "Differences",
    "KeysOrHit",
    "SpaceCore",
    "TokensOrKeys",
    "check_request_id",
    "check_wait_ms",
    "no_steps",
    "predicted_ms",
    "then",
]

TokensOrKeys: TypeAlias = Tokens | Sequence[BlockKey] | Hit
KeysOrHit: TypeAlias = Sequence[BlockKey] | Hit
Differences: TypeAlias = tuple[Difference, ...]

REQUEST_ID_BYTES_MAX = 128
ATTEMPT_MAX = 2**64 - 1
WAIT_MS_MAX = 2**32 - 1


class SpaceCore:
    """Arguments to operations. Immutable but for the prefills that it has seen."""

    def __init__(self, root: Root, fingerprint: Fingerprint, rank: int | Rank) -> None:
        self.root = root
        self.spec, self.writes_part = spec_of(fingerprint, rank)
        self.prefill = PrefillFit(root.config.prefill_cost)

    # ---------------------------------------------------------------- arguments

    def keys(
        self, tokens: Tokens, *, salt: bytes = b"", extras: Extras | None = None
    ) -> list[BlockKey]:
        fingerprint = self.spec.fingerprint
        return model_keys.chain(
            plain_tokens(tokens),
            self.spec.block_tokens,
            salt=salt,
            cache_group=fingerprint.geometry.cache_group,
            extras=extras,
        )

    def chain(self, given: TokensOrKeys) -> tuple[Sequence[BlockKey], int]:
        """(keys, tokens of the prompt or 0 if they are not known)."""
        if isinstance(given, Hit):
            return given.keys, 0
        keys = check_keys(given)
        if keys is not None:
            return keys, 0
        return self.keys(given), len(given)

    # ---------------------------------------------------------------- operations

    def status(self) -> Prepared[SpaceStatus]:
        def failed(reason: Reason, detail: str, differences: Differences) -> SpaceStatus:
            return SpaceStatus(Verdict.INCOMPATIBLE, reason, differences, detail=detail)

        return Prepared(lambda context: calls.status(self.spec), failed)

    def lookup(
        self,
        given: TokensOrKeys,
        prefill: PrefillCost | None,
        overlap: Overlap,
        request_id: str,
    ) -> Prepared[Hit]:
        check_request_id(request_id)
        keys, prompt_tokens = self.chain(given)
        check_cost(prefill)
        if not isinstance(overlap, Overlap):
            raise BadRequest(Reason.BAD_REQUEST, "overlap must be an Overlap", "overlap")
        cost = prefill or self.prefill.cost()
        failed = calls.missed(keys)

        def start(context: Context) -> Operation[Hit]:
            if not keys:
                return no_steps(failed(Reason.NOTHING_TO_DO, Reason.NOTHING_TO_DO.text, ()))
            return calls.lookup(
                self.spec,
                keys,
                prompt_tokens=prompt_tokens,
                prefill=cost,
                overlap=overlap,
                request_id=request_id,
            )

        return Prepared(start, failed)

    def fetch(
        self,
        given: KeysOrHit,
        out: Any,
        *,
        part: bool,
        wait_ms: int,
        all_or_nothing: bool,
        request_id: str,
    ) -> Prepared[Fetched]:
        check_request_id(request_id)
        check_wait_ms(wait_ms)
        keys, no_keys = self.keys_to_load(given)
        layout = self.spec.layout
        row_bytes = layout.part_bytes if part else layout.block_bytes
        made_here = out is None
        if made_here:
            # First-touch faults of fresh memory cost more than the copy.
            try:
                out = np.empty((len(keys), row_bytes), np.uint8)
            except (MemoryError, ValueError):  # ValueError: more than there are addresses
                return _no_memory(len(keys), row_bytes)
        offset = layout.parts[self.spec.part].offset
        on_device = self.root.device.owns(out)
        request = FetchRequest(
            keys=keys,
            rows=[] if on_device else rows_of(out, len(keys), row_bytes, name="out", writable=True),
            span=slice(offset, offset + row_bytes) if part and len(layout.parts) > 1 else None,
            wait_ms=wait_ms,
            all_or_nothing=bool(all_or_nothing),
            request_id=request_id,
            prefill=self.prefill.cost(),
            predicted_ms=predicted_ms(given),
            prompt_tokens=self.tokens_of(given),
        )
        fetched = self.fetched_by(request, lambda blocks: out[:blocks] if made_here else out)
        whole: LayerRequest | None = None
        if on_device:
            # As one layer that is all of the block.
            place = (slice(offset, offset + row_bytes) if part else slice(0, row_bytes),)
            target = DeviceTarget(DeviceRows(self.root.device, out, len(keys), place, "out"))
            whole = LayerRequest(request, [target], 1, row_bytes)

        def start(context: Context) -> Operation[Fetched]:
            if not keys:
                return no_steps(fetched(reads.Copied(reason=no_keys)))
            if whole is not None:
                return then(layer_reads.fetch_whole(context, self.spec, whole), fetched)
            return then(reads.fetch(context, self.spec, request), fetched)

        def failed(reason: Reason, detail: str, differences: Differences) -> Fetched:
            return fetched(reads.Copied(reason=reason, detail=detail))

        return Prepared(start, failed)

    def fetched_by(
        self, request: FetchRequest, data_of: Callable[[int], Any]
    ) -> Callable[[reads.Copied], Fetched]:
        """Makes the result of a fetch that begins now. data_of: its `data`, for so many blocks."""
        begun_ns = time.perf_counter_ns()

        def fetched(done: reads.Copied) -> Fetched:
            return Fetched(
                blocks=done.blocks,
                tokens=done.blocks * self.spec.block_tokens,
                data=data_of(done.blocks),
                reason=done.reason,
                bytes=done.bytes,
                copy_ms=done.copy_ns / 1e6,
                total_ms=(time.perf_counter_ns() - begun_ns) / 1e6,
                detail=done.detail,
                load_ms=done.load_ns / 1e6,
                predicted_ms=request.predicted_ms if 0 < len(request.keys) == done.blocks else 0.0,
            )

        return fetched

    def keys_to_load(self, given: KeysOrHit) -> tuple[Sequence[BlockKey], Reason]:
        """The keys to fetch; the reason is for the case that there are none."""
        if isinstance(given, Hit):
            if given.blocks and not given.keys_to_load:
                return (), given.plan.reason
            return given.keys_to_load, given.reason
        keys = check_keys(given)
        if keys is None:
            if _not_empty(given):
                raise BadRequest(Reason.BAD_KEY_LENGTH, "give keys (see `keys`) or a Hit", "keys")
            keys = ()
        return keys, Reason.NOTHING_TO_DO

    def tokens_of(self, given: KeysOrHit) -> int:
        """Of the whole prompt that a lookup was about, as far as that is known; 0: keys alone do
        not tell.
        """
        if not isinstance(given, Hit):
            return 0
        return given.prompt_tokens or len(given.keys) * self.spec.block_tokens

    def view(self, given: KeysOrHit, wait_ms: int, request_id: str) -> Prepared[Views]:
        check_request_id(request_id)
        check_wait_ms(wait_ms)
        keys, no_keys = self.keys_to_load(given)

        def start(context: Context) -> Operation[Views]:
            if not keys:
                return no_steps(Views(None, None, no_keys, no_keys.text))
            leasing = reads.view(
                context,
                self.spec,
                keys,
                wait_ms=wait_ms,
                request_id=request_id,
                prompt_tokens=self.tokens_of(given),
            )
            return then(
                leasing, lambda lease: Views(lease, context.release, lease.reason, lease.detail)
            )

        def failed(reason: Reason, detail: str, differences: Differences) -> Views:
            return Views(None, None, reason, detail)

        return Prepared(start, failed)

    def push(
        self,
        given: TokensOrKeys,
        data: Any,
        *,
        first_block: int,
        attempt: int,
        durable: bool,
        request_id: str,
    ) -> Prepared[Pushed]:
        request = self.push_request(given, data, first_block, attempt, durable, request_id)

        def start(context: Context) -> Operation[Pushed]:
            if not request.offered:
                return no_steps(_skipped(0, Reason.NOTHING_TO_DO, Reason.NOTHING_TO_DO.text))
            if not self.writes_part:
                why = "another rank holds the same bytes and writes them"
                return no_steps(_skipped(request.offered, Reason.NOTHING_TO_DO, why))
            return writes.push(context, self.spec, request)

        def failed(reason: Reason, detail: str, differences: Differences) -> Pushed:
            return _skipped(request.offered, reason, detail)

        return Prepared(start, failed)

    def push_request(
        self,
        given: TokensOrKeys,
        data: Any,
        first_block: int,
        attempt: int,
        durable: bool,
        request_id: str,
    ) -> PushRequest:
        """What to push from where. BadRequest for arguments that cannot be."""
        check_request_id(request_id)
        keys, _ = self.chain(given)
        if len(set(keys)) < len(keys):
            # One of the two would get the bytes of the other.
            raise BadRequest(Reason.BAD_REQUEST, "the keys of a prompt all differ", "keys")
        if type(first_block) is not int or not 0 <= first_block <= len(keys):
            raise BadRequest(
                Reason.BAD_SIZE, f"first_block is an int from 0 to {len(keys)}", "first_block"
            )
        if type(attempt) is not int or not 0 <= attempt <= ATTEMPT_MAX:
            raise BadRequest(Reason.BAD_SIZE, "attempt is an int from 0 to 2^64-1", "attempt")
        return PushRequest(
            keys=keys,
            fill=self._fill_from(data, first_block, len(keys)),
            first_block=first_block,
            attempt=attempt,
            durable=bool(durable),
            request_id=request_id,
        )

    def _fill_from(self, data: Any, first_block: int, blocks: int) -> Fill:
        if callable(data) and not hasattr(data, "__array__"):
            user: Callable[[int, Bytes], None] = data

            def fill(index: int, target: Bytes) -> None:
                try:
                    user(index, target)
                except BaseException as error:
                    raise UserError(error) from error

            return fill
        part_bytes, device = self.spec.layout.part_bytes, self.root.device
        if device.owns(data):
            place = (slice(0, part_bytes),)
            held = DeviceRows(device, data, blocks - first_block, place, "data")
            return DeviceFill(held, first_block)
        rows = rows_of(data, blocks - first_block, part_bytes, name="data", writable=False)
        return RowsFill(rows, first_block)

    def explain(self, keys: Sequence[BlockKey]) -> Prepared[list[KeyExplanation]]:
        checked = check_keys(keys)
        if checked is None:
            if _not_empty(keys):
                raise BadRequest(Reason.BAD_KEY_LENGTH, "explain takes keys", "keys")
            return Prepared(lambda context: no_steps([]), None)
        return Prepared(lambda context: calls.explain(self.spec, checked), None)

    def presence(self, keys: Sequence[BlockKey], request_id: str) -> Prepared[Presence]:
        check_request_id(request_id)
        checked = check_keys(keys)
        if checked is None:
            if _not_empty(keys):
                raise BadRequest(Reason.BAD_KEY_LENGTH, "presence takes keys", "keys")
            nothing = Presence((), Reason.NOTHING_TO_DO)
            return Prepared(lambda context: no_steps(nothing), None)

        def failed(reason: Reason, detail: str, differences: Differences) -> Presence:
            return Presence((False,) * len(checked), reason, differences, detail)

        return Prepared(
            lambda context: presence.presence(self.spec, checked, request_id=request_id), failed
        )

    # ---------------------------------------------------------------- evidence

    def report(self, report: pb.RequestReport) -> bool:
        """Sends a report (see `outcomes`) some time soon, or once a daemon answers; False if the
        client is being closed. BadRequest: it is."""
        check_request_id(report.request_id)
        if report.prefill_us and not report.failed:
            # The same figures tell what prefill costs; what is no prefill is ignored there.
            cached = report.prompt_tokens - report.computed_tokens
            self.prefill.observe(report.prompt_tokens, cached, report.prefill_us)
        link = self.root.link()
        session, _ = link.peek()
        binding = None if session is None else session.spaces.get(self.spec.fingerprint.digest)
        if binding is not None:
            report.space_id = binding.space_id
        return link.reported(session, report)

    def compare(
        self,
        given: TokensOrKeys,
        computed: Any,
        *,
        first_block: int,
        tolerance: Tolerance | None,
        request_id: str,
    ) -> Prepared[Compared]:
        check_request_id(request_id)
        keys, _ = self.chain(given)
        if type(first_block) is not int or not 0 <= first_block <= len(keys):
            raise BadRequest(
                Reason.BAD_SIZE, f"first_block is an int from 0 to {len(keys)}", "first_block"
            )
        kv_dtype = self.spec.fingerprint.encoding.kv_dtype
        if tolerance is None and kv_dtype not in TOLERANCES:
            raise BadRequest(Reason.NOT_SUPPORTED, f"give a tolerance for {kv_dtype}", "tolerance")
        layout = self.spec.layout
        offset = layout.parts[self.spec.part].offset
        row_bytes = layout.part_bytes
        request = CompareRequest(
            keys=keys,
            first_block=first_block,
            fill=self._fill_from(computed, first_block, len(keys)),
            row_bytes=row_bytes,
            span=slice(offset, offset + row_bytes) if len(layout.parts) > 1 else None,
            tolerance=tolerance,
            request_id=request_id,
        )

        def start(context: Context) -> Operation[Compared]:
            if first_block >= len(keys):
                return no_steps(Compared(0, 0, 0.0, None, Reason.NOTHING_TO_DO))
            return audits.compare(context, self.spec, request)

        def failed(reason: Reason, detail: str, differences: Differences) -> Compared:
            return Compared(0, 0, 0.0, None, reason, detail=detail)

        return Prepared(start, failed)

    # ---------------------------------------------------------------- tensors

    def tensors(self, fetched: Fetched) -> Fetched:
        """The same with `data` as one torch tensor over the same memory: [n, *part shape], with a
        dimension for the parts in front of the part's where there are several.
        """
        import torch  # here: a client without tensors needs none

        layout = self.spec.layout
        shape = layout.part_shape(0)
        if len(layout.parts) > 1:
            shape = (len(layout.parts), *shape)
        dtype = getattr(torch, layout.kv_dtype)
        flat = torch.from_numpy(fetched.data)
        # Flat first: torch refuses to view rows of nothing, as of a miss, as another type.
        data = flat.reshape(-1).view(dtype).reshape(flat.shape[0], *shape)
        return replace(fetched, data=data)

    def check_tensors(self) -> None:
        """BadRequest(NOT_SUPPORTED) where only the engine knows the shape of its blocks."""
        self.spec.layout.part_shape(0)


def predicted_ms(given: KeysOrHit) -> float:
    """What was predicted for loading all that the plan advises to load first; 0: nothing was."""
    if isinstance(given, Hit) and not given.plan.tail_blocks:
        return given.plan.load_ms
    return 0.0


def check_request_id(request_id: object) -> None:
    check_text(request_id, REQUEST_ID_BYTES_MAX, "request_id")


def check_wait_ms(wait_ms: object) -> None:
    if type(wait_ms) is not int or not 0 <= wait_ms <= WAIT_MS_MAX:
        raise BadRequest(Reason.BAD_SIZE, "wait_ms is an int, 0 or more", "wait_ms")


def _not_empty(given: object) -> bool:
    """True for what has no length, too: None, an iterator."""
    return not isinstance(given, Sized) or len(given) > 0


def _skipped(offered: int, reason: Reason, detail: str) -> Pushed:
    return Pushed(0, 0, 0, 0, offered, 0, reason, detail)


def _no_memory(blocks: int, row_bytes: int) -> Prepared[Fetched]:
    """A miss, for want of memory in this process."""
    nothing = np.empty((0, row_bytes), np.uint8)
    detail = f"this process has no memory for {blocks} blocks of {row_bytes} bytes; give `out`"
    missed = Fetched(0, 0, nothing, Reason.NO_SPACE, detail=detail)
    return Prepared(lambda context: no_steps(missed), lambda reason, detail, _: missed)


def no_steps(result: Any) -> Operation[Any]:
    """An operation that has its result already."""
    yield from ()  # a generator that ends at once
    return result


def then(operation: Operation[Any], finish: Callable[[Any], Any]) -> Operation[Any]:
    """The same with another result, made of its own."""
    return finish((yield from operation))
