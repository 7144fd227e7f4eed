"""What the stages look at while a daemon is attacked: a client that behaves and verifies each byte,
the daemon's own memory and descriptors, its metrics, and whether its books are even afterwards.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import numpy as np

from kvstore.model.fingerprint import Fingerprint
from kvstore.testing.payload import Finding
from kvstore_client import Client, ClientConfig, Space
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, assert_quiet, model, resident_bytes
from tests.rawclient import RawAdmin
from tests.torture.base import Outcome

DEADLINE_MS = 5_000
LATE_S = 1.0
"""A call that takes so much longer than its deadline is a failure: ten times the bound."""
SAME_MAX = 5
"""Findings of one kind that are written down."""
PUT_EVERY = 4
"""Turns of the well-behaved client."""
HTTP_S = 10.0
SETTLE_S = 15.0
START_S = 60.0
"""For a daemon on a machine that is busy with other stages."""


class GoodClient:
    """Puts and gets with the SDK in a thread of its own while others misbehave. All that it puts
    fits, so that everything has to be there, right, within the deadline.
    """

    def __init__(
        self,
        daemon: Daemon,
        outcome: Outcome,
        *,
        fingerprint: Fingerprint | None = None,
        seed: int = 1,
        prompts: int = 400,
        blocks: int = 8,
        pause_s: float = 0.01,
    ) -> None:
        self.seconds: list[float] = []
        self.calls = 0
        self._fingerprint = fingerprint or model(name="good")
        self._outcome = outcome
        self._pause_s = pause_s
        self._rng = np.random.default_rng(seed)
        self._prompts = [
            Prompt(self._fingerprint, seed * 1_000 + n, blocks) for n in range(prompts)
        ]
        self._client = Client(daemon.data_socket, config=ClientConfig(deadline_ms=DEADLINE_MS))
        self._stop = threading.Event()
        self._found = 0
        self._thread = threading.Thread(target=self._run, name="good-client")

    def __enter__(self) -> GoodClient:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()
        if kind is None and self.calls == 0:
            self._outcome.failed.append("the well-behaved client made no call")
        self._outcome.counts["good_client_calls"] += self.calls
        if self.seconds:
            self._outcome.counts["good_client_p99_ms"] = round(percentile(self.seconds, 99) * 1e3)

    def _run(self) -> None:
        try:
            space = self._client.space(self._fingerprint)
            stored = turn = 0
            while not self._stop.wait(self._pause_s):
                if turn % PUT_EVERY == 0 and stored < len(self._prompts):
                    self._push(space, self._prompts[stored])
                    stored += 1
                self._fetch(space, self._prompts[int(self._rng.integers(stored))])
                turn += 1
        except Exception as error:
            self._say(f"the well-behaved client ended: {type(error).__name__}: {error}")

    def _push(self, space: Space, prompt: Prompt) -> None:
        began = time.monotonic()
        pushed = space.push(prompt.keys, np.stack(prompt.rows()))
        self._timed("put", began)
        if pushed.stored != len(prompt.keys):
            self._say(f"a put of the well-behaved client stored {pushed.stored}: {pushed.reason}")

    def _fetch(self, space: Space, prompt: Prompt) -> None:
        began = time.monotonic()
        fetched = space.fetch(prompt.keys)
        self._timed("get", began)
        if fetched.blocks != len(prompt.keys):
            self._say(f"a get of the well-behaved client found {fetched.blocks}: {fetched.reason}")
        if fetched.blocks:
            check_rows(
                self._outcome, prompt, np.asarray(fetched.data)[: fetched.blocks], "good get"
            )

    def _timed(self, what: str, began: float) -> None:
        took = time.monotonic() - began
        self.calls += 1
        self.seconds.append(took)
        if took > DEADLINE_MS / 1e3 + LATE_S:
            self._say(f"a {what} of the well-behaved client took {took:.1f} s")

    def _say(self, text: str) -> None:
        self._found += 1
        if self._found <= SAME_MAX:
            self._outcome.failed.append(text)


def check_rows(
    outcome: Outcome, prompt: Prompt, rows: Iterable[object], what: str, version: int = 0
) -> None:
    """Each row is that of its place in the prompt."""
    for index, row in enumerate(rows):
        finding = prompt.finding(index, np.asarray(row), [version])
        if finding is not Finding.RIGHT:
            outcome.wrong.append(f"{what}: block {index}: {finding.value}")


def until(found: Callable[[], object], deadline_s: float) -> bool:
    """Polls until it is so; False if it is not within the time."""
    end = time.monotonic() + deadline_s
    while not found():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many percent of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share / 100) - 1)]


def descriptors(pid: int) -> int:
    """Open descriptors but for memory, which is made ahead and taken when it is wanted."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += not os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:")
    return count


