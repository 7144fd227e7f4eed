"""The Dockerfile as text, and the script that executes it. `run_dockerfile` does so in full."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvstore.cli import main as kvstore
from kvstore_server.__main__ import cli as kvstored
from tests.deploy.dockerfile import BASE, Build, Image, checkout, listed, plain, steps
from tests.deploy.rootfs import CannotBuild

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "deploy/docker"
FILE = FOLDER / "Dockerfile"
STEPS = steps(FILE)


def values(instruction: str) -> list[str]:
    return [value for name, value in STEPS if name == instruction]


def requirements(file: Path) -> dict[str, str]:
    """Versions by name; each has hashes."""
    found = {}
    text = re.sub(r"(?m)^#.*\n", "", file.read_text(encoding="utf-8"))
    for entry in re.split(r"\n(?=\S)", text.strip()):
        name, version, rest = re.findall(r"(?s)^([\w.-]+)==(\S+)(.*)$", entry)[0]
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}", rest), f"{name} has no hash"
        found[normal(name)] = version
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_its_stages_stand_on_a_slim_debian() -> None:
    stages: set[str] = set()
    for value in values("FROM"):
        name, *more = value.split()
        assert name in {BASE, *stages}
        stages.update(more[1:])
    assert len(values("FROM")) == 3


def test_the_final_stage_copies_the_environment_alone() -> None:
    last = max(number for number, (name, _) in enumerate(STEPS) if name == "FROM")
    copied = [value for name, value in STEPS[last:] if name == "COPY"]
    assert copied == ["--from=build /opt/kvstore /opt/kvstore"]
    assert not [v for name, v in STEPS[last:] if name == "RUN" and ("pip" in v or "apt" in v)]
    uid, gid = values("USER")[-1].split(":")
    assert int(uid) > 0
    assert int(gid) > 0


def test_what_is_copied_is_there_and_let_through() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    sources = [
        source
        for value in values("COPY")
        if not value.startswith("--from")
        for source in shlex.split(value)[:-1]
    ]
    assert set(sources) == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_what_it_installs_is_pinned_by_hash_to_what_the_tests_run_with() -> None:
    pinned = requirements(FOLDER / "requirements.txt")
    tested = dict(
        re.findall(r"(?m)^([\w.-]+)==([^\s;]+)(?:; python_version >= '3.11')?$",
                   (ROOT / "constraints/newest.txt").read_text())
    )  # fmt: skip
    for name, version in tested.items():
        assert pinned.get(normal(name), version) == version, name
    project = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("\n]")[0]
    wanted = {normal(n) for n in re.findall(r'"([\w-]+)>=[^;"]+"', project)}
    assert wanted <= set(pinned), "make requirements.txt anew"
    assert "hatchling" in requirements(FOLDER / "build-requirements.txt")
    for run in values("RUN"):
        if "-r " in run:
            assert run.count("--require-hashes") == run.count("-r ")


def test_the_health_check_and_the_command_are_ours() -> None:
    check = listed(values("HEALTHCHECK")[0].partition("CMD")[2].strip())
    assert check[0] == "kvstore"
    kvstore.make_context("kvstore", check[1:])
    assert listed(values("ENTRYPOINT")[0]) == ["kvstored"]
    kvstored.make_context("kvstored", listed(values("CMD")[0]))


# ---------------------------------------------------------------- the script


def test_an_instruction_that_is_not_known_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("ONBUILD RUN true\n")
    with pytest.raises(CannotBuild, match="ONBUILD is not known"):
        Build(tmp_path, tmp_path, tmp_path).run(file)
    file.write_text("FROM alpine\n")
    with pytest.raises(CannotBuild, match="only debian"):
        Build(tmp_path, tmp_path, tmp_path).run(file)
    file.write_text("RUN true\n")
    with pytest.raises(CannotBuild, match="has to be FROM"):
        Build(tmp_path, tmp_path, tmp_path).run(file)


@pytest.mark.parametrize("value", ["kvstored serve", "/bin/sh -c x"])
def test_the_shell_form_is_refused(value: str) -> None:
    with pytest.raises(CannotBuild, match="only the form"):
        listed(value)


def test_variables_are_refused() -> None:
    with pytest.raises(CannotBuild, match="variables"):
        plain("PATH=/x:$PATH")


def test_the_context_is_what_a_clean_clone_would_have(tmp_path: Path) -> None:
    checkout(ROOT, tmp_path)
    assert (tmp_path / "pyproject.toml").is_file()
    assert (tmp_path / "kvstore/wire/v1/store_pb2.py").is_file()
    assert not list(tmp_path.rglob("__pycache__"))
    assert not (tmp_path / ".venv").exists()


def test_an_image_starts_with_entrypoint_and_command() -> None:
    image = Image(None, entrypoint=["kvstored"], command=["serve"])  # type: ignore[arg-type]
    assert image.start_with() == ["kvstored", "serve"]
