"""Golden vectors: the same keys and digests in other processes, hash seeds and Python versions
(P01).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
GENERATOR = GOLDEN / "generate_model.py"
KEYS: dict[str, Any] = json.loads((GOLDEN / "keys.json").read_text())
FINGERPRINTS: dict[str, Any] = json.loads((GOLDEN / "fingerprints.json").read_text())
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def interpreters() -> dict[str, str]:
    """One working interpreter for each version at hand, this one included."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    for version in VERSIONS:
        roots = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        on_path = shutil.which(f"python{version}")
        for candidate in [*map(str, roots), *([on_path] if on_path else [])]:
            probe = subprocess.run(
                [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            if probe.stdout.strip() == version:
                found.setdefault(version, candidate)
    return found


def generate(python: str, seed: str | None) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    run = subprocess.run(
        [python, "-B", str(GENERATOR)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    made: dict[str, Any] = json.loads(run.stdout)
    return made


@pytest.mark.process
@pytest.mark.parametrize("seed", [None, "0", "1", "4294967295"])
def test_every_hash_seed_gives_the_golden_vectors(seed: str | None) -> None:
    assert generate(sys.executable, seed) == {
        "keys.json": KEYS,
        "fingerprints.json": FINGERPRINTS,
    }


@pytest.mark.process
@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_version_gives_the_golden_vectors(version: str) -> None:
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"no Python {version} at hand")
    assert generate(python, None) == {"keys.json": KEYS, "fingerprints.json": FINGERPRINTS}


def test_golden_keys_follow_the_written_formula() -> None:
    """Computed here without the library, from the design's words."""

    def frame(*fields: bytes) -> bytes:
        return b"".join(struct.pack("<I", len(field)) + field for field in fields)

    def sha(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    root = sha(frame(b"kvstore/key/1", b"", b""))
    assert KEYS["root"]["plain"] == root.hex()
    assert KEYS["root"]["salted"] == sha(frame(b"kvstore/key/1", b"salt", b"full")).hex()
    expected, key = [], root
    for block in range(4):
        key = sha(frame(key, struct.pack("<16I", *range(16 * block, 16 * block + 16)), b""))
        expected.append(key.hex())
    assert KEYS["counting"] == expected
    image, adapter = bytes(range(32)), bytes(range(100, 132))
    extra = frame(b"adapter", adapter)
    expected, key = [], sha(frame(b"kvstore/key-of-digests/1", b"salt", b""))
    for digest in (image, adapter):
        key = sha(frame(key, digest, extra))
        expected.append(key.hex())
    assert KEYS["engine_digests"] == expected


def test_golden_key_counts_follow_the_prompt_lengths() -> None:
    assert [len(keys) for keys in KEYS["prompts"]] == [seed % 50 // 16 for seed in range(200)]
    keys = [key for prompt in KEYS["prompts"] for key in prompt]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)


def test_golden_digests_are_all_different() -> None:
    digests = [FINGERPRINTS[name]["digest"] for name in ("plain", "latent", "held")]
    digests += FINGERPRINTS["changed"].values()
    assert len(FINGERPRINTS["changed"]) == 23
    assert len(set(digests)) == len(digests)
