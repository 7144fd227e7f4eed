"""What the daemon changes about its own process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore_server import process


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@pytest.mark.parametrize(("limit", "regions"), [(64, 16), (128, 32), (256, 64), (4_096, 64)])
def test_regions_take_at_most_half_of_the_descriptors(limit: int, regions: int) -> None:
    with descriptors(limit):
        share = process.region_share(1 / 64)
    assert round(1 / share) == regions
    assert 2 * regions <= limit // 2


def test_reads_over_the_fd_socket_want_descriptors_too() -> None:
    wanted = 2 * 16 + 5 * 10 + 64 + process.OWN_DESCRIPTORS
    with descriptors(wanted):
        assert process.why_few_descriptors(16, 10, 64) == ""
    with descriptors(wanted - 1):
        assert f"may need {wanted}" in process.why_few_descriptors(16, 10, 64)
