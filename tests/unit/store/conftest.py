"""Fixtures of the shell's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.store.stand import Stand


@pytest.fixture
def stand() -> Iterator[Stand]:
    with Stand() as stand:
        yield stand
