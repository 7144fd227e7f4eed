"""`python -m tests.bench.engine_model FOLDER`: makes the demo's model for vLLM to serve.

A step of its own, since vLLM's environment cannot unpack GGUF. The last line that it prints is the
model's folder: of SmolLM2-135M-Instruct, or where that cannot be had, of random weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore_client.demo.model import NAME, RANDOM_NAME, ensure_model, make_random_llama


def folder_of(models: Path) -> Path | None:
    """The model that is there, the real one first."""
    return next((models / name for name in (NAME, RANDOM_NAME) if (models / name).is_dir()), None)


def main() -> None:
    models = Path(sys.argv[1])
    models.mkdir(parents=True, exist_ok=True)
    if not ensure_model(models, say=print):
        make_random_llama(models)
    print(folder_of(models))


if __name__ == "__main__":
    main()
