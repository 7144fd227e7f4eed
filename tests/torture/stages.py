"""All stages, in the order in which they run."""

from __future__ import annotations

import importlib
import importlib.util

from tests.torture.base import Stage

_PLACES: tuple[tuple[str, str, str], ...] = (
    ("A", "kill_loop", "KillLoop"),
    ("B", "kill_points", "KillPoints"),
    ("C", "power_loss", "PowerLoss"),
    ("D", "full_disk", "FullDisk"),
    ("E", "device_faults", "DeviceFaults"),
    ("F1", "malformed", "Malformed"),
    ("F2", "damaged_files", "DamagedFiles"),
    ("G", "stateful", "Stateful"),
    ("H", "connections", "Connections"),
    ("I", "schedules", "Schedules"),
    ("J", "mini_soak", "MiniSoak"),
    ("K", "gates", "Gates"),
    ("L", "books", "Books"),
)
"""Letter, module in this package, class."""


def load() -> dict[str, Stage]:
    """Stages by letter."""
    found: dict[str, Stage] = {}
    for letter, module, name in _PLACES:
        if importlib.util.find_spec(f"tests.torture.{module}") is None:
            continue
        stage: Stage = getattr(importlib.import_module(f"tests.torture.{module}"), name)()
        found[letter] = stage
    return found