class Footprint:
    """The daemon's own memory and descriptors, against what they were after the warm-up."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.rss = [resident_bytes(daemon.pid)]
        self.files = descriptors(daemon.pid)

    def sample(self) -> None:
        self.rss.append(resident_bytes(self.daemon.pid))

    @property
    def grown_bytes(self) -> int:
        """Since the first sample."""
        return self.rss[-1] - self.rss[0]

    @property
    def late_bytes(self) -> int:
        """Since two thirds of the samples: what should be flat by then."""
        return self.rss[-1] - self.rss[len(self.rss) * 2 // 3]

    def check(self, outcome: Outcome, grown_max: int, late_max: int, files_more: int = 8) -> None:
        """Says what grew. What is closed or freed just now gets a moment to go."""
        end = time.monotonic() + SETTLE_S
        while True:
            more = descriptors(self.daemon.pid) - self.files
            self.sample()
            settled = more <= files_more and self.grown_bytes <= grown_max
            if (settled and self.late_bytes <= late_max) or time.monotonic() > end:
                break
            metrics(self.daemon)  # a call, as any engine would make
            time.sleep(0.2)
        counts = outcome.counts
        counts["rss_growth_KiB"] = max(counts["rss_growth_KiB"], self.grown_bytes >> 10)
        counts["fds_growth"] = max(counts["fds_growth"], more)
        if more > files_more:
            outcome.failed.append(f"{more} more descriptors than before are open")
        if self.grown_bytes > grown_max:
            outcome.failed.append(f"memory grew by {self.grown_bytes >> 10} KiB")
        if self.late_bytes > late_max:
            outcome.failed.append(f"memory still grew in the end, by {self.late_bytes >> 10} KiB")


def http(daemon: Daemon, path: str) -> tuple[int, str]:
    """(status, body); (0, why) if there was no answer."""
    try:
        with urllib.request.urlopen(f"{daemon.http_url}{path}", timeout=HTTP_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def metrics(daemon: Daemon) -> dict[str, float]:
    """All samples of /metrics by `name{labels}`; none if it does not answer."""
    status, text = http(daemon, "/metrics")
    if status != 200:
        return {}
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in rows}


def total(samples: dict[str, float], name: str, *labels: str) -> float:
    """The sum over all samples of a metric that have these labels, each as `name="value"`."""
    return sum(
        value
        for sample, value in samples.items()
        if sample.split("{")[0] == name and all(label in sample for label in labels)
    )


def check_quiet(
    daemon: Daemon, outcome: Outcome, after: str, *, slot_bytes: int | None = None
) -> None:
    """Nobody holds anything, and free + used = capacity; else a failure says after what."""
    try:
        with RawAdmin(daemon.admin_socket) as admin:
            assert_quiet(admin, slot_bytes)
    except AssertionError as error:
        outcome.failed.append(f"after {after}: {str(error) or 'the bytes do not add up'}")


def check_alive(daemon: Daemon, outcome: Outcome, after: str) -> bool:
    """The very process lives, and nothing in it was a defect."""
    if not daemon.alive:
        outcome.failed.append(f"after {after}: the daemon ended with {daemon.process.poll()}")
        return False
    log = daemon.log()
    for line in [line for line in log.splitlines() if "failed: a defect" in line][:SAME_MAX]:
        outcome.failed.append(f"after {after}: {line}")
    if "Traceback" in log:
        at = log.index("Traceback")
        outcome.failed.append(f"after {after}: {' / '.join(log[at:].splitlines()[:40])[-600:]}")
    return True
