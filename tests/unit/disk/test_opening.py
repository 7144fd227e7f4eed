"""A disk tier's folder on a real file system: locked, opened, set aside."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.model.reasons import Reason, StartError
from kvstore.tiers.disk.folder import FORMAT_FILE, format_text, read_format_text
from kvstore.tiers.disk.format import Segment
from kvstore.tiers.disk.opening import DiskFolder, tree_bytes


def fill(folder: DiskFolder) -> None:
    """One segment, file and row."""
    opened = folder.open()
    opened.files.create(0, 1 << 20)
    opened.index.commit(add_segments=[Segment(0, 8192, 128, bytes(32))])
    opened.index.close()
    opened.files.close()


def segments(folder: DiskFolder) -> tuple[int, str]:
    """How many segments there are now, and why an older content was set aside."""
    opened = folder.open()
    count = len(opened.index.segments())
    assert len(opened.files.list()) == count
    opened.index.close()
    opened.files.close()
    return count, opened.set_aside


def asides(path: Path) -> list[str]:
    folder = path / "aside"
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_an_empty_folder_is_made_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "some" / "disk"
    folder = DiskFolder(str(path))
    fill(folder)
    folder.close()
    assert oct(path.stat().st_mode & 0o777) == "0o700"
    named = read_format_text((path / FORMAT_FILE).read_bytes())
    again = DiskFolder(str(path))
    assert segments(again) == (1, "")
    assert read_format_text((path / FORMAT_FILE).read_bytes()) == named
    assert again.is_there()
    again.close()


def test_two_cannot_have_a_folder(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    with pytest.raises(StartError) as caught:
        DiskFolder(str(tmp_path))
    assert caught.value.reason is Reason.START_LOCKED
    assert caught.value.setting == "disk.path"
    folder.close()
    DiskFolder(str(tmp_path)).close()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StartError) as caught:
            DiskFolder(str(path))
        assert caught.value.reason is Reason.START_DISK
        assert caught.value.setting == "disk.path"


def test_a_folder_into_which_everybody_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(StartError, match="everybody") as caught:
        DiskFolder(str(tmp_path))
    assert caught.value.reason is Reason.START_DISK
    assert caught.value.setting == "disk.path"


def test_what_is_made_is_ours_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = DiskFolder(str(tmp_path / "disk"))
        fill(folder)
        folder.close()
    finally:
        os.umask(before)
    made = list((tmp_path / "disk").rglob("*"))
    assert len(made) >= 5
    assert [path for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty"),
        (b"something else\n", "foreign"),
        (b"kvstore-disk 7\nwhatever follows", "future-version"),
        (b"kvstore-disk 1\nno id\n", "header-damaged"),
    ],
)
def test_a_folder_of_another_format_is_set_aside(tmp_path: Path, text: bytes, reason: str) -> None:
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    (tmp_path / FORMAT_FILE).write_bytes(text)
    count, why = segments(folder)
    assert count == 0
    assert why
    (name,) = asides(tmp_path)
    assert name.startswith(f"1-{reason}")
    kept = tmp_path / "aside" / name
    assert (kept / FORMAT_FILE).read_bytes() == text
    assert len(list((kept / "segments").iterdir())) == 1, "nothing is removed"
    assert segments(folder) == (0, "")


def test_segments_without_a_format_or_an_index_are_set_aside(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    (tmp_path / FORMAT_FILE).unlink()
    assert segments(folder) == (0, "no-format")
    fill(folder)
    shutil.rmtree(tmp_path / "index")
    assert segments(folder) == (0, "no-index")
    fill(folder)
    (tmp_path / "index" / "data.mdb").unlink()
    assert (tmp_path / "index" / "spare").exists()
    assert segments(folder) == (0, "no-index")
    assert asides(tmp_path) == ["1-no-format", "2-no-index", "3-no-index"]


@pytest.mark.parametrize("damage", ["truncate", "foreign", "empty"])
def test_an_index_that_cannot_be_used_is_set_aside(tmp_path: Path, damage: str) -> None:
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    path = tmp_path / "index" / "data.mdb"
    if damage == "truncate":
        os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    else:
        path.write_bytes(b"not ours" * 4096 if damage == "foreign" else b"")
    count, why = segments(folder)
    assert count == 0
    assert why
    assert len(asides(tmp_path)) == 1
    fill(folder)
    assert segments(folder) == (1, "")


def test_only_the_youngest_set_aside_is_kept(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    for reason in ("first", "second / odd:name", "third"):
        fill(folder)
        folder.set_aside(reason)
    assert asides(tmp_path) == ["1-first", "2-second-odd-name", "3-third"]
    before = folder.aside_bytes()
    assert before > 3 << 20
    folder.tidy()
    assert asides(tmp_path) == ["3-third"]
    assert before / 4 < folder.aside_bytes() < before / 2
    folder.drop_aside()
    assert asides(tmp_path) == []
    assert folder.aside_bytes() < 1 << 16
    fill(folder)
    folder.set_aside("fourth")
    assert asides(tmp_path) == ["1-fourth"]


def test_a_set_aside_is_no_way_out_of_the_folder(tmp_path: Path) -> None:
    path, outside = tmp_path / "disk", tmp_path / "outside"
    (outside / "1-theirs").mkdir(parents=True)
    (outside / "1-theirs" / "file").write_text("theirs")
    folder = DiskFolder(str(path))
    fill(folder)
    (path / "aside").symlink_to(outside)
    assert folder.aside_bytes() == 0
    folder.tidy()
    folder.drop_aside()
    with pytest.raises(NotADirectoryError, match="move it away"):
        folder.set_aside("reason")
    assert segments(folder) == (1, "")
    (path / "aside").unlink()
    (path / "aside").mkdir()
    (path / "aside" / "1-link").symlink_to(outside)
    (path / "aside" / "2-file").write_text("a file")
    (path / "aside" / "3-folder").mkdir()
    folder.tidy()
    assert asides(path) == ["3-folder"]
    assert (outside / "1-theirs" / "file").read_text() == "theirs"


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def other_kind(path: Path, outside: Path) -> None:
    """A folder where a file should be, a file where a folder should be."""
    if path.name in ("segments", "index", "index.new"):
        path.write_bytes(b"a file")
    else:
        path.mkdir()


@pytest.mark.parametrize("made", [pipe, link, other_kind], ids=lambda value: value.__name__)
@pytest.mark.parametrize(
    "name",
    ["FORMAT", "FORMAT.new", "segments", "index", "index.new"]
    + [f"index/{name}" for name in ("data.mdb", "lock.mdb")],
)
def test_what_is_no_plain_file_or_folder_is_set_aside_and_not_followed(
    tmp_path: Path, name: str, made: Callable[[Path, Path], None]
) -> None:
    path, outside = tmp_path / "disk", tmp_path / "outside"
    outside.write_text("theirs")
    folder = DiskFolder(str(path))
    fill(folder)
    if (path / name).is_dir():
        shutil.rmtree(path / name)
    else:
        (path / name).unlink(missing_ok=True)
    made(path / name, outside)
    count, why = segments(folder)
    assert count == 0
    # Segments without an index are set aside for that.
    assert why in (f"strange-{Path(name).name}", "no-index")
    assert outside.read_text() == "theirs"
    fill(folder)
    assert segments(folder) == (1, "")


@pytest.mark.parametrize("made", [pipe, link, other_kind], ids=lambda value: value.__name__)
def test_the_room_that_is_kept_is_no_way_out_of_the_folder(
    tmp_path: Path, made: Callable[[Path, Path], None]
) -> None:
    path, outside = tmp_path / "disk", tmp_path / "outside"
    outside.write_text("theirs")
    folder = DiskFolder(str(path))
    fill(folder)
    (path / "index" / "spare").unlink()
    made(path / "index" / "spare", outside)
    assert segments(folder) == (1, "")
    assert outside.read_text() == "theirs"


# ---------------------------------------------------------------- examined ahead


def ruin(path: Path) -> None:
    """Both roots are gone, the size is as it was."""
    data = path / "index" / "data.mdb"
    data.write_bytes(bytes(data.stat().st_size))


def children() -> set[str]:
    """Of this process, dead ones that nobody has heard of included."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for path in lists for pid in path.read_text().split()}


