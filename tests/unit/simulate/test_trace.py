"""Traces: what a line has to say, and what is refused with its number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvstore.policy.lru import Lru
from kvstore.simulate.curve import lru_hit_tokens
from kvstore.simulate.optimum import hit_tokens
from kvstore.simulate.replay import Replay
from kvstore.simulate.trace import (
    Request,
    TraceError,
    parse,
    read_trace,
    traces_in,
    with_even_blocks,
)


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


def test_blocks_may_all_have_the_same_tokens() -> None:
    (request,) = parse([line(tokens_per_block=16, input_length=40)])
    assert (request.input_tokens, request.block_tokens) == (40, [16, 16])
    with pytest.raises(TraceError, match="less than its blocks"):
        list(parse([line(tokens_per_block=16, input_length=31)]))


def test_what_was_only_stored_is_not_asked_for() -> None:
    got, put, again = parse(
        [
            line(verb="get", input_length=512, hash_ids=[7]),
            line(verb="put", hash_ids=[7, 8], tokens_per_block=500),
            line(timestamp=6),
        ]
    )
    assert [one.asked for one in (got, put, again)] == [True, False, True]
    trace = [got, put, again]
    figures = Replay(Lru, 100).serve(trace)
    assert figures.requests == 2
    assert sum(figures.hit_tokens) == lru_hit_tokens(trace, [100])[0] == hit_tokens(trace, 100)
    assert sum(figures.hit_tokens) == 1_000, "the block that was generated hits, too"
    assert sum(Replay(Lru, 100).serve([got, again]).hit_tokens) == 512


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


def test_an_access_log_is_read_in_its_order(tmp_path: Path) -> None:
    dated = 1_700_000_000_000
    parts = [
        line(timestamp=dated) + "\n" + line(timestamp=dated + 9) + "\n",
        # The date was set back between them.
        line(timestamp=dated + 4) + "\n" + line(timestamp=dated + 20) + '\n{"timestamp": 17',
        line(timestamp=dated + 30) + "\n",
    ]
    for number, text in zip((9, 10, 11), parts, strict=True):
        (tmp_path / f"access-{number:08}.jsonl").write_text(text)
    middle = tmp_path / "access-00000010.jsonl"
    (tmp_path / "access-00000010.jsonl.gz").write_bytes(gzip.compress(middle.read_bytes()))
    middle.unlink()
    (tmp_path / "salt").write_bytes(b"s")
    other = tmp_path / "other.jsonl"
    other.write_text(line() + "\n")
    ((name, files),) = traces_in([tmp_path])
    assert name == "access-00000009.jsonl to access-00000011.jsonl"
    assert [one.at_ns // 10**6 for one in read_trace(*files)] == [0, 9, 9, 20, 30]
    assert traces_in(files) == [(name, files)]
    assert [len(its) for _, its in traces_in([other, *files[:2], other, other])] == [1, 2, 1, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no files of an access log"):
        traces_in([tmp_path / "empty"])


def test_even_blocks() -> None:
    (even,) = with_even_blocks(parse([line(block_tokens=[1, 1], input_length=701)]))
    assert even.block_tokens == [351, 351]
