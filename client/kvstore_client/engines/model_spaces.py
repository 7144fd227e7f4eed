"""The space of one engine's model, from the first moment on, whatever is known of its weights.

While the weights' digest is being computed, blocks are held by the daemon for this engine alone; as
soon as it is known they are shared. Weight files that changed after the engine's process began are
not believed to be what the engine has loaded. After the engine's weights may have changed
(`reset`), the digest of files says nothing any more: blocks are held again, under another epoch.
What is held is of this object alone, whatever a person approves of another (`unnamed_weights`).

Used by the engine adapters, whose `AsyncTier` or `PageStore` asks for the space before each call.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.model.fingerprint import Fingerprint
from kvstore_client.client import Client, Space
from kvstore_client.engines.unnamed_weights import new_mark, offer_of
from kvstore_client.weights import WeightsDigest, WeightsError, weight_files

__all__ = ["ModelSpaces", "changed_files", "doubt_of", "process_start_ns"]

log = logging.getLogger(__name__)


class ModelSpaces:
    """For several threads.

    fingerprint: of the model; without a weights revision while that is unknown. weights: where it
    will come from; None: nowhere. doubt: called once when the digest is known; what it returns, if
    anything, is why the digest is not that of the weights in use.
    """

    def __init__(
        self,
        client: Client,
        fingerprint: Fingerprint,
        *,
        weights: WeightsDigest | None = None,
        doubt: Callable[[], str] = lambda: "",
    ) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._mark = new_mark()
        self._weights = weights
        self._doubt = doubt
        self._use(fingerprint)
        if weights is not None:
            weights.start()

    @property
    def fingerprint(self) -> Fingerprint:
        """As it is offered now."""
        with self._lock:
            return offer_of(self._fingerprint, self._mark)

    def current(self) -> Space:
        """The space of the fingerprint in use, completed as soon as the weights are known."""
        with self._lock:
            if self._weights is not None and self._fingerprint.identity.weights_revision is None:
                self._complete(self._weights)
            return self._space

    def _complete(self, weights: WeightsDigest) -> None:
        revision = weights.result_if_ready()
        if revision is None:
            if weights.failure is not None:
                log.warning(
                    "kvstore: nothing is shared, since the weights cannot be told: %s. "
                    "Set weights_revision",
                    weights.failure,
                )
                self._weights = None
            return
        self._weights = None
        doubt = self._doubt()
        if doubt:
            log.warning("kvstore: nothing is shared: %s. Set weights_revision", doubt)
            return
        self._use(self._fingerprint.complete(revision))

    def _use(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self._space = self._client.space(offer_of(fingerprint, self._mark))

    def connect(self, deadline_ms: int) -> None:
        """Connects if it is not yet. A space is offered later, when the weights may be known."""
        self._client.connection(deadline_ms)

    def reset(self) -> None:
        """From now on nothing that was stored before is found."""
        with self._lock:
            self._weights = None
            identity = self._fingerprint.identity
            identity = dataclasses.replace(
                identity, weights_revision=None, weight_epoch=identity.weight_epoch + 1
            )
            self._use(dataclasses.replace(self._fingerprint, identity=identity))
            log.warning(
                "kvstore: the engine has reset its caches, so its weights may be others: what is "
                "stored from now on is for this engine alone"
            )

    def close(self) -> None:
        """Ends the session with the daemon."""
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()
        self._client.close()


def changed_files(source: Path, since_ns: int) -> Sequence[str]:
    """Names of weight files whose content or name changed after `since_ns` (of the wall clock), as
    their inodes' change time tells; the folder itself if it cannot be read.
    """
    try:
        return [path.name for path in weight_files(source) if path.stat().st_ctime_ns > since_ns]
    except (OSError, WeightsError):
        return [str(source)]


def doubt_of(folder: Path) -> str:
    """Why the files in the folder may not be the weights that this engine has loaded; "" if
    nothing speaks against it.
    """
    changed = changed_files(folder, process_start_ns())
    if not changed:
        return ""
    return f"{', '.join(changed)} changed after the engine had begun to start"


def process_start_ns() -> int:
    """When this process began, on the wall clock of now; good to a few hundredths of a second."""
    # The command's name may hold anything, a closing bracket included.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return time.time_ns() - int(age_s * 1e9)
