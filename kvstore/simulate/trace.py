"""Block traces: one JSON object a line, what was asked for and when, no tokens.

`timestamp` ms from the start, `input_length` tokens, `hash_ids` one id a block in order; an id
names the block and all before it. `block_tokens`, where present, are the tokens of each block, or
`tokens_per_block` of all of them; else all blocks but the last have 512. `verb` "put": stored, but
asked for by nobody. Daemons record the same format, in numbered files of one folder
(`record.path`), and times from 1970. Pure but for `read_trace` and `traces_in`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TextIO

BLOCK_TOKENS = 512
LINE_BYTES_MAX = 16 * 2**20
DATED_NS = 10**11 * 10**6
"""Times from here on (1973) are counted from 1970; they are told from the first request on."""
_LOG = re.compile(r"access-(\d{8,})\.jsonl(\.gz)?")


class TraceError(ValueError):
    """A line that is no request; the text says which and why."""


class Request(NamedTuple):
    """One prompt. at_ns: from the trace's start. block_tokens: tokens of each block. asked: False
    where it was only stored, as text that was generated.
    """

    at_ns: int
    input_tokens: int
    ids: Sequence[int]
    block_tokens: Sequence[int]
    asked: bool = True


def traces_in(paths: Iterable[Path]) -> list[tuple[str, list[Path]]]:
    """Names of traces, and their files in order: a folder is a daemon's access log, and so are its
    files where they are given one after the other. TraceError: a folder has none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = _log_files(path)
            if not found:
                raise TraceError(f"{path}: no files of an access log (access-*.jsonl)")
            files += found
        else:
            files.append(path)
    traces = []
    for _, parts in groupby(enumerate(files), key=_whole_of):
        its = [path for _, path in parts]
        last = f" to {its[-1].name}" if len(its) > 1 else ""
        traces.append((its[0].name + last, its))
    return traces


def _whole_of(numbered: tuple[int, Path]) -> tuple[Path, int]:
    """What a file is a part of: its folder's log, or itself alone."""
    number, path = numbered
    return (path.parent, -1) if _LOG.fullmatch(path.name) else (path, number)


def _log_files(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # x.jsonl before x.jsonl.gz
        match = _LOG.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), path)
    return [found[number] for number in sorted(found)]


def read_trace(*paths: Path) -> list[Request]:
    """All requests of a trace's files, `.gz` or plain, in the order given. TraceError; OSError."""
    requests: list[Request] = []
    for path in paths:
        last_ns = requests[-1].at_ns if requests else 0
        # Each file begins at a daemon's start, perhaps, and a date may have been set back.
        requests += (one._replace(at_ns=max(one.at_ns, last_ns)) for one in _read(path))
    first_ns = requests[0].at_ns if requests else 0
    if first_ns >= DATED_NS:
        requests = [one._replace(at_ns=one.at_ns - first_ns) for one in requests]
    return requests


def _read(path: Path) -> list[Request]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        try:
            return list(parse(_ended(lines) if _LOG.fullmatch(path.name) else lines))
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{path.name}: {error}") from error
        except TraceError as error:
            raise TraceError(f"{path.name}, {error}") from error


def _ended(lines: TextIO) -> Iterator[str]:
    """Lines with an end: the last one may be being written, or its daemon was killed."""
    return (line for line in lines if line.endswith("\n"))


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
    if tokens is None and "tokens_per_block" in fields:
        tokens = [_whole(fields, "tokens_per_block")] * len(ids)
        if sum(tokens) > length:
            raise ValueError("`input_length` is less than its blocks have")
    elif tokens is None:
        tokens = _full_blocks(length, len(ids))
    elif not isinstance(tokens, list) or len(tokens) != len(ids):
        raise ValueError("`block_tokens` does not match `hash_ids`")
    at_ns = _whole(fields, "timestamp") * 10**6
    return Request(at_ns, length, ids, tokens, fields.get("verb") != "put")


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