def test_an_index_that_was_examined_ahead_is_opened_by_that_verdict(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    folder.examine_ahead()
    assert segments(folder) == (1, "")
    ruin(tmp_path)
    folder.examine_ahead()
    assert segments(folder) == (0, "damaged-no-root")
    assert asides(tmp_path) == ["1-damaged-no-root"]
    folder.close()


def test_a_verdict_is_only_over_the_file_that_was_examined(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    before = children()
    folder.examine_ahead()
    for pid in children() - before:  # it has found all well
        os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)
    ruin(tmp_path)
    assert segments(folder) == (0, "damaged-no-root")
    fill(folder)
    folder.examine_ahead()
    (tmp_path / FORMAT_FILE).unlink()
    assert segments(folder) == (0, "no-format")
    fill(folder)
    assert segments(folder) == (1, "")
    folder.close()


def test_there_may_be_nothing_to_examine_ahead(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path / "disk"))
    folder.examine_ahead()
    fill(folder)
    (tmp_path / "disk" / "index" / "data.mdb").unlink()
    os.mkfifo(tmp_path / "disk" / "index" / "data.mdb")
    folder.examine_ahead()
    assert segments(folder) == (0, "strange-data.mdb")
    folder.close()


def test_a_folder_that_is_given_up_leaves_no_child(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    before = children()
    folder.examine_ahead()
    assert len(children() - before) == 1
    folder.close()
    assert children() <= before


def test_an_examination_that_is_over_and_not_asked_for_leaves_nothing_open(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    processes, files = children(), len(os.listdir("/proc/self/fd"))
    folder.examine_ahead()
    for pid in children() - processes:
        os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)
    folder.close()
    assert len(os.listdir("/proc/self/fd")) <= files


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "mine").write_text("too")
    folder = DiskFolder(str(tmp_path))
    fill(folder)
    folder.set_aside("reason")
    folder.drop_aside()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "aside" / "mine").read_text() == "too"


