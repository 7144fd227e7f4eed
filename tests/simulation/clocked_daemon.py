"""`python -m tests.simulation.clocked_daemon serve ...` is `kvstored serve ...` on a clock that a
test drives over a socket (CLOCK_SOCKET): nothing is due, saved or tried again by itself.

A line with a number of nanoseconds sets the clock, has everything done that is due then, and is
answered with a line once nothing moves any more. An empty line only waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from kvstore.config import Settings, load, parse_flags
from kvstore.testing.clock import ManualClock
from kvstore_server import app, logs, process
from kvstore_server.ready import Announcer

VARIABLE = "CLOCK_SOCKET"
QUIET_TURNS = 3
"""Turns of the loop with nothing under way: what a thread has said last is heard by then."""
POLL_S = 0.0002


class ClockedApp(app.App):
    """A daemon whose time is told."""

    def __init__(self, settings: Settings, announcer: Announcer) -> None:
        self._manual = ManualClock(now_ns=0)
        super().__init__(settings, announcer, self._manual)

    async def _main_loop(self) -> None:
        server = await asyncio.start_unix_server(self._driven, os.environ[VARIABLE])
        async with server:
            await self._stop.wait()

    async def _driven(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.strip():
                now_ns = int(line)
                self._manual.advance_ns(now_ns - self._manual.monotonic_ns())
                self._store.tick()
            await self._quiet()
            writer.write(b"done\n")
            await writer.drain()
        writer.close()

    async def _quiet(self) -> None:
        turns = 0
        while turns < QUIET_TURNS and not self._stop.is_set():
            turns = 0 if self._store.busy or self._is_short() else turns + 1
            if turns:
                await asyncio.sleep(0)
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), POLL_S)

    def _is_short(self) -> bool:
        """Whether the disk tier is about to make files for what comes next."""
        volume = None if self._parts.disk is None else self._parts.disk.volume
        if volume is None:
            return False
        with volume.books:
            return volume.ring.is_short()


def main() -> None:
    process.end_at_once_when_told()
    arguments = [one for one in sys.argv[1:] if one != "serve"]
    settings = load(None, os.environ, parse_flags(arguments))
    logs.configure(settings.server.log_level, settings.server.log_format)
    process.harden()
    raise SystemExit(app.serve(settings, Announcer(os.environ, None), ClockedApp))


if __name__ == "__main__":
    main()
