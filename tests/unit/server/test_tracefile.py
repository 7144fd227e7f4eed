"""Records on disk: whole lines, through rotation and a full disk."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.model.reasons import Reason, StartError
from kvstore.model.record import Record, RecordBuilder, Ring
from kvstore_server.sinks import SinkRing
from kvstore_server.tracefile import TraceFile


def _record(number: int) -> Record:
    builder = RecordBuilder("lookup", f"request-{number}", "default", number, 0.0)
    return builder.finish(Reason.HIT, number + 1000)


def test_every_record_is_a_line_and_the_ring_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    file = TraceFile(str(path), SystemClock())
    ring: Ring = SinkRing(4, [file])
    for number in range(1000):
        ring.append(_record(number))
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [f"request-{n}" for n in range(1000)]
    assert len(ring) == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_earlier_file_is_continued_and_a_moved_one_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("earlier\n")
    first = TraceFile(str(path), SystemClock())
    first.append(_record(1))
    first.close()
    assert len(path.read_text().splitlines()) == 2
    second = TraceFile(str(path), SystemClock())
    os.rename(path, tmp_path / "trace.jsonl.1")
    second.append(_record(2))
    second.close()
    assert json.loads(path.read_text())["request_id"] == "request-2"


def test_a_full_disk_loses_records_and_counts_them() -> None:
    file = TraceFile("/dev/full", SystemClock())
    file.append(_record(1))
    file.close()
    assert file.dropped == 1


def test_a_file_that_cannot_be_opened_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "absent" / "x", tmp_path, tmp_path / "link"):
        with pytest.raises(StartError) as caught:
            TraceFile(str(path), SystemClock())
        assert caught.value.setting == "trace.file"
