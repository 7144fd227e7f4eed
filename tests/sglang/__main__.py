"""SGLang's own storage path with the store below it, on a machine without a GPU:

    .venv-engines/bin/python -m tests.sglang [arguments of pytest]

Installs SGLang without its dependencies into build/sglang if it is not there (about 200 MB), and
runs what is in this folder. The environment is that of `make test-engines`, which has torch and
transformers. Ends with an error, never with a pass, where one of them is missing.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.sglang.place import FOLDER, HERE, PINS, PLACE, installed

NEEDED = ("torch", "transformers", "msgspec", "zmq", "psutil")


def main(arguments: Sequence[str]) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{', '.join(missing)} not installed for {sys.executable}: run `make test-engines` "
            "first, then .venv-engines/bin/python -m tests.sglang",
            file=sys.stderr,
        )
        return 2
    if shutil.which("g++") is None:
        print("g++ is missing: SGLang compiles its hash (apt-get install g++)", file=sys.stderr)
        return 2
    if not installed() and not install():
        print(f"SGLang cannot be installed from {PINS}: nothing was tested", file=sys.stderr)
        return 2
    return int(pytest.main([str(HERE), "-p", "no:cacheprovider", "-W", "ignore", *arguments]))


def install() -> bool:
    """Into a folder of its own, so that no other package of the environment changes."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--target", str(FOLDER), "-r", str(PINS)], check=False)
    if done.returncode:
        shutil.rmtree(FOLDER, ignore_errors=True)
        return False
    PLACE.write_text(PINS.read_text())
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
