"""What holds for every test: marks that need something skip without it, and nothing is unpickled.

Hypothesis is deterministic by default, so that two runs of one commit agree; a failure prints the
blob that reproduces it. `--hypothesis-profile=explore` searches afresh.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("repeatable")

_ROOT = Path(__file__).resolve().parent.parent
_PRODUCT = tuple(
    str(_ROOT / folder) + os.sep
    for folder in ("kvstore", "server/kvstore_server", "client/kvstore_client")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what the machine cannot run, with the reason."""
    absent = {name: why for name, why in _absences(items) if why is not None}
    for item in items:
        for name, why in absent.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=why))


def _absences(items: list[pytest.Item]) -> Generator[tuple[str, str | None]]:
    torch_absent = importlib.util.find_spec("torch") is None
    yield "torch", "torch is not installed" if torch_absent else None
    yield "root", "not root" if os.geteuid() != 0 else None
    if any(item.get_closest_marker("gpu") is not None for item in items):
        yield "gpu", _why_no_gpu(torch_absent)


def _why_no_gpu(torch_absent: bool) -> str | None:
    if torch_absent:
        return "torch is not installed"
    import torch  # only where a test asks for it: loading it takes seconds

    return None if torch.cuda.is_available() else "no CUDA device"


class _UnpickleWatch:
    """Notes every class that an unpickler looks up below a frame of the product's own code.

    An audit hook cannot be removed, so one is installed for the whole run. It only notes: raising
    there would be swallowed by the very fail-open code that the tests exercise.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != "pickle.find_class":
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(_PRODUCT):
                name = ".".join(map(str, arguments))
                self.seen.append(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")
                return
            frame = frame.f_back


_watch = _UnpickleWatch()
sys.addaudithook(_watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fails a test in which the product unpickled; torch itself may, so its tests are exempt."""
    _watch.seen.clear()
    outcome = yield
    if _watch.seen and item.get_closest_marker("torch") is None:
        pytest.fail("nothing may be unpickled, but: " + "; ".join(_watch.seen), pytrace=False)
    return outcome
