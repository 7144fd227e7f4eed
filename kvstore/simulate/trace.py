"""Block traces: one JSON object a line, what was asked for and when, no tokens.

`timestamp` ms from the start, `input_length` tokens, `hash_ids` one id a block in order; an id
names the block and all before it. `block_tokens`, where present, are the tokens of each block;
else all blocks but the last have 512. Daemons record the same format. Pure but for `read_trace`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK_TOKENS = 512
LINE_BYTES_MAX = 16 * 2**20


class TraceError(ValueError):
    """A line that is no request; the text says which and why."""


class Request(NamedTuple):
    """One prompt. at_ns: from the trace's start. block_tokens: tokens of each block."""

    at_ns: int
    input_tokens: int
    ids: Sequence[int]
    block_tokens: Sequence[int]


def read_trace(path: Path) -> list[Request]:
    """All requests of a file, `.gz` or plain. TraceError; OSError."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        try:
            return list(parse(lines))
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{path.name}: {error}") from error
        except TraceError as error:
            raise TraceError(f"{path.name}, {error}") from error


def parse(lines: Iterable[str]) -> Iterator[Request]:
    """The requests of a trace, in order. TraceError. Lines without `hash_ids` are left out: a
    daemon's own file has other records, too.
    """
    last_ns = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line)
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(f"line {number}: {error}") from error
        if request is None:
            continue
        if request.at_ns < last_ns:
            raise TraceError(f"line {number}: `timestamp` goes back")
        last_ns = request.at_ns
        yield request


def _request(line: str) -> Request | None:
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"longer than {LINE_BYTES_MAX} characters")
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise TypeError("not an object")
    if "hash_ids" not in fields:
        return None
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not all(isinstance(one, int) and one >= 0 for one in ids):
        raise ValueError("`hash_ids` is not a list of whole numbers")
    length = _whole(fields, "input_length")
    tokens = fields.get("block_tokens")
    if tokens is None:
        tokens = _full_blocks(length, len(ids))
    elif not isinstance(tokens, list) or len(tokens) != len(ids):
        raise ValueError("`block_tokens` does not match `hash_ids`")
    return Request(_whole(fields, "timestamp") * 10**6, length, ids, tokens)


def _whole(fields: dict[str, object], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int | float) or value < 0 or int(value) != value:
        raise ValueError(f"`{name}` is {value!r}, not a whole number")
    return int(value)


def _full_blocks(length: int, count: int) -> list[int]:
    """Tokens of each block where all but the last are full."""
    if not count:
        return []
    last = length - BLOCK_TOKENS * (count - 1)
    if not 0 <= last <= BLOCK_TOKENS:
        raise ValueError(f"{count} blocks do not have {length} tokens")
    return [BLOCK_TOKENS] * (count - 1) + [last]


def with_even_blocks(requests: Iterable[Request]) -> list[Request]:
    """The same requests, with their tokens spread evenly over their blocks: min(512, max(1,
    floor(input / n + 1/2))) each, as the published hit curves have it.
    """
    spread = []
    for request in requests:
        count = len(request.ids)
        each = min(BLOCK_TOKENS, max(1, int(request.input_tokens / count + 0.5))) if count else 0
        spread.append(request._replace(block_tokens=[each] * count))
    return spread
