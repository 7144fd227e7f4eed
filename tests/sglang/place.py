"""Where SGLang is unpacked for these tests, and how it is imported without a GPU."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "HERE", "PINS", "PLACE", "importable", "installed"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / "build" / "sglang"
PINS = ROOT / "constraints" / "sglang.txt"
PLACE = FOLDER / "installed.txt"
ABSENT = frozenset({"sgl_kernel", "torchvision", "triton"})
"""Kernels, and what only images need. SGLang imports them; nothing that is tested calls them."""


def installed() -> bool:
    """Whether the folder has what is pinned now."""
    return PLACE.is_file() and PLACE.read_text() == PINS.read_text()


class _Nothing:
    """An attribute of a module that is not there: a decorator that does nothing, a base class, a
    value that is never looked at."""

    def __init__(self, *args: Any, **more: Any) -> None: ...

    def __call__(self, *args: Any, **more: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not more
        return args[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __getitem__(self, index: Any) -> Any:
        return self


class _Empty(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, as importlib sees it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing if name[0].isupper() else _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def importable() -> None:
    """Makes `import sglang` work here. What asks whether those packages exist is asked before they
    seem to: torch and transformers are left as they are.
    """
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        # Behind everything else: the environment's own packages come first.
        sys.path.append(str(FOLDER))
