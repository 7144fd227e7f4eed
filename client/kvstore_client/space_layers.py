"""Fetch and push by layers, as both clients see them: what the arguments mean, and which operation
they start. As `spaces`, which has the other verbs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.model.reasons import BadRequest, Reason
from kvstore_client import layer_reads, layer_writes, reads
from kvstore_client.arrays import Bytes, strided_of
from kvstore_client.calls import SpaceSpec
from kvstore_client.device import DeviceRows, DeviceTarget, Driver
from kvstore_client.layer_reads import HostTarget, LayerLease, LayerRequest, Target
from kvstore_client.layer_writes import LayerPushing, Reserved
from kvstore_client.layers import LayerCopying
from kvstore_client.reads import FetchRequest
from kvstore_client.root import Prepared
from kvstore_client.session import Deadline
from kvstore_client.spaces import (
    Differences,
    KeysOrHit,
    SpaceCore,
    TokensOrKeys,
    check_request_id,
    check_wait_ms,
    no_steps,
    predicted_ms,
    then,
)
from kvstore_client.steps import Context, Operation
from kvstore_client.writes import Tally

__all__ = ["fetch_layers", "push_layers", "target_of"]


def fetch_layers(
    core: SpaceCore,
    given: KeysOrHit,
    out: Any,
    *,
    deadline: Deadline,
    part: bool,
    layers_at_once: int,
    wait_ms: int,
    request_id: str,
) -> Prepared[LayerCopying]:
    """The operation that leases what is to be copied; the copying is not begun by it."""
    check_request_id(request_id)
    check_wait_ms(wait_ms)
    if type(layers_at_once) is not int or layers_at_once < 1:
        raise BadRequest(Reason.BAD_SIZE, "layers_at_once is an int from 1 on", "layers_at_once")
    keys, no_keys = core.keys_to_load(given)
    made_here = out is None
    out, targets = layer_targets(core.spec, core.root.device, out, len(keys), part)
    no_memory = made_here and len(out[0]) < len(keys)
    row_bytes = sum(target.layer_bytes for target in targets)
    offset = core.spec.layout.parts[core.spec.part].offset
    fetching = FetchRequest(
        keys=keys,
        rows=[],
        span=slice(offset, offset + row_bytes) if part else None,
        wait_ms=wait_ms,
        all_or_nothing=False,
        request_id=request_id,
        prefill=core.prefill.cost(),
        predicted_ms=predicted_ms(given),
        prompt_tokens=core.tokens_of(given),
    )
    request = LayerRequest(fetching, targets, layers_at_once, row_bytes)
    fetched = core.fetched_by(fetching, lambda blocks: out[:, :blocks] if made_here else out)

    def copying(held: LayerLease | reads.Copied) -> LayerCopying:
        return LayerCopying(core.root, core.spec, request, deadline, held, fetched)

    def start(context: Context) -> Operation[LayerCopying]:
        if no_memory:
            detail = f"this process has no memory for {len(keys)} blocks; give `out`"
            return no_steps(copying(reads.Copied(reason=Reason.NO_SPACE, detail=detail)))
        if not keys:
            return no_steps(copying(reads.Copied(reason=no_keys)))
        return then(layer_reads.lease(context, core.spec, request), copying)

    def failed(reason: Reason, detail: str, differences: Differences) -> LayerCopying:
        return copying(reads.Copied(reason=reason, detail=detail))

    return Prepared(start, failed)


def push_layers(
    core: SpaceCore,
    given: TokensOrKeys,
    *,
    deadline: Deadline,
    first_block: int,
    attempt: int,
    durable: bool,
    request_id: str,
) -> Prepared[LayerPushing]:
    """The operation that reserves room for what is to be put."""
    # Its blocks come later, layer by layer: nothing asks this one for them.
    request = core.push_request(given, _never, first_block, attempt, durable, request_id)
    core.spec.layout.layer_spans(core.spec.layout.part(core.spec.part).first_layer)

    def pushing(reserved: Reserved) -> LayerPushing:
        return LayerPushing(core.root, core.spec, request, deadline, *reserved)

    def start(context: Context) -> Operation[LayerPushing]:
        if not request.offered:
            return no_steps(pushing((None, Tally(reason=Reason.NOTHING_TO_DO))))
        if not core.writes_part:
            why = "another rank holds the same bytes and writes them"
            return no_steps(pushing((None, Tally(reason=Reason.NOTHING_TO_DO, detail=why))))
        return then(layer_writes.reserve(context, core.spec, request), pushing)

    def failed(reason: Reason, detail: str, differences: Differences) -> LayerPushing:
        return pushing((None, Tally(reason=reason, detail=detail)))

    return Prepared(start, failed)


def layer_targets(
    spec: SpaceSpec, device: Driver, out: Any, blocks: int, part: bool
) -> tuple[Any, list[Target]]:
    """`out`, made here if it is None (without rows if there is no memory for them), and where each
    layer goes. BadRequest(BAD_SIZE) if it does not fit, (NOT_SUPPORTED) where only the engine knows
    the inside of its blocks.
    """
    layout = spec.layout
    own = layout.part(spec.part)
    numbers = range(own.first_layer, own.first_layer + own.layers) if part else range(layout.layers)
    spans = [
        # Within the part, and then where that is in the block: other parts have the layer, too.
        tuple(
            slice(one.start + own.offset, one.stop + own.offset)
            for one in layout.layer_spans(number, own.index)
        )
        if part
        else layout.layer_spans(number)
        for number in numbers
    ]
    if out is None:
        row_bytes = sum(span.stop - span.start for span in spans[0])
        try:
            out = np.empty((len(numbers), blocks, row_bytes), np.uint8)
        except (MemoryError, ValueError):  # ValueError: more than there are addresses
            return layer_targets(
                spec, device, np.empty((len(numbers), 0, row_bytes), np.uint8), 0, part
            )
    try:
        arrays = list(out)
    except TypeError:
        raise BadRequest(Reason.BAD_SIZE, "out has an array for each layer", "out") from None
    if len(arrays) != len(spans):
        raise BadRequest(
            Reason.BAD_SIZE, f"out has {len(arrays)} arrays for {len(spans)} layers", "out"
        )
    return out, [
        target_of(device, one, blocks, of_layer)
        for one, of_layer in zip(arrays, spans, strict=True)
    ]


def target_of(device: Driver, data: Any, blocks: int, spans: tuple[slice, ...]) -> Target:
    """Where one layer of the blocks goes, in whatever memory. BadRequest(BAD_SIZE)."""
    if device.owns(data):
        return DeviceTarget(DeviceRows(device, data, blocks, spans, "out"))
    return HostTarget(strided_of(data, blocks, spans, name="out", writable=True), spans)


def _never(index: int, target: Bytes) -> None:
    raise AssertionError("a push by layers has no other source")
