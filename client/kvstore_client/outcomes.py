"""What became of a request, as the engine tells it: checked, and put into the daemon's words.

The figures are the engine's own. They are worth something only if all requests are reported in the
same way, the held-out ones too.
"""

from __future__ import annotations

import math
from typing import Any

from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.results import Fetched, Hit

__all__ = ["report_of"]

MS_MAX = 86_400_000.0
TOKENS_MAX = 2**32 - 1


def report_of(
    hit: Hit,
    fetched: Fetched | None,
    *,
    block_tokens: int,
    first_token_ms: float,
    prefill_ms: float,
    computed_tokens: int | None,
    prompt_tokens: int,
    failed: bool,
    request_id: str,
) -> pb.RequestReport:
    """The message, without its space. BadRequest for figures that cannot be."""
    if not isinstance(hit, Hit):
        raise BadRequest(Reason.BAD_REQUEST, "a report is about the Hit of a lookup", "hit")
    if not isinstance(fetched, Fetched | None):
        raise BadRequest(Reason.BAD_REQUEST, "fetched is what fetch gave, or None", "fetched")
    if not hit.keys:
        raise BadRequest(Reason.BAD_REQUEST, "this prompt has no whole block", "hit")
    loaded = 0 if fetched is None else fetched.tokens
    prompt = _tokens(prompt_tokens, "prompt_tokens") or hit.prompt_tokens
    prompt = prompt or len(hit.keys) * block_tokens
    computed = prompt - loaded if computed_tokens is None else computed_tokens
    report = pb.RequestReport(
        last_key=hit.keys[-1],
        request_id=request_id,
        prompt_tokens=min(prompt, TOKENS_MAX),
        found_tokens=min(hit.tokens, TOKENS_MAX),
        tier=1 + max(hit.tiers) if hit.tiers else 0,
        loaded_tokens=min(loaded, TOKENS_MAX),
        computed_tokens=_tokens(max(0, computed), "computed_tokens"),
        prefill_us=_us(prefill_ms, "prefill_ms"),
        first_token_us=_us(first_token_ms, "first_token_ms"),
        failed=bool(failed),
        reason=convert.reason_to_wire(hit.plan.reason if fetched is None else fetched.reason),
    )
    if fetched is not None:
        report.loaded_bytes = fetched.bytes
        report.load_us = _us(min(fetched.total_ms, MS_MAX), "fetched")
    return report


def _us(elapsed_ms: Any, name: str) -> int:
    """Microseconds, at least 1 for what was measured at all."""
    if isinstance(elapsed_ms, bool) or not isinstance(elapsed_ms, int | float):
        raise BadRequest(Reason.BAD_SIZE, f"{name} is a number of milliseconds", name)
    if not math.isfinite(elapsed_ms) or not 0 <= elapsed_ms <= MS_MAX:
        raise BadRequest(Reason.BAD_SIZE, f"{name} is from 0 to {MS_MAX:.0f} ms", name)
    return max(1, round(elapsed_ms * 1e3)) if elapsed_ms else 0


def _tokens(count: Any, name: str) -> int:
    if type(count) is not int or not 0 <= count <= TOKENS_MAX:
        raise BadRequest(Reason.BAD_SIZE, f"{name} is an int, 0 or more", name)
    return count
