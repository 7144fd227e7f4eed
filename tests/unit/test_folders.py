"""Folders that nobody else can put something into, or exchange."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore import folders
from kvstore.folders import NotOurs

STRANGER = 12345


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("bits", [0, 0o022, 0o077])
@pytest.mark.parametrize("wanted", [0o700, 0o711])
def test_what_is_made_has_its_mode_whatever_the_umask(
    tmp_path: Path, bits: int, wanted: int
) -> None:
    path = tmp_path / "a" / "b" / "c"
    with umask(bits):
        assert folders.prepare(str(path), mode=wanted) == str(path)
    assert [mode(path.parent.parent), mode(path.parent), mode(path)] == [wanted] * 3


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert folders.prepare(str(tmp_path)) == str(tmp_path)
    assert mode(tmp_path) == 0o755


@pytest.mark.parametrize("shared", [False, True])
def test_a_folder_that_everybody_may_write_is_refused(tmp_path: Path, shared: bool) -> None:
    for below in ("", "below", "below/further"):
        tmp_path.chmod(0o777)
        with pytest.raises(NotOurs, match="everybody"):
            folders.prepare(str(tmp_path / below), shared=shared)
        assert list(tmp_path.iterdir()) == []


def test_a_sticky_folder_is_for_sockets_not_for_data(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert folders.prepare(str(tmp_path), shared=True) == str(tmp_path)
    with pytest.raises(NotOurs, match="take that right away"):
        folders.prepare(str(tmp_path))
    assert mode(Path(folders.prepare(str(tmp_path / "ours")))) == 0o700


def test_our_own_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "far").symlink_to(tmp_path / "link" / ".." / "absent")
    assert folders.prepare(str(tmp_path / "link" / "in")) == str(tmp_path / "real" / "in")
    assert folders.prepare(str(tmp_path / "far")) == str(tmp_path / "absent")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        folders.prepare(str(tmp_path / "round"))


def test_a_link_to_a_folder_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    with pytest.raises(NotOurs, match="open"):
        folders.prepare(str(tmp_path / "link"), shared=True)


@pytest.mark.root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.lchown(tmp_path / "link", STRANGER, -1)
    for path in ("link", "link/below"):
        with pytest.raises(NotOurs, match=f"a link of user {STRANGER}"):
            folders.prepare(str(tmp_path / path), shared=True)
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, STRANGER, -1)
    with pytest.raises(NotOurs, match=f"user {STRANGER}"):
        folders.prepare(str(tmp_path))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(NotADirectoryError):
            folders.prepare(str(tmp_path / path))
