"""Generates kvstore/wire/v1 from protos/kvstore/v1, or checks that it is in step.

The include is mapped (`-I kvstore/wire/v1=protos/kvstore/v1`), so that the generated modules
import each other by their real names. The generator is the oldest grpcio-tools that kvstore
supports: generated code refuses a runtime older than its generator and accepts newer ones.

    python protos/generate.py            write kvstore/wire/v1
    python protos/generate.py --check    compare, write nothing, exit 1 where they differ
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path("protos/kvstore/v1")
TARGET = Path("kvstore/wire/v1")
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


class GenerationFailed(Exception):
    """protoc or a plugin is missing, or refused its input."""


def _plugin(name: str) -> str:
    # Beside the interpreter first: a virtual environment need not be activated.
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise GenerationFailed(f"{name} is missing: install the `dev` extra")
    return f"--plugin={name}={found}"


def _protoc(sources: list[Path], *outputs: str) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{TARGET}={SOURCES}"]
    command += [_plugin(name) for name in PLUGINS]
    command += [*outputs, *map(str, sources)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise GenerationFailed(run.stderr.strip())


def generate(folder: Path) -> dict[str, bytes]:
    """Generates under `folder`, returns name -> content of each generated file."""
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).glob("*.proto"))
    if not sources:
        raise GenerationFailed(f"no .proto file in {SOURCES}")
    _protoc(sources, f"--python_out={folder}", f"--mypy_out=quiet:{folder}")
    services = [path for path in sources if _has_service(ROOT / path)]
    if services:
        _protoc(services, f"--grpc_python_out={folder}", f"--mypy_grpc_out=quiet:{folder}")
    return read(folder / TARGET)


def _has_service(path: Path) -> bool:
    return re.search(r"^service\s+\w+", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def read(folder: Path) -> dict[str, bytes]:
    """Name -> content of the generated files that lie in `folder`."""
    return {path.name: path.read_bytes() for pattern in GENERATED for path in folder.glob(pattern)}


def differences(fresh: dict[str, bytes], committed: dict[str, bytes]) -> list[str]:
    """One line for each file that is missing, left over or different."""
    lines = []
    for name in sorted(fresh.keys() | committed.keys()):
        if name not in committed:
            lines.append(f"{TARGET / name}: missing")
        elif name not in fresh:
            lines.append(f"{TARGET / name}: left over, no .proto makes it")
        elif fresh[name] != committed[name]:
            lines.append(f"{TARGET / name}: differs")
    return lines


def write(fresh: dict[str, bytes]) -> list[str]:
    """Brings kvstore/wire/v1 into step, returns what was out of step."""
    target = ROOT / TARGET
    target.mkdir(parents=True, exist_ok=True)
    committed = read(target)
    for name in committed.keys() - fresh.keys():
        (target / name).unlink()
    for name, content in fresh.items():
        if committed.get(name) != content:
            (target / name).write_bytes(content)
    return differences(fresh, committed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate kvstore/wire/v1 from protos/kvstore/v1.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            fresh = generate(Path(folder))
    except GenerationFailed as failure:
        print(failure, file=sys.stderr)
        return 2
    if not arguments.check:
        changed = write(fresh)
        print(f"{TARGET}: {len(fresh)} files, {len(changed)} brought into step")
        return 0
    lines = differences(fresh, read(ROOT / TARGET))
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        print("run `make proto` and commit the result", file=sys.stderr)
        return 1
    print(f"{TARGET}: {len(fresh)} files in step with {SOURCES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
