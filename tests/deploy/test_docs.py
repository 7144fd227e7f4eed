"""The operator's documents: every command is one, every link leads somewhere, figures are those of
the code, and no reason is missing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from kvstore.cli import main as kvstore
from kvstore.config import parse_flags
from kvstore.config.load import FIELDS, names
from kvstore.ledger import FORMAT as LEDGER_FORMAT
from kvstore.model.reasons import Reason
from kvstore.tiers.disk.format import VERSION as DISK_FORMAT
from kvstore_client.link import PROTOCOL_MAJOR
from kvstore_server.__main__ import cli as kvstored
from tests.daemon import Daemon
from tests.deploy import reason_table

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "deploy/docs"
OURS = [FOLDER / f"{name}.md" for name in ("install", "operations", "sizing", "troubleshooting")]
BIN = Path(sys.executable).parent
OTHERS = {
    "docker", "install", "journalctl", "kubectl", "python3", "systemctl", "systemd-sysusers",
    "/opt/kvstore/bin/pip",
}  # fmt: skip
"""Programs that are not ours; of those only the files that they name are looked at."""
EXPLAINED_ELSEWHERE = {"NAME", "FILE"}


def commands() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every line in a block of shell commands."""
    for file in OURS:
        for block in re.findall(r"(?ms)^```sh\n(.*?)^```", file.read_text(encoding="utf-8")):
            for line in block.splitlines():
                words = shlex.split(line)
                while "=" in words[0].partition("/")[0]:
                    words.pop(0)
                yield file.name, words


COMMANDS = list(commands())
ids = [" ".join(words)[:60] for _, words in COMMANDS]


