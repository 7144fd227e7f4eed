"""Traces: what a line has to say, and what is refused with its number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvstore.simulate.trace import Request, TraceError, parse, read_trace, with_even_blocks


def line(**fields: object) -> str:
    return json.dumps({"timestamp": 5, "input_length": 1_000, "hash_ids": [7, 8]} | fields)


def test_the_last_block_has_the_rest() -> None:
    assert list(parse([line(), "", line(timestamp=6)])) == [
        Request(5_000_000, 1_000, [7, 8], [512, 488]),
        Request(6_000_000, 1_000, [7, 8], [512, 488]),
    ]


def test_blocks_may_say_their_tokens() -> None:
    (request,) = parse([line(block_tokens=[100, 3])])
    assert request.block_tokens == [100, 3]


def test_other_records_are_left_out() -> None:
    assert list(parse([json.dumps({"event": "start"}), line()])) == list(parse([line()]))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        line(timestamp=-1),
        line(timestamp="soon"),
        line(input_length=None),
        line(input_length=5_000),
        line(hash_ids="7"),
        line(hash_ids=[1.5, 2]),
        line(hash_ids=[-1, 2]),
        line(block_tokens=[1]),
        json.dumps({"hash_ids": [1]}),
    ],
)
def test_a_wrong_line_is_named(text: str) -> None:
    with pytest.raises(TraceError, match="line 2"):
        list(parse([line(), text]))


def test_time_does_not_go_back() -> None:
    with pytest.raises(TraceError, match="line 2: `timestamp` goes back"):
        list(parse([line(), line(timestamp=4)]))


def test_files_may_be_compressed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(line() + "\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed) == list(parse([line()]))
    packed.write_bytes(packed.read_bytes()[:-10])
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz"):
        read_trace(packed)


def test_even_blocks() -> None:
    (even,) = with_even_blocks(parse([line(block_tokens=[1, 1], input_length=701)]))
    assert even.block_tokens == [351, 351]
