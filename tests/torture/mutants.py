"""Planted bugs, to prove that the torture finds what it is there to find.

The product has none of them: a mutant is planted into a process of the torture, by replacing a
function of the product in it. `python -m tests.torture.mutants` runs, for each, the stages that
should catch it, and writes build/torture-mutants.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

VARIABLE = "TORTURE_MUTANT"


@dataclass(frozen=True)
class Mutant:
    """A bug. caught_by: letters of the stages that must find it."""

    name: str
    what: str
    plant: Callable[[], None]
    caught_by: tuple[str, ...]


MUTANTS: tuple[Mutant, ...] = ()


def plant(name: str) -> None:
    """Plants a bug into this process, for good. "": none. KeyError: there is no such mutant."""
    if name:
        {mutant.name: mutant for mutant in MUTANTS}[name].plant()
