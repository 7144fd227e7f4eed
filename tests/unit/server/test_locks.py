"""One daemon a socket, and nothing of anybody else's in its place."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.model.reasons import Reason, StartError
from kvstore_server import locks

SETTING = "tenants.default.socket"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data.sock")


@pytest.fixture
def held(path: str) -> Iterator[locks.SocketLock]:
    lock = locks.SocketLock(path, SETTING)
    yield lock
    lock.close()


def test_a_lock_is_had_once_and_again_after_its_end(path: str) -> None:
    first = locks.SocketLock(path, SETTING)
    with pytest.raises(StartError, match=f"pid {os.getpid()}") as caught:
        locks.SocketLock(path, SETTING)
    assert caught.value.reason is Reason.START_LOCKED
    assert caught.value.setting == SETTING
    first.close()
    locks.SocketLock(path, SETTING).close()
    assert os.path.exists(f"{path}.lock")


def test_a_lock_file_that_is_a_link_is_not_followed(path: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    os.symlink(target, f"{path}.lock")
    with pytest.raises(StartError) as caught:
        locks.SocketLock(path, SETTING)
    assert caught.value.reason is Reason.START_SOCKET
    assert target.read_text() == "precious"


def test_a_stale_socket_is_removed(path: str, held: locks.SocketLock) -> None:
    locks.bind(path, SETTING).close()
    assert os.path.exists(path)
    locks.clear_stale(path, SETTING)
    assert not os.path.exists(path)
    locks.clear_stale(path, SETTING)  # nothing there is fine


def test_a_socket_that_somebody_listens_on_is_not_touched(
    path: str, held: locks.SocketLock
) -> None:
    with locks.bind(path, SETTING) as listener:
        listener.listen(0)
        for _ in range(2):  # also once its backlog is full
            with pytest.raises(StartError) as caught:
                locks.clear_stale(path, SETTING)
            assert caught.value.reason is Reason.START_LOCKED
            waiting = socket.socket(socket.AF_UNIX)
            waiting.setblocking(False)
            with waiting:
                waiting.connect_ex(path)
        assert os.path.exists(path)


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_no_socket_is_not_touched(path: str, kind: str, held: locks.SocketLock) -> None:
    if kind == "file":
        Path(path).write_text("precious")
    elif kind == "link":
        os.symlink("/etc/passwd", path)
    else:
        os.mkdir(path)
    with pytest.raises(StartError, match="no socket") as caught:
        locks.clear_stale(path, SETTING)
    assert caught.value.setting == SETTING
    assert os.path.lexists(path)


def test_a_socket_is_closed_to_others_until_it_is_opened_up(path: str) -> None:
    with locks.bind(path, SETTING):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        locks.open_up(path, 0o660, os.getegid(), SETTING)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        locks.remove_sockets([path, f"{path}.absent"])
        assert not os.path.exists(path)


@pytest.mark.parametrize(("passable", "mode"), [(False, 0o700), (True, 0o711)])
def test_a_folder_is_made_with_its_mode(tmp_path: Path, passable: bool, mode: int) -> None:
    before = os.umask(0o077)
    try:
        path = locks.prepare_folder(str(tmp_path / "run"), passable=passable, setting="x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode


def test_a_folder_that_everybody_may_write_is_refused_unless_sticky(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    inside = str(open_folder / "run")
    for path in (str(open_folder), inside):
        with pytest.raises(StartError, match="everybody") as caught:
            locks.prepare_folder(path, passable=False, setting="server.runtime_dir")
        assert caught.value.setting == "server.runtime_dir"
        assert "sticky" in caught.value.detail
        assert "server.trust_folder_writers" in caught.value.detail
        assert locks.prepare_folder(path, passable=False, setting="x", writers_trusted=True) == path
    open_folder.chmod(0o1777)
    assert locks.prepare_folder(inside, passable=False, setting="x") == inside


def test_a_link_above_is_resolved_and_its_target_checked(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(open_folder)
    with pytest.raises(StartError, match="everybody"):
        locks.prepare_folder(str(link), passable=False, setting="x")


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    for trusted in (False, True):
        with pytest.raises(StartError, match="belongs to user 12345"):
            locks.prepare_folder(str(folder), passable=False, setting="x", writers_trusted=trusted)


def test_groups_by_name_and_number() -> None:
    assert locks.group_id("", "x") is None
    assert locks.group_id("123", "x") == 123
    assert locks.group_id("root", "x") == 0
    with pytest.raises(StartError, match="no group") as caught:
        locks.group_id("no-such-group", "tenants.a.group")
    assert caught.value.setting == "tenants.a.group"
