"""A ring whose records also go elsewhere, as the settings say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.model.record import Record, Ring


class Sink(Protocol):
    """Takes every record, on the event loop's thread: never blocks, never fails."""

    def append(self, record: Record) -> None:
        """One request has ended."""


class SinkRing(Ring):
    """See the module's docstring."""

    __slots__ = ("_sinks",)

    def __init__(self, records_max: int, sinks: Sequence[Sink]) -> None:
        super().__init__(records_max)
        self._sinks = tuple(sinks)

    def append(self, record: Record) -> None:
        super().append(record)
        for sink in self._sinks:
            sink.append(record)
