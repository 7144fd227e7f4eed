"""`python -m tests.bench [--only NAME]... [--out build/bench.json]`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from tests.bench import (
    daemon_cost,
    data_plane,
    disk_gets,
    disk_puts,
    disk_restarts,
    layers,
    policy_cost,
)
from tests.bench.harness import Results
from tests.daemon import start_daemon

ON_BLOCKS = ("reads", "redis", "stream", "puts")
"""Of a store that is filled with 1 MiB blocks."""
GROUPS = (
    "lookup",
    *ON_BLOCKS,
    "policy",
    "daemon",
    "disk-gets",
    "disk-puts",
    "disk-restarts",
    "layers",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    parser.add_argument(
        "--only",
        action="append",
        choices=GROUPS,
        default=[],
        metavar="NAME",
        help=f"measure this group alone, or these: {', '.join(GROUPS)}",
    )
    asked = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        _measure(results, Path(name), asked.only or GROUPS)
    results.write(asked.out)
    print(f"wrote {asked.out}")


def _measure(results: Results, folder: Path, groups: Collection[str]) -> None:
    if {"lookup", *ON_BLOCKS} & set(groups):
        _data_plane(results, folder, groups)
    if "policy" in groups:
        policy_cost.measure(results)
    if "daemon" in groups:
        daemon_cost.measure(results, folder)
    if "disk-gets" in groups:
        gets = _made(folder / "gets")
        with disk_gets.filled(gets) as setup:
            disk_gets.measure(setup, results)
    if "disk-puts" in groups:
        disk_puts.measure(results, _made(folder / "puts"))
    if "disk-restarts" in groups:
        disk_restarts.measure(results, _made(folder / "restarts"))
    if "layers" in groups:
        _layers(results, folder)


def _layers(results: Results, folder: Path) -> None:
    daemon = start_daemon(_made(folder / "layers"), host__capacity_bytes=layers.CAPACITY)
    try:
        daemon_cost.wait_idle(daemon.pid)
        layers.measure(results, daemon.data_socket)
    finally:
        daemon.stop()


def _data_plane(results: Results, folder: Path, groups: Collection[str]) -> None:
    daemon = start_daemon(_made(folder / "daemon"), host__capacity_bytes="2GiB")
    try:
        daemon_cost.wait_idle(daemon.pid)  # the arena is faulted in once, in the background
        target = f"unix:{daemon.data_socket}"
        if "lookup" in groups:
            data_plane.measure_lookup(target, results)
        if set(ON_BLOCKS) & set(groups):
            _on_blocks(target, results, folder, groups)
    finally:
        daemon.stop()


def _on_blocks(target: str, results: Results, folder: Path, groups: Collection[str]) -> None:
    measures: dict[str, Callable[[data_plane.Setup, Results], None]] = {
        "reads": data_plane.measure_reads,
        "redis": partial(data_plane.measure_redis, folder=folder),
        "stream": partial(data_plane.measure_stream, folder=folder),
        "puts": data_plane.measure_puts,
    }
    with data_plane.filled(target) as setup:
        for name in ON_BLOCKS:
            if name in groups:
                measures[name](setup, results)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
