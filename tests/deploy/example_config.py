"""Writes deploy/kvstored.toml, the commented example, from the table of settings.

    python -m tests.deploy.example_config --write

Without the argument it prints. test_config_file.py compares, so that a new setting is in the file.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from kvstore.config.show import Knob, knobs

FILE = Path(__file__).resolve().parent.parent.parent / "deploy/kvstored.toml"
TENANT = "default"
HEAD = """\
# Settings of kvstored, every one with its default. A line without the leading "#" is in force.
#
# Three ways to give a setting, the later ones win: this file (`--config FILE` or KVSTORE_CONFIG),
# the environment (KVSTORE_HOST__CAPACITY_BYTES=64GiB), a flag (--host.capacity_bytes=64GiB).
# `kvstored config --config FILE` shows what holds and where it came from; a name that does not
# exist and a value that is out of bounds are errors. Settings are read at the start.
#
# One dial matters: host.capacity_bytes, the memory for blocks. deploy/docs/sizing.md tells how much
# to give. Written by tests/deploy/example_config.py from the table of settings.
"""


def example() -> str:
    """The whole file."""
    lines = [HEAD]
    table = ""
    for knob in knobs():
        section = knob.name.rpartition(".")[0].replace(".NAME", f".{TENANT}")
        if section != table:
            table = section
            lines.append(f"[{section}]\n")
        lines.append(_entry(knob))
    return "\n".join(lines)


def _entry(knob: Knob) -> str:
    lines = [
        line
        for text in (knob.what, f"Change it when {knob.when}", f"Accepts: {knob.accepts}")
        for line in textwrap.wrap(text, 98, break_on_hyphens=False, break_long_words=False)
    ]
    named = f"{knob.name.rpartition('.')[2]} = {knob.default}"
    return "\n".join([*(f"# {line}" for line in lines), f"# {named}\n"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(example(), encoding="utf-8")
    else:
        print(example())
