"""`python -m kvstore_client.demo` (or `make demo`): what the store does, measured and checked.

Starts a daemon on unix sockets in a temporary folder and one engine process after the other, and
kills and restarts the daemon in between; prints what they measured and every claim with its truth.
Exit code: 0 if all were true, 1 if not, 2 if something could not be started. Ends what it started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from rich.console import Console

from kvstore_client.demo import evidence, report
from kvstore_client.demo.daemon import DaemonFailedError, RunningDaemon, running_daemon
from kvstore_client.demo.evidence import Job, Transcript
from kvstore_client.demo.model import DESCRIPTION, RANDOM_DESCRIPTION, ensure_model

CAPACITY: Final = "512MiB"
DISK_CAPACITY: Final = "1GiB"
WORKER_S: Final = 900.0


class WorkerFailedError(Exception):
    """An engine process ended without a transcript."""


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    options = _parse(argv)
    screen = report.console()
    absent = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if absent:
        screen.print(f"the demo needs {' and '.join(absent)}: pip install 'tiered-kvstore[demo]'")
        return 2
    begun = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as scratch:
            false = _run(options, screen, Path(scratch))
    except (DaemonFailedError, WorkerFailedError) as error:
        screen.print(f"[bold red]{error}[/bold red]")
        return 2
    seconds = time.monotonic() - begun
    verdict = "every claim is true" if not false else f"{false} claims are NOT true"
    screen.print(f"\n{verdict}; {seconds:.0f} s")
    return 1 if false else 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """As an exception, so that everything that was started is ended on the way out."""
    raise SystemExit(128 + number)


def _run(options: argparse.Namespace, screen: Console, scratch: Path) -> int:
    options.model_folder.mkdir(parents=True, exist_ok=True)
    with screen.status("preparing the model (the first time this takes a minute)"):
        description = _prepare_model(options, screen)
    screen.print(f"model    {description}, {options.dtype}, on the CPU")
    with _daemon(screen, scratch) as daemon:
        job = _job(options, daemon, scratch)
        written = _work(screen, job, "process 1 holds a conversation and saves its KV")
        title = "Process 1: each turn restores what the turns before it have saved"
        report.show_turns(screen, title, written)
        job = replace(job, mode="reader")
        read = _work(screen, job, "process 2 holds the same conversation from the store")
        report.show_turns(screen, "Process 2: new, and knows only the prompts", read)
        os.kill(daemon.pid, signal.SIGKILL)
    screen.print("the daemon was killed with -9: its memory is gone")
    with _daemon(screen, scratch) as daemon:
        job = replace(_job(options, daemon, scratch), mode="survivor")
        survived = _work(screen, job, "process 3 holds the same conversation from the disk")
    report.show_turns(screen, "Process 3: new, and so is the daemon", survived)
    report.show_rejections(screen, survived)
    gigabytes = read.memory_bytes_per_second / 1e9
    screen.print(
        f"ideal: the bytes at {gigabytes:.1f} GB/s, a plain copy by one thread; fetch: keys, "
        "look-up, lease and copy out of the store; load: fetch, and making the model's cache of it"
    )
    for note in written.notes:
        screen.print(note)
    screen.print()
    return report.show_claims(screen, [written, read, survived])


@contextlib.contextmanager
def _daemon(screen: Console, scratch: Path) -> Iterator[RunningDaemon]:
    with running_daemon(scratch, CAPACITY, DISK_CAPACITY) as daemon:
        screen.print(
            f"daemon   pid {daemon.pid}, ready after {daemon.ready_ms:.0f} ms, "
            f"{CAPACITY} of host memory, {DISK_CAPACITY} of disk"
        )
        yield daemon


def _prepare_model(options: argparse.Namespace, screen: Console) -> str:
    if not options.random_model:
        options.random_model = not ensure_model(options.model_folder, say=screen.print)
    return RANDOM_DESCRIPTION if options.random_model else DESCRIPTION


def _job(options: argparse.Namespace, daemon: RunningDaemon, scratch: Path) -> Job:
    return Job(
        mode="writer",
        data_socket=daemon.data_socket,
        admin_socket=daemon.admin_socket,
        daemon_pid=daemon.pid,
        model_folder=str(options.model_folder.resolve()),
        scratch_folder=str(scratch),
        dtype=options.dtype,
        random_model=options.random_model,
        turns=options.turns,
        new_tokens=options.new_tokens,
    )


def _work(screen: Console, job: Job, doing: str) -> Transcript:
    scratch = Path(job.scratch_folder)
    told, result, log = (scratch / f"{job.mode}.{what}" for what in ("job", "result", "log"))
    evidence.store(told, job)
    argv = [sys.executable, "-m", "kvstore_client.demo.worker", str(told), str(result)]
    with screen.status(doing), log.open("wb") as output:
        worker = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = worker.wait(WORKER_S)
        except BaseException:
            worker.kill()
            worker.wait()
            raise
    if code or not result.exists():
        written = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise WorkerFailedError(f"the {job.mode} process ended with {code}:\n{written}")
    return evidence.load(result, Transcript)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvstore_client.demo", description=__doc__)
    parser.add_argument("--model-folder", type=Path, default=Path("build/model"))
    parser.add_argument("--random-model", action="store_true", help="use random weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--turns", type=int, choices=range(2, 10), default=3)
    parser.add_argument("--new-tokens", type=int, choices=range(2, 200), default=12)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
