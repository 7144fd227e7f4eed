"""The client processes of the soak: they die and come back, and say what they have seen."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field

from tests.soak.worker import WRITERS


@dataclass
class Fleet:
    """The client processes, and what they have said so far."""

    target: str
    rng: random.Random
    traffic: str = "zipf"
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    kills: int = 0

    def start(self) -> None:
        self.processes = [self._spawn(writer) for writer in range(WRITERS)]

    def kill_one(self) -> None:
        writer = self.rng.randrange(WRITERS)
        self.processes[writer].kill()
        self.processes[writer].wait()
        self.kills += 1
        self.processes[writer] = self._spawn(writer)

    def check_alive(self) -> None:
        for writer, process in enumerate(self.processes):
            if process.poll() is not None:
                self.ended.append(f"client {writer} ended by itself with {process.returncode}")
                self.processes[writer] = self._spawn(writer)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _spawn(self, writer: int) -> subprocess.Popen[str]:
        seed = self.rng.randrange(2**31)
        words = [self.target, str(seed), str(writer), self.traffic]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.worker", *words],
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # the last line of a killed process may be cut
            if "wrong" in said:
                self.wrong.append(line.strip())
            self.counts.update(said.get("counts", {}))
