"""The committed wire code is what its .proto files say."""

from __future__ import annotations

from pathlib import Path

from protos import generate


def test_generated_code_is_in_step(tmp_path: Path) -> None:
    fresh = generate.generate(tmp_path)
    assert generate.differences(fresh, generate.read(generate.ROOT / generate.TARGET)) == []


def test_each_kind_of_drift_is_named() -> None:
    fresh = {"a_pb2.py": b"1", "b_pb2.py": b"2", "c_pb2.py": b"3"}
    committed = {"a_pb2.py": b"1", "b_pb2.py": b"other", "d_pb2.py": b"4"}
    lines = [
        line.removeprefix(f"{generate.TARGET}/") for line in generate.differences(fresh, committed)
    ]
    assert lines == [
        "b_pb2.py: differs",
        "c_pb2.py: missing",
        "d_pb2.py: left over, no .proto makes it",
    ]
