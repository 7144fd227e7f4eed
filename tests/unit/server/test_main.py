"""The command line, in this process: what it shows and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import kvstore
from kvstore.config import load
from kvstore.model.reasons import Reason, StartError
from kvstore_server import __main__ as command


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(command.cli, arguments, env={"XDG_RUNTIME_DIR": "/run/user/7"})


def test_version() -> None:
    result = _run("--version")
    assert (result.exit_code, kvstore.__version__ in result.output) == (0, True)


def test_config_shows_what_is_in_force(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[host]\nmlock = "off"\n')
    result = _run("config", "--config", str(file), "--host.capacity_bytes=1GiB")
    assert result.exit_code == 0
    assert 'capacity_bytes = "1GiB"  # flag --host.capacity_bytes' in result.output
    shown = tmp_path / "shown.toml"
    shown.write_text(result.output)
    assert load(str(shown), environ={}).host.capacity_bytes == 1 << 30


def test_explain_tells_every_setting() -> None:
    result = _run("config", "--explain")
    assert "host.capacity_bytes = 0" in result.output
    assert "KVSTORE_HOST__CAPACITY_BYTES" in result.output


def test_a_flag_without_a_command_is_for_serving() -> None:
    result = _run("--host.capacity_bytes=nonsense")
    assert isinstance(result.exception, StartError)
    assert result.exception.setting == "host.capacity_bytes"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert _run("sevre").exit_code == 2


@pytest.mark.parametrize(("reason", "code"), [(Reason.START_LOCKED, 3), (Reason.START_MEMORY, 2)])
def test_start_errors_are_one_line_and_a_code(
    reason: Reason, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.exit_code(StartError(reason, "it is so", "host.capacity_bytes")) == code
    assert capsys.readouterr().err == "kvstored: host.capacity_bytes: it is so\n"
