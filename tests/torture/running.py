"""Stages as processes of their own: one that dies or hangs is a finding, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter

from tests.torture.base import Outcome


def run_stage(
    letter: str, *, seed: int, scale: float, mutant: str, until_first: bool, limit_s: float
) -> Outcome:
    """The stage's outcome; what it did not survive is a failure of its own."""
    argv = [sys.executable, "-m", "tests.torture", "--one", letter, "--seed", str(seed)]
    argv += ["--scale", str(scale), "--mutant", mutant]
    argv += ["--until-first"] if until_first else []
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Outcome(failed=[f"the stage did not end within {limit_s:.0f} s"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session: all that it has started
        process.wait()
    if process.returncode != 0 or not said:
        return Outcome(failed=[f"the stage ended with {process.returncode}"])
    fields = json.loads(said.splitlines()[-1])
    return Outcome(**{**fields, "counts": Counter(fields["counts"])})
