"""Records: one line each, with their facts, and not too many of a kind."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from kvstore_server import logs


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_s(self) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def _keep_the_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _written(log_format: Literal["json", "text"], message: str, **fields: Any) -> str:
    stream = io.StringIO()
    logs.configure("info", log_format, stream)
    logs.event(logging.getLogger("kvstore.test"), logging.INFO, message, **fields)
    return stream.getvalue()


def test_json_is_one_object_a_line() -> None:
    line = _written("json", 'say "x"\n', count=3, name="é", odd={1: b"b"}, time="mine")
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry["event"] == 'say "x"\n'
    assert (entry["count"], entry["level"], entry["logger"]) == (3, "info", "kvstore.test")
    assert entry["time"].endswith("Z")  # a field cannot replace what every record has


def test_text_is_one_line_though_a_message_has_several() -> None:
    line = _written("text", "first\nsecond", stored="a\nb")
    assert line.count("\n") == 1
    assert r"first\nsecond" in line
    assert r'stored="a\nb"' in line


def test_below_the_level_nothing_is_written() -> None:
    stream = io.StringIO()
    logs.configure("warning", "json", stream)
    logs.event(logging.getLogger("kvstore.test"), logging.INFO, "quiet")
    assert stream.getvalue() == ""


def test_an_exception_is_kept() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("kvstore.test").exception("outer")
    assert "ValueError: inner" in json.loads(stream.getvalue())["exception"]


def test_a_kind_is_told_once_a_minute_with_what_was_left_out() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    clock = HandClock()
    throttled = logs.Throttled(logging.getLogger("kvstore.test"), clock)
    for _ in range(5):
        throttled.warning("a", "it happened", n=1)
    throttled.warning("b", "something else")
    clock.now_ns += 59 * 10**9
    throttled.warning("a", "it happened")
    clock.now_ns += 10**9
    throttled.warning("a", "it happened")
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["event"] for entry in entries] == ["it happened", "something else", "it happened"]
    assert "left_out" not in entries[0]
    assert entries[2]["left_out"] == 5


def test_kinds_are_bounded() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    throttled = logs.Throttled(logging.getLogger("kvstore.test"), HandClock())
    for number in range(logs.KINDS_MAX + 100):
        throttled.warning(f"kind {number}", "it happened")
    assert len(stream.getvalue().splitlines()) == logs.KINDS_MAX + 1


def test_a_caller_who_has_left_or_a_stop_is_no_error() -> None:
    """gRPC logs it with a traceback; everything else that it says stays."""
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    log = logging.getLogger("grpc._cython.cygrpc")
    left = type("ExecuteBatchError", (Exception,), {})
    for error in (left("left"), asyncio.CancelledError(), ValueError("other")):
        try:
            raise error
        except (Exception, asyncio.CancelledError):
            log.exception("raised by a method")
    log.error("without one")
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["event"] for entry in entries] == ["raised by a method", "without one"]
    assert "ValueError: other" in entries[0]["exception"]
