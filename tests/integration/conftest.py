"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon import daemons
from tests.integration.stack import Stack, stacks
from tests.rawclient import RawClient

__all__ = ["daemons"]


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    with stacks(tmp_path) as make:
        yield make


@pytest.fixture
def stack(make_stack: Callable[..., Stack]) -> Stack:
    return make_stack()


@pytest.fixture
def client(stack: Stack) -> Iterator[RawClient]:
    with RawClient(stack.socket()) as client:
        yield client
