"""Who is let in over TCP: tokens, names, and the files that they come from."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli import token as token_command
from kvstore.config import load as load_settings
from kvstore.model.reasons import StartError
from kvstore_server import identity
from kvstore_server.identity import Entry, Identity, bearer
from kvstore_server.secretfiles import BYTES_MAX, read

SETTING = "tenants.a.token_file"


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def token() -> str:
    return secrets.token_urlsafe(32)


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def loaded(**files: Path) -> Identity:
    flags = {}
    for tenant, path in files.items():
        flags[f"tenants.{tenant}.token_file"] = str(path)
        flags[f"tenants.{tenant}.client_names"] = f"engine-{tenant}, spiffe://k/{tenant}"
    return identity.load(load_settings(environ={"XDG_RUNTIME_DIR": "/r"}, flags=flags))


# ---------------------------------------------------------------- who


def test_token_and_certificate_of_one_tenant_come_in_together_alone() -> None:
    one, other = token(), token()
    door = Identity(
        {"a": [digest(one)], "b": [digest(other)]}, {"name-a": "a", "second": "a", "name-b": "b"}
    )
    assert door.entry(["name-a"], one) == Entry("a", "name-a", digest(one))
    assert door.entry(["unknown", "second"], one) == Entry("a", "second", digest(one))
    assert door.entry(["name-b"], other) == Entry("b", "name-b", digest(other))
    for names, presented in (
        (["name-b"], one),
        (["name-a"], other),
        (["name-a"], token()),
        (["name-a"], ""),
        (["unknown"], one),
        (["NAME-A"], one),
        ([""], one),
        ([], one),
        (["name-a"], one[:-1]),
        (["name-a"], one + "A"),
    ):
        assert door.entry(names, presented) is None, names


def test_nobody_is_let_in_where_there_are_no_tokens() -> None:
    """As in the daemon that compared with an empty default secret: nothing equals nothing there."""
    for door in (Identity({}, {}), Identity({"a": []}, {"n": "a"}), Identity({}, {"": ""})):
        for names in (["n"], [""], []):
            assert door.entry(names, "") is None


def test_who_was_let_in_is_let_in_until_token_or_name_is_gone() -> None:
    one, two = token(), token()
    entry = Identity({"a": [digest(one)]}, {"n": "a"}).entry(["n"], one)
    assert entry is not None
    assert Identity({"a": [digest(two), digest(one)]}, {"n": "a"}).still_lets_in(entry)
    assert not Identity({"a": [digest(two)]}, {"n": "a"}).still_lets_in(entry)
    assert not Identity({"a": [digest(one)]}, {"m": "a"}).still_lets_in(entry)
    assert not Identity({"b": [digest(one)]}, {"n": "b"}).still_lets_in(entry)


def test_every_stored_token_is_compared_whatever_is_found() -> None:
    tokens = [token() for _ in range(9)]
    compared: list[bytes] = []

    def equal(stored: bytes, presented: bytes) -> bool:
        compared.append(stored)
        return stored == presented

    stored = {"a": [digest(one) for one in tokens[:4]], "b": [digest(one) for one in tokens[4:]]}
    door = Identity(stored, {"n": "a"}, equal)
    for names, presented in (
        (["n"], tokens[0]),
        (["n"], tokens[4]),
        ([], tokens[8]),
        (["n"], token()),
        ([], ""),
    ):
        compared.clear()
        door.entry(names, presented)
        assert compared == [digest(one) for one in tokens]


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ([("authorization", "Bearer t0ken")], "t0ken"),
        ([("authorization", "bearer t0ken"), ("other", "x")], "t0ken"),
        ([], ""),
        ([("authorization", "Basic t0ken")], ""),
        ([("authorization", "t0ken")], ""),
        ([("authorization", "Bearer")], ""),
        ([("authorization", "Bearer \u00e4")], ""),
        ([("authorization", b"Bearer t0ken")], ""),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], ""),
        ([("authorization", "Bearer " + "x" * 513)], ""),
        ([("authorization-bin", b"Bearer t0ken")], ""),
    ],
)
def test_the_token_of_a_call(metadata: list[tuple[str, str | bytes]], found: str) -> None:
    assert bearer(metadata) == found


# ---------------------------------------------------------------- files


def test_a_file_holds_several_tokens_while_they_are_exchanged(tmp_path: Path) -> None:
    old, new = token(), token()
    door = loaded(a=written(tmp_path / "a", f"# since May\n{old}\n\n  {new}  \r\n"))
    for one in (old, new):
        entry = door.entry(["spiffe://k/a"], one)
        assert entry is not None
        assert entry.tenant == "a"
        assert one not in repr(entry)
        assert one not in repr(vars(door))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n \n",
        "# only a remark\n",
        "secret\n",
        "x" * 42,
        "x" * 43,
        "abcabcabc" * 6,
        "t0ken with spaces and more of it and more of it and more",
        "\u00e4" * 60,
        "".join(map(chr, range(33, 127))) * 6,
    ],
)
def test_what_is_no_token_does_not_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartError) as caught:
        loaded(a=written(tmp_path / "a", text))
    assert caught.value.setting == SETTING
    content = text.strip()
    assert not content or content not in str(caught.value)


def test_too_many_tokens_do_not_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="65 tokens"):
        loaded(a=written(tmp_path / "a", "\n".join(token() for _ in range(65))))


def test_a_token_belongs_to_one_tenant(tmp_path: Path) -> None:
    one = token()
    with pytest.raises(StartError) as caught:
        loaded(
            a=written(tmp_path / "a", f"{one}\n{token()}"), b=written(tmp_path / "b", f"\n{one}")
        )
    assert caught.value.setting == "tenants.b.token_file"
    assert one not in str(caught.value)
    # The same one twice in one file is a slip that harms nobody.
    loaded(a=written(tmp_path / "a", f"{one}\n{one}"))


def test_the_command_makes_what_the_daemon_takes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    printed = CliRunner().invoke(token_command.command, []).output.strip()
    for _ in range(2):
        assert CliRunner().invoke(token_command.command, [str(path)]).exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, second = path.read_text().split()
    assert len({printed, first, second}) == 3
    assert loaded(a=path).entry(["engine-a"], second) is not None
    assert loaded(a=written(tmp_path / "b", printed)).entry(["engine-a"], printed) is not None
    path.chmod(0o644)
    refused = CliRunner().invoke(token_command.command, [str(path)])
    assert (refused.exit_code, path.read_text().split()) == (1, [first, second])
    assert "0644" in refused.output


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o660, 0o666, 0o777, 0o610])
def test_a_secret_that_others_may_read_does_not_start(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "secret", "x", mode)
    with pytest.raises(StartError, match=f"{mode:04o}") as caught:
        read(str(path), SETTING, secret=True)
    assert caught.value.setting == SETTING


@pytest.mark.parametrize(("mode", "fine"), [(0o644, True), (0o664, False), (0o646, False)])
def test_what_is_no_secret_may_be_read_by_all_and_written_by_nobody(
    tmp_path: Path, mode: int, fine: bool
) -> None:
    path = str(written(tmp_path / "certificate", "x", mode))
    if fine:
        assert read(path, SETTING, secret=False) == b"x"
    else:
        with pytest.raises(StartError, match="others may write it"):
            read(path, SETTING, secret=False)


def test_what_is_no_file_does_not_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("pipe", "folder", "dangling", "absent"):
        with pytest.raises(StartError) as caught:
            read(str(tmp_path / name), SETTING, secret=True)
        assert caught.value.setting == SETTING
    with pytest.raises(StartError, match="more than"):
        read(str(written(tmp_path / "huge", "x" * (BYTES_MAX + 1))), SETTING, secret=True)
    (tmp_path / "link").symlink_to(written(tmp_path / "real", "x"))
    assert read(str(tmp_path / "link"), SETTING, secret=True) == b"x"


def test_a_file_that_everybody_may_exchange_does_not_start(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    path = written(wide / "secret", "x")
    link = tmp_path / "link"
    link.symlink_to(path)
    wide.chmod(0o777)
    for way in (path, link):
        with pytest.raises(StartError, match="everybody may replace"):
            read(str(way), SETTING, secret=True)
    wide.chmod(0o1777)
    assert read(str(link), SETTING, secret=True) == b"x"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Other users may look into it, which they may not into `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.root
def test_owners(open_folder: Path) -> None:
    """Of another user it is not ours; a mounted secret of root's is read by its group."""
    path = written(open_folder / "secret", "x", 0o440)
    os.chown(path, 12_345, 12_345)
    with pytest.raises(StartError, match="belongs to user 12345"):
        read(str(path), SETTING, secret=True)
    os.chown(path, 0, 12_345)
    with pytest.raises(StartError, match="0440"):
        read(str(path), SETTING, secret=True)
    os.setegid(12_345)
    os.seteuid(12_345)
    try:
        assert read(str(path), SETTING, secret=True) == b"x"
    finally:
        os.seteuid(0)
        os.setegid(0)