def parsed(group: click.Group, words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words name, and what it leaves over. UsageError if it refuses them."""
    context = click.Context(group, info_name=group.name)
    command: click.Command = group
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, command, words = command.resolve_command(context, words)  # type: ignore[assignment]
        context = click.Context(command, parent=context, info_name=name, **command.context_settings)
    parser = command.make_parser(context)
    _, left, _ = parser.parse_args(list(words))
    return command, left


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 40
    assert {name for name, _ in COMMANDS} == {file.name for file in OURS}


@pytest.mark.parametrize(("document", "words"), COMMANDS, ids=ids)
def test_every_command_is_one(document: str, words: list[str]) -> None:
    program = Path(words[0]).name
    if program == "kvstore":
        command, _ = parsed(kvstore, words[1:])
        assert command is not kvstore, "no verb"
    elif program == "kvstored":
        verb = (
            words[1:]
            if words[1:2] in (["config"], ["serve"], ["--version"])
            else ["serve", *words[1:]]
        )
        _, left = parsed(kvstored, verb)
        parse_flags(left)
        assert all(flag[2:].partition("=")[0] in names() for flag in left)
    else:
        assert words[0] in OTHERS, f"{document}: what is {words[0]}?"
        files = [word for word in words if word.startswith("deploy/")]
        assert all((ROOT / file).exists() for file in files), files


def test_the_parser_would_notice() -> None:
    for wrong in (["stats"], ["plan", "--memory", "1GiB"], ["review", "allow"]):
        with pytest.raises(click.UsageError):
            parsed(kvstore, wrong)


# ---------------------------------------------------------------- they run


ALONE = [words for _, words in COMMANDS if words[:2] in (["kvstore", "plan"], ["kvstore", "bench"])]


@pytest.mark.parametrize(
    "words", [w for w in ALONE if "--help" in w or w[1] == "plan"], ids=" ".join
)
def test_what_needs_no_daemon_runs(words: list[str]) -> None:
    done = subprocess.run([BIN / words[0], *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if "32000" in words:
        assert "131,072 bytes" in done.stdout, "as sizing.md says"
        assert "3.91 GiB" in done.stdout


def test_the_table_of_tokens_is_right() -> None:
    text = (FOLDER / "sizing.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (Llama [\w. ]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", text)
    assert len(rows) == 2
    for name, *numbers in rows:
        a_token, in_memory, on_disk = (int(number.replace(",", "")) for number in numbers)
        model = name.lower().replace(" ", "-")
        command = [BIN / "kvstore", "plan", "--model", model, "--tokens", "1000", "--json"]
        plan = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"{a_token * 1000}" in plan
        assert in_memory == (64 << 30) // a_token
        assert on_disk == (1 << 40) // a_token


@pytest.mark.process
def test_what_asks_a_daemon_runs(daemons: Callable[..., Daemon]) -> None:
    """In the order of the documents; the drain last."""
    daemon = daemons()
    environ = {**os.environ, "KVSTORE_SERVER__RUNTIME_DIR": os.path.dirname(daemon.admin_socket)}
    alone = {"plan", "verify", "bench"}
    asked = [
        words
        for _, words in COMMANDS
        if words[0] == "kvstore" and words[1] not in alone and "--runtime-dir" not in words
        and "fingerprint.json" not in words
    ]  # fmt: skip
    unique = sorted(set(map(tuple, asked)), key=lambda words: words[1] == "drain")
    verbs = {words[1] for words in unique}
    assert {"status", "top", "trace", "spaces", "review", "epoch", "invalidate", "drain"} <= verbs
    for words in unique:
        done = subprocess.run(
            [BIN / words[0], *words[1:]], env=environ, capture_output=True, text=True, check=False
        )
        # 1 is a true answer of some: nothing matched.
        told = done.stdout + done.stderr
        assert done.returncode == 0 or (words[1] == "trace" and done.returncode == 1), (words, told)
    assert daemon.wait() == 0, "the drain ends it"


# ---------------------------------------------------------------- what they say


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    for target in targets:
        path, _, anchor = target.partition("#")
        there = FOLDER / path if path else file
        assert there.is_file(), target
        if anchor:
            heads = re.findall(r"(?m)^#+ (.*)$", there.read_text(encoding="utf-8"))
            slugs = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, target


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_settings_reasons_and_files_that_are_named_exist(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    sections = "|".join(FIELDS)
    for name in re.findall(rf"`((?:{sections})\.[\w.]+?)(?: = [^`]*)?`", text):
        known = names("NAME" if ".NAME." in name else "default")
        assert name in known, name
    for word in re.findall(r"`([A-Z]+_[A-Z_]+)`", text):
        assert word in Reason.__members__ or word.startswith(("KVSTORE_", "IPC_")), word
    for path in re.findall(r"`(deploy/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_reason_is_told_with_its_origin() -> None:
    text = reason_table.FILE.read_text(encoding="utf-8")
    assert text == reason_table.with_tables(text), (
        "run: python -m tests.deploy.reason_table --write"
    )
    section = ""
    told: dict[str, str] = {}
    for line in text.split(reason_table.BEGIN)[1].splitlines():
        if line.startswith("### Origin: "):
            section = line.removeprefix("### Origin: ")
        elif match := re.match(r"\| `(\w+)` \| (\d+) \| ", line):
            assert Reason[match[1]].value == int(match[2])
            assert match[1] not in told
            told[match[1]] = section
    assert told == {reason.name: reason.origin.value for reason in Reason}


def test_steps_name_settings_that_exist() -> None:
    for steps in reason_table.STEPS.values():
        for name in re.findall(r"`((?:\w+)\.\w+(?:\.\w+)?)`", steps):
            assert name in names("NAME"), name


def test_the_versions_are_those_of_the_code() -> None:
    text = (FOLDER / "operations.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| (protocol, major|disk folder|ledger) \| (\d+) \|", text))
    assert rows == {
        "protocol, major": str(PROTOCOL_MAJOR),
        "disk folder": str(DISK_FORMAT),
        "ledger": str(LEDGER_FORMAT),
    }
