"""How a daemon says that it serves."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from kvstore.model.reasons import StartError
from kvstore_server.ready import Announcer

RECORD = {"pid": 7, "http": "127.0.0.1:1"}


def test_the_descriptor_gets_one_line_and_is_closed() -> None:
    read_fd, write_fd = os.pipe()
    announcer = Announcer({"KVSTORE_READY_FD": str(write_fd)}, None)
    assert not os.get_inheritable(write_fd)
    announcer.ready(RECORD)
    with open(read_fd, "rb") as reader:
        assert json.loads(reader.read()) == RECORD


def test_nobody_listening_any_more_is_no_reason_not_to_serve() -> None:
    read_fd, write_fd = os.pipe()
    announcer = Announcer({"KVSTORE_READY_FD": str(write_fd)}, None)
    os.close(read_fd)
    announcer.ready(RECORD)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)


@pytest.mark.parametrize("given", ["-1", "99999", "x"])
def test_a_descriptor_that_is_none_is_told(given: str) -> None:
    with pytest.raises(StartError, match="no open descriptor") as caught:
        Announcer({"KVSTORE_READY_FD": given}, None)
    assert caught.value.setting == "KVSTORE_READY_FD"


def test_the_file_appears_whole_and_goes_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text("of an earlier daemon")
    announcer = Announcer({}, str(file))
    assert not file.exists()
    announcer.ready(RECORD)
    assert json.loads(file.read_text()) == RECORD
    assert os.listdir(tmp_path) == ["ready.json"]
    announcer.stopping()
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    announcer = Announcer({}, str(tmp_path / "absent" / "ready.json"))
    with pytest.raises(StartError, match="cannot write"):
        announcer.ready(RECORD)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(tmp_path: Path, abstract: bool) -> None:
    shown = f"@kvstore-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + shown[1:] if abstract else shown)
        manager.settimeout(5)
        announcer = Announcer({"NOTIFY_SOCKET": shown}, None)
        announcer.ready(RECORD)
        announcer.stopping()
        assert manager.recv(100) == b"READY=1"
        assert manager.recv(100) == b"STOPPING=1"


def test_a_service_manager_that_is_gone_is_survived(tmp_path: Path) -> None:
    Announcer({"NOTIFY_SOCKET": str(tmp_path / "gone")}, None).ready(RECORD)