def test_a_draft_that_a_crash_left_is_no_format(tmp_path: Path) -> None:
    (tmp_path / f"{FORMAT_FILE}.new").write_bytes(b"kvsto")
    folder = DiskFolder(str(tmp_path))
    assert segments(folder) == (0, "")
    assert (tmp_path / FORMAT_FILE).read_bytes().startswith(b"kvstore-disk 1\n")


def test_a_folder_that_was_removed_is_noticed_and_locked_anew(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    folder = DiskFolder(str(path))
    fill(folder)
    shutil.rmtree(path)
    assert not folder.is_there()
    other = DiskFolder(str(path))
    with pytest.raises(OSError, match="unavailable"):
        folder.open()
    other.close()
    assert segments(folder) == (0, "")
    assert folder.is_there()
    with pytest.raises(StartError):
        DiskFolder(str(path))


def test_a_folder_that_was_exchanged_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    folder = DiskFolder(str(path))
    fill(folder)
    os.rename(path, tmp_path / "moved")
    path.mkdir()
    (path / FORMAT_FILE).write_bytes(format_text(uuid.UUID(int=7)))
    assert not folder.is_there()


@pytest.mark.parametrize("name", ["index/data.mdb", "index", "segments", "FORMAT", "lock"])
@pytest.mark.parametrize("replaced", [False, True])
def test_what_goes_out_of_a_folder_is_noticed(tmp_path: Path, name: str, replaced: bool) -> None:
    path = tmp_path / "disk"
    folder = DiskFolder(str(path))
    fill(folder)
    assert folder.is_there()
    if name == "FORMAT" and replaced:
        return  # what it says is read when a folder is opened
    (path / name).rename(tmp_path / "moved")
    if replaced and (tmp_path / "moved").is_dir():
        shutil.copytree(tmp_path / "moved", path / name)
    elif replaced:
        shutil.copyfile(tmp_path / "moved", path / name)
    assert not folder.is_there()
    again = folder.open()
    assert folder.is_there()
    again.index.close()
    again.files.close()


def test_bytes_of_a_tree_are_those_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "whole").write_bytes(bytes(1 << 20))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert 1 << 20 <= tree_bytes(str(tmp_path)) < 2 << 20
    assert tree_bytes(str(tmp_path / "absent")) == 0
