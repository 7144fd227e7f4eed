"""deploy/kvstored.toml: whole, true, and harmless to whoever starts a daemon with it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from kvstore.config import load, render_toml
from kvstore.config.load import names
from tests.daemon import make_daemon
from tests.deploy.example_config import FILE, TENANT, example
from tests.rawclient import RawAdmin

ROOT = FILE.parent.parent


def test_it_is_in_step_with_the_table_of_settings() -> None:
    assert FILE.read_text() == example(), "run: python -m tests.deploy.example_config --write"


def test_as_it_is_it_changes_nothing() -> None:
    assert load(str(FILE), {}, {}) == load(None, {}, {})


def test_every_setting_is_in_it_with_its_default(tmp_path: Path) -> None:
    """Each line taken out of its comment is accepted, and says what holds anyway."""
    opened = tmp_path / "all.toml"
    opened.write_text(re.sub(r"(?m)^# (?=\w+ = )", "", FILE.read_text()))
    settings = load(str(opened), {}, {})
    assert set(settings.origins) == set(names(TENANT))
    shown = [re.sub(r"  # .*", "", render_toml(one)) for one in (settings, load(None, {}, {}))]
    assert shown[0] == shown[1]


def test_make_run_takes_it() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    told = subprocess.run(
        ["make", "-n", "run"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert f"kvstored --config {FILE.relative_to(ROOT)} " in told.stdout


@pytest.mark.process
def test_a_daemon_serves_with_it(tmp_path: Path) -> None:
    with make_daemon(tmp_path) as daemon:
        daemon.settings["config"] = str(FILE)
        daemon.start()
        with RawAdmin(daemon.admin_socket) as admin:
            assert admin.stats().state == "ready"
        assert daemon.stop() == 0
