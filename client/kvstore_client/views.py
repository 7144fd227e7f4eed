"""Blocks looked at in place, without a copy: `with space.view(keys) as views: ...`

The lease has no deadline; it ends with the block of `with`, or with this process. Until then the
daemon keeps the blocks where they are, and counts their bytes. The arrays are read-only; writing to
their memory by other means (a torch tensor over it) kills the process.
"""

from __future__ import annotations

from kvstore.model.reasons import Reason
from kvstore_client.arrays import Bytes
from kvstore_client.reads import ViewLease
from kvstore_client.steps import (
    Release,
)

__all__ = ["Views"]


class Views:
    """What a view gives. Not for several threads.

    blocks: the leading run. arrays: read-only uint8 [block_bytes] each, empty after the end.
    reason: OK if that is all that was asked for, else why it ends.
    """

    def __init__(
        self, lease: ViewLease | None, release: Release | None, reason: Reason, detail: str = ""
    ) -> None:
        self.reason = reason
        self.detail = detail
        self.arrays: list[Bytes] = [] if lease is None else lease.arrays
        self.blocks = len(self.arrays)
        self._release = release
        self._lease = lease
        self._valid_at_end: bool | None = None

    @property
    def valid(self) -> bool:
        """Whether everything that was read until now was right. Looked at by the caller *after* its
        work: False when the daemon ended or gave the memory to other blocks, and then all of it has
        to be thrown away. Fixed at the end of `with`.
        """
        if self._valid_at_end is not None:
            return self._valid_at_end
        return self._lease is None or self._lease.unchanged()

    def end(self) -> None:
        """What the end of `with` does. Idempotent."""
        if self._valid_at_end is not None:
            return
        self._valid_at_end = self.valid
        self.arrays = []
        lease, self._lease = self._lease, None
        if lease is not None and lease.lease_id and self._release is not None:
            self._release(lease.session, lease.lease_id, None)

    def __del__(self) -> None:
        # Of a call that was cancelled when it had just got its lease.
        if getattr(self, "_lease", None) is not None:
            self.end()
