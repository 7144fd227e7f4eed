"""`python -m tests.bench [--only WORD] [--out build/bench.json]`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.bench import daemon_cost, data_plane
from tests.bench.harness import Results
from tests.daemon import start_daemon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    parser.add_argument(
        "--only", default="", help="one of: reads, puts, stream, redis, lookup, daemon"
    )
    asked = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        folder = Path(name)
        run = folder / "daemon"
        run.mkdir()
        daemon = start_daemon(run, host__capacity_bytes="2GiB")
        try:
            daemon_cost.wait_idle(daemon.pid)  # the arena is faulted in once, in the background
            _data_plane(f"unix:{daemon.data_socket}", results, folder, asked.only)
        finally:
            daemon.stop()
        if asked.only in ("", "daemon"):
            daemon_cost.measure(results, folder)
    results.write(asked.out)
    print(f"wrote {asked.out}")


def _data_plane(target: str, results: Results, folder: Path, only: str) -> None:
    if only in ("", "lookup"):
        data_plane.measure_lookup(target, results)
    if only in ("lookup", "daemon"):
        return
    with data_plane.filled(target) as setup:
        if only in ("", "reads"):
            data_plane.measure_reads(setup, results)
        if only in ("", "redis"):
            data_plane.measure_redis(setup, results, folder)
        if only in ("", "stream"):
            data_plane.measure_stream(setup, results, folder)
        if only in ("", "puts"):
            data_plane.measure_puts(setup, results)


if __name__ == "__main__":
    main()
